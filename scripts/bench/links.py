"""What the links of a variant were, read from the network part of an outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.bench.records import MatchedPhi, Outcome, Variant


@dataclass(frozen=True, kw_only=True)
class Link:
    """How servers were joined."""

    kind: str
    """ "namespaces", "loopback", or "" when nothing was noted."""
    rate: str
    """Between servers, e.g. "96mbit"; empty: not limited."""
    phi: float | None
    """Share of its time that the baseline spends on the network at this rate; None: not calibrated."""
    missed_phi: float | None
    """The share that was wanted where no rate gave it; None: none was wanted, or it was reached."""
    limited: bool
    """False on plain loopback with more than one server: then no claim about a network can be judged."""
    missing: str
    """Why it is plain loopback."""

    @property
    def words(self) -> str:
        """Rate and phi as a reader wants them, e.g. "96mbit, phi 0.65"."""
        if not self.limited:
            return "not limited (plain loopback)" if self.kind == "loopback" else "not noted"
        rate = self.rate or "no limit"
        return rate if self.phi is None else f"{rate}, phi {self.phi:.2f}"


def link_of(outcome: Outcome, variant: Variant) -> Link:
    """Return the link of ``variant`` in ``outcome``."""
    found: Mapping[str, Any] = outcome.network.get(variant.name) or {}
    kind = str(found.get("kind", ""))
    fixed = None if isinstance(variant.rate, MatchedPhi) else variant.rate
    phi = found.get("phi")
    calibration: Mapping[str, Any] = found.get("calibration") or {}
    return Link(
        kind=kind,
        rate=str(found.get("external", fixed) or ""),
        phi=None if phi is None else float(phi),
        missed_phi=None if calibration.get("within_tolerance", True) else float(calibration["wanted"]),
        limited=kind == "namespaces" or variant.shape.servers == 1,
        missing=str(found.get("missing") or ""),
    )
