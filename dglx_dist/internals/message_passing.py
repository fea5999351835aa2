"""DGL's message passing in torch operations, for devices that DGL's own kernels do not serve.

:func:`correct_kernels` corrects DGL's own kernels on CPUs. Tested on DGL 1.1.3 and 2.1.0, and on torch 2.4.0,
2.13.0 and 2.15.0.

On a graph that :func:`place` has put on a device, DGL's operators (``update_all``, ``apply_edges``,
``edge_softmax``, ``dgl.ops``) run the functions of this module. On every other graph they run DGL's own
kernels.

Each row of a result has one writer, which adds in the order of the edges. Only products with a sparse matrix
leave the order to the device's library. No function waits for the device, except for the in-edges of some
nodes, which DGL asks for in user-defined reductions.

Letters of shapes: S sources, D destinations, E edges, H heads, F features of a head.
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
from typing import Any, TypeAlias, TypeVar, final

import dgl
import torch
from dgl import DGLGraph, core, ndarray
from dgl.backend.pytorch import sparse
from dgl.base import ALL, is_all
from dgl.frame import Column, Frame, LazyFeature
from dgl.heterograph import DGLBlock
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor
from torch.amp.autocast_mode import _cast
from torch.autograd import Function

from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import Copy, ids_to_device

Graph = TypeVar("Graph", bound=Any)

Rows: TypeAlias = Tensor | None
"""(n, ...) rows of nodes or edges, or None if the operator does not read the operand."""

_HALVES = (torch.float16, torch.bfloat16)
_MAX_HEADS = 8
"""Maximum number of products with a sparse matrix for one sum. With more heads, messages are made."""
_PIECE = 2**24
"""Number of elements of rows that are gathered to edges at a time for gradients of weights."""
_BLOCK_ROWS = 64
"""Number of rows that are multiplied by one matrix at a time in :func:`multiply_groups`."""


def is_on_torch_path(device: torch.device | str) -> bool:
    """Return whether graphs on ``device`` take the torch path. All devices but the CPU do by default.

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

    Operators run in torch if :func:`is_on_torch_path`, else this is ``graph.to(device)`` of DGL. The
    structure keeps its integer type. Further data is computed on the device when it is first needed.

    Args:
        graph: DGLGraph or DGLBlock of any number of types, also a subclass.
        device: Any device of torch, also ``meta``.
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
    """Return ``dgl.create_block`` of one edge type, on the device of its arrays.

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


# Edges of a graph on the device.


@final
class Segments:
    """The edges of each node, which is their source or their destination.

    The edges are stored as :attr:`ends` or as :attr:`offsets_and_order`. The other form is computed and kept
    when it is first read.
    """

    def __init__(
        self,
        num_nodes: int,
        num_edges: int,
        *,
        ends: Tensor | None = None,
        offsets_and_order: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self.num_edges = num_edges
        # A cached property returns the value that the instance has under its name.
        if ends is not None:
            self.ends = ends
        if offsets_and_order is not None:
            self.offsets_and_order = offsets_and_order

    @functools.cached_property
    def offsets_and_order(self) -> tuple[Tensor, Tensor | None]:
        """(N + 1,) offsets, and (E,) edge ids sorted by node. None if the edges are stored in that order."""
        ends, order = torch.sort(self.ends, stable=True)
        nodes = torch.arange(self.num_nodes + 1, dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, nodes, out_int32=ends.dtype is torch.int32), order

    @functools.cached_property
    def ends_in_order(self) -> Tensor:
        """(E,) node of each edge, sorted by node."""
        offsets, _ = self.offsets_and_order
        nodes = torch.arange(self.num_nodes, dtype=offsets.dtype, device=offsets.device)
        return torch.repeat_interleave(nodes, offsets.diff(), output_size=self.num_edges)

    @functools.cached_property
    def ends(self) -> Tensor:
        """(E,) node of each edge, in the order of edge ids."""
        _, order = self.offsets_and_order
        ordered = self.ends_in_order
        return ordered if order is None else torch.empty_like(ordered).index_copy_(0, order.long(), ordered)

    @property
    def degrees(self) -> Tensor:
        return self.offsets_and_order[0].diff()

    def sort_by_node(self, rows: Tensor) -> Tensor:
        """Sort the (E, ...) rows of edges, which are in the order of edge ids, by node."""
        order = self.offsets_and_order[1]
        return rows if order is None else rows.index_select(0, order)

    def reduce(self, ordered: Tensor, how: str) -> Tensor:
        """Reduce the rows of each node's edges.

        Args:
            ordered: (E, ...) rows of edges, sorted by node.
            how: "sum", "max" or "min".

        Returns:
            (N, ...) rows of nodes. A node without edges has 0 for "sum", and an infinity otherwise.
        """
        if how == "sum" and ordered.dtype in _HALVES:
            return self.reduce(ordered.float(), how).to(ordered.dtype)

        row_shape = ordered.shape[1:]
        matrix = ordered.reshape(self.num_edges, math.prod(row_shape)).contiguous()
        offsets, _ = self.offsets_and_order
        initial = 0 if how == "sum" else None
        reduced = torch.segment_reduce(matrix, how, offsets=offsets, axis=0, unsafe=True, initial=initial)
        return reduced.reshape(self.num_nodes, *row_shape)

    def find_edge_ids(self, nodes: Tensor) -> Tensor:
        """Return the ids of all edges of ``nodes``, node by node.

        This waits for the device, because the host does not know the number of edges.
        """
        offsets, order = self.offsets_and_order
        counts = self.degrees[nodes.long()]
        # Position of a node's first edge, less the number of edges of the nodes before it in the result.
        shifts = offsets[nodes.long()] - (torch.cumsum(counts, 0) - counts)
        shift_of_edge = torch.repeat_interleave(shifts, counts)
        positions = shift_of_edge + torch.arange(len(shift_of_edge), device=shifts.device)
        edge_ids = positions if order is None else order[positions.long()]
        return edge_ids.to(offsets.dtype)


@final
class Relation:
    """The edges of one type by both of their ends."""

    def __init__(self, by_src: Segments, by_dst: Segments) -> None:
        self.by_src, self.by_dst = by_src, by_dst

    @functools.cached_property
    def reverse(self) -> Relation:
        return Relation(self.by_dst, self.by_src)

    @functools.cached_property
    def columns(self) -> Tensor:
        """(E,) source of each edge, sorted by destination: the column indices of the (D, S) CSR matrix."""
        return self.by_dst.sort_by_node(self.by_src.ends)

    def gather_to_edges(self, rows: Tensor, target: str) -> Tensor:
        """Return the (E, ...) rows of the sources "u" or destinations "v" of edges, or ``rows`` for "e"."""
        if target == "e":
            return rows
        return gather(rows, self.by_src if target == "u" else self.by_dst)

    def multiply(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the weighted rows of the sources over the in-edges of each destination.

        Args:
            rows: (S, H, F) rows of the sources.
            weights: (E, H) weights in the order of edge ids. None means 1 for every edge.

        Returns:
            (D, H, F) sums.
        """
        sums = rows.new_empty(self.by_dst.num_nodes, *rows.shape[1:])
        if not sums.numel() or rows.is_meta:
            # Torch has no sparse product without data.
            return sums

        dtype = rows.dtype
        if dtype in _HALVES and not _can_multiply_halves(rows):
            dtype = torch.float32
        rows = rows.to(dtype)

        if weights is None:
            ones = rows.new_ones(self.by_dst.num_edges)
            return self._multiply_matrix(ones, rows.flatten(1)).view_as(sums).to(sums.dtype)
        for head in range(rows.shape[1]):
            values = self.by_dst.sort_by_node(weights[:, head]).to(dtype)
            sums[:, head] = self._multiply_matrix(values, rows[:, head])
        return sums

    def _multiply_matrix(self, values: Tensor, rows: Tensor) -> Tensor:
        """Multiply the (D, S) matrix with the (E,) ``values``, sorted by destination, by (S, F) rows."""
        shape = (self.by_dst.num_nodes, self.by_src.num_nodes)
        offsets = self.by_dst.offsets_and_order[0]
        matrix = torch.sparse_csr_tensor(offsets, self.columns, values, shape, check_invariants=False)
        with torch.autocast(rows.device.type, enabled=False):
            return matrix @ rows


def _can_multiply_halves(rows: Tensor) -> bool:
    if not rows.is_cuda:
        # Torch has no sparse products in half precision on CPUs.
        return False
    has_bfloat16 = torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return has_bfloat16 or rows.dtype is torch.float16


# Autograd functions, which are each other's derivatives.


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return rows.index_select(0, segments.ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.segments), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments.reduce(segments.sort_by_node(rows), "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.segments), None


class _Extreme(Function):
    """Maximum or minimum over the edges of each node, separately for each column.

    If several edges have the extreme value, the gradient goes to the first of them, as in DGL.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments, how: str) -> Tensor:
        offsets, order = segments.offsets_and_order
        num_edges = segments.num_edges
        column_dims = (1,) * (rows.dim() - 1)
        starts = offsets[:-1]
        ordered = segments.sort_by_node(rows)
        ends = segments.ends_in_order
        extremes = segments.reduce(ordered, how)

        # Index of each edge among the edges of its node. Floats hold it exactly up to 2**24 edges of a node.
        ranks = torch.arange(num_edges, device=rows.device) - starts.index_select(0, ends)
        ranks = ranks.float().view(num_edges, *column_dims)
        is_extreme = ordered == extremes.index_select(0, ends)
        first_ranks = segments.reduce(torch.where(is_extreme, ranks, math.inf), "min")

        # A node without edges, or with NaN, has no extreme edge. Its gradient goes to an additional row.
        has_edge = first_ranks < math.inf
        positions = torch.where(has_edge, first_ranks, 0).long() + starts.long().view(-1, *column_dims)
        edge_ids = torch.where(has_edge, positions, num_edges)
        if order is not None:
            edge_ids = torch.cat([order.long(), starts.long().new_full((1,), num_edges)])[edge_ids]
        ctx.num_edges = num_edges
        ctx.save_for_backward(edge_ids)
        return torch.where(has_edge | extremes.isnan(), extremes, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (edge_ids,) = ctx.saved_tensors
        row_grad = grad.new_zeros(ctx.num_edges + 1, *grad.shape[1:])
        return row_grad.scatter(0, edge_ids, grad)[:-1], None, None


class _WeightedSum(Function):
    """Sum of the weighted rows of the sources over the in-edges, computed as a sparse product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, relation: Relation) -> Tensor:
        ctx.relation = relation
        ctx.save_for_backward(None if weights is None else rows, weights)
        return relation.multiply(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        relation = ctx.relation
        row_grad = None
        weight_grad = None
        if ctx.needs_input_grad[0]:
            row_grad = _weighted_sum(grad, weights, relation.reverse)

        if ctx.needs_input_grad[1]:
            # Work in pieces, because the rows of all edges need far more memory than those of nodes.
            num_edges = max(1, _PIECE // max(1, math.prod(grad.shape[1:])))
            sources = relation.by_src.ends.split(num_edges)
            destinations = relation.by_dst.ends.split(num_edges)
            pieces: list[Tensor] = []
            for src, dst in zip(sources, destinations, strict=True):
                pieces.append((rows.index_select(0, src) * grad.index_select(0, dst)).sum(-1))
            weight_grad = torch.cat(pieces)

        return row_grad, weight_grad, None


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, segments: Segments) -> Tensor:
        wide = scores.float() if scores.dtype in _HALVES else scores
        # Subtracting the maximum keeps the exponentials from overflowing.
        maxima = segments.reduce(segments.sort_by_node(wide), "max")
        exponentials = torch.exp(wide - maxima.index_select(0, segments.ends))
        sums = segments.reduce(segments.sort_by_node(exponentials), "sum")
        shares = (exponentials / sums.index_select(0, segments.ends)).to(scores.dtype)
        ctx.segments = segments
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (shares,) = ctx.saved_tensors
        weighted_grad = shares * grad
        sums = _sum(weighted_grad, ctx.segments)
        return weighted_grad - shares * gather(sums, ctx.segments), None


gather: Callable[[Tensor, Segments], Tensor] = _Gather.apply
"""Function that copies the (N, ...) rows of nodes to their edges. It returns (E, ...) rows."""
_sum: Callable[[Tensor, Segments], Tensor] = _Sum.apply
_extreme: Callable[[Tensor, Segments, str], Tensor] = _Extreme.apply
_weighted_sum: Callable[[Tensor, Rows, Relation], Tensor] = _WeightedSum.apply
_softmax: Callable[[Tensor, Segments], Tensor] = _Softmax.apply


def reduce_edges(rows: Tensor, segments: Segments, how: str) -> Tensor:
    """Reduce the (E, ...) rows of each node's edges by "sum", "max" or "min".

    Returns (N, ...) rows. A node without edges has 0.
    """
    if how == "sum":
        return _sum(rows, segments)
    return _extreme(rows, segments, how)


# Operators with the arguments of DGL's autograd functions.


def compute_messages(relation: Relation, op: str, lhs: Rows, rhs: Rows, targets: str) -> Tensor:
    """Compute the message of each edge from one or two operands.

    Args:
        relation: Edges.
        op: "copy_lhs", "copy_rhs", "add", "mul" or "dot". "dot" sums over the last dimension and keeps it
            with size 1. Dimensions after the first one broadcast as in NumPy.
        lhs: Rows of the left operand, or None.
        rhs: Rows of the right operand, or None.
        targets: What the rows of the left and the right operand belong to, such as "ue" for sources and
            edges.

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
    """Insert dimensions of size 1 behind the first one, up to ``num_dims`` dimensions."""
    return rows.reshape(len(rows), *(1,) * (num_dims - rows.dim()), *rows.shape[1:])


def count_heads(lhs: Tensor, rhs: Tensor) -> int:
    """Return the number of weights that an edge has for a row of its source.

    Returns 0 if the sum is not computed as sparse products: weights vary along the last dimension, or there
    are too many of them.
    """
    num_weights = math.prod(rhs.shape[1:])
    if num_weights == 1 and rhs.dim() <= lhs.dim():
        return 1
    has_heads = lhs.dim() == rhs.dim() and rhs.shape[-1] == 1 and lhs.shape[1:-1] == rhs.shape[1:-1]
    return num_weights if has_heads and num_weights <= _MAX_HEADS else 0


def spmm(relation: Relation, op: str, how: str, lhs: Rows, rhs: Rows) -> Tensor:
    """Compute messages from sources and edges, and reduce them to (D, ...) rows of the destinations.

    Sums of source rows, with or without weights of edges, are sparse products without messages.
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
    sums = _weighted_sum(rows, weights, relation)
    return sums.reshape(len(sums), *lhs.shape[1:])


def edge_softmax(index: TorchIndex, scores: Tensor, eids: Any, norm_by: str) -> Tensor:
    """Compute the softmax of the scores of edges.

    The scores are normalised over the in-edges of each destination if ``norm_by`` is "dst", or over the
    out-edges of each source if it is "src". ``eids`` are the edges that have scores, or ``ALL``.
    """
    # Indices of distributed graphs refuse a reversal.
    segments = (index.reverse() if norm_by == "src" else index).relations[0].by_dst
    if not is_all(eids):
        segments = Segments(segments.num_nodes, len(eids), ends=segments.ends[eids.long()])
    return _softmax(scores, segments)


def spmm_hetero(index: TorchIndex, op: str, how: str, num_lhs: int, *operands: Rows) -> tuple[Rows, ...]:
    """Reduce the messages of all edge types at each destination. Return the results by node type.

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
    index = index.reverse() if norm_by == "src" else index
    etypes_by_type: dict[int, list[int]] = {}
    for etype, rows in enumerate(scores):
        if rows is not None:
            etypes_by_type.setdefault(index.metagraph.find_edge(etype)[1], []).append(etype)
    out: list[Rows] = [None] * len(scores)
    for etypes in etypes_by_type.values():
        segments = [index.relations[etype].by_dst for etype in etypes]
        all_scores = torch.cat([rows for e in etypes if (rows := scores[e]) is not None])
        shares = _softmax(all_scores, _join_segments(segments))
        parts = torch.split(shares, [segment.num_edges for segment in segments])
        for etype, part in zip(etypes, parts, strict=True):
            out[etype] = part

    return tuple(out)


def _join_segments(segments: Sequence[Segments]) -> Segments:
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
        idx_a: (K,) indices of rows. None means 0 to K - 1.
        idx_b: (K,) indices of matrices. None means 0 to K - 1.

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
    """Multiply each row by the matrix of its group.

    Every group is padded to a multiple of ``_BLOCK_ROWS`` rows. One batched product then computes all groups,
    and the host does not wait for the sizes of the groups from the device.

    Args:
        rows: (N, A) rows, sorted by group.
        matrices: (R, A, B) matrices of the groups.
        segments: The rows of each group, as the edges of R nodes.

    Returns:
        (N, B) products.
    """
    offsets = segments.offsets_and_order[0].long()
    blocks_per_group = (offsets.diff() + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    block_ends = blocks_per_group.cumsum(0)
    first_blocks = block_ends - blocks_per_group

    # Position of each row among the padded rows.
    shifts = first_blocks * _BLOCK_ROWS - offsets[:-1]
    positions = torch.arange(len(rows), device=rows.device) + shifts[segments.ends_in_order.long()]

    # The exact number of blocks is known only on the device. This is an upper bound.
    num_blocks = len(rows) // _BLOCK_ROWS + len(matrices)
    blocks = torch.arange(num_blocks, device=rows.device)
    group_of_block = torch.searchsorted(block_ends, blocks, right=True).clamp(max=len(matrices) - 1)

    padded = rows.new_zeros(num_blocks * _BLOCK_ROWS, rows.shape[1]).index_copy(0, positions, rows)
    products = torch.bmm(padded.view(num_blocks, _BLOCK_ROWS, -1), matrices[group_of_block])
    return products.flatten(0, 1).index_select(0, positions)


# Interface to DGL.


class TorchIndex(HeteroGraphIndex):
    """A graph index with edges that also lie on a device, as ``relations`` by edge type.

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
    """Return another object for the CPU's structure of ``index``."""
    for etype, relation in enumerate(index.relations if isinstance(index, TorchIndex) else ()):
        if HeteroGraphIndex.num_edges(index, etype) != relation.by_dst.num_edges:
            raise ConfigError("the structure of this graph was made on its device and cannot leave it")
    return HeteroGraphIndex.copy_to(index, ndarray.cpu(0))


def _make_relation(index: HeteroGraphIndex, etype: int, move: Copy) -> Relation:
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
    "ScatterAdd": lambda rows, ends, count: _sum(rows, Segments(count, len(ends), ends=ends)),
    "SEGMENTMM": segment_mm,
    "GATHERMM": gather_mm,
}


def _make_dispatcher(name: str) -> SimpleNamespace:
    """Return a substitute for an autograd function of DGL. Its ``apply`` runs DGL's function or ours."""
    stock = getattr(sparse, name)
    ours = {**_INDEX_FUNCTIONS, **_TENSOR_FUNCTIONS}[name]

    def apply(*args: Any) -> Any:
        if name in _INDEX_FUNCTIONS:
            is_ours = isinstance(args[0], TorchIndex)
        else:
            is_ours = is_on_torch_path(next(value.device for value in args if isinstance(value, Tensor)))
        return (ours if is_ours else stock.apply)(*args)

    return SimpleNamespace(apply=apply)


_INSTALLING = threading.Lock()


def install() -> None:
    """Make DGL's operators and ``graph.to(device)`` take the torch path.

    :func:`place` calls this. It is idempotent and thread-safe.
    """
    with _INSTALLING:
        _install_once()


@functools.cache
def _install_once() -> None:
    for name in (*_INDEX_FUNCTIONS, *_TENSOR_FUNCTIONS):
        setattr(sparse, name, _make_dispatcher(name))
    DGLGraph.device = property(_device)
    DGLGraph.to = _to
    DGLGraph.in_degrees = _make_degrees("in_degrees", "by_dst")
    DGLGraph.out_degrees = _make_degrees("out_degrees", "by_src")
    # Torch warns once per process that its CSR tensors are new.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


_DGL_CAST = sparse._cast_if_autocast_enabled
_DGL_REDUCE = core.invoke_udf_reduce


@functools.cache
def correct_kernels() -> None:
    """Correct DGL's operators on CPUs in this process.

    - DGL casts the operands of its kernels under the autocast of CUDA, but not of CPUs. There a kernel gets
      rows in bfloat16 from a linear layer, and edge weights or attention in float32, and refuses them.
    - On a graph without edges, maxima and minima are zeros. DGL gives their gradient to node 0 (an error if
      there is none), but it must be zero. A rank's block, or one relation of it, may have no edges although
      the complete graph has some.
    - A user-defined reduction, such as an LSTM, may depend on the order of a node's messages, and partitions
      reorder edges. On blocks of :func:`note_edge_order` it uses the order of the source's list of edges.
    """
    sparse._cast_if_autocast_enabled = _cast_operands
    sparse.GSpMM = SimpleNamespace(apply=functools.partial(_spmm_or_sum, sparse.GSpMM.apply))
    core.invoke_udf_reduce = _reduce_in_order


def note_edge_order(block: DGLBlock, positions: Callable[..., Tensor]) -> None:
    """Remember that ``positions(ids, etype)`` returns positions of edges in the source's list.

    The function is called for a user-defined reduction. It is not collective. A copy of the ids loses it.
    """
    for etype, frame in zip(block.canonical_etypes, block._edge_frames, strict=True):
        column = frame._columns.get(dgl.EID)
        if column is not None:
            column.data.positions = _Positions(functools.partial(positions, etype=etype))


class _Positions:
    """Positions of edges, read once on demand. Copies and saved objects have none."""

    def __init__(self, find: Callable[[Tensor], Tensor]) -> None:
        self._find = find
        self._order: Tensor | None = None

    def find_order(self, ids: Tensor) -> Tensor:
        """Return the (E,) numbers of the edges ``ids`` in the order of the source's list."""
        if self._order is None:
            self._order = self._find(ids.cpu()).argsort(stable=True)
        return self._order.to(ids.device)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _RenumberedGraph:
    """A graph with other edge numbers, for the function that sorts edges by number."""

    def __init__(self, graph: Any, numbers: Tensor) -> None:
        self._graph, self._numbers = graph, numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def in_edges(self, nodes: Any, form: str) -> Tensor:
        return self._numbers[self._graph.in_edges(nodes, form=form).long()]


def _reduce_in_order(graph: Any, function: Any, messages: Any, **options: Any) -> Any:
    ids = graph.edata.get(dgl.EID)
    positions = getattr(ids, "positions", None)
    if positions is None:
        return _DGL_REDUCE(graph, function, messages, **options)
    order = positions.find_order(ids)
    sorted_messages = {name: rows[order] for name, rows in messages.items()}
    return _DGL_REDUCE(_RenumberedGraph(graph, order.argsort()), function, sorted_messages, **options)


def _cast_operands(*operands: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return _DGL_CAST(*operands)
    floats = [rows for rows in operands if isinstance(rows, Tensor) and rows.is_floating_point()]
    if len({rows.dtype for rows in floats}) > 1:
        operands = _cast(operands, "cpu", torch.get_autocast_dtype("cpu"))
    return _DGL_CAST(*operands)


def _spmm_or_sum(stock: Any, index: Any, op: str, how: str, lhs: Any, rhs: Any) -> Any:
    # Without edges, a sum has the right gradient.
    return stock(index, op, how if index.num_edges(0) else "sum", lhs, rhs)
