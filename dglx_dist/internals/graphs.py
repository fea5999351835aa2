"""Private parts of DGL's graphs: structures, column frames, and graphs that lack some out-edges.

Tested on DGL 1.1.3 and 2.1.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, final

import dgl
import numpy as np
import torch
from dgl import graph_index, heterograph_index, utils
from dgl.base import ALL as ALL
from dgl.base import is_all as is_all
from dgl.core import invoke_node_udf as invoke_node_udf
from dgl.core import is_builtin, message_passing
from dgl.frame import Column as Column
from dgl.frame import Frame as Frame
from dgl.frame import LazyFeature, infer_scheme
from dgl.frame import Scheme as Scheme
from dgl.heterograph import DGLBlock, reduce_dict_data
from dgl.heterograph_index import HeteroGraphIndex
from dgl.view import HeteroNodeView
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.internals.message_passing import TorchIndex
from dglx_dist.internals.pytorch import NO_BACKWARD, current_backward
from dglx_dist.records import EDGE_TYPE, EdgeType

BlockParts: TypeAlias = tuple[Any, tuple[list[str], list[str]], list[str], list[Frame], list[Frame]]
"""Structure, node types on both sides, edge type names, node frames and edge frames."""


def get_structure(graph: Any) -> Any:
    """Return the graph's structure. DGL replaces it when it moves a graph or changes its edges."""
    return graph._graph


def get_block_parts(block: DGLBlock) -> BlockParts:
    """Return the arguments that make another block with the same structure and columns."""
    # The types must have the frames' order. `srctypes` is sorted by name.
    half = len(block._ntypes) // 2
    types = block._ntypes[:half], block._ntypes[half:]
    return block._graph, types, block.etypes, block._node_frames, block._edge_frames


def get_relation(block: Any, number: int) -> DGLBlock:
    """Return one edge type as a block that shares the structure and frames of ``block``."""
    source, relation, destination = block.canonical_etypes[number]
    ends = block.get_ntype_id_from_src(source), block.get_ntype_id_from_dst(destination)
    frames = [block._node_frames[end] for end in ends]
    structure = block._graph.get_relation_graph(number)
    edge_frames = [block._edge_frames[number]]
    return DGLBlock(structure, ([source], [destination]), [relation], frames, edge_frames)


def pass_messages(block: DGLBlock, message: Any, reduce: Any) -> dict[str, Tensor]:
    """Run DGL's message passing. Return the destination columns, in which missing extrema are infinite."""
    columns: dict[str, Tensor] = message_passing(block, message, reduce, None)
    return columns


def reduce_over_types(
    results: Sequence[tuple[int, Mapping[str, Tensor]]], cross_reducer: Any, reduce: Any
) -> dict[str, Tensor]:
    """Combine the columns that several edge types computed, as DGL's ``multi_update_all`` does.

    Args:
        results: (edge type number, columns) pairs.
        reduce: The last edge type's reduce function.
    """
    numbers, columns = zip(*results, strict=True)
    merged: dict[str, Tensor] = reduce_dict_data(list(columns), cross_reducer, list(numbers))
    if is_builtin(reduce) and reduce.name in ("min", "max"):
        merged = {name: rows.masked_fill(rows.isinf(), 0) for name, rows in merged.items()}
    return merged


def frames_by_type(graph: Any) -> Iterator[tuple[str | EdgeType, Frame]]:
    """Yield each node type (for a block on both sides) and each edge type with its columns."""
    frames = (*graph._node_frames, *graph._edge_frames)
    return zip((*graph._ntypes, *graph.canonical_etypes), frames, strict=True)


def set_frame(block: Any, frame: Frame) -> None:
    """Replace the columns of the block's first source type."""
    block._node_frames[0] = frame


def replace_columns(frame: Frame, make: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Replace the frame's columns. ``make`` maps the stored columns by name to the new ones."""
    frame._columns = make(frame._columns)


def build_block(indptr: Tensor, sources: Tensor, num_src: int, etype: EdgeType = EDGE_TYPE) -> DGLBlock:
    """Build a block with one edge type and no data. It shares memory with the arrays.

    Args:
        indptr: (D + 1,) int32 or int64 CSC offsets for the D >= 0 destinations, which are the first sources.
        sources: (E,) in [0, ``num_src``), with the same dtype as ``indptr``.
    """
    num_dst = len(indptr) - 1
    source, relation, destination = etype
    nodes = [Frame(num_rows=num_src), Frame(num_rows=num_dst)]
    edges = [Frame(num_rows=len(sources))]
    index = _build_bipartite(num_src, num_dst, indptr, sources)
    return DGLBlock(index, ([source], [destination]), [relation], nodes, edges)


def _build_bipartite(num_src: int, num_dst: int, indptr: Tensor, sources: Tensor) -> HeteroGraphIndex:
    # Without explicit edge positions, DGL's SpMM kernels that read edge data reject the block. For small
    # batches, NumPy's range takes a third of the time that torch's takes.
    dtype = np.int32 if indptr.dtype is torch.int32 else np.int64
    positions = torch.from_numpy(np.arange(len(sources), dtype=dtype))
    return heterograph_index.create_unitgraph_from_csr(
        2, num_src, num_dst, indptr, sources, positions, ["coo", "csr", "csc"], transpose=True
    )


@final
class BlockTypes:
    """Types for blocks that have all node types on both sides. Thread-safe.

    Args:
        relations: Relation names, one per edge type.
        sources, destinations: For each relation, the position of its source or destination type in
            ``ntypes``.
    """

    def __init__(
        self, ntypes: Sequence[str], relations: Sequence[str], sources: list[int], destinations: list[int]
    ) -> None:
        self._ntypes, self._relations = ntypes, relations
        targets = [len(ntypes) + node_type for node_type in destinations]
        self._metagraph = graph_index.from_coo(2 * len(ntypes), sources, targets, True)

    def block(
        self,
        edges: Sequence[tuple[int, int, Tensor, Tensor, Mapping[str, Tensor]]],
        nodes: Sequence[Mapping[str, Tensor]] | None,
        counts: tuple[list[int], list[int]],
    ) -> DGLBlock:
        """Build a block.

        Args:
            edges: For each edge type: source and destination counts, offsets and sources as in
                :func:`build_block`, and columns.
            nodes: Columns per node type, such as global ids. The first rows are sources, and the first
                sources are destinations. None: the block has no columns.
            counts: Source count by node type, and destination count by node type.
        """
        indices = [_build_bipartite(n, m, offsets, sources) for n, m, offsets, sources, _ in edges]
        edge_frames = [Frame(columns, num_rows=len(sources)) for *_, sources, columns in edges]
        sizes = utils.toindex([*counts[0], *counts[1]], "int64")
        index = heterograph_index.create_heterograph_from_relations(self._metagraph, indices, sizes)
        no_columns: Sequence[Mapping[str, Tensor]] = [{}] * len(self._ntypes)
        frames = [
            Frame({name: rows[:count] for name, rows in (nodes or no_columns)[ntype].items()}, num_rows=count)
            for side_counts in counts
            for ntype, count in enumerate(side_counts)
        ]

        # Copy the names, because DGL keeps the lists.
        ntypes = list(self._ntypes), list(self._ntypes)
        return DGLBlock(index, ntypes, list(self._relations), frames, edge_frames)


def remove_empty_types(graph: dgl.DGLGraph) -> dgl.DGLGraph:
    """Return the graph or block without its empty edge types. It is unchanged if all types are empty.

    A model over several types then returns rows only for the seeds' types, as scripts expect. Node types and
    all data stay.
    """
    etypes = [etype for etype in graph.canonical_etypes if graph.num_edges(etype)]
    if len(etypes) in (0, len(graph.canonical_etypes)):
        return graph
    index = graph._graph
    numbers = [graph.get_etype_id(etype) for etype in etypes]
    sources, destinations = zip(*map(index.metagraph.find_edge, numbers), strict=True)
    counts = [index.num_nodes(ntype) for ntype in range(index.number_of_ntypes())]
    metagraph = graph_index.from_coo(len(counts), sources, destinations, True)
    relations = [index.get_relation_graph(number) for number in numbers]
    reduced_index = heterograph_index.create_heterograph_from_relations(
        metagraph, relations, utils.toindex(counts, "int64")
    )
    if isinstance(index, TorchIndex):
        kept_relations = tuple(index.relations[number] for number in numbers)
        TorchIndex.from_relations(reduced_index, kept_relations, index.device)
    ntypes = (graph.srctypes, graph.dsttypes) if graph.is_block else graph.ntypes
    names = [name for _, name, _ in etypes]
    frames = [graph._edge_frames[number] for number in numbers]
    kind = DGLBlock if graph.is_block else dgl.DGLGraph
    reduced = kind(reduced_index, ntypes, names, graph._node_frames, frames)
    reduced.step_share = getattr(graph, "step_share", None)
    return reduced


@final
class OwnRowsColumn(LazyFeature):
    """A column that holds only this rank's (own rows, ...), although its frame has more rows.

    DGL checks the length of every column except placeholders such as this one.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    @property
    def data(self) -> Tensor:
        return self._rows

    @property
    def scheme(self) -> Scheme:
        return infer_scheme(self._rows)

    @property
    def dtype(self) -> Any:
        return self._rows.dtype

    def to(self, *args: Any, **kwargs: Any) -> OwnRowsColumn:
        return OwnRowsColumn(self._rows.to(*args, **kwargs))

    astype = to

    def subcolumn(self, rows: Tensor) -> Any:
        """Raise ConfigError, because some of ``rows`` may belong to another rank."""
        raise ConfigError(
            f"{len(rows)} rows were read from a column that has this rank's own {len(self._rows)} rows and "
            "no halo. Pass the column to a layer, or set it again (block.srcdata[name] = rows) to exchange "
            "it."
        )


def get_own_rows(frame: Frame, name: str) -> Tensor | None:
    """Return a column's own rows, or None if the column is not an :class:`OwnRowsColumn` or is missing."""
    column = frame._columns.get(name)
    return column.data if isinstance(column, OwnRowsColumn) else None


@final
class FetchedColumn(LazyFeature):
    """A column that is computed when it is first read."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        super().__init__()
        self._read = functools.cache(read)

    @property
    def data(self) -> Tensor:
        return self._read()

    def subcolumn(self, rows: Tensor) -> FetchedColumn:
        return FetchedColumn(lambda: self.data.index_select(0, rows.long()))


def make_fetched_frame(own_rows: Frame, fetch: Callable[[str, Tensor], Tensor], num_sources: int) -> Frame:
    """Return a source frame with the columns from ``own_rows``, completed by their halo on first read.

    The columns that are read determine the exchanges and their order, so all ranks must read the same
    columns. DGL's functions do that, also on a rank without edges. ``fetch`` maps (name, stored rows) to
    (sources, ...) and exchanges missing halo rows.
    """

    def column(name: str) -> FetchedColumn:
        return FetchedColumn(lambda: fetch(name, own_rows[name]))

    return Frame({name: column(name) for name in own_rows}, num_rows=num_sources)


@final
class InEdgesOnly:
    """Descriptor for a DGL graph's ``_graph``, with an index that cannot be reversed in forward.

    DGL reverses a graph to sum over a source's out-edges, but this rank has only some of them. A softmax over
    each source's edges would be wrong. In backward DGL reverses the graph to propagate gradients to this
    rank's source copies. That is correct, because the exchange adds them up.
    """

    def __set__(self, graph: Any, index: HeteroGraphIndex) -> None:
        # DGL makes a new index when a graph changes its device, formats or integer type. Without ``__get__``,
        # Python reads the instance's attribute.
        index.__class__ = _InEdgesOnlyTorchIndex if isinstance(index, TorchIndex) else _InEdgesOnlyIndex
        graph.__dict__["_graph"] = index


class _IrreversibleIndex:
    """A graph index with complete in-edges and incomplete out-edges."""

    def reverse(self) -> Any:
        if current_backward() == NO_BACKWARD:
            raise_for_reverse("this")
        return super().reverse()  # type: ignore[misc]  # every subclass also derives from a graph index


class _InEdgesOnlyIndex(_IrreversibleIndex, HeteroGraphIndex):
    pass


class _InEdgesOnlyTorchIndex(_IrreversibleIndex, TorchIndex):
    pass


def raise_for_reverse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} sums over the out-edges of each source, which lie on several ranks (dgl.reverse, "
        "edge_softmax(norm_by='src'), and EdgeWeightNorm('both'), which SGConv, TAGConv, APPNPConv and "
        "GCN2Conv call for edge weights). Normalise the weights of the complete graph beforehand, load them "
        "as an edge feature and pass them to GraphConv(norm='none'), or use EdgeWeightNorm('right')."
    )


class InEdgesOnlyGraph:
    """Base class for DGL graphs with complete in-edges and incomplete out-edges.

    DGL calls :meth:`set_columns` and :meth:`pop_column` for every change to node columns.
    """

    _graph = InEdgesOnly()

    @property
    def node_frames(self) -> list[Frame]:
        """Node columns, for a block on both sides."""
        return self._node_frames

    @node_frames.setter
    def node_frames(self, frames: list[Frame]) -> None:
        self._node_frames = frames

    @property
    def edge_frames(self) -> list[Frame]:
        return self._edge_frames

    @edge_frames.setter
    def edge_frames(self, frames: list[Frame]) -> None:
        self._edge_frames = frames

    def set_columns(self, side: int, rows: Any, data: Any) -> None:
        """Set the columns ``data`` for some or ``ALL`` rows on one side."""
        super()._set_n_repr(side, rows, data)  # type: ignore[misc]  # every subclass is a DGL graph

    def pop_column(self, side: int, name: str) -> Any:
        return super()._pop_n_repr(side, name)  # type: ignore[misc]  # every subclass is a DGL graph

    def find_etypes(self, key: Any) -> list[int]:
        """Return the edge type numbers that the index ``key`` selects."""
        keys = key if isinstance(key, tuple) else (slice(None), key, slice(None))
        if len(keys) != 3:
            return []
        return list(self._find_etypes(keys))  # type: ignore[attr-defined]  # every subclass is a DGL graph

    def take_structure(self, graph: Any) -> None:
        self._graph = graph._graph

    def _set_n_repr(self, side: int, rows: Any, data: Any) -> None:
        self.set_columns(side, rows, data)

    def _pop_n_repr(self, side: int, name: str) -> Any:
        return self.pop_column(side, name)


@final
class OwnNodes(HeteroNodeView):
    """The view ``nodes`` for a graph that counts its own nodes."""

    __slots__ = ()

    def __call__(self, ntype: str | None = None) -> Tensor:
        return torch.arange(self._graph.num_nodes(), dtype=self._graph.idtype, device=self._graph.device)
