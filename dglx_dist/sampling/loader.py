"""The loader: mini-batches of this rank's seeds, in step with the other ranks, made ahead on threads."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import Session
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.records import NODE_TYPE, Array
from dglx_dist.sampling.ahead import run_ahead
from dglx_dist.sampling.maker import MiniBatch, NodeIds
from dglx_dist.sampling.neighbor import read_sampler
from dglx_dist.sampling.opening import open_maker
from dglx_dist.sampling.options import read_options, whole_number
from dglx_dist.sampling.rng import hash_ids, stream_key
from dglx_dist.sampling.schedule import Schedule, epoch_order

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Batch: TypeAlias = tuple[NodeIds, NodeIds, list[DGLBlock]]
"""(input node ids, output node ids, blocks with the input-most first); the ids as a dict by node type when
there are several."""


@dataclass(frozen=True, kw_only=True)
class LoaderTimes:
    """Seconds since the last reset, of the batches that were yielded."""

    sample_s: float = 0.0
    """Sampling and building blocks, on the loader's threads; local features too if one call does both."""
    fetch_s: float = 0.0
    """Fetching columns, on the loader's threads."""
    wait_s: float = 0.0
    """What the consumer waited."""


@final
class DataLoader:
    """Iterates over ``(input_nodes, output_nodes, blocks)``, like DGL's loader of nodes.

    Every rank must make it and iterate over it alike: all ranks have the same number of steps, and a rank
    that has run out of seeds gets blocks with no destination. Each iteration is the next epoch. The same
    seed draws the same neighbours on any number of ranks. Iterating calls no collective.

    Args:
        g: The distributed graph.
        indices: This rank's seeds: (K,) ids, a mask over all nodes, or {node type: either}; K may be 0.
        sampler: A sampler of ``dgl.dataloading``; what it prefetches is attached to the blocks.
        batch_size: Seeds per rank and step.
        shuffle: Whether each epoch has an order of its own, keyed by seed, epoch and ids.
        drop_last: Whether a rank leaves out its last batch when it is not full.
        options: :class:`LoaderOptions`: ``seed``, ``depth``, ``num_threads``, ``device``, ``exclude``.
            Options of DGL's loader that are of no use here are accepted with a warning.

    Raises:
        ConfigError: an option cannot be honoured; a seed is given twice.
        IndexError: a seed is no node.
        PeerError: a rank did not take part.
    """

    def __init__(
        self,
        g: DistGraph,
        indices: Ids | Mapping[str, Ids],
        sampler: Any,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        read = read_options(options)
        session: Session = g.session
        self._session, self._shuffle = session, bool(shuffle)
        self._seed = session.seed if read.seed is None else whole_number("seed", read.seed, least=0)
        self._depth, self._num_threads = read.depth, read.num_threads
        self._device = torch.device(session.device if read.device is None else read.device)
        size = whole_number("batch_size", batch_size, least=1)
        self._seeds, self._ntype = _seeds(g, indices), g.ntypes[0]
        self._maker = open_maker(g, sampler, read_sampler(sampler), read, self._seed)
        self._schedule = Schedule(
            batch_size=size,
            drop_last=bool(drop_last),
            counts=_counts(self._seeds, session),
            rank=session.topology.rank,
        )
        self._epoch, self._next_step, self._begun = 0, 0, False
        self._times = LoaderTimes()

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self._schedule.num_steps

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one when none is under way."""
        return self._epoch

    @property
    def num_targets_of_epoch(self) -> tuple[int, int]:
        """Seeds of an epoch: (on this rank, on all ranks)."""
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
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{state!r} is no position of a loader; give what state_dict() returned")
        for name in ("epoch", "step", "seed"):
            try:
                whole_number(name, state.get(name), least=0)
            except ConfigError as error:
                raise CheckpointError(f"this is no position of a loader: {error}") from None
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the loader's position was saved with seed {state['seed']}, and this one has {self._seed}; "
                f"pass seed={state['seed']}"
            )
        if state["step"] > len(self):
            raise CheckpointError(
                f"the loader was at step {state['step']}, and an epoch has {len(self)} steps here; use the "
                "same dataset, batch_size and number of ranks"
            )
        self._epoch, self._next_step, self._begun = int(state["epoch"]), int(state["step"]), False

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return the seconds since the start or the last reset."""
        times = self._times
        if reset:
            self._times = LoaderTimes()
        return times

    def __iter__(self) -> Iterator[Batch]:
        """Yield what is left of the current epoch, then move on to the next.

        An iteration that was left early counts as an epoch. Threads end with it.
        """
        if self._begun:
            self._epoch, self._next_step = self._epoch + 1, 0
        self._begun = True
        epoch = self._epoch
        order = epoch_order(self._seeds, shuffle=self._shuffle, seed=self._seed, epoch=epoch)
        steps = range(self._next_step, len(self))

        def make(step: int) -> MiniBatch:
            return self._maker.make({self._ntype: order[self._schedule.slice_of(step)]}, epoch)

        try:
            with closing(run_ahead(make, steps, depth=self._depth, num_threads=self._num_threads)) as batches:
                for step in steps:
                    yield self._handed_over(step, batches)
        finally:
            # A step after the loop is not of the last batch, and must not be weighed like it.
            self._session.step_share = None
        self._epoch, self._next_step, self._begun = epoch + 1, 0, False

    def _handed_over(self, step: int, batches: Iterator[MiniBatch]) -> Batch:
        """Wait for the batch of ``step``, note its time and share, and move it to the device."""
        begin = time.perf_counter()
        batch = next(batches)
        blocks, nodes, seeds = batch.blocks, batch.input_nodes, batch.output_nodes
        if self._device.type != "cpu":
            blocks = [block.to(self._device) for block in blocks]
            nodes, seeds = _moved(nodes, self._device), _moved(seeds, self._device)
        share = self._schedule.share(step)
        self._session.step_share = share
        blocks[-1].step_share = share
        self._next_step = step + 1
        self._times = LoaderTimes(
            sample_s=self._times.sample_s + batch.sample_s,
            fetch_s=self._times.fetch_s + batch.fetch_s,
            wait_s=self._times.wait_s + time.perf_counter() - begin,
        )
        return nodes, seeds, blocks


def _moved(nodes: NodeIds, device: torch.device) -> NodeIds:
    if isinstance(nodes, Tensor):
        return nodes.to(device)
    return {ntype: ids.to(device) for ntype, ids in nodes.items()}


def _seeds(g: DistGraph, indices: Ids | Mapping[str, Ids]) -> Array:
    """Return the seeds as (K,) int64 distinct ids.

    Raises:
        ConfigError: of another node type, or not distinct.
        IndexError: not nodes of ``g``.
    """
    if isinstance(indices, Mapping):
        if set(indices) != {NODE_TYPE}:
            raise ConfigError(
                f"indices name the node types {sorted(indices)}, and only graphs with one node type are "
                "sampled so far; pass the ids alone"
            )
        indices = indices[NODE_TYPE]
    # A copy, because the caller may write to its array while threads read.
    seeds = as_ids(indices, g.num_nodes(), "the graph's nodes").copy()
    ids, counts = np.unique(seeds, return_counts=True)
    if len(ids) != len(seeds):
        raise ConfigError(
            f"indices have node {ids[counts > 1][0]} more than once ({len(seeds)} ids, {len(ids)} distinct); "
            "a block has one row per node: pass torch.unique(indices)"
        )
    return seeds


def _counts(seeds: Array, session: Session) -> tuple[int, ...]:
    """Return how many seeds each rank has; warns when all ranks have the same ones. Collective."""
    digest = np.bitwise_xor.reduce(hash_ids(seeds, stream_key(0, 0, 0))).view(np.int64) if len(seeds) else 0
    rows = gather_int64([len(seeds), int(digest)], session)
    if len(rows) > 1 and len(seeds) and bool((rows == rows[0]).all()):
        warnings.warn(
            f"all {len(rows)} ranks were given the same {len(seeds)} indices, so each is visited {len(rows)} "
            "times an epoch; dx.node_split(mask) gives every rank its share",
            stacklevel=3,
        )
    return tuple(rows[:, 0].tolist())
