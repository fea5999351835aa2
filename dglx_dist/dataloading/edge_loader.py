"""Edge data loader: positive and negative pairs, excluded edges, and the blocks around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
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
from dglx_dist.dataloading.seed_times import read_timed_items
from dglx_dist.dataloading.step_loader import (
    Items,
    LoaderOptions,
    Maker,
    StepLoader,
    read_loader_options,
    resolve_seed,
    split_times,
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

Edges: TypeAlias = Mapping[EdgeType, Array]
"""Map from edge type to the (B,) int64 edge ids in a batch."""

Exclude: TypeAlias = Callable[[Edges], Excluded]
"""Function from a batch's edges to the edges that its blocks must not contain."""

FindReverse: TypeAlias = Callable[[Array], Array]
"""Function from (K,) edge ids to the ids of the reverse edges, or -1 for none."""

Reverse: TypeAlias = Mapping[EdgeType, Mapping[EdgeType, FindReverse | None]]
"""Map from edge type to {type of its reverse edges: function, or None if all ranks must compute it}."""

MODES = ("self", "reverse_id", "reverse_types")

_NUM_CHECKED = 1024
"""Number of edges per rank that are compared with their reverse edges."""


def read_rule(g: DistGraph, edges: Edges, exclude: Any, reverse_eids: Any, reverse_etypes: Any) -> Reverse:
    """Check the exclusion options on one rank, for its ``edges``. Return how to find reverse edges.

    The options are those of :class:`DistEdgeDataLoader`, without fixed ids. Raises ConfigError in these
    cases: the mode is unknown, an option is missing, unused, too short or long or has a wrong dtype, or an
    edge does not reverse the edge that it is given for.
    """
    if exclude is not None and not callable(exclude) and exclude not in MODES:
        raise ConfigError(f"exclude={exclude!r}. Choose None, {', '.join(map(repr, MODES))}, or a function.")
    advice = "dx.reverse_edge_ids(g) finds them in the ids of the partitioned graph."
    _check_mode_option(exclude, "reverse_id", "reverse_eids", reverse_eids, advice)
    advice = "Pass {edge type: type of its reverse edges}."
    _check_mode_option(exclude, "reverse_types", "reverse_etypes", reverse_etypes, advice)
    # As in DGL, a type that reverse_etypes leaves out has no reverse edges to exclude.
    if exclude == "reverse_types":
        return _read_reverse_types(g, reverse_etypes)
    if exclude != "reverse_id":
        return {}

    reverse = _read_reverse_ids(g, reverse_eids)
    for etype in _list_nonempty_types(edges):
        if etype not in reverse:
            raise ConfigError(
                f"exclude={exclude!r} does not define the reverse of {etype}, which has "
                "edges to train on. Add it, or leave the type out of the edges."
            )
    for etype, finders in reverse.items():
        ids_to_check = edges.get(etype, np.empty(0, np.int64))[:_NUM_CHECKED]
        for reverse_etype, find_reverse in finders.items():
            assert find_reverse is not None
            _check_reverse(g, etype, reverse_etype, find_reverse, ids_to_check)
    return reverse


def _check_mode_option(exclude: Any, mode: str, name: str, value: Any, advice: str) -> None:
    """Raise ConfigError if the option ``name`` is missing for its mode, or set for another mode."""
    if exclude == mode and value is None:
        raise ConfigError(f"exclude={mode!r} needs {name}=. {advice}")
    if exclude != mode and value is not None:
        raise ConfigError(f"exclude={exclude!r} does not use {name}. Pass exclude={mode!r}.")


def open_exclude(g: DistGraph, exclude: Any, reverse: Reverse) -> Exclude:
    """Return a thread-safe function from a batch's edges to the edges that its blocks leave out.

    As in DGL, a batch leaves out its own edges and their reverse edges at every hop. With ``reverse_types``
    the ranks compute the reverse edges together, so every rank must then call this.

    Args:
        exclude: The loader's option.
        reverse: What :func:`read_rule` returned.
    """
    if exclude is None:
        return lambda _edges: NOTHING_EXCLUDED
    if callable(exclude):
        return lambda edges: _call_exclude(g, exclude, edges)
    finders_by_type: dict[EdgeType, dict[EdgeType, FindReverse]] = {}
    for etype, finders in reverse.items():
        finders_by_type[etype] = {}
        for reverse_etype, find_reverse in finders.items():
            if find_reverse is None:
                find_reverse = _look_up(_match_reverse_edges(g, etype, reverse_etype))
            finders_by_type[etype][reverse_etype] = find_reverse
    return lambda edges: _exclude_with_reverse(edges, finders_by_type)


def _match_reverse_edges(g: DistGraph, etype: EdgeType, reverse_etype: EdgeType) -> DistTensor:
    """Find the reverse edge for every edge of type ``etype``. Every rank must call this.

    Edges at the same position in the source's edge list belong together if their ends agree. Otherwise edges
    are matched by their ends, because parts that DGL has cut list the edges of the cut graph.
    """
    reverse_ids = reverse_edge_ids(g, etype, reverse_etype=reverse_etype, by="position")
    first, last = reverse_ids.local_range
    ids = np.arange(first, min(last, first + _NUM_CHECKED))
    sources, destinations = g.find_edges(ids, etype)
    reverse_sources, reverse_destinations = g.find_edges(reverse_ids[ids], reverse_etype)
    is_wrong = (sources != reverse_destinations) | (destinations != reverse_sources)
    if gather_int64([int(is_wrong.sum())], g.session).any():
        return reverse_edge_ids(g, etype, reverse_etype=reverse_etype)
    return reverse_ids


def _check_reverse(
    g: DistGraph, etype: EdgeType, reverse_etype: EdgeType, find_reverse: FindReverse, ids: Array
) -> None:
    """Raise ConfigError unless an edge and its reverse edge have the same ends, swapped."""
    reverse_ids = find_reverse(ids)
    has_reverse = reverse_ids != NO_REVERSE
    ids = ids[has_reverse]
    reverse_ids = reverse_ids[has_reverse]
    sources, destinations = g.find_edges(ids, etype)
    reverse_sources, reverse_destinations = g.find_edges(reverse_ids, reverse_etype)
    is_wrong = (sources != reverse_destinations) | (destinations != reverse_sources)
    if bool(is_wrong.any()):
        k = int(is_wrong.nonzero()[0, 0])
        ends = f"{sources[k]} -> {destinations[k]}"
        reverse_ends = f"{reverse_sources[k]} -> {reverse_destinations[k]}"
        raise ConfigError(
            f"reverse_eids[{ids[k]}] of {etype} is {reverse_ids[k]}, but edge {ids[k]} is {ends} "
            f"and edge {reverse_ids[k]} is {reverse_ends}. Ids change when a graph is partitioned: "
            "pass reverse_eids=dx.reverse_edge_ids(g), or a function as exclude= if this is "
            "what you want."
        )


def _exclude_with_reverse(
    edges: Edges, reverse: Mapping[EdgeType, Mapping[EdgeType, FindReverse]]
) -> Excluded:
    """Return a batch's edges and their reverse edges, each (K,) ascending and distinct."""
    excluded = {etype: [ids] for etype, ids in edges.items()}
    for etype, finders in reverse.items():
        if not len(edges.get(etype, ())):
            continue
        for reverse_etype, find_reverse in finders.items():
            ids = find_reverse(edges[etype])
            excluded.setdefault(reverse_etype, []).append(ids[ids != NO_REVERSE])
    return {etype: np.unique(np.concatenate(id_arrays)) for etype, id_arrays in excluded.items()}


def _call_exclude(g: DistGraph, exclude: Callable[[Any], Any], edges: Edges) -> Excluded:
    """Return the edges that the user's function excludes for a batch. It is not called without edges."""
    batch: Any = {etype: torch.from_numpy(ids) for etype, ids in edges.items() if len(ids)}
    if not batch:
        return NOTHING_EXCLUDED
    # As in DGL, the function gets a plain tensor if the graph has one edge type.
    if len(g.canonical_etypes) == 1:
        batch = batch[g.canonical_etypes[0]]
    return read_excluded_edges(g, exclude(batch))


def _read_reverse_types(g: DistGraph, reverse_etypes: Any) -> Reverse:
    """Read the option ``reverse_etypes``. Each function is None, because all ranks compute it together."""
    if not isinstance(reverse_etypes, Mapping):
        raise ConfigError(f"reverse_etypes is {reverse_etypes!r}. Pass {{edge type: its reverse edge type}}.")

    reverse: dict[EdgeType, dict[EdgeType, FindReverse | None]] = {}
    for key, value in reverse_etypes.items():
        etype = g.to_canonical_etype(key)
        reverse_etype = g.to_canonical_etype(value)
        if (reverse_etype[0], reverse_etype[2]) != (etype[2], etype[0]) or etype == reverse_etype:
            raise ConfigError(
                f"reverse_etypes has {reverse_etype} as the reverse of {etype}. It must be another "
                f"type, from {etype[2]!r} to {etype[0]!r}."
            )
        if g.num_edges(etype) != g.num_edges(reverse_etype):
            raise ConfigError(
                f"reverse_etypes: {etype} has {g.num_edges(etype)} edges and {reverse_etype} "
                f"{g.num_edges(reverse_etype)}, but edge i of one must be the reverse of edge i of the "
                "other. Pass a function as exclude= that uses dx.reverse_edge_ids(g, etype, "
                "reverse_etype=...)."
            )
        reverse[etype] = {reverse_etype: None}
    return reverse


def _read_reverse_ids(g: DistGraph, reverse_eids: Any) -> Reverse:
    """Read the option ``reverse_eids`` as functions. Raise ConfigError for a wrong shape, dtype or id."""
    if not isinstance(reverse_eids, Mapping):
        if len(g.canonical_etypes) != 1:
            raise ConfigError(
                "reverse_eids is one list, but the graph has the edge types "
                f"{', '.join(g.etypes)}. Pass a dict of lists by edge type."
            )
        reverse_eids = {g.canonical_etypes[0]: reverse_eids}

    reverse: dict[EdgeType, dict[EdgeType, FindReverse | None]] = {}
    for key, ids in reverse_eids.items():
        etype = g.to_canonical_etype(key)
        ids_by_type = ids if isinstance(ids, Mapping) else {etype: ids}
        reverse[etype] = {}
        for reverse_key, reverse_ids in ids_by_type.items():
            reverse_etype = g.to_canonical_etype(reverse_key)
            reverse[etype][reverse_etype] = _open_reverse_ids(g, etype, reverse_etype, reverse_ids)

    return reverse


def _open_reverse_ids(g: DistGraph, etype: EdgeType, reverse_etype: EdgeType, values: Any) -> FindReverse:
    """Return a function that looks edges up in ``values``, the reverse edge id for each edge of ``etype``."""
    if not isinstance(values, DistTensor | Tensor):
        values = np.asarray(values)
    num_edges = g.num_edges(etype)
    dtype = str(values.dtype).removeprefix("torch.")
    if tuple(values.shape) != (num_edges,) or dtype not in ("int32", "int64"):
        raise ConfigError(
            f"reverse_eids of {etype} are {dtype} of shape {tuple(values.shape)}. Pass int64 of "
            f"shape ({num_edges},), one per edge, as dx.reverse_edge_ids(g) returns."
        )
    if isinstance(values, DistTensor):
        return _look_up(values)

    reverse_ids = as_array(values).astype(np.int64)
    known_ids = reverse_ids[reverse_ids != NO_REVERSE]
    try:
        as_ids(known_ids, g.num_edges(reverse_etype), f"the edges {reverse_etype} (reverse_eids)")
    except IndexError as error:
        raise ConfigError(f"reverse_eids: {error}. Use -1 for an edge without a reverse.") from None
    return lambda ids: reverse_ids[ids]


def _look_up(reverse: DistTensor) -> FindReverse:
    """Return a function that looks edges up in ``reverse``, on other ranks if needed."""
    store = reverse.kvstore
    key = reverse.kvstore_key
    return lambda ids: store.pull(key, ids, phase="sampling").numpy().astype(np.int64, copy=False)


EdgePairs = Mapping[EdgeType, Sequence[Array]]
"""Map from each edge type in the graph to (sources, destinations), (P,) int64 global node ids each."""


@dataclass(frozen=True, kw_only=True)
class MergedPairs:
    """The edges of a pair graph in one array, type by type, so that reading needs no call for each type.

    A loader's pair graphs have this record as ``merged_pairs``.
    """

    index: Any
    """Structure object in the pair graph. DGL replaces it when it moves a graph or changes its edges."""
    etypes: tuple[EdgeType, ...]
    """The R edge types in the pair graph."""
    sizes: tuple[int, ...]
    """(R,) edge counts by type. They add up to E."""
    ends: Tensor
    """(2, E) int64 sources and destinations: row numbers over all nodes, type by type."""
    relation: Tensor
    """(E,) int64 type for each edge, as an index in ``etypes``."""

    def move(self, graph: dgl.DGLGraph, copy: Copy) -> MergedPairs:
        return replace(self, index=get_structure(graph), ends=copy(self.ends), relation=copy(self.relation))


def merge_pairs(pair_graph: Any) -> MergedPairs:
    """Return the merged edges of any graph. A loader's pair graphs already hold them."""
    merged: MergedPairs | None = getattr(pair_graph, "merged_pairs", None)
    if merged is not None and merged.index is get_structure(pair_graph):
        return merged

    # The user created this graph, or it was moved or changed.
    first_rows = {}
    num_rows = 0
    for ntype in pair_graph.ntypes:
        first_rows[ntype] = num_rows
        num_rows += pair_graph.num_nodes(ntype)

    ends = []
    for etype in pair_graph.canonical_etypes:
        sources, destinations = pair_graph.edges(etype=etype)
        rows = [sources + first_rows[etype[0]], destinations + first_rows[etype[2]]]
        ends.append(torch.stack(rows).long())
    sizes = [etype_ends.shape[1] for etype_ends in ends]
    relation = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return MergedPairs(
        index=get_structure(pair_graph),
        etypes=tuple(pair_graph.canonical_etypes),
        sizes=tuple(sizes),
        ends=torch.cat(ends, 1),
        relation=relation.to(pair_graph.device),
    )


def gather_pair_rows(pair_graph: Any, h: Any) -> Any:
    """Return one row per node in ``pair_graph``, in node order.

    Strategies with mini-batches return ``h`` itself and send nothing. Under full_graph, shared_preload and
    cooperative, ranks exchange the rows. Then every rank must call this with the (own rows, d) rows that its
    last layer returned, and with the same node types. Gradients are returned to the ranks that computed the
    rows.

    Args:
        pair_graph: A pair graph from a loader. Both pair graphs in a batch have the same nodes, so call this
            once per batch.
        h: Rows that an encoder's last layer returned for ``blocks[-1]``. With several node types, a
            dictionary by type.

    Raises:
        ConfigError: ``pair_graph`` is no pair graph, or ``h`` has another number of rows.
    """
    if not isinstance(pair_graph, dgl.DGLGraph) or pair_graph.is_block:
        raise ConfigError(
            f"gather_pair_rows got a {type(pair_graph).__name__} in place of a pair graph. Call "
            "dx.gather_pair_rows(pair_graph, h) with a pair graph of the loader's batch."
        )

    gather = getattr(pair_graph, "gather_rows", None)
    if gather is not None:
        return gather(h)
    rows_by_type = h if isinstance(h, Mapping) else {pair_graph.ntypes[0]: h}
    for ntype, rows in rows_by_type.items():
        num_nodes = pair_graph.num_nodes(ntype) if ntype in pair_graph.ntypes else 0
        if len(rows) != num_nodes:
            raise ConfigError(
                f"gather_pair_rows got {len(rows)} rows of {ntype!r}, but the pair graph has {num_nodes} of "
                "these nodes. Pass what the last layer returned for blocks[-1] of the same batch."
            )
    return h


_TYPE_SHIFT = 44
"""Number of bits for a node id in a key. The bits above hold the node's type."""


PairTimes: TypeAlias = Sequence[Mapping[EdgeType, Array]]
"""(P,) time keys by edge type: one mapping for positive pairs, and possibly one for negative pairs."""


def build_pairs(
    ntypes: Sequence[str],
    ids: Mapping[EdgeType, Array],
    positive: EdgePairs,
    negative: EdgePairs | None,
    times: PairTimes = (),
) -> tuple[Mapping[str, Array], Mapping[str, Array], list[dgl.DGLGraph]]:
    """Build pair graphs over the nodes that occur in the pairs. They have all types in the graph.

    Args:
        ids: (B,) int64 ids of the positive edges, for every type.
        positive: Ends of the positive edges.
        negative: Ends of the negative pairs, if there is a negative sampler.
        times: Times of the pairs. With times, a node occurs once for each distinct time in its pairs.

    Returns:
        (seeds, seed times, graphs). ``seeds`` maps a node type to the (n,) int64 ascending distinct ids in
        the pairs. Seed times are empty without ``times``. ``graphs`` holds the positive pair graph and, if
        there are negatives, the negative pair graph.
    """
    pair_sets = [positive] if negative is None else [positive, negative]
    # dgl.heterograph sorts types, so this does, too.
    ntypes = sorted(ntypes)
    etypes = sorted(positive)
    type_bits = {ntype: np.int64(index) << _TYPE_SHIFT for index, ntype in enumerate(ntypes)}

    # Keys are collected in this order: sources and then destinations of the positive pairs, sources and then
    # destinations of the negative pairs.
    key_arrays = []
    set_sizes = []
    for pairs in pair_sets:
        source_keys = [pairs[etype][0] + type_bits[etype[0]] for etype in etypes]
        destination_keys = [pairs[etype][1] + type_bits[etype[2]] for etype in etypes]
        key_arrays += source_keys + destination_keys
        set_sizes.append(sum(map(len, source_keys)))

    # Number the nodes in all pairs at once, by type and then by id.
    distinct_keys, rows = np.unique(np.concatenate(key_arrays), return_inverse=True)
    rows = rows.reshape(-1)
    distinct_times: Array | None = None
    if times:
        time_arrays = []
        for times_by_type in times:
            pair_times = np.concatenate([times_by_type[etype] for etype in etypes])
            # A pair's time applies to both its ends.
            time_arrays += [pair_times, pair_times]
        distinct_keys, distinct_times, rows = _split_by_time(distinct_keys, rows, np.concatenate(time_arrays))

    starts = np.searchsorted(distinct_keys, np.arange(len(ntypes) + 1) << _TYPE_SHIFT)
    seeds = {}
    seed_times = {}
    for ntype, (start, stop) in zip(ntypes, pairwise(starts), strict=True):
        seeds[ntype] = distinct_keys[start:stop] - type_bits[ntype]
        if distinct_times is not None:
            seed_times[ntype] = distinct_times[start:stop]

    graphs = []
    first_row = 0
    for pairs, num_pairs in zip(pair_sets, set_sizes, strict=True):
        ends = rows[first_row : first_row + 2 * num_pairs].reshape(2, num_pairs)
        first_row += 2 * num_pairs
        graphs.append(_build_pair_graph(ntypes, etypes, starts, pairs, ends))
        for ntype, node_ids in seeds.items():
            graphs[-1].nodes[ntype].data[dgl.NID] = torch.from_numpy(node_ids)
    for etype, edges in ids.items():
        graphs[0].edges[etype].data[dgl.EID] = torch.from_numpy(edges)
    return seeds, seed_times, graphs


def _split_by_time(nodes: Array, rows: Array, times: Array) -> tuple[Array, Array, Array]:
    """Give each distinct (node, time) its own row.

    Args:
        nodes: Distinct nodes.
        rows: (K,) indices in ``nodes``.
        times: (K,) times.

    Returns:
        The node and the time of each new row, and (K,) indices of the new rows.
    """
    moments, moment_of_row = np.unique(times, return_inverse=True)
    # A key combines a node and a moment in one number.
    row_keys = rows * len(moments) + moment_of_row.reshape(-1)
    keys, index = np.unique(row_keys, return_inverse=True)
    node_of_key, moment_of_key = np.divmod(keys, max(len(moments), 1))
    return nodes[node_of_key], moments[moment_of_key], index.reshape(-1)


def _build_pair_graph(
    ntypes: Sequence[str], etypes: Sequence[EdgeType], starts: Array, pairs: EdgePairs, ends: Array
) -> dgl.DGLGraph:
    """Build the graph that holds all pairs, and attach their ends to it in merged form (``merged_pairs``).

    The result equals that of dgl.heterograph. This function skips the checks in dgl.heterograph, because they
    would take most of a step if there are many edge types.

    Args:
        ntypes: All T node types, as dgl.heterograph orders them.
        etypes: All R edge types, as dgl.heterograph orders them.
        starts: (T + 1,) int64. Type t has the rows ``starts[t]`` to ``starts[t + 1] - 1``.
        pairs: The P pairs by edge type. Only their counts are used.
        ends: (2, P) int64 source rows and destination rows, ordered as ``etypes``.
    """
    num_pairs = [len(pairs[etype][0]) for etype in etypes]
    merged_ends = torch.from_numpy(ends)
    type_index = {ntype: index for index, ntype in enumerate(ntypes)}
    source_types = [type_index[etype[0]] for etype in etypes]
    destination_types = [type_index[etype[2]] for etype in etypes]
    num_nodes = np.diff(starts).tolist()

    unit_graphs = []
    first_pair = 0
    for source, destination, size in zip(source_types, destination_types, num_pairs, strict=True):
        source_rows, destination_rows = merged_ends[:, first_pair : first_pair + size]
        first_pair += size
        # Each type numbers its nodes from 0. The first type has these numbers already.
        if starts[source]:
            source_rows = source_rows - int(starts[source])
        if starts[destination]:
            destination_rows = destination_rows - int(starts[destination])
        unit_graph = heterograph_index.create_unitgraph_from_coo(
            1 if source == destination else 2,  # number of node types
            num_nodes[source],
            num_nodes[destination],
            source_rows,
            destination_rows,
            ["coo", "csr", "csc"],
        )
        unit_graphs.append(unit_graph)

    metagraph = graph_index.from_coo(len(ntypes), source_types, destination_types, True)
    index = heterograph_index.create_heterograph_from_relations(
        metagraph, unit_graphs, utils.toindex(num_nodes, "int64")
    )
    graph = dgl.DGLGraph(index, list(ntypes), [etype[1] for etype in etypes])
    relation = torch.from_numpy(np.repeat(np.arange(len(etypes)), num_pairs))
    graph.merged_pairs = MergedPairs(
        index=index, etypes=tuple(etypes), sizes=tuple(num_pairs), ends=merged_ends, relation=relation
    )
    return graph


@dataclass(kw_only=True, eq=False)
class EdgeBatch(MiniBatch):
    """One batch on its way through an edge loader: pair graphs, and the blocks around their nodes."""

    edges: Edges
    pairs: list[dgl.DGLGraph]
    """The positive pair graph. Its nodes are the last block's destinations, in order. With a negative
    sampler, the negative pair graph over the same nodes follows.
    """
    pulls: Sequence[tuple[EdgeType, str, PendingPull]] = ()
    """Requested edge columns: type, name in the frame, and the pending pull."""

    def move(self, device: torch.device, copy: Copy) -> None:
        for index, graph in enumerate(self.pairs):
            self.pairs[index] = place(graph, device, copy=copy)
            self.pairs[index].merged_pairs = graph.merged_pairs.move(self.pairs[index], copy)
        super().move(device, copy)


@final
@dataclass(kw_only=True, eq=False)
class EdgeMaker(Maker[EdgeType, EdgeBatch]):
    """Stages for batches that consist of edges. ``blocks`` has the stages for the blocks around them."""

    g: DistGraph
    blocks: NodeMaker
    seed: int
    exclude: Exclude
    negative: DrawAll | None
    columns: Mapping[EdgeType, Mapping[str, str]]
    """Columns for the positive pair graph: edge type to name in the frame to name in the store."""
    user_function: str = ""
    """Name of an option that the user set to a function. Its draws may not be repeatable. Empty if none."""
    signature: str = ""
    """String that is equal on two ranks if they draw the same pairs."""

    def offline(self) -> EdgeMaker:
        if self.user_function:
            raise ConfigError(
                f"{self.user_function} is a function, and its results may not be repeatable. "
                "Use dglx_dist.negative and the modes of exclude."
            )
        return replace(self, blocks=self.blocks.offline(), columns={})

    def sampling_signature(self) -> str:
        return f"{self.blocks.sampling_signature()}, {self.signature}"

    def claim(self) -> None:
        self.blocks = copy(self.blocks)
        self.blocks.claim()
        self.claimed_rows = self.blocks.claimed_rows

    def close(self) -> None:
        self.blocks.close()

    def sample_items(self, edges: Mapping[EdgeType, Array], epoch: int, *, step: int) -> EdgeBatch:
        begin = time.perf_counter()
        edges, edge_times = split_times(edges)
        seeds, seed_times, pairs = self._draw_pairs(edges, edge_times, epoch)
        batch = EdgeBatch(seeds=seeds, seed_times=seed_times, edges=edges, pairs=pairs)
        excluded = self.exclude(edges)
        pairs_s = time.perf_counter() - begin
        self.blocks.sample_blocks(batch, epoch, excluded, step=step)
        # ``sample_blocks`` sets the time for the blocks alone.
        batch.sample_s += pairs_s
        return batch

    def fetch(self, batch: EdgeBatch) -> None:
        pulls = []
        for etype, columns in self.columns.items():
            for name, key in columns.items():
                pull = self.g.kvstore.submit_pull(key, batch.edges[etype], phase=EDGE_PHASE)
                pulls.append((etype, name, pull))
        batch.pulls = pulls
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
        # Every graph gets the share, because a model may read the blocks, a pair graph, or both.
        for graph in batch.pairs:
            graph.step_share = share
        if len(batch.pairs) == 1:
            return batch.input_nodes, batch.pairs[0], batch.blocks
        positive, negative = batch.pairs
        return batch.input_nodes, positive, negative, batch.blocks

    def _draw_pairs(
        self, edges: Mapping[EdgeType, Array], times: Mapping[EdgeType, Array], epoch: int
    ) -> tuple[Mapping[str, Array], Mapping[str, Array], list[dgl.DGLGraph]]:
        """Build a batch's pair graphs, with negatives if there is a sampler, by :func:`build_pairs`."""
        # Send all requests before waiting for the first answer.
        pending_ends = {etype: self.g.structure(etype).submit_find_edges(ids) for etype, ids in edges.items()}
        ends = {etype: pending() for etype, pending in pending_ends.items()}
        pair_times = [times] if times else []
        if self.negative is None:
            return build_pairs(self.g.ntypes, edges, ends, None, pair_times)

        positives = []
        for number, (etype, ids) in enumerate(edges.items()):
            if len(ids):
                num_nodes = self.g.num_nodes(etype[0]), self.g.num_nodes(etype[2])
                positives.append(
                    Positives(
                        etype=etype,
                        number=number,
                        ids=ids,
                        ends=ends[etype],
                        num_nodes=num_nodes,
                        seed=self.seed,
                        epoch=epoch,
                    )
                )

        # Types without positive edges have no negatives.
        no_pairs: Pairs = np.empty(0, np.int64), np.empty(0, np.int64)
        negatives = dict.fromkeys(edges, no_pairs)
        if positives:
            negatives |= self.negative(positives)
        if times:
            pair_times.append(
                {etype: _repeat_times(etype, times[etype], negatives[etype]) for etype in edges}
            )
        return build_pairs(self.g.ntypes, edges, ends, negatives, pair_times)


def _repeat_times(etype: EdgeType, times: Array, negatives: Pairs) -> Array:
    """Return a time for each negative pair. It is the time of the pair's positive edge.

    ``times`` are (B,), one per positive edge. Raises ConfigError if some edges have more negatives than
    others.
    """
    num_negatives = len(negatives[0])
    num_per_edge, remainder = divmod(num_negatives, max(len(times), 1))
    if remainder or (num_negatives and not len(times)):
        raise ConfigError(
            f"the negative sampler returned {num_negatives} pairs for {len(times)} edges of "
            f"{etype}, so the time of each pair is unknown. Return k consecutive pairs for "
            "each edge."
        )
    return np.repeat(times, num_per_edge)


EdgesBatch: TypeAlias = (
    tuple[NodeIds, dgl.DGLGraph, list[DGLBlock]] | tuple[NodeIds, dgl.DGLGraph, dgl.DGLGraph, list[DGLBlock]]
)
"""(input node ids, pair graph, blocks). With negatives, the negative pair graph follows the pair graph."""


@final
class DistEdgeDataLoader(StepLoader[EdgeType, EdgeBatch, EdgesBatch]):
    """Iterates over batches of edges, like DGL's loader with the same name.

    Yields ``(input_nodes, pair_graph, blocks)``, or with negatives ``(input_nodes, pair_graph,
    negative_pair_graph, blocks)``. The pair graphs have all types, and their nodes are the destinations of
    ``blocks[-1]`` in the same order. ``pair_graph.edata[dgl.EID]`` holds the batch's edges.

    The constructor is collective, and iteration is not. All ranks have the same number of steps. A rank that
    has run out of edges gets pair graphs without edges. A step's share counts positive edges. A mean over
    positive and negative pairs is therefore weighted correctly if each edge has the same number of negatives.
    ``InBatch`` gives fewer if a batch has at most k edges. Only the draws by ``InBatch`` depend on the number
    of ranks.

    Args:
        eids: This rank's edges: (K,) ids, a mask over all edges, or {edge type: either}. K may be 0. The ids
            must be those in ``g``, as :func:`edge_split` returns them.
        sampler: A node sampler from ``dgl.dataloading``, which samples the blocks around the edges. Or the
            result of ``dgl.dataloading.as_edge_prediction_sampler(...)``, which then holds the following
            options.
        exclude: Edges that a batch's blocks must not contain. ``self``: the batch's own edges.
            ``reverse_id``: also their reverse edges by ``reverse_eids``. ``reverse_types``: also the reverse
            edges with the type that ``reverse_etypes`` gives. They are at the same positions in the source's
            edge lists. A function gets the batch's ids and returns ids. Fixed ids are excluded from every
            batch. Edges are excluded before drawing, so destinations keep their fan-out.
        reverse_eids: (E,) reverse edge id in ``g`` for each edge, or -1 for none, as :func:`reverse_edge_ids`
            returns it. Or a dict by edge type, or nested dicts by the edge's type and its reverse edge's
            type.
        reverse_etypes: Edge type to the type of its reverse edges. If a type is left out, only the batch's
            own edges of this type are excluded.
        negative_sampler: A sampler from ``dglx_dist.negative``, DGL's ``Uniform`` or ``PerSourceUniform``, or
            a function from (g, the batch's ids) to (sources, destinations). The loader's threads call it.
        options: The same options as for :class:`DataLoader`. ``batch_size`` counts edges over all types.

    Raises:
        ConfigError: on all ranks, if a rank has an unknown type, a repeated edge, wrong reverse edges or an
            ``exclude`` mode without its options. Also if ranks differ in ``batch_size`` or ``drop_last``.
        IndexError: an id is not an edge. The other ranks raise ConfigError.
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
        checked = read_edge_options(g, eids, sampler, negative_sampler=negative_sampler, **rule, **options)
        seed = resolve_seed(checked.options, g.session)
        blocks = open_maker(g, checked.sampler, read_sampler(checked.sampler), checked.options, seed)
        super().__init__(g.session, checked.items, checked.options, open_edge_maker(g, checked, blocks))


def read_edge_options(
    g: DistGraph,
    eids: Ids | Mapping[Any, Ids],
    sampler: Any,
    *,
    negative_sampler: Any = None,
    **options: Any,
) -> EdgeOptions:
    """Check the arguments of :class:`DistEdgeDataLoader`, and raise as it does. Every rank must call this."""
    rule = {name: options.pop(name, None) for name in ("exclude", "reverse_eids", "reverse_etypes")}
    return run_on_all_ranks(
        g.session, lambda: _read_options(g, eids, sampler, rule, negative_sampler, options), ConfigError
    )


def open_edge_maker(g: DistGraph, checked: EdgeOptions, blocks: NodeMaker) -> EdgeMaker:
    """Return a maker for edge batches. ``blocks`` makes the blocks around them. Every rank must call this."""
    signature = "a function" if callable(checked.exclude) else repr(checked.exclude)
    if checked.exclude == "reverse_types":
        types = {etype: [*finders] for etype, finders in checked.reverse.items()}
        signature = f"{signature}, reverse_etypes={types}"
    check_equal(g.session, "exclude=", signature)

    def open_sampler() -> DrawAll | None:
        return open_negative(g, checked.negative, _find_negative_etypes(g, checked.items))

    return EdgeMaker(
        g=g,
        blocks=blocks,
        seed=resolve_seed(checked.options, g.session),
        exclude=open_exclude(g, checked.exclude, checked.reverse),
        negative=run_on_all_ranks(g.session, open_sampler, ConfigError),
        columns=checked.columns,
        user_function=_find_user_function(checked),
        signature=f"exclude {signature}, negative_sampler={checked.negative!r}",
    )


@dataclass(frozen=True, kw_only=True)
class EdgeOptions:
    """An edge loader's options, checked. The node sampler is taken out of DGL's wrapper."""

    sampler: Any
    exclude: Any
    """None, one of :data:`MODES`, or a function of edge ids. Fixed ids are in ``options``."""
    reverse: Reverse
    negative: Any
    items: Items[EdgeType]
    options: LoaderOptions
    columns: Mapping[EdgeType, Mapping[str, str]]


def _read_options(
    g: DistGraph,
    eids: Ids | Mapping[Any, Ids],
    sampler: Any,
    rule: dict[str, Any],
    negative: Any,
    options: Mapping[str, Any],
) -> EdgeOptions:
    """Check the arguments on this rank. ``rule`` has the options for :func:`read_rule` by name."""
    labels: Any = ()
    if isinstance(sampler, EdgePredictionSampler):
        _check_wrapper(sampler, (*rule.values(), negative))
        rule = {name: getattr(sampler, name) for name in rule}
        negative = sampler.negative_sampler
        labels = sampler.prefetch_labels
        sampler = sampler.sampler

    sampler_spec = read_sampler(sampler)
    loader_options = read_loader_options(options)
    # Fixed ids are excluded from every batch, as node loaders do.
    exclude = rule["exclude"]
    if exclude is not None and not isinstance(exclude, str) and not callable(exclude):
        loader_options = replace(loader_options, exclude=exclude)
        rule = {**rule, "exclude": None}
    items = read_timed_items(g, eids, sampler_spec, loader_options, "edge")
    return EdgeOptions(
        sampler=sampler,
        exclude=rule["exclude"],
        reverse=read_rule(g, items.ids, **rule),
        negative=read_negative(negative),
        items=items,
        options=loader_options,
        columns=find_edge_columns(g, read_column_names(labels, "prefetch_labels"), "prefetch_labels"),
    )


def _check_wrapper(sampler: EdgePredictionSampler, loader_options: Sequence[Any]) -> None:
    """Raise ConfigError if options are given twice, or the class samples edges with its own code."""
    if any(option is not None for option in loader_options):
        raise ConfigError(
            "exclude, reverse_eids, reverse_etypes and negative_sampler belong either to the "
            "loader or to as_edge_prediction_sampler(...), not to both"
        )
    if type(sampler).sample is not EdgePredictionSampler.sample:
        raise ConfigError(
            f"{type(sampler).__qualname__} samples edges with its own code. Pass its node "
            "sampler, and pass its negative_sampler= and exclude= as functions."
        )


def _find_user_function(checked: EdgeOptions) -> str:
    """Return the name of an option that the user set to a function. Empty if there is none."""
    if callable(checked.exclude):
        return f"exclude={checked.exclude!r}"
    if checked.negative is not None and not isinstance(checked.negative, NegativeSampler):
        return f"negative_sampler={checked.negative!r}"
    return ""


def _find_negative_etypes(g: DistGraph, items: Items[EdgeType]) -> list[EdgeType]:
    # A single type always counts, because a rank without edges may draw batches for other ranks.
    if len(g.canonical_etypes) == 1:
        return list(g.canonical_etypes)
    return _list_nonempty_types(items.ids)


def _list_nonempty_types(edges: Edges) -> list[EdgeType]:
    return [etype for etype, ids in edges.items() if len(ids)]
