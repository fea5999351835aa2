"""What can go wrong with one invocation on purpose, for tests: a worker dies or dawdles at a place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, final

from dglx_dist.offload.fields import Fields, Json
from dglx_dist.offload.worker.places import Place

MAX_SECONDS = 3600.0


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once."""

    place: Place
    seconds: float | None = None
    """How long to stand still there; None: die."""

    def as_json(self) -> dict[str, Json]:
        """Return what :meth:`read` reads."""
        return {"place": self.place.value, "seconds": self.seconds}

    @classmethod
    def read(cls, given: object) -> Fault:
        """Read :meth:`as_json`.

        Raises:
            ConfigError: it is none.
        """
        fields = Fields(given, "a fault")
        place = Place(fields.choice("place", [place.value for place in Place]))
        seconds = fields.maybe("seconds", lambda name: fields.number(name, 0, MAX_SECONDS), None)
        fields.end()
        return cls(place=place, seconds=seconds)


@final
class FaultyPlace:
    """Lets the next fault happen, at its place; give it to a Worker as ``at``.

    Args:
        die: Ends the worker.
    """

    def __init__(self, die: Callable[[], NoReturn]) -> None:
        self._die = die
        self.next: Fault | None = None
        """Of the task that runs, or is about to; forgotten once it happened."""

    def __call__(self, place: Place) -> None:
        """Do what the fault says if this is its place."""
        fault = self.next
        if fault is None or fault.place is not place:
            return
        self.next = None
        if fault.seconds is None:
            self._die()
        time.sleep(fault.seconds)
