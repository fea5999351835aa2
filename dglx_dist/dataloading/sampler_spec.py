"""Translates DGL samplers into sampling plans, columns and edge weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from dgl.dataloading import BlockSampler, EdgePredictionSampler, LaborSampler, NeighborSampler

from dglx_dist.dataloading.feature_fetch import Columns, RowMemory
from dglx_dist.dataloading.sampler import SourceDraws
from dglx_dist.dataloading.temporal import TemporalNeighborSampler
from dglx_dist.errors import ConfigError
from dglx_dist.graph.row_kernels import view_as_numpy
from dglx_dist.graph.structure import Structure
from dglx_dist.options import is_integer
from dglx_dist.records import Array, ColumnInfo, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Fanout: TypeAlias = int | Mapping[str | EdgeType, int]
"""Maximum in-edges per destination and edge type, -1 for all. A dict has all types."""

Names: TypeAlias = tuple[str, ...] | Mapping[str | EdgeType, tuple[str, ...]]
"""Column names for the only type, or a dict from type to names."""

_SUPPORTED = (
    "Use dgl.dataloading.NeighborSampler, MultiLayerFullNeighborSampler, LaborSampler, "
    "dx.TemporalNeighborSampler, or a subclass of BlockSampler with a sample_blocks that "
    "calls g.sample_neighbors."
)


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """How mini-batches are sampled, and which columns are attached to them."""

    fanouts: tuple[Fanout, ...] | None
    """Fan-outs with layer 1 (input-most) first. None: the sampler's own code runs."""
    replace: bool = False
    """Whether an edge may be drawn more than once."""
    weights: str | None = None
    """Edge column with unnormalised probabilities. None draws uniformly."""
    by_source: SourceDraws | None = None
    """Options for LABOR."""
    temporal: TemporalNeighborSampler | None = None
    """The sampler, if it samples by time."""
    node_feats: Names = ()
    """Node columns for the first block's sources."""
    labels: Names = ()
    """Node columns for the last block's destinations."""
    edge_feats: Names = ()
    """Edge columns for every block."""

    @property
    def has_edge_weights(self) -> bool:
        """Whether blocks have ``edge_weights``. They do if LABOR draws with unequal probabilities."""
        return self.by_source is not None and self.by_source.unequal

    def refuse_trees(self, strategy: str, disjoint: object = False) -> None:
        """Raise ConfigError if each seed has its own tree, which ``strategy`` does not support.

        ``disjoint`` tells whether the loader has tree options.
        """
        if self.temporal is None and not disjoint:
            return
        option = "disjoint= or seed_time="
        if self.temporal is not None:
            option = type(self.temporal).__name__
        raise ConfigError(
            f"{option} needs rows of its own for each seed, but {strategy} computes each "
            "node once per step. Use strategy='data_parallel'."
        )

    def check_takes_all(self, strategy: str) -> None:
        """Raise ConfigError if the sampler weighs edges or has trees, which ``strategy`` does not support."""
        self.refuse_trees(strategy)
        if self.weights is not None or self.has_edge_weights:
            raise ConfigError(
                f"the sampler draws edges by {self.weights or 'importance_sampling'!r}, but "
                f"{strategy} takes all of them. Leave out prob=, mask= and "
                "importance_sampling=, or use strategy='data_parallel'."
            )


_NEIGHBORS = "Use dgl.dataloading.NeighborSampler(fanouts), which draws the neighbors of each node alone."
_IDS = "Pass the ids as a tensor or a dict by type. batch_size= and shuffle= are options of the loader."
_REMEDIES: Mapping[str, str] = {
    "ClusterGCNSampler": (
        "Use dx.ClusterGCNSampler(g, k) with strategy='data_parallel', or strategy='cooperative', which "
        "trains on groups of nodes and drops no edge."
    ),
    "ShaDowKHopSampler": (
        "Use it in a loader of nodes with strategy='data_parallel', or use dgl.dataloading.NeighborSampler."
    ),
    **dict.fromkeys(("SAINTSampler", "CappedNeighborSampler"), _NEIGHBORS),
    # The following names belong to GraphBolt.
    **dict.fromkeys(("SubgraphSampler", "NeighborSamplerImpl", "LayerNeighborSampler"), _NEIGHBORS),
    **dict.fromkeys(("ItemSampler", "ItemSet", "ItemSetDict", "HeteroItemSet"), _IDS),
    "NegativeSampler": "Pass negative_sampler=dx.negative.Uniform(k) to the edge loader.",
    "FeatureFetcher": "Name the columns in prefetch_node_feats= of dgl.dataloading.NeighborSampler.",
    "DataLoader": "Use dx.DataLoader(g, ids, sampler) with the same ids and sampler.",
}
"""Remedies by class name, for classes in DGL or GraphBolt. They also hold for subclasses."""


def refuse_by_name(value: object) -> None:
    """Raise ConfigError with a remedy if ``value`` is a sampler or loader that cannot work here."""
    for base in type(value).__mro__:
        name = base.__name__
        if name in _REMEDIES and base.__module__.startswith(("dgl.", "dglx_dist.")):
            raise ConfigError(f"{base.__module__}.{name} is unsupported. {_REMEDIES[name]}")


def read_sampler(sampler: object) -> SamplePlan:
    """Read a DGL sampler.

    Args:
        sampler: Any object. A sampler that overrides how blocks are made runs its own code.

    Raises:
        ConfigError: the sampler or one of its options is unsupported. The message names supported ones.
    """
    refuse_by_name(sampler)
    if isinstance(sampler, EdgePredictionSampler):
        raise ConfigError(
            "as_edge_prediction_sampler(...) is for edge loaders, and this is a node loader. "
            "Pass it to dx.DataLoader or dx.DistEdgeDataLoader."
        )

    if not isinstance(sampler, BlockSampler):
        raise ConfigError(f"{type(sampler).__qualname__} makes no blocks for a node loader. {_SUPPORTED}")

    plan = SamplePlan(
        fanouts=None,
        node_feats=read_column_names(sampler.prefetch_node_feats, "prefetch_node_feats"),
        labels=read_column_names(sampler.prefetch_labels, "prefetch_labels"),
        edge_feats=read_column_names(sampler.prefetch_edge_feats, "prefetch_edge_feats"),
    )
    if isinstance(sampler, TemporalNeighborSampler):
        return replace(plan, fanouts=read_sampler_fanouts(sampler.fanouts), temporal=sampler)

    if not _is_stock(sampler):
        if isinstance(sampler, LaborSampler):
            raise ConfigError(
                f"{type(sampler).__qualname__} overrides methods of LaborSampler, and its own "
                "code works on graphs of one process only. Pass LaborSampler itself, or a "
                "subclass of BlockSampler."
            )
        return plan

    if sampler.edge_dir != "in":
        raise ConfigError(
            f"edge_dir={sampler.edge_dir!r} needs out-edges, but a partition holds the "
            "in-edges of its nodes. Use edge_dir='in' on the reversed graph (dgl.reverse)."
        )

    plan = replace(plan, fanouts=read_sampler_fanouts(sampler.fanouts))
    if isinstance(sampler, LaborSampler):
        return replace(plan, by_source=_read_source_draws(sampler), weights=sampler.prob)
    return replace(plan, replace=bool(sampler.replace), weights=sampler.prob)


def _is_stock(sampler: BlockSampler) -> bool:
    """Return whether ``sampler`` overrides no DGL code, so that compiled kernels can replace it."""
    if not isinstance(sampler, NeighborSampler | LaborSampler):
        return False
    sampler_type = type(sampler)
    return (
        sampler_type.sample_blocks in (NeighborSampler.sample_blocks, LaborSampler.sample_blocks)
        and sampler_type.sample is BlockSampler.sample
        and sampler_type.assign_lazy_features is BlockSampler.assign_lazy_features
    )


def _read_source_draws(sampler: LaborSampler) -> SourceDraws:
    """Return the options for LABOR. Raise ConfigError if the number of rounds is not an integer."""
    rounds = sampler.importance_sampling
    if not is_integer(rounds):
        raise ConfigError(f"importance_sampling={rounds!r}. Use a number of rounds, or -1 for convergence.")
    return SourceDraws(
        layer_dependency=bool(sampler.layer_dependency),
        batch_dependency=int(sampler.cnt[1]),  # DGL keeps this option only in its counters.
        rounds=max(int(rounds), -1),
        unequal=sampler.prob is not None or rounds != 0,
    )


def read_sampler_fanouts(fanouts: object) -> tuple[Fanout, ...]:
    """Return each layer's fan-out, a number or a dict by edge type. Raise ConfigError for other values."""
    if not isinstance(fanouts, (list, tuple, np.ndarray)) or len(fanouts) == 0:
        raise ConfigError(f"fanouts is {fanouts!r}. Use one number per layer, e.g. [15, 10, 5].")
    layers: list[Fanout] = []
    for layer, fanout in enumerate(fanouts):
        option = f"fanouts[{layer}]"
        if not isinstance(fanout, Mapping):
            layers.append(_read_fanout(fanout, option))
            continue
        fanout_by_type = {}
        for etype, number in fanout.items():
            fanout_by_type[etype] = _read_fanout(number, f"{option}[{etype!r}]")
        layers.append(fanout_by_type)
    return tuple(layers)


def _read_fanout(fanout: Any, option: str) -> int:
    if not is_integer(fanout) or fanout < -1:
        raise ConfigError(f"{option} is {fanout!r}. Use a number of in-edges, 0 or more, or -1 for all.")
    return int(fanout)


def read_column_names(names: object, option: str) -> Names:
    """Return the columns that a sampler prefetches: a tuple of names, or tuples by type.

    Raises ConfigError for other values. As in DGL, a type may have a single name instead of a list.
    """
    if not names:
        return ()
    if not isinstance(names, Mapping):
        return _read_names(names, option)
    names_by_type = {}
    for type_name, columns in names.items():
        if isinstance(columns, str):
            columns = [columns]
        names_by_type[type_name] = _read_names(columns, f"{option}[{type_name!r}]")
    return names_by_type


def _read_names(names: object, option: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise ConfigError(f"{option} is the string {names!r}. Pass a list: [{names!r}].")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{option} is {names!r}. Pass a list of column names.")
    return tuple(names)


K = TypeVar("K")


def find_columns(g: DistGraph, plan: SamplePlan, memory: RowMemory) -> Columns:
    """Find the columns that ``plan`` attaches. A ConfigError lists the existing ones."""
    return Columns(
        inputs=_find_node_columns(g, plan.node_feats, "prefetch_node_feats"),
        targets=_find_node_columns(g, plan.labels, "prefetch_labels"),
        edges=find_edge_columns(g, plan.edge_feats, "prefetch_edge_feats"),
        memory=memory,
    )


def find_edge_columns(g: DistGraph, names: Names, option: str) -> dict[EdgeType, dict[str, str]]:
    """Return edge type to name to store key. A ConfigError lists the existing columns."""
    names_by_type = _group_names(names, g.canonical_etypes, g.to_canonical_etype, option)
    return {etype: find_edge_keys(g, etype, columns, option) for etype, columns in names_by_type.items()}


def find_edge_keys(g: DistGraph, etype: EdgeType, names: Sequence[str], option: str) -> dict[str, str]:
    """Return the store keys for the edge columns ``names``. A ConfigError lists the existing ones."""
    columns = "g.edata" if len(g.canonical_etypes) == 1 else f"g.edges[{etype}].data"
    return _find_keys(g.edges[etype].data, names, option, columns)


def _find_node_columns(g: DistGraph, names: Names, option: str) -> dict[str, dict[str, str]]:
    def resolve_ntype(name: str) -> str:
        return str(g.get_node_partition_policy(name).type_name)

    keys = {}
    for ntype, columns in _group_names(names, g.ntypes, resolve_ntype, option).items():
        data_name = "g.ndata" if len(g.ntypes) == 1 else f"g.nodes[{ntype!r}].data"
        keys[ntype] = _find_keys(g.nodes[ntype].data, columns, option, data_name)
    return keys


def _find_keys(data: Any, names: Sequence[str], option: str, data_name: str) -> dict[str, str]:
    for name in names:
        if name not in data:
            raise ConfigError(f"{option} names {name!r}, but {data_name} has {sorted(data)}")
    return {name: str(data[name].kvstore_key) for name in names}


def _group_names(
    names: Names, types: Sequence[K], resolve_type: Callable[[Any], K], option: str
) -> dict[K, tuple[str, ...]]:
    """Return the names by type. As in DGL, a plain list is for the only type.

    Raises ConfigError for a list if there are several types.
    """
    if isinstance(names, Mapping):
        names_by_type: dict[K, tuple[str, ...]] = {}
        for key, columns in names.items():
            type_name = resolve_type(key)
            # Two keys may stand for one type.
            names_by_type[type_name] = (*names_by_type.get(type_name, ()), *columns)
        return names_by_type
    if not names:
        return {}
    if len(types) > 1:
        raise ConfigError(
            f"{option} is the list {list(names)}, but the graph has the types "
            f"{', '.join(map(str, types))}. Pass {{type: list of names}}."
        )
    return {types[0]: names}


def read_all_weights(g: DistGraph, etype: EdgeType, name: str) -> Array:
    """Read the (E,) float32 weights of all edges of one type into this rank's memory.

    Raises ConfigError if the column does not exist, or is not one finite number per edge, at least 0.
    """
    key = find_edge_keys(g, etype, [name], "prob")[name]
    column = g.kvstore.column(key)
    has_all_rows = len(column.shards) == 1 and len(column.shards[0].rows) == g.num_edges(etype)
    if has_all_rows:
        rows = column.shards[0].rows
    else:
        rows = view_as_numpy(g.kvstore.pull(key, np.arange(g.num_edges(etype)), phase="structure"))
    return _read_weights(rows, column.info, name, first_edge=0)


def read_shard_weights(g: DistGraph, structure: Structure, name: str) -> dict[int, Array]:
    """Return (E,) float32 edge weights for each shard on this server, by the shard's first node."""
    key = find_edge_keys(g, structure.etype, [name], "prob")[name]
    column = g.kvstore.column(key)
    weights_by_edge = {}
    for column_shard in column.shards:
        first_edge = column_shard.first
        weights_by_edge[first_edge] = _read_weights(column_shard.rows, column.info, name, first_edge)

    # A shard without edges has no weights.
    weights_by_node = {}
    for shard in structure.shards:
        if len(shard.indices):
            weights_by_node[shard.first_node] = weights_by_edge[shard.first_edge]
    return weights_by_node


def check_edge_column(g: DistGraph, name: str) -> None:
    """Raise ConfigError unless every edge type has the column ``name``."""
    missing_types = [etype for etype in g.canonical_etypes if name not in g.edges[etype].data]
    if missing_types:
        raise ConfigError(
            f"the column {name!r} was given as prob or mask, but {len(missing_types)} of "
            f"{len(g.canonical_etypes)} edge types do not have it: {', '.join(map(str, missing_types))}. The "
            f"first of them has {sorted(g.edges[missing_types[0]].data)}. Add the column. A column of ones "
            "draws all edges with equal probability."
        )


def _read_weights(rows: Array, info: ColumnInfo, name: str, first_edge: int) -> Array:
    """Return stored rows as float32 weights. Raise ConfigError if one is negative or not finite.

    Stored bfloat16 values are given by their bits. ``first_edge`` is the first row's edge, for errors.
    """
    if rows.ndim != 1 or rows.dtype.kind not in "bfiu":
        raise ConfigError(
            f"edata[{name!r}] has rows of shape {rows.shape[1:]} and dtype {rows.dtype}, but "
            "probabilities and masks need one number per edge."
        )
    if info.dtype == "bfloat16":
        # These bits are the upper half of a float32 with the same value.
        weights = (rows.astype(np.uint32) << 16).view(np.float32)
    else:
        weights = rows.astype(np.float32)

    # Minimum and maximum need no temporary arrays. Both are NaN if one weight is NaN.
    if len(weights) and not 0 <= weights.min() <= weights.max() < np.inf:
        is_valid = (weights >= 0) & (weights < np.inf)
        row = int(np.argmin(is_valid))
        raise ConfigError(f"edata[{name!r}] is {weights[row]} at edge {first_edge + row}. Use 0 or more.")
    return weights
