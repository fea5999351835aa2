"""Accuracy on real graphs: the same model on one process and on two ranks of a metis partition.

    python scripts/bench real_data --data ../shared/data --out runs/real_data
    python scripts/bench real_data --data ../shared/data --out runs/real_data --push-pull
    python scripts/bench real_data --data ../shared/data --out runs/real_data --full-graph

For every graph the plain figure is one process on one part; beside it two ranks (as one server and as two)
on 2 and on 4 metis parts. The batch of one process is the sum of the batches of all ranks, so that both take
the same number of steps. Means over the seeds; the bound is 1.5 points. Everything runs through the command
line, as a user would run it.

With --push-pull the strategies are compared on 2 hash parts of coauthor_physics and of the built-in graph:
data parallel, and push-pull with 1 and with 3 batches in flight; the bound is 0.5 points, up or down.

With --full-graph the ways to train on whole neighbourhoods are compared on 2 metis parts of coauthor_physics
and of the built-in graph, 2 servers of 2 ranks, one step an epoch: full_graph, shared_preload, its
expansion-aware sampling of 1 hop of at most 15 foreign in-neighbours, and the same with 2 co-batches an
epoch. What samples may be 0.7 points behind full_graph. Take more --epochs, 100 or so: each is one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

GRAPHS = ("cora", "dblp_full", "coauthor_physics")
SEEDS = (0, 1, 2)
BOUND_POINTS = 1.5
BUILT_IN = "synthetic:nodes=20000,features=100,seed=0"
PUSH_PULL_GRAPHS = ("coauthor_physics", BUILT_IN)
PUSH_PULL_BOUND_POINTS = 0.5
FULL_GRAPH_BOUND_POINTS = 0.7


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one column of the table is trained."""

    title: str
    parts: int
    ranks: int
    servers: int
    method: str = "metis"
    strategy: tuple[str, ...] = ()
    """More arguments of ``dglx train``."""


SETTINGS = (
    Setting(title="1 process", parts=1, ranks=1, servers=1),
    Setting(title="2 parts, 2 ranks", parts=2, ranks=2, servers=1),
    Setting(title="2 parts, 2 servers", parts=2, ranks=2, servers=2),
    Setting(title="4 parts, 2 servers", parts=4, ranks=2, servers=2),
)


PUSH_PULL_SETTINGS = tuple(
    Setting(title=title, parts=2, ranks=2, servers=2, method="hash", strategy=strategy)
    for title, strategy in (
        ("data_parallel", ()),
        ("push_pull, depth 1", ("--strategy", "push_pull")),
        ("push_pull, depth 3", ("--strategy", "push_pull", "--option", "depth=3")),
    )
)


SAMPLED = ("--option", "external_hops=1", "--option", "external_fanout=15")
FULL_GRAPH_SETTINGS = tuple(
    Setting(title=title, parts=2, ranks=4, servers=2, strategy=("--strategy", *strategy))
    for title, strategy in (
        ("full_graph", ("full_graph",)),
        ("shared_preload", ("shared_preload",)),
        ("EAS", ("shared_preload", *SAMPLED)),
        ("cooperative with EAS", ("cooperative", "--option", "batches=2", *SAMPLED)),
    )
)


def dglx(*arguments: object) -> None:
    """Run one ``dglx`` command and stop with what it printed if it fails."""
    command = [sys.executable, "-m", "dglx_dist.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


def test_accuracy(source: str, name: str, setting: Setting, seed: int, out: Path, epochs: int) -> float:
    """Partition (once) and train; return the exact test accuracy of the last epoch, in percent."""
    way = "" if setting.method == "metis" else f"-{setting.method}"
    data = out / f"{name}-{setting.parts}{way}"
    if not data.exists():
        dglx("partition", source, "--parts", setting.parts, "--method", setting.method, "--out", data)
    run = out / f"{name}-{setting.title.replace(', ', '-').replace(' ', '_')}-{seed}"
    if not (run / "summary.json").exists():
        launch: tuple[object, ...] = ()
        if setting.ranks > 1:
            launch = ("--ranks", setting.ranks, "--servers", setting.servers)
        model = ("--model", "sage", "--layers", 2, "--hidden", 64, "--dropout", 0.5)
        # Strategies that take whole neighbourhoods have neither.
        sampled = ("--fanout", "15,10", "--batch-size", 32 // setting.ranks)
        steps = (
            *(() if setting in FULL_GRAPH_SETTINGS else sampled),
            "--epochs",
            epochs,
            "--lr",
            0.01,
            "--eval-every",
            epochs,
        )
        dglx("train", data, *launch, *setting.strategy, *model, *steps, "--seed", seed, "--out", run)
    return 100 * float(json.loads((run / "summary.json").read_text())["test_accuracy"])


def main(argv: list[str]) -> None:
    """Print the table, and end with 1 if a graph misses the bound."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench real_data",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs")
    parser.add_argument("--out", type=Path, default=Path("runs/real_data"), help="partitions and runs")
    parser.add_argument("--graphs", nargs="*", help="which graphs, or synthetic:...")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--push-pull", action="store_true", help="compare strategies")
    parser.add_argument("--full-graph", action="store_true", help="compare ways without mini-batches")
    chosen = parser.parse_args(argv)
    settings, graphs, bound = SETTINGS, GRAPHS, BOUND_POINTS
    if chosen.push_pull:
        settings, graphs, bound = PUSH_PULL_SETTINGS, PUSH_PULL_GRAPHS, PUSH_PULL_BOUND_POINTS
    if chosen.full_graph:
        settings, graphs, bound = FULL_GRAPH_SETTINGS, PUSH_PULL_GRAPHS, FULL_GRAPH_BOUND_POINTS
    print("| graph | " + " | ".join(setting.title for setting in settings) + " |")
    print("|---" * (len(settings) + 1) + "|")
    missed = False
    for graph in chosen.graphs or graphs:
        name, _, made = graph.partition(":")
        source = graph if made else str(chosen.data / f"{graph}.npz")
        cells: list[str] = []
        plain: float | None = None
        for setting in settings:
            values = [test_accuracy(source, name, setting, seed, chosen.out, chosen.epochs) for seed in SEEDS]
            mean = statistics.mean(values)
            plain = mean if plain is None else plain
            missed = missed or (abs(mean - plain) if chosen.push_pull else plain - mean) > bound
            cells.append(f"{mean:.2f} ({', '.join(f'{value:.1f}' for value in values)})")
        print(f"| {graph} | " + " | ".join(cells) + " |", flush=True)
    sys.exit(1 if missed else 0)
