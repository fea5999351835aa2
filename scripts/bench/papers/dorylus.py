"""Training in intervals on emulated servers: the experiments Y1 to Y5, and what they came to.

    sudo .venv/bin/python scripts/bench/dorylus.py --out runs/dorylus             # all of them
    sudo .venv/bin/python scripts/bench/dorylus.py --out runs/dorylus --quick     # 1 repetition, less
    sudo .venv/bin/python scripts/bench/dorylus.py --out runs/dorylus --only Y3

The same as ``dglx bench --suite papers --only Y1,Y2,...``, with bytes by phase beside the formulas, what each
option changes of them, epochs to the target by seed, calls and dollars, which are simulated. Y1 trains on
coauthor_physics.npz of --data too, and says so where there is no such file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from dglx_dist.bench.coauthors import FILE
from dglx_dist.bench.figures import VariantFigures, variant_figures
from dglx_dist.bench.phase_table import measured_bytes, phase_table, predicted_bytes
from dglx_dist.bench.records import BenchPlan, Experiment, Measurement, Outcome
from dglx_dist.cli.bench_script import measure_in_turn, parser_of, plan_of, ratio_table
from dglx_dist.report.table import markdown_table

ALL = ("Y1", "Y2", "Y3", "Y4", "Y5")


def main() -> int:
    """Measure and print; 1 when an experiment failed."""
    quick = "1 repetition on a small graph; Y1 has all the same, for its seeds are what it is about"
    parser = parser_of(__doc__, "dorylus", ALL, quick)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs")
    chosen = parser.parse_args()

    def plan(experiment: Experiment) -> BenchPlan:
        asked = plan_of(chosen, few=chosen.quick and experiment.id != "Y1")
        if experiment.id == "Y1":
            bring(chosen.data / FILE, asked.work / FILE)
        return asked

    return measure_in_turn(chosen, tables, plan)


def bring(file: Path, place: Path) -> None:
    """Copy ``file`` to ``place``, unless it is there; say so where there is none."""
    if place.is_file():
        return
    if not file.is_file():
        print(f"there is no {file}: Y1 trains on the built-in graph alone; name its folder with --data")
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


def tables(outcome: Outcome) -> list[str]:
    """Return the tables of one experiment."""
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
    told = (phase_table(outcome), delta_table(outcome), seed_table(outcome))
    return [markdown_table(head, rows), ratio_table(outcome), *filter(None, told)]


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
