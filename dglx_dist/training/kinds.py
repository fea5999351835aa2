"""The names of the ready-made models, for whoever checks one before DGL is imported."""

from __future__ import annotations

from collections.abc import Sequence

from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.registry import did_you_mean

MODEL_KINDS = ("sage", "gcn", "sgc", "gat", "mlp", "resgcn")
RELATIONAL_KINDS = ("rgcn", "hgt")
"""Those for graphs of several node or edge types."""
RECOMPUTE = ("none", "exchange", "keep")
"""What backward has of a layer of a deep model: all that forward computed; the layer's input alone, so that
the rest is computed, and rows of other ranks are exchanged, once more; or the input and those rows.
"""


def check_kind(kind: str, known: Sequence[str] = MODEL_KINDS) -> None:
    """Raise UnknownNameError, with the nearest name, unless ``kind`` is one of ``known``."""
    if kind not in known:
        raise UnknownNameError(
            f"there is no model {kind!r}{did_you_mean(kind, known)} (known: {', '.join(known)})"
        )


def check_recompute(recompute: str) -> None:
    """Raise ConfigError unless ``recompute`` is one of :data:`RECOMPUTE`."""
    if recompute not in RECOMPUTE:
        raise ConfigError(f"recompute={recompute!r} must be one of {', '.join(RECOMPUTE)}")
