"""Push-pull parallelism on emulated servers: the experiments P1 to P9, and what they came to.

    sudo .venv/bin/python scripts/bench/p3.py --out runs/p3             # all of them
    sudo .venv/bin/python scripts/bench/p3.py --out runs/p3 --quick     # 1 repetition, half the steps
    sudo .venv/bin/python scripts/bench/p3.py --out runs/p3 --only P1,P6

The same as ``dglx bench --suite papers --only P1,P2,...``, with bytes by phase beside the formulas, the width
at which the bytes of push-pull and of data parallelism cross, and the time by that of hash and of metis.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from dglx_dist.bench.figures import VariantFigures, variant_figures
from dglx_dist.bench.phase_table import crossing, different_blocks, measured_bytes, phase_table
from dglx_dist.bench.records import Outcome
from dglx_dist.cli.bench_script import measure_in_turn, parser_of, ratio_table
from dglx_dist.report.table import markdown_table

ALL = ("P1", "P2", "P4", "P5", "P6", "P7", "P8", "P9")
WIDTHS = (16, 32, 64, 100)


def main() -> int:
    """Measure and print; 1 when an experiment failed."""
    chosen = parser_of(__doc__, "p3", ALL, "1 repetition of half as many steps").parse_args()
    return measure_in_turn(chosen, tables)


def tables(outcome: Outcome) -> list[str]:
    """Return the tables of one experiment."""
    figures = {one.variant.name: one for one in variant_figures(outcome)}
    head = (
        "variant",
        "link",
        "s per epoch (IQR)",
        "MB outside",
        "hash / it",
        "metis / it",
        "peak of a rank, MB",
    )
    differ = ", ".join(different_blocks(outcome)) or "none"
    return [
        markdown_table(head, [cells(one, figures) for one in figures.values()]),
        ratio_table(outcome),
        phase_table(outcome),
        f"other blocks than data parallelism: {differ}",
        *filter(None, (break_even(outcome),)),
    ]


def cells(one: VariantFigures, figures: Mapping[str, VariantFigures]) -> tuple[str, ...]:
    """Return one variant's row."""
    seconds = one.seconds
    return (
        one.variant.name,
        one.link.words,
        f"{seconds.median:.3f} ({seconds.low:.3f} to {seconds.high:.3f})",
        f"{one.bytes_outside / 1e6:.2f}",
        *(by(one, kind, figures) for kind in ("hash", "metis")),
        f"{one.peak_bytes / 1e6:.0f}",
    )


def by(one: VariantFigures, kind: str, figures: Mapping[str, VariantFigures]) -> str:
    """Return the time of data parallelism on the cut ``kind`` at the same links, by this one's."""
    rate, width = one.variant.rate, one.variant.job.params.get("hidden")
    for other in figures.values():
        params = other.variant.job.params
        same = other.variant.rate == rate and params.get("hidden") == width
        if same and other.variant.name.startswith(kind) and other is not one:
            return f"{other.seconds.median / one.seconds.median:.2f}"
    return "-"


def break_even(outcome: Outcome) -> str:
    """Say at which width the measured bytes cross, beside the formula; empty where no widths are compared."""
    found = measured_bytes(outcome)
    moved = ("features", "structure", "activations", "activation_gradients")
    pairs = {width: (f"hash, {width}", f"push_pull, {width}") for width in WIDTHS}
    if not all(name in found for pair in pairs.values() for name in pair):
        return ""
    points = []
    for width, pair in pairs.items():
        first, second = (sum(found[name].get(phase, 0.0) for phase in moved) for name in pair)
        points.append((float(width), first, second))
    assert outcome.plan is not None
    at = crossing(points)
    formula = outcome.plan.facts["break-even width, by the formula"]
    crossed = "none in 16 to 100" if at is None else f"{at:.1f}"
    return f"break-even width by measured bytes: {crossed}; by the formula: {formula}"


if __name__ == "__main__":
    sys.exit(main())
