"""What of a lab is emulated, in the few words that stand beside every figure."""

from __future__ import annotations

from dglx_dist.lab.base import Lab


def label(lab: Lab) -> str:
    """Return e.g. "namespaces, 100mbit between servers" or "loopback, links not limited: WHY"."""
    if lab.kind == "loopback":
        return f"loopback, links not limited: {lab.missing or 'asked for'}"
    external, internal = lab.spec.external, lab.spec.internal
    between = "links not limited" if external is None else f"{external} between servers"
    return f"namespaces, {between}" + ("" if internal is None else f", {internal} within")
