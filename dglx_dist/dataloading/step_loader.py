"""Base of all loaders: epochs, equal steps on all ranks, shuffling, prefetch, resume."""

from __future__ import annotations

import logging
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

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.devices import check_device, copy_async, open_copy_stream, resolve_device
from dglx_dist.comm.session import Session, check_values_equal, warn_user
from dglx_dist.comm.trace import COMPUTE, LOADER, WAIT, Pass
from dglx_dist.dataloading.feature_fetch import NOTHING_CLAIMED, Ahead, check_float, look_ahead
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
    """Yield ``make(step)`` for each step in order, started at most ``depth`` steps ahead of the consumer.

    ``make`` runs on ``num_threads`` threads, or on the consumer's if that is 0. The error of a step is raised
    in its turn, with the traceback of its thread. When the consumer closes the iterator, steps that have not
    started are cancelled and the threads end.
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
            # Only now, so that never more than `depth` results exist beside the consumer's.
            started.extend(pool.submit(make, step) for step in islice(remaining, 1))
            yield result
            del result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


K = TypeVar("K")

_SHUFFLE = -1
"""The hop number of the shuffle keys of type 0; further types count down."""


@dataclass(frozen=True, kw_only=True)
class Items(Generic[K]):
    """This rank's ids by type, numbered as one list in the order of the types."""

    ids: Mapping[K, Array]
    """(n_t,) int64 distinct ids of every type of the graph, in the graph's order; may be empty."""

    def __len__(self) -> int:
        return sum(len(ids) for ids in self.ids.values())

    def order(self, *, shuffle: bool, seed: int, epoch: int) -> Array:
        """Return the (n,) positions in the order of ``epoch``: by keyed hash of type and id, or as given."""
        if not shuffle:
            return np.arange(len(self))
        keys = [
            hash_ids(ids, stream_key(seed, epoch, _SHUFFLE - number))
            for number, ids in enumerate(self.ids.values())
        ]
        return np.argsort(np.concatenate(keys), kind="stable")

    def take(self, positions: Array) -> dict[K, Array]:
        """Return the ids at (k,) ``positions``, in their order, for all types; some may be empty."""
        if len(self.ids) == 1:
            return {key: ids[positions] for key, ids in self.ids.items()}
        taken, first = {}, 0
        for key, ids in self.ids.items():
            of_type = positions[(positions >= first) & (positions < first + len(ids))]
            taken[key] = ids[of_type - first]
            first += len(ids)
        return taken

    def digest(self) -> int:
        """Return a 64-bit hash of the sets of ids."""
        digest = np.uint64(0)
        for number, ids in enumerate(self.ids.values()):
            digest ^= np.bitwise_xor.reduce(hash_ids(ids, stream_key(0, 0, number)), initial=np.uint64(0))
        return int(digest.view(np.int64))


def read_items(given: Ids | Mapping[Any, Ids], counts: Mapping[K, int], what: str) -> Items[K]:
    """Check the ids of a loader.

    Args:
        given: (K,) ids or a mask over all if there is one type, else a dict of either by type; an edge type
            is a triple or a relation.
        counts: Every type in the graph's order, with the number of its nodes or edges.
        what: ``node`` or ``edge``, for messages.

    Raises:
        ConfigError: a type is unknown or ambiguous, ids of several types are no dict, or an id is repeated.
        IndexError: an id is out of range.
    """
    refuse_by_name(given)
    found = group_by_type(given, counts, what)
    for key, ids in found.items():
        distinct, times = np.unique(ids, return_counts=True)
        if len(distinct) != len(ids):
            raise ConfigError(
                f"indices of type {key!r} have {what} {distinct[times > 1][0]} more than once ({len(ids)} "
                f"ids, {len(distinct)} distinct); an epoch has each once: pass torch.unique(indices)"
            )
    none = np.empty(0, np.int64)
    # A copy, because the caller may modify its array while threads read.
    return Items(ids={key: found[key].copy() if key in found else none for key in counts})


_MOVED = "batches are moved to device= by the loader"
_NEEDLESS = {
    "use_uva": "features are read on the CPU, by the loader's threads; see g.cache_rows(device=)",
    "use_ddp": "pass each rank its own indices: dx.node_split(mask)",
    "num_workers": "batches are made on threads: see num_threads=",
    "persistent_workers": "there are no worker processes",
    "use_prefetch_thread": "batches are always made ahead, depth= of them",
    **dict.fromkeys(("pin_memory", "use_alternate_streams", "pin_prefetcher"), _MOVED),
    "gpu_cache": "g.cache_rows(name, alpha=, device='cuda') keeps rows on the device",
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a loader makes its batches."""

    batch_size: int = option(1, "Items per rank and step.", check=at_least(1))
    shuffle: bool = False
    """Whether each epoch has its own order, keyed by seed, epoch, type and id."""
    drop_last: bool = False
    """Whether a rank leaves out its last batch when it is not full."""
    seed: int | None = option(None, "Seed of order and draws; None: the session's.", check=at_least(0))
    depth: int = option(
        1,
        "Batches made ahead, at least ``num_threads``. Each costs its memory, also on the device.",
        check=at_least(1),
    )
    num_threads: int = option(1, "Batches made at a time; 0: in the training loop itself.", check=at_least(0))
    device: torch.device | str | None = None
    """Device of the batches; None: the session's, whichever the model is on."""
    exclude: Tensor | Array | Mapping[Any, Tensor | Array] | None = None
    """(X,) ids of edges that are never drawn, by edge type if there are several; equal on all ranks if
    servers hold parts of the graph."""
    feature_dtype: torch.dtype | None = None
    """Dtype of floating-point input and edge columns in blocks; None: float32 for columns stored as float16
    or bfloat16, else the stored dtype."""

    def __post_init__(self) -> None:
        check_ranges(self, "{name}={value!r}")


def read_loader_options(options: Mapping[str, Any]) -> LoaderOptions:
    """Check the loader's options; warn about options of DGL's loader that have no effect.

    Raises:
        ConfigError: an option is unknown, or its value is unsupported.
    """
    for name, reason in _NEEDLESS.items():
        if options.get(name):
            warn_user(f"{name}={options[name]} has no effect: {reason}")
    ours = {name: value for name, value in options.items() if name not in _NEEDLESS}
    check_names("the loader", ours, (field.name for field in fields(LoaderOptions)))
    read = LoaderOptions(**ours)
    if read.device is not None:
        check_device(read.device)
    check_float(read.feature_dtype)
    # Threads beyond the depth would be idle.
    return replace(read, depth=max(read.depth, read.num_threads))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The seeds of every rank in each step of an epoch.

    All ranks run ``num_steps``; a rank that has run out of seeds takes part with none.
    """

    batch_size: int
    """Seeds per rank and step."""
    used: tuple[int, ...]
    """(W,) seeds of each rank in an epoch."""
    rank: int

    @classmethod
    def from_counts(cls, counts: Sequence[int], batch_size: int, drop_last: bool, rank: int) -> Schedule:
        used = tuple(count - count % batch_size if drop_last else count for count in counts)
        return cls(batch_size=batch_size, used=used, rank=rank)

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return -(-max(self.used) // self.batch_size)

    def slice_seeds(self, step: int) -> slice:
        """Return the slice of this rank's seeds, in the order of the epoch, for ``step``; may be empty."""
        first = step * self.batch_size
        return slice(first, first + self._size(self.used[self.rank], step))

    def share(self, step: int) -> StepShare:
        """Return how many seeds this rank and all ranks have in ``step``."""
        sizes = [self._size(count, step) for count in self.used]
        return StepShare(num_local=sizes[self.rank], num_global=sum(sizes))

    def _size(self, count: int, step: int) -> int:
        return min(max(count - step * self.batch_size, 0), self.batch_size)


class Timed(Protocol):
    """A batch with the seconds of sampling and building it, and of fetching columns."""

    @property
    def sample_s(self) -> float: ...
    @property
    def fetch_s(self) -> float: ...


B = TypeVar("B", bound=Timed)


class Stages(ABC, Generic[B]):
    """The stages that each batch of an epoch goes through before its turn. Thread-safe.

    A batch is a record: :meth:`sample` makes it, and the other stages fill it in. ``loader`` and ``epoch``
    say whose batches they are.
    """

    loader: EpochLoader[B, Any]
    epoch: int
    claimed: Ahead = NOTHING_CLAIMED
    """Where rows of the batches are kept. If it is not empty, batches are fetched in their order."""

    @abstractmethod
    def sample(self, step: int) -> B:
        """Return the batch of ``step``, sampled.

        Raises:
            ConfigError: a node is repeated, or a function of the user returned an unusable value.
            PeerError: another rank is dead or silent.
        """

    def fetch(self, batch: B) -> None:
        """Request what the batch reads from other ranks."""

    def build(self, batch: B) -> None:
        """Build the batch in host memory, and wait for what was requested."""

    def move(self, batch: B, step: int) -> None:
        """Begin to copy the batch to the device of the loader."""

    def complete(self, batch: B) -> B:
        """Return the sampled ``batch``, fetched and built."""
        self.fetch(batch)
        self.build(batch)
        return batch

    def make(self, step: int) -> B:
        """Return the batch of ``step`` in host memory."""
        return self.complete(self.sample(step))

    def fail(self, error: BaseException) -> None:
        """Let the stages of other batches end, after the ``error`` of one."""

    def close(self) -> None:
        """Release what the stages hold, at the end of the iteration."""

    def span(self, name: str, step: int) -> AbstractContextManager[None]:
        """Record the time of the block as a span of the batch of ``step``."""
        return self.loader.span(name, self.epoch, step)


class Maker(Stages[B], Generic[K, B]):
    """The stages of a loader of items. The object of the loader makes a copy of itself for each epoch."""

    get_items: Callable[[int], Mapping[K, Any]]

    loader: StepLoader[K, B, Any]

    def begin(
        self, loader: StepLoader[K, B, Any], epoch: int, steps: Callable[[], Iterator[int]]
    ) -> Maker[K, B]:
        """Return the stages of ``steps`` of ``epoch``."""
        begun = copy(self)
        begun.loader, begun.epoch, begun.get_items = loader, epoch, loader.order_items(epoch)
        return begun

    @abstractmethod
    def sample_items(self, items: Mapping[K, Any], epoch: int, *, step: int) -> B:
        """Sample the batch of ``items``: type to (n,) int64 distinct ids, n may be 0."""

    def sample(self, step: int) -> B:
        return self.sample_items(self.get_items(step), self.epoch, step=step)

    def make(self, step: int) -> B:
        with self.span("sample", step):
            return super().make(step)

    def claim(self) -> None:
        """Claim where to keep rows of the batches, which are then fetched in their order."""

    def move(self, batch: B, step: int) -> None:
        loader, record = self.loader, cast("Any", batch)
        if not loader.moves_batches:
            return
        begin = time.perf_counter()
        with self.span("copy to the device", step):
            _, record.arrive = copy_async(loader.copies, loader.device, partial(record.move, loader.device))
        record.fetch_s += time.perf_counter() - begin

    @abstractmethod
    def deliver(self, batch: B, share: StepShare) -> Any:
        """Return the batch for the consumer, on its thread, stamped with ``share``."""

    @abstractmethod
    def offline(self) -> Maker[K, B]:
        """Return a maker of any rank's batches, without columns, that reads no structure of other servers.

        Raises:
            ConfigError: the draws need another server, or depend on more than seed, epoch, step and ids.
        """

    def sampling_signature(self) -> str:
        """Return a string that is equal on ranks that draw alike, "" if draws are not keyed."""
        return ""


@dataclass(frozen=True, kw_only=True)
class LoaderTimes:
    """Seconds since the last reset, for the batches yielded."""

    sample_s: float = 0.0
    """Sampling and building blocks, on the loader's threads; with local features if one call does both."""
    fetch_s: float = 0.0
    """Fetching columns, and beginning to copy batches to a device, on the loader's threads."""
    wait_s: float = 0.0
    """Waiting of the consumer."""


WRAPPED_MODELS: WeakSet[nn.Module] = WeakSet()
"""Models of this process that train together with the other ranks."""
_CHECKED: WeakSet[Optimizer] = WeakSet()
"""Optimizers that are known to train a wrapped model."""


def refuse_unwrapped(optimizer: Optimizer, *_: object) -> None:
    """Raise ConfigError if ``optimizer`` steps by gradients that are not all of a wrapped model."""
    if optimizer in _CHECKED:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    if not stepped:
        return
    unwrapped = stepped.difference(id(p) for model in WRAPPED_MODELS for p in model.parameters())
    if unwrapped:
        raise ConfigError(
            f"{type(optimizer).__name__} trains {len(unwrapped)} parameters that belong to no wrapped model, "
            "so every rank would train its own; put them into one module and call model = dx.wrap(model, g) "
            "with it (not DistributedDataParallel), then build the optimizer from model.parameters()"
        )
    _CHECKED.add(optimizer)


class EpochLoader(ABC, Generic[B, T]):
    """Yields the batches of an epoch, made ahead on threads; each iteration is the next epoch.

    ``seed`` is that of all draws, ``depth`` the number of batches made ahead, ``num_threads`` that of batches
    made at a time; 0: in the consumer's thread.
    """

    checks_training = True
    """Whether an optimizer step on a model that is not wrapped is an error while batches are read."""

    def __init__(self, session: Session, *, seed: int, depth: int, num_threads: int) -> None:
        self._session = session
        self.seed, self.depth, self.num_threads = seed, depth, num_threads
        self._epoch, self._next_step, self._started = 0, 0, False
        self._end: int | None = None
        self.first_number = 0
        """Number of the first step, which keys dropout; others for a loader that is made anew each epoch."""
        self.mark: Callable[[Any], Any] | None = None
        """Marks the ids of the first batch."""
        self._times, self._waited_s = LoaderTimes(), 0.0
        self._running: weakref.ref[Generator[T, None, None]] | None = None
        self._trace_number = 0 if session.trace is None else session.trace.new_loader()

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""

    @abstractmethod
    def open_stages(self, epoch: int, steps: Callable[[], Iterator[int]]) -> Stages[B]:
        """Return the stages of the batches of ``steps`` of ``epoch``; called as an iteration begins."""

    @abstractmethod
    def deliver(self, step: int, batch: B) -> T:
        """Return the batch for the consumer, on its device, and set the session's share of the step."""

    def span(self, name: str, epoch: int, step: int, row: str = LOADER) -> AbstractContextManager[None]:
        """Record the time of the block as a span of a batch, if a trace is on."""
        timeline = self._session.timeline
        return timeline.span(name, row, epoch * len(self) + step) if timeline.on else nullcontext()

    def in_order(self, batches: Iterator[B]) -> Iterator[B]:
        """Return the made batches as they are delivered; a loader may look at the next one here."""
        return batches

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; if a position within it was loaded, that iteration is resumed."""
        if epoch != self._epoch or self._started:
            self._epoch, self._next_step, self._started = check_integer("epoch", epoch, least=0), 0, False

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values; within the loop's body, the current step counts as done."""
        return {"epoch": self._epoch, "step": self._next_step, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after the position ``state``; the next iteration has the rest of its epoch.

        Raises:
            CheckpointError: it is no position, or that of a loader with another seed or more steps.
        """
        check_position(state, self.seed, len(self))
        self._epoch, self._next_step, self._started = int(state["epoch"]), int(state["step"]), False

    def end_at(self, step: int | None) -> None:
        """End the iteration, or the next one, after ``step`` steps of its epoch; the one after has the rest.

        None: at the end of the epoch. No batch beyond ``step`` is begun, as far as none has been yet. Every
        rank must call it alike.
        """
        self._end = step

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return the seconds since the start or the last reset."""
        times = self._times
        if reset:
            self._times = LoaderTimes()
        return times

    def close(self) -> None:
        """End the iteration, if one is running, with its threads."""
        running = None if self._running is None else self._running()
        if running is not None:
            running.close()

    def __iter__(self) -> Iterator[T]:
        """Yield the rest of the current epoch. An iteration that is left early counts as an epoch."""
        running = self._iterate()
        self._running = weakref.ref(running)
        return running

    def _iterate(self) -> Generator[T, None, None]:
        if self._started:
            self._epoch, self._next_step = self._epoch + 1, 0
        self._started = True
        epoch, first = self._epoch, self._next_step
        began, waited_s = time.perf_counter(), self._waited_s
        checks = self.checks_training and self._session.topology.world_size > 1
        handle = register_optimizer_step_pre_hook(refuse_unwrapped) if checks else None
        try:
            with closing(self._prefetch(epoch)) as batches:
                stream = self.in_order(batches)
                for step in self._steps():
                    batch = self._next(step, stream)
                    if self.mark is not None:
                        batch, self.mark = self.mark(batch), None
                    yield batch
                    del batch
        finally:
            if handle is not None:
                handle.remove()
            # A step after the loop does not belong to the last batch and must not get its weight.
            self._session.step_share = None
            self._end = None
        self._started = False
        if self._next_step < len(self):
            return
        if first == 0 and self._session.trace is not None:
            seconds, wait_s = time.perf_counter() - began, self._waited_s - waited_s
            done = Pass(loader=self._trace_number, steps=len(self), seconds=seconds, wait_s=wait_s)
            self._session.trace.note_pass(done)
        self._epoch, self._next_step = epoch + 1, 0

    def _prefetch(self, epoch: int) -> Generator[B, None, None]:
        """Yield the batches of the rest of ``epoch``, which go through all stages ahead of the consumer."""
        stages = self.open_stages(epoch, self._steps)

        def sample(step: int) -> B:
            with stages.span("sample", step):
                return stages.sample(step)

        def make(step: int) -> B:
            try:
                batch = stages.make(step)
                stages.move(batch, step)
            except BaseException as error:
                stages.fail(error)
                raise
            return batch

        try:
            depth, num_threads = self.depth, self.num_threads
            if not stages.claimed:
                yield from run_ahead(make, self._steps(), depth=depth, num_threads=num_threads)
                return
            samples: Any = run_ahead(sample, self._steps(), depth=depth, num_threads=num_threads)
            with closing(samples), closing(look_ahead(samples, stages.claimed, stages.fetch)) as fetched:

                def finish(step: int) -> B:
                    batch = next(fetched)
                    stages.build(batch)
                    stages.move(batch, step)
                    return batch

                # One thread: each batch changes the rows that are kept for the next.
                yield from run_ahead(finish, self._steps(), depth=depth, num_threads=min(1, num_threads))
        finally:
            stages.close()

    def _steps(self) -> Iterator[int]:
        # Read at each step, since the training loop may end its pass early.
        step = self._next_step
        while step < (len(self) if self._end is None else min(self._end, len(self))):
            yield step
            step += 1

    def _next(self, step: int, batches: Iterator[B]) -> T:
        begin = time.perf_counter()
        with self.span(f"{WAIT} for a batch", self._epoch, step, row=COMPUTE):
            batch = next(batches)
        sample_s, fetch_s = batch.sample_s, batch.fetch_s
        delivered = self.deliver(step, batch)
        self._next_step = step + 1
        waited_s = time.perf_counter() - begin
        self._waited_s += waited_s
        self._times = LoaderTimes(
            sample_s=self._times.sample_s + sample_s,
            fetch_s=self._times.fetch_s + fetch_s,
            wait_s=self._times.wait_s + waited_s,
        )
        return delivered


class StepLoader(EpochLoader[B, T], Generic[K, B, T]):
    """Yields batches of this rank's items, made ahead on threads, in as many steps as the other ranks.

    Constructing it is collective; iterating calls no collective. A rank that has run out of ``items`` gets
    empty batches.

    Raises:
        ConfigError: the ranks differ in ``batch_size`` or ``drop_last``.
        PeerError: a rank did not take part.
    """

    def __init__(self, session: Session, items: Items[K], options: LoaderOptions, maker: Maker[K, B]) -> None:
        self.items, self._options, self._maker = items, options, maker
        self.device = resolve_device(options.device, session.device)
        # DGL's own graphs on a GPU do not tell which tensors a copy fills: they are moved at once.
        self.copies = open_copy_stream(self.device) if is_on_torch_path(self.device) else None
        self.moves_batches = self.device.type != "cpu" or is_on_torch_path(self.device)
        """Whether batches are not as their maker leaves them: on another device, or on the torch path."""
        counts, size = _counts(items, options, session), int(options.batch_size)
        self._schedule = Schedule.from_counts(counts, size, options.drop_last, session.topology.rank)
        seed = resolve_seed(options, session)
        super().__init__(session, seed=seed, depth=options.depth, num_threads=options.num_threads)

    def __len__(self) -> int:
        return self._schedule.num_steps

    @property
    def num_epoch_targets(self) -> tuple[int, int]:
        """Targets of an epoch: (of this rank, of all ranks)."""
        used = self._schedule.used
        return used[self._schedule.rank], sum(used)

    def offline(self) -> Callable[[Mapping[K, Any], int, int], B]:
        """Return (items, epoch, step) to that batch of any rank; see :meth:`Maker.offline`. Thread-safe."""
        maker = self._maker.offline()
        return lambda items, epoch, step: maker.complete(maker.sample_items(items, epoch, step=step))

    def sampling_signature(self) -> str:
        """Return a string that is equal on ranks that draw alike."""
        one = self._options
        order = f"batch_size={one.batch_size}, shuffle={bool(one.shuffle)}, drop_last={bool(one.drop_last)}"
        return f"seed={self.seed}, {order}, {self._maker.sampling_signature()}"

    def order_items(
        self, epoch: int, items: Items[K] | None = None, rank: int | None = None
    ) -> Callable[[int], dict[K, Any]]:
        """Return a function of step to the items of a rank, by default this one."""
        of_rank = self.items if items is None else items
        schedule = self._schedule if rank is None else replace(self._schedule, rank=rank)
        order = of_rank.order(shuffle=self._options.shuffle, seed=self.seed, epoch=epoch)
        return lambda step: of_rank.take(order[schedule.slice_seeds(step)])

    def open_stages(
        self, epoch: int, steps: Callable[[], Iterator[int]], *, claims: bool = True
    ) -> Maker[K, B]:
        stages = self._maker.begin(self, epoch, steps)
        if claims:
            stages.claim()
        return stages

    def deliver(self, step: int, batch: B) -> T:
        share = replace(
            self._schedule.share(step), step_number=self.first_number + self._epoch * len(self) + step
        )
        self._session.step_share = share
        delivered: T = self._maker.deliver(batch, share)
        return delivered


def check_position(state: Mapping[str, int], seed: int, num_steps: int) -> None:
    """Raise CheckpointError unless ``state`` is a position of a loader of ``seed`` with ``num_steps``."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{state!r} is no position of a loader; pass the result of state_dict()")
    for name in ("epoch", "step", "seed"):
        try:
            check_integer(name, state.get(name), least=0)
        except ConfigError as error:
            raise CheckpointError(f"this is no position of a loader: {error}") from None
    if state["seed"] != seed:
        raise CheckpointError(
            f"the loader's position was saved with seed {state['seed']}, but this one has {seed}; "
            f"pass seed={state['seed']}"
        )
    if state["step"] > num_steps:
        raise CheckpointError(
            f"the loader was at step {state['step']}, but an epoch has {num_steps} steps here; use the "
            "same dataset, batch_size and number of ranks"
        )


def resolve_seed(options: LoaderOptions, session: Session) -> int:
    """Return the seed of a loader's draws: the option's, else the session's."""
    return session.seed if options.seed is None else int(options.seed)


def gather_counts(local: Sequence[int], batch_size: int, drop_last: bool, session: Session) -> Array:
    """Return ``local`` of each rank, (W, n) int64; ConfigError if the other two differ. Collective."""
    rows = gather_int64([*local, batch_size, int(drop_last)], session)
    for at, name in ((-2, "batch_size"), (-1, "drop_last")):
        check_values_equal(name, rows[:, at].tolist(), "give all the same, for the same number of steps")
    return rows[:, :-2]


def _counts(items: Items[K], options: LoaderOptions, session: Session) -> tuple[int, ...]:
    """Return the number of items of each rank; warn if all ranks have the same ones. Collective."""
    local = [len(items), items.digest() if len(items) else 0]
    rows = gather_counts(local, int(options.batch_size), options.drop_last, session)
    if len(rows) > 1 and len(items) and bool((rows == rows[0]).all()):
        warn_user(
            f"all {len(rows)} ranks were given the same {len(items)} indices, so each is used {len(rows)} "
            "times an epoch; dx.node_split(mask) or dx.edge_split(mask) gives every rank its share"
        )
    return tuple(rows[:, 0].tolist())
