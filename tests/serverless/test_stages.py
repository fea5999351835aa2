"""Every stage against torch's autograd of the same layer's own mathematics, in float64."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dglx_dist.data.json_fields import Fields, Json
from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.records import Array
from dglx_dist.serverless.stages.base import (
    STAGES,
    Backward,
    Forward,
    Mask,
    Rows,
    StageShapes,
    VertexStage,
    edge_stage,
    erf,
    register_stage,
    vertex_stage,
)

from .programs import sequence

F64 = 1e-12
Model = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
ACTIVATIONS: dict[str, tuple[Mapping[str, Json], Callable[[Tensor], Tensor]]] = {
    "identity": ({"name": "identity"}, lambda z: z),
    "relu": ({"name": "relu"}, functional.relu),
    "leaky_relu": ({"name": "leaky_relu", "slope": 0.2}, lambda z: functional.leaky_relu(z, 0.2)),
    "elu": ({"name": "elu", "alpha": 1.3}, lambda z: functional.elu(z, 1.3)),
    "tanh": ({"name": "tanh"}, torch.tanh),
    "sigmoid": ({"name": "sigmoid"}, torch.sigmoid),
    "gelu": ({"name": "gelu"}, functional.gelu),
    "gelu_tanh": ({"name": "gelu_tanh"}, lambda z: functional.gelu(z, approximate="tanh")),
}
RELU, ELU = {"name": "relu"}, {"name": "elu", "alpha": 1.0}


def torch_heads(rows: Tensor, heads: int, bias: Tensor | None, merge: str, residual: Tensor | None) -> Tensor:
    """What GATConv does behind its sum, with elu inside, and relu behind the merge."""
    out = rows.view(-1, heads, rows.shape[1] // heads)
    out = out if residual is None else out + residual.view_as(out)
    out = out if bias is None else out + bias.view(1, heads, -1)
    out = functional.elu(out)
    return functional.relu(out.mean(1) if merge == "mean" else out.flatten(1))


def torch_project(h: Tensor, matrix: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """GATConv up to its logits."""
    z = functional.linear(h, matrix).view(-1, *left.shape[1:])
    return z.flatten(1), (z * left).sum(-1), (z * right).sum(-1)


def heads_config(merge: str, bias: bool = True, residual: bool = False) -> dict[str, Json]:
    return {
        **{"heads": 2, "width": 3, "merge": merge, "bias": bias, "residual": residual},
        **{"activation": ELU, "after": RELU},
    }


def cases() -> dict[str, tuple[str, dict[str, Json], Model]]:
    """Name to stage, config and torch's way of (weights, inputs) -> outputs."""
    found: dict[str, tuple[str, dict[str, Json], Model]] = {}
    for name, (config, act) in ACTIVATIONS.items():
        sizes: dict[str, Json] = {"in": 4, "out": 3, "bias": True, "activation": config}
        found[f"dense {name}"] = ("dense", sizes, lambda w, x, act=act: (act(x[0] @ w[0] + w[1]),))
    relu = {"in": 4, "out": 3, "bias": False, "activation": RELU}
    found |= {
        "dense no bias": ("dense", relu, lambda w, x: (functional.relu(x[0] @ w[0]),)),
        "dense transposed": (
            "dense",
            {**relu, "transposed": True, "bias": True},
            lambda w, x: (functional.relu(functional.linear(x[0], w[0], w[1])),),
        ),
        "rows": (
            "rows",
            {"width": 4, "bias": True, "activation": ELU},
            lambda w, x: (functional.elu(x[0] + w[0]),),
        ),
        "rows as they are": ("rows", {"width": 4, "bias": False}, lambda w, x: (x[0],)),
        "sage": (
            "sage",
            {**relu, "bias": True},
            lambda w, x: (
                functional.relu(functional.linear(x[1], w[0], w[2]) + functional.linear(x[0], w[1])),
            ),
        ),
        "sage no bias": (
            "sage",
            {**relu, "activation": None},
            lambda w, x: (functional.linear(x[1], w[0]) + functional.linear(x[0], w[1]),),
        ),
        "project": (
            "attention_project",
            {"in": 5, "heads": 2, "width": 3},
            lambda w, x: torch_project(x[0], *w),
        ),
        "finish flat and project": (
            "sequence",
            sequence(
                ("attention_finish", heads_config("flatten")),
                ("attention_project", {"in": 6, "heads": 3, "width": 2, "residual": "identity"}),
            ),
            lambda w, x: with_own(torch_heads(x[0], 2, w[0], "flatten", None), w[1:4], None, None),
        ),
        "finish with a residual and project": (
            "sequence",
            sequence(
                ("attention_finish", heads_config("mean", bias=False, residual=True)),
                (
                    "attention_project",
                    {"in": 3, "heads": 2, "width": 4, "residual": "linear", "residual_bias": True},
                ),
            ),
            lambda w, x: with_own(torch_heads(x[0], 2, None, "mean", x[1]), w[:3], w[3], w[4]),
        ),
        "norm": (
            "layer_norm",
            {"width": 4, "eps": 1e-5, "scale": True, "bias": True, "activation": ELU},
            lambda w, x: (functional.elu(functional.layer_norm(x[0], (4,), w[0], w[1], 1e-5)),),
        ),
        "norm without weights": (
            "layer_norm",
            {"width": 4, "eps": 0.1, "scale": False, "bias": False},
            lambda w, x: (functional.layer_norm(x[0], (4,), eps=0.1),),
        ),
        "sage, norm, dense": (
            "sequence",
            sequence(
                ("sage", {**relu, "activation": None}),
                ("layer_norm", {"width": 3, "eps": 1e-5, "scale": True, "bias": False, "activation": RELU}),
                ("dense", {"in": 3, "out": 2, "bias": True}),
            ),
            lambda w, x: (
                functional.relu(
                    functional.layer_norm(
                        functional.linear(x[1], w[0]) + functional.linear(x[0], w[1]), (3,), w[2]
                    )
                )
                @ w[3]
                + w[4],
            ),
        ),
        "finish flat": (
            "attention_finish",
            heads_config("flatten"),
            lambda w, x: (torch_heads(x[0], 2, w[0], "flatten", None),),
        ),
        "finish mean with a residual": (
            "attention_finish",
            heads_config("mean", residual=True),
            lambda w, x: (torch_heads(x[0], 2, w[0], "mean", x[1]),),
        ),
    }
    return found


def with_own(
    h: Tensor, w: Sequence[Tensor], matrix: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    return (*torch_project(h, *w), h if matrix is None else functional.linear(h, matrix, bias))


def draw(
    stage: VertexStage, rows: int, dtype: str = "float64"
) -> tuple[list[Array], list[Array], list[Array]]:
    """Weights, inputs and gradients of the outputs."""
    rng = np.random.default_rng(rows)

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    return (
        [normal(*shape) for shape in stage.shapes.weights.values()],
        [normal(rows, width) for width in stage.shapes.inputs],
        [normal(rows, width) for width in stage.shapes.outputs],
    )


def torch_answer(
    model: Model, weights: list[Array], inputs: list[Array], gradients: list[Array]
) -> tuple[list[Array], list[Array], list[Array]]:
    """Outputs, and gradients of inputs and weights."""
    w = [torch.tensor(weight, requires_grad=True) for weight in weights]
    x = [torch.tensor(given, requires_grad=True) for given in inputs]
    outputs = model(w, x)
    found = torch.autograd.grad(outputs, [*x, *w], [torch.tensor(g) for g in gradients])
    arrays = [gradient.numpy() for gradient in found]
    return [out.detach().numpy() for out in outputs], arrays[: len(x)], arrays[len(x) :]


@pytest.mark.parametrize("case", cases())
def test_a_vertex_stage_is_what_torch_computes(case: str) -> None:
    name, config, model = cases()[case]
    stage = vertex_stage(name, config)
    for rows in (0, 1, 7):
        weights, inputs, gradients = draw(stage, rows)
        before = [array.copy() for array in (*weights, *inputs, *gradients)]
        forward = stage.forward(weights, inputs)
        backward = stage.backward(weights, inputs, gradients)
        outputs, input_gradients, weight_gradients = torch_answer(model, weights, inputs, gradients)
        close(forward.outputs, outputs)
        close(backward.inputs, input_gradients)
        close(backward.weights, weight_gradients)
        assert [out.shape for out in forward.outputs] == [(rows, width) for width in stage.shapes.outputs]
        assert [z.shape for z in forward.saved] == [(rows, width) for width in stage.shapes.saved]
        # What was saved gives the very same bits as what is computed again, and nothing given was written to.
        again = stage.backward(weights, inputs, gradients, saved=forward.saved)
        assert all(map(np.array_equal, again.inputs, backward.inputs))
        assert all(map(np.array_equal, again.weights, backward.weights))
        assert all(map(np.array_equal, (*weights, *inputs, *gradients), before))


@pytest.mark.parametrize("case", cases())
def test_a_vertex_stage_keeps_float32_and_leaves_out_what_is_not_wanted(case: str) -> None:
    name, config, model = cases()[case]
    stage = vertex_stage(name, config)
    weights, inputs, gradients = draw(stage, 7, "float32")
    forward = stage.forward(weights, inputs)
    backward = stage.backward(weights, inputs, gradients, wanted=[False] * len(inputs))
    assert backward.inputs == (None,) * len(inputs)
    arrays = [*forward.outputs, *forward.saved, *backward.weights]
    assert {str(array.dtype) for array in arrays} == {"float32"}
    _, _, weight_gradients = torch_answer(model, weights, inputs, gradients)
    close(backward.weights, weight_gradients, 2e-5)


def close(found: Sequence[Array | None], wanted: Sequence[Array], tolerance: float = F64) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_derivatives_at_kinks_and_far_out_are_torchs() -> None:
    z = np.array([[-800.0, -40.0, -5.0, -1e-9, 0.0, 1e-9, 5.0, 40.0, 800.0, -2.03125]])
    eye, one = np.eye(10), np.ones((1, 10))
    more = dict(ACTIVATIONS)
    for slope in (-0.5, 1.0, 1.7):
        config = {"name": "leaky_relu", "slope": slope}
        more[f"leaky {slope}"] = (config, lambda z, slope=slope: functional.leaky_relu(z, slope))
    more["elu 1"] = ({"name": "elu", "alpha": 1.0}, functional.elu)
    for config, act in more.values():
        stage = vertex_stage("dense", {"in": 10, "out": 10, "bias": False, "activation": config})
        (h,), _ = stage.forward([eye], [z])
        (slope,), _ = stage.backward([eye], [z], [one])
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


def test_erf_is_torchs_everywhere() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20011), [np.inf, -np.inf, 0.0, 1e-300]])
    np.testing.assert_allclose(erf(x), torch.erf(torch.tensor(x)).numpy(), rtol=0, atol=4e-16)
    assert np.isnan(erf(np.array([np.nan]))).all()
    np.testing.assert_allclose(
        erf(x.astype("float32")), torch.erf(torch.tensor(x).float()), rtol=0, atol=2e-7
    )


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


class Square(VertexStage):
    """A user's own: h = (x w)^2 by column."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        width = Fields(config, "stage square").whole("width", 1, 99)
        self.shapes = StageShapes({"w": (width,)}, (width,), (width,))

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        return Forward(((inputs[0] * weights[0]) ** 2,), ())

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        slope = 2 * inputs[0] * weights[0] * gradients[0]
        return Backward((slope * weights[0],), ((slope * inputs[0]).sum(0),))


def test_a_users_own_stage_is_run_once_it_is_registered() -> None:
    path = f"{__name__}:Square"
    for name in (path, "test_square"):
        with pytest.raises(UnknownNameError, match="there is no stage"):
            vertex_stage(name, {"width": 2})
    register_stage("test_square", path)
    register_stage("test_square", Square)
    stage = vertex_stage("test_square", {"width": 2})
    assert isinstance(stage, Square)
    weights, inputs, gradients = draw(stage, 5)
    _, input_gradients, weight_gradients = torch_answer(
        lambda w, x: ((x[0] * w[0]) ** 2,), weights, inputs, gradients
    )
    found = stage.backward(weights, inputs, gradients)
    close(found.inputs, input_gradients)
    close(found.weights, weight_gradients)


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("dense", f"{__name__}:Square", "taken"),
        ("mine", "no_such_module_at_all:Square", "cannot be imported"),
        ("mine", f"{__name__}:Missing", "cannot be imported"),
        ("mine", "os;path:Square", "not the path of a class"),
        ("mine", "os:system", "not a subclass"),
        ("mine", f"{__name__}:close", "not a subclass"),
    ],
)
def test_only_stages_can_be_registered(name: str, stage: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_stage(name, stage)
