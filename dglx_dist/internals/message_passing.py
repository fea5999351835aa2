"""DGL's message passing in torch operations, for devices that DGL's own kernels do not serve.

On a graph that :func:`place` has put on a device, DGL's operators (``update_all``, ``apply_edges``,
``edge_softmax``, ``dgl.ops``) run this module's functions. On every other graph they run DGL's own kernels.
Tested on DGL 1.1.3 and 2.1.0, and on torch 2.4.0, 2.13.0 and 2.15.0.

No function waits for the device, with one exception: user-defined reductions make DGL ask for some nodes'
in-edges.

Shape letters: S sources, D destinations, E edges, H heads, F features per head.
"""

from __future__ import annotations

import copy as copying
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import dgl
import torch
from dgl import DGLGraph, ndarray
from dgl.backend.pytorch import sparse
from dgl.base import ALL, is_all
from dgl.frame import Column, Frame, LazyFeature
from dgl.heterograph import DGLBlock
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import Copy, ids_to_device
from dglx_dist.internals.segments import (
    Relation,
    Rows,
    Segments,
    reduce_edges,
    softmax,
    sum_edges,
    weighted_sum,
)

Graph = TypeVar("Graph", bound=Any)

_MAX_HEADS = 8
"""Maximum number of sparse matrix products for one sum. With more heads, messages are made."""
_BLOCK_ROWS = 64
"""Number of rows that :func:`multiply_groups` multiplies by one matrix at a time."""


def is_on_torch_path(device: torch.device | str) -> bool:
    """Return whether graphs on ``device`` take the torch path. By default, all devices except the CPU do.

    Raises ConfigError if DGLX_MESSAGE_PASSING is neither ``torch`` nor ``dgl``.
    """
    choice = _read_choice()
    return torch.device(device).type != "cpu" if choice is None else choice == "torch"


def _read_choice() -> str | None:
    value = os.environ.get("DGLX_MESSAGE_PASSING") or None
    if value in (None, "torch", "dgl"):
        return value
    raise ConfigError(
        f"DGLX_MESSAGE_PASSING={value!r} must be 'torch' (torch runs DGL's operators on every device) or "
        "'dgl' (DGL's kernels run them). By default, torch runs them on all devices but the CPU."
    )


def place(graph: Graph, device: torch.device | str, *, copy: Copy | None = None) -> Graph:
    """Return ``graph`` with structure, node and edge columns on ``device``.

    Operators run in torch if :func:`is_on_torch_path`. Otherwise this is DGL's ``graph.to(device)``. The
    structure keeps its integer type. Further data is computed on the device when it is first needed.

    Args:
        graph: DGLGraph or DGLBlock with any number of types, also a subclass.
        device: Any torch device, also ``meta``.
        copy: Function that copies one tensor to ``device``. The default is ``tensor.to(device)``. It may
            return before the data has arrived, if the stream that uses the graph waits for it.

    Raises:
        ConfigError: DGLX_MESSAGE_PASSING has an invalid value.
    """
    device = torch.device(device)
    if not is_on_torch_path(device):
        return graph.to(device)
    install()
    return graph.to(device) if copy is None else graph.to(device, copy=copy)


def create_block(form: str, first: Tensor, sources: Tensor, *, num_src: int, num_dst: int) -> DGLBlock:
    """Do the same as ``dgl.create_block`` with one edge type, on the arrays' device.

    Args:
        form: "coo" or "csc".
        first: (E,) destinations for "coo", or their (D + 1,) offsets for "csc".
        sources: (E,) sources.
        num_src: Number of sources S.
        num_dst: Number of destinations D.
    """
    if not is_on_torch_path(first.device):
        data = (sources, first) if form == "coo" else ("csc", (first, sources, sources[:0]))
        return dgl.create_block(data, num_src_nodes=num_src, num_dst_nodes=num_dst)

    install()
    num_edges = len(sources)
    by_src = Segments(num_src, num_edges, ends=sources)
    if form == "coo":
        by_dst = Segments(num_dst, num_edges, ends=first)
    else:
        by_dst = Segments(num_dst, num_edges, offsets_and_order=(first, None))

    # DGL makes a block without edges on the CPU. Its structure is then replaced by the one on the device.
    no_edges = sources.new_zeros(0, device="cpu")
    block = dgl.create_block((no_edges, no_edges), num_src_nodes=num_src, num_dst_nodes=num_dst)
    block._graph = TorchIndex.from_relations(block._graph, (Relation(by_src, by_dst),), first.device)
    block._edge_frames = [Frame(num_rows=num_edges)]
    return block


# Operators with the same arguments as DGL's autograd functions.


def compute_messages(relation: Relation, op: str, lhs: Rows, rhs: Rows, targets: str) -> Tensor:
    """Compute each edge's message from one or two operands.

    Args:
        relation: Edges.
        op: "copy_lhs", "copy_rhs", "add", "mul" or "dot". "dot" sums over the last dimension and keeps it
            with size 1. Dimensions after the first one broadcast as in NumPy.
        lhs: The left operand's rows, or None.
        rhs: The right operand's rows, or None.
        targets: What the left and the right operand's rows belong to, such as "ue" for sources and edges.

    Returns:
        (E, ...) messages.
    """
    operands: list[Tensor] = []
    if lhs is not None and op != "copy_rhs":
        operands.append(relation.gather_to_edges(lhs, targets[0]))
    if rhs is not None and op != "copy_lhs":
        operands.append(relation.gather_to_edges(rhs, targets[1]))
    if len(operands) == 1:
        return operands[0]

    num_dims = max(rows.dim() for rows in operands)
    left, right = (_add_dims(rows, num_dims) for rows in operands)
    if op == "add":
        return left + right
    product = left * right
    return product.sum(-1, keepdim=True) if op == "dot" and num_dims > 1 else product


def _add_dims(rows: Tensor, num_dims: int) -> Tensor:
    """Insert dimensions with size 1 behind the first one, up to ``num_dims`` dimensions."""
    return rows.reshape(len(rows), *(1,) * (num_dims - rows.dim()), *rows.shape[1:])


def count_heads(lhs: Tensor, rhs: Tensor) -> int:
    """Count the weights that an edge applies to its source's row.

    Returns 0 if the sum cannot be computed as sparse products, because weights vary along the last dimension,
    or because there are too many weights.
    """
    num_weights = math.prod(rhs.shape[1:])
    if num_weights == 1 and rhs.dim() <= lhs.dim():
        return 1
    has_heads = lhs.dim() == rhs.dim() and rhs.shape[-1] == 1 and lhs.shape[1:-1] == rhs.shape[1:-1]
    return num_weights if has_heads and num_weights <= _MAX_HEADS else 0


def spmm(relation: Relation, op: str, how: str, lhs: Rows, rhs: Rows) -> Tensor:
    """Compute messages from sources and edges, and reduce them to (D, ...) destination rows.

    Sums over source rows, with or without edge weights, are sparse products without messages.
    """
    weights = rhs if op == "mul" else None
    num_heads = 0
    if how == "sum" and lhs is not None:
        if weights is not None:
            num_heads = count_heads(lhs, weights)
        elif op == "copy_lhs":
            num_heads = 1
    if lhs is None or num_heads == 0:
        messages = compute_messages(relation, op, lhs, rhs, "ue")
        return reduce_edges(messages, relation.by_dst, how)

    dtype = lhs.dtype
    if weights is not None:
        dtype = torch.promote_types(dtype, weights.dtype)
        weights = weights.to(dtype).reshape(len(weights), num_heads)
    row_size = math.prod(lhs.shape[1:])
    rows = lhs.to(dtype).reshape(len(lhs), num_heads, row_size // num_heads)
    sums = weighted_sum(rows, weights, relation)
    return sums.reshape(len(sums), *lhs.shape[1:])


def edge_softmax(index: TorchIndex, scores: Tensor, eids: Any, norm_by: str) -> Tensor:
    """Compute the softmax of the edge scores.

    Args:
        eids: Edges that have scores, or ``ALL``.
        norm_by: "dst" normalises over each destination's in-edges, "src" over each source's out-edges.
    """
    # A distributed graph's index refuses a reversal.
    segments = (index.reverse() if norm_by == "src" else index).relations[0].by_dst
    if not is_all(eids):
        segments = Segments(segments.num_nodes, len(eids), ends=segments.ends[eids.long()])
    return softmax(scores, segments)


def spmm_hetero(index: TorchIndex, op: str, how: str, num_lhs: int, *operands: Rows) -> tuple[Rows, ...]:
    """Reduce messages over all edge types at each destination. Return the results by node type.

    The result is None for a node type without messages.
    """
    sources = operands[:num_lhs]
    edges = operands[num_lhs:]
    out: list[Rows] = [None] * index.number_of_ntypes()
    messages_by_type: dict[int, list[tuple[Relation, Tensor]]] = {}
    for etype, relation in enumerate(index.relations):
        source, destination = index.metagraph.find_edge(etype)
        lhs = None if op == "copy_rhs" else sources[source]
        rhs = None if op == "copy_lhs" else edges[etype]
        if lhs is None and rhs is None:
            continue

        if how == "sum":
            part = spmm(relation, op, how, lhs, rhs)
            total = out[destination]
            out[destination] = part if total is None else total + part
        else:
            part = compute_messages(relation, op, lhs, rhs, "ue")
            messages_by_type.setdefault(destination, []).append((relation, part))

    for destination, parts in messages_by_type.items():
        segments = _join_segments([relation.by_dst for relation, _ in parts])
        out[destination] = reduce_edges(torch.cat([rows for _, rows in parts]), segments, how)
    return tuple(out)


def sddmm_hetero(
    index: TorchIndex, op: str, num_lhs: int, lhs_target: str, rhs_target: str, *operands: Rows
) -> tuple[Rows, ...]:
    """Compute messages for all edge types, without reducing them. Return (E, ...) messages by edge type."""

    def select(rows: Sequence[Rows], target: str, etype: int) -> Rows:
        source, destination = index.metagraph.find_edge(etype)
        return rows[{"u": source, "v": destination, "e": etype}[target[0]]]

    messages: list[Rows] = []
    for etype, relation in enumerate(index.relations):
        lhs = None if op == "copy_rhs" else select(operands[:num_lhs], lhs_target, etype)
        rhs = None if op == "copy_lhs" else select(operands[num_lhs:], rhs_target, etype)
        messages.append(compute_messages(relation, op, lhs, rhs, lhs_target[0] + rhs_target[0]))

    return tuple(messages)


def edge_softmax_hetero(index: TorchIndex, eids: Any, norm_by: str, *scores: Rows) -> tuple[Rows, ...]:
    """Compute the softmax over a node's edges of all types together. Return the results by edge type."""
    index = index.reverse() if norm_by == "src" else index
    etypes_by_type: dict[int, list[int]] = {}
    for etype, rows in enumerate(scores):
        if rows is not None:
            etypes_by_type.setdefault(index.metagraph.find_edge(etype)[1], []).append(etype)
    out: list[Rows] = [None] * len(scores)
    for etypes in etypes_by_type.values():
        segments = [index.relations[etype].by_dst for etype in etypes]
        all_scores = torch.cat([rows for e in etypes if (rows := scores[e]) is not None])
        shares = softmax(all_scores, _join_segments(segments))
        parts = torch.split(shares, [segment.num_edges for segment in segments])
        for etype, part in zip(etypes, parts, strict=True):
            out[etype] = part

    return tuple(out)


def _join_segments(segments: Sequence[Segments]) -> Segments:
    """Return the edges of several types as edges of one type. All types must have the same nodes."""
    if len(segments) == 1:
        return segments[0]
    ends = torch.cat([segment.ends for segment in segments])
    return Segments(segments[0].num_nodes, len(ends), ends=ends)


def segment_mm(rows: Tensor, matrices: Tensor, lengths: Tensor) -> Tensor:
    """Multiply (N, A) rows by (R, A, B) matrices. Matrix r is for the next ``lengths[r]`` rows."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(rows.device, non_blocking=True)
    return multiply_groups(rows, matrices, _make_segments(rows, offsets))


def _make_segments(rows: Tensor, offsets: Tensor) -> Segments:
    return Segments(len(offsets) - 1, len(rows), offsets_and_order=(offsets, None))


def gather_mm(rows: Tensor, matrices: Tensor, idx_a: Tensor | None, idx_b: Tensor | None) -> Tensor:
    """Multiply row ``idx_a[k]`` by matrix ``idx_b[k]`` for every k from 0 to K - 1.

    Args:
        rows: (N, A) rows.
        matrices: (R, A, B) matrices.
        idx_a: (K,) row indices. None means 0 to K - 1.
        idx_b: (K,) matrix indices. None means 0 to K - 1.

    Returns:
        (K, B) products.
    """
    rows = rows if idx_a is None else rows[idx_a]
    if idx_b is None:
        return torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)
    segments = Segments(len(matrices), len(rows), ends=idx_b)
    order = segments.offsets_and_order[1]
    assert order is not None
    product = multiply_groups(rows.index_select(0, order), matrices, segments)
    return torch.empty_like(product).index_copy(0, order, product)


def multiply_groups(rows: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Multiply each row by its group's matrix.

    Every group is padded to a multiple of ``_BLOCK_ROWS`` rows. One batched product then computes all groups,
    so the host need not wait for the group sizes from the device.

    Args:
        rows: (N, A) rows, sorted by group.
        matrices: (R, A, B) matrices, one per group.
        segments: The rows in each group, as the edges at R nodes.

    Returns:
        (N, B) products.
    """
    offsets = segments.offsets_and_order[0].long()
    blocks_per_group = (offsets.diff() + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    block_ends = blocks_per_group.cumsum(0)
    first_blocks = block_ends - blocks_per_group

    # Position that each row has among the padded rows.
    shifts = first_blocks * _BLOCK_ROWS - offsets[:-1]
    positions = torch.arange(len(rows), device=rows.device) + shifts[segments.ends_in_order.long()]

    # The exact block count is known only on the device. This is an upper bound.
    num_blocks = len(rows) // _BLOCK_ROWS + len(matrices)
    blocks = torch.arange(num_blocks, device=rows.device)
    group_of_block = torch.searchsorted(block_ends, blocks, right=True).clamp(max=len(matrices) - 1)

    padded = rows.new_zeros(num_blocks * _BLOCK_ROWS, rows.shape[1]).index_copy(0, positions, rows)
    products = torch.bmm(padded.view(num_blocks, _BLOCK_ROWS, -1), matrices[group_of_block])
    return products.flatten(0, 1).index_select(0, positions)


# Interface to DGL.


class TorchIndex(HeteroGraphIndex):
    """A graph index that also holds its edges on a device, as ``relations`` by edge type.

    Counts and types come from the CPU's index, to which this object refers as well.
    """

    relations: tuple[Relation, ...]
    device: torch.device

    @classmethod
    def from_index(cls, index: HeteroGraphIndex, device: torch.device, move: Copy) -> TorchIndex:
        etypes = range(index.number_of_etypes())
        relations = tuple(_make_relation(index, etype, move) for etype in etypes)
        return cls.from_relations(cpu_index(index), relations, device)

    @classmethod
    def from_relations(cls, index: Any, relations: tuple[Relation, ...], device: torch.device) -> TorchIndex:
        index.__class__ = cls
        index.relations, index.device = relations, device
        return index

    def get_relation_graph(self, etype: int) -> TorchIndex:
        graph = super().get_relation_graph(etype)
        return self.from_relations(graph, (self.relations[etype],), self.device)

    def reverse(self) -> TorchIndex:
        relations = tuple(relation.reverse for relation in self.relations)
        return self.from_relations(super().reverse(), relations, self.device)

    def num_edges(self, etype: int) -> int:
        return self.relations[etype].by_dst.num_edges

    def adjacency_matrix_tensors(self, etype: int, transpose: bool, fmt: str) -> tuple[Any, ...]:
        relation = self.relations[etype].reverse if transpose else self.relations[etype]
        shape = relation.by_src.num_nodes, relation.by_dst.num_nodes
        if fmt == "coo":
            return *shape, relation.by_src.ends, relation.by_dst.ends
        offsets, order = relation.by_src.offsets_and_order
        columns = relation.reverse.columns
        return *shape, offsets, columns, columns[:0] if order is None else order

    def edges(self, etype: int, order: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        relation = self.relations[etype]
        src, dst = relation.by_src.ends, relation.by_dst.ends
        ids = torch.arange(len(src), dtype=src.dtype, device=src.device)
        if order == "srcdst":
            places = torch.argsort(dst, stable=True)
            places = places[torch.argsort(src[places], stable=True)]
            return src[places], dst[places], ids[places]
        return src, dst, ids

    def find_edges(self, etype: int, eid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        relation = self.relations[etype]
        return relation.by_src.ends[eid.long()], relation.by_dst.ends[eid.long()], eid

    def in_edges(self, etype: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.find_edges(etype, self.relations[etype].by_dst.find_edge_ids(v))

    def out_edges(self, etype: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.find_edges(etype, self.relations[etype].by_src.find_edge_ids(v))

    def in_degrees(self, etype: int, v: Tensor) -> Tensor:
        return self.relations[etype].by_dst.degrees[v.long()]

    def out_degrees(self, etype: int, v: Tensor) -> Tensor:
        return self.relations[etype].by_src.degrees[v.long()]

    def has_nodes(self, ntype: int, vids: Tensor) -> Tensor:
        return (vids >= 0) & (vids < self.num_nodes(ntype))


def cpu_index(index: HeteroGraphIndex) -> HeteroGraphIndex:
    """Return another object for the structure that ``index`` has on the CPU."""
    for etype, relation in enumerate(index.relations if isinstance(index, TorchIndex) else ()):
        if HeteroGraphIndex.num_edges(index, etype) != relation.by_dst.num_edges:
            raise ConfigError("the structure of this graph was made on its device and cannot leave it")
    return HeteroGraphIndex.copy_to(index, ndarray.cpu(0))


def _make_relation(index: HeteroGraphIndex, etype: int, move: Copy) -> Relation:
    """Copy one edge type to a device with ``move``, sorted by destination if DGL holds it in that form."""
    graph = HeteroGraphIndex.get_relation_graph(index, etype)
    source, destination = index.metagraph.find_edge(etype)
    num_src = index.num_nodes(source)
    num_dst = index.num_nodes(destination)
    num_edges = graph.num_edges(0)
    if "csc" not in graph.formats()["created"]:
        src, dst, _ = graph.edges(0, "eid")
        by_src = Segments(num_src, num_edges, ends=move(src))
        return Relation(by_src, Segments(num_dst, num_edges, ends=move(dst)))

    _, _, offsets, sources, order = graph.adjacency_matrix_tensors(0, True, "csr")
    in_order = not len(order) or bool((order[1:] > order[:-1]).all())
    if not in_order:
        # Reorder on the host, because the device may not have its copies yet.
        sources = torch.empty_like(sources).index_copy_(0, order.long(), sources)
    order_of_edges = None if in_order else move(order)
    by_dst = Segments(num_dst, num_edges, offsets_and_order=(move(offsets), order_of_edges))
    return Relation(Segments(num_src, num_edges, ends=move(sources)), by_dst)


_DGL_DEVICE: Callable[[Any], torch.device] = DGLGraph.device.fget
_DGL_TO = DGLGraph.to


def _device(graph: Any) -> torch.device:
    return graph._graph.device if isinstance(graph._graph, TorchIndex) else _DGL_DEVICE(graph)


def _to(graph: Any, device: torch.device | str | None, *, copy: Copy | None = None, **options: Any) -> Any:
    """Replace DGL's ``graph.to``. A graph that enters or leaves the torch path gets another index."""
    if device is None:
        return graph
    index = graph._graph
    # A tensor's device has a number, as in "cuda:0", which ``device`` may lack.
    target = torch.empty(0, device=device).device
    to_torch_path = is_on_torch_path(target)
    from_torch_path = isinstance(index, TorchIndex)
    if not to_torch_path and not from_torch_path:
        return _DGL_TO(graph, device, **options)
    if graph.device == target and to_torch_path == from_torch_path:
        return graph

    move = copy or (lambda tensor: tensor.to(target, **options))
    result = copying.copy(graph)
    result._graph = TorchIndex.from_index(index, target, move) if to_torch_path else cpu_index(index)
    result._node_frames = [copy_frame(frame, target, move) for frame in graph._node_frames]
    result._edge_frames = [copy_frame(frame, target, move) for frame in graph._edge_frames]

    for name in ("_batch_num_nodes", "_batch_num_edges"):
        counts = getattr(graph, name)
        if counts is not None:
            setattr(result, name, {kind: move(count) for kind, count in counts.items()})

    return result


def copy_frame(frame: Frame, device: torch.device, move: Copy) -> Frame:
    result = frame.clone()
    for name, column in frame._columns.items():
        is_lazy = isinstance(column, LazyFeature)
        is_ids = name in (dgl.NID, dgl.EID)
        copy = functools.partial(ids_to_device, device=device, copy=move) if is_ids else move
        result._columns[name] = column.to(device) if is_lazy else Column.create(copy(column.data))
        if is_ids and not is_lazy and (positions := getattr(column.data, "positions", None)):
            result._columns[name].data.positions = positions
    return result


def _make_degrees(name: str, side: str) -> Callable[..., Any]:
    stock = getattr(DGLGraph, name)

    def degrees(graph: Any, nodes: Any = ALL, etype: Any = None, **named: Any) -> Any:
        # DGL's own method reads the number of valid ids from the device.
        if isinstance(graph._graph, TorchIndex) and is_all(nodes) and not named:
            return getattr(graph._graph.relations[graph.get_etype_id(etype)], side).degrees
        return stock(graph, *(() if named else (nodes,)), etype=etype, **named)

    return degrees


_INDEX_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "GSpMM": lambda index, *args: spmm(index.relations[0], *args),
    "GSDDMM": lambda index, op, lhs, rhs, a, b: compute_messages(
        index.relations[0], op, lhs, rhs, a[0] + b[0]
    ),
    "EdgeSoftmax": edge_softmax,
    "GSpMM_hetero": spmm_hetero,
    "GSDDMM_hetero": sddmm_hetero,
    "EdgeSoftmax_hetero": edge_softmax_hetero,
}
_TENSOR_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "SegmentReduce": lambda how, rows, offsets: reduce_edges(rows, _make_segments(rows, offsets), how),
    "ScatterAdd": lambda rows, ends, count: sum_edges(rows, Segments(count, len(ends), ends=ends)),
    "SEGMENTMM": segment_mm,
    "GATHERMM": gather_mm,
}


def _make_dispatcher(name: str) -> SimpleNamespace:
    """Return a substitute for one of DGL's autograd functions. Its ``apply`` runs DGL's function or ours."""
    stock = getattr(sparse, name)
    ours = {**_INDEX_FUNCTIONS, **_TENSOR_FUNCTIONS}[name]

    def apply(*args: Any) -> Any:
        if name in _INDEX_FUNCTIONS:
            is_ours = isinstance(args[0], TorchIndex)
        else:
            is_ours = is_on_torch_path(next(value.device for value in args if isinstance(value, Tensor)))
        return (ours if is_ours else stock.apply)(*args)

    return SimpleNamespace(apply=apply)


_INSTALL_LOCK = threading.Lock()


def install() -> None:
    """Make DGL's operators and ``graph.to(device)`` take the torch path.

    :func:`place` calls this. It is idempotent and thread-safe.
    """
    with _INSTALL_LOCK:
        _install_once()


@functools.cache
def _install_once() -> None:
    """Replace DGL's functions and methods in this process."""
    for name in (*_INDEX_FUNCTIONS, *_TENSOR_FUNCTIONS):
        setattr(sparse, name, _make_dispatcher(name))
    DGLGraph.device = property(_device)
    DGLGraph.to = _to
    DGLGraph.in_degrees = _make_degrees("in_degrees", "by_dst")
    DGLGraph.out_degrees = _make_degrees("out_degrees", "by_src")
    # The warning would appear in every script, although its user has not asked for CSR tensors.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
