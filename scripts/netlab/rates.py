"""Rates of links, as tc writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dglx_dist.errors import ConfigError

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_LEAST, _MOST = 8_000, 10**12
"""More than the kernel counts is refused by tc, in words that name no remedy."""
_USUAL_BURST_BYTES = 256 * 1024
_USUAL_S = 20e-3
"""A rate at which the usual bucket would last longer gets a smaller one, so that rates hold for short too."""
_BUNDLE_BYTES = 72 * 1024
"""Segments leave a virtual card in bundles of up to 64 KiB and their headers; a smaller bucket tears them."""
_TORN_BITS_PER_S = 50_000_000
"""Below it one bundle lasts more than 12 ms, which would be free after each pause of a short epoch: it is
torn, and each segment has its headers."""
_TORN_S = 5e-3
_LEAST_BURST_BYTES = 16 * 1024
_LATE_S = 2e-3
"""The kernel may be so late in refilling a bucket; fast links need one that lasts as long."""
_LATENCY = "50ms"


@dataclass(frozen=True, order=True)
class Rate:
    """Bits per second."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str, *, most: int = _MOST) -> Rate:
        """Read e.g. "1gbit", "2.5gbit", "100mbit", "800kbit".

        Args:
            text: A number and its unit.
            most: Bits per second that are allowed; usually what the kernel counts.

        Raises:
            ConfigError: it is no rate, below 8 kbit or above ``most``.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gbit|mbit|kbit|bit)\s*", text.lower())
        bits = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not _LEAST <= bits <= most:
            raise ConfigError(
                f"rate {text!r} must be a number and gbit, mbit or kbit, from 8kbit to {cls(most)}; "
                "e.g. 100mbit"
            )
        return cls(int(bits))

    def tbf(self, *, may_tear: bool) -> list[str]:
        """Return the words after ``tc qdisc replace dev DEVICE root`` that hold a device to this rate.

        A token bucket: up to ``burst`` bytes leave at once after a pause, all others at the rate; a packet
        that would wait longer than 50 ms is dropped, as a switch does.

        Args:
            may_tear: Whether packets of the device are small by themselves; one that is larger than the
                bucket, as on a loopback device, would never leave.
        """
        return [
            "tbf",
            "rate",
            f"{self.bits_per_s}bit",
            "burst",
            str(self._burst(may_tear)),
            "latency",
            _LATENCY,
        ]

    @property
    def burst_bytes(self) -> int:
        """What a virtual card at this rate lets pass at once after a pause."""
        return self._burst(may_tear=True)

    def _burst(self, may_tear: bool) -> int:
        bytes_per_s = self.bits_per_s / 8
        if may_tear and self.bits_per_s < _TORN_BITS_PER_S:
            return max(round(bytes_per_s * _TORN_S), _LEAST_BURST_BYTES)
        usual = min(max(round(bytes_per_s * _USUAL_S), _BUNDLE_BYTES), _USUAL_BURST_BYTES)
        return max(usual, round(bytes_per_s * _LATE_S))

    def __str__(self) -> str:
        for unit, size in _UNITS.items():
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g}{unit}"
        return f"{self.bits_per_s}bit"
