"""Ready-made models: one record for each, with its options and the function that builds it.

Imports no torch, so that ``dglx --help`` is fast.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from dglx_dist.errors import UnknownNameError
from dglx_dist.registry import suggest_name

LAYER_OPTIONS = ("norm", "residual", "jk")
"""Options for what happens between the layers in a stack."""
WEIGHTED = "edge_weight"


@final
@dataclass(frozen=True)
class ModelKind:
    """One ready-made model."""

    builder: str
    """``module:name`` of a function or class that is called with (in_dim, hidden, classes, layers, dropout),
    or for several types with (graph, feature_widths, hidden, classes), and with :attr:`options` by name."""
    options: tuple[str, ...]
    """Options that not every model has. ``graph``: the norm depends on its degrees."""
    several_types: bool = False
    """Whether it is for graphs with several node or edge types."""

    def build(self, *arguments: Any, **options: Any) -> Any:
        """Import the model's module and build the model."""
        module, _, name = self.builder.partition(":")
        return getattr(import_module(module), name)(*arguments, **options)


KINDS: Mapping[str, ModelKind] = {
    "sage": ModelKind("dglx_dist.training.models:build_sage", (*LAYER_OPTIONS, WEIGHTED)),
    "gcn": ModelKind("dglx_dist.training.models:build_gcn", (*LAYER_OPTIONS, "graph", WEIGHTED)),
    "sgc": ModelKind("dglx_dist.training.models:build_sgc", (WEIGHTED,)),
    "gat": ModelKind("dglx_dist.training.models:build_gat", (*LAYER_OPTIONS, "heads", WEIGHTED)),
    "mlp": ModelKind("dglx_dist.training.models:build_mlp", LAYER_OPTIONS),
    "resgcn": ModelKind("dglx_dist.training.models:ResGCN", ("recompute", WEIGHTED)),
    "gatv2": ModelKind("dglx_dist.training.models:build_gatv2", (*LAYER_OPTIONS, "heads")),
    "gin": ModelKind("dglx_dist.training.models:build_gin", (*LAYER_OPTIONS, WEIGHTED)),
    "appnp": ModelKind("dglx_dist.training.models:APPNP", ("teleport", WEIGHTED)),
    "rgcn": ModelKind("dglx_dist.training.relational:RGCN", ("norm", "residual"), several_types=True),
    "hgt": ModelKind("dglx_dist.training.relational:HGT", ("heads",), several_types=True),
}
"""Ready-made models by name."""
MODEL_KINDS = tuple(name for name, kind in KINDS.items() if not kind.several_types)
RELATIONAL_KINDS = tuple(name for name, kind in KINDS.items() if kind.several_types)


def has_option(model: str, option: str) -> bool:
    """Return whether ``model`` has an ``option`` that not every model has. Your own model has none."""
    return model in KINDS and option in KINDS[model].options


def list_kinds(option: str) -> str:
    """Join the names of the models that have ``option``, for a message."""
    return ", ".join(name for name in KINDS if has_option(name, option))


def check_kind(model: str, known: Iterable[str] = MODEL_KINDS) -> None:
    """Raise UnknownNameError, which suggests the nearest name, if ``model`` is not in ``known``."""
    known = tuple(known)
    if model not in known:
        raise UnknownNameError(
            f"there is no model {model!r}{suggest_name(model, known)} (known: {', '.join(known)})"
        )
