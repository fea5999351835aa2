"""Check that a model's layers, called one after the other, get the same rows as in its ``forward``."""

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
from dglx_dist.strategies.base import find_float_parameter

_NUM_CHECKED = 4  # destinations of the last random block in check_layers

_REMEDY = (
    "pass the function that forward() applies between its layers as between=, like F.relu, or define "
    "inference_layers(), which returns one callable (block, h) -> h per layer"
)


def check_layers(
    module: nn.Module,
    layers: Sequence[Any],
    steps: Sequence[Callable[[Any, Any], Any]],
    width: int,
    edges: Mapping[str, Any],
) -> None:
    """Raise ConfigError if a layer in ``module`` gets other rows from the ``steps`` than in ``forward``.

    The module and the steps run on a small random batch. A module that fails on the batch is not checked.

    Args:
        layers: The user's layers.
        steps: The same layers with the function between them applied, as layerwise inference runs them.
        width: Number of input columns.
        edges: Edge columns by name. The batch gets random values with their dtypes and row shapes.
    """

    def run_in_turn(blocks: Sequence[Any], h: Any) -> None:
        for step, block in zip(steps, blocks, strict=True):
            h = step(block, h)

    def run_on_graph(graphs: Sequence[Any], h: Any) -> Any:
        return module(graphs[0], h)

    if not any(isinstance(layer, nn.Module) for layer in layers):
        return

    weight = find_float_parameter(module)
    generator = torch.Generator().manual_seed(0)
    blocks, graph = _make_random_graphs(len(steps), edges, generator)
    rows = torch.randn(blocks[0].num_src_nodes(), width, generator=generator).to(weight)

    # A model takes one block per layer, or one graph. The check uses the first call that succeeds.
    calls = (
        (module, [block.to(weight.device) for block in blocks]),
        (run_on_graph, [graph.to(weight.device)] * len(steps)),
    )
    for forward, batch in calls:
        inputs = rows[: batch[0].num_src_nodes()]
        try:
            forward_rows = _find_rows(module, forward, batch, inputs)
        except MODEL_ERRORS:
            continue

        try:
            step_rows = _find_rows(module, run_in_turn, batch, inputs)
        except MODEL_ERRORS as error:
            raise ConfigError(f"forward() runs, but its layers fail in turn ({error}); {_REMEDY}") from error
        for depth, layer in enumerate(layers):
            if _have_different_rows(forward_rows[id(layer)], step_rows[id(layer)]):
                raise ConfigError(
                    f"layer {depth} gets other rows in forward() than from the layers in turn, so the scores "
                    f"would be wrong; {_REMEDY}"
                )
        return


def _make_random_graphs(
    num_blocks: int, edges: Mapping[str, Any], generator: torch.Generator
) -> tuple[list[Any], Any]:
    """Return a chain of blocks and a graph. Both have random values in the edge columns."""
    # Each block has fewer nodes than the block before. The last one has ``_NUM_CHECKED`` destinations.
    sizes = range(_NUM_CHECKED * (num_blocks + 1), 0, -_NUM_CHECKED)
    blocks = []
    for num_src, num_dst in pairwise(sizes):
        blocks.append(random_block(num_dst, num_src, 3 * num_dst, generator))
    graph = dgl.add_self_loop(dgl.rand_graph(_NUM_CHECKED, _NUM_CHECKED))
    graph.ndata[dgl.NID] = graph.nodes()
    for block in (*blocks, graph):
        for name, column in edges.items():
            values = torch.rand(block.num_edges(), *column.shape[1:], generator=generator)
            block.edata[name] = values.to(column.dtype)
    return blocks, graph


def _find_rows(
    module: nn.Module, run: Callable[..., object], blocks: Sequence[Any], rows: Tensor
) -> Mapping[int, list[Tensor]]:
    """Return the rows that each module gets while ``run`` runs, by ``id(module)``. Errors are passed on."""
    rows_of: defaultdict[int, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for call in trace_calls(module, blocks, rows, run):
            rows_of[id(call.module)].append(call.rows)
    return rows_of


def _have_different_rows(forward_calls: Sequence[Tensor], step_calls: Sequence[Tensor]) -> bool:
    """Return whether a layer got other rows. A layer that is not called exactly once is not compared."""
    if len(forward_calls) != 1 or len(step_calls) != 1:
        return False
    rows = forward_calls[0].double()
    expected_rows = step_calls[0].double()
    if rows.shape != expected_rows.shape:
        return True
    # Where large values cancel out, the rounding error is a share of the largest value.
    tolerance = 1e-4 * (1 + float(expected_rows.abs().max()))
    return not torch.allclose(rows, expected_rows, rtol=1e-3, atol=tolerance)
