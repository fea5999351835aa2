"""Numbers as people read them."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def readable_bytes(num_bytes: float) -> str:
    """Write a count of bytes with three digits and a decimal unit: 1536 -> ``1.54 KB``."""
    value, unit = float(num_bytes), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        # 999.5 would be written as 1e+03.
        if abs(value) < 999.5 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def readable_count(count: float) -> str:
    """Write a count with a blank between thousands: 12345.6 -> ``12 346``."""
    return f"{count:,.0f}".replace(",", " ")


def plural(count: object, noun: str) -> str:
    """Write how many there are: (1, "rank") -> ``1 rank``, (2, "rank") -> ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def readable_seconds(seconds: float) -> str:
    """Write seconds with what precision matters: 0.0123 -> ``0.012``, 75.3 -> ``75.3``."""
    return f"{seconds:.3f}" if abs(seconds) < 10 else f"{seconds:.1f}"


def readable_percent(fraction: float | None) -> str:
    """Write a fraction as a percentage, nothing when there is none: 0.8123 -> ``81.2 %``."""
    return "" if fraction is None else f"{100 * fraction:.1f} %"
