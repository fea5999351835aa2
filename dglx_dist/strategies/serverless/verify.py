"""Checks that a program computes what its model computes, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.internals.interception import InterceptedDropout
from dglx_dist.layers.dropout import MODULES
from dglx_dist.layers.tracer import preserve_state
from dglx_dist.strategies.serverless.capture import OTHER_STRATEGY, ModelCall
from dglx_dist.strategies.serverless.program import EDGE_DATA, FEATURES, Apply, Gather, Program, Softmax
from dglx_dist.strategies.serverless.tensor_program import RowKeys, drop_rows

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}


def run_program(program: Program, block: Any, x: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the (n, width) or (E, width) rows of all slots, computed on one graph by torch and DGL.

    ``block`` has all nodes as sources and as targets. Autograd records the steps.
    """
    rows: dict[str, Tensor] = {}
    for slot in program.inputs:
        tensor = x if slot.name == FEATURES else None
        if tensor is None:
            name = slot.name.removeprefix(EDGE_DATA)
            tensor = block.edata[name] if slot.per == "edge" else getattr(block, name)()
        rows[slot.name] = tensor.reshape(len(tensor), slot.width)

    for step in program.steps:
        if isinstance(step, Apply):
            inputs = _read_inputs(step, rows, block)
            keys = RowKeys(0, 0, torch.arange(len(inputs[0])))
            values = step.body.run(inputs, [weights[name] for name in step.weights], keys)
            for slot, number in zip(step.outputs, step.body.outputs, strict=True):
                rows[slot.name] = values[number].reshape(-1, slot.width)
        elif isinstance(step, Softmax):
            rows[step.output.name] = dgl.ops.edge_softmax(block, rows[step.source])
        elif isinstance(step, Gather):
            rows[step.output.name] = _gather(block, step, rows)
    return rows


def _read_inputs(step: Apply, rows: Mapping[str, Tensor], block: Any) -> list[Tensor]:
    ends = dict(zip(("source", "target"), block.edges(), strict=True))
    return [rows[item.slot] if item.end == "row" else rows[item.slot][ends[item.end]] for item in step.inputs]


def _gather(block: Any, step: Gather, rows: Mapping[str, Tensor]) -> Tensor:
    index, stock = block._graph, dgl.backend.pytorch.sparse.GSpMM.apply
    if step.source is None:
        return stock(index, "copy_rhs", step.how, None, rows[step.edges or ""])
    if step.edges is None:
        return stock(index, "copy_lhs", step.how, rows[step.source], None)
    source = rows[step.source]
    factors = rows[step.edges]
    heads = source.reshape(len(source), factors.shape[1], -1)
    return stock(index, "mul", "sum", heads, factors.unsqueeze(-1)).flatten(1)


def check_program(program: Program, call: ModelCall) -> None:
    """Raise ConfigError unless ``program`` has the values and gradients of its model, and is row-wise."""
    block, x = call.make_graph(0)
    weights = dict(call.model.named_parameters())
    with _other_weights(weights.values()):
        _check_with(program, call, block, x, weights)


@contextmanager
def _other_weights(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Change weights in the ``with`` block. A weight that begins as 0 would hide what it multiplies."""
    generator = torch.Generator().manual_seed(29)
    before = [(weight, weight.data) for weight in weights]
    try:
        for weight, data in before:
            noise = torch.randn(data.shape, dtype=data.dtype, generator=generator)
            weight.data = data + 0.5 * noise
        yield
    finally:
        for weight, data in before:
            weight.data = data


def _check_with(
    program: Program, call: ModelCall, block: Any, x: Tensor, weights: Mapping[str, nn.Parameter]
) -> None:
    with torch.no_grad():
        rows = run_program(program, block, x, weights)
        for step in program.steps:
            if isinstance(step, Apply):
                _check_rows(step, rows, block, weights)

    drops = 0

    def drop(x: Tensor, probability: float) -> Tensor:
        nonlocal drops
        stream = MODULES + drops
        drops = drops + 1
        return drop_rows(x, probability, stream, RowKeys(0, 0, torch.arange(len(x))))

    trained = {name: parameter for name, parameter in weights.items() if parameter.requires_grad}
    with preserve_state(call.model, training=True), torch.random.fork_rng(devices=[]), torch.enable_grad():
        with InterceptedDropout(drop):
            expected = call.run(block, x)
        scores = run_program(program, block, x, weights)[program.scores.name]
        expected = expected.reshape(scores.shape)
        _compare("result", expected, scores, float(expected.detach().abs().nan_to_num().max()))
        cotangent = torch.randn(scores.shape, dtype=scores.dtype, generator=torch.Generator().manual_seed(3))
        expected_gradients, gradients = (
            _differentiate(result, list(trained.values()), cotangent) for result in (expected, scores)
        )

    largest = max((float(gradient.abs().nan_to_num().max()) for gradient in expected_gradients), default=0.0)
    for name, left, right in zip(trained, expected_gradients, gradients, strict=True):
        _compare(f"gradient of {name!r}", left, right, largest)


def _differentiate(result: Tensor, weights: Sequence[Tensor], cotangent: Tensor) -> Sequence[Tensor]:
    if not result.requires_grad or not weights:
        return [torch.zeros_like(weight) for weight in weights]
    return torch.autograd.grad(result, weights, cotangent, allow_unused=True, materialize_grads=True)


def _compare(subject: str, expected: Tensor, computed: Tensor, scale: float) -> None:
    tolerance = _TOLERANCE[expected.dtype]
    close = torch.isclose(
        computed, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True
    )
    if not bool(close.all()):
        difference = float((expected - computed).detach().abs().max())
        raise ConfigError(
            f"the {subject} of the model differs by {difference:.3g} from that of its recorded operations. A "
            "cause may be rows that are changed in place through a view, torch.no_grad() inside of the "
            f"model, or a torch.autograd.Function; avoid it, {OTHER_STRATEGY}"
        )


def _check_rows(step: Apply, rows: Mapping[str, Tensor], block: Any, weights: Mapping[str, Tensor]) -> None:
    inputs = _read_inputs(step, rows, block)
    own_weights = [weights[name] for name in step.weights]
    count = len(inputs[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(9))
    parts = [order[: count // 3], order[count // 3 :]]
    complete = step.body.run(inputs, own_weights, RowKeys(0, 0, torch.arange(count)))
    pieces = [
        step.body.run([array[part] for array in inputs], own_weights, RowKeys(0, 0, part)) for part in parts
    ]
    for operation in step.body.operations:
        for number in operation.results:
            all_rows = complete[number]
            is_output = number in step.body.outputs
            if all_rows.dim() == 0 or len(all_rows) != count or len(pieces[0][number]) != len(parts[0]):
                if is_output:
                    _refuse(step, operation.name)
                continue

            parts_of_value = [piece[number] for piece in pieces]
            if any(part.shape[1:] != all_rows.shape[1:] for part in parts_of_value):
                _refuse(step, operation.name)
            ordered = torch.cat(parts_of_value)
            if not torch.allclose(ordered, all_rows[order], rtol=1e-4, atol=1e-5, equal_nan=True):
                _refuse(step, operation.name)


def _refuse(step: Apply, name: str) -> None:
    weights = f" (it uses {', '.join(step.weights)})" if step.weights else ""
    raise ConfigError(
        f"the model computes rows of {step.per}s{weights} from each other with {name}, as a softmax or a "
        "mean over all nodes does; strategy 'lambda' computes each row alone. Normalise each row, as "
        f"nn.LayerNorm does, {OTHER_STRATEGY}"
    )
