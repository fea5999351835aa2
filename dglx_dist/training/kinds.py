"""The names of the ready-made models, for whoever checks one before DGL is imported."""

from __future__ import annotations

from dglx_dist.errors import UnknownNameError
from dglx_dist.registry import did_you_mean

MODEL_KINDS = ("sage", "gcn", "gat", "mlp")


def check_kind(kind: str) -> None:
    """Raise UnknownNameError, with the nearest name, unless ``kind`` is one of :data:`MODEL_KINDS`."""
    if kind not in MODEL_KINDS:
        raise UnknownNameError(
            f"there is no model {kind!r}{did_you_mean(kind, MODEL_KINDS)} (known: {', '.join(MODEL_KINDS)})"
        )
