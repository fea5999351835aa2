"""Closed form of strategies that change only communication: phi, kappa, beta.

See docs/strategies/shared_preload.md, "What it costs".
"""

from __future__ import annotations


def predicted_time(phi: float, kappa: float, beta: float) -> float:
    """Return (1 - phi) kappa + phi beta: the time of a variant relative to the baseline.

    phi: share of the baseline's time on the network; kappa, beta: work and bytes relative to it. Nothing
    overlaps, because a layer waits for its rows; traffic within a server is free.
    """
    return (1.0 - phi) * kappa + phi * beta


def speedup_added(phi: float, beta: float) -> float:
    """Return 1 / ((1 - phi) + phi beta): nothing overlaps, and only the time on the network changes."""
    return 1.0 / predicted_time(phi, 1.0, beta)


def speedup_hidden(phi: float, beta: float) -> float:
    """Return 1 / max(1 - phi, beta): the network is always busy, and computing overlaps with it.

    With full overlap the baseline's time is that of its bytes, so the variant's bytes take beta of it,
    unless computing, 1 - phi of it, takes longer.
    """
    return 1.0 / max(1.0 - phi, beta)
