"""Training in intervals on emulated servers: the experiments Y1 to Y5, and what they came to.

    sudo .venv/bin/python scripts/bench/dorylus.py --out runs/dorylus             # all of them
    sudo .venv/bin/python scripts/bench/dorylus.py --out runs/dorylus --quick     # 1 repetition, less
    sudo .venv/bin/python scripts/bench/dorylus.py --out runs/dorylus --only Y3

The same as ``dglx bench --suite papers --only Y1,Y2,...``, with bytes by phase beside the formulas, what each
option changes of them, epochs to the target by seed, calls and dollars, which are simulated. Y1 trains on
coauthor_physics.npz of --data too, and says so where there is no such file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from dglx_dist.bench import suites
from dglx_dist.bench.coauthors import FILE
from dglx_dist.bench.figures import VariantFigures, ratio_figures, variant_figures
from dglx_dist.bench.phase_table import measured_bytes, phase_table, predicted_bytes
from dglx_dist.bench.records import BenchPlan, Measurement, Outcome
from dglx_dist.bench.sections import ratio_in_words
from dglx_dist.bench.verdict import judge
from dglx_dist.cli.bench_command import measure, write_pages
from dglx_dist.report.table import markdown_table

ALL = ("Y1", "Y2", "Y3", "Y4", "Y5")


def main() -> int:
    """Measure and print; 1 when an experiment failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/dorylus"), help="results go here")
    parser.add_argument("--work", type=Path, help="datasets are made here once (default: work in --out)")
    parser.add_argument("--only", default=",".join(ALL), help="ids by comma")
    parser.add_argument("--repetitions", type=int, default=5, help="of Y1: seeds")
    parser.add_argument(
        "--quick", action="store_true", help="1 repetition on a small graph; Y1 has 5 all the same"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs")
    chosen = parser.parse_args()
    failed = False
    for experiment in [suites.find(name) for name in chosen.only.split(",")]:
        plan = plan_of(chosen, experiment.id)
        if experiment.id == "Y1":
            bring(chosen.data / FILE, plan.work / FILE)
        began = time.perf_counter()
        (outcome,) = measure([experiment], plan)
        failed = failed or outcome.status == "failed"
        tell(outcome, time.perf_counter() - began)
        write_pages(plan.out)
    return int(failed)


def plan_of(chosen: argparse.Namespace, experiment: str) -> BenchPlan:
    """Return what the arguments ask for; Y1 has all its seeds in any case, for they are what it is about."""
    few = chosen.quick and experiment != "Y1"
    return BenchPlan(
        suite="quick" if chosen.quick else "papers",
        out=chosen.out.absolute(),
        work=(chosen.work or chosen.out / "work").absolute(),
        repetitions=1 if few else chosen.repetitions,
        seed=chosen.seed,
    )


def bring(file: Path, place: Path) -> None:
    """Copy ``file`` to ``place``, unless it is there; say so where there is none."""
    if place.is_file():
        return
    if not file.is_file():
        print(f"there is no {file}: Y1 trains on the built-in graph alone; name its folder with --data")
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


def tell(outcome: Outcome, seconds: float) -> None:
    """Print the tables of one experiment."""
    label = f"; {outcome.label}" if outcome.label else ""
    print(f"\n## {outcome.experiment}: {outcome.status} {outcome.reason} ({seconds:.0f} s){label}\n")
    if not outcome.measurements or outcome.plan is None:
        return
    head = (
        "variant",
        "s per epoch (IQR)",
        "MB outside",
        "calls",
        "relaunched",
        "simulated $ x 1e6",
        "test accuracy",
    )
    first = {one.variant: one for one in reversed(outcome.measurements)}
    rows = [cells(one, first[one.variant.name]) for one in variant_figures(outcome)]
    print(markdown_table(head, rows), end="\n\n")
    ratios = [
        (
            one.ratio.name,
            "-" if one.ratio.predicted is None else f"{one.ratio.predicted:.3f}",
            ratio_in_words(one),
            str(judge(one)),
        )
        for one in ratio_figures(outcome)
    ]
    print(markdown_table(("ratio", "predicted", "measured (IQR)", "verdict"), ratios), end="\n\n")
    for table in (phase_table(outcome), delta_table(outcome), seed_table(outcome)):
        if table:
            print(table, end="\n\n")
    sys.stdout.flush()


def cells(one: VariantFigures, measured: Measurement) -> tuple[str, ...]:
    """Return one variant's row; counts are of an epoch of its first repetition."""
    seconds, extra = one.seconds, measured.extra
    accuracy = extra.get("test_accuracy")
    return (
        one.variant.name,
        f"{seconds.median:.3f} ({seconds.low:.3f} to {seconds.high:.3f})",
        f"{one.bytes_outside / 1e6:.3f}",
        f"{extra['invocations']:.1f}",
        f"{extra['relaunched']:.1f}",
        f"{1e6 * extra['dollars']:.1f}",
        "-" if accuracy is None else f"{100 * accuracy:.1f} %",
    )


def delta_table(outcome: Outcome) -> str:
    """Return what each variant moves more than the first one, by phase, beside the formula; Y4's."""
    found, expected = measured_bytes(outcome), predicted_bytes(outcome)
    names = [name for name in expected if name in found]
    if outcome.experiment != "Y4" or len(names) < 2:
        return ""
    base, rows = names[0], []
    for name in names[1:]:
        for phase in sorted(expected[name]):
            told = expected[name][phase] - expected[base][phase]
            measured = found[name].get(phase, 0) - found[base].get(phase, 0)
            if told or measured:
                rows.append((name, phase, f"{measured:+.0f}", f"{told:+d}", f"{measured - told:.0f}"))
    return markdown_table((f"bytes more than {base}", "phase", "measured", "by 4.6", "difference"), rows)


def seed_table(outcome: Outcome) -> str:
    """Return epochs to the target by variant and repetition; Y1's."""
    epochs: dict[str, list[str]] = {}
    for one in outcome.measurements:
        if "epochs_to_target" in one.extra and outcome.experiment == "Y1":
            epochs.setdefault(one.variant, []).append(str(one.extra["epochs_to_target"] or "not reached"))
    rows = [(name, ", ".join(of)) for name, of in epochs.items()]
    return markdown_table(("variant", "epochs to the target, by seed"), rows) if rows else ""


if __name__ == "__main__":
    sys.exit(main())
