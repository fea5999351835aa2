"""Where the structure of several edge types lies that batches are sampled from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dglx_dist.draws.pick import Csc, merged
from dglx_dist.draws.rng import relation_keys
from dglx_dist.records import Array, EdgeType
from dglx_dist.sampling.relational import TypedAsk, TypedBatch, sample_relations
from dglx_dist.sampling.relations import Schema, relations_of
from dglx_dist.sampling.workspace import Workspace, check_seeds


@dataclass(frozen=True, kw_only=True)
class TypedDraws:
    """How all batches of a loader are drawn."""

    schema: Schema
    fanouts: Array
    """(L, R) int64, hop 0 (at the seeds) first; -1 for all in-edges."""
    replace: bool
    exclude: Mapping[EdgeType, Array]
    """Edge type to (X,) int64 ascending ids of edges never drawn; types may be missing."""
    seed: int
    idtype: np.dtype[Any]
    """Of the blocks' structure: int32 or int64."""

    def ask(self, seeds: Mapping[str, Array], epoch: int, exclude: Mapping[EdgeType, Array]) -> TypedAsk:
        """Return what the kernel needs for the batch of ``seeds``, without the edges ``exclude`` either."""
        nothing = np.empty(0, np.int64)
        nodes = [seeds.get(ntype, nothing) for ntype in self.schema.ntypes]
        num_hops, num_relations = self.fanouts.shape
        edges, edge_ends = nothing, np.zeros(num_relations + 1, np.int64)
        if exclude or self.exclude:
            lists = [
                merged(self.exclude.get(etype, nothing), exclude.get(etype, nothing))
                for etype in self.schema.etypes
            ]
            edges, edge_ends = np.concatenate(lists), _ends(lists)
        return TypedAsk(
            np.concatenate(nodes),
            _ends(nodes),
            self.fanouts,
            relation_keys(self.seed, epoch, num_hops, num_relations),
            self.replace,
            edges,
            edge_ends,
            np.empty(0, self.idtype),
        )


class TypedSource(ABC):
    """Samples whole batches of several types; any thread may call it, each with a workspace of its own."""

    @abstractmethod
    def sample(self, ask: TypedAsk, once: Mapping[EdgeType, Array], workspace: Workspace) -> TypedBatch:
        """Sample a batch; the draws depend on ``ask`` alone, not on where the structure lies.

        Args:
            ask: What to sample.
            once: Those of the excluded edges that are of this batch alone, by type.
            workspace: The calling thread's own, over the nodes of all types.

        Raises:
            ConfigError: a type's seeds have an id twice.
        """


@final
class WholeTypedSource(TypedSource):
    """Samples from a structure that this server has whole.

    Args:
        schema: The types.
        cscs: In-edges of all nodes, one per edge type.
    """

    def __init__(self, schema: Schema, cscs: Sequence[Csc]) -> None:
        # The record has their addresses only.
        self._alive = tuple(cscs)
        self._relations = relations_of(schema, self._alive)

    def sample(self, ask: TypedAsk, once: Mapping[EdgeType, Array], workspace: Workspace) -> TypedBatch:
        """Sample in one compiled call; see :class:`TypedSource`."""
        batch, table = sample_relations(self._relations, ask, workspace.table)
        workspace.keep(table)
        check_typed_seeds(ask, batch.node_ends[0])
        return batch


def check_typed_seeds(ask: TypedAsk, num_distinct: Array) -> None:
    """Raise ConfigError when fewer seeds of a type are distinct ((T,) int64) than there are."""
    for node_type, count in enumerate(num_distinct.tolist()):
        check_seeds(ask.seeds[ask.seed_ends[node_type] : ask.seed_ends[node_type + 1]], count)


def _ends(lists: Sequence[Array]) -> Array:
    return np.cumsum([0, *map(len, lists)])
