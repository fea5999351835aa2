"""What the choice cost in each cell of a grid, and how near predictions came: tables of a report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from dglx_dist.report.tables import markdown_table
from scripts.bench.figures import medians
from scripts.bench.records import COUNTED_BYTES, PREDICTED_SECONDS, Cell, Outcome

ERROR = 0.25
"""The aim: error of predicted seconds in the median."""
_CELLS = ("cell", "chosen", "s predicted", "s measured", "faster", "regret")


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How near predictions came, over all variants."""

    variants: int
    error: float
    """Of predicted by measured seconds, in the median; 0.1 is 10 %."""
    counted: int
    """Variants whose bytes were foretold to the byte."""
    differ: int
    """Of these, the ones that moved others in the first measured epoch."""

    @property
    def is_near(self) -> bool:
        """Whether it is as near as was aimed at."""
        return self.error <= ERROR and not self.differ

    @property
    def in_words(self) -> str:
        """The figures."""
        return (
            f"predicted seconds of {self.variants} ways are {100 * self.error:.0f} % off in the median; of "
            f"{self.counted} whose bytes were predicted exactly, {self.differ} moved others"
        )


def cells_of(outcome: Outcome) -> tuple[Cell, ...]:
    """Return the cells of the experiment; none where it has no choice to judge."""
    ratios = () if outcome.plan is None else outcome.plan.ratios
    return next((ratio.cells for ratio in ratios if ratio.cells), ())


def nearness(outcome: Outcome) -> Nearness | None:
    """Return None where nothing was measured, or nothing foretold."""
    foretold, took = _fact(outcome, PREDICTED_SECONDS), medians(outcome)
    errors = [abs(foretold[name] / took[name] - 1.0) for name in foretold if took.get(name)]
    if not errors:
        return None
    counted = _fact(outcome, COUNTED_BYTES)
    moved = {
        one.variant: one.epochs[0].bytes_outside + one.epochs[0].bytes_inside
        for one in outcome.measurements
        if one.epochs and one.variant in counted
    }
    return Nearness(
        variants=len(errors),
        error=statistics.median(errors),
        counted=len(moved),
        differ=sum(count != counted[name] for name, count in moved.items()),
    )


def regret_tables(outcome: Outcome) -> list[str]:
    """Return the cells in Markdown, and how near predictions came; nothing where there are no cells."""
    foretold, took, near = _fact(outcome, PREDICTED_SECONDS), medians(outcome), nearness(outcome)
    rows = []
    for cell in cells_of(outcome):
        known = [name for name in cell.ways if name in took]
        if cell.chosen not in known:
            continue
        best = min(known, key=lambda name: took[name])
        rows.append(
            (
                cell.name,
                _way(cell, cell.chosen),
                f"{foretold[cell.chosen]:.3g}",
                f"{took[cell.chosen]:.3g}",
                "" if best == cell.chosen else f"{_way(cell, best)} {took[best]:.3g}",
                f"{took[cell.chosen] / took[best]:.2f}",
            )
        )
    if not rows or near is None:
        return []
    return [
        markdown_table(_CELLS, rows),
        f"{near.in_words[0].upper()}{near.in_words[1:]} (aim: at most {100 * ERROR:.0f} %, and none).",
    ]


def _fact(outcome: Outcome, name: str) -> Mapping[str, float]:
    return {} if outcome.plan is None else outcome.plan.facts.get(name, {})


def _way(cell: Cell, variant: str) -> str:
    return variant.removeprefix(f"{cell.name}: ")
