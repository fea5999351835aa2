"""Draws what goes wrong with which attempt, for tests: by a seed, whatever the order of invocations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields
from dglx_dist.offload.tasks import TaskKey
from dglx_dist.offload.worker.faults import MAX_SECONDS, Fault
from dglx_dist.offload.worker.places import Place

_ANY = "any"


@final
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which share of invocations goes wrong, and how."""

    seed: int = 0
    kill: float = 0.0
    """Share of invocations in which the worker dies."""
    delay: float = 0.0
    """Share in which it stands still for ``delay_s``."""
    duplicate: float = 0.0
    """Share that is invoked twice."""
    delay_s: float = 1.0
    place: str = _ANY
    """A Place, or "any": drawn."""

    @classmethod
    def read(cls, given: object) -> Faults:
        """Read the option ``faults``, an object with the names of the fields.

        Raises:
            ConfigError: a field is unknown or out of bounds, or the shares add up to more than 1.
        """
        fields = Fields(given, "option 'faults'")
        shares = [
            fields.maybe(name, lambda name: fields.number(name, 0, 1), 0.0)
            for name in ("kill", "delay", "duplicate")
        ]
        places = [_ANY, *(place.value for place in Place)]
        faults = cls(
            seed=fields.maybe("seed", lambda name: fields.whole(name, 0, 1 << 62), 0),
            kill=shares[0],
            delay=shares[1],
            duplicate=shares[2],
            delay_s=fields.maybe("delay_s", lambda name: fields.number(name, 0, MAX_SECONDS), 1.0),
            place=fields.maybe("place", lambda name: fields.choice(name, places), _ANY),
        )
        fields.end()
        if sum(shares) > 1:
            raise ConfigError(f"option 'faults' has shares {shares} that add up to more than 1; lower one")
        return faults

    def draw(self, key: TaskKey, attempt: int) -> tuple[Fault | None, int]:
        """Return what happens to an attempt, and how often it is invoked, 1 or 2."""
        digest = hashlib.sha256(f"{self.seed}/{key}/{attempt}".encode()).digest()
        drawn = int.from_bytes(digest[:6], "little") / (1 << 48)
        places = list(Place) if self.place == _ANY else [Place(self.place)]
        place = places[digest[6] % len(places)]
        if drawn < self.kill:
            return Fault(place=place), 1
        if drawn < self.kill + self.delay:
            return Fault(place=place, seconds=self.delay_s), 1
        return None, 2 if drawn < self.kill + self.delay + self.duplicate else 1
