"""Intercepts DGL's graph operations and torch's dropout while a model is captured.

Tested on DGL 1.1.3 and 2.1.0, and on torch 2.4.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from dgl import DGLGraph, core
from dgl.backend.pytorch import sparse
from dgl.base import ALL, is_all
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GraphOperations(Protocol):
    """Functions that run instead of DGL's operations. ``index`` is the structure of the call's graph.

    ``stock`` is DGL's own function, with the same arguments after ``index``.
    """

    def reduce(self, stock: Any, index: Any, operator: str, how: str, rows: Any, edges: Any) -> Tensor: ...
    def combine(self, index: Any, operator: str, left: Any, right: Any, ends: tuple[str, str]) -> Tensor: ...
    def softmax(self, stock: Any, index: Any, scores: Tensor, norm_by: str) -> Tensor: ...
    def degrees(self, graph: Any, name: str) -> Tensor: ...
    def refuse(self, description: str) -> Any: ...


_ENDS = {0: "u", 1: "e", 2: "v"}
_SEVERAL_TYPES = ("GSpMM_hetero", "GSDDMM_hetero", "EdgeSoftmax_hetero", "SegmentReduce", "ScatterAdd")


@contextmanager
def intercept(operations: GraphOperations) -> Iterator[None]:
    """Run ``operations`` instead of DGL's in the ``with`` block, in this process."""
    spmm, softmax = sparse.GSpMM.apply, sparse.EdgeSoftmax.apply

    def combine(index: Any, operator: str, left: Any, right: Any, first: Any, second: Any) -> Tensor:
        ends = _ENDS.get(first, first), _ENDS.get(second, second)
        return operations.combine(index, operator, left, right, ends)

    def normalise(index: Any, scores: Tensor, edges: Any, norm_by: str) -> Tensor:
        if not is_all(edges):
            operations.refuse("a softmax over some of the edges")
        return operations.softmax(softmax, index, scores, norm_by)

    replacements: dict[str, Callable[..., Any]] = {
        "GSpMM": lambda *arguments: operations.reduce(spmm, *arguments),
        "GSDDMM": combine,
        "EdgeSoftmax": normalise,
    }
    for name in _SEVERAL_TYPES:
        replacements[name] = lambda *_, name=name: operations.refuse(f"DGL's operation {name}")
    with ExitStack() as stack:
        for name, function in replacements.items():
            stack.enter_context(patch.object(sparse, name, SimpleNamespace(apply=function)))
        for name in ("in_degrees", "out_degrees"):
            stack.enter_context(patch.object(DGLGraph, name, _make_degrees(name, operations)))
        refuse_reduction = lambda *_, **__: operations.refuse("a reduce function in Python")  # noqa: E731
        stack.enter_context(patch.object(core, "invoke_udf_reduce", refuse_reduction))
        yield


def _make_degrees(name: str, operations: GraphOperations) -> Callable[..., Any]:
    stock = getattr(DGLGraph, name)

    def degrees(graph: Any, nodes: Any = ALL, etype: Any = None, **named: Any) -> Any:
        if is_all(nodes) and not named:
            return operations.degrees(graph, name)
        return stock(graph, nodes, etype=etype, **named)

    return degrees


_READING_FUNCTIONS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class InterceptedDropout(TorchFunctionMode):
    """Calls ``drop(rows, probability)`` instead of ``torch.nn.functional.dropout`` in the ``with`` block.

    ``read`` is called before a tensor becomes a list or an array.
    """

    def __init__(
        self, drop: Callable[[Tensor, float], Tensor], read: Callable[[Tensor], object] = lambda _: None
    ) -> None:
        super().__init__()
        self._drop, self._read = drop, read

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function in _READING_FUNCTIONS:
            self._read(args[0])
        if function is not torch.nn.functional.dropout:
            return function(*args, **keywords)
        arguments = dict(zip(("input", "p", "training"), args, strict=False)) | keywords
        rows = arguments["input"]
        probability = arguments.get("p", 0.5)
        return self._drop(rows, probability) if arguments.get("training", True) and probability else rows
