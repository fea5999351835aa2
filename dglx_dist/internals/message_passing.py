"""DGL's message passing in torch operations, for devices that DGL's own kernels do not serve.

:func:`correct_kernels` corrects DGL's own, on CPUs. Tested on DGL 1.1.3 and 2.1.0, and on torch 2.4.0, 2.13.0
and 2.15.0.

On a graph that :func:`place` has put on a device, DGL's operators (``update_all``, ``apply_edges``,
``edge_softmax``, ``dgl.ops``) run the functions of this module; on every other graph, DGL's own kernels.

Each row of a result has one writer, which adds in the order of the edges; only products with a sparse matrix
leave the order to the device's library. No function waits for the device, but for the in-edges of some nodes,
which DGL asks for in user-defined reductions.

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
"""(n, ...) rows of nodes or edges; None: the operator does not read that operand."""

_HALVES = (torch.float16, torch.bfloat16)
_MOST_HEADS = 8
"""Products with a sparse matrix for one sum; with more heads, messages are made."""
_PIECE = 2**24
"""Elements of rows that are gathered to edges at a time for gradients of weights."""
_BLOCK_ROWS = 64
"""Rows that are multiplied by one matrix at a time in :func:`grouped_product`."""


def is_on_torch_path(device: torch.device | str) -> bool:
    """Whether graphs on ``device`` take the torch path: all but the CPU, unless DGLX_MESSAGE_PASSING decides.

    Raises:
        ConfigError: the variable is neither ``torch`` nor ``dgl``.
    """
    chosen = _read_choice()
    return torch.device(device).type != "cpu" if chosen is None else chosen == "torch"


def _read_choice() -> str | None:
    """Read what DGLX_MESSAGE_PASSING has run DGL's operators; None: not set. ConfigError: it is invalid."""
    value = os.environ.get("DGLX_MESSAGE_PASSING") or None
    if value in (None, "torch", "dgl"):
        return value
    raise ConfigError(
        f"DGLX_MESSAGE_PASSING={value!r} must be 'torch' (torch runs DGL's operators on every device) or "
        "'dgl' (DGL's kernels do); where it is unset, torch runs them on all devices but the CPU"
    )


def place(graph: Graph, device: torch.device | str, *, copy: Copy | None = None) -> Graph:
    """Return ``graph`` on ``device``: structure, node and edge columns; itself if it lies there already.

    Operators run in torch if :func:`is_on_torch_path`, else this is ``graph.to(device)`` of DGL. Structure
    keeps its integer type; what operators need beyond it is computed on the device when first needed.

    Args:
        graph: DGLGraph or DGLBlock of any number of types, also a subclass.
        device: Any device of torch, also ``meta``.
        copy: Copies one tensor to ``device``; None: ``tensor.to(device)``. It may return before the data has
            arrived, if the stream on which the graph is used waits for it.

    Raises:
        ConfigError: DGLX_MESSAGE_PASSING has an invalid value.
    """
    device = torch.device(device)
    if not is_on_torch_path(device):
        return graph.to(device)
    install()
    return graph.to(device) if copy is None else graph.to(device, copy=copy)


def create_block(form: str, first: Tensor, sources: Tensor, *, num_src: int, num_dst: int) -> DGLBlock:
    """``dgl.create_block`` of one edge type, on the device of its arrays.

    ``form`` "coo": ``first`` are the (E,) destinations; "csc": their (D + 1,) offsets.
    """
    if not is_on_torch_path(first.device):
        data = (sources, first) if form == "coo" else ("csc", (first, sources, sources[:0]))
        return dgl.create_block(data, num_src_nodes=num_src, num_dst_nodes=num_dst)
    install()
    count = len(sources)
    given: Any = {"ends": first} if form == "coo" else {"grouped": (first, None)}
    edges = Relation(Segments(num_src, count, ends=sources), Segments(num_dst, count, **given))
    nothing = sources.new_zeros(0, device="cpu")
    block = dgl.create_block((nothing, nothing), num_src_nodes=num_src, num_dst_nodes=num_dst)
    block._graph = TorchIndex.from_relations(block._graph, (edges,), first.device)
    block._edge_frames = [Frame(num_rows=count)]
    return block


# The edges of a graph on the device.


@final
class Segments:
    """The edges of each node at one of their ends.

    ``given``: :attr:`ends` or :attr:`grouped`; the other one is computed when first read, and kept.
    """

    def __init__(self, num_nodes: int, num_edges: int, **given: Any) -> None:
        self.num_nodes, self.num_edges = num_nodes, num_edges
        vars(self).update(given)

    @functools.cached_property
    def grouped(self) -> tuple[Tensor, Tensor | None]:
        """(N + 1,) offsets, and the (E,) edge ids node by node; None: edges are in that order already."""
        ends, order = torch.sort(self.ends, stable=True)
        nodes = torch.arange(self.num_nodes + 1, dtype=ends.dtype, device=ends.device)
        return torch.searchsorted(ends, nodes, out_int32=ends.dtype is torch.int32), order

    @functools.cached_property
    def ends_in_order(self) -> Tensor:
        """(E,) nodes, ascending."""
        offsets, _ = self.grouped
        nodes = torch.arange(self.num_nodes, dtype=offsets.dtype, device=offsets.device)
        return torch.repeat_interleave(nodes, offsets.diff(), output_size=self.num_edges)

    @functools.cached_property
    def ends(self) -> Tensor:
        """(E,) that node of each edge, by edge id."""
        _, order = self.grouped
        ordered = self.ends_in_order
        return ordered if order is None else torch.empty_like(ordered).index_copy_(0, order.long(), ordered)

    @property
    def degrees(self) -> Tensor:
        return self.grouped[0].diff()

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows of edges by edge id -> node by node."""
        order = self.grouped[1]
        return rows if order is None else rows.index_select(0, order)

    def reduced(self, ordered: Tensor, how: str) -> Tensor:
        """(E, ...) rows node by node -> their (N, ...) "sum", "max" or "min"; of no edge 0 or infinite."""
        if how == "sum" and ordered.dtype in _HALVES:
            return self.reduced(ordered.float(), how).to(ordered.dtype)
        flat = ordered.reshape(self.num_edges, math.prod(ordered.shape[1:])).contiguous()
        first = 0 if how == "sum" else None
        out = torch.segment_reduce(flat, how, offsets=self.grouped[0], axis=0, unsafe=True, initial=first)
        return out.reshape(self.num_nodes, *ordered.shape[1:])

    def edges_of(self, nodes: Tensor) -> Tensor:
        """Edge ids of ``nodes``, node by node. Waits for the device: their number is unknown."""
        offsets, order = self.grouped
        counts = self.degrees[nodes.long()]
        starts = offsets[nodes.long()] - torch.cumsum(counts, 0) + counts
        places = torch.repeat_interleave(starts, counts)
        places = (places + torch.arange(len(places), device=places.device)).to(offsets.dtype)
        return places if order is None else order[places.long()].to(offsets.dtype)


@final
class Relation:
    """The edges of one type, by both of their ends."""

    def __init__(self, by_src: Segments, by_dst: Segments) -> None:
        self.by_src, self.by_dst = by_src, by_dst

    @functools.cached_property
    def reverse(self) -> Relation:
        return Relation(self.by_dst, self.by_src)

    @functools.cached_property
    def columns(self) -> Tensor:
        """(E,) sources, destination by destination: the columns of the CSR matrix (D, S)."""
        return self.by_dst.in_order(self.by_src.ends)

    def on_edges(self, rows: Tensor, target: str) -> Tensor:
        """Rows of ``target`` ("u", "v" or "e") -> (E, ...)."""
        return rows if target == "e" else gather(rows, self.by_src if target == "u" else self.by_dst)

    def product(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """(S, H, F) rows, (E, H) weights or ones -> (D, H, F) sums over in-edges."""
        out = rows.new_empty(self.by_dst.num_nodes, *rows.shape[1:])
        if not out.numel() or rows.is_meta:  # torch has no sparse product without data
            return out
        wide = torch.float32 if rows.dtype in _HALVES and not _multiplies_halves(rows) else rows.dtype
        rows = rows.to(wide)
        if weights is None:
            sums = self._matrix(rows.new_ones(self.by_dst.num_edges), rows.flatten(1))
            return sums.view_as(out).to(out.dtype)
        for head in range(rows.shape[1]):
            values = self.by_dst.in_order(weights[:, head]).to(wide)
            out[:, head] = self._matrix(values, rows[:, head])
        return out

    def _matrix(self, values: Tensor, rows: Tensor) -> Tensor:
        """(E,) values, destination by destination, and (S, F) rows -> (D, F)."""
        shape = (self.by_dst.num_nodes, self.by_src.num_nodes)
        offsets = self.by_dst.grouped[0]
        matrix = torch.sparse_csr_tensor(offsets, self.columns, values, shape, check_invariants=False)
        with torch.autocast(rows.device.type, enabled=False):
            return matrix @ rows


def _multiplies_halves(rows: Tensor) -> bool:
    """Whether torch has sparse products of this half precision here: on CPUs of neither."""
    older = rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0)
    return rows.is_cuda and not (older and rows.dtype is torch.bfloat16)


# Autograd functions, each other's derivatives.


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
        return segments.reduced(segments.in_order(rows), "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.segments), None


class _Extreme(Function):
    """Largest or smallest row of each node's edges; the gradient goes to the first of equal ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments, how: str) -> Tensor:
        offsets, order = segments.grouped
        ordered, ends, count = segments.in_order(rows), segments.ends_in_order, segments.num_edges
        best = segments.reduced(ordered, how)
        # Places among the edges of a node, exact in single precision up to 2**24 of them.
        places = torch.arange(count, device=rows.device) - offsets[:-1].index_select(0, ends)
        places = places.float().view(count, *(1,) * (rows.dim() - 1))
        attaining = torch.where(ordered == best.index_select(0, ends), places, math.inf)
        first = segments.reduced(attaining, "min")
        found = first < math.inf
        starts = offsets[:-1].long().view(-1, *(1,) * (rows.dim() - 1))
        first = torch.where(found, torch.where(found, first, 0).long() + starts, count)
        if order is not None:
            first = torch.cat([order.long(), starts.new_full((1,), count)])[first]
        ctx.count = count
        ctx.save_for_backward(first)
        return torch.where(found | best.isnan(), best, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (first,) = ctx.saved_tensors
        # The last row takes what belongs to no edge.
        rows = grad.new_zeros(ctx.count + 1, *grad.shape[1:])
        return rows.scatter(0, first, grad)[:-1], None, None


class _WeightedSum(Function):
    """Sums over in-edges of (weight of the edge) x (row of its source), as a sparse product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, relation: Relation) -> Tensor:
        ctx.relation = relation
        ctx.save_for_backward(None if weights is None else rows, weights)
        return relation.product(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        relation, of_rows, of_weights = ctx.relation, None, None
        size = max(1, _PIECE // max(1, math.prod(grad.shape[1:])))
        if ctx.needs_input_grad[0]:
            of_rows = _weighted_sum(grad, weights, relation.reverse)
        if ctx.needs_input_grad[1]:
            # In pieces: all rows of edges at once would be far larger than those of nodes.
            ends = (side.ends.split(size) for side in (relation.by_src, relation.by_dst))
            of_weights = torch.cat(
                [
                    (rows.index_select(0, u) * grad.index_select(0, v)).sum(-1)
                    for u, v in zip(*ends, strict=True)
                ]
            )
        return of_rows, of_weights, None


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, segments: Segments) -> Tensor:
        wide = scores.float() if scores.dtype in _HALVES else scores
        largest = segments.reduced(segments.in_order(wide), "max")
        powers = torch.exp(wide - largest.index_select(0, segments.ends))
        sums = segments.reduced(segments.in_order(powers), "sum")
        shares = (powers / sums.index_select(0, segments.ends)).to(scores.dtype)
        ctx.segments = segments
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (shares,) = ctx.saved_tensors
        parts = shares * grad
        return parts - shares * gather(_sum(parts, ctx.segments), ctx.segments), None


gather: Callable[[Tensor, Segments], Tensor] = _Gather.apply
"""(N, ...) rows of nodes -> (E, ...), each edge the row of its end."""
_sum: Callable[[Tensor, Segments], Tensor] = _Sum.apply
_extreme: Callable[[Tensor, Segments, str], Tensor] = _Extreme.apply
_weighted_sum: Callable[[Tensor, Rows, Relation], Tensor] = _WeightedSum.apply
_softmax: Callable[[Tensor, Segments], Tensor] = _Softmax.apply


def reduce_edges(rows: Tensor, segments: Segments, how: str) -> Tensor:
    """(E, ...) -> (N, ...): "sum", "max" or "min" over each node's edges, 0 where it has none."""
    return _sum(rows, segments) if how == "sum" else _extreme(rows, segments, how)


# Operators, with the arguments of DGL's autograd functions.


def messages(relation: Relation, op: str, lhs: Rows, rhs: Rows, targets: str) -> Tensor:
    """What each edge carries, (E, ...). ``targets``: whose rows the operands are, for example "ue".

    Trailing dimensions broadcast as in NumPy; "dot" sums over the last one, which stays with size 1.
    """
    sides = ((lhs, targets[0], "copy_rhs"), (rhs, targets[1], "copy_lhs"))
    carried = [relation.on_edges(rows, of) for rows, of, other in sides if rows is not None and op != other]
    if len(carried) == 1:
        return carried[0]
    rank = max(one.dim() for one in carried)
    left, right = (one.reshape(len(one), *(1,) * (rank - one.dim()), *one.shape[1:]) for one in carried)
    if op == "add":
        return left + right
    both = left * right
    return both.sum(-1, keepdim=True) if op == "dot" and rank > 1 else both


def count_heads(lhs: Tensor, rhs: Tensor) -> int:
    """Weights that an edge of ``rhs`` has for a row of ``lhs``; 0: they vary along the last dimension."""
    if math.prod(rhs.shape[1:]) == 1 and rhs.dim() <= lhs.dim():
        return 1
    whole_heads = lhs.dim() == rhs.dim() and rhs.shape[-1] == 1 and lhs.shape[1:-1] == rhs.shape[1:-1]
    heads = math.prod(rhs.shape[1:])
    return heads if whole_heads and heads <= _MOST_HEADS else 0


def spmm(relation: Relation, op: str, how: str, lhs: Rows, rhs: Rows) -> Tensor:
    """Reduce the messages that sources and edges send to each destination; (D, ...)."""
    weights = rhs if op == "mul" else None
    heads = int(op == "copy_lhs") if lhs is None or weights is None else count_heads(lhs, weights)
    if lhs is None or how != "sum" or not heads:
        return reduce_edges(messages(relation, op, lhs, rhs, "ue"), relation.by_dst, how)
    dtype = lhs.dtype if weights is None else torch.promote_types(lhs.dtype, weights.dtype)
    rows = lhs.to(dtype).reshape(len(lhs), heads, math.prod(lhs.shape[1:]) // heads)
    weights = None if weights is None else weights.to(dtype).reshape(len(weights), heads)
    sums = _weighted_sum(rows, weights, relation)
    return sums.reshape(len(sums), *lhs.shape[1:])


def edge_softmax(index: TorchIndex, scores: Tensor, eids: Any, norm_by: str) -> Tensor:
    """Softmax of scores over in-edges (norm_by "dst") or out-edges ("src"), of all edges or of ``eids``."""
    # Indices of distributed graphs refuse to be reversed.
    segments = (index.reverse() if norm_by == "src" else index).relations[0].by_dst
    if not is_all(eids):
        segments = Segments(segments.num_nodes, len(eids), ends=segments.ends[eids.long()])
    return _softmax(scores, segments)


def spmm_hetero(index: TorchIndex, op: str, how: str, num_lhs: int, *operands: Rows) -> tuple[Rows, ...]:
    """Reduce the messages of all edge types that arrive at a node; by node type, None: none arrives."""
    sources, edges = operands[:num_lhs], operands[num_lhs:]
    out: list[Rows] = [None] * index.number_of_ntypes()
    arriving: dict[int, list[tuple[Relation, Tensor]]] = {}
    for etype, relation in enumerate(index.relations):
        source, destination = index.metagraph.find_edge(etype)
        lhs = None if op == "copy_rhs" else sources[source]
        rhs = None if op == "copy_lhs" else edges[etype]
        if lhs is None and rhs is None:
            continue
        if how == "sum":
            part, before = spmm(relation, op, how, lhs, rhs), out[destination]
            out[destination] = part if before is None else before + part
        else:
            part = messages(relation, op, lhs, rhs, "ue")
            arriving.setdefault(destination, []).append((relation, part))
    for destination, parts in arriving.items():
        segments = _joined([relation.by_dst for relation, _ in parts])
        out[destination] = reduce_edges(torch.cat([rows for _, rows in parts]), segments, how)
    return tuple(out)


def sddmm_hetero(
    index: TorchIndex, op: str, num_lhs: int, lhs_target: str, rhs_target: str, *operands: Rows
) -> tuple[Rows, ...]:
    """:func:`messages` of every edge type."""

    def rows_of(rows: Sequence[Rows], target: str, etype: int) -> Rows:
        source, destination = index.metagraph.find_edge(etype)
        return rows[{"u": source, "v": destination, "e": etype}[target[0]]]

    found: list[Rows] = []
    for etype, relation in enumerate(index.relations):
        lhs = None if op == "copy_rhs" else rows_of(operands[:num_lhs], lhs_target, etype)
        rhs = None if op == "copy_lhs" else rows_of(operands[num_lhs:], rhs_target, etype)
        found.append(messages(relation, op, lhs, rhs, lhs_target[0] + rhs_target[0]))
    return tuple(found)


def edge_softmax_hetero(index: TorchIndex, eids: Any, norm_by: str, *scores: Rows) -> tuple[Rows, ...]:
    """:func:`edge_softmax` over the edges of all types that meet in a node."""
    index = index.reverse() if norm_by == "src" else index
    meeting: dict[int, list[int]] = {}
    for etype, rows in enumerate(scores):
        if rows is not None:
            meeting.setdefault(index.metagraph.find_edge(etype)[1], []).append(etype)
    out: list[Rows] = [None] * len(scores)
    for etypes in meeting.values():
        segments = [index.relations[etype].by_dst for etype in etypes]
        shares = _softmax(
            torch.cat([rows for e in etypes if (rows := scores[e]) is not None]), _joined(segments)
        )
        parts = torch.split(shares, [one.num_edges for one in segments])
        for etype, part in zip(etypes, parts, strict=True):
            out[etype] = part
    return tuple(out)


def _joined(segments: Sequence[Segments]) -> Segments:
    """The edges of several types that have one end of one node type."""
    if len(segments) == 1:
        return segments[0]
    ends = torch.cat([one.ends for one in segments])
    return Segments(segments[0].num_nodes, len(ends), ends=ends)


def segment_mm(rows: Tensor, matrices: Tensor, lengths: Tensor) -> Tensor:
    """(N, A) rows, the first ``lengths[0]`` of which meet the first of the (R, A, B) matrices, and so on."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(rows.device, non_blocking=True)
    return grouped_product(rows, matrices, _in_groups(rows, offsets))


def _in_groups(rows: Tensor, offsets: Tensor) -> Segments:
    return Segments(len(offsets) - 1, len(rows), grouped=(offsets, None))


def gather_mm(rows: Tensor, matrices: Tensor, of_rows: Tensor | None, of_matrices: Tensor | None) -> Tensor:
    """(K, B): row ``of_rows[k]`` times matrix ``of_matrices[k]``; None: row or matrix k."""
    rows = rows if of_rows is None else rows[of_rows]
    if of_matrices is None:
        return torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)
    segments = Segments(len(matrices), len(rows), ends=of_matrices)
    order = segments.grouped[1]
    assert order is not None
    product = grouped_product(rows.index_select(0, order), matrices, segments)
    return torch.empty_like(product).index_copy(0, order, product)


def grouped_product(rows: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """(N, A) rows, group by group, times the (R, A, B) matrix of their group.

    Each group is filled up to whole blocks of equal size, so that one batched product does all and no length
    is read from the device.
    """
    offsets, groups = segments.grouped[0].long(), segments.ends_in_order.long()
    blocks = (offsets.diff() + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    last_block = blocks.cumsum(0)
    num_blocks = len(rows) // _BLOCK_ROWS + len(matrices)  # at least as many as there are
    first_row = (last_block - blocks) * _BLOCK_ROWS - offsets[:-1]
    places = torch.arange(len(rows), device=rows.device) + first_row[groups]
    numbers = torch.arange(num_blocks, device=rows.device)
    group_of_block = torch.searchsorted(last_block, numbers, right=True).clamp(max=len(matrices) - 1)
    padded = rows.new_zeros(num_blocks * _BLOCK_ROWS, rows.shape[1]).index_copy(0, places, rows)
    product = torch.bmm(padded.view(num_blocks, _BLOCK_ROWS, -1), matrices[group_of_block])
    return product.flatten(0, 1).index_select(0, places)


# What DGL sees.


class TorchIndex(HeteroGraphIndex):
    """A graph index whose edges also lie on a device, as ``relations`` by edge type.

    Counts and types are those of the CPU's index, which this object refers to as well.
    """

    relations: tuple[Relation, ...]
    device: torch.device

    @classmethod
    def from_index(cls, index: HeteroGraphIndex, device: torch.device, move: Copy) -> TorchIndex:
        etypes = range(index.number_of_etypes())
        return cls.from_relations(
            cpu_index(index), tuple(_relation(index, etype, move) for etype in etypes), device
        )

    @classmethod
    def from_relations(cls, index: Any, relations: tuple[Relation, ...], device: torch.device) -> TorchIndex:
        index.__class__ = cls
        index.relations, index.device = relations, device
        return index

    def get_relation_graph(self, etype: int) -> TorchIndex:
        one = super().get_relation_graph(etype)
        return self.from_relations(one, (self.relations[etype],), self.device)

    def reverse(self) -> TorchIndex:
        return self.from_relations(
            super().reverse(), tuple(one.reverse for one in self.relations), self.device
        )

    def num_edges(self, etype: int) -> int:
        return self.relations[etype].by_dst.num_edges

    def adjacency_matrix_tensors(self, etype: int, transpose: bool, fmt: str) -> tuple[Any, ...]:
        relation = self.relations[etype].reverse if transpose else self.relations[etype]
        shape = relation.by_src.num_nodes, relation.by_dst.num_nodes
        if fmt == "coo":
            return *shape, relation.by_src.ends, relation.by_dst.ends
        offsets, order = relation.by_src.grouped
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
        return self.find_edges(etype, self.relations[etype].by_dst.edges_of(v))

    def out_edges(self, etype: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.find_edges(etype, self.relations[etype].by_src.edges_of(v))

    def in_degrees(self, etype: int, v: Tensor) -> Tensor:
        return self.relations[etype].by_dst.degrees[v.long()]

    def out_degrees(self, etype: int, v: Tensor) -> Tensor:
        return self.relations[etype].by_src.degrees[v.long()]

    def has_nodes(self, ntype: int, vids: Tensor) -> Tensor:
        return (vids >= 0) & (vids < self.num_nodes(ntype))


def cpu_index(index: HeteroGraphIndex) -> HeteroGraphIndex:
    """Another object for the CPU's structure of ``index``."""
    for etype, relation in enumerate(index.relations if isinstance(index, TorchIndex) else ()):
        if HeteroGraphIndex.num_edges(index, etype) != relation.by_dst.num_edges:
            raise ConfigError("the structure of this graph was made on its device and cannot leave it")
    return HeteroGraphIndex.copy_to(index, ndarray.cpu(0))


def _relation(index: HeteroGraphIndex, etype: int, move: Copy) -> Relation:
    one = HeteroGraphIndex.get_relation_graph(index, etype)
    source, destination = index.metagraph.find_edge(etype)
    num_src, num_dst, num_edges = index.num_nodes(source), index.num_nodes(destination), one.num_edges(0)
    if "csc" not in one.formats()["created"]:
        src, dst, _ = one.edges(0, "eid")
        return Relation(
            Segments(num_src, num_edges, ends=move(src)), Segments(num_dst, num_edges, ends=move(dst))
        )
    _, _, offsets, sources, order = one.adjacency_matrix_tensors(0, True, "csr")
    in_order = not len(order) or bool((order[1:] > order[:-1]).all())
    if not in_order:
        # On the host: the device may not have its copies yet.
        sources = torch.empty_like(sources).index_copy_(0, order.long(), sources)
    by_dst = Segments(num_dst, num_edges, grouped=(move(offsets), None if in_order else move(order)))
    return Relation(Segments(num_src, num_edges, ends=move(sources)), by_dst)


_DGL_DEVICE: Callable[[Any], torch.device] = DGLGraph.device.fget
_DGL_TO = DGLGraph.to


def _device(graph: Any) -> torch.device:
    return graph._graph.device if isinstance(graph._graph, TorchIndex) else _DGL_DEVICE(graph)


def _to(graph: Any, device: torch.device | str | None, *, copy: Copy | None = None, **options: Any) -> Any:
    if device is None:
        return graph
    index, target = graph._graph, torch.empty(0, device=device).device  # with its number
    torch_path, was_torch = is_on_torch_path(target), isinstance(index, TorchIndex)
    if not torch_path and not was_torch:
        return _DGL_TO(graph, device, **options)
    if graph.device == target and torch_path == was_torch:
        return graph
    move = copy or (lambda tensor: tensor.to(target, **options))
    moved = copying.copy(graph)
    moved._graph = TorchIndex.from_index(index, target, move) if torch_path else cpu_index(index)
    moved._node_frames = [moved_frame(frame, target, move) for frame in graph._node_frames]
    moved._edge_frames = [moved_frame(frame, target, move) for frame in graph._edge_frames]
    for name in ("_batch_num_nodes", "_batch_num_edges"):
        counts = getattr(graph, name)
        if counts is not None:
            setattr(moved, name, {kind: move(count) for kind, count in counts.items()})
    return moved


def moved_frame(frame: Frame, device: torch.device, move: Copy) -> Frame:
    """Copy the columns of a graph's nodes or edges to ``device``."""
    moved = frame.clone()
    for name, column in frame._columns.items():
        lazy, is_ids = isinstance(column, LazyFeature), name in (dgl.NID, dgl.EID)
        copy = functools.partial(ids_to_device, device=device, copy=move) if is_ids else move
        moved._columns[name] = column.to(device) if lazy else Column.create(copy(column.data))
        if is_ids and not lazy and (positions := getattr(column.data, "positions", None)):
            moved._columns[name].data.positions = positions
    return moved


def _degrees(name: str, side: str) -> Callable[..., Any]:
    stock = getattr(DGLGraph, name)

    def degrees(graph: Any, nodes: Any = ALL, etype: Any = None, **named: Any) -> Any:
        # DGL's own reads the number of valid ids from the device.
        if isinstance(graph._graph, TorchIndex) and is_all(nodes) and not named:
            return getattr(graph._graph.relations[graph.get_etype_id(etype)], side).degrees
        return stock(graph, *(() if named else (nodes,)), etype=etype, **named)

    return degrees


_OF_INDEX: dict[str, Callable[..., Any]] = {
    "GSpMM": lambda index, *args: spmm(index.relations[0], *args),
    "GSDDMM": lambda index, op, lhs, rhs, a, b: messages(index.relations[0], op, lhs, rhs, a[0] + b[0]),
    "EdgeSoftmax": edge_softmax,
    "GSpMM_hetero": spmm_hetero,
    "GSDDMM_hetero": sddmm_hetero,
    "EdgeSoftmax_hetero": edge_softmax_hetero,
}
_OF_TENSORS: dict[str, Callable[..., Any]] = {
    "SegmentReduce": lambda how, rows, offsets: reduce_edges(rows, _in_groups(rows, offsets), how),
    "ScatterAdd": lambda rows, ends, count: _sum(rows, Segments(count, len(ends), ends=ends)),
    "SEGMENTMM": segment_mm,
    "GATHERMM": gather_mm,
}


def _dispatched(name: str) -> SimpleNamespace:
    """Stands in for an autograd function of DGL; its ``apply`` runs that, or ours where that is to run."""
    stock, ours = getattr(sparse, name), {**_OF_INDEX, **_OF_TENSORS}[name]

    def apply(*args: Any) -> Any:
        if name in _OF_INDEX:
            is_ours = isinstance(args[0], TorchIndex)
        else:
            is_ours = is_on_torch_path(next(one.device for one in args if isinstance(one, Tensor)))
        return (ours if is_ours else stock.apply)(*args)

    return SimpleNamespace(apply=apply)


_INSTALLING = threading.Lock()


def install() -> None:
    """Make DGL's operators and ``graph.to(device)`` take the torch path.

    :func:`place` does it. Idempotent; any thread may call it.
    """
    with _INSTALLING:
        _install_once()


@functools.cache
def _install_once() -> None:
    for name in (*_OF_INDEX, *_OF_TENSORS):
        setattr(sparse, name, _dispatched(name))
    DGLGraph.device = property(_device)
    DGLGraph.to = _to
    DGLGraph.in_degrees = _degrees("in_degrees", "by_dst")
    DGLGraph.out_degrees = _degrees("out_degrees", "by_src")
    # Torch says once per process that its CSR tensors are new.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


_DGL_CAST = sparse._cast_if_autocast_enabled
_DGL_REDUCE = core.invoke_udf_reduce


@functools.cache
def correct_kernels() -> None:
    """Correct DGL's operators on CPUs in this process; what is right stays as it is.

    - DGL casts the operands of its kernels under the autocast of CUDA, but not of CPUs. There a kernel gets
      rows in bfloat16 from a linear layer, edge weights or attention in float32, and refuses them.
    - On a graph without edges, maxima and minima are zeros, whose gradient DGL gives to node 0 (an error if
      there is none); it is zero. A rank's block, or one relation of it, may have no edges where the whole
      graph has.
    - A user-defined reduction, such as an LSTM, may depend on the order of a node's messages, and partitions
      order edges anew. On blocks of :func:`note_edge_order` it is that of the source's list of edges.
    """
    sparse._cast_if_autocast_enabled = _cast_operands
    sparse.GSpMM = SimpleNamespace(apply=functools.partial(_spmm_of_edges, sparse.GSpMM.apply))
    core.invoke_udf_reduce = _reduce_in_order


def note_edge_order(block: DGLBlock, positions: Callable[..., Tensor]) -> None:
    """Keep that ``positions(ids, etype)`` are those of the edges ``dgl.EID`` in the source's list of edges.

    It is called when a user-defined reduction asks, and not collective. A copy of the ids loses it.
    """
    for etype, frame in zip(block.canonical_etypes, block._edge_frames, strict=True):
        column = frame._columns.get(dgl.EID)
        if column is not None:
            column.data.positions = _Positions(functools.partial(positions, etype=etype))


class _Positions:
    """Positions of edges, read once on demand; a copy, and what is saved, has none."""

    def __init__(self, find: Callable[[Tensor], Tensor]) -> None:
        self._find = find
        self._order: Tensor | None = None

    def order_of(self, ids: Tensor) -> Tensor:
        """Return the (E,) numbers of the edges ``ids`` in the order of the source's list."""
        if self._order is None:
            self._order = self._find(ids.cpu()).argsort(stable=True)
        return self._order.to(ids.device)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _Renumbered:
    """A graph with other numbers of its edges, for the function that sorts them by number."""

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
    order = positions.order_of(ids)
    sorted_messages = {name: rows[order] for name, rows in messages.items()}
    return _DGL_REDUCE(_Renumbered(graph, order.argsort()), function, sorted_messages, **options)


def _cast_operands(*operands: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return _DGL_CAST(*operands)
    floats = [one for one in operands if isinstance(one, Tensor) and one.is_floating_point()]
    if len({one.dtype for one in floats}) > 1:
        operands = _cast(operands, "cpu", torch.get_autocast_dtype("cpu"))
    return _DGL_CAST(*operands)


def _spmm_of_edges(stock: Any, index: Any, op: str, how: str, lhs: Any, rhs: Any) -> Any:
    # The sum of nothing has the right gradient.
    return stock(index, op, how if index.num_edges(0) else "sum", lhs, rhs)
