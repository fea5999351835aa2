"""One batch of edges: its ends, negatives, pair graphs and blocks. Runs on the loader's threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import dgl
import numpy as np
from dgl.heterograph import DGLBlock

from dglx_dist.errors import ConfigError
from dglx_dist.graph.pull import PendingPull
from dglx_dist.graph.rows import Answered
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.attach import EDGE_PHASE
from dglx_dist.sampling.edge_exclude import Exclude
from dglx_dist.sampling.edge_negatives import DrawAll
from dglx_dist.sampling.edge_pairs import PairGraphs, build_pairs
from dglx_dist.sampling.maker import BatchMaker, NodeIds
from dglx_dist.sampling.negative import Pairs, Positives

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


@dataclass(frozen=True, kw_only=True)
class EdgeBatch:
    """What a loader of edges yields, and how long it took."""

    input_nodes: NodeIds
    """The sources of the first block."""
    positive: dgl.DGLGraph
    """The batch's edges over the destinations of the last block, in their order."""
    negative: dgl.DGLGraph | None
    """Negative pairs over the same nodes; None without a negative sampler."""
    blocks: list[DGLBlock]
    """Layer 1 first."""
    sample_s: float
    """Seconds of drawing, sampling and building."""
    fetch_s: float
    """Seconds of fetching columns."""


@dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """What a batch of edges is made of, beside the blocks."""

    seed: int
    exclude: Exclude
    negative: DrawAll | None
    columns: Mapping[EdgeType, Mapping[str, str]]
    """Edge type to name in the frame to name in the store: what the positive pair graph gets."""
    unkeyed: str = ""
    """Which option is code of the user's own, which may draw anew when called again; "" when none is."""
    told: str = ""
    """What says how pairs are drawn, the same on ranks that draw alike."""


@final
class EdgeMaker:
    """Makes the batches of one loader of edges; called from several threads at a time.

    Args:
        g: The graph.
        blocks: Makes the blocks around the nodes of a batch.
        plan: The rest.
    """

    def __init__(self, g: DistGraph, blocks: BatchMaker, plan: EdgePlan) -> None:
        self._g, self._blocks, self._plan = g, blocks, plan

    def alone(self) -> EdgeMaker:
        """Return what makes the same batches without columns; see :meth:`BatchMaker.alone`."""
        if self._plan.unkeyed:
            raise ConfigError(
                f"{self._plan.unkeyed} is a function, and may not say the same when it is called again; use "
                "dglx_dist.negative and the modes of exclude"
            )
        return EdgeMaker(self._g, self._blocks.alone(), replace(self._plan, columns={}))

    def drawn_by(self) -> str:
        """See :meth:`BatchMaker.drawn_by`."""
        return f"{self._blocks.drawn_by()}, {self._plan.told}"

    def make(self, edges: Mapping[EdgeType, Array], epoch: int) -> EdgeBatch:
        """Make the batch of ``edges`` (every type to (B,) int64 ids, B may be 0) in ``epoch``.

        Raises:
            ConfigError: a function of the user returned what cannot be used.
            PeerError: another rank that was asked is dead or silent.
        """
        begin = time.perf_counter()
        pulls = self._ask_columns(edges)
        pairs = self._pairs(edges, epoch)
        exclude = self._plan.exclude(edges)
        paired = time.perf_counter()
        batch = self._blocks.make(pairs.nodes, epoch, exclude)
        sampled = time.perf_counter()
        for etype, columns in pulls.items():
            for name, pull in columns.items():
                pairs.positive.edges[etype].data[name] = pull.result()
        return EdgeBatch(
            input_nodes=batch.input_nodes,
            positive=pairs.positive,
            negative=pairs.negative,
            blocks=batch.blocks,
            sample_s=(paired - begin) + batch.sample_s,
            fetch_s=batch.fetch_s + time.perf_counter() - sampled,
        )

    def _ask_columns(self, edges: Mapping[EdgeType, Array]) -> dict[EdgeType, dict[str, PendingPull]]:
        """Ask for the labels of the positive edges before anything else, so that they come meanwhile."""
        return {
            etype: {
                name: self._g.kvstore.submit_pull(key, edges[etype], phase=EDGE_PHASE)
                for name, key in columns.items()
            }
            for etype, columns in self._plan.columns.items()
        }

    def _pairs(self, edges: Mapping[EdgeType, Array], epoch: int) -> PairGraphs:
        """Return the pair graphs of the batch."""
        # The requests of all types leave before any is waited for.
        found = [self._g.structure(etype).submit_find_edges(ids) for etype, ids in edges.items()]
        batch = [
            self._positives(number, etype, ids, epoch, found[number])
            for number, (etype, ids) in enumerate(edges.items())
        ]
        ends = {one.etype: (one.sources, one.destinations) for one in batch}
        if self._plan.negative is None:
            return build_pairs(self._g.ntypes, edges, ends, None, self._g.idtype)
        drawn = self._plan.negative([one for one in batch if len(one.ids)]) if _any(edges) else {}
        nothing: Pairs = np.empty(0, np.int64), np.empty(0, np.int64)
        negative = {etype: drawn.get(etype, nothing) for etype in edges}
        return build_pairs(self._g.ntypes, edges, ends, negative, self._g.idtype)

    def _positives(self, number: int, etype: EdgeType, ids: Array, epoch: int, ends: Answered) -> Positives:
        structure = self._g.structure(etype)
        sources, destinations = ends()
        return Positives(
            etype=etype,
            number=number,
            ids=ids,
            sources=sources,
            destinations=destinations,
            num_sources=structure.num_sources,
            num_destinations=structure.num_destinations,
            seed=self._plan.seed,
            epoch=epoch,
        )


def _any(edges: Mapping[EdgeType, Array]) -> bool:
    return any(len(ids) for ids in edges.values())
