"""The bytes of training in intervals by phase, from the formulas of Dorylus (algorithms 4.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ID_BYTES, _LABEL_BYTES, _STATISTICS_BYTES = 4, 4, 2 * 2 * 8
"""Of an id; of a label, sent as a number where the paper sends one-hot rows; of loss and correct answers, two
float64 for each half of a fused task."""


@dataclass(frozen=True, kw_only=True)
class BoundedSetting:
    """What the bytes of an epoch follow from, for convolutions that map sums, as GCN's."""

    widths: Sequence[int]
    """(L + 1,) d_0 to d_L: features, hidden widths, classes."""
    nodes: int
    """n, over all graph servers."""
    ghosts: int
    """|G|: pairs of a node and another graph server that reads it."""
    intervals: int
    """Over all graph servers."""
    fusion: bool = True
    rematerialise: bool = True
    itemsize: int = 4


def bounded_bytes(told: BoundedSetting) -> dict[str, int]:
    """Return the bytes of an epoch by the ledger's phases, over all ranks; the parameter servers are one.

    Streaming changes none of it. For each layer l of L, with s bytes a number and K intervals::

        ghosts            |G| (4 + s d_l)               l < L, and as much back
        AV l              n d_{l-1} s down              n d_l s up, twice that without rematerialisation
        fused AV L        n (d_{L-1} s + 4) down        n d_{L-1} s up, not for L = 1; 32 K of loss and count
        gradAV l          n (d_{l-1} + d_l) s down      n d_{l-1} s up, not for l = 1; n d_l s more down
                                                        without rematerialisation
        weights           K |W_l| s for each task down, once back
    """
    hidden = sum(told.widths[1:-1])
    boundary = told.ghosts * (_ID_BYTES * (len(told.widths) - 2) + told.itemsize * hidden)
    down = up = weights_down = weights_up = 0
    last = len(told.widths) - 1
    for layer in range(1, last + 1):
        wide, narrow = told.widths[layer - 1], told.widths[layer]
        weights = told.intervals * (wide + 1) * narrow * told.itemsize
        back = 0 if layer == 1 else told.nodes * wide * told.itemsize
        weights_up += weights
        if layer == last and told.fusion:
            down += told.nodes * (wide * told.itemsize + _LABEL_BYTES)
            up += back + told.intervals * _STATISTICS_BYTES
            weights_down += weights
            continue
        saved = 0 if told.rematerialise else told.nodes * narrow * told.itemsize
        rows = told.nodes * told.itemsize
        down += rows * wide + rows * (wide + narrow) + saved
        up += rows * narrow + saved + back
        weights_down += 2 * weights
    return {
        "ghost_gradients": boundary,
        "ghosts": boundary,
        "lambda_down": down,
        "lambda_up": up,
        "weights_down": weights_down,
        "weights_up": weights_up,
    }
