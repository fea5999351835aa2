"""The check that a model's layers, one after the other, compute what its forward does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.layers.tracer import random_block, restored
from dglx_dist.strategies.base import float_of

_TARGETS = 4
_FAILURES = (
    *(TypeError, LookupError, ValueError, AttributeError, RuntimeError, AssertionError),
    *(DglxError, dgl.DGLError),
)


def check_layers(
    module: nn.Module,
    layers: Sequence[Any],
    steps: Sequence[Callable[[Any, Any], Any]],
    width: int,
    edges: Mapping[str, Any],
) -> None:
    """Raise ConfigError if a layer of ``module`` gets other rows from the ``steps`` than in ``forward``.

    Both run on a small random batch. A model that does not run on it is not checked.

    Args:
        layers: The user's layers; ``steps`` are they with what is applied between them.
        width: Columns of the input.
        edges: Columns of edges by name, of which the batch gets random rows.
    """
    if not any(isinstance(layer, nn.Module) for layer in layers):
        return
    weight, generator = float_of(module), torch.Generator().manual_seed(0)
    sizes = range(_TARGETS * (len(steps) + 1), 0, -_TARGETS)
    blocks = [random_block(few, many, 3 * few, generator) for many, few in pairwise(sizes)]
    graph = dgl.add_self_loop(dgl.rand_graph(_TARGETS, _TARGETS))
    graph.ndata[dgl.NID] = graph.nodes()
    for one in (*blocks, graph):
        for name, column in edges.items():
            rows = torch.rand(one.num_edges(), *column.shape[1:], generator=generator)
            one.edata[name] = rows.to(column.dtype)
    rows = torch.randn(sizes[0], width, generator=generator).to(weight)
    blocks, graph = [one.to(weight.device) for one in blocks], graph.to(weight.device)
    for given, on_device in ((blocks, blocks), (graph, [graph] * len(steps))):
        start = rows[: on_device[0].num_src_nodes()]
        with torch.random.fork_rng(devices=[]), torch.no_grad(), restored(module, training=False):
            in_forward, is_run = _inputs_of(layers, partial(module, given, start))
            in_turn, _ = _inputs_of(layers, partial(_run, steps, on_device, start))
        if not is_run:
            continue
        for depth, layer in enumerate(layers):
            a, b = in_forward.get(id(layer), []), in_turn.get(id(layer), [])
            if len(a) == len(b) == 1 and (a[0].shape != b[0].shape or not _is_close(a[0], b[0])):
                raise ConfigError(
                    f"layer {depth} gets other rows in forward() than from the layers in turn, so the scores "
                    "would be wrong; give between= what forward() applies between its layers, as F.relu, or "
                    "define inference_layers(), which returns one callable (block, h) -> h per layer"
                )
        return


def _run(steps: Sequence[Callable[[Any, Any], Any]], blocks: Sequence[Any], h: Any) -> None:
    for step, block in zip(steps, blocks, strict=True):
        h = step(block, h)


def _inputs_of(layers: Sequence[Any], run: Callable[[], object]) -> tuple[dict[int, list[Tensor]], bool]:
    """Return the rows that each layer gets in ``run``, by its identity; and whether it succeeds."""
    inputs: dict[int, list[Tensor]] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        rows = arguments[1] if len(arguments) > 1 else None
        rows = rows[0] if isinstance(rows, tuple) else rows
        if isinstance(rows, Tensor):
            inputs.setdefault(id(layer), []).append(rows)

    with ExitStack() as stack:
        for layer in {id(one): one for one in layers if isinstance(one, nn.Module)}.values():
            stack.callback(layer.register_forward_pre_hook(note).remove)
        try:
            run()
        except _FAILURES:
            return inputs, False
    return inputs, True


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4 * (1 + float(b.abs().max())))
