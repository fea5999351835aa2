"""Translation of DGL samplers into sampling plans, columns and edge weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from dgl.dataloading import BlockSampler, EdgePredictionSampler, LaborSampler, NeighborSampler

from dglx_dist.dataloading.feature_fetch import Columns, RowMemory
from dglx_dist.dataloading.sampler import SourceDraws
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.graph.structure import Structure
from dglx_dist.options import is_integer
from dglx_dist.records import Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Fanout: TypeAlias = int | Mapping[str | EdgeType, int]
"""In-edges per destination and edge type, -1 for all; a dict by relation or triple has every edge type."""

Names: TypeAlias = tuple[str, ...] | Mapping[str | EdgeType, tuple[str, ...]]
"""Columns of the only type, or by type."""

_WORKS = (
    "dgl.dataloading.NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler and subclasses of "
    "BlockSampler whose sample_blocks uses g.sample_neighbors work"
)


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """How mini-batches are sampled, and the columns attached to them."""

    fanouts: tuple[Fanout, ...] | None
    """Layer 1 (input-most) first. None: the sampler's own code runs."""
    replace: bool = False
    """Whether an edge may be drawn more than once."""
    weights: str | None = None
    """Edge column of the unnormalised probabilities; None for uniform draws."""
    by_source: SourceDraws | None = None
    """LABOR's options."""
    node_feats: Names = ()
    """Node columns for the sources of the first block."""
    labels: Names = ()
    """Node columns for the destinations of the last block."""
    edge_feats: Names = ()
    """Edge columns for every block."""

    @property
    def has_edge_weights(self) -> bool:
        """Whether blocks have ``edge_weights``, as LABOR draws with unequal probabilities."""
        return self.by_source is not None and self.by_source.unequal

    def check_takes_all(self, strategy: str) -> None:
        """Raise ConfigError if edges have weights or probabilities, which ``strategy`` does not read."""
        if self.weights is not None or self.has_edge_weights:
            raise ConfigError(
                f"the sampler draws edges by {self.weights or 'importance_sampling'!r}, but {strategy} takes "
                "all of them; leave prob=, mask=, importance_sampling= out, or use strategy='data_parallel'"
            )


_NEIGHBORS = "use dgl.dataloading.NeighborSampler(fanouts), which draws the neighbours of each node by itself"
_IDS = "give the ids, a tensor or a dict of them by type; batch_size= and shuffle= are the loader's"
_REMEDIES: Mapping[str, str] = {
    "ClusterGCNSampler": "strategy='cooperative' trains on groups of nodes, and drops no edge",
    **dict.fromkeys(("SAINTSampler", "ShaDowKHopSampler", "CappedNeighborSampler"), _NEIGHBORS),
    # GraphBolt's.
    **dict.fromkeys(("SubgraphSampler", "NeighborSamplerImpl", "LayerNeighborSampler"), _NEIGHBORS),
    **dict.fromkeys(("ItemSampler", "ItemSet", "ItemSetDict", "HeteroItemSet"), _IDS),
    "NegativeSampler": "give negative_sampler=dgl.dataloading.negative_sampler.Uniform(k) to the edge loader",
    "FeatureFetcher": "name the columns in prefetch_node_feats= of dgl.dataloading.NeighborSampler",
    "DataLoader": "dx.DataLoader(g, ids, sampler) makes the batches; give it the ids and the sampler",
}
"""Class of DGL or GraphBolt, and of what derives from it, to what takes its place."""


def refuse_by_name(given: object) -> None:
    """Raise ConfigError with the remedy for a sampler or loader that cannot work here."""
    for kind in type(given).__mro__:
        if kind.__name__ in _REMEDIES and kind.__module__.startswith("dgl."):
            raise ConfigError(f"{kind.__module__}.{kind.__name__}: {_REMEDIES[kind.__name__]}")


def read_sampler(sampler: object) -> SamplePlan:
    """Read a DGL sampler.

    Args:
        sampler: Any object. A sampler that overrides how blocks are made runs its own code.

    Raises:
        ConfigError: the sampler or one of its options is unsupported; the message names the supported ones.
    """
    refuse_by_name(sampler)
    if isinstance(sampler, EdgePredictionSampler):
        raise ConfigError(
            "as_edge_prediction_sampler(...) is for edge loaders, and this is a node loader; pass it to "
            "dx.DataLoader or dx.DistEdgeDataLoader"
        )
    if not isinstance(sampler, BlockSampler):
        raise ConfigError(f"{type(sampler).__qualname__} does not make blocks for a node loader; {_WORKS}")
    plan = SamplePlan(
        fanouts=None,
        node_feats=read_column_names(sampler.prefetch_node_feats, "prefetch_node_feats"),
        labels=read_column_names(sampler.prefetch_labels, "prefetch_labels"),
        edge_feats=read_column_names(sampler.prefetch_edge_feats, "prefetch_edge_feats"),
    )
    if not _is_stock(sampler):
        if isinstance(sampler, LaborSampler):
            raise ConfigError(
                f"{type(sampler).__qualname__} overrides methods of LaborSampler, whose own code works on "
                "graphs of one process only; give LaborSampler itself, or a subclass of BlockSampler"
            )
        return plan
    if sampler.edge_dir != "in":
        raise ConfigError(
            f"edge_dir={sampler.edge_dir!r} needs out-edges, but a partition holds the in-edges of its "
            "nodes; use edge_dir='in' on the reversed graph (dgl.reverse) instead"
        )
    plan = replace(plan, fanouts=_fanouts(sampler.fanouts))
    if isinstance(sampler, LaborSampler):
        return replace(plan, by_source=_source_draws(sampler), weights=sampler.prob)
    return replace(plan, replace=bool(sampler.replace), weights=sampler.prob)


def _is_stock(sampler: BlockSampler) -> bool:
    # Only if no code of DGL's is overridden can the compiled kernels replace it.
    kind, stock = type(sampler), (NeighborSampler, LaborSampler)
    return (
        any(isinstance(sampler, one) and kind.sample_blocks is one.sample_blocks for one in stock)
        and kind.sample is BlockSampler.sample
        and kind.assign_lazy_features is BlockSampler.assign_lazy_features
    )


def _source_draws(sampler: LaborSampler) -> SourceDraws:
    rounds = sampler.importance_sampling
    if not is_integer(rounds):
        raise ConfigError(
            f"importance_sampling={rounds!r}; give a number of rounds, 0 for none, or -1 until they converge"
        )
    return SourceDraws(
        layer_dependency=bool(sampler.layer_dependency),
        batch_dependency=int(sampler.cnt[1]),  # DGL keeps the option only in its counters.
        rounds=max(int(rounds), -1),
        unequal=sampler.prob is not None or rounds != 0,
    )


def _fanouts(fanouts: object) -> tuple[Fanout, ...]:
    if not isinstance(fanouts, (list, tuple, np.ndarray)) or len(fanouts) == 0:
        raise ConfigError(f"fanouts is {fanouts!r}; give one number per layer, e.g. [15, 10, 5]")
    read: list[Fanout] = []
    for layer, fanout in enumerate(fanouts):
        where = f"fanouts[{layer}]"
        if isinstance(fanout, Mapping):
            read.append({etype: _number(number, f"{where}[{etype!r}]") for etype, number in fanout.items()})
        else:
            read.append(_number(fanout, where))
    return tuple(read)


def _number(fanout: Any, where: str) -> int:
    if not is_integer(fanout) or fanout < -1:
        raise ConfigError(f"{where} is {fanout!r}; give a number of in-edges, 0 or more, or -1 for all")
    return int(fanout)


def read_column_names(given: object, option: str) -> Names:
    """Check the columns that a sampler prefetches; ConfigError unless they are lists of names."""
    if not given:
        return ()
    if isinstance(given, Mapping):
        return {
            kind: _listed([names] if isinstance(names, str) else names, f"{option}[{kind!r}]")
            for kind, names in given.items()
        }
    return _listed(given, option)


def _listed(given: object, option: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigError(f"{option} is the string {given!r}; give a list: [{given!r}]")
    if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{option} is {given!r}; give a list of column names")
    return tuple(given)


K = TypeVar("K")


def find_columns(g: DistGraph, plan: SamplePlan, memory: RowMemory) -> Columns:
    """Return the columns of ``g`` that ``plan`` attaches; ConfigError lists the existing ones."""
    return Columns(
        inputs=_node_columns(g, plan.node_feats, "prefetch_node_feats"),
        targets=_node_columns(g, plan.labels, "prefetch_labels"),
        edges=find_edge_columns(g, plan.edge_feats, "prefetch_edge_feats"),
        memory=memory,
    )


def find_edge_columns(g: DistGraph, names: Names, option: str) -> dict[EdgeType, dict[str, str]]:
    """Return edge type to name to store key; ConfigError lists the existing columns."""
    by_type = _by_type(names, g.canonical_etypes, g.to_canonical_etype, option)
    return {etype: find_edge_keys(g, etype, listed, option) for etype, listed in by_type.items()}


def find_edge_keys(g: DistGraph, etype: EdgeType, names: Sequence[str], option: str) -> dict[str, str]:
    """Return the store keys of the edge columns ``names``; ConfigError lists the existing ones."""
    where = "g.edata" if len(g.canonical_etypes) == 1 else f"g.edges[{etype}].data"
    return _keys(g.edges[etype].data, names, option, where)


def _node_columns(g: DistGraph, names: Names, option: str) -> dict[str, dict[str, str]]:
    by_type = _by_type(names, g.ntypes, lambda name: str(g.get_node_partition_policy(name).type_name), option)
    where = "g.ndata" if len(g.ntypes) == 1 else "g.nodes[{!r}].data"
    return {
        ntype: _keys(g.nodes[ntype].data, of, option, where.format(ntype)) for ntype, of in by_type.items()
    }


def _keys(data: Any, names: Sequence[str], option: str, where: str) -> dict[str, str]:
    for name in names:
        if name not in data:
            raise ConfigError(f"{option} names {name!r}, but {where} has {sorted(data)}")
    return {name: str(data[name].kvstore_key) for name in names}


def _by_type(
    names: Names, types: Sequence[K], known: Callable[[Any], K], option: str
) -> dict[K, tuple[str, ...]]:
    # As in DGL, a plain list is for the only type.
    if isinstance(names, Mapping):
        found: dict[K, tuple[str, ...]] = {}
        for given, columns in names.items():
            found[known(given)] = (*found.get(known(given), ()), *columns)
        return found
    if not names:
        return {}
    if len(types) > 1:
        listed_types = ", ".join(map(str, types))
        raise ConfigError(
            f"{option} is the list {list(names)}, but the graph has the types {listed_types}; give "
            "{type: list of names}"
        )
    return {types[0]: names}


def read_all_weights(g: DistGraph, etype: EdgeType, name: str) -> Array:
    """Return the (E,) float32 weights of all edges of a type, in this rank's memory.

    Raises:
        ConfigError: the column does not exist, or is not one finite number of at least 0 per edge.
    """
    key = find_edge_keys(g, etype, [name], "prob")[name]
    column = g.kvstore.column(key)
    if len(column.shards) == 1 and len(column.shards[0].rows) == g.num_edges(etype):
        return _checked(column.shards[0].rows, column.info, name, 0)
    rows = g.kvstore.pull(key, np.arange(g.num_edges(etype)), phase="structure")
    return _checked(view_as_numpy(rows), column.info, name, 0)


def read_shard_weights(g: DistGraph, structure: Structure, name: str) -> dict[int, Array]:
    """Return the (E,) float32 edge weights of each shard of this server, by the first node of the shard."""
    key = find_edge_keys(g, structure.etype, [name], "prob")[name]
    column = g.kvstore.column(key)
    by_edge = {one.first: _checked(one.rows, column.info, name, one.first) for one in column.shards}
    return {shard.first_node: by_edge[shard.first_edge] for shard in structure.shards if len(shard.indices)}


def check_every_type_has(g: DistGraph, name: str) -> None:
    """Raise ConfigError unless every edge type has the column ``name``."""
    missing = [etype for etype in g.canonical_etypes if name not in g.edges[etype].data]
    if missing:
        raise ConfigError(
            f"prob names {name!r}, but {len(missing)} of {len(g.canonical_etypes)} edge types have no such "
            f"column: {', '.join(map(str, missing))} (the first has {sorted(g.edges[missing[0]].data)}); "
            "add it, filled with ones for uniform draws"
        )


def _checked(rows: Array, info: ColumnInfo, name: str, first_edge: int) -> Array:
    # `rows` are as stored: bfloat16 as its bits.
    if rows.ndim != 1 or rows.dtype.kind not in "bfiu":
        raise ConfigError(
            f"edata[{name!r}] has rows of shape {rows.shape[1:]} and dtype {rows.dtype}; a probability or "
            "mask is one number per edge"
        )
    if info.dtype == "bfloat16":
        # Its bits are the upper half of those of the float32 with the same value.
        weights = (rows.astype(np.uint32) << 16).view(np.float32)
    else:
        weights = rows.astype(np.float32)
    # Minimum and maximum, which are NaN if one weight is, need no temporary arrays.
    if len(weights) and not 0 <= weights.min() <= weights.max() < np.inf:
        bad = int(np.argmin((weights >= 0) & (weights < np.inf)))
        raise ConfigError(
            f"edata[{name!r}] is {weights[bad]} at edge {first_edge + bad}; give finite weights of at least 0"
        )
    return weights
