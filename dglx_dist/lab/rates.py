"""Rates of links, as tc writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dglx_dist.errors import ConfigError

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_LEAST = 8_000
_LEAST_BURST_BYTES = 256 * 1024
"""Segments leave a virtual card in bundles of up to 64 KiB; a smaller bucket would tear them."""
_BURST_S = 2e-3
"""A bucket that lasts as long as the kernel may be late in refilling it."""
_LATENCY = "50ms"


@dataclass(frozen=True, order=True)
class Rate:
    """Bits per second."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read e.g. "1gbit", "2.5gbit", "100mbit", "800kbit".

        Raises:
            ConfigError: it is no rate, or below 8 kbit.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gbit|mbit|kbit|bit)\s*", text.lower())
        bits = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        if bits < _LEAST:
            raise ConfigError(
                f"rate {text!r} must be a number and gbit, mbit or kbit, at least 8kbit; e.g. 100mbit"
            )
        return cls(bits)

    def tbf(self) -> list[str]:
        """Return the words after ``tc qdisc replace dev DEVICE root`` that hold a device to this rate.

        A token bucket: up to ``burst`` bytes leave at once after a pause, all others at the rate; a packet
        that would wait longer than 50 ms is dropped, as a switch does.
        """
        burst = max(_LEAST_BURST_BYTES, round(self.bits_per_s / 8 * _BURST_S))
        return ["tbf", "rate", f"{self.bits_per_s}bit", "burst", str(burst), "latency", _LATENCY]

    def __str__(self) -> str:
        for unit, size in _UNITS.items():
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g}{unit}"
        return f"{self.bits_per_s}bit"
