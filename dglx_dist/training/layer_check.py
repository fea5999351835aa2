"""The check that a model's layers, one after the other, compute what its forward does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.tracer import MODEL_ERRORS, random_block, trace_calls
from dglx_dist.strategies.base import float_of

_TARGETS = 4
_REMEDY = (
    "give between= what forward() applies between its layers, as F.relu, or define inference_layers(), which "
    "returns one callable (block, h) -> h per layer"
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

    def run_in_turn(blocks: Sequence[Any], h: Any) -> None:
        for step, block in zip(steps, blocks, strict=True):
            h = step(block, h)

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
    graphs = [graph.to(weight.device)] * len(steps)
    for forward, batch in (
        (module, [block.to(weight.device) for block in blocks]),
        (lambda graphs, h: module(graphs[0], h), graphs),
    ):
        start = rows[: batch[0].num_src_nodes()]
        try:
            in_forward = _find_rows(module, forward, batch, start)
        except MODEL_ERRORS:
            continue
        try:
            in_turn = _find_rows(module, run_in_turn, batch, start)
        except MODEL_ERRORS as error:
            raise ConfigError(f"forward() runs, but not the layers in turn ({error}); {_REMEDY}") from error
        for depth, layer in enumerate(layers):
            a, b = in_forward[id(layer)], in_turn[id(layer)]
            if len(a) == len(b) == 1 and (a[0].shape != b[0].shape or not _is_close(a[0], b[0])):
                raise ConfigError(
                    f"layer {depth} gets other rows in forward() than from the layers in turn, so the scores "
                    f"would be wrong; {_REMEDY}"
                )
        return


def _find_rows(
    module: nn.Module, run: Callable[..., object], blocks: Sequence[Any], rows: Tensor
) -> Mapping[int, list[Tensor]]:
    """Return the rows that each module gets in ``run``, by its identity; raise what it raises."""
    rows_of: defaultdict[int, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for call in trace_calls(module, blocks, rows, run):
            rows_of[id(call.module)].append(call.rows)
    return rows_of


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4 * (1 + float(b.abs().max())))
