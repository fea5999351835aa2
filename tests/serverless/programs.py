"""Small programs of three models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglx_dist.data.json_fields import Json
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.parameter_server import ParameterServer
from dglx_dist.strategies.serverless.program import Drop, Edge, Gather, Program, ProgramStep, Scatter, Slot, Vertex
from dglx_dist.strategies.serverless.stages.base import VertexStage

RELU: Json = {"name": "relu"}
ELU: Json = {"name": "elu", "alpha": 1.0}


def slot(text: str) -> Slot:
    name, _, width = text.partition(":")
    return Slot(name, int(width))


def av(name: str, stage: str, config: Json, inputs: str, outputs: str, weights: str = "") -> Vertex:
    return Vertex(
        name=name,
        stage=stage,
        config=config,  # type: ignore[arg-type]  # an object
        inputs=tuple(inputs.split()),
        outputs=tuple(map(slot, outputs.split())),
        weights=tuple(weights.split()),
    )


def ga(name: str, source: str, output: str, edges: str = "fixed:0") -> Gather:
    return Gather(name=name, source=source, output=slot(output), edges=edges)


def ae(name: str, sources: str, targets: str, output: str) -> Edge:
    config: Json = {"heads": slot(output).width, "slope": 0.2}
    stage = "attention_edges"
    return Edge(name=name, stage=stage, config=config, sources=sources, targets=targets, output=slot(output))


def make(
    *steps: ProgramStep, features: int = 5, classes: int = 3, num_train: int = 6, dtype: str = "float64"
) -> Program:
    return Program(steps=steps, features=features, classes=classes, num_train=num_train, dtype=dtype)


def gcn(widths: tuple[int, ...] = (5, 4, 3), num_train: int = 6) -> Program:
    steps: list[ProgramStep] = []
    for layer in range(1, len(widths)):
        wide, narrow, last = widths[layer - 1], widths[layer], layer == len(widths) - 1
        config: dict[str, Json] = {"in": wide, "out": narrow, "bias": True}
        config |= {} if last else {"activation": RELU}
        weights = f"layers.{layer}.weight layers.{layer}.bias"
        steps += [
            ga(f"GA{layer}", f"h{layer - 1}" if layer > 1 else "x", f"a{layer}:{wide}"),
            av(f"AV{layer}", "dense", config, f"a{layer}", f"h{layer}:{narrow}", weights),
        ]
        steps += [] if last else [Scatter(name=f"SC{layer}", slots=(f"h{layer}",))]
    return make(*steps, features=widths[0], classes=widths[-1], num_train=num_train)


def sage() -> Program:
    first: Json = {"in": 5, "out": 4, "bias": True, "activation": RELU}
    weights = "layers.{0}.fc_self.weight layers.{0}.fc_neigh.weight layers.{0}.fc_self.bias"
    return make(
        ga("GA1", "x", "a1:5"),
        av("AV1", "sage", first, "a1 x", "h1:4", weights.format(1)),
        Scatter(name="SC1", slots=("h1",)),
        ga("GA2", "h1", "a2:4"),
        av("AV2", "sage", {"in": 4, "out": 3, "bias": True}, "a2 h1", "h2:3", weights.format(2)),
    )


def gat() -> Program:
    """GATConv(5, 2, 3 heads), elu, flat; GATConv(6, 3, 4 heads, residual), averaged."""
    first: Json = {"heads": 3, "width": 2, "bias": True, "merge": "flatten", "activation": ELU}
    second: Json = {"in": 6, "heads": 4, "width": 3, "residual": "linear", "residual_bias": True}
    both = sequence(("attention_finish", first), ("attention_project", second))
    finish: Json = {"heads": 4, "width": 3, "bias": False, "merge": "mean", "residual": True}
    own = "layers.{0}.fc.weight layers.{0}.attn_l layers.{0}.attn_r"
    two = f"layers.1.bias {own.format(2)} layers.2.res_fc.weight layers.2.res_fc.bias"
    return make(
        av(
            "AV1",
            "attention_project",
            {"in": 5, "heads": 3, "width": 2},
            "x",
            "z1:6 el1:3 er1:3",
            own.format(1),
        ),
        Scatter(name="SC1", slots=("z1", "el1")),
        ae("AE1", "el1", "er1", "att1:3"),
        ga("GA1", "z1", "s1:6", "att1"),
        av("AV2", "sequence", both, "s1", "z2:12 el2:4 er2:4 r2:12", two),
        Scatter(name="SC2", slots=("z2", "el2")),
        ae("AE2", "el2", "er2", "att2:4"),
        ga("GA2", "z2", "s2:12", "att2"),
        av("AV3", "attention_finish", finish, "s2 r2", "h:3"),
    )


def sequence(*stages: tuple[str, Json]) -> dict[str, Json]:
    return {"stages": [{"stage": name, "config": config} for name, config in stages]}


def dropping() -> Program:
    """GraphConv(5, 4), LayerNorm, relu; GATConv(4, 3, 2 heads), elu, flat; GraphConv(6, 3); all drop."""
    dense: Json = {"in": 5, "out": 4, "bias": True}
    norm: Json = {"width": 4, "eps": 1e-5, "scale": True, "bias": True, "activation": RELU}
    first = sequence(("dense", dense), ("layer_norm", norm))
    project: Json = {"in": 4, "heads": 2, "width": 3}
    finish: Json = {"heads": 2, "width": 3, "bias": True, "merge": "flatten", "activation": ELU}
    return make(
        Drop(name="DR1", source="x", output=slot("d1:5"), probability=0.3, call=0),
        ga("GA1", "d1", "a1:5"),
        av("AV1", "sequence", first, "a1", "h1:4", "1.weight 1.bias norm.weight norm.bias"),
        Drop(name="DR2", source="h1", output=slot("d2:4"), probability=0.5, call=1),
        av("AV2", "attention_project", project, "d2", "z2:6 el2:2 er2:2", "2.fc.weight 2.attn_l 2.attn_r"),
        Scatter(name="SC1", slots=("z2", "el2")),
        ae("AE1", "el2", "er2", "att2:2"),
        Drop(name="DR3", source="att2", output=slot("d3:2"), probability=0.4, call=2),
        ga("GA2", "z2", "s2:6", "d3"),
        av("AV3", "attention_finish", finish, "s2", "h3:6", "2.bias"),
        Drop(name="DR4", source="h3", output=slot("d4:6"), probability=0.5, call=3),
        Scatter(name="SC2", slots=("d4",)),
        ga("GA3", "d4", "a4:6"),
        av("AV4", "dense", {"in": 6, "out": 3, "bias": True}, "a4", "h4:3", "3.weight 3.bias"),
    )


def linear() -> Program:
    """Three Vertex steps: 3 to 2 columns with the weights w and b, none, 2 to 2 columns with the weight v."""
    return make(
        av("AV0", "dense", {"in": 3, "out": 2, "bias": True}, "x", "h0:2", "w b"),
        av("AV1", "rows", {"width": 2, "bias": False}, "h0", "h1:2"),
        av("AV2", "dense", {"in": 2, "out": 2, "bias": False}, "h1", "h2:2", "v"),
        features=3,
        classes=2,
    )


LINEAR_STEPS = {0: ("w", "b"), 1: (), 2: ("v",)}
"""Steps of :func:`linear` and their weights."""


def linear_weights() -> list[Array]:
    draw = np.random.default_rng(99)
    return [draw.standard_normal(shape) for shape in linear().weight_shapes.values()]


@functools.cache
def linear_gradients(interval: int, epoch: int, step: int) -> list[Array]:
    draw, shapes = np.random.default_rng([interval, epoch, step]), linear().weight_shapes
    return [draw.standard_normal(shapes[name]) for name in LINEAR_STEPS[step]]


class TorchStage(torch.autograd.Function):
    """A vertex stage between steps that torch differentiates."""

    @staticmethod
    def forward(ctx: Any, stage: VertexStage, num_weights: int, *given: Tensor) -> tuple[Tensor, ...]:
        arrays = [tensor.detach().numpy() for tensor in given]
        ctx.stage, ctx.given = stage, (arrays[:num_weights], arrays[num_weights:])
        return tuple(map(torch.tensor, stage.forward(*ctx.given).outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        result = ctx.stage.backward(*ctx.given, [gradient.contiguous().numpy() for gradient in gradients])
        return None, None, *map(torch.tensor, (*result.weights, *result.inputs))


def exchange(servers: Sequence[ParameterServer]) -> int | None:
    """Exchange sums between the servers of one process and update once; None while gradients are missing."""
    ready = [server.own_sums() for server in servers]
    results = [item for item in ready if item is not None]
    if len(results) < len(servers):
        return None
    for server in servers:
        for second, (epoch, vector) in zip(servers, results, strict=True):
            if second is not server:
                server.receive_sums(second.index, epoch, vector)
    updates = [server.advance() for server in servers]
    return updates[0]
