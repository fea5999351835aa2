"""The choice of ``auto`` on real graphs beside every exact way to train, idle and on busy cores.

    python scripts/bench regret graphs/*.npz --out runs/regret
    python scripts/bench regret graphs/*.npz --out runs/regret --unit full_graph --load 4

Each graph is cut in two and trained by 2 ranks on 2 virtual servers. `auto` chooses in each round, once idle
and once beside processes that compute. The ways that it compares run in turn, idle; the median epoch of a run
counts, and the median of the rounds. Regret is the seconds of the chosen way by those of the fastest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.micro.timing import dglx, parser, table, write_json

_SPIN = "while True: pass"
_RUN_S = 3.0
"""Seconds of all epochs of a run."""
_NEAR = 1.3
"""Ways that took at most so many times as long as the fastest, and chosen ones, run in every round."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes computing."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _SPIN]))
            stack.callback(process.kill)
        yield


def train(data: Path, out: Path, *options: object) -> dict[str, Any]:
    """Train and return ``summary.json``."""
    fixed = ("--ranks", 2, "--servers", 2, "--eval-every", 0, "--out", out, "--overwrite")
    dglx("train", data, *fixed, *options)
    return dict(json.loads((out / "summary.json").read_text()))


def options_of(way: Mapping[str, Any]) -> list[object]:
    """Return the options of ``dglx train`` for a candidate of ``plan.json``."""
    arguments: list[object] = ["--strategy", way["strategy"]]
    for name, value in way["options"].items():
        arguments += ["--option", f"{name}={value}"]
    if way["cache"]:
        arguments += ["--cache", way["cache"], "--cache-alpha", way["cache_alpha"]]
    return arguments


def compare(data: Path, out: Path, rounds: int, load: int, unit: str) -> dict[str, Any]:
    """Return seconds of all ways, and the choices idle and under load."""
    auto = ("--strategy", "auto", "--option", f"unit={unit}", "--epochs", 2)
    ways: dict[str, Mapping[str, Any]] = {}
    chosen: dict[int, list[str]] = {0: [], load: []}
    runs: dict[str, list[float]] = {}
    for _ in range(rounds):
        for processes, names in chosen.items():
            with busy(processes):
                names.append(train(data, out / "auto", *auto)["auto"]["chosen"])
            plan = json.loads((out / "auto" / "plan.json").read_text())["predictions"]
            ways |= {entry["name"]: entry for entry in plan if entry["feasible"] and not entry["barred"]}
        best = min(map(median, runs.values()), default=0.0)
        for name, way in ways.items():
            if not runs.get(name) or median(runs[name]) <= _NEAR * best or name in chosen[0] + chosen[load]:
                epochs = 1 + min(150, max(4, round(_RUN_S / way["epoch_seconds"])))
                took = train(data, out / "way", *options_of(way["candidate"]), "--epochs", epochs)
                runs.setdefault(name, []).append(float(took["epoch_seconds"]))
    return {"idle": chosen[0], "loaded": chosen[load], "runs": runs}


def row(graph: str, found: Mapping[str, Any]) -> dict[str, object]:
    """Return a line of the table."""
    took = {name: median(runs) for name, runs in found["runs"].items()}
    best = min(took, key=lambda name: took[name])

    def describe_choices(chosen: list[str]) -> str:
        return ", ".join(f"{name} {took[name] / took[best]:.2f}" for name in sorted(set(chosen)))

    repeats = max(max(runs) / min(runs) for runs in found["runs"].values())
    return {
        "graph": graph,
        "ways": len(took),
        "fastest": f"{best}, {1e3 * took[best]:.1f} ms",
        "slowest": f"{max(took.values()) / took[best]:.2f}",
        "rounds apart": f"{repeats:.2f}",
        "chosen": describe_choices(found["idle"]),
        "under load": describe_choices(found["loaded"]),
    }


def main(argv: list[str]) -> int:
    """Measure and print the table."""
    options = parser("regret", __doc__)
    options.add_argument("graphs", type=Path, nargs="+", help="files for `dglx partition`")
    options.add_argument("--out", type=Path, default=Path("runs/regret"), help="partitions, runs, results")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--load", type=int, default=4, help="processes that compute beside")
    options.add_argument("--unit", default="mini_batch")
    chosen = options.parse_args(argv)
    lines = []
    for graph in chosen.graphs:
        data, result = (
            chosen.out / f"{graph.stem}-2",
            chosen.out / f"{graph.stem}-{chosen.unit}-{chosen.rounds}-{chosen.load}.json",
        )
        if not data.exists():
            dglx("partition", graph, "--parts", 2, "--out", data)
        if not result.exists():
            write_json(result, compare(data, chosen.out, chosen.rounds, chosen.load, chosen.unit))
        lines.append(row(graph.stem, json.loads(result.read_text())))
        print(table(lines[-1:]), flush=True)
    print(table(lines))
    return 0
