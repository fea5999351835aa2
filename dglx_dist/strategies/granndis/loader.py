"""The loader of full-graph training: blocks of all layers, a whole step's worth of the graph at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, TypeAlias, final

import dgl
from torch import Tensor

from dglx_dist.cluster.timeline import COMPUTE, LOADER, WAIT
from dglx_dist.cluster.trace import Pass
from dglx_dist.cluster.weak import if_alive
from dglx_dist.records import StepShare
from dglx_dist.sampling.ahead import run_ahead
from dglx_dist.sampling.options import whole_number
from dglx_dist.sampling.stepping import LoaderTimes, check_position
from dglx_dist.strategies.granndis.batch import HaloBatch
from dglx_dist.strategies.granndis.halo_block import HaloBlock
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.plan_source import PlanSource
from dglx_dist.strategies.granndis.preload import ColumnReader
from dglx_dist.strategies.granndis.request import Request
from dglx_dist.strategies.granndis.wire import wire_of

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Batch: TypeAlias = tuple[Tensor, Tensor, list[HaloBlock]]
"""(ids of the rows that go into the model, ids of the seeds that this rank computes, blocks with the
input-most first)."""


@final
class FullGraphLoader:
    """Iterates over ``(input_nodes, output_nodes, blocks)``; every rank must make it and iterate alike.

    The seeds of a batch are those of all ranks, each computed by one of them, so ``output_nodes`` are others
    than the indices that this rank was given: take labels from ``blocks[-1].dstdata``, or by
    ``output_nodes``. With one step an epoch the structure and the columns are kept from epoch to epoch; with
    several the next step's are read while one is trained, from the disk if the source keeps them there. Each
    iteration is the next epoch.

    Args:
        g: A graph of one node and one edge type.
        source: The plans.
        request: What is attached, and where blocks shall be.
        use_pp: Whether the features of layer 1's halo are kept as well, where an epoch has one step;
            fetching them is collective then.

    Raises:
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, source: PlanSource, request: Request, *, use_pp: bool) -> None:
        self._g, self._session, self._source, self._request = g, g.session, source, request
        self._reader = ColumnReader(g, request.columns, source.row_files)
        self._keeps, self._use_pp = len(source) == 1, use_pp
        self._kept: HaloBatch | None = None
        self._epoch, self._next_step, self._begun = 0, 0, False
        self._times, self._waited_s = LoaderTimes(), 0.0
        self._number = 0 if self._session.trace is None else self._session.trace.new_loader()
        # A graph outlives its loaders.
        g.on_close.append(if_alive(source.close))
        # Connections are opened together, and not by the thread that makes batches ahead.
        wire_of(self._session)
        if self._keeps:
            self._load(0, 0)

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return len(self._source)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one when none is under way."""
        return self._epoch

    @property
    def num_targets_of_epoch(self) -> tuple[int, int]:
        """Seeds of an epoch: (computed by this rank, by all ranks)."""
        shares = [self._source.share(self._epoch, step) for step in range(len(self))]
        return sum(one.num_local for one in shares), sum(one.num_global for one in shares)

    @property
    def plan(self) -> RankPlan | None:
        """What this rank computes, where an epoch has one step; None: it has several."""
        return None if self._kept is None else self._kept.plan

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; one that was loaded half done with the same number is gone on with."""
        if epoch != self._epoch or self._begun:
            self._epoch, self._next_step, self._begun = whole_number("epoch", epoch, least=0), 0, False

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return the seconds since the start or the last reset; those of the making are not among them."""
        times = self._times
        if reset:
            self._times = LoaderTimes()
        return times

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values: read in the loop's body, the step there counts as done."""
        return {"epoch": self._epoch, "step": self._next_step, "seed": self._request.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the position ``state``; the next iteration has the rest of its epoch.

        Raises:
            CheckpointError: it is no such position, or of a loader with another seed or of more steps.
        """
        check_position(state, self._request.seed, len(self))
        self._epoch, self._next_step, self._begun = int(state["epoch"]), int(state["step"]), False

    def __iter__(self) -> Iterator[Batch]:
        """Yield what is left of the current epoch, then move on to the next.

        An iteration that was left early counts as an epoch. Threads end with it.

        Raises:
            PeerError: a rank whose rows are needed is dead or silent.
        """
        if self._begun:
            self._epoch, self._next_step = self._epoch + 1, 0
        self._begun = True
        epoch, steps = self._epoch, range(self._next_step, len(self))
        began, waited_s = time.perf_counter(), self._waited_s
        # What is kept may have to be filled by an exchange, which belongs on the thread of the loop.
        ahead = run_ahead(
            lambda step: self._load(epoch, step),
            steps,
            depth=self._request.depth,
            num_threads=0 if self._keeps else 1,
        )
        try:
            with closing(ahead) as batches:
                for step in steps:
                    yield self._next(step, batches)
        finally:
            # A step after the loop is not of the last batch, and must not be weighed like it.
            self._session.step_share = None
        if steps.start == 0:
            self._note_pass(time.perf_counter() - began, self._waited_s - waited_s)
        self._epoch, self._next_step, self._begun = epoch + 1, 0, False

    def _load(self, epoch: int, step: int) -> HaloBatch:
        with self._session.timeline.span("plan", LOADER, epoch * len(self) + step):
            plan = self._source.plan(epoch, step)
            if self._kept is not None and self._kept.plan is plan:
                return self._kept
            # Or two of them would be held while the next one is read.
            self._kept = None
            filled = self._keeps and self._use_pp
            batch = HaloBatch(self._g, plan, self._reader, filled=filled, device=self._request.device)
        if self._keeps:
            self._kept = batch
        return batch

    def _next(self, step: int, batches: Iterator[HaloBatch]) -> Batch:
        """Wait for the batch of ``step``, and note its time and share."""
        begin, number = time.perf_counter(), self._epoch * len(self) + step
        with self._session.timeline.span(f"{WAIT} for a batch", COMPUTE, number):
            kept = self._kept
            batch = next(batches)
        share = self._source.share(self._epoch, step)
        # Of rows outside of the model, as of embeddings, each rank counts alike: n_local / n_global is in
        # the gradient already, as it leaves the model's output (see HaloModel).
        self._session.step_share = StepShare(num_local=1, num_global=self._session.topology.world_size)
        blocks = batch.blocks()
        for block in blocks:
            block.step_number = number
        blocks[-1].step_share = share
        self._next_step = step + 1
        waited_s = time.perf_counter() - begin
        self._waited_s += waited_s
        is_new = batch is not kept
        self._times = LoaderTimes(
            sample_s=self._times.sample_s,
            fetch_s=self._times.fetch_s + (batch.fetch_s if is_new else 0.0),
            wait_s=self._times.wait_s + waited_s,
        )
        return batch.input_nodes, blocks[-1].dstdata[dgl.NID], blocks

    def _note_pass(self, seconds: float, wait_s: float) -> None:
        if self._session.trace is not None:
            self._session.trace.note_pass(
                Pass(loader=self._number, steps=len(self), seconds=seconds, wait_s=wait_s)
            )
