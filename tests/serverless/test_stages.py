"""Stages: gradients, equal bits from what was saved, torch's functions to the last digits, refusals."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dglx_dist.data.json_fields import Json
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.stages.base import STAGES, Config, edge_stage, register_stage, vertex_stage

from .programs import TorchStage, sequence

F64 = 1e-12
ACTIVATIONS: dict[str, tuple[Mapping[str, Json], Callable[[Tensor], Tensor]]] = {
    "identity": ({"name": "identity"}, lambda z: z),
    "relu": ({"name": "relu"}, functional.relu),
    "leaky_relu": ({"name": "leaky_relu", "slope": 0.2}, lambda z: functional.leaky_relu(z, 0.2)),
    "elu": ({"name": "elu", "alpha": 1.3}, lambda z: functional.elu(z, 1.3)),
    "tanh": ({"name": "tanh"}, torch.tanh),
    "sigmoid": ({"name": "sigmoid"}, torch.sigmoid),
}
RELU, ELU = {"name": "relu"}, {"name": "elu", "alpha": 1.0}
DENSE = {"in": 4, "out": 3, "bias": True}
PROJECT = {"in": 6, "heads": 3, "width": 2}
FINISH = {"heads": 2, "width": 3, "merge": "flatten", "bias": True, "activation": ELU, "after": RELU}
NORM = {"width": 3, "eps": 1e-5, "scale": True, "bias": True}
STAGES_OF_VERTICES: list[tuple[str, Any]] = [
    *(("dense", {**DENSE, "activation": config}) for config, _ in ACTIVATIONS.values()),
    *(("dense", {**DENSE, "bias": False, "transposed": transposed}) for transposed in (False, True)),
    ("rows", {"width": 4, "bias": True, "activation": ELU}),
    ("rows", {"width": 4, "bias": False}),
    *(("sage", {**DENSE, "bias": bias, "activation": RELU}) for bias in (False, True)),
    *(("attention_project", {**PROJECT, "residual": kind}) for kind in ("none", "identity", "linear")),
    ("attention_project", {**PROJECT, "residual": "linear", "residual_bias": True}),
    *(
        ("attention_finish", {**FINISH, "merge": merge, "bias": residual, "residual": residual})
        for merge in ("flatten", "mean")
        for residual in (False, True)
    ),
    *(("layer_norm", {**NORM, "scale": scale, "activation": ELU}) for scale in (False, True)),
    ("layer_norm", {**NORM, "bias": False}),
    ("sequence", sequence(("sage", DENSE), ("layer_norm", NORM), ("dense", {**DENSE, "in": 3}))),
    ("sequence", sequence(("attention_finish", FINISH), ("attention_project", PROJECT))),
]
"""Results of these stages are compared with DGL's layers in test_model_to_program.py."""


@pytest.mark.parametrize(("name", "config"), STAGES_OF_VERTICES, ids=str)
def test_backward_of_a_vertex_stage_is_the_gradient_of_forward(name: str, config: Config) -> None:
    stage = vertex_stage(name, config)
    shapes, draw = stage.shapes, np.random.default_rng(0)
    weights = [draw.normal(size=shape) for shape in shapes.weights.values()]
    for rows in (0, 1, 7):
        inputs = [draw.normal(size=(rows, width)) for width in shapes.inputs]
        gradients = [draw.normal(size=(rows, width)) for width in shapes.outputs]
        arrays = [*weights, *inputs, *gradients]
        before = [array.copy() for array in arrays]
        outputs, saved = stage.forward(weights, inputs)
        backward = stage.backward(weights, inputs, gradients)
        assert [out.shape for out in outputs] == [(rows, width) for width in shapes.outputs]
        assert [z.shape for z in saved] == [(rows, width) for width in shapes.saved]
        # What was saved gives the very same bits as what is computed again, and nothing given was written to.
        again = stage.backward(weights, inputs, gradients, saved=saved)
        assert all(map(np.array_equal, again.inputs + again.weights, backward.inputs + backward.weights))
        assert all(map(np.array_equal, arrays, before))
    leaves = [torch.tensor(array, requires_grad=True) for array in (*weights, *inputs)]
    torch.autograd.gradcheck(lambda *some: TorchStage.apply(stage, len(weights), *some), leaves)
    narrow = [[tensor.astype("float32") for tensor in some] for some in (weights, inputs, gradients)]
    outputs, saved = stage.forward(*narrow[:2])
    unwanted = stage.backward(*narrow, wanted=[False] * len(inputs))
    assert unwanted.inputs == (None,) * len(inputs)
    assert {str(tensor.dtype) for tensor in (*outputs, *saved, *unwanted.weights)} <= {"float32"}
    close(unwanted.weights, backward.weights, 2e-5)


def close(found: Sequence[Array | None], wanted: Sequence[Array], tolerance: float = F64) -> None:
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        assert left is not None
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def test_derivatives_at_kinks_and_far_out_are_torchs() -> None:
    z = np.array([[-800.0, -40.0, -5.0, -1e-9, 0.0, 1e-9, 5.0, 40.0, 800.0, -2.03125]])
    eye, item = np.eye(10), np.ones((1, 10))
    more = dict(ACTIVATIONS)
    for slope in (-0.5, 1.0, 1.7):
        config = {"name": "leaky_relu", "slope": slope}
        more[f"leaky {slope}"] = (config, lambda z, slope=slope: functional.leaky_relu(z, slope))
    more["elu 1"] = ({"name": "elu", "alpha": 1.0}, functional.elu)
    for config, act in more.values():
        stage = vertex_stage("dense", {"in": 10, "out": 10, "bias": False, "activation": config})
        (h,), _ = stage.forward([eye], [z])
        (slope,), _ = stage.backward([eye], [z], [item])
        x = torch.tensor(z, requires_grad=True)
        out = act(x)
        out.sum().backward()
        close([h, slope], [out.detach().numpy(), x.grad.numpy()], 1e-14)  # type: ignore[union-attr]


def test_small_values_of_a_sigmoid_are_right_to_the_last_digits() -> None:
    z = np.array([[-700.0, -87.0, -40.0, -10.0, 10.0, 700.0]])
    config = {"in": 6, "out": 6, "bias": False, "activation": {"name": "sigmoid"}}
    for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6)):
        (h,), _ = vertex_stage("dense", config).forward([np.eye(6, dtype=dtype)], [z.astype(dtype)])
        np.testing.assert_allclose(h, torch.tensor(z.astype(dtype)).sigmoid(), rtol=tolerance, atol=0)


INDPTR = np.array([0, 0, 3, 4, 4, 9, 9])
"""Six targets with 0, 3, 1, 0, 5 and 0 in-edges."""


def torch_attention(sources: Tensor, targets: Tensor) -> Tensor:
    logits = functional.leaky_relu(sources + targets.repeat_interleave(torch.tensor(np.diff(INDPTR)), 0), 0.2)
    parts = [logits[a:b].softmax(0) for a, b in pairwise(INDPTR)]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_attention_of_edges_is_torchs(dtype: str) -> None:
    rng = np.random.default_rng(3)
    sources, targets, gradients = (rng.normal(size=(n, 2)).astype(dtype) * 3 for n in (9, 6, 9))
    stage = edge_stage("attention_edges", {"heads": 2, "slope": 0.2})
    values = stage.forward(sources, targets, INDPTR)
    slope = stage.backward(sources, targets, INDPTR, values, gradients)
    s = torch.tensor(sources, requires_grad=True)
    t = torch.tensor(targets, requires_grad=True)
    out = torch_attention(s, t)
    ds, dt = torch.autograd.grad(out, [s, t], torch.tensor(gradients))
    tolerance = F64 if dtype == "float64" else 1e-5
    close([values, slope], [out.detach().numpy(), ds.numpy()], tolerance)
    by_target = np.stack([slope[a:b].sum(0) for a, b in pairwise(INDPTR)])
    close([by_target], [dt.numpy()], tolerance)
    assert values.dtype == slope.dtype == np.dtype(dtype)


def test_attention_of_no_edges_and_of_large_logits() -> None:
    stage = edge_stage("attention_edges", {"heads": 1, "slope": 0.2})
    for targets in (0, 3):
        indptr, none = np.zeros(targets + 1, dtype=np.int64), np.zeros((0, 1))
        assert stage.forward(none, np.zeros((targets, 1)), indptr).shape == (0, 1)
        assert stage.backward(none, np.zeros((targets, 1)), indptr, none, none).shape == (0, 1)
    values = stage.forward(np.array([[1e5], [1e5]]), np.array([[1e5]]), np.array([0, 2]))
    assert values.tolist() == [[0.5], [0.5]]


STAGES_OF_ONE: list[Json] = [{"stage": "rows", "config": {"width": 3, "bias": True}}]
GOOD: dict[str, dict[str, Json]] = {
    "dense": {"in": 4, "out": 3, "bias": True},
    "rows": {"width": 4, "bias": True},
    "sage": {"in": 4, "out": 3, "bias": True},
    "layer_norm": {"width": 4, "eps": 1e-5, "scale": True, "bias": True},
    "sequence": {"stages": 2 * STAGES_OF_ONE},
    "attention_project": {"in": 4, "heads": 2, "width": 3},
    "attention_finish": {"heads": 2, "width": 3, "bias": True, "merge": "mean"},
    "attention_edges": {"heads": 2, "slope": 0.2},
}


BAD: dict[str, list[dict[str, Json]]] = {
    "dense": [
        *({"in": bad} for bad in (0, 1 << 40, 4.0, "4", True)),
        *({"activation": bad} for bad in ("relu", {"name": "swish"}, {"name": "relu", "slope": 1}, {})),
        *({"activation": {"name": "elu", "alpha": bad}} for bad in (None, float("nan"), 1e300)),
        *({"bias": 1}, {"width": 3}),
    ],
    "rows": [{"width": 0}, {"bias": 1}, {"in": 4}],
    "sage": [{"out": 0}, {"bias": None}, {"transposed": True}],
    "layer_norm": [{"width": 0}, {"eps": -1}, {"eps": 2.0}, {"scale": 1}, {"elementwise": 1}],
    "sequence": [
        *({"stages": bad} for bad in ([], STAGES_OF_ONE, 17 * STAGES_OF_ONE, [7, 7], [{}, {}])),
        {"stages": [*STAGES_OF_ONE, {"stage": "dense", "config": 7}]},
        {"stages": [*STAGES_OF_ONE, {"stage": "rows", "config": {"width": 4, "bias": True}}]},
        {"stages": [*STAGES_OF_ONE, {"stage": "sequence", "config": {"stages": 2 * STAGES_OF_ONE}}]},
        {"stages": [*STAGES_OF_ONE, {"stage": "sage", "config": {"in": 3, "out": 3, "bias": True}}]},
    ],
    "attention_project": [
        {"heads": 0},
        {"residual": "yes"},
        {"residual": "identity"},
        {"residual_bias": True},
    ],
    "attention_finish": [{"merge": "max"}, {"width": 0}, {"after": {"name": "?"}}, {"in": 4}],
    "attention_edges": [{"heads": 0}, {"slope": None}, {"slope": float("inf")}, {"in": 1}],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_config_is_checked_field_by_field(name: str) -> None:
    STAGES.get(name)(GOOD[name])
    for change in BAD[name]:
        with pytest.raises(ConfigError, match="stage"):
            STAGES.get(name)({**GOOD[name], **change})
    for missing in GOOD[name]:
        with pytest.raises(ConfigError, match=missing):
            STAGES.get(name)({key: value for key, value in GOOD[name].items() if key != missing})


OWN = "tests.strategies.serverless.own_stage:Gate"


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("dense", OWN, "taken"),
        ("mine", "no_such_module_at_all:Gate", "cannot be imported"),
        ("mine", f"{__name__}:Missing", "cannot be imported"),
        ("mine", "os;path:Gate", "not the path of a class"),
        ("mine", "os:system", "not a subclass"),
        ("mine", f"{__name__}:close", "not a subclass"),
    ],
)
def test_only_stages_can_be_registered(name: str, stage: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_stage(name, stage)
