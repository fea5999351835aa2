"""Node data loader, and the makers of batches for node and edge loaders."""

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
from dglx_dist.dataloading.minibatch import KernelMaker, MiniBatch, NodeIds, NodeMaker, SamplerMaker
from dglx_dist.dataloading.sampler import BatchSource, DrawSettings, LocalSource, RemoteSource, compute_digest
from dglx_dist.dataloading.sampler_spec import (
    Fanout,
    SamplePlan,
    check_every_type_has,
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
"""Number of batches alive beside the prefetched ones: one in the training loop, one in its backward pass."""


def open_maker(g: DistGraph, sampler: Any, plan: SamplePlan, options: LoaderOptions, seed: int) -> NodeMaker:
    """Return the maker of a loader's batches. Every rank must call this.

    Raises ConfigError on all ranks, if one cannot combine ``g``, plan and options, or if the plans differ,
    and IndexError if an excluded edge does not exist. The other ranks raise ConfigError.
    """
    columns, draws, trees = run_on_all_ranks(
        g.session,
        lambda: (*_read_local_plan(g, sampler, plan, options, seed), read_tree_rule(g, plan, options)),
        ConfigError,
    )
    rule = f"replace={plan.replace}, by_source={plan.by_source}, prob={plan.weights!r}"
    trees_of_rule = "" if trees is None else f"trees={trees}, "
    check_equal(g.session, "the sampler", f"{trees_of_rule}fanouts={plan.fanouts}, {rule}")
    if draws is None:
        return SamplerMaker(sampler, g, columns)
    if trees is not None:
        return KernelMaker(_open_trees(g, draws, *trees), draws, g, columns)
    return KernelMaker(_open_source(g, draws, plan.weights), draws, g, columns)


def _read_local_plan(
    g: DistGraph, sampler: Any, plan: SamplePlan, options: LoaderOptions, seed: int
) -> tuple[Columns, DrawSettings | None]:
    """Return the columns to fetch and the settings of the draws, without a collective.

    The settings are None if the sampler runs its own code. Raises ConfigError if the options do not fit it.
    """
    device = resolve_device(options.device, g.session.device)
    memory = RowMemory(options.depth + _SPARE_BUFFERS, options.feature_dtype, device)
    columns = find_columns(g, plan, memory)
    if plan.fanouts is None:
        if options.exclude is not None:
            raise ConfigError(
                f"the own code of {type(sampler).__qualname__} does not support exclude=. Use "
                "NeighborSampler, or exclude the edges in the sampler."
            )
        return columns, None
    if plan.weights is not None:
        check_every_type_has(g, plan.weights)
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


def _open_source(g: DistGraph, draws: DrawSettings, weights: str | None, op: str = "") -> BatchSource:
    structures = [g.structure(etype) for etype in draws.schema.etypes]
    if all(structure.is_replicated for structure in structures):
        return LocalSource(draws.schema, _read_structures(g, weights))
    return RemoteSource(draws.schema, structures, op or _serve_draws(g, weights, draws))


def _open_trees(g: DistGraph, draws: DrawSettings, rule: TreeRule, columns: TimeColumns | None) -> TreeSource:
    """Open the orders by time and serve the draws of trees on all servers. Every rank must call this."""
    excluded = {etype: draws.exclude.get(etype, NO_EDGES) for etype in g.canonical_etypes}
    rules = gather_json([repr(rule), repr(columns), compute_digest(excluded.items())], g.session)
    op = f"trees.{hashlib.sha256(str(rules).encode()).hexdigest()}"
    if not all(g.structure(etype).serves(op) for etype in excluded):
        orders = {} if columns is None else open_time_orders(g, columns)
        for etype, ids in excluded.items():
            g.structure(etype).serve(op, make_row_draw(rule, ids, orders.get(etype)))
    # The first rank that returns may send requests at once.
    barrier(g.session, "opening a loader")
    return TreeSource(draws.schema, [g.structure(etype) for etype in draws.schema.etypes], op, rule)


def open_neighborhood_maker(
    g: DistGraph, num_layers: int, mask: str | None = None, edge_feats: Any = ()
) -> NodeMaker:
    """Return a maker of blocks with all in-edges of ``num_layers`` hops and the columns ``edge_feats``.

    With ``mask``, the blocks have only the edges that this edge column marks. That is collective.
    """
    fanouts = np.full((num_layers, len(g.canonical_etypes)), -1)
    draws = DrawSettings(schema=_read_schema(g), fanouts=fanouts, replace=False, exclude={}, seed=0)
    columns = Columns(edges=find_edge_columns(g, read_column_names(edge_feats, "edge_feats"), "edge_feats"))
    return KernelMaker(_open_source(g, draws, mask, "" if mask else "in_edges"), draws, g, columns)


def _read_structures(g: DistGraph, weights: str | None) -> list[Csc]:
    """Return the structure of every edge type with its weights. Collective if ``weights`` is not None."""
    shards = {etype: g.structure(etype).shards[0] for etype in g.canonical_etypes}
    if weights is None:
        return [make_csc(shard) for shard in shards.values()]
    return run_on_all_ranks(
        g.session,
        lambda: [make_csc(shard, read_all_weights(g, etype, weights)) for etype, shard in shards.items()],
        ConfigError,
    )


def _serve_draws(g: DistGraph, weights: str | None, draws: DrawSettings) -> str:
    """Register the draws as an RPC operation on all servers. Return its name. Every rank must call this.

    The name is a hash of the rules of all ranks, so loaders with the same rule share an operation.
    """
    weights_by_shard: Mapping[EdgeType, Mapping[int, Array]] = {}
    if weights is not None:
        weights_by_shard = run_on_all_ranks(
            g.session,
            lambda: {
                etype: read_shard_weights(g, g.structure(etype), weights) for etype in g.canonical_etypes
            },
            ConfigError,
        )
    excluded = {etype: draws.exclude.get(etype, NO_EDGES) for etype in g.canonical_etypes}
    # The digest covers the contents, because weights may change under the same name.
    contents = [*excluded.items()]
    for etype, shard_weights in weights_by_shard.items():
        contents += [(etype, shard_weights[first_node]) for first_node in sorted(shard_weights)]
    rule_of_rank = [bool(draws.replace), draws.by_source is not None, compute_digest(contents)]
    rules = gather_json(rule_of_rank, g.session)
    op = f"sample.{hashlib.sha256(str(rules).encode()).hexdigest()}"
    for etype, ids in excluded.items():
        if not g.structure(etype).serves(op):
            rule = Rule(draws.replace, ids, draws.by_source is not None)
            g.structure(etype).serve(op, make_keyed_draw(rule, weights_by_shard.get(etype, {})))
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
    """Return the (L, R) int64 fan-outs, the hop at the seeds first."""
    rows = []
    for layer, fanout in enumerate(fanouts):
        if isinstance(fanout, Mapping):
            missing = [etype for etype in etypes if etype not in fanout and etype[1] not in fanout]
            if missing:
                raise ConfigError(
                    f"fanouts[{layer}] names {len(etypes) - len(missing)} of {len(etypes)} "
                    f"edge types. Missing: {', '.join(map(str, missing))}. Use 0 for types "
                    "that are not drawn."
                )
        by_etype = read_fanouts(fanout, etypes)
        rows.append([by_etype[etype] for etype in etypes])
    return np.array(rows[::-1], np.int64)


def read_excluded_edges(g: DistGraph, exclude: Any) -> dict[EdgeType, Array]:
    """Return edge type to (X,) int64 ascending distinct ids. ``exclude`` is None, ids, or a dict of ids."""
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
    Its draws depend on all seeds of a batch.

    Args:
        indices: Seeds of this rank: (K,) ids, a mask over all nodes, or {node type: either}. K may be 0.
        sampler: A sampler of ``dgl.dataloading``. The columns that it prefetches are attached to the blocks.
        options: Options of :class:`LoaderOptions`. Options of DGL's loader that have no effect here cause a
            warning.

    Raises:
        ConfigError: on all ranks, if an option is unsupported or a seed is repeated on one rank, or if the
            ranks differ in ``batch_size`` or ``drop_last``.
        IndexError: a seed is no node. The other ranks raise ConfigError.
        PeerError: a rank did not take part.
    """

    def __init__(self, g: DistGraph, indices: Ids | Mapping[str, Ids], sampler: Any, **options: Any) -> None:
        def read_arguments() -> tuple[LoaderOptions, SamplePlan, Items[str]]:
            loader_options = read_loader_options(options)
            plan = read_sampler(sampler)
            return loader_options, plan, read_timed_items(g, indices, plan, loader_options, "node")

        loader_options, plan, seeds = run_on_all_ranks(g.session, read_arguments, ConfigError)
        maker = open_maker(g, sampler, plan, loader_options, resolve_seed(loader_options, g.session))
        super().__init__(g.session, seeds, loader_options, maker)
