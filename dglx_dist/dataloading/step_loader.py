"""Base class for all loaders: epochs, equal steps on all ranks, shuffling, prefetch, resume."""

from __future__ import annotations

import logging
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dglx_dist.comm.collectives import check_replicas, gather_int64
from dglx_dist.comm.devices import check_device, copy_async, open_copy_stream, resolve_device
from dglx_dist.comm.session import Session, check_values_equal, warn_user
from dglx_dist.comm.trace import COMPUTE, LOADER, WAIT, Pass
from dglx_dist.dataloading.feature_fetch import NO_CLAIMED_ROWS, ClaimedRows, check_float, look_ahead
from dglx_dist.dataloading.sampler_spec import refuse_by_name
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.graph.partition_book import Ids
from dglx_dist.graph.sampling import group_by_type
from dglx_dist.internals.message_passing import is_on_torch_path
from dglx_dist.keyed_random import hash_ids, stream_key
from dglx_dist.options import at_least, check_integer, check_names, check_ranges, option
from dglx_dist.records import Array, StepShare

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


def run_ahead(
    make: Callable[[R], T], steps: Iterable[R], *, depth: int, num_threads: int
) -> Generator[T, None, None]:
    """Yield ``make(step)`` for each step in order, and run it ahead on threads.

    If a step fails, its error is raised instead of its result. Closing the iterator cancels the steps that
    wait.

    Args:
        depth: Maximum number of steps that run ahead of the consumer.
        num_threads: Number of threads for ``make``. With 0, it runs on the consumer's thread.
    """
    if num_threads == 0:
        yield from map(make, steps)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dglx-loader")
    started: deque[Future[T]] = deque()
    try:
        remaining = iter(steps)
        started.extend(pool.submit(make, step) for step in islice(remaining, depth))
        while started:
            result = started.popleft().result()
            # Submit the next step after the wait, so that at most `depth` results exist beside this one.
            started.extend(pool.submit(make, step) for step in islice(remaining, 1))
            yield result
            del result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


K = TypeVar("K")

_SHUFFLE = -1
"""Hop number in shuffle keys for the first type. Each further type has the next lower number."""


@dataclass(frozen=True, kw_only=True)
class Items(Generic[K]):
    """This rank's ids by type. Positions count through all ids, type by type."""

    ids: Mapping[K, Array]
    """(n_t,) int64 distinct ids for every type, with types in the graph's order. n_t may be 0."""
    times: Mapping[K, Array] | None = None
    """(n_t,) int64 time key for each id, if the loader samples by time. Ids may then be repeated."""

    def __len__(self) -> int:
        return sum(len(ids) for ids in self.ids.values())

    def order(self, *, shuffle: bool, seed: int, epoch: int) -> Array:
        """Return the (n,) positions in visiting order for ``epoch``. Shuffling sorts by a keyed hash."""
        if not shuffle:
            return np.arange(len(self))
        keys = []
        for type_index, type_name in enumerate(self.ids):
            stream = stream_key(seed, epoch, _SHUFFLE - type_index)
            keys.append(self._hash(type_name, stream))
        return np.argsort(np.concatenate(keys), kind="stable")

    def take(self, positions: Array) -> dict[K, Array]:
        """Return the ids at (k,) ``positions`` by type, in the order of the positions.

        With times, each array has two rows, the ids and the times. :func:`split_times` separates them.
        """
        items = {}
        first = 0
        for type_name, ids in self.ids.items():
            end = first + len(ids)
            indices = positions
            if len(self.ids) > 1:
                is_of_type = (positions >= first) & (positions < end)
                indices = positions[is_of_type] - first

            items[type_name] = ids[indices]
            if self.times is not None:
                items[type_name] = np.stack([ids[indices], self.times[type_name][indices]])
            first = end
        return items

    def digest(self) -> int:
        """Return a 64-bit hash of the ids, which does not depend on their order."""
        digest = np.uint64(0)
        for type_index, type_name in enumerate(self.ids):
            hashes = self._hash(type_name, stream_key(0, 0, type_index))
            digest ^= np.bitwise_xor.reduce(hashes, initial=np.uint64(0))
        return int(digest.view(np.int64))

    def _hash(self, type_name: K, stream: np.uint64) -> Array:
        hashes = hash_ids(self.ids[type_name], stream)
        if self.times is None:
            return hashes
        return hash_ids(hashes.view(np.int64) ^ self.times[type_name], stream)


def split_times(items: Mapping[K, Array]) -> tuple[dict[K, Array], dict[K, Array]]:
    """Separate ids and times in a result from :meth:`Items.take`. Without times, the second is empty."""
    ids = {key: array if array.ndim == 1 else array[0] for key, array in items.items()}
    return ids, {key: array[1] for key, array in items.items() if array.ndim > 1}


def _check_distinct(ids_by_type: Mapping[Any, Array], what: str) -> None:
    """Raise ConfigError if an id occurs twice within a type."""
    for key, ids in ids_by_type.items():
        distinct, uses = np.unique(ids, return_counts=True)
        if len(distinct) != len(ids):
            raise ConfigError(
                f"indices of type {key!r} contain {what} {distinct[uses > 1][0]} more than "
                f"once ({len(ids)} ids, {len(distinct)} distinct), but an epoch uses each "
                f"{what} once. Pass torch.unique(indices)."
            )


def read_items(
    indices: Ids | Mapping[Any, Ids], counts: Mapping[K, int], what: str, *, is_distinct: bool = True
) -> Items[K]:
    """Check the ids that a loader is given.

    Args:
        indices: (K,) ids or a mask if the graph has one type. Otherwise a dict from type to ids or a mask,
            where an edge type is a triple or a relation's name.
        counts: Node or edge count for every type, in the graph's order.
        what: ``node`` or ``edge``, for messages.
        is_distinct: Whether ids must be distinct.

    Raises:
        ConfigError: a type is unknown or ambiguous, several types need a dict, or an id is repeated.
        IndexError: an id is out of range.
    """
    refuse_by_name(indices)
    ids_by_type = group_by_type(indices, counts, what)
    if is_distinct:
        _check_distinct(ids_by_type, what)

    # Copy the ids, because the caller may modify its array while threads read.
    no_ids = np.empty(0, np.int64)
    return Items(ids={key: ids_by_type.get(key, no_ids).copy() for key in counts})


_DEVICE_HINT = "the loader moves batches to device="
_IGNORED_OPTIONS = {
    "use_uva": "the threads of the loader read features on the CPU; see g.cache_rows(device=)",
    "use_ddp": "pass each rank its own indices: dx.node_split(mask)",
    "num_workers": "the loader uses threads; see num_threads=",
    "persistent_workers": "there are no worker processes",
    "use_prefetch_thread": "the loader always prefetches depth= batches",
    **dict.fromkeys(("pin_memory", "use_alternate_streams", "pin_prefetcher"), _DEVICE_HINT),
    "gpu_cache": "g.cache_rows(name, alpha=, device='cuda') keeps rows on the device",
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of a loader."""

    batch_size: int = option(1, "Number of items per rank and step.", check=at_least(1))
    shuffle: bool = False
    """Whether each epoch has a different order, which depends only on seed, epoch, type and id."""
    drop_last: bool = False
    """Whether a rank skips its last batch if that batch is not full."""
    seed: int | None = option(
        None, "Seed of the order and of the draws. The default is the seed of the session.", check=at_least(0)
    )
    depth: int = option(
        1,
        "Number of prefetched batches, at least ``num_threads``. They take memory.",
        check=at_least(1),
    )
    num_threads: int = option(
        1, "Number of threads that make batches. With 0, the training loop makes them.", check=at_least(0)
    )
    device: torch.device | str | None = None
    """Device of the batches. The default is the device of the session."""
    exclude: Tensor | Array | Mapping[Any, Tensor | Array] | None = None
    """(X,) ids of edges that are never drawn, or a dict of them by edge type. All ranks must pass the same
    ids if servers hold parts of the graph."""
    feature_dtype: torch.dtype | None = None
    """Dtype of floating-point input and edge columns in blocks. By default, float16 and bfloat16 become
    float32, and other columns keep their dtype."""
    disjoint: bool = False
    """Whether each seed has a tree of its own, with rows of its own. Blocks then have the column ``seed_id``.
    This is always so with :class:`TemporalNeighborSampler`."""
    seed_time: Any = None
    """Times of the seeds for :class:`TemporalNeighborSampler`: one per seed, a number for all seeds, the name
    of a column, or a dict of these by type."""

    def __post_init__(self) -> None:
        check_ranges(self, "{name}={value!r}")


def read_loader_options(options: Mapping[str, Any]) -> LoaderOptions:
    """Check a loader's options. Warn about options that have an effect in DGL's loader, but not here.

    Raises ConfigError if an option is unknown, or its value is unsupported.
    """
    for name, hint in _IGNORED_OPTIONS.items():
        if options.get(name):
            warn_user(f"{name}={options[name]} has no effect: {hint}")

    known_options = dict(options)
    for name in _IGNORED_OPTIONS:
        known_options.pop(name, None)
    check_names("the loader", known_options, (field.name for field in fields(LoaderOptions)))
    loader_options = LoaderOptions(**known_options)
    if loader_options.device is not None:
        check_device(loader_options.device)
    check_float(loader_options.feature_dtype)
    # Threads beyond the depth would be idle.
    return replace(loader_options, depth=max(loader_options.depth, loader_options.num_threads))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Seeds that every rank uses in each step of an epoch.

    All ranks run ``num_steps`` steps. A rank without further seeds takes part with empty batches.
    """

    batch_size: int
    """Seeds per rank and step."""
    used: tuple[int, ...]
    """(W,) seed count that each rank uses in an epoch."""
    rank: int

    @classmethod
    def from_counts(cls, counts: Sequence[int], batch_size: int, drop_last: bool, rank: int) -> Schedule:
        used = tuple(count - count % batch_size if drop_last else count for count in counts)
        return cls(batch_size=batch_size, used=used, rank=rank)

    @property
    def num_steps(self) -> int:
        """Steps per epoch. The rank with the most seeds determines this. Its last batch may be smaller."""
        # The negations round up.
        return -(-max(self.used) // self.batch_size)

    def slice_seeds(self, step: int) -> slice:
        """Return the slice of this rank's seeds for ``step``. It may be empty."""
        first = step * self.batch_size
        return slice(first, first + self._count_seeds(self.used[self.rank], step))

    def share(self, step: int) -> StepShare:
        """Return how many seeds this rank has in ``step``, and how many all ranks have together."""
        counts = [self._count_seeds(num_seeds, step) for num_seeds in self.used]
        return StepShare(num_local=counts[self.rank], num_global=sum(counts))

    def _count_seeds(self, num_seeds: int, step: int) -> int:
        return min(max(num_seeds - step * self.batch_size, 0), self.batch_size)


class Timed(Protocol):
    """A batch that records the seconds for sampling and building, and the seconds for fetching columns."""

    @property
    def sample_s(self) -> float: ...
    @property
    def fetch_s(self) -> float: ...


B = TypeVar("B", bound=Timed)


class Stages(ABC, Generic[B]):
    """Stages that each batch passes before its delivery: sample, fetch, build, move. Thread-safe.

    A batch is a record. :meth:`sample` creates it, and the other stages fill it in.
    """

    loader: EpochLoader[B, Any]
    epoch: int
    claimed_rows: ClaimedRows = NO_CLAIMED_ROWS
    """Cache rows that are reserved for the batches. With such rows, batches must be fetched in order."""

    @abstractmethod
    def sample(self, step: int) -> B:
        """Sample the batch for ``step``.

        Raises ConfigError if a node is repeated or a user's function returned an unusable value. Raises
        PeerError if another rank is dead or silent.
        """

    def fetch(self, batch: B) -> None:
        """Request the rows that the batch needs from other ranks."""

    def build(self, batch: B) -> None:
        """Build the batch in host memory, and wait for the requested rows."""

    def move(self, batch: B, step: int) -> None:
        """Begin to copy the batch to the loader's device."""

    def complete(self, batch: B) -> B:
        self.fetch(batch)
        self.build(batch)
        return batch

    def make(self, step: int) -> B:
        """Return the batch for ``step`` in host memory."""
        return self.complete(self.sample(step))

    def make_on_device(self, step: int) -> B:
        """Return the batch for ``step`` on the loader's device. An error stops all other batches."""
        try:
            batch = self.make(step)
            self.move(batch, step)
        except BaseException as error:
            self.fail(error)
            raise
        return batch

    def fail(self, error: BaseException) -> None:
        """Stop the stages for all other batches, because one batch failed with ``error``."""

    def close(self) -> None:
        """Release resources when the iteration ends."""

    def span(self, name: str, step: int) -> AbstractContextManager[None]:
        """Record how long a ``with`` block takes, as a span of the batch for ``step``."""
        return self.loader.span(name, self.epoch, step)


class Maker(Stages[B], Generic[K, B]):
    """Stages for a loader that batches items. Every epoch uses a copy of the loader's maker."""

    get_items: Callable[[int], Mapping[K, Any]]
    loader: StepLoader[K, B, Any]

    def begin(
        self, loader: StepLoader[K, B, Any], epoch: int, steps: Callable[[], Iterator[int]]
    ) -> Maker[K, B]:
        stages = copy(self)
        stages.loader = loader
        stages.epoch = epoch
        stages.get_items = loader.order_items(epoch)
        return stages

    @abstractmethod
    def sample_items(self, items: Mapping[K, Any], epoch: int, *, step: int) -> B:
        """Sample the batch for ``items``, a mapping from type to (n,) int64 distinct ids. n may be 0."""

    def sample(self, step: int) -> B:
        return self.sample_items(self.get_items(step), self.epoch, step=step)

    def make(self, step: int) -> B:
        with self.span("sample", step):
            return super().make(step)

    def claim(self) -> None:
        """Reserve cache rows for the batches. From then on, batches must be fetched in order."""

    def move(self, batch: B, step: int) -> None:
        loader = self.loader
        record = cast("Any", batch)
        if not loader.moves_batches:
            return

        begin = time.perf_counter()
        move_record = partial(record.move, loader.device)
        with self.span("copy to the device", step):
            _, record.arrive = copy_async(loader.copies, loader.device, move_record)
        record.fetch_s += time.perf_counter() - begin

    @abstractmethod
    def deliver(self, batch: B, share: StepShare) -> Any:
        """Return the batch for the consumer, stamped with ``share``. Runs on the consumer's thread."""

    @abstractmethod
    def offline(self) -> Maker[K, B]:
        """Return a maker that builds any rank's batches, without columns or requests to other servers.

        Raises ConfigError if draws need another server, or do not depend only on seed, epoch, step and ids.
        """

    def sampling_signature(self) -> str:
        """Return a string that is equal on ranks with equal draws, or "" if draws cannot be repeated."""
        return ""


@dataclass(frozen=True, kw_only=True)
class LoaderTimes:
    """Seconds since the last reset, summed over the yielded batches."""

    sample_s: float = 0.0
    """Seconds for sampling and block building, including local features if the sampler fetches them."""
    fetch_s: float = 0.0
    """Seconds for fetching columns and starting copies to a device."""
    wait_s: float = 0.0
    """Seconds that the consumer waited."""


WRAPPED_MODELS: WeakSet[nn.Module] = WeakSet()
"""Models in this process that train together with the other ranks."""
_CHECKED_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()
"""Optimizers that are known to train a wrapped model."""


def refuse_unwrapped(optimizer: Optimizer, *_: object) -> None:
    """Raise ConfigError if ``optimizer`` trains parameters outside wrapped models."""
    if optimizer in _CHECKED_OPTIMIZERS:
        return

    # Parameters are compared by identity, because tensors compare by value.
    trained = {id(parameter) for parameter in _list_parameters(optimizer) if parameter.grad is not None}
    if not trained:
        return

    unwrapped = set(trained)
    for model in WRAPPED_MODELS:
        unwrapped.difference_update(map(id, model.parameters()))
    if unwrapped:
        raise ConfigError(
            f"{type(optimizer).__name__} trains {len(unwrapped)} parameters that belong to no "
            "wrapped model, so every rank would train its own copy. Put them into one module "
            "and call model = dx.wrap(model, g) (not DistributedDataParallel), then build the "
            "optimizer from model.parameters()."
        )
    _CHECKED_OPTIMIZERS.add(optimizer)


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


STEPS_BETWEEN_CHECKS = 32
"""Minimum number of steps until the ranks compare their replicated weights again."""
EARLY_CHECKS = (2, 4, 8, 16)
"""Optimizer steps that also compare the weights, so that short loops are checked."""
_NUM_STEPS_TAKEN: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


class StepCheck:
    """Hook on optimizer steps during an iteration. It refuses unwrapped models and ranks that train apart."""

    def __init__(self, session: Session, *, compares_weights: bool) -> None:
        self._session = session
        self._compares_weights = compares_weights
        self._compared: list[Optimizer] = []

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        refuse_unwrapped(optimizer)
        step_number = _NUM_STEPS_TAKEN.get(optimizer, 0) + 1
        _NUM_STEPS_TAKEN[optimizer] = step_number

        # In an iteration that compares weights, each optimizer's first step does it.
        is_first = self._compares_weights and not any(optimizer is other for other in self._compared)
        if is_first:
            self._compared.append(optimizer)
        if is_first or step_number in EARLY_CHECKS:
            check_replicas(_find_replicated(optimizer), self._session)


def _find_replicated(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the replicated weights that ``optimizer`` trains, by name.

    If two wrapped models have a weight with the same name, the second weight's name ends with its position in
    the optimizer.
    """
    names: dict[int, str] = {}
    model: Any
    for model in WRAPPED_MODELS:
        module = getattr(model, "module", None)
        if module is None:
            continue  # Wrapping has failed, and the wrapper is not freed yet.
        parameters = dict(module.named_parameters())
        names |= {id(parameters[name]): name for name in model.parts.replicated}

    weights: dict[str, Tensor] = {}
    for index, parameter in enumerate(_list_parameters(optimizer)):
        name_of_parameter = names.get(id(parameter))
        if name_of_parameter is None:
            continue
        if name_of_parameter in weights:
            name_of_parameter = f"{name_of_parameter} ({index})"
        weights[name_of_parameter] = parameter
    return weights


class EpochLoader(ABC, Generic[B, T]):
    """Yields the batches in an epoch, which threads prefetch. Each iteration is the next epoch.

    Args:
        seed: Seed for all draws.
        depth: Number of batches to prefetch.
        num_threads: Number of threads that make batches. With 0, the consumer's thread makes them.
    """

    checks_training = True
    """Whether an optimizer step on a model that is not wrapped raises an error during iteration."""

    def __init__(self, session: Session, *, seed: int, depth: int, num_threads: int) -> None:
        self._session = session
        self.seed = seed
        self.depth = depth
        self.num_threads = num_threads
        self._epoch = 0
        self._next_step = 0
        self._has_started = False
        self._end_step: int | None = None
        self.first_number = 0
        """Number of the first step. Step numbers key dropout. Change this if each epoch has a new loader."""
        self.mark: Callable[[Any], Any] | None = None
        """Function that replaces the first batch by one with marked ids. It runs once."""
        self.convert: Callable[[Any], Any] | None = None
        """Function that replaces each batch by one for another library."""
        self._times = LoaderTimes()
        self._waited_s = 0.0
        self._running_epoch: weakref.ref[Generator[T, None, None]] | None = None
        self._trace_id = 0 if session.trace is None else session.trace.new_loader()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps per epoch, the same on every rank."""

    @abstractmethod
    def open_stages(self, epoch: int, steps: Callable[[], Iterator[int]]) -> Stages[B]:
        """Return the stages for ``steps`` in ``epoch``. Every iteration calls this first."""

    @abstractmethod
    def deliver(self, step: int, batch: B) -> T:
        """Return the batch for the consumer, on its device. Sets the session's share for the step."""

    def span(self, name: str, epoch: int, step: int, row: str = LOADER) -> AbstractContextManager[None]:
        """Record how long a ``with`` block takes, as a span of a batch, if a trace is on."""
        timeline = self._session.timeline
        return timeline.span(name, row, epoch * len(self) + step) if timeline.on else nullcontext()

    def check_end(self) -> None:
        """Raise ConfigError if the loop has misused the last batch in an epoch."""

    def wrap_batches(self, batches: Iterator[B]) -> Iterator[B]:
        """Return the prefetched batches. A subclass can look at the next batch here."""
        return batches

    @property
    def epoch(self) -> int:
        """The current iteration's epoch, or the next one if none is running."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. If a position within ``epoch`` was loaded, the loader resumes from it."""
        if epoch != self._epoch or self._has_started:
            self._epoch = check_integer("epoch", epoch, least=0)
            self._next_step = 0
            self._has_started = False

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values. Inside the loop body, the current step counts as done."""
        return {"epoch": self._epoch, "step": self._next_step, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after the position ``state``. The next iteration yields the epoch's remaining batches.

        Raises CheckpointError if ``state`` comes from a loader with another seed or step count.
        """
        check_position(state, self.seed, len(self))
        self._epoch = int(state["epoch"])
        self._next_step = int(state["step"])
        self._has_started = False

    def end_at(self, step: int | None) -> None:
        """End the current or next iteration after ``step`` steps in its epoch.

        The iteration after that continues the epoch. With None, iterations end with the epoch. Every rank
        must call this with the same value.
        """
        self._end_step = step

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return the seconds since the start or the last reset."""
        times = self._times
        if reset:
            self._times = LoaderTimes()
        return times

    def close(self) -> None:
        """End the running iteration and its threads."""
        iterator = None if self._running_epoch is None else self._running_epoch()
        if iterator is not None:
            iterator.close()

    def __iter__(self) -> Iterator[T]:
        """Yield the batches that remain in the current epoch. Breaking out of the loop ends the epoch."""
        iterator = self._iterate()
        self._running_epoch = weakref.ref(iterator)
        return iterator

    def _iterate(self) -> Generator[T, None, None]:
        """Yield the batches that remain in the epoch.

        If the previous loop was left early, this function begins the next epoch. With several ranks, every
        optimizer step in the loop body is checked. A complete pass over an epoch is reported to the trace.
        """
        # The flag is still set if the loop body has left the previous iteration by break or an error.
        if self._has_started:
            self._epoch += 1
            self._next_step = 0
        self._has_started = True
        epoch = self._epoch
        first_step = self._next_step
        begin_s = time.perf_counter()
        waited_before_s = self._waited_s

        handle = None
        if self.checks_training and self._session.topology.world_size > 1:
            # Weights are compared once per iteration, but short epochs skip some comparisons.
            epochs_between_checks = math.ceil(STEPS_BETWEEN_CHECKS / max(len(self), 1))
            compares_weights = epoch % epochs_between_checks == 0
            check = StepCheck(self._session, compares_weights=compares_weights)
            handle = register_optimizer_step_pre_hook(check)

        try:
            with closing(self._prefetch(epoch)) as batches:
                stream = self.wrap_batches(batches)
                for step in self._iterate_steps():
                    batch = self._replace(self._deliver_next(step, stream))
                    yield batch
                    # Release the batch before the next one is awaited, to save memory.
                    del batch
        finally:
            if handle is not None:
                handle.remove()
            # A step after the loop does not belong to the last batch, so it must not get that batch's weight.
            self._session.step_share = None
            self._end_step = None

        # From here on, the loop has not been left early. It may have ended in the middle of the epoch.
        self._has_started = False
        if self._next_step < len(self):
            return

        if first_step == 0 and self._session.trace is not None:
            seconds = time.perf_counter() - begin_s
            wait_s = self._waited_s - waited_before_s
            epoch_pass = Pass(loader=self._trace_id, steps=len(self), seconds=seconds, wait_s=wait_s)
            self._session.trace.note_pass(epoch_pass)
        self._epoch = epoch + 1
        self._next_step = 0
        self.check_end()

    def _replace(self, batch: Any) -> Any:
        """Return the batch that the loop body gets in place of ``batch``."""
        if self.mark is not None:
            batch = self.mark(batch)
            self.mark = None
        return batch if self.convert is None else self.convert(batch)

    def _prefetch(self, epoch: int) -> Generator[B, None, None]:
        """Yield the batches that remain in ``epoch``. Threads prepare them ahead of the consumer."""
        stages = self.open_stages(epoch, self._iterate_steps)
        make = stages.make_on_device
        depth = self.depth
        num_threads = self.num_threads
        try:
            if stages.claimed_rows:
                yield from self._prefetch_in_order(stages)
            else:
                yield from run_ahead(make, self._iterate_steps(), depth=depth, num_threads=num_threads)
        finally:
            stages.close()

    def _prefetch_in_order(self, stages: Stages[B]) -> Generator[B, None, None]:
        """Yield batches in order, for stages that reserve rows in a cache.

        Several threads sample batches. But each batch changes the cached rows that the next batch finds.
        Therefore, rows are fetched and batches are built one after the other.
        """

        def sample(step: int) -> B:
            with stages.span("sample", step):
                return stages.sample(step)

        depth = self.depth
        num_threads = self.num_threads
        steps = self._iterate_steps()
        samples: Any = run_ahead(sample, steps, depth=depth, num_threads=num_threads)
        fetched_batches = look_ahead(samples, stages.claimed_rows, stages.fetch)
        with closing(samples), closing(fetched_batches):

            def build_next(step: int) -> B:
                # Batches are yielded in step order, so the next one is the batch for `step`.
                batch = next(fetched_batches)
                stages.build(batch)
                stages.move(batch, step)
                return batch

            # With 0 threads, the consumer's thread builds the batches.
            num_builders = min(1, num_threads)
            steps = self._iterate_steps()
            yield from run_ahead(build_next, steps, depth=depth, num_threads=num_builders)

    def _iterate_steps(self) -> Iterator[int]:
        # Read the end at each step, because the training loop may call end_at() between steps.
        step = self._next_step
        while step < len(self) and (self._end_step is None or step < self._end_step):
            yield step
            step += 1

    def _deliver_next(self, step: int, batches: Iterator[B]) -> T:
        """Wait for the batch for ``step``, deliver it, and add its times to the totals.

        A checkpoint that is saved after this call continues with the step after ``step``.
        """
        begin = time.perf_counter()
        with self.span(f"{WAIT} for a batch", self._epoch, step, row=COMPUTE):
            batch = next(batches)

        # Read the times first, because a delivered batch may have another class.
        sample_s = batch.sample_s
        fetch_s = batch.fetch_s
        delivered = self.deliver(step, batch)
        self._next_step = step + 1

        step_wait_s = time.perf_counter() - begin
        self._waited_s += step_wait_s
        self._times = LoaderTimes(
            sample_s=self._times.sample_s + sample_s,
            fetch_s=self._times.fetch_s + fetch_s,
            wait_s=self._times.wait_s + step_wait_s,
        )
        return delivered


class StepLoader(EpochLoader[B, T], Generic[K, B, T]):
    """Yields batches from this rank's items, in the same number of steps on every rank.

    The constructor is collective, and iteration is not. A rank that has run out of ``items`` gets empty
    batches. Raises ConfigError if the ranks differ in ``batch_size`` or ``drop_last``, and PeerError if a
    rank did not take part.
    """

    def __init__(self, session: Session, items: Items[K], options: LoaderOptions, maker: Maker[K, B]) -> None:
        self.items = items
        self._options = options
        self._maker = maker
        self.device = resolve_device(options.device, session.device)
        # DGL does not say which tensors a copy to the GPU fills, so its graphs are moved without a stream.
        self.copies = open_copy_stream(self.device) if is_on_torch_path(self.device) else None
        self.moves_batches = self.device.type != "cpu" or is_on_torch_path(self.device)
        """Whether batches are moved after they are built, to another device or to graphs for plain torch."""
        counts = _gather_item_counts(items, options, session)
        rank = session.topology.rank
        batch_size = int(options.batch_size)
        self._schedule = Schedule.from_counts(counts, batch_size, options.drop_last, rank)

        seed = resolve_seed(options, session)
        super().__init__(session, seed=seed, depth=options.depth, num_threads=options.num_threads)

    def __len__(self) -> int:
        return self._schedule.num_steps

    @property
    def num_epoch_targets(self) -> tuple[int, int]:
        """Targets per epoch, as (count on this rank, count on all ranks)."""
        used = self._schedule.used
        return used[self._schedule.rank], sum(used)

    def offline(self) -> Callable[[Mapping[K, Any], int, int], B]:
        """Return a thread-safe function from (items, epoch, step) to a batch of any rank."""
        maker = self._maker.offline()
        return lambda items, epoch, step: maker.complete(maker.sample_items(items, epoch, step=step))

    def sampling_signature(self) -> str:
        """Return a string that is equal on ranks with equal draws."""
        batch_size = self._options.batch_size
        shuffle = bool(self._options.shuffle)
        drop_last = bool(self._options.drop_last)
        order_options = f"batch_size={batch_size}, shuffle={shuffle}, drop_last={drop_last}"
        return f"seed={self.seed}, {order_options}, {self._maker.sampling_signature()}"

    def order_items(
        self, epoch: int, items: Items[K] | None = None, rank: int | None = None
    ) -> Callable[[int], dict[K, Any]]:
        """Return a function from a step to a rank's items in this step. The default is this rank."""
        rank_items = self.items if items is None else items
        schedule = self._schedule if rank is None else replace(self._schedule, rank=rank)
        order = rank_items.order(shuffle=self._options.shuffle, seed=self.seed, epoch=epoch)
        return lambda step: rank_items.take(order[schedule.slice_seeds(step)])

    def open_stages(
        self, epoch: int, steps: Callable[[], Iterator[int]], *, claims: bool = True
    ) -> Maker[K, B]:
        stages = self._maker.begin(self, epoch, steps)
        if claims:
            stages.claim()
        return stages

    def deliver(self, step: int, batch: B) -> T:
        step_number = self.first_number + self._epoch * len(self) + step
        share = replace(self._schedule.share(step), step_number=step_number)
        self._session.step_share = share
        delivered: T = self._maker.deliver(batch, share)
        return delivered


def check_position(state: Mapping[str, int], seed: int, num_steps: int) -> None:
    """Raise CheckpointError if ``state`` comes from a loader with another seed or step count."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{state!r} is not a position of a loader. Pass the result of state_dict().")
    for name in ("epoch", "step", "seed"):
        try:
            check_integer(name, state.get(name), least=0)
        except ConfigError as error:
            raise CheckpointError(f"this is not a position of a loader: {error}") from None
    if state["seed"] != seed:
        raise CheckpointError(
            f"the position was saved by a loader with seed {state['seed']}, but this loader "
            f"has seed {seed}. Pass seed={state['seed']}."
        )
    if state["step"] > num_steps:
        raise CheckpointError(
            f"the position is step {state['step']}, but an epoch of this loader has "
            f"{num_steps} steps. Use the same dataset, batch_size and number of ranks."
        )


def resolve_seed(options: LoaderOptions, session: Session) -> int:
    return session.seed if options.seed is None else int(options.seed)


def gather_counts(counts: Sequence[int], batch_size: int, drop_last: bool, session: Session) -> Array:
    """Return the counts that all W ranks pass, as a (W, n) int64 array in rank order.

    Every rank must call this with the same length n. Raises ConfigError if ``batch_size`` or ``drop_last``
    differs between ranks.
    """
    # The two options follow the counts, so that one message carries everything.
    rows = gather_int64([*counts, batch_size, int(drop_last)], session)
    remedy = "pass the same value on all ranks, so that they have the same number of steps"
    check_values_equal("batch_size", rows[:, -2].tolist(), remedy)
    check_values_equal("drop_last", rows[:, -1].tolist(), remedy)
    return rows[:, :-2]


def _gather_item_counts(items: Items[K], options: LoaderOptions, session: Session) -> tuple[int, ...]:
    """Return how many items each rank has. Every rank must call this.

    Warns the user if all ranks have the same items, because an epoch would then use each item several times.
    """
    count_and_digest = [len(items), items.digest() if len(items) else 0]
    rows = gather_counts(count_and_digest, int(options.batch_size), options.drop_last, session)
    if len(rows) > 1 and len(items) and bool((rows == rows[0]).all()):
        warn_user(
            f"all {len(rows)} ranks have the same {len(items)} indices, so an epoch uses each "
            f"{len(rows)} times. Use dx.node_split(mask) or dx.edge_split(mask) to give every "
            "rank its share."
        )
    return tuple(rows[:, 0].tolist())
