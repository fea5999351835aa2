"""A stage written with tensors: torch's gradients, and the halves, dtypes and wishes of a worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.aws.package import check_imports
from dglx_dist.strategies.serverless.trainer import backward_by_torch, forward_by_torch
from tests.strategies.serverless.own_stage import Gate
from tests.strategies.serverless.own_tensor_stage import TensorGate

SHAPE = {"in": 5, "out": 3}


@pytest.mark.parametrize("rows", [7, 1, 0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wanted", [None, (True, False), (False, False)])
def test_it_is_the_stage_that_numpy_computes(rows: int, dtype: str, wanted: tuple[bool, bool] | None) -> None:
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal((5, 3)).astype(dtype)]
    inputs = [draw.standard_normal((rows, 5)).astype(dtype) for _ in range(2)]
    gradients = [draw.standard_normal((rows, 3)).astype(dtype)]
    for array in (*weights, *inputs, *gradients):
        array.flags.writeable = False
    tensors, plain = TensorGate(SHAPE), Gate(SHAPE)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    found = tensors.forward(weights, inputs)
    assert found.outputs[0].dtype == dtype
    np.testing.assert_allclose(found.outputs[0], plain.forward(weights, inputs).outputs[0], atol=tolerance)
    back = tensors.backward(weights, inputs, gradients, wanted=wanted)
    expected = plain.backward(weights, inputs, gradients)
    np.testing.assert_allclose(back.weights[0], expected.weights[0], atol=tolerance)
    for index, slope in enumerate(back.inputs):
        if wanted is None or wanted[index]:
            assert slope is not None
            np.testing.assert_allclose(slope, expected.inputs[index], atol=tolerance)
        else:
            assert slope is None


def test_what_nothing_depends_on_has_gradient_zero() -> None:
    def second_alone(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[1] * 2]

    def constant(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones_like(inputs[0])]

    weights, inputs = [np.ones((2, 2))], [np.ones((3, 2)), np.ones((3, 2))]
    assert forward_by_torch(second_alone, weights, inputs).outputs[0].tolist() == [[2.0, 2.0]] * 3
    back = backward_by_torch(second_alone, weights, inputs, [np.ones((3, 2))])
    assert [array is not None and array.max() for array in back.inputs] == [0, 2]
    assert not back.weights[0].any()
    assert not backward_by_torch(constant, weights, inputs, [np.ones((3, 2))]).weights[0].any()


def test_workers_of_their_own_refuse_it_with_the_reason() -> None:
    here = "tests.strategies.serverless."
    check_imports({"gate": f"{here}own_stage:Gate"}, "local")
    with pytest.raises(ConfigError, match=r"imports torch.*'local' have numpy and zmq only.*'inline'"):
        check_imports({"gate": f"{here}own_tensor_stage:TensorGate"}, "local")
