"""How long functions take beyond their work, emulated on this machine: a log-normal pause per invocation."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

from dglx_dist.offload.fields import Fields
from dglx_dist.offload.tasks import TaskKey
from dglx_dist.offload.worker.faults import MAX_SECONDS, Fault
from dglx_dist.offload.worker.places import Place

DEFAULT_SIGMA = 0.5
"""Spread of the logarithm that is usual for functions."""
_MAX_SIGMA = 3.0


@final
@dataclass(frozen=True, kw_only=True)
class Latency:
    """A pause of every invocation when it has computed, before it hands in: emulated, and no cloud's."""

    median_s: float
    sigma: float = DEFAULT_SIGMA
    """Standard deviation of the logarithm; 0: always the median."""

    @classmethod
    def read(cls, fields: Fields) -> Latency | None:
        """Read the options ``latency_s``, the median in seconds, and ``latency_sigma``; None without.

        Raises:
            ConfigError: one is out of bounds, or there is a sigma without a median.
        """
        median_s = fields.maybe("latency_s", lambda name: fields.number(name, 0, MAX_SECONDS), None)
        sigma = fields.maybe("latency_sigma", lambda name: fields.number(name, 0, _MAX_SIGMA), None)
        if median_s is None:
            if sigma is not None:
                fields.refuse("latency_sigma", "left out, or the spread around a latency_s that is given")
            return None
        return cls(median_s=median_s, sigma=DEFAULT_SIGMA if sigma is None else sigma)

    def draw(self, key: TaskKey, attempt: int) -> Fault:
        """Return the pause of one attempt: the same in every run, whatever the order of invocations."""
        digest = hashlib.sha256(f"latency/{key}/{attempt}".encode()).digest()
        # In the middle of its cell, so that neither end of the distribution is drawn.
        share = (int.from_bytes(digest[:6], "little") + 0.5) / (1 << 48)
        factor = NormalDist(0.0, self.sigma).inv_cdf(share) if self.sigma else 0.0
        return Fault(place=Place.COMPUTED, seconds=min(self.median_s * math.exp(factor), MAX_SECONDS))
