"""What loaders of nodes and loaders of edges share: epochs, equal steps, order, position, running ahead."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.timeline import COMPUTE, LOADER, WAIT
from dglx_dist.cluster.trace import Pass
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.records import StepShare
from dglx_dist.sampling.ahead import run_ahead
from dglx_dist.sampling.items import Items
from dglx_dist.sampling.options import LoaderOptions, whole_number
from dglx_dist.sampling.schedule import Schedule

K = TypeVar("K")
T = TypeVar("T")


class Timed(Protocol):
    """A batch that knows how long it took."""

    @property
    def sample_s(self) -> float:
        """Seconds of sampling and building."""

    @property
    def fetch_s(self) -> float:
        """Seconds of fetching columns."""


B = TypeVar("B", bound=Timed)

Around: TypeAlias = Callable[[int, int, Callable[[], B]], B]
"""(epoch, step, what makes the batch) to the batch; called on the loader's threads."""


@dataclass(frozen=True, kw_only=True)
class LoaderTimes:
    """Seconds since the last reset, of the batches that were yielded."""

    sample_s: float = 0.0
    """Sampling and building blocks, on the loader's threads; local features too if one call does both."""
    fetch_s: float = 0.0
    """Fetching columns, on the loader's threads."""
    wait_s: float = 0.0
    """What the consumer waited."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How the items of a loader are spread over steps."""

    batch_size: int
    """Items per rank and step."""
    shuffle: bool = False
    """Whether each epoch has an order of its own, keyed by seed, epoch, type and id."""
    drop_last: bool = False
    """Whether a rank leaves out its last batch when it is not full."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless ``batch_size`` is a whole number of at least 1."""
        whole_number("batch_size", self.batch_size, least=1)


class StepLoader(ABC, Generic[K, B, T]):
    """Hands out batches of this rank's items in step with the other ranks, made ahead on threads.

    Making one is collective; iterating calls no collective. All ranks have the same number of steps, and a
    rank that has run out of items takes part with none. Each iteration is the next epoch.

    Args:
        session: The run.
        items: What this rank visits.
        pace: How.
        options: How far ahead, on how many threads, with which seed.

    Raises:
        ConfigError: the ranks differ in ``batch_size`` or ``drop_last``.
        PeerError: a rank did not take part.
    """

    def __init__(self, session: Session, items: Items[K], pace: Pace, options: LoaderOptions) -> None:
        self._session, self._items, self._pace = session, items, pace
        self._seed = seed_of(options, session)
        self._depth, self._num_threads = options.depth, options.num_threads
        self._device = torch.device(session.device if options.device is None else options.device)
        self._schedule = Schedule(
            batch_size=int(pace.batch_size),
            drop_last=bool(pace.drop_last),
            counts=_counts(items, pace, session),
            rank=session.topology.rank,
        )
        self._epoch, self._next_step, self._begun = 0, 0, False
        self._times, self._waited_s = LoaderTimes(), 0.0
        self._number = 0 if session.trace is None else session.trace.new_loader()
        self._around: Around[B] = lambda _epoch, _step, make: make()

    @abstractmethod
    def _make(self, items: dict[K, Any], epoch: int) -> B:
        """Make the batch of ``items`` (type to (n,) int64 ids, maybe none); called on several threads."""

    @abstractmethod
    def _hand_over(self, batch: B, share: StepShare) -> T:
        """Return what the consumer gets, moved to the device and stamped with ``share``."""

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self._schedule.num_steps

    @property
    def depth(self) -> int:
        """Batches made ahead."""
        return self._depth

    @property
    def items(self) -> Items[K]:
        """What this rank visits."""
        return self._items

    def surround(self, around: Around[B]) -> None:
        """Have batches made by way of ``around`` in the iterations that begin from now on."""
        self._around = around

    def alone(self) -> Callable[[Mapping[K, Any], int], B]:
        """Return what makes any rank's batches: (items, epoch) to the blocks that rank gets, without columns.

        Asks nobody for structure; any thread may call it.

        Raises:
            ConfigError: the draws need another server, or depend on more than seed, epoch and ids.
        """
        raise ConfigError(f"{type(self).__name__} cannot draw another rank's batches")

    def drawn_by(self) -> str:
        """Return what differs between ranks that would draw differently."""
        return f"seed={self._seed}, {self._pace}"

    def visits(
        self, epoch: int, items: Items[K] | None = None, rank: int | None = None
    ) -> Callable[[int], dict[K, Any]]:
        """Return step to what a rank visits in it, this one by default."""
        mine = self._items if items is None else items
        schedule = self._schedule if rank is None else replace(self._schedule, rank=rank)
        order = mine.order(shuffle=self._pace.shuffle, seed=self._seed, epoch=epoch)
        return lambda step: mine.take(order[schedule.slice_of(step)])

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one when none is under way."""
        return self._epoch

    @property
    def num_targets_of_epoch(self) -> tuple[int, int]:
        """Items of an epoch: (on this rank, on all ranks)."""
        return self._schedule.targets()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; one that was loaded half done with the same number is gone on with."""
        if epoch != self._epoch or self._begun:
            self._epoch, self._next_step, self._begun = whole_number("epoch", epoch, least=0), 0, False

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values: read in the loop's body, the step there counts as done."""
        return {"epoch": self._epoch, "step": self._next_step, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the position ``state``; the next iteration has the rest of its epoch.

        Raises:
            CheckpointError: it is no such position, or of a loader with another seed or of more steps.
        """
        check_position(state, self._seed, len(self))
        self._epoch, self._next_step, self._begun = int(state["epoch"]), int(state["step"]), False

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return the seconds since the start or the last reset."""
        times = self._times
        if reset:
            self._times = LoaderTimes()
        return times

    def __iter__(self) -> Iterator[T]:
        """Yield what is left of the current epoch, then move on to the next.

        An iteration that was left early counts as an epoch. Threads end with it.
        """
        if self._begun:
            self._epoch, self._next_step = self._epoch + 1, 0
        self._begun = True
        epoch = self._epoch
        visited, around = self.visits(epoch), self._around
        steps = range(self._next_step, len(self))
        began, waited_s = time.perf_counter(), self._waited_s

        def make(step: int) -> B:
            def sampled() -> B:
                with self._session.timeline.span("sample", LOADER, epoch * len(self) + step):
                    return self._make(visited(step), epoch)

            return around(epoch, step, sampled)

        try:
            with closing(run_ahead(make, steps, depth=self._depth, num_threads=self._num_threads)) as batches:
                for step in steps:
                    yield self._next(step, batches)
        finally:
            # A step after the loop is not of the last batch, and must not be weighed like it.
            self._session.step_share = None
        if steps.start == 0:
            self._note_pass(time.perf_counter() - began, self._waited_s - waited_s)
        self._epoch, self._next_step, self._begun = epoch + 1, 0, False

    def _next(self, step: int, batches: Iterator[B]) -> T:
        """Wait for the batch of ``step``, and note its time and share."""
        begin = time.perf_counter()
        with self._session.timeline.span(f"{WAIT} for a batch", COMPUTE, self._epoch * len(self) + step):
            batch = next(batches)
        share = self._schedule.share(step)
        self._session.step_share = share
        handed = self._hand_over(batch, share)
        self._next_step = step + 1
        waited_s = time.perf_counter() - begin
        self._waited_s += waited_s
        self._times = LoaderTimes(
            sample_s=self._times.sample_s + batch.sample_s,
            fetch_s=self._times.fetch_s + batch.fetch_s,
            wait_s=self._times.wait_s + waited_s,
        )
        return handed

    def _note_pass(self, seconds: float, wait_s: float) -> None:
        if self._session.trace is not None:
            self._session.trace.note_pass(
                Pass(loader=self._number, steps=len(self), seconds=seconds, wait_s=wait_s)
            )


def check_position(state: Mapping[str, int], seed: int, num_steps: int) -> None:
    """Raise CheckpointError unless ``state`` is a position of a loader of ``seed`` with ``num_steps``."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{state!r} is no position of a loader; give what state_dict() returned")
    for name in ("epoch", "step", "seed"):
        try:
            whole_number(name, state.get(name), least=0)
        except ConfigError as error:
            raise CheckpointError(f"this is no position of a loader: {error}") from None
    if state["seed"] != seed:
        raise CheckpointError(
            f"the loader's position was saved with seed {state['seed']}, and this one has {seed}; "
            f"pass seed={state['seed']}"
        )
    if state["step"] > num_steps:
        raise CheckpointError(
            f"the loader was at step {state['step']}, and an epoch has {num_steps} steps here; use the "
            "same dataset, batch_size and number of ranks"
        )


def seed_of(options: LoaderOptions, session: Session) -> int:
    """Return the seed of a loader's draws: the option's, else the session's.

    Raises:
        ConfigError: it is no whole number of at least 0.
    """
    return session.seed if options.seed is None else whole_number("seed", options.seed, least=0)


def _counts(items: Items[K], pace: Pace, session: Session) -> tuple[int, ...]:
    """Return how many items each rank has; warns when all ranks have the same ones. Collective.

    Raises:
        ConfigError: the ranks differ in what sets the number of steps.
    """
    mine = [len(items), items.digest() if len(items) else 0, int(pace.batch_size), int(pace.drop_last)]
    rows = gather_int64(mine, session)
    for name, given in (("batch_size", rows[:, 2]), ("drop_last", rows[:, 3])):
        if bool((given != given[0]).any()):
            raise ConfigError(
                f"the ranks have {name} {', '.join(map(str, given.tolist()))}; give all the same, or they "
                "would not have the same number of steps"
            )
    if len(rows) > 1 and len(items) and bool((rows == rows[0]).all()):
        warnings.warn(
            f"all {len(rows)} ranks were given the same {len(items)} indices, so each is visited {len(rows)} "
            "times an epoch; dx.node_split(mask) or dx.edge_split(mask) gives every rank its share",
            stacklevel=4,
        )
    return tuple(rows[:, 0].tolist())
