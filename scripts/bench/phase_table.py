"""Bytes by phase as measured beside what a formula says, and whether variants trained on the same blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from dglx_dist.comm.collectives import CONTROL
from dglx_dist.report.tables import markdown_table
from scripts.bench.records import PREDICTED_BYTES, Measurement, Outcome

_MEASURED = "bytes_outside_by_phase"
_DRAWN = ("input_rows", "edges", "input_ids")
"""What of a measurement tells which blocks it was: counts, and the sum of the ids of all input rows."""


def predicted_bytes(outcome: Outcome) -> Mapping[str, Mapping[str, int]]:
    """Return what was foretold, by variant and phase; empty where nothing was."""
    return {} if outcome.plan is None else outcome.plan.facts.get(PREDICTED_BYTES, {})


def measured_bytes(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Return payload between servers by variant and phase, per epoch of its first repetition.

    Where workers had tasks launched again, of the one with the fewest: these pull their rows again.
    Without what ranks tell each other to agree (barriers, counts): a few hundred bytes, of any strategy.
    """
    found: dict[str, dict[str, float]] = {}
    for one in sorted(outcome.measurements, key=lambda one: one.extra.get("relaunched", 0)):
        if one.epochs and _MEASURED in one.extra:
            counts = one.extra[_MEASURED]
            phases = {phase: counts[phase] / len(one.epochs) for phase in counts if phase != CONTROL}
            found.setdefault(one.variant, phases)
    return found


def phase_table(outcome: Outcome) -> str:
    """Return a table in Markdown, in the plan's order; empty where nothing was foretold or measured."""
    expected, found = predicted_bytes(outcome), measured_bytes(outcome)
    names = [name for name in expected if name in found]
    phases = sorted({phase for name in names for phase in (*found[name], *expected[name])})
    rows = []
    for name in names:
        total, foretold = sum(found[name].values()), sum(expected[name].values())
        each = [f"{found[name].get(phase, 0) / 1e6:.3f}" for phase in phases]
        rows.append(
            (name, *each, f"{total / 1e6:.3f}", f"{foretold / 1e6:.3f}", _difference(total, foretold))
        )
    head = ("MB per epoch", *phases, "total", "by the formula", "difference, bytes")
    return markdown_table(head, rows) if rows else ""


def different_blocks(outcome: Outcome) -> list[str]:
    """Return the variants that drew other blocks than the first one of the same data, seeds and fan-outs."""
    if outcome.plan is None:
        return []
    drawn = {one.variant: _drawn(one) for one in reversed(outcome.measurements) if one.epochs}
    first: dict[tuple[str, ...], tuple[int, ...]] = {}
    differ = []
    for variant in outcome.plan.variants:
        params, found = variant.job.params, drawn.get(variant.name)
        if found is None or "fanouts" not in params:
            continue
        names = ("data", "fanouts", "batch_size", "max_steps", "seed", "epochs", "warmup")
        key = tuple(str(params.get(name)) for name in names)
        if first.setdefault(key, found) != found:
            differ.append(variant.name)
    return differ


def crossing(points: Sequence[tuple[float, float, float]]) -> float | None:
    """Return where the second of two measured lines comes to the first.

    Args:
        points: (x, first, second), x rising; the second is below the first in the beginning.

    Returns:
        x, between two points by a straight line; None where they do not cross.
    """
    for (x, first, second), (next_x, next_first, next_second) in pairwise(points):
        before, after = first - second, next_first - next_second
        if before >= 0 > after:
            return x + (next_x - x) * before / (before - after)
    return None


def _drawn(measurement: Measurement) -> tuple[int, ...]:
    return tuple(int(measurement.extra.get(name, -1)) for name in _DRAWN)


def _difference(measured: float, foretold: float) -> str:
    return f"{measured - foretold:+.0f}" if measured != foretold else "0"
