"""Model tracing: find convolutions, and the blocks and rows with which modules are called."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.layers.base import SplitsTypes, SplittableConv

MODEL_ERRORS = (
    ArithmeticError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    dgl.DGLError,
)
"""Errors that a model raises if it does not support a call."""

_EDGE_ARGUMENTS = ("efeat", "efeats", "e", "w")


def find_convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield DGL's modules and splittable modules with their names, in registration order."""
    for name, module in model.named_modules():
        if isinstance(module, SplittableConv | SplitsTypes) or type(module).__module__.startswith("dgl."):
            yield name, module


class GraphCall(NamedTuple):
    """The graph and the node rows that are among a call's arguments."""

    graph: Any
    key: int | str
    """The rows argument's position or name."""
    rows: Any
    """Source rows as a tensor or a dictionary by node type, or a pair that begins with them."""

    @property
    def sources(self) -> Any:
        """Source rows: a tensor, or a dictionary by node type."""
        if isinstance(self.rows, tuple):
            return self.rows[0]
        return self.rows


class Argument(NamedTuple):
    """An argument in a call."""

    key: int | str
    """Position, or name if the argument is passed by name."""
    name: str
    """Parameter name. Empty if the function has no parameter at the position."""
    value: Any


def read_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: type | tuple[type, ...] = dgl.DGLGraph,
) -> GraphCall | None:
    """Return the graph and the rows with which ``module`` is called, or None. ``graph`` is the graph's type.

    The rows are the argument after the graph, or else the one before it. They are a tensor with at least two
    dimensions, a dictionary from type to tensor, or a pair of these. Arguments named "edge...", "efeat",
    "efeats", "e" or "w" belong to edges.
    """
    arguments = named_arguments(module.forward, args, kwargs)
    positions = [i for i, argument in enumerate(arguments) if isinstance(argument.value, graph)]
    if not positions:
        return None
    position = positions[0]
    neighbors = arguments[position + 1 : position + 2]
    if position > 0:
        neighbors.append(arguments[position - 1])

    # This must not depend on how many rows this rank has, because all ranks must agree.
    for key, name, value in neighbors:
        is_of_nodes = not name.startswith("edge") and name not in _EDGE_ARGUMENTS
        if _is_by_type(value) or (is_of_nodes and _is_rows(value)):
            return GraphCall(arguments[position].value, key, value)
    return None


def named_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Argument]:
    """Return the arguments in a call to ``forward``, in parameter order."""
    names = list(inspect.signature(forward).parameters)
    arguments = []
    for position, value in enumerate(args):
        name = names[position] if position < len(names) else ""
        arguments.append(Argument(position, name, value))

    # Names that are no parameters, as for ``**kwargs``, come last.
    order = {name: position for position, name in enumerate(names)}
    for name in sorted(kwargs, key=lambda name: order.get(name, len(order))):
        arguments.append(Argument(name, name, kwargs[name]))
    return arguments


def _is_by_type(value: Any) -> bool:
    if isinstance(value, tuple) and len(value) == 2:
        return isinstance(value[0], dict)
    return isinstance(value, dict)


def _is_rows(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.dim() > 1
    # As in DGL's convolutions, a pair is a tuple and not a list.
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(torch.is_tensor(rows) and rows.dim() > 0 for rows in value)


@final
@dataclass(frozen=True, kw_only=True)
class Call:
    """A recorded call to a module."""

    module: nn.Module
    block: int | None
    """Position of the module's block, if any."""
    rows: Tensor
    """(n, F) node rows that the module got."""
    result: Any
    inside: int | None
    """Position of the block that an outer module was called with, if any."""


def trace_calls(
    model: nn.Module, blocks: Sequence[Any], x: Tensor, run: Callable[..., object] | None = None
) -> list[Call]:
    """Record the module calls with node rows in ``model(blocks, x)`` or ``run``, ordered by when they end.

    The model runs in evaluation mode and is not changed. Its errors are raised.
    """
    calls: list[Call] = []
    block_stack: list[int | None] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = read_call(module, args, kwargs)
        block_stack.append(None if call is None else _find_position(call.graph, blocks))

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        block = block_stack.pop()
        call = read_call(module, args, kwargs)
        rows = None
        if call is not None:
            rows = call.rows
        elif args:
            rows = args[0]
        if isinstance(rows, tuple):
            rows = rows[0]

        if torch.is_tensor(rows) and rows.dim() > 1:
            outer_blocks = [outer for outer in block_stack if outer is not None]
            outer_block = outer_blocks[0] if outer_blocks else None
            calls.append(Call(module=module, block=block, rows=rows, result=result, inside=outer_block))

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        stack.enter_context(preserve_state(model, training=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        (run or model)(blocks, x)
    return calls


def _find_position(graph: Any, blocks: Sequence[Any]) -> int | None:
    for position, block in enumerate(blocks):
        if block is graph:
            return position
    return None


@contextmanager
def replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the modules' ``forward`` in the ``with`` block."""
    old_forwards = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, old_forward in old_forwards.items():
            del module.__dict__["forward"]
            if old_forward is not None:
                module.__dict__["forward"] = old_forward


@contextmanager
def preserve_state(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode in the ``with`` block. Modes and running averages are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    old_averages = []
    # Evaluation does not change running averages, and an autograd graph may hold them.
    if training:
        for module in modes:
            if isinstance(module, nn.modules.batchnorm._NormBase):
                old_averages += [(buffer, buffer.clone()) for buffer in module.buffers()]
    model.train(training)

    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, old_values in old_averages:
            buffer.copy_(old_values)


def random_block(num_dst: int, num_src: int, num_edges: int, generator: torch.Generator) -> Any:
    """Return a block with ``num_edges`` random edges, and a self-loop at each destination.

    The destinations are the first ``num_dst`` of the ``num_src`` sources.
    """
    # Some convolutions require an in-edge at every node.
    dst_ids = torch.arange(num_dst)
    edge_sources = torch.cat([dst_ids, torch.randint(num_src, (num_edges,), generator=generator)])
    edge_destinations = torch.cat([dst_ids, torch.randint(num_dst, (num_edges,), generator=generator)])
    block = dgl.create_block((edge_sources, edge_destinations), num_src, num_dst)
    block.srcdata[dgl.NID] = torch.arange(num_src)
    block.dstdata[dgl.NID] = dst_ids
    return block
