"""Corrections for DGL's own kernels on CPUs. Tested on DGL 1.1.3 and 2.1.0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import dgl
import torch
from dgl import core
from dgl.backend.pytorch import sparse
from dgl.heterograph import DGLBlock
from torch import Tensor
from torch.amp.autocast_mode import _cast

_DGL_CAST = sparse._cast_if_autocast_enabled
_DGL_REDUCE = core.invoke_udf_reduce


@functools.cache
def correct_kernels() -> None:
    """Correct DGL's operators on CPUs in this process.

    - DGL casts its kernels' operands under CUDA autocast, but not under CPU autocast. There a kernel gets
      bfloat16 rows from a linear layer, and float32 edge weights or attention, and refuses them.
    - On a graph without edges, maxima and minima are zeros. DGL gives their gradient to node 0 (an error if
      there is none), but it must be zero. A rank's block, or one relation in it, may have no edges although
      the complete graph has some.
    - A user-defined reduction, such as an LSTM, may depend on the order of a node's messages, and partitions
      reorder edges. On blocks that :func:`note_edge_order` has marked, messages come in the order of the
      source's edge list.
    """
    sparse._cast_if_autocast_enabled = _cast_operands
    sparse.GSpMM = SimpleNamespace(apply=functools.partial(_spmm_or_sum, sparse.GSpMM.apply))
    core.invoke_udf_reduce = _reduce_in_order


def note_edge_order(block: DGLBlock, positions: Callable[..., Tensor]) -> None:
    """Remember ``positions``, which maps (ids, edge type) to positions in the source's edge list.

    Only a user-defined reduction calls the function. It is not collective. A copy of the ids loses it.
    """
    for etype, frame in zip(block.canonical_etypes, block._edge_frames, strict=True):
        column = frame._columns.get(dgl.EID)
        if column is not None:
            column.data.positions = _Positions(functools.partial(positions, etype=etype))


class _Positions:
    """Edge positions, read once on demand. Copies and saved objects have none."""

    def __init__(self, find: Callable[[Tensor], Tensor]) -> None:
        self._find = find
        self._order: Tensor | None = None

    def find_order(self, ids: Tensor) -> Tensor:
        """Return (E,) edge numbers that sort the edges ``ids`` as in the source's list."""
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
