"""Full-graph training on emulated servers: the experiments G1 to G5, and what they came to.

    sudo .venv/bin/python scripts/bench/granndis.py --out runs/granndis             # all of them
    sudo .venv/bin/python scripts/bench/granndis.py --out runs/granndis --quick     # 1 repetition, less
    sudo .venv/bin/python scripts/bench/granndis.py --out runs/granndis --only G1,G4

The same as ``dglx bench --suite papers --only G1,G2,...``, with bytes by phase beside the formulas, the
closed form of phi, kappa and beta beside the gain that was measured, what is done once, accuracy beside time
and the peak memory of a rank. Stock DistDGL trains beside G2.
"""

from __future__ import annotations

import sys

from dglx_dist.bench.closed_form import closed_form_table, once_table
from dglx_dist.bench.figures import VariantFigures, variant_figures
from dglx_dist.bench.phase_table import phase_table
from dglx_dist.bench.records import Outcome
from dglx_dist.bench.sections import accuracy_in_words
from dglx_dist.cli.bench_script import measure_in_turn, parser_of, ratio_table
from dglx_dist.report.table import markdown_table

ALL = ("G1", "G2", "G3", "G4", "G5")


def main() -> int:
    """Measure and print; 1 when an experiment failed."""
    chosen = parser_of(__doc__, "granndis", ALL, "1 repetition on small graphs").parse_args()
    return measure_in_turn(chosen, tables)


def tables(outcome: Outcome) -> list[str]:
    """Return the tables of one experiment."""
    head = ("variant", "link", "s per epoch (IQR)", "MB outside", "accuracy", "peak of a rank, MB")
    accuracy = {one.variant: one.accuracy[-1][1] for one in outcome.measurements if one.accuracy}
    return [
        markdown_table(head, [cells(one, accuracy) for one in variant_figures(outcome)]),
        ratio_table(outcome),
        phase_table(outcome),
        closed_form_table(outcome),
        once_table(outcome),
        accuracy_in_words(outcome),
    ]


def cells(one: VariantFigures, accuracy: dict[str, float]) -> tuple[str, ...]:
    """Return one variant's row."""
    seconds, reached = one.seconds, accuracy.get(one.variant.name)
    return (
        one.variant.name,
        one.link.words,
        f"{seconds.median:.3f} ({seconds.low:.3f} to {seconds.high:.3f})",
        f"{one.bytes_outside / 1e6:.2f}",
        "-" if reached is None else f"{100 * reached:.1f} %",
        f"{one.peak_bytes / 1e6:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
