"""Rates of links, as tc writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dglx_dist.errors import ConfigError

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_LEAST = 8_000


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

    def __str__(self) -> str:
        for unit, size in _UNITS.items():
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g}{unit}"
        return f"{self.bits_per_s}bit"
