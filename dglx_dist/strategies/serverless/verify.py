"""Checks that a program computes what its model computes, row by row."""

from __future__ import annotations

import itertools
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
    """Return the (n, width) or (E, width) rows in all slots, computed on one graph by torch and DGL.

    ``block`` has all nodes as sources and as targets. Autograd records the steps.
    """
    rows: dict[str, Tensor] = {}
    for slot in program.inputs:
        if slot.name == FEATURES:
            tensor = x
        elif slot.per == "edge":
            tensor = block.edata[slot.name.removeprefix(EDGE_DATA)]
        else:
            # The other inputs are block.in_degrees() and block.out_degrees().
            tensor = getattr(block, slot.name)()
        rows[slot.name] = tensor.reshape(len(tensor), slot.width)

    for step in program.steps:
        if isinstance(step, Apply):
            inputs = _read_inputs(step, rows, block)
            keys = RowKeys(0, 0, torch.arange(len(inputs[0])))
            values = step.body.run(inputs, [weights[name] for name in step.weights], keys)
            for slot, output in zip(step.outputs, step.body.outputs, strict=True):
                rows[slot.name] = values[output].reshape(-1, slot.width)
        elif isinstance(step, Softmax):
            rows[step.output.name] = dgl.ops.edge_softmax(block, rows[step.source])
        elif isinstance(step, Gather):
            rows[step.output.name] = _gather(block, step, rows)
    return rows


def _read_inputs(step: Apply, rows: Mapping[str, Tensor], block: Any) -> list[Tensor]:
    ends = dict(zip(("source", "target"), block.edges(), strict=True))
    inputs = []
    for item in step.inputs:
        tensor = rows[item.slot]
        if item.end != "row":
            tensor = tensor[ends[item.end]]
        inputs.append(tensor)
    return inputs


def _gather(block: Any, step: Gather, rows: Mapping[str, Tensor]) -> Tensor:
    index = block._graph
    reduce = dgl.backend.pytorch.sparse.GSpMM.apply
    if step.source is None:
        assert step.edges is not None, "a Gather reads sources or edges"
        return reduce(index, "copy_rhs", step.how, None, rows[step.edges])
    if step.edges is None:
        return reduce(index, "copy_lhs", step.how, rows[step.source], None)

    # Each head, a run of columns, has its own factor.
    source = rows[step.source]
    factors = rows[step.edges]
    heads = source.reshape(len(source), factors.shape[1], -1)
    return reduce(index, "mul", "sum", heads, factors.unsqueeze(-1)).flatten(1)


def check_program(program: Program, call: ModelCall) -> None:
    """Raise ConfigError if values or gradients differ from the model's, or if a step is not row-wise."""
    block, x = call.make_graph(0)
    weights = dict(call.model.named_parameters())
    with _add_noise(weights.values()):
        with torch.no_grad():
            rows = run_program(program, block, x, weights)
            for step in program.steps:
                if isinstance(step, Apply):
                    _check_rows(step, rows, block, weights)
        _check_scores(program, call, block, x, weights)


@contextmanager
def _add_noise(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Change weights while the context lasts. A weight 0 would hide errors in its factors."""
    generator = torch.Generator().manual_seed(29)
    weights_and_data = [(weight, weight.data) for weight in weights]
    try:
        for weight, data in weights_and_data:
            noise = torch.randn(data.shape, dtype=data.dtype, generator=generator)
            # The factor 0.5 keeps the scores in the usual range.
            weight.data = data + 0.5 * noise
        yield
    finally:
        for weight, data in weights_and_data:
            weight.data = data


def _check_scores(
    program: Program, call: ModelCall, block: Any, x: Tensor, weights: Mapping[str, nn.Parameter]
) -> None:
    """Raise ConfigError if the scores or the trained weights' gradients differ from the model's."""
    streams = itertools.count(MODULES)

    def drop(x: Tensor, probability: float) -> Tensor:
        return drop_rows(x, probability, next(streams), RowKeys(0, 0, torch.arange(len(x))))

    trained = {name: parameter for name, parameter in weights.items() if parameter.requires_grad}
    trained_weights = list(trained.values())
    with preserve_state(call.model, training=True), torch.random.fork_rng(devices=[]), torch.enable_grad():
        with InterceptedDropout(drop):
            expected = call.run(block, x)
        scores = run_program(program, block, x, weights)[program.scores.name]
        expected = expected.reshape(scores.shape)
        _compare("result", expected, scores, _find_largest([expected]))

        # A random combination's gradient depends on every score.
        generator = torch.Generator().manual_seed(3)
        cotangent = torch.randn(scores.shape, dtype=scores.dtype, generator=generator)
        expected_gradients = _differentiate(expected, trained_weights, cotangent)
        gradients = _differentiate(scores, trained_weights, cotangent)

    scale = _find_largest(expected_gradients)
    for name, expected_gradient, gradient in zip(trained, expected_gradients, gradients, strict=True):
        _compare(f"gradient of {name!r}", expected_gradient, gradient, scale)


def _find_largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value in all tensors, or 0 if there is none."""
    return max((float(tensor.detach().abs().nan_to_num().max()) for tensor in tensors), default=0.0)


def _differentiate(result: Tensor, weights: Sequence[Tensor], cotangent: Tensor) -> Sequence[Tensor]:
    if not result.requires_grad or not weights:
        return [torch.zeros_like(weight) for weight in weights]
    return torch.autograd.grad(result, weights, cotangent, allow_unused=True, materialize_grads=True)


def _compare(subject: str, expected: Tensor, computed: Tensor, scale: float) -> None:
    """Raise ConfigError if ``computed`` differs. ``scale`` is the typical value for the tolerance."""
    tolerance = _TOLERANCE[expected.dtype]
    # If all values are 0, the tolerance must still be above 0.
    atol = tolerance * max(scale, 1e-30)
    is_close = torch.isclose(computed, expected, rtol=tolerance, atol=atol, equal_nan=True)
    if not bool(is_close.all()):
        difference = float((expected - computed).detach().abs().max())
        raise ConfigError(
            f"the {subject} of the model differs by {difference:.3g} from that of its "
            "recorded operations. A cause may be rows that are changed in place through a view, "
            "torch.no_grad() inside of the model, or a torch.autograd.Function; avoid it, "
            f"{OTHER_STRATEGY}"
        )


def _check_rows(step: Apply, rows: Mapping[str, Tensor], block: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a row depends on other rows: run all rows, then two parts of them in any order."""
    inputs = _read_inputs(step, rows, block)
    step_weights = [weights[name] for name in step.weights]
    num_rows = len(inputs[0])
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(9))
    selections = [order[: num_rows // 3], order[num_rows // 3 :]]
    values = step.body.run(inputs, step_weights, RowKeys(0, 0, torch.arange(num_rows)))
    values_of_parts = []
    for selection in selections:
        inputs_of_part = [array[selection] for array in inputs]
        keys = RowKeys(0, 0, selection)
        values_of_parts.append(step.body.run(inputs_of_part, step_weights, keys))

    for operation in step.body.operations:
        for number in operation.results:
            value = values[number]
            parts = [part_values[number] for part_values in values_of_parts]
            if value.dim() == 0 or len(value) != num_rows or len(parts[0]) != len(selections[0]):
                # Only an output must have rows. Values without rows depend on weights and constants.
                if number in step.body.outputs:
                    _refuse(step, operation.name)
                continue

            if any(part.shape[1:] != value.shape[1:] for part in parts):
                _refuse(step, operation.name)
            if not torch.allclose(torch.cat(parts), value[order], rtol=1e-4, atol=1e-5, equal_nan=True):
                _refuse(step, operation.name)


def _refuse(step: Apply, name: str) -> None:
    weights = f" (it uses {', '.join(step.weights)})" if step.weights else ""
    raise ConfigError(
        f"the model computes rows of {step.per}s{weights} from each other with {name}, as a "
        "softmax or a mean over all nodes does; strategy 'lambda' computes each row alone. "
        f"Normalise each row, as nn.LayerNorm does, {OTHER_STRATEGY}"
    )
