"""The layers that can be written as steps: convolutions of ``dgl.nn``, ``nn.Linear``, and declared ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, final

from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Json
from dglx_dist.offload.stages.registry import vertex_stage
from dglx_dist.strategies.bounded.between import IDENTITY, RowFunction
from dglx_dist.strategies.bounded.declared import Declares
from dglx_dist.strategies.bounded.declared_check import check_declared
from dglx_dist.strategies.bounded.edge_factors import FACTOR_OF_NORM, EdgeFactor
from dglx_dist.strategies.bounded.steps_builder import StepsBuilder

Function: TypeAlias = Callable[[Tensor], Tensor]


class Layer(ABC):
    """One module of the model that becomes steps.

    Args:
        name: Its path in the model.
        module: The module; its parameters are only named.

    Raises:
        ConfigError: it is set to do something that no stage does.
    """

    takes_block = True
    own_function: Function | None = None
    """What it applies to its result at the end."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module

    @property
    @abstractmethod
    def width(self) -> int:
        """Input columns."""

    @abstractmethod
    def row_shape(self, width: int) -> tuple[int, ...]:
        """Shape of one row of its result before ``own_function``, from ``width`` input columns."""

    @abstractmethod
    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """Add its steps.

        Args:
            builder: To what.
            then: What becomes of its result, ``own_function`` included, before the next layer.
            edge_column: Edge data by which its messages are weighed.
        """

    @property
    def inputs_first(self) -> tuple[Tensor, ...]:
        """Its weights of shape (inputs, outputs); torch has them the other way round."""
        return ()

    @property
    def wants_in_edges(self) -> bool:
        """Whether it raises where a node has no in-edge, as DGL's do unless allowed otherwise."""
        return getattr(self.module, "_allow_zero_in_degree", True) is False

    def refuse(self, reason: str) -> NoReturn:
        """Raise ConfigError."""
        kind = type(self.module).__name__
        raise ConfigError(f"layer {self.name!r}, {kind}, {reason}; or use strategy='data_parallel'")

    def _check_parameters(self, *used: Tensor | None) -> None:
        """Refuse parameters that no stage knows, as of an activation with weights."""
        known = {id(parameter) for parameter in used}
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in known:
                self.refuse(f"has a parameter {name!r} that no stage knows; take it out")


@final
class GraphConvLayer(Layer):
    """``dgl.nn.GraphConv``: every norm, with or without a weight."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self.own_function = module._activation
        self._check_parameters(module.weight, module.bias)

    @property
    def width(self) -> int:
        """Input columns."""
        return int(self.module._in_feats)

    @property
    def inputs_first(self) -> tuple[Tensor, ...]:
        """``weight``."""
        return () if self.module.weight is None else (self.module.weight,)

    def row_shape(self, width: int) -> tuple[int, ...]:
        """(out,)."""
        return (self.width if self.module.weight is None else int(self.module._out_feats),)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """GA, AV."""
        factor = replace(FACTOR_OF_NORM[self.module._norm], column=edge_column)
        weight, bias, (out,) = self.module.weight, self.module.bias, self.row_shape(self.width)
        config: dict[str, Json] = {"width": out} if weight is None else {"in": self.width, "out": out}
        config |= {"bias": bias is not None, "activation": then.activation.json()}
        weights = [one for one in (weight, bias) if one is not None]
        stage = "rows" if weight is None else "dense"
        builder.vertex(stage, config, [builder.gather(factor).name], out, weights)


@final
class SageLayer(Layer):
    """``dgl.nn.SAGEConv`` with the aggregator mean."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        if module._aggre_type != "mean":
            self.refuse(f"has the aggregator {module._aggre_type!r}, and stages know 'mean' only; use it")
        if module.norm is not None:
            self.refuse("has a norm, which no stage knows; leave it out")
        if module.fc_self.in_features != module.fc_neigh.in_features:
            self.refuse("has one width for sources and another for destinations; give it one")
        self.own_function = module.activation
        self._check_parameters(module.fc_self.weight, module.fc_neigh.weight, module.fc_self.bias)

    @property
    def width(self) -> int:
        """Input columns."""
        return int(self.module.fc_neigh.in_features)

    def row_shape(self, width: int) -> tuple[int, ...]:
        """(out,)."""
        return (int(self.module.fc_neigh.out_features),)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """GA, AV."""
        own, bias = builder.rows(), self.module.fc_self.bias
        around = builder.gather(EdgeFactor(target="whole", column=edge_column))
        (out,) = self.row_shape(self.width)
        config: dict[str, Json] = {"in": self.width, "out": out, "bias": bias is not None}
        config["activation"] = then.activation.json()
        weights = [self.module.fc_self.weight, self.module.fc_neigh.weight]
        weights += [] if bias is None else [bias]
        builder.vertex("sage", config, [around.name, own.name], out, weights)


@final
class GatLayer(Layer):
    """``dgl.nn.GATConv``, with every kind of residual."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self._linear = module.res_fc if isinstance(module.res_fc, nn.Linear) else None
        if "fc" not in module._modules:
            self.refuse("has one width for sources and another for destinations; give it one")
        self.own_function = module.activation
        linear = (None, None) if self._linear is None else (self._linear.weight, self._linear.bias)
        self._check_parameters(module.fc.weight, module.attn_l, module.attn_r, module.bias, *linear)

    @property
    def width(self) -> int:
        """Input columns."""
        return int(self.module.fc.in_features)

    def row_shape(self, width: int) -> tuple[int, ...]:
        """(K, H)."""
        return (int(self.module._num_heads), int(self.module._out_feats))

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """AV, SC, AE, GA; the next Vertex step finishes."""
        module, linear = self.module, self._linear
        if edge_column is not None:
            self.refuse("is given edge weights, and no step weighs attention by them; leave them out")
        heads, width = self.row_shape(self.width)
        residual = "none" if module.res_fc is None else "identity" if linear is None else "linear"
        config: dict[str, Json] = {"in": self.width, "heads": heads, "width": width, "residual": residual}
        config["residual_bias"] = linear is not None and linear.bias is not None
        inputs, weights = self._begin(builder, config)
        weights += [module.fc.weight, module.attn_l, module.attn_r]
        weights += [] if linear is None else [linear.weight]
        weights += [] if linear is None or linear.bias is None else [linear.bias]
        widths = {"z": heads * width, "el": heads, "er": heads}
        widths |= {} if module.res_fc is None else {"r": heads * width}
        sums = builder.attention(config, inputs, module.leaky_relu.negative_slope, widths, weights)
        bias = () if module.bias is None else (module.bias,)
        self._leave_open(builder, then, (sums, *(["r" + sums[1:]] if "r" in widths else [])), bias)

    def _begin(self, builder: StepsBuilder, config: dict[str, Json]) -> tuple[tuple[str, ...], list[Tensor]]:
        """Return the inputs and first weights; an attention layer before is finished in the same step."""
        heads = builder.open_heads
        if heads is None:
            return (builder.rows().name,), []
        builder.open_heads = None
        config["before"] = dict(heads.config)
        return heads.inputs, list(heads.bias)

    def _leave_open(
        self,
        builder: StepsBuilder,
        then: RowFunction,
        inputs: tuple[str, ...],
        bias: tuple[Tensor, ...],
    ) -> None:
        heads, width = self.row_shape(self.width)
        config: dict[str, Json] = {
            "heads": heads,
            "width": width,
            "bias": bool(bias),
            "merge": then.merge,
            "residual": len(inputs) > 1,
            "activation": then.inside.json(),
            "after": then.after.json(),
        }
        builder.leave_open(inputs, config, bias)


@final
class LinearLayer(Layer):
    """``nn.Linear`` on rows."""

    takes_block = False

    @property
    def width(self) -> int:
        """Input columns."""
        return int(self.module.in_features)

    def row_shape(self, width: int) -> tuple[int, ...]:
        """(out,)."""
        return (int(self.module.out_features),)

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """AV."""
        bias, out = self.module.bias, int(self.module.out_features)
        config: dict[str, Json] = {"in": self.width, "out": out, "bias": bias is not None, "transposed": True}
        config["activation"] = then.activation.json()
        weights = [self.module.weight] if bias is None else [self.module.weight, bias]
        builder.vertex("dense", config, [builder.rows().name], out, weights)


@final
class DeclaredLayer(Layer):
    """A module that names its stage."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self._declared = module.vertex_stage()
        declared = self._declared
        stage = vertex_stage(declared.stage, declared.config)
        inputs = (declared.around is not None) + declared.own
        if len(stage.input_widths) != inputs or len(set(stage.input_widths)) != 1:
            self.refuse(
                f"declares {inputs} inputs, and its stage {declared.stage!r} takes {stage.input_widths} "
                "columns; give it as many inputs, all as wide as the layer before"
            )
        if len(stage.output_widths) != 1:
            self.refuse(f"has a stage {declared.stage!r} of {len(stage.output_widths)} outputs; give it one")
        self._width, self._out = stage.input_widths[0], stage.output_widths[0]
        self._weights = [module.get_parameter(weight) for weight in declared.weights]
        self._check_parameters(*self._weights)
        if not declared.depends_on_the_graph:
            check_declared(name, module, declared, stage)

    @property
    def width(self) -> int:
        """Input columns."""
        return self._width

    def row_shape(self, width: int) -> tuple[int, ...]:
        """(out,)."""
        return (self._out,)

    @property
    def inputs_first(self) -> tuple[Tensor, ...]:
        """Those whose shape says so; of a square one, both ways are the same."""
        return tuple(weight for weight in self._weights if weight.shape == (self._width, self._out))

    def build(self, builder: StepsBuilder, then: RowFunction, edge_column: str | None) -> None:
        """GA where it looks around, AV."""
        declared, config = self._declared, dict(self._declared.config)
        if then.activation != IDENTITY:
            if not declared.takes_activation:
                self.refuse(
                    f"is followed by {then.activation.name}, and its stage takes no activation; put it "
                    "into the stage, or declare takes_activation"
                )
            config["activation"] = then.activation.json()
        if edge_column is not None and declared.around is None:
            self.refuse("is given edge weights and looks at no edge; leave them out")
        own, inputs = builder.rows(), []
        if declared.around is not None:
            factor = replace(FACTOR_OF_NORM[declared.around], column=edge_column)
            inputs.append(builder.gather(factor).name)
        inputs += [own.name] if declared.own else []
        builder.vertex(declared.stage, config, inputs, self._out, self._weights)


_OF_DGL: Mapping[str, type[Layer]] = MappingProxyType(
    {"GraphConv": GraphConvLayer, "SAGEConv": SageLayer, "GATConv": GatLayer}
)
KNOWN_LAYERS = (
    f"dgl.nn.{', '.join(_OF_DGL)} (SAGEConv with 'mean'), nn.Linear, and modules with vertex_stage()"
)
"""For messages."""


def layer_of(name: str, module: nn.Module) -> Layer | None:
    """Return ``module`` as a layer; None: it is none, but may hold some.

    Raises:
        ConfigError: it is a convolution that nobody knows, or set to do what no stage does.
    """
    if isinstance(module, Declares):
        return DeclaredLayer(name, module)
    kind = type(module)
    if kind is nn.Linear:
        return LinearLayer(name, module)
    if kind.__module__.startswith("dgl.") and kind.__name__ in _OF_DGL:
        return _OF_DGL[kind.__name__](name, module)
    if any(base.__module__.startswith("dgl.nn.") for base in kind.__mro__):
        raise ConfigError(
            f"layer {name!r}, {kind.__name__}, is known to no worker; known are {KNOWN_LAYERS}. Give it "
            "vertex_stage() (docs/extending.md), or use strategy='data_parallel'"
        )
    return None
