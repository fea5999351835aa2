"""Layers that become program steps. Functions of rows between them are identified by their values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, final

import numpy as np
import torch
from dgl.nn import GATConv, GraphConv
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.data.json_fields import Json
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import AnyBatchNorm
from dglx_dist.layers.base import DeclaredStage, Declares
from dglx_dist.layers.convolutions import CONVOLUTIONS
from dglx_dist.layers.dropout import NodeDropout
from dglx_dist.layers.tracer import random_block
from dglx_dist.records import Array
from dglx_dist.serverless.program import (
    FEATURES,
    FIXED,
    MAX_WEIGHTS,
    Drop,
    Edge,
    Gather,
    ProgramStep,
    Scatter,
    Slot,
    Vertex,
)
from dglx_dist.serverless.stages.base import VertexStage, vertex_stage
from dglx_dist.serverless.stages.conv import MAX_STAGES

NUM_NODES, NUM_EDGES = 12, 40
"""Sizes of the random blocks on which models and layers are called."""


Merge: TypeAlias = Literal["none", "flatten", "mean"]
"""How the heads of (n, K, H) rows are merged."""


Activation: TypeAlias = Mapping[str, Any]
"""An elementwise function as stages take it: ``{"name": "leaky_relu", "slope": 0.2}``."""
IDENTITY: Activation = {"name": "identity"}
KNOWN = "identity, relu, leaky_relu, elu, tanh, sigmoid, each alone; heads flattened or averaged"

_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
}
_MERGES: Mapping[Merge, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "flatten": lambda z: z.flatten(1),
    "mean": lambda z: z.mean(1),
}


class RowFunction(NamedTuple):
    """after(merge(inside(z)))."""

    inside: Activation = IDENTITY
    merge: Merge = "none"
    after: Activation = IDENTITY

    def __call__(self, z: Tensor) -> Tensor:
        """Apply to (n, H), or to (n, K, H) if heads are merged."""
        return _activate(self.after, _MERGES[self.merge](_activate(self.inside, z)))


def _activate(activation: Activation, z: Tensor) -> Tensor:
    name, *parameters = activation.values()
    return _FUNCTIONS[name](z, *parameters)


def find_function(
    z: Tensor, rows: Tensor, own: Callable[[Tensor], Tensor] | None = None
) -> RowFunction | None:
    """Return the known function that computed ``rows`` from ``z``, by values alone, or None.

    Args:
        z: (n, H) or (n, K, H) random values.
        own: Function that the layer applied to each head before a merge.
    """
    merges: tuple[Merge, ...] = ("flatten", "mean") if z.dim() == 3 else ("none",)
    with torch.no_grad():
        for merge in merges:
            for function in _candidates(z, rows, merge, own):
                if equal(function(z), rows):
                    return function
    return None


def same_gradient(z: Tensor, rows: Tensor, function: RowFunction, generator: torch.Generator) -> bool:
    """Return True if gradients flow from ``rows`` back to the leaf ``z`` as through ``function``."""
    if not rows.requires_grad:
        return False
    cotangent = torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
    (gradient,) = torch.autograd.grad(rows, z, cotangent, allow_unused=True, retain_graph=True)
    (expected,) = torch.autograd.grad(function(z), z, cotangent)
    return gradient is not None and equal(gradient, expected)


def equal(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    scale = torch.clamp(left.abs(), min=1.0)
    return bool(((left - right).abs() <= 16 * torch.finfo(left.dtype).eps * scale).all())


def _candidates(
    z: Tensor, rows: Tensor, merge: Merge, own: Callable[[Tensor], Tensor] | None
) -> Iterator[RowFunction]:
    for inside in _activations(z, rows, _MERGES[merge]):
        yield RowFunction(inside=inside, merge=merge)
    if merge != "mean":
        return
    first = None if own is None else find_function(z, own(z).flatten(1))
    inside = IDENTITY if first is None else first.inside
    merged = _MERGES[merge](_activate(inside, z))
    for after in _activations(merged, rows, _MERGES["none"]):
        yield RowFunction(inside=inside, merge=merge, after=after)


def _activations(z: Tensor, rows: Tensor, merge: Callable[[Tensor], Tensor]) -> Iterator[Activation]:
    # All activations. Of parameters the values that fit are tried.
    yield from ({"name": name} for name in _FUNCTIONS if name not in ("leaky_relu", "elu"))
    if merge(z).shape != rows.shape:
        return
    remainder = rows - merge(torch.relu(z))
    for name, key, low in (
        ("leaky_relu", "slope", z.clamp(max=0)),
        ("elu", "alpha", torch.expm1(z.clamp(max=0))),
    ):
        basis = merge(low)
        fitted = float((remainder * basis).sum() / (basis * basis).sum())
        # The user's value is a short decimal; the fit has rounding errors in its last digits.
        for digits in (2, 4, 7, 16):
            yield {"name": name, key: round(fitted, digits)}


@dataclass(frozen=True, kw_only=True)
class EdgeFactor:
    """The weight of the edge from u to v: powers of degrees, where a degree of 0 counts as 1."""

    target: float = 0.0
    """Exponent of the in-degree of v."""
    source: float = 0.0
    """Exponent of the out-degree of u."""
    column: str | None = None
    """Edge data that multiplies the weight."""


FACTOR_OF_NORM = {
    "sum": EdgeFactor(),
    "mean": EdgeFactor(target=-1.0),
    "left": EdgeFactor(source=-1.0),
    "both": EdgeFactor(target=-0.5, source=-0.5),
}
"""By the names of ``DeclaredStage.around``."""


def degree_powers(degrees: Array, exponent: float) -> Array:
    powers: Array = np.power(np.maximum(degrees, 1).astype(np.float64), exponent)
    return powers


_TOLERANCE = {"float32": 1e-3, "float64": 1e-8}
_DGL_NORMS = {"sum": "none", "mean": "right", "left": "left", "both": "both"}
"""``norm`` of GraphConv by the names of ``DeclaredStage.around``."""


def check_declared(name: str, module: Any, declared: DeclaredStage, stage: VertexStage) -> None:
    """Raise ConfigError if ``module(block, h)`` and its stage differ on random rows: values or gradients."""
    generator = torch.Generator().manual_seed(3)
    weights = {weight: module.get_parameter(weight) for weight in declared.weights}
    shapes = [tuple(tensor.shape) for tensor in weights.values()]
    expected_shapes = list(stage.shapes.weights.values())
    if shapes != expected_shapes:
        raise ConfigError(
            f"layer {name!r} declares weights {list(weights)} of shapes {shapes}, but its stage "
            f"{declared.stage!r} has {stage.shapes.weights}; name them in this order, with these shapes"
        )
    dtype = next((tensor.dtype for tensor in weights.values()), torch.get_default_dtype())
    block = random_block(NUM_NODES, NUM_NODES, NUM_EDGES, generator)
    rows = torch.randn(NUM_NODES, stage.shapes.inputs[0], dtype=dtype, generator=generator).requires_grad_()
    out = module(block, rows)
    cotangent = torch.randn(out.shape, dtype=dtype, generator=generator)
    trained = {"its input": rows}
    trained |= {repr(key): tensor for key, tensor in weights.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(
        out, [*trained.values()], cotangent, materialize_grads=True, allow_unused=True
    )

    # (n, n) matrices, which multiplied by rows give the inputs of the stage.
    matrices = [torch.eye(NUM_NODES, dtype=dtype)] * (1 + declared.own)
    if declared.around is None:
        matrices.pop()
    else:
        sums = GraphConv(1, 1, norm=_DGL_NORMS[declared.around], weight=False, bias=False)
        matrices[0] = sums(block, matrices[0])
    own = [tensor.detach().numpy() for tensor in weights.values()]
    inputs = [(matrix @ rows).detach().numpy() for matrix in matrices]

    def check(quantity: str, expected: Array, computed: Array) -> None:
        same_shape = expected.shape == computed.shape
        largest = float(np.abs(expected - computed).max(initial=0.0)) if same_shape else np.inf
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        if not largest <= _TOLERANCE.get(str(expected.dtype), 1e-3) * scale:
            raise ConfigError(
                f"layer {name!r} and the stage {declared.stage!r} that it declares differ in the "
                f"{quantity}, by up to {largest:.3g} (shapes {expected.shape} and {computed.shape}); make "
                "both compute the same"
            )

    check("result", out.detach().numpy(), stage.forward(own, inputs).outputs[0])
    gradients_of_stage = stage.backward(own, inputs, [cotangent.numpy()])
    gradients_of_rows = [
        matrix.T.numpy() @ gradient
        for matrix, gradient in zip(matrices, gradients_of_stage.inputs, strict=True)
    ]
    of_stage = dict(zip(map(repr, weights), gradients_of_stage.weights, strict=True)) | {
        "its input": sum(gradients_of_rows[1:], gradients_of_rows[0])
    }
    for quantity, gradient in zip(trained, gradients, strict=True):
        check(f"gradient of {quantity}", gradient.numpy(), of_stage[quantity])


_SMALL_STAGES = ("attention_finish", "layer_norm", "rows")
"""Stages without products of matrices: they run in the task of the Vertex step before or after them."""


@final
class StepsBuilder:
    """Builds the steps of a program, layer by layer. ``names`` are by ``id()`` of the model's parameters."""

    def __init__(self, names: Mapping[int, str], features: int) -> None:
        self.steps: list[ProgramStep] = []
        self.factors: dict[str, EdgeFactor] = {}
        self._names, self._taken = names, set[str]()
        self.output = Slot(FEATURES, features)
        """Output of the last layer so far."""
        self._with_halo = {FEATURES}
        self._counts: dict[str, int] = {}
        self._num_drops = 0

    def finish(self) -> int:
        """End the program with a Vertex step; return the number of classes."""
        if not isinstance(self.steps[-1], Vertex):
            width = self.output.width
            self.vertex("rows", {"width": width, "bias": False}, [self.output.name], {"h": width}, [])
        return self.output.width

    def drop(self, probability: float) -> None:
        """Drop entries of the previous layer's rows, as the model's next dropout in a forward pass does."""
        self.output = self._drop(self.output, probability)

    def _drop(self, source: Slot, probability: float) -> Slot:
        if not probability:
            return source
        name = self._name("DR")
        output = Slot("d" + name[2:], source.width)
        self.steps.append(
            Drop(name=name, source=source.name, output=output, probability=probability, call=self._num_drops)
        )
        if source.name == FEATURES:
            self._with_halo.add(output.name)
        self._num_drops += 1
        return output

    def gather(self, factor: EdgeFactor) -> Slot:
        """Add the sum over in-edges of the previous layer's rows, and return the slot of the sums."""
        source = self.output
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
        """Add a stage, and return its number. A key of ``widths`` and the number name the slot of an output.

        The next layer reads the first output.
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
        self.output = slots[0]
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
        """Add attention and a weighted sum, and return the slot of the sums.

        Args:
            number: Number of the step ``attention_project``.
            widths: Widths of its outputs ``z`` and ``el``.
            slope: Slope of the leaky ReLU.
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
        attention = self._drop(attention, dropout)
        sums = Slot(f"s{number}", widths["z"])
        self.steps.append(
            Gather(name=self._name("GA"), source=f"z{number}", output=sums, edges=attention.name)
        )
        return sums.name

    def scatter(self, *slots: str) -> None:
        """Send boundary rows of those slots that have no halo nodes yet."""
        new = tuple(slot for slot in slots if slot not in self._with_halo)
        if new:
            self._with_halo.update(new)
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
        if factor == EdgeFactor():
            return None
        names = {known: name for name, known in self.factors.items()}
        name = names.get(factor, f"{FIXED}{len(names)}")
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


class Layer(ABC):
    """A module of the model that becomes steps.

    Attributes:
        width: Number of columns of the input, or None for any.
        row_shape: Shape of a row of the result before ``own_function``, or None for that of the input.

    Raises:
        ConfigError: its configuration has no stage.
    """

    takes_block = True
    dropouts: tuple[str, ...] = ()
    """Dropouts inside the module that become steps, by their names in it."""
    own_function: Callable[[Tensor], Tensor] | None = None
    """The activation that the module applies to its result."""

    def __init__(
        self, name: str, module: Any, width: int | None = None, row_shape: tuple[int, ...] | None = None
    ) -> None:
        self.name, self.module, self.width, self.row_shape = name, module, width, row_shape
        for inner, submodule in module.named_modules():
            if is_dropping(submodule) and inner not in self.dropouts:
                self.refuse(
                    f"drops in {inner!r} with probability {submodule.p}, which no stage does; set it to 0"
                )

    @abstractmethod
    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """Add the steps.

        ``then``, which includes ``own_function``, is applied to the result before the next layer.
        """

    @property
    def wants_in_edges(self) -> bool:
        """True if it raises for a node without in-edges, as DGL's layers do by default."""
        return getattr(self.module, "_allow_zero_in_degree", True) is False

    def refuse(self, reason: str) -> NoReturn:
        kind = type(self.module).__name__
        raise ConfigError(f"layer {self.name!r}, {kind}, {reason}; or use strategy='data_parallel'")

    def _parameter(self, name: str) -> nn.Parameter:
        try:
            parameter: nn.Parameter = self.module.get_parameter(name)
        except AttributeError:
            self.refuse(
                f"has no parameter {name!r}; a parametrization such as weight_norm may hide it: remove that "
                "(torch.nn.utils.remove_weight_norm), or name another one"
            )
        return parameter

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
        linear = isinstance(module.res_fc, nn.Linear)
        self._residual = list(module.res_fc.parameters()) if linear else []
        if "fc" not in module._modules:
            self.refuse("has one width for sources and another for destinations; give it one")
        self.own_function = module.activation
        self._check_parameters(module.fc.weight, module.attn_l, module.attn_r, module.bias, *self._residual)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        # AV, SC, AE, GA, AV.
        module, (heads, width), bias = self.module, self._shape, self.module.bias
        if edge_column is not None:
            self.refuse("is given edge weights, which attention steps do not support; leave them out")
        config: dict[str, Json] = {
            "in": self.width,
            "heads": heads,
            "width": width,
            "residual": "linear" if self._residual else "none" if module.res_fc is None else "identity",
            "residual_bias": len(self._residual) == 2,
        }
        weights = [module.fc.weight, module.attn_l, module.attn_r, *self._residual]
        widths = {"z": heads * width, "el": heads, "er": heads}
        widths |= {} if module.res_fc is None else {"r": heads * width}
        builder.drop(module.feat_drop.p)
        number = builder.vertex("attention_project", config, [builder.output.name], widths, weights)
        sums = builder.attention(number, widths, module.leaky_relu.negative_slope, module.attn_drop.p)
        finish: dict[str, Json] = {
            "heads": heads,
            "width": width,
            "bias": bias is not None,
            "merge": then.merge,
            "residual": "r" in widths,
            "activation": dict(then.inside),
            "after": dict(then.after),
        }
        inputs = [sums, f"r{number}"] if "r" in widths else [sums]
        merged = width if then.merge == "mean" else heads * width
        builder.vertex("attention_finish", finish, inputs, {"h": merged}, [] if bias is None else [bias])


@final
class DropoutLayer(Layer):
    """``nn.Dropout`` on rows, which may be called several times."""

    takes_block = False
    dropouts = ("",)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        builder.drop(self.module.p)
        if then.inside != IDENTITY:
            rows = builder.output
            config: dict[str, Json] = {"width": rows.width, "bias": False, "activation": dict(then.inside)}
            builder.vertex("rows", config, [rows.name], {"h": rows.width}, [])


@final
class DeclaredLayer(Layer):
    """A module that declares its stage, or whose stage is known by its class."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module, declare = name, module, _STAGES.get(type(module))
        try:
            self._declared = declared = module.vertex_stage() if declare is None else declare(module)
        except ConfigError as refused:
            self.refuse(str(refused))
        self.takes_block = type(module) not in (nn.Linear, nn.LayerNorm)
        self.dropouts = (declared.dropout,) if declared.dropout else ()
        self.own_function = declared.activation
        stage = vertex_stage(declared.stage, declared.config)
        super().__init__(name, module, max(stage.shapes.inputs, default=0), stage.shapes.outputs)
        inputs = (declared.around is not None) + declared.own
        if len(stage.shapes.inputs) != inputs or len(set(stage.shapes.inputs)) != 1:
            self.refuse(
                f"declares {inputs} inputs, but its stage {declared.stage!r} takes {stage.shapes.inputs} "
                "columns; declare the same number of inputs, all as wide as the layer before"
            )
        if len(stage.shapes.outputs) != 1:
            self.refuse(f"has a stage {declared.stage!r} of {len(stage.shapes.outputs)} outputs; give it one")
        self._weights = [self._parameter(weight) for weight in declared.weights]
        self._check_parameters(*self._weights)
        if declare is None and not declared.depends_on_the_graph:
            check_declared(name, module, declared, stage)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        declared, config = self._declared, dict(self._declared.config)
        if then.inside != IDENTITY:
            if not declared.takes_activation:
                self.refuse(
                    f"is followed by {then.inside['name']}, but its stage takes no activation; put it "
                    "into the stage, or declare takes_activation"
                )
            config["activation"] = dict(then.inside)
        if edge_column is not None and declared.around is None:
            self.refuse("is given edge weights, but uses no edges; leave them out")
        if declared.dropout:
            builder.drop(self.module.get_submodule(declared.dropout).p)
        own, inputs = builder.output, []
        if declared.around is not None:
            factor = replace(FACTOR_OF_NORM[declared.around], column=edge_column)
            inputs.append(builder.gather(factor).name)
        inputs += [own.name] if declared.own else []
        (width,) = vertex_stage(declared.stage, declared.config).shapes.outputs
        builder.vertex(declared.stage, config, inputs, {"h": width}, self._weights)


def _linear_stage(linear: nn.Linear) -> DeclaredStage:
    bias = linear.bias is not None
    config = {"in": linear.in_features, "out": linear.out_features, "bias": bias, "transposed": True}
    return _stage_of_rows("dense", config, ("weight", "bias") if bias else ("weight",))


def _norm_stage(norm: nn.LayerNorm) -> DeclaredStage:
    if len(norm.normalized_shape) != 1:
        raise ConfigError(f"is over {len(norm.normalized_shape)} dimensions; give it one, the columns")
    weights = tuple(name for name, _ in norm.named_parameters())
    config = {"width": norm.normalized_shape[0], "eps": norm.eps}
    config |= {"scale": "weight" in weights, "bias": "bias" in weights}
    return _stage_of_rows("layer_norm", config, weights)


def _stage_of_rows(stage: str, config: Mapping[str, Any], weights: tuple[str, ...]) -> DeclaredStage:
    return DeclaredStage(
        stage=stage, config=config, weights=weights, around=None, own=True, takes_activation=True
    )


_STAGES: Mapping[type, Callable[[Any], DeclaredStage]] = MappingProxyType(
    {kind: known.on_workers for kind, known in CONVOLUTIONS.items() if known.on_workers is not None}
    | {nn.Linear: _linear_stage, nn.LayerNorm: _norm_stage}
)
KNOWN_LAYERS = (
    f"dgl.nn.{', '.join(kind.__name__ for kind in (*_STAGES, GATConv) if kind in CONVOLUTIONS)} "
    "(SAGEConv with 'mean'), nn.Linear, nn.LayerNorm, nn.Dropout, and modules with vertex_stage()"
)


def is_dropping(module: nn.Module) -> bool:
    """True if ``module`` drops entries while it is training, with masks keyed by node or not."""
    return isinstance(module, NodeDropout | nn.modules.dropout._DropoutNd) and module.p > 0


def layer_of(name: str, module: nn.Module) -> Layer | None:
    """Return ``module`` as a layer, or None if it is none but may contain some.

    Raises:
        ConfigError: it is an unknown convolution.
    """
    kind = type(module)
    if isinstance(module, Declares) or kind in _STAGES:
        return DeclaredLayer(name, module)
    if kind is GATConv:
        return GatLayer(name, module)
    if is_dropping(module):
        if kind not in (nn.Dropout, NodeDropout):
            raise ConfigError(
                f"{name!r}, {kind.__name__}, drops with probability {module.p}, and strategy 'lambda' knows "
                "nn.Dropout only; use it, set the probability to 0, or use strategy='data_parallel'"
            )
        return DropoutLayer(name, module)
    if isinstance(module, AnyBatchNorm):
        raise ConfigError(
            f"{name!r}, {kind.__name__}, takes means over all nodes, and workers know the rows of one "
            "interval; use nn.LayerNorm, or strategy='data_parallel'"
        )
    if any(base.__module__.startswith("dgl.nn.") for base in kind.__mro__):
        raise ConfigError(
            f"layer {name!r}, {kind.__name__}, is not known to workers; known are {KNOWN_LAYERS}. Give it "
            "vertex_stage() (docs/guides/extending.md), or use strategy='data_parallel'"
        )
    return None
