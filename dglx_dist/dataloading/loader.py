"""Node data loader, and the batch makers for node and edge loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
from dgl.heterograph import DGLBlock

from dglx_dist.comm.collectives import barrier, check_equal, gather_json, run_on_all_ranks
from dglx_dist.comm.devices import resolve_device
from dglx_dist.dataloading.feature_fetch import Columns, RowMemory
from dglx_dist.dataloading.kernels import Schema
from dglx_dist.dataloading.minibatch import Excluded, KernelMaker, MiniBatch, NodeIds, NodeMaker, SamplerMaker
from dglx_dist.dataloading.sampler import BatchSource, DrawSettings, LocalSource, RemoteSource, compute_digest
from dglx_dist.dataloading.sampler_spec import (
    Fanout,
    SamplePlan,
    check_edge_column,
    find_columns,
    find_edge_columns,
    read_all_weights,
    read_column_names,
    read_sampler,
    read_shard_weights,
)
from dglx_dist.dataloading.seed_times import read_timed_items, read_tree_rule
from dglx_dist.dataloading.step_loader import (
    Items,
    LoaderOptions,
    StepLoader,
    read_loader_options,
    resolve_seed,
)
from dglx_dist.dataloading.trees import TreeRule, TreeSource, make_row_draw
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Ids
from dglx_dist.graph.sampling import group_by_type, make_csc, make_keyed_draw, read_fanouts
from dglx_dist.graph.structure import NO_EDGES
from dglx_dist.graph.time_order import TimeColumns, open_time_orders
from dglx_dist.keyed_random import Csc, Rule
from dglx_dist.records import Array, EdgeType

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_SPARE_BUFFERS = 2
"""Number of batches beside the prefetched ones: one in the training loop, one in its backward pass."""


def open_maker(g: DistGraph, sampler: Any, plan: SamplePlan, options: LoaderOptions, seed: int) -> NodeMaker:
    """Return the maker for a loader's batches. Every rank must call this.

    Raises ConfigError on all ranks if a rank's options do not fit its graph or its sampler, or if the ranks
    have different samplers. If a rank excludes an edge that does not exist, it raises IndexError, and the
    other ranks raise ConfigError.
    """

    def read_plan() -> tuple[Columns, DrawSettings | None, tuple[TreeRule, TimeColumns | None] | None]:
        columns, draws = _read_draws(g, sampler, plan, options, seed)
        return columns, draws, read_tree_rule(g, plan, options)

    columns, draws, trees = run_on_all_ranks(g.session, read_plan, ConfigError)

    # The ranks serve each other's draws, so all of them must sample by the same rule.
    rule = f"fanouts={plan.fanouts}, replace={plan.replace}, by_source={plan.by_source}"
    signature = f"{rule}, prob={plan.weights!r}"
    if trees is not None:
        signature = f"trees={trees}, {signature}"
    check_equal(g.session, "the sampler", signature)

    if draws is None:
        return SamplerMaker(sampler, g, columns)
    if trees is not None:
        return KernelMaker(_open_trees(g, draws, *trees), draws, g, columns)
    return KernelMaker(_open_source(g, draws, plan.weights), draws, g, columns)


def _read_draws(
    g: DistGraph, sampler: Any, plan: SamplePlan, options: LoaderOptions, seed: int
) -> tuple[Columns, DrawSettings | None]:
    """Return the columns to fetch and the settings for draws. This function calls no other rank.

    The settings are None if the sampler runs its own code. Raises ConfigError if the options do not fit the
    sampler, or if the sampler needs edges that this server does not have.
    """
    columns = open_columns(g, plan, options)
    if plan.fanouts is None:
        if options.exclude is not None:
            raise ConfigError(
                f"the own code of {type(sampler).__qualname__} does not support exclude=. Use "
                "NeighborSampler, or exclude the edges in the sampler."
            )
        return columns, None

    if plan.weights is not None:
        check_edge_column(g, plan.weights)
    is_replicated = all(g.structure(etype).is_replicated for etype in g.canonical_etypes)
    if plan.has_edge_weights and not is_replicated:
        raise ConfigError(
            "LaborSampler with prob= or importance_sampling= weighs all in-edges of a batch, "
            "but this server has only a part of the structure. Open the graph with "
            "structure='replicated'."
        )

    return columns, DrawSettings(
        schema=_read_schema(g),
        fanouts=_make_fanouts(plan.fanouts, g.canonical_etypes),
        replace=plan.replace,
        exclude=read_excluded_edges(g, options.exclude),
        seed=seed,
        by_source=plan.by_source,
    )


def open_columns(g: DistGraph, plan: SamplePlan, options: LoaderOptions) -> Columns:
    """Return the columns that ``plan`` attaches, with buffers. A ConfigError lists the existing columns."""
    device = resolve_device(options.device, g.session.device)
    memory = RowMemory(options.depth + _SPARE_BUFFERS, options.feature_dtype, device)
    return find_columns(g, plan, memory)


def _open_source(
    g: DistGraph, draws: DrawSettings, weights: str | None, op: str | None = None
) -> BatchSource:
    """Return the source for batches: this process if it has all edges, and otherwise all servers.

    Args:
        weights: Name of the edge column with the probabilities, or None for uniform draws.
        op: RPC operation that all servers serve already. Without it, the draws are served here, and every
            rank must call this.
    """
    structures = [g.structure(etype) for etype in draws.schema.etypes]
    if all(structure.is_replicated for structure in structures):
        return LocalSource(draws.schema, _read_structures(g, weights))

    if op is None:
        op = _serve_draws(g, weights, draws)
    return RemoteSource(draws.schema, structures, op)


def _open_trees(g: DistGraph, draws: DrawSettings, rule: TreeRule, columns: TimeColumns | None) -> TreeSource:
    """Open the orders by time and serve tree draws on all servers. Every rank must call this."""
    excluded = {etype: draws.exclude.get(etype, NO_EDGES) for etype in g.canonical_etypes}

    # The name is a hash of all ranks' rules, so loaders with equal rules share an operation.
    exclude_digest = compute_digest(excluded.items())
    rules = gather_json([repr(rule), repr(columns), exclude_digest], g.session)
    op = f"trees.{hashlib.sha256(str(rules).encode()).hexdigest()}"

    if not all(g.structure(etype).serves(op) for etype in excluded):
        orders = {} if columns is None else open_time_orders(g, columns)
        for etype, ids in excluded.items():
            g.structure(etype).serve(op, make_row_draw(rule, ids, orders.get(etype)))

    # The first rank that returns may send requests at once.
    barrier(g.session, "opening a loader")
    structures = [g.structure(etype) for etype in draws.schema.etypes]
    return TreeSource(draws.schema, structures, op, rule)


def open_neighborhood_maker(
    g: DistGraph,
    num_layers: int,
    mask: str | None = None,
    edge_feats: Any = (),
    exclude: Excluded | None = None,
) -> NodeMaker:
    """Return a maker for blocks with all in-edges over several hops.

    If ``mask`` or ``exclude`` is not None, every rank must call this.

    Args:
        num_layers: Number of hops.
        mask: Name of an edge column that marks the edges to use.
        edge_feats: Edge columns to attach.
        exclude: Edges that no block gets.
    """
    # A fan-out of -1 takes all in-edges.
    fanouts = np.full((num_layers, len(g.canonical_etypes)), -1)
    schema = _read_schema(g)
    draws = DrawSettings(schema=schema, fanouts=fanouts, replace=False, exclude=exclude or {}, seed=0)

    names = read_column_names(edge_feats, "edge_feats")
    columns = Columns(edges=find_edge_columns(g, names, "edge_feats"))

    # Every server serves "in_edges" from the start. A mask and exclusions need their own operation.
    op = "in_edges" if mask is None and exclude is None else None
    return KernelMaker(_open_source(g, draws, mask, op), draws, g, columns)


def _read_structures(g: DistGraph, weights: str | None) -> list[Csc]:
    """Return every edge type's structure with its weights, for a replicated graph.

    If ``weights`` is not None, every rank must call this.
    """
    shards = {etype: g.structure(etype).shards[0] for etype in g.canonical_etypes}
    if weights is None:
        return [make_csc(shard) for shard in shards.values()]

    def read_weighted() -> list[Csc]:
        return [make_csc(shard, read_all_weights(g, etype, weights)) for etype, shard in shards.items()]

    return run_on_all_ranks(g.session, read_weighted, ConfigError)


def _serve_draws(g: DistGraph, weights: str | None, draws: DrawSettings) -> str:
    """Register the draws as an RPC operation on all servers. Return its name. Every rank must call this.

    The name is a hash of all ranks' rules, so loaders with the same rule share an operation.
    """
    weights_by_type: Mapping[EdgeType, Mapping[int, Array]] = {}
    if weights is not None:
        structures = [g.structure(etype) for etype in g.canonical_etypes]
        weights_by_type = run_on_all_ranks(
            g.session,
            lambda: {structure.etype: read_shard_weights(g, structure, weights) for structure in structures},
            ConfigError,
        )

    excluded = {etype: draws.exclude.get(etype, NO_EDGES) for etype in g.canonical_etypes}

    # The digest covers the contents, because weights may change under the same name.
    contents = [*excluded.items()]
    for etype, weights_by_shard in weights_by_type.items():
        for first_node in sorted(weights_by_shard):
            contents.append((etype, weights_by_shard[first_node]))

    is_by_source = draws.by_source is not None
    rule_of_rank = [bool(draws.replace), is_by_source, compute_digest(contents)]
    rules = gather_json(rule_of_rank, g.session)
    op = f"sample.{hashlib.sha256(str(rules).encode()).hexdigest()}"

    for etype, ids in excluded.items():
        if not g.structure(etype).serves(op):
            draw = make_keyed_draw(Rule(draws.replace, ids, is_by_source), weights_by_type.get(etype, {}))
            g.structure(etype).serve(op, draw)

    # The first rank that returns may send requests at once.
    barrier(g.session, "opening a loader")
    return op


def _read_schema(g: DistGraph) -> Schema:
    return Schema(
        ntypes=tuple(g.ntypes),
        num_nodes=tuple(g.num_nodes(ntype) for ntype in g.ntypes),
        etypes=tuple(g.canonical_etypes),
    )


def _make_fanouts(fanouts: Sequence[Fanout], etypes: Sequence[EdgeType]) -> Array:
    """Return the fan-outs as an (L, R) int64 array over L hops and R edge types. Hop 0 is at the seeds.

    ``fanouts`` has layer 1 first, which is the hop farthest from the seeds. Raises ConfigError if a dict
    lacks an edge type.
    """
    rows = []
    for layer, fanout in enumerate(fanouts):
        if isinstance(fanout, Mapping):
            # A dict may name an edge type by its triple or by its relation.
            names = set(fanout)
            missing = [etype for etype in etypes if names.isdisjoint((etype, etype[1]))]
            if missing:
                raise ConfigError(
                    f"fanouts[{layer}] names {len(etypes) - len(missing)} of {len(etypes)} "
                    f"edge types. Missing: {', '.join(map(str, missing))}. Use 0 for types "
                    "that are not drawn."
                )
        by_etype = read_fanouts(fanout, etypes)
        rows.append([by_etype[etype] for etype in etypes])

    rows.reverse()
    return np.array(rows, np.int64)


def read_excluded_edges(g: DistGraph, exclude: Any) -> dict[EdgeType, Array]:
    """Return the excluded int64 edge ids by type, ascending and distinct. Types without any are missing.

    ``exclude`` is None, ids for the only edge type, or a dict from edge type to ids.
    """
    if exclude is None:
        return {}
    counts = {etype: g.num_edges(etype) for etype in g.canonical_etypes}
    excluded = group_by_type(exclude, counts, "edge")
    return {etype: np.unique(ids) for etype, ids in excluded.items() if len(ids)}


Batch: TypeAlias = tuple[NodeIds, NodeIds, list[DGLBlock]]
"""(input node ids, output node ids, blocks with the input-most first). Ids are a dict by node type if there
are several types."""


@final
class DataLoader(StepLoader[str, MiniBatch, Batch]):
    """Iterates over ``(input_nodes, output_nodes, blocks)``, like DGL's node loader.

    The constructor is collective, and iteration is not. All ranks have the same number of steps. A rank that
    has run out of seeds gets blocks without destinations. Each iteration is the next epoch. The same seed
    draws the same neighbors on any number of ranks, except with ``LaborSampler(importance_sampling=...)``.
    Its draws depend on all seeds in a batch.

    Args:
        indices: This rank's seeds: (K,) ids, a mask over all nodes, or {node type: either}. K may be 0.
        sampler: A sampler from ``dgl.dataloading``. The columns that it prefetches are attached to the
            blocks.
        options: Fields of :class:`LoaderOptions`. Options that have an effect only in DGL's loader cause a
            warning.

    Raises:
        ConfigError: on all ranks, if an option is unsupported or a seed is repeated on one rank, or if the
            ranks differ in ``batch_size`` or ``drop_last``.
        IndexError: a seed is not a node. The other ranks raise ConfigError.
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, indices: Ids | Mapping[str, Ids], sampler: Any, **options: Any) -> None:
        def read_arguments() -> tuple[LoaderOptions, SamplePlan, Items[str]]:
            loader_options = read_loader_options(options)
            plan = read_sampler(sampler)
            seeds = read_timed_items(g, indices, plan, loader_options, "node")
            return loader_options, plan, seeds

        loader_options, plan, seeds = run_on_all_ranks(g.session, read_arguments, ConfigError)
        random_seed = resolve_seed(loader_options, g.session)
        maker = open_maker(g, sampler, plan, loader_options, random_seed)
        super().__init__(g.session, seeds, loader_options, maker)
