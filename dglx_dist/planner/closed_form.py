"""The closed form of all strategies that change communication: phi, kappa, beta (algorithms 5)."""

from __future__ import annotations

from dglx_dist.errors import ConfigError


def predicted_time(phi: float, kappa: float, beta: float) -> float:
    """Return (1 - phi) kappa + phi beta: the time of a variant, by that of the baseline.

    Nothing is overlapped, for a layer waits for its rows; what crosses inside a server is taken as free.

    Args:
        phi: Share of the baseline's time on the network.
        kappa: Work by the baseline's.
        beta: Bytes by the baseline's.
    """
    return (1.0 - phi) * kappa + phi * beta


def speedup_added(phi: float, bytes_ratio: float) -> float:
    """Return 1 / ((1 - phi) + phi beta): nothing is hidden, and only the time on the network changes.

    Args:
        phi: Share of the baseline's time that its network adds, in [0, 1).
        bytes_ratio: beta, bytes of the variant by those of the baseline.

    Raises:
        ConfigError: one of them is out of range.
    """
    _check(phi, bytes_ratio)
    return 1.0 / predicted_time(phi, 1.0, bytes_ratio)


def speedup_hidden(phi: float, bytes_ratio: float) -> float:
    """Return 1 / max(1 - phi, beta): the network works all the time, and compute hides behind it.

    With everything overlapped the baseline's time *is* that of its bytes, so the variant's bytes take beta of
    it, unless compute, 1 - phi of it, takes longer.

    Raises:
        ConfigError: one of them is out of range.
    """
    _check(phi, bytes_ratio)
    return 1.0 / max(1.0 - phi, bytes_ratio)


def _check(phi: float, bytes_ratio: float) -> None:
    if not 0 <= phi < 1 or bytes_ratio < 0:
        raise ConfigError(f"phi={phi} must be in [0, 1) and bytes_ratio={bytes_ratio} at least 0")
