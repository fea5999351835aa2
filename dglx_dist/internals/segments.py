"""Edges on a device, and autograd functions that sum, reduce and normalise over them.

Each result row has one writer, which adds in edge order. Only products with a sparse matrix leave the order
to the device's library. No function waits for the device, except for :meth:`Segments.find_edge_ids`.

Shape letters: N nodes, S sources, D destinations, E edges, H heads, F features per head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import Function

Rows: TypeAlias = Tensor | None
"""(n, ...) node or edge rows, or None if the operator does not read the operand."""

_HALVES = (torch.float16, torch.bfloat16)
_PIECE = 2**24
"""Number of row elements that are gathered to edges at a time for weight gradients."""


@final
class Segments:
    """Edges grouped by node. The node is their source or their destination.

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
        """(N + 1,) offsets, and (E,) edge ids sorted by node, or None if the edges are stored sorted."""
        ends, order = torch.sort(self.ends, stable=True)
        nodes = torch.arange(self.num_nodes + 1, dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, nodes, out_int32=ends.dtype is torch.int32), order

    @functools.cached_property
    def ends_in_order(self) -> Tensor:
        """(E,) node that each edge belongs to, sorted by node."""
        offsets, _ = self.offsets_and_order
        nodes = torch.arange(self.num_nodes, dtype=offsets.dtype, device=offsets.device)
        return torch.repeat_interleave(nodes, offsets.diff(), output_size=self.num_edges)

    @functools.cached_property
    def ends(self) -> Tensor:
        """(E,) node that each edge belongs to, in edge id order."""
        _, order = self.offsets_and_order
        ordered = self.ends_in_order
        return ordered if order is None else torch.empty_like(ordered).index_copy_(0, order.long(), ordered)

    @property
    def degrees(self) -> Tensor:
        return self.offsets_and_order[0].diff()

    def sort_by_node(self, rows: Tensor) -> Tensor:
        """Sort (E, ...) edge rows from edge id order to node order."""
        order = self.offsets_and_order[1]
        return rows if order is None else rows.index_select(0, order)

    def reduce(self, ordered: Tensor, how: str) -> Tensor:
        """Reduce each node's edge rows.

        Args:
            ordered: (E, ...) edge rows, sorted by node.
            how: "sum", "max" or "min".

        Returns:
            (N, ...) node rows. A node without edges has 0 for "sum", and an infinity otherwise.
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
        """Return the edge ids at ``nodes``, node by node.

        This waits for the device, because the host does not know how many edges there are.
        """
        offsets, order = self.offsets_and_order
        counts = self.degrees[nodes.long()]
        # Position of a node's first edge, minus the number of edges before it in the result.
        shifts = offsets[nodes.long()] - (torch.cumsum(counts, 0) - counts)
        shift_of_edge = torch.repeat_interleave(shifts, counts)
        positions = shift_of_edge + torch.arange(len(shift_of_edge), device=shifts.device)
        edge_ids = positions if order is None else order[positions.long()]
        return edge_ids.to(offsets.dtype)


@final
class Relation:
    """Edges of one type, grouped by either end."""

    def __init__(self, by_src: Segments, by_dst: Segments) -> None:
        self.by_src, self.by_dst = by_src, by_dst

    @functools.cached_property
    def reverse(self) -> Relation:
        return Relation(self.by_dst, self.by_src)

    @functools.cached_property
    def columns(self) -> Tensor:
        """(E,) sources sorted by destination, which are the column indices in the (D, S) CSR matrix."""
        return self.by_dst.sort_by_node(self.by_src.ends)

    def gather_to_edges(self, rows: Tensor, target: str) -> Tensor:
        """Return the (E, ...) rows at the edges' sources ("u") or destinations ("v"), or ``rows`` ("e")."""
        if target == "e":
            return rows
        return gather(rows, self.by_src if target == "u" else self.by_dst)

    def multiply(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the weighted source rows over each destination's in-edges.

        Args:
            rows: (S, H, F) source rows.
            weights: (E, H) weights in edge id order. None means 1 for every edge.

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
        return sum_edges(grad, ctx.segments), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments.reduce(segments.sort_by_node(rows), "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.segments), None


class _Extreme(Function):
    """Maximum or minimum over each node's edges, separately for each column.

    If several edges have the extreme value, the gradient goes to the first edge, as in DGL.
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

        # Index that each edge has among its node's edges. Floats hold it exactly up to 2**24 edges per node.
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
    """Sum of weighted source rows over the in-edges, computed as a sparse product."""

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
            row_grad = weighted_sum(grad, weights, relation.reverse)

        if ctx.needs_input_grad[1]:
            # Work in pieces, because edge rows need far more memory than node rows.
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
        sums = sum_edges(weighted_grad, ctx.segments)
        return weighted_grad - shares * gather(sums, ctx.segments), None


gather: Callable[[Tensor, Segments], Tensor] = _Gather.apply
"""Function that copies the (N, ...) node rows to their edges. It returns (E, ...) rows."""
sum_edges: Callable[[Tensor, Segments], Tensor] = _Sum.apply
_find_extremes: Callable[[Tensor, Segments, str], Tensor] = _Extreme.apply
weighted_sum: Callable[[Tensor, Rows, Relation], Tensor] = _WeightedSum.apply
softmax: Callable[[Tensor, Segments], Tensor] = _Softmax.apply


def reduce_edges(rows: Tensor, segments: Segments, how: str) -> Tensor:
    """Reduce each node's (E, ...) edge rows by "sum", "max" or "min".

    Returns (N, ...) rows. A node without edges has 0.
    """
    if how == "sum":
        return sum_edges(rows, segments)
    return _find_extremes(rows, segments, how)
