"""Full-graph training on emulated servers: the experiments G1 to G5, and what they came to.

    sudo .venv/bin/python scripts/bench/granndis.py --out runs/granndis             # all of them
    sudo .venv/bin/python scripts/bench/granndis.py --out runs/granndis --quick     # 1 repetition, less
    sudo .venv/bin/python scripts/bench/granndis.py --out runs/granndis --only G1,G4

The same as ``dglx bench --suite papers --only G1,G2,...``, with bytes by phase beside the formulas, the
closed form of phi, kappa and beta beside the gain that was measured, what is done once, accuracy beside time
and the peak memory of a rank. Stock DistDGL trains beside G2.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dglx_dist.bench import suites
from dglx_dist.bench.closed_form import closed_form_table, once_table
from dglx_dist.bench.figures import VariantFigures, ratio_figures, variant_figures
from dglx_dist.bench.phase_table import phase_table
from dglx_dist.bench.records import BenchPlan, Outcome
from dglx_dist.bench.sections import accuracy_in_words, ratio_in_words
from dglx_dist.bench.verdict import judge
from dglx_dist.cli.bench_command import measure, write_pages
from dglx_dist.report.table import markdown_table

ALL = ("G1", "G2", "G3", "G4", "G5")


def main() -> int:
    """Measure and print; 1 when an experiment failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/granndis"), help="results go here")
    parser.add_argument("--work", type=Path, help="datasets are made here once (default: work in --out)")
    parser.add_argument("--only", default=",".join(ALL), help="ids by comma")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1 repetition on small graphs")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    plan = BenchPlan(
        suite="quick" if chosen.quick else "papers",
        out=chosen.out.absolute(),
        work=(chosen.work or chosen.out / "work").absolute(),
        repetitions=1 if chosen.quick else chosen.repetitions,
        seed=chosen.seed,
    )
    failed = False
    for name in chosen.only.split(","):
        began = time.perf_counter()
        (outcome,) = measure([suites.find(name)], plan)
        failed = failed or outcome.status == "failed"
        tell(outcome, time.perf_counter() - began)
    write_pages(plan.out)
    return int(failed)


def tell(outcome: Outcome, seconds: float) -> None:
    """Print the tables of one experiment."""
    label = f"; {outcome.label}" if outcome.label else ""
    print(f"\n## {outcome.experiment}: {outcome.status} {outcome.reason} ({seconds:.0f} s){label}\n")
    if not outcome.measurements or outcome.plan is None:
        return
    head = ("variant", "link", "s per epoch (IQR)", "MB outside", "accuracy", "peak of a rank, MB")
    accuracy = {one.variant: one.accuracy[-1][1] for one in outcome.measurements if one.accuracy}
    print(markdown_table(head, [cells(one, accuracy) for one in variant_figures(outcome)]), end="\n\n")
    ratios = [
        (
            one.ratio.name,
            "-" if one.ratio.predicted is None else f"{one.ratio.predicted:.2f}",
            ratio_in_words(one),
            str(judge(one)),
        )
        for one in ratio_figures(outcome)
    ]
    print(markdown_table(("ratio", "predicted", "measured (IQR)", "verdict"), ratios), end="\n\n")
    for table in (phase_table(outcome), closed_form_table(outcome), once_table(outcome)):
        print(table, end="\n\n")
    print(accuracy_in_words(outcome))
    sys.stdout.flush()


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
