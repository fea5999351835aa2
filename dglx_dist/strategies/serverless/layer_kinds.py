"""Layers that become program steps: convolutions of ``dgl.nn``, ``nn.Linear``, and declared stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, final

import numpy as np
import torch
from dgl.nn import GATConv
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import DeclaredStage, Declares
from dglx_dist.layers.convolutions import CONVOLUTIONS
from dglx_dist.layers.dropout import NodeDropout
from dglx_dist.records import Array
from dglx_dist.serverless.json_fields import Json
from dglx_dist.serverless.program import (
    FEATURES,
    FIXED,
    MAX_WEIGHTS,
    Drop,
    Edge,
    Gather,
    Scatter,
    Slot,
    Step,
    Vertex,
)
from dglx_dist.serverless.stages.base import VertexStage, vertex_stage
from dglx_dist.serverless.stages.conv import MAX_STAGES
from dglx_dist.strategies.serverless.probe import IDENTITY, RowFunction, probe_block

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


Power: TypeAlias = Literal["one", "root", "whole"]
"""Divides by nothing, by the square root of a degree, or by the degree."""

_EXPONENT = {"one": 0.0, "root": -0.5, "whole": -1.0}


@dataclass(frozen=True, kw_only=True)
class EdgeFactor:
    """The weight of the edge from u to v; a degree of 0 counts as 1."""

    target: Power = "one"
    """By the in-degree of v."""
    source: Power = "one"
    """By the out-degree of u."""
    column: str | None = None
    """Edge data that multiplies the weight."""

    @property
    def is_one(self) -> bool:
        return self == EdgeFactor()


FACTOR_OF_NORM = {
    "sum": EdgeFactor(),
    "mean": EdgeFactor(target="whole"),
    "left": EdgeFactor(source="whole"),
    "both": EdgeFactor(target="root", source="root"),
}
"""By the names of ``DeclaredStage.around``."""


def edge_values(factor: EdgeFactor, g: DistGraph, nodes: Array, dtype: np.dtype[np.floating]) -> Array:
    """Return the weights of the in-edges of ``nodes``, in the graph's order.

    Asks other servers for degrees of their nodes and for edge data; not collective.

    Args:
        g: Graph of one edge type.
        nodes: (K,) int64 ids of this server.
        dtype: Of the result.

    Returns:
        (E,): the in-edges of the first node, then of the second, and so on.

    Raises:
        ConfigError: the edge data is not one number per edge.
    """
    (etype,) = g.canonical_etypes
    edges = g.structure(etype).ask("in_edges", nodes)
    degrees = np.diff(edges.indptr)
    values = np.repeat(power_of(degrees, factor.target), degrees)
    if factor.source != "one":
        sources, place = np.unique(edges.sources, return_inverse=True)
        out_degrees = g.out_degrees(torch.from_numpy(sources)).numpy()
        values *= power_of(out_degrees, factor.source)[place]
    if factor.column is not None:
        values *= _column(g, factor.column, edges.edge_ids)
    return values.astype(dtype)


def power_of(degrees: Array, power: Power) -> Array:
    """Return (n,) float64 factors of (n,) degrees."""
    found: Array = np.power(np.maximum(degrees, 1).astype(np.float64), _EXPONENT[power])
    return found


def _column(g: DistGraph, name: str, edge_ids: Array) -> Array:
    rows = g.edata[name][torch.from_numpy(edge_ids)].to(torch.float64).numpy()
    if rows.size != len(edge_ids):
        raise ConfigError(
            f"the edge data {name!r} has {rows.shape[1:]} numbers per edge, but a layer takes one; name a "
            "column of one number per edge"
        )
    return rows.reshape(-1)


_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}


def check_declared(name: str, module: Any, declared: DeclaredStage, stage: VertexStage) -> None:
    """Compare a module with its declared stage, by values and gradients, on a few random rows.

    Args:
        module: Called as ``module(block, h)``; not changed.

    Raises:
        ConfigError: they differ; the message says in what.
    """
    generator = torch.Generator().manual_seed(3)
    weights = [module.get_parameter(weight) for weight in declared.weights]
    _check_shapes(name, declared, weights, stage)
    dtype = weights[0].dtype if weights else torch.get_default_dtype()
    block = probe_block(generator, dtype, {})
    rows = torch.randn(
        block.num_src_nodes(), stage.input_widths[0], dtype=dtype, generator=generator
    ).requires_grad_()
    out = module(block, rows)
    cotangent = torch.randn(out.shape, dtype=dtype, generator=generator)
    trained = [rows, *(weight for weight in weights if weight.requires_grad)]
    expected = torch.autograd.grad(out, trained, cotangent, allow_unused=True)

    inputs, back = _inputs(block, rows.detach().numpy(), declared)
    own = [weight.detach().numpy() for weight in weights]
    _compare(name, declared, "result", out.detach(), stage.forward(own, inputs).outputs[0])
    found = stage.backward(own, inputs, [cotangent.numpy()])
    _compare(name, declared, "gradient of its input", expected[0], back(found.inputs))
    wanted = iter(expected[1:])
    for weight_name, weight, gradient in zip(declared.weights, weights, found.weights, strict=True):
        if weight.requires_grad:
            _compare(name, declared, f"gradient of {weight_name!r}", next(wanted), gradient)


def _inputs(
    block: Any, rows: Array, declared: DeclaredStage
) -> tuple[list[Array], Callable[[Sequence[Array | None]], Array]]:
    """Return the stage's inputs, and a function that sums their gradients to the gradient of ``rows``."""
    sources, targets = (ends.numpy() for ends in block.edges())
    number = len(rows)
    over_edges = np.zeros((number, number), dtype=rows.dtype)
    if declared.around is not None:
        factor = FACTOR_OF_NORM[declared.around]
        into = power_of(np.bincount(targets, minlength=number), factor.target)
        out_of = power_of(np.bincount(sources, minlength=number), factor.source)
        np.add.at(over_edges, (targets, sources), (into[targets] * out_of[sources]).astype(rows.dtype))
    inputs = ([over_edges @ rows] if declared.around is not None else []) + ([rows] if declared.own else [])

    def back(gradients: Sequence[Array | None]) -> Array:
        total: Array = np.zeros_like(rows)
        for index, gradient in enumerate(gradients):
            assert gradient is not None
            is_around = index == 0 and declared.around is not None
            total = total + (over_edges.T @ gradient if is_around else gradient)
        return total

    return inputs, back


def _check_shapes(
    name: str, declared: DeclaredStage, weights: Sequence[nn.Parameter], stage: VertexStage
) -> None:
    found, wanted = [tuple(weight.shape) for weight in weights], list(stage.weight_shapes.values())
    if found != wanted:
        raise ConfigError(
            f"layer {name!r} declares weights {list(declared.weights)} of shapes {found}, but its stage "
            f"{declared.stage!r} has {stage.weight_shapes}; name them in this order, with these shapes"
        )


def _compare(name: str, declared: DeclaredStage, what: str, module: Tensor | None, stage: Array) -> None:
    expected = np.zeros_like(stage) if module is None else module.numpy()
    largest = float(np.abs(expected - stage).max(initial=0.0)) if expected.shape == stage.shape else np.inf
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    tolerance = _TOLERANCE[torch.float64 if expected.dtype == np.float64 else torch.float32]
    if not largest <= tolerance * scale:
        raise ConfigError(
            f"layer {name!r} and the stage {declared.stage!r} that it declares differ in the {what}, by up "
            f"to {largest:.3g} (shapes {expected.shape} and {stage.shape}); make both compute the same"
        )


_SMALL_STAGES = ("attention_finish", "layer_norm", "rows")
"""Stages without products of matrices: they run in the task of the Vertex step before or after them."""


@final
class StepsBuilder:
    """Builds the steps of a program, layer by layer.

    Args:
        names: id() of each parameter of the model to its name.
        features: Columns of x.
    """

    def __init__(self, names: Mapping[int, str], features: int) -> None:
        self.steps: list[Step] = []
        self.factors: dict[str, EdgeFactor] = {}
        self._names, self._taken = names, set[str]()
        self._output = Slot(FEATURES, features)
        self._with_ghosts = {FEATURES}
        self._counts: dict[str, int] = {}
        self._num_drops = 0

    def rows(self) -> Slot:
        """Return the output slot of the previous layer."""
        return self._output

    def finish(self) -> int:
        """End the program with a Vertex step; return the number of classes."""
        if not isinstance(self.steps[-1], Vertex):
            width = self._output.width
            self.vertex("rows", {"width": width, "bias": False}, [self._output.name], {"h": width}, [])
        return self._output.width

    def drop(self, probability: float) -> None:
        """Drop entries of the previous layer's rows, as the model's next dropout in a forward pass does."""
        if probability:
            self._output = self._drop(self._output, probability)

    def _drop(self, source: Slot, probability: float) -> Slot:
        name = self._name("DR")
        output = Slot("d" + name[2:], source.width)
        self.steps.append(
            Drop(name=name, source=source.name, output=output, probability=probability, call=self._num_drops)
        )
        if source.name == FEATURES:
            self._with_ghosts.add(output.name)
        self._num_drops += 1
        return output

    def gather(self, factor: EdgeFactor) -> Slot:
        """Add the sum over in-edges of the previous layer's rows; return the slot of the sums."""
        source = self.rows()
        self.scatter(source.name)
        name = self._name("GA")
        output = Slot("a" + name[2:], source.width)
        self.steps.append(Gather(name=name, source=source.name, output=output, edges=self._edges(factor)))
        return output

    def vertex(
        self,
        stage: str,
        config: Mapping[str, Json],
        inputs: Sequence[str],
        widths: Mapping[str, int],
        weights: Sequence[Tensor],
    ) -> str:
        """Add a stage and return its number; the next layer reads its first output.

        Args:
            widths: Of each output, by what is put before the number to name its slot.
        """
        names = [self._weight(weight) for weight in weights]
        before = self._joined_step(stage, inputs, len(names))
        if before is None:
            name = self._name("AV")
        else:
            self.steps.pop()
            name, inputs, names = before.name, before.inputs, [*before.weights, *names]
            config = {"stages": [*_stages_in(before), {"stage": stage, "config": dict(config)}]}
            stage = "sequence"
        slots = tuple(Slot(kind + name[2:], width) for kind, width in widths.items())
        self._output = slots[0]
        self.steps.append(
            Vertex(
                name=name,
                stage=stage,
                config=dict(config),
                inputs=tuple(inputs),
                outputs=slots,
                weights=tuple(names),
            )
        )
        return name[2:]

    def _joined_step(self, stage: str, inputs: Sequence[str], num_weights: int) -> Vertex | None:
        # The step before, if one task computes both.
        before = self.steps[-1] if self.steps else None
        if not isinstance(before, Vertex) or [slot.name for slot in before.outputs] != list(inputs):
            return None
        stages = _stages_in(before)
        is_small = stage in _SMALL_STAGES or stages[-1]["stage"] in _SMALL_STAGES
        fits = len(stages) < MAX_STAGES and len(before.weights) + num_weights <= MAX_WEIGHTS
        return before if is_small and fits else None

    def attention(self, number: str, widths: Mapping[str, int], slope: float, dropout: float) -> str:
        """Add attention and weighted sum after a stage ``attention_project``; return the slot of the sums.

        Args:
            number: Of that stage.
            widths: Of its outputs ``z``, ``el`` and ``er``.
            slope: Of the leaky ReLU.
            dropout: Probability with which the attention of an edge and head is dropped.
        """
        self.scatter(f"z{number}", f"el{number}")
        attention = Slot(f"att{number}", widths["el"])
        self.steps.append(
            Edge(
                name=self._name("AE"),
                stage="attention_edges",
                config={"heads": widths["el"], "slope": slope},
                sources=f"el{number}",
                targets=f"er{number}",
                output=attention,
            )
        )
        if dropout:
            attention = self._drop(attention, dropout)
        sums = Slot(f"s{number}", widths["z"])
        self.steps.append(
            Gather(name=self._name("GA"), source=f"z{number}", output=sums, edges=attention.name)
        )
        return sums.name

    def scatter(self, *slots: str) -> None:
        """Send boundary rows of those slots that have no ghosts yet."""
        new = tuple(slot for slot in slots if slot not in self._with_ghosts)
        if new:
            self._with_ghosts.update(new)
            self.steps.append(Scatter(name=self._name("SC"), slots=new))

    def _weight(self, parameter: Tensor) -> str:
        name = self._names[id(parameter)]
        if name in self._taken:
            raise ConfigError(
                f"the parameter {name!r} belongs to two layers, but workers send its gradient with one step "
                "only; give each layer its own, or use strategy='data_parallel'"
            )
        self._taken.add(name)
        return name

    def _edges(self, factor: EdgeFactor) -> str | None:
        if factor.is_one:
            return None
        for name, known in self.factors.items():
            if known == factor:
                return name
        name = f"{FIXED}{len(self.factors)}"
        self.factors[name] = factor
        return name

    def _name(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}{self._counts[kind]}"


def _stages_in(step: Vertex) -> list[dict[str, Any]]:
    if step.stage == "sequence":
        stages: Any = step.config["stages"]
        return list(stages)
    return [{"stage": step.stage, "config": dict(step.config)}]


Function: TypeAlias = Callable[[Tensor], Tensor]


class Layer(ABC):
    """A module of the model that becomes steps.

    Args:
        width: Columns of its input; None: any.
        row_shape: Shape of one row of its result before ``own_function``; None: that of its input.

    Raises:
        ConfigError: its configuration has no stage.
    """

    takes_block = True
    dropouts: tuple[str, ...] = ()
    """Dropouts inside the module that become steps, by their names in it."""
    own_function: Function | None = None
    """The activation that the module applies to its result."""
    inputs_first: tuple[Tensor, ...] = ()
    """Weights of shape (inputs, outputs); torch has them the other way round."""

    def __init__(self, name: str, module: Any, width: int | None, row_shape: tuple[int, ...] | None) -> None:
        self.name, self.module, self.width, self.row_shape = name, module, width, row_shape
        for inner, one in module.named_modules():
            if is_dropping(one) and inner not in self.dropouts:
                self.refuse(f"drops in {inner!r} with probability {one.p}, which no stage does; set it to 0")

    @abstractmethod
    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """Add its steps.

        Args:
            builder: Receives the steps.
            then: Function of its result, ``own_function`` included, before the next layer.
            edge_column: Edge data that weighs its messages.
        """

    @property
    def wants_in_edges(self) -> bool:
        """True if it raises for a node without in-edges, as DGL's layers do by default."""
        return getattr(self.module, "_allow_zero_in_degree", True) is False

    def refuse(self, reason: str) -> NoReturn:
        kind = type(self.module).__name__
        raise ConfigError(f"layer {self.name!r}, {kind}, {reason}; or use strategy='data_parallel'")

    def _check_parameters(self, *used: Tensor | None) -> None:
        # Parameters that no stage knows, as of an activation with weights, would not be trained.
        known = {id(parameter) for parameter in used}
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in known:
                self.refuse(f"has a parameter {name!r} that no stage knows; remove it")


@final
class GatLayer(Layer):
    """``dgl.nn.GATConv``, with every kind of residual."""

    dropouts = ("feat_drop", "attn_drop")

    def __init__(self, name: str, module: Any) -> None:
        self._shape = (int(module._num_heads), int(module._out_feats))
        super().__init__(name, module, int(module._in_src_feats), self._shape)
        self._linear = module.res_fc if isinstance(module.res_fc, nn.Linear) else None
        if "fc" not in module._modules:
            self.refuse("has one width for sources and another for destinations; give it one")
        self.own_function = module.activation
        linear = (None, None) if self._linear is None else (self._linear.weight, self._linear.bias)
        self._check_parameters(module.fc.weight, module.attn_l, module.attn_r, module.bias, *linear)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        # AV, SC, AE, GA, AV.
        module, linear = self.module, self._linear
        if edge_column is not None:
            self.refuse("is given edge weights, which attention steps do not support; leave them out")
        (heads, width), bias = self._shape, module.bias
        residual = "none" if module.res_fc is None else "identity" if linear is None else "linear"
        config: dict[str, Json] = {"in": self.width, "heads": heads, "width": width, "residual": residual}
        config["residual_bias"] = linear is not None and linear.bias is not None
        weights = [module.fc.weight, module.attn_l, module.attn_r]
        weights += [] if linear is None else [linear.weight]
        weights += [] if linear is None or linear.bias is None else [linear.bias]
        widths = {"z": heads * width, "el": heads, "er": heads}
        widths |= {} if module.res_fc is None else {"r": heads * width}
        builder.drop(module.feat_drop.p)
        number = builder.vertex("attention_project", config, [builder.rows().name], widths, weights)
        sums = builder.attention(number, widths, module.leaky_relu.negative_slope, module.attn_drop.p)
        finish: dict[str, Json] = {
            "heads": heads,
            "width": width,
            "bias": bias is not None,
            "merge": then.merge,
            "residual": "r" in widths,
            "activation": then.inside.json(),
            "after": then.after.json(),
        }
        inputs = [sums, f"r{number}"] if "r" in widths else [sums]
        merged = width if then.merge == "mean" else heads * width
        builder.vertex("attention_finish", finish, inputs, {"h": merged}, [] if bias is None else [bias])


@final
class LinearLayer(Layer):
    """``nn.Linear`` on rows."""

    takes_block = False

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module, int(module.in_features), (int(module.out_features),))

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        bias, out = self.module.bias, int(self.module.out_features)
        config: dict[str, Json] = {"in": self.width, "out": out, "bias": bias is not None, "transposed": True}
        config["activation"] = then.activation.json()
        weights = [self.module.weight] if bias is None else [self.module.weight, bias]
        builder.vertex("dense", config, [builder.rows().name], {"h": out}, weights)


@final
class NormLayer(Layer):
    """``nn.LayerNorm`` over the columns of rows."""

    takes_block = False

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module, int(module.normalized_shape[-1]), (int(module.normalized_shape[-1]),))
        if len(module.normalized_shape) != 1:
            self.refuse(f"is over {len(module.normalized_shape)} dimensions; give it one, the columns")

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        weight, bias, width = self.module.weight, self.module.bias, builder.rows().width
        config: dict[str, Json] = {"width": width, "eps": self.module.eps, "scale": weight is not None}
        config |= {"bias": bias is not None, "activation": then.activation.json()}
        weights = [one for one in (weight, bias) if one is not None]
        builder.vertex("layer_norm", config, [builder.rows().name], {"h": width}, weights)


@final
class DropoutLayer(Layer):
    """``nn.Dropout`` on rows, which may be called several times."""

    takes_block = False
    dropouts = ("",)

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module, None, None)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        builder.drop(self.module.p)
        if then.activation != IDENTITY:
            rows = builder.rows()
            config: dict[str, Json] = {"width": rows.width, "bias": False}
            config["activation"] = then.activation.json()
            builder.vertex("rows", config, [rows.name], {"h": rows.width}, [])


@final
class DeclaredLayer(Layer):
    """A module that declares its stage, or whose stage ``layers.convolutions`` knows."""

    def __init__(self, name: str, module: Any, declare: Callable[[Any], DeclaredStage] | None = None) -> None:
        self.name, self.module = name, module
        try:
            self._declared = declared = module.vertex_stage() if declare is None else declare(module)
        except ConfigError as refused:
            self.refuse(str(refused))
        self.dropouts = (declared.dropout,) if declared.dropout else ()
        self.own_function = declared.activation
        stage = vertex_stage(declared.stage, declared.config)
        super().__init__(name, module, max(stage.input_widths, default=0), stage.output_widths)
        inputs = (declared.around is not None) + declared.own
        if len(stage.input_widths) != inputs or len(set(stage.input_widths)) != 1:
            self.refuse(
                f"declares {inputs} inputs, but its stage {declared.stage!r} takes {stage.input_widths} "
                "columns; declare the same number of inputs, all as wide as the layer before"
            )
        if len(stage.output_widths) != 1:
            self.refuse(f"has a stage {declared.stage!r} of {len(stage.output_widths)} outputs; give it one")
        self._weights = [module.get_parameter(weight) for weight in declared.weights]
        self._check_parameters(*self._weights)
        # Of a square weight both orientations have the same shape.
        self.inputs_first = tuple(
            weight
            for weight in self._weights
            if declared.inputs_first is not False and weight.shape == (self.width, *stage.output_widths)
        )
        if declare is None and not declared.depends_on_the_graph:
            check_declared(name, module, declared, stage)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        declared, config = self._declared, dict(self._declared.config)
        if then.activation != IDENTITY:
            if not declared.takes_activation:
                self.refuse(
                    f"is followed by {then.activation.name}, but its stage takes no activation; put it "
                    "into the stage, or declare takes_activation"
                )
            config["activation"] = then.activation.json()
        if edge_column is not None and declared.around is None:
            self.refuse("is given edge weights, but uses no edges; leave them out")
        if declared.dropout:
            builder.drop(self.module.get_submodule(declared.dropout).p)
        own, inputs = builder.rows(), []
        if declared.around is not None:
            factor = replace(FACTOR_OF_NORM[declared.around], column=edge_column)
            inputs.append(builder.gather(factor).name)
        inputs += [own.name] if declared.own else []
        (width,) = vertex_stage(declared.stage, declared.config).output_widths
        builder.vertex(declared.stage, config, inputs, {"h": width}, self._weights)


_OF_CLASS: Mapping[type, Callable[[str, Any], Layer]] = MappingProxyType(
    {
        **{
            kind: partial(DeclaredLayer, declare=known.on_workers)
            for kind, known in CONVOLUTIONS.items()
            if known.on_workers is not None
        },
        GATConv: GatLayer,
        nn.Linear: LinearLayer,
        nn.LayerNorm: NormLayer,
    }
)
KNOWN_LAYERS = (
    f"dgl.nn.{', '.join(kind.__name__ for kind in _OF_CLASS if kind in CONVOLUTIONS)} "
    "(SAGEConv with 'mean'), nn.Linear, nn.LayerNorm, nn.Dropout, and modules with vertex_stage()"
)


def is_dropping(module: nn.Module) -> bool:
    """True if ``module`` drops entries while it is training, with masks keyed by node or not."""
    return isinstance(module, NodeDropout | nn.modules.dropout._DropoutNd) and module.p > 0


def layer_of(name: str, module: nn.Module) -> Layer | None:
    """Return ``module`` as a layer; None: it is not a layer, but may contain some.

    Raises:
        ConfigError: it is an unknown convolution, or its configuration has no stage.
    """
    if isinstance(module, Declares):
        return DeclaredLayer(name, module)
    kind = type(module)
    if kind in _OF_CLASS:
        return _OF_CLASS[kind](name, module)
    if is_dropping(module):
        if kind not in (nn.Dropout, NodeDropout):
            raise ConfigError(
                f"{name!r}, {kind.__name__}, drops with probability {module.p}, and strategy 'lambda' knows "
                "nn.Dropout only; use it, set the probability to 0, or use strategy='data_parallel'"
            )
        return DropoutLayer(name, module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise ConfigError(
            f"{name!r}, {kind.__name__}, takes means over all nodes, and workers know the rows of one "
            "interval; use nn.LayerNorm, or strategy='data_parallel'"
        )
    if any(base.__module__.startswith("dgl.nn.") for base in kind.__mro__):
        raise ConfigError(
            f"layer {name!r}, {kind.__name__}, is not known to workers; known are {KNOWN_LAYERS}. Give it "
            "vertex_stage() (docs/extending.md), or use strategy='data_parallel'"
        )
    return None
