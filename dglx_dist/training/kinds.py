"""The names of the ready-made models, for whoever checks one before DGL is imported."""

from __future__ import annotations

from collections.abc import Sequence

from dglx_dist.errors import UnknownNameError
from dglx_dist.registry import did_you_mean

MODEL_KINDS = ("sage", "gcn", "sgc", "gat", "mlp")
RELATIONAL_KINDS = ("rgcn", "hgt")
"""Those for graphs of several node or edge types."""


def check_kind(kind: str, known: Sequence[str] = MODEL_KINDS) -> None:
    """Raise UnknownNameError, with the nearest name, unless ``kind`` is one of ``known``."""
    if kind not in known:
        raise UnknownNameError(
            f"there is no model {kind!r}{did_you_mean(kind, known)} (known: {', '.join(known)})"
        )
