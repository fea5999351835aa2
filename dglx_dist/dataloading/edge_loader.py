"""Edge data loader: positive and negative pairs, excluded edges, and the blocks around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
import numpy as np
import torch
from dgl import graph_index, heterograph_index, utils
from dgl.dataloading import EdgePredictionSampler
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.comm.collectives import check_equal, gather_int64, run_on_all_ranks
from dglx_dist.dataloading.feature_fetch import EDGE_PHASE
from dglx_dist.dataloading.loader import open_maker, read_excluded_edges
from dglx_dist.dataloading.minibatch import NOTHING_EXCLUDED, Excluded, MiniBatch, NodeIds, NodeMaker
from dglx_dist.dataloading.negative import (
    DrawAll,
    NegativeSampler,
    Pairs,
    Positives,
    open_negative,
    read_negative,
)
from dglx_dist.dataloading.sampler_spec import find_edge_columns, read_column_names, read_sampler
from dglx_dist.dataloading.step_loader import (
    Items,
    LoaderOptions,
    Maker,
    StepLoader,
    read_items,
    read_loader_options,
    resolve_seed,
)
from dglx_dist.errors import ConfigError
from dglx_dist.graph.analysis import NO_REVERSE, reverse_edge_ids
from dglx_dist.graph.column import PendingPull
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.partition_book import Ids, as_array, as_ids
from dglx_dist.internals.graphs import get_structure
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import Copy
from dglx_dist.records import Array, EdgeType, StepShare

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Edges: TypeAlias = Mapping[EdgeType, Array]
"""Edge type to the (B,) int64 edge ids of a batch."""

Exclude: TypeAlias = Callable[[Edges], Excluded]
"""The edges of a batch to the edges that its blocks must not contain."""

ReverseOf: TypeAlias = Callable[[Array], Array]
"""(K,) edge ids to the ids of their reverse edges, -1 for none."""

Reverse: TypeAlias = Mapping[EdgeType, Mapping[EdgeType, ReverseOf | None]]
"""Edge type to the types of its reverse edges, and these; None: to be found, on all ranks together."""

MODES = ("self", "reverse_id", "reverse_types")

_NUM_CHECKED = 1024
"""Edges of a rank whose ends are compared with those of their reverse edges."""


def read_rule(
    g: DistGraph, edges: Edges, exclude: Any, reverse_eids: Any = None, reverse_etypes: Any = None
) -> Reverse:
    """Check what one rank can check, for its ``edges``; return what the options say of reverse edges.

    The options are those of :class:`DistEdgeDataLoader`, without fixed ids.

    Raises:
        ConfigError: the mode is unknown, an option that it needs is missing or of the wrong length or dtype,
            or an option is given that it does not use; or a given reverse edge is none.
    """
    if exclude is not None and not callable(exclude) and exclude not in MODES:
        raise ConfigError(f"exclude={exclude!r}; choose None, {', '.join(map(repr, MODES))}, or a function")
    ids = "dx.reverse_edge_ids(g) finds them in the ids of the partitioned graph"
    types = "give {edge type: type of its reverse edges}"
    for name, mode, given, advice in (
        ("reverse_eids", "reverse_id", reverse_eids, ids),
        ("reverse_etypes", "reverse_types", reverse_etypes, types),
    ):
        if exclude == mode and given is None:
            raise ConfigError(f"exclude={mode!r} needs {name}=; {advice}")
        if exclude != mode and given is not None:
            raise ConfigError(
                f"{name} is given but exclude={exclude!r} does not use it; pass exclude={mode!r}"
            )
    if exclude not in ("reverse_id", "reverse_types"):
        return {}
    by_id = exclude == "reverse_id"
    reverse = _reverse_tables(g, reverse_eids) if by_id else _reverse_types(g, reverse_etypes)
    # As in DGL, a type that reverse_etypes leaves out has no reverse edges to exclude.
    missing = [etype for etype in _etypes_with_items(edges) if by_id and etype not in reverse]
    if missing:
        raise ConfigError(
            f"exclude={exclude!r} does not define the reverse of {missing[0]}, which has edges to train on; "
            "add it, or leave the type out of the edges"
        )
    for etype, tables in reverse.items():
        for back, table in tables.items():
            if table is not None:
                some = edges.get(etype, np.empty(0, np.int64))[:_NUM_CHECKED]
                _check_reverse(g, etype, back, table, some)
    return reverse


def open_exclude(g: DistGraph, exclude: Any, reverse: Reverse) -> Exclude:
    """Return the rule as a thread-safe function. Collective for ``reverse_types``.

    As in DGL, a batch excludes its own edges and their reverse edges at every hop.
    """
    if exclude is None:
        return lambda _: NOTHING_EXCLUDED
    if callable(exclude):
        return lambda edges: _call_exclude(g, exclude, edges)
    found = {
        etype: {back: table or _lookup(_reverse_edges(g, etype, back)) for back, table in tables.items()}
        for etype, tables in reverse.items()
    }
    return lambda edges: _with_reverse(edges, found)


def _reverse_edges(g: DistGraph, etype: EdgeType, back: EdgeType) -> DistTensor:
    """Return the reverse edges of all edges of ``etype``. Collective.

    They are matched by position in the source's edge list if the ends of those pairs agree, else by their
    ends: parts that DGL has cut list the edges of the cut graph.
    """
    placed = reverse_edge_ids(g, etype, reverse_etype=back, by="position")
    first, last = placed.local_range
    ids = np.arange(first, min(last, first + _NUM_CHECKED))
    ends, reverse = g.find_edges(ids, etype), g.find_edges(placed[ids], back)
    wrong = int((ends[0] != reverse[1]).sum() + (ends[1] != reverse[0]).sum())
    if gather_int64([wrong], g.session).any():
        return reverse_edge_ids(g, etype, reverse_etype=back)
    return placed


def _check_reverse(g: DistGraph, etype: EdgeType, back_type: EdgeType, table: ReverseOf, ids: Array) -> None:
    # Compares the ends of edges with those of their given reverse edges.
    reverse = table(ids)
    ids, reverse = ids[reverse != NO_REVERSE], reverse[reverse != NO_REVERSE]
    sources, destinations = g.find_edges(ids, etype)
    back_sources, back_destinations = g.find_edges(reverse, back_type)
    wrong = ((sources != back_destinations) | (destinations != back_sources)).nonzero()[:, 0]
    if len(wrong):
        at = int(wrong[0])
        edge = f"{sources[at]} -> {destinations[at]}"
        back = f"{back_sources[at]} -> {back_destinations[at]}"
        raise ConfigError(
            f"reverse_eids[{ids[at]}] of {etype} is {reverse[at]}, but edge {ids[at]} is {edge} and edge "
            f"{reverse[at]} is {back}; ids change when a graph is partitioned: pass "
            "reverse_eids=dx.reverse_edge_ids(g), or a function as exclude= if this is meant"
        )


def _with_reverse(edges: Edges, reverse: Mapping[EdgeType, Mapping[EdgeType, ReverseOf]]) -> Excluded:
    pieces = {etype: [ids] for etype, ids in edges.items()}
    for etype, tables in reverse.items():
        for back, table in tables.items() if len(edges.get(etype, ())) else ():
            ids = table(edges[etype])
            pieces.setdefault(back, []).append(ids[ids != NO_REVERSE])
    return {etype: np.unique(np.concatenate(parts)) for etype, parts in pieces.items()}


def _call_exclude(g: DistGraph, exclude: Callable[[Any], Any], edges: Edges) -> Excluded:
    # As in DGL, the function gets plain ids where the graph has one edge type.
    given = {etype: torch.from_numpy(ids) for etype, ids in edges.items() if len(ids)}
    if not given:
        return NOTHING_EXCLUDED
    answer = exclude(given if len(g.canonical_etypes) > 1 else next(iter(given.values())))
    return read_excluded_edges(g, answer)


def _reverse_types(g: DistGraph, given: Any) -> Reverse:
    if not isinstance(given, Mapping):
        raise ConfigError(f"reverse_etypes is {given!r}; give {{edge type: type of its reverse edges}}")
    types = {g.to_canonical_etype(key): g.to_canonical_etype(value) for key, value in given.items()}
    for etype, back in types.items():
        if (back[0], back[2]) != (etype[2], etype[0]) or etype == back:
            raise ConfigError(
                f"reverse_etypes has {back} as the reverse of {etype}; it must be another type, from "
                f"{etype[2]!r} to {etype[0]!r}"
            )
        if g.num_edges(etype) != g.num_edges(back):
            raise ConfigError(
                f"reverse_etypes: {etype} has {g.num_edges(etype)} edges and {back} {g.num_edges(back)}, but "
                "edge i of one must be the reverse of edge i of the other; pass as exclude= a function that "
                "uses dx.reverse_edge_ids(g, etype, reverse_etype=...)"
            )
    return {etype: {back: None} for etype, back in types.items()}


def _reverse_tables(g: DistGraph, given: Any) -> Reverse:
    if not isinstance(given, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                f"reverse_eids is one list, but the graph has the edge types {', '.join(g.etypes)}; give a "
                "dict of lists by edge type"
            )
        given = {g.canonical_etypes[0]: given}
    found: dict[EdgeType, dict[EdgeType, ReverseOf | None]] = {}
    for etype, of_type in ((g.to_canonical_etype(key), one) for key, one in given.items()):
        by_back = of_type if isinstance(of_type, Mapping) else {etype: of_type}
        types = {g.to_canonical_etype(key): table for key, table in by_back.items()}
        found[etype] = {back: _table(g, etype, back, table) for back, table in types.items()}
    return found


def _table(g: DistGraph, etype: EdgeType, back: EdgeType, reverse: Any) -> ReverseOf:
    count = g.num_edges(etype)
    shape, kind = (
        (reverse.shape, str(reverse.dtype).removeprefix("torch."))
        if isinstance(reverse, DistTensor | Tensor)
        else (np.shape(reverse), str(np.asarray(reverse).dtype))
    )
    if tuple(shape) != (count,) or kind not in ("int32", "int64"):
        raise ConfigError(
            f"reverse_eids of {etype} are {kind} of shape {tuple(shape)}; give int64 of shape ({count},), "
            "one per edge, as dx.reverse_edge_ids(g) returns"
        )
    if isinstance(reverse, DistTensor):
        return _lookup(reverse)
    ids = as_array(reverse).astype(np.int64)
    real = ids[ids != NO_REVERSE]
    try:
        as_ids(real, g.num_edges(back), f"the edges {back} (reverse_eids)")
    except IndexError as error:
        raise ConfigError(f"reverse_eids: {error}; use -1 for an edge without a reverse") from None
    return lambda edges: ids[edges]


def _lookup(reverse: DistTensor) -> ReverseOf:
    store, key = reverse.kvstore, reverse.kvstore_key
    return lambda edges: store.pull(key, edges, phase="sampling").numpy().astype(np.int64, copy=False)


EdgePairs = Mapping[EdgeType, Sequence[Array]]
"""Edge type to (sources, destinations), (P,) int64 global node ids each; every type of the graph."""


@dataclass(frozen=True, kw_only=True)
class MergedPairs:
    """The edges of a pair graph, those of all types after each other, without a call for each type.

    A pair graph of a loader has them as ``merged_pairs``.
    """

    index: Any
    """Structure of the pair graph, which DGL replaces when it moves a graph or changes its edges."""
    etypes: tuple[EdgeType, ...]
    """Of the pair graph, R of them."""
    sizes: tuple[int, ...]
    """Edges of each type; E in all."""
    ends: Tensor
    """(2, E) int64 sources and destinations: rows of the nodes of all types, type by type in its order."""
    relation: Tensor
    """(E,) int64 place of the type in ``etypes``."""

    def move(self, graph: dgl.DGLGraph, copy: Copy) -> MergedPairs:
        return replace(self, index=get_structure(graph), ends=copy(self.ends), relation=copy(self.relation))


def merge_pairs(pair_graph: Any) -> MergedPairs:
    """Return the merged edges of any graph; those of a loader's pair graph are ready."""
    merged: MergedPairs | None = getattr(pair_graph, "merged_pairs", None)
    if merged is not None and merged.index is get_structure(pair_graph):
        return merged
    # A graph of the user's own, or one that was moved or changed.
    counts = map(pair_graph.num_nodes, pair_graph.ntypes)
    first = dict(zip(pair_graph.ntypes, accumulate(counts, initial=0), strict=False))
    etypes = tuple(pair_graph.canonical_etypes)
    found = {etype: pair_graph.edges(etype=etype) for etype in etypes}
    ends = [torch.stack([u + first[e[0]], v + first[e[2]]]).long() for e, (u, v) in found.items()]
    sizes = tuple(one.shape[1] for one in ends)
    relation = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(pair_graph.device)
    index = get_structure(pair_graph)
    return MergedPairs(index=index, etypes=etypes, sizes=sizes, ends=torch.cat(ends, 1), relation=relation)


_TYPE = 44
"""Bits of a node id; those above it are its type."""


def build_pairs(
    ntypes: Sequence[str],
    ids: Mapping[EdgeType, Array],
    positive: EdgePairs,
    negative: EdgePairs | None,
) -> tuple[Mapping[str, Array], list[dgl.DGLGraph]]:
    """Build pair graphs, with all types of the whole graph, over the nodes that occur in the pairs.

    ``ids`` are the (B,) int64 ids of the positive edges of every type, ``positive`` their ends. Returns node
    type to the (n,) int64 ascending distinct ids in the pairs, which are the seeds of the blocks, and the
    graph of the positive pairs, with ``negative`` that of these too.
    """
    both = [positive] if negative is None else [positive, negative]
    # As dgl.heterograph orders them.
    ntypes, etypes = sorted(ntypes), sorted(positive)
    number = {ntype: np.int64(place) << _TYPE for place, ntype in enumerate(ntypes)}
    keys = [
        np.concatenate([pairs[etype][end] + number[etype[2 * end]] for etype in etypes])
        for pairs in both
        for end in (0, 1)
    ]
    distinct, places = np.unique(np.concatenate(keys), return_inverse=True)
    starts = np.searchsorted(distinct, np.arange(len(ntypes) + 1) << _TYPE)
    nodes = {
        ntype: distinct[starts[place] : starts[place + 1]] - number[ntype]
        for place, ntype in enumerate(ntypes)
    }
    of_pairs = np.split(places.reshape(-1), np.cumsum([len(one) for one in keys])[:-1])
    graphs = [
        _graph(ntypes, etypes, starts, pairs, np.stack(of_pairs[2 * place : 2 * place + 2]))
        for place, pairs in enumerate(both)
    ]
    for graph in graphs:
        for ntype, of_type in nodes.items():
            graph.nodes[ntype].data[dgl.NID] = torch.from_numpy(of_type)
    for etype, edges in ids.items():
        graphs[0].edges[etype].data[dgl.EID] = torch.from_numpy(edges)
    return nodes, graphs


def _graph(
    ntypes: Sequence[str], etypes: Sequence[EdgeType], starts: Array, pairs: EdgePairs, ends: Array
) -> dgl.DGLGraph:
    """Build what dgl.heterograph does, whose checks take most of a step where there are many types."""
    sizes = [len(pairs[etype][0]) for etype in etypes]
    merged, number = torch.from_numpy(ends), {ntype: place for place, ntype in enumerate(ntypes)}
    counts, last, relations = np.diff(starts).tolist(), np.cumsum(sizes).tolist(), []
    kinds = [(number[source], number[destination]) for source, _, destination in etypes]
    for (source, destination), size, end in zip(kinds, sizes, last, strict=True):
        u, v = merged[0, end - size : end], merged[1, end - size : end]
        u = u - int(starts[source]) if starts[source] else u
        v = v - int(starts[destination]) if starts[destination] else v
        shape = (1 + (source != destination), counts[source], counts[destination])
        relations.append(heterograph_index.create_unitgraph_from_coo(*shape, u, v, ["coo", "csr", "csc"]))
    metagraph = graph_index.from_coo(len(ntypes), *map(list, zip(*kinds, strict=True)), True)
    index = heterograph_index.create_heterograph_from_relations(
        metagraph, relations, utils.toindex(counts, "int64")
    )
    graph = dgl.DGLGraph(index, list(ntypes), [relation for _, relation, _ in etypes])
    relation = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    graph.merged_pairs = MergedPairs(
        index=index, etypes=tuple(etypes), sizes=tuple(sizes), ends=merged, relation=relation
    )
    return graph


@dataclass(kw_only=True, eq=False)
class EdgeBatch(MiniBatch):
    """One batch of an edge loader: the pairs, and the blocks around their nodes."""

    edges: Edges
    pairs: list[dgl.DGLGraph]
    """The batch's edges over the destinations of the last block, in their order; then negative pairs over the
    same nodes, if there is a negative sampler."""
    pulls: Sequence[tuple[EdgeType, str, PendingPull]] = ()
    """Requested columns of the edges: type, name in the frame, what waits for the rows."""

    def move(self, device: torch.device, copy: Copy) -> None:
        pairs, self.pairs = self.pairs, [place(graph, device, copy=copy) for graph in self.pairs]
        for graph, before in zip(self.pairs, pairs, strict=True):
            graph.merged_pairs = before.merged_pairs.move(graph, copy)
        super().move(device, copy)


@final
@dataclass(kw_only=True, eq=False)
class EdgeMaker(Maker[EdgeType, EdgeBatch]):
    """The stages of batches of edges. Those of the blocks are of ``blocks``."""

    g: DistGraph
    blocks: NodeMaker
    seed: int
    exclude: Exclude
    negative: DrawAll | None
    columns: Mapping[EdgeType, Mapping[str, str]]
    """For the positive pair graph: edge type to name in the frame to name in the store."""
    user_function: str = ""
    """The option that is a function of the user, whose draws may not be repeatable; "" when none is."""
    signature: str = ""
    """Equal on ranks that draw the same pairs."""

    def offline(self) -> EdgeMaker:
        if self.user_function:
            raise ConfigError(
                f"{self.user_function} is a function whose results may not be repeatable; use "
                "dglx_dist.negative and the modes of exclude"
            )
        return replace(self, blocks=self.blocks.offline(), columns={})

    def sampling_signature(self) -> str:
        return f"{self.blocks.sampling_signature()}, {self.signature}"

    def claim(self) -> None:
        self.blocks = copy(self.blocks)
        self.blocks.claim()
        self.claimed = self.blocks.claimed

    def close(self) -> None:
        self.blocks.close()

    def sample_items(self, edges: Mapping[EdgeType, Array], epoch: int, *, step: int) -> EdgeBatch:
        begin = time.perf_counter()
        seeds, pairs = self._pairs(edges, epoch)
        batch, exclude = EdgeBatch(seeds=seeds, edges=edges, pairs=pairs), self.exclude(edges)
        paired_s = time.perf_counter() - begin
        self.blocks.sample_blocks(batch, epoch, exclude, step=step)
        batch.sample_s += paired_s
        return batch

    def fetch(self, batch: EdgeBatch) -> None:
        batch.pulls = [
            (etype, name, self.g.kvstore.submit_pull(key, batch.edges[etype], phase=EDGE_PHASE))
            for etype, columns in self.columns.items()
            for name, key in columns.items()
        ]
        self.blocks.fetch(batch)

    def build(self, batch: EdgeBatch) -> None:
        self.blocks.build(batch)
        begin = time.perf_counter()
        for etype, name, pull in batch.pulls:
            batch.pairs[0].edges[etype].data[name] = pull()
        batch.pulls = ()
        batch.fetch_s += time.perf_counter() - begin

    def deliver(self, batch: EdgeBatch, share: StepShare) -> EdgesBatch:
        self.blocks.finish(batch, share)
        # On each of them, since a model may get the blocks, a pair graph, or both.
        for graph in batch.pairs:
            graph.step_share = share
        nodes, blocks, pairs = batch.input_nodes, batch.blocks, batch.pairs
        return (nodes, pairs[0], blocks) if len(pairs) == 1 else (nodes, pairs[0], pairs[1], blocks)

    def _pairs(
        self, edges: Mapping[EdgeType, Array], epoch: int
    ) -> tuple[Mapping[str, Array], list[dgl.DGLGraph]]:
        # All requests are sent before the first wait.
        found = {etype: self.g.structure(etype).submit_find_edges(ids) for etype, ids in edges.items()}
        ends = {etype: pending() for etype, pending in found.items()}
        if self.negative is None:
            return build_pairs(self.g.ntypes, edges, ends, None)
        batch = [
            Positives(
                etype=etype,
                number=number,
                ids=ids,
                ends=ends[etype],
                num_nodes=(self.g.num_nodes(etype[0]), self.g.num_nodes(etype[2])),
                seed=self.seed,
                epoch=epoch,
            )
            for number, (etype, ids) in enumerate(edges.items())
            if len(ids)
        ]
        nothing: Pairs = np.empty(0, np.int64), np.empty(0, np.int64)
        drawn = dict.fromkeys(edges, nothing) | (self.negative(batch) if batch else {})
        return build_pairs(self.g.ntypes, edges, ends, drawn)


EdgesBatch: TypeAlias = (
    tuple[NodeIds, dgl.DGLGraph, list[DGLBlock]] | tuple[NodeIds, dgl.DGLGraph, dgl.DGLGraph, list[DGLBlock]]
)
"""(input node ids, pair graph, blocks), or with negatives (input node ids, pair graph, negative pair graph,
blocks)."""


@final
class DistEdgeDataLoader(StepLoader[EdgeType, EdgeBatch, EdgesBatch]):
    """Iterates over batches of edges, like DGL's loader of the same name.

    Yields ``(input_nodes, pair_graph, blocks)``, with negatives ``(input_nodes, pair_graph,
    negative_pair_graph, blocks)``. The pair graphs have all types and the same nodes, which are the
    destinations of ``blocks[-1]`` in the same order; ``pair_graph.edata[dgl.EID]`` are the batch's edges.

    Constructing it is collective; iterating calls no collective. All ranks have the same number of steps, and
    a rank that has run out of edges gets pair graphs without edges. A step's share counts positive edges, so
    a mean over positive and negative pairs is weighted correctly if each edge has equally many negatives;
    ``InBatch`` gives fewer in a batch of k edges or less. Draws do not depend on the number of ranks, except
    those of ``InBatch``.

    Args:
        eids: This rank's edges: (K,) ids, a mask over all edges, or {edge type: either}; K may be 0. Ids are
            those of ``g``, as :func:`edge_split` gives them.
        sampler: A node sampler of ``dgl.dataloading``, for the blocks around the edges' ends; or
            ``dgl.dataloading.as_edge_prediction_sampler(...)``, with the options below inside it.
        exclude: The edges that no block of a batch contains: ``self``, the batch's own; ``reverse_id``, these
            and their reverse edges by ``reverse_eids``; ``reverse_types``, these and the edges at the same
            position of the source's list of the type in ``reverse_etypes``; a function of the batch's ids to
            ids; or fixed ids. They are left out before drawing, so destinations keep their fan-out.
        reverse_eids: (E,) by edge id, in ids of ``g``, -1 for none: what :func:`reverse_edge_ids` returns; or
            a dict of it by edge type; or, if reverse edges are of other types, of dicts of it by these.
        reverse_etypes: Edge type to the type of its reverse edges; of a type that is left out, only the
            batch's own edges are excluded.
        negative_sampler: One of ``dglx_dist.negative``, DGL's ``Uniform`` or ``PerSourceUniform``, or a
            function of (g, the batch's ids) to (sources, destinations), called on the loader's threads.
        options: As for :class:`DataLoader`; ``batch_size`` counts the edges of all types together.

    Raises:
        ConfigError: on all ranks, when one rank has an unknown type, a repeated edge, a mode of ``exclude``
            without what it needs or wrong reverse edges, or the ranks differ in ``batch_size`` or
            ``drop_last``.
        IndexError: an id is no edge; ConfigError on the other ranks.
        PeerError: a rank did not take part.
    """

    def __init__(
        self,
        g: DistGraph,
        eids: Ids | Mapping[Any, Ids],
        sampler: Any,
        *,
        exclude: Any = None,
        reverse_eids: Any = None,
        reverse_etypes: Any = None,
        negative_sampler: Any = None,
        **options: Any,
    ) -> None:
        rule = {"exclude": exclude, "reverse_eids": reverse_eids, "reverse_etypes": reverse_etypes}
        read = run_on_all_ranks(
            g.session, lambda: _checked(g, eids, sampler, rule, negative_sampler, options), ConfigError
        )
        mode = "a function" if callable(read.exclude) else repr(read.exclude)
        types = {etype: [*tables] for etype, tables in read.reverse.items() if None in tables.values()}
        signature = f"{mode}, reverse_etypes={types}" if types else mode
        check_equal(g.session, "exclude=", signature)
        seed = resolve_seed(read.options, g.session)
        maker = EdgeMaker(
            g=g,
            blocks=open_maker(g, read.sampler, read_sampler(read.sampler), read.options, seed),
            seed=seed,
            exclude=open_exclude(g, read.exclude, read.reverse),
            negative=run_on_all_ranks(
                g.session,
                lambda: open_negative(g, read.negative, _negative_etypes(g, read.items)),
                ConfigError,
            ),
            columns=read.columns,
            user_function=_user_function(read),
            signature=f"exclude {signature}, negative_sampler={read.negative!r}",
        )
        super().__init__(g.session, read.items, read.options, maker)


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """The options of an edge loader, checked on one rank, with DGL's wrapper taken off the node sampler."""

    sampler: Any
    exclude: Any
    """None, one of :data:`MODES`, or a function of edge ids; fixed ids are in ``options``."""
    reverse: Reverse
    negative: Any
    items: Items[EdgeType]
    options: LoaderOptions
    columns: Mapping[EdgeType, Mapping[str, str]]


def _checked(
    g: DistGraph,
    eids: Ids | Mapping[Any, Ids],
    sampler: Any,
    rule: dict[str, Any],
    negative: Any,
    options: Mapping[str, Any],
) -> _Checked:
    labels: Any = ()
    if isinstance(sampler, EdgePredictionSampler):
        _check_wrapper(sampler, (*rule.values(), negative))
        rule = {name: getattr(sampler, name) for name in rule}
        sampler, negative, labels = sampler.sampler, sampler.negative_sampler, sampler.prefetch_labels
    read_sampler(sampler)
    read = read_loader_options(options)
    fixed = rule["exclude"]
    if fixed is not None and not isinstance(fixed, str) and not callable(fixed):
        read, rule = replace(read, exclude=fixed), {**rule, "exclude": None}
    items = read_items(eids, {etype: g.num_edges(etype) for etype in g.canonical_etypes}, "edge")
    return _Checked(
        sampler=sampler,
        exclude=rule["exclude"],
        reverse=read_rule(g, items.ids, **rule),
        negative=read_negative(negative),
        items=items,
        options=read,
        columns=find_edge_columns(g, read_column_names(labels, "prefetch_labels"), "prefetch_labels"),
    )


def _check_wrapper(sampler: EdgePredictionSampler, beside: Sequence[Any]) -> None:
    if any(option is not None for option in beside):
        raise ConfigError(
            "exclude, reverse_eids, reverse_etypes and negative_sampler belong either to the loader or to "
            "as_edge_prediction_sampler(...), not to both"
        )
    if type(sampler).sample is not EdgePredictionSampler.sample:
        raise ConfigError(
            f"{type(sampler).__qualname__} samples edges with its own code; pass its node sampler, and "
            "its negative_sampler= and exclude= as functions"
        )


def _user_function(read: _Checked) -> str:
    if callable(read.exclude):
        return f"exclude={read.exclude!r}"
    if read.negative is not None and not isinstance(read.negative, NegativeSampler):
        return f"negative_sampler={read.negative!r}"
    return ""


def _negative_etypes(g: DistGraph, items: Items[EdgeType]) -> list[EdgeType]:
    # A single type always: a rank without edges may draw batches of other ranks.
    return list(g.canonical_etypes) if len(g.canonical_etypes) == 1 else _etypes_with_items(items.ids)


def _etypes_with_items(edges: Edges) -> list[EdgeType]:
    return [etype for etype, ids in edges.items() if len(ids)]
