"""Sums of messages over in-edges, as DGL's convolutions take them."""

from __future__ import annotations

import dgl.function as fn
from dgl import DGLError
from dgl.heterograph import DGLBlock
from torch import Tensor


def sum_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return (D1, ...) sums of the source rows ((L0, ...)) over in-edges, times ``weight`` ((E1, ...))."""
    return _reduce(block, rows, weight, "sum")


def mean_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sums divided by the number of in-edges; zeros where there are none."""
    return _reduce(block, rows, weight, "mean")


def narrows_first(block: DGLBlock, columns: int, width: int) -> bool:
    """Whether projecting ``columns`` to ``width`` before the sum over in-edges is cheaper than after it.

    Counted over forward and backward, an element that comes over an edge as four multiplications. Projecting
    first multiplies every source row, twice, and sums rows back over the edges in the backward; summing first
    does neither, as the inputs need no gradient. Parts may decide differently: their sums are the same.
    """
    sources, targets, edges = block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()
    first = 2 * sources * columns * width + 2 * 4 * edges * width
    last = 4 * edges * columns + 2 * targets * columns * width
    return first < last


def _reduce(block: DGLBlock, rows: Tensor, weight: Tensor | None, how: str) -> Tensor:
    if block.num_edges() == 0 or rows.numel() == 0:
        # DGL's kernels refuse rows without columns, and a block without edges keeps no result.
        return (
            rows[:1]
            .sum(0, keepdim=True)
            .expand(0, *rows.shape[1:])
            .new_zeros((block.num_dst_nodes(), *rows.shape[1:]))
            + 0 * rows.sum()
        )
    with block.local_scope():
        block.srcdata["row"] = rows
        message = fn.copy_u("row", "message")
        if weight is not None:
            block.edata["weight"] = weight
            message = fn.u_mul_e("row", "weight", "message")
        block.update_all(message, fn.sum("message", "out") if how == "sum" else fn.mean("message", "out"))
        return block.dstdata["out"]


def refuse_nodes_without_edges(block: DGLBlock) -> None:
    """Raise what DGL's convolutions raise for destinations that no edge enters.

    Raises:
        DGLError: there are some.
    """
    if (block.in_degrees() == 0).any():
        raise DGLError(
            "There are 0-in-degree nodes in the graph, whose output would be invalid. Add self-loops with "
            "dgl.add_self_loop(g) before partitioning, or set allow_zero_in_degree=True in the convolution."
        )
