"""Accuracy on real graphs: the same model on one process and on two ranks, and under several strategies.

    python scripts/bench real_data --data ../shared/data --out runs/real_data
    python scripts/bench real_data --compare push_pull
    python scripts/bench real_data --compare full_graph --epochs 100
    python scripts/bench real_data --compare wire_dtype --epochs 100

By default the plain figure of every graph is one process on one part; beside it two ranks (as one server and
as two) on 2 and on 4 metis parts. The batch of one process is the sum of the batches of all ranks, so that
both take the same number of steps. Everything runs through the command line, as a user would run it; means
over the seeds, and the exit code is 1 where one misses its bound.

push_pull: 1 and 3 batches in flight beside data parallelism, on 2 hash parts. full_graph: shared_preload, its
expansion-aware sampling (EAS) and two co-batches with it beside full_graph, on 2 servers of 2 ranks; each
epoch is one step. Both on coauthor_physics and the built-in graph. wire_dtype: full_graph on 2 servers, with
rows in fewer bits, on hash parts, which have many border rows; staleness: the same with halo rows of the
epoch before, on metis parts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.micro.timing import dglx, parser

SEEDS = (0, 1, 2)
BUILT_IN = "synthetic:nodes=20000,features=100,seed=0"
_STALE = ("--option", "staleness=1")
_SAMPLED = ("--option", "external_hops=1", "--option", "external_fanout=15")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one column of the table is trained."""

    parts: int = 2
    ranks: int = 2
    servers: int = 2
    method: str = "metis"
    strategy: tuple[str, ...] = ("data_parallel",)
    """Name, and more arguments of ``dglx train``."""

    @property
    def samples(self) -> bool:
        return self.strategy[0] in ("data_parallel", "push_pull")


def _push_pull(*strategy: str) -> Setting:
    return Setting(method="hash", strategy=strategy)


def _full_graph(*strategy: str) -> Setting:
    return Setting(ranks=4, strategy=strategy)


COMPARED: Mapping[str, tuple[float, tuple[str, ...], Mapping[str, Setting]]] = {
    "ranks": (
        1.5,
        ("cora", "dblp_full", "coauthor_physics"),
        {
            "1 process": Setting(parts=1, ranks=1, servers=1),
            "2 parts, 2 ranks": Setting(servers=1),
            "2 parts, 2 servers": Setting(),
            "4 parts, 2 servers": Setting(parts=4),
        },
    ),
    "push_pull": (
        0.5,
        ("coauthor_physics", BUILT_IN),
        {
            "data_parallel": _push_pull("data_parallel"),
            "push_pull, depth 1": _push_pull("push_pull"),
            "push_pull, depth 3": _push_pull("push_pull", "--option", "depth=3"),
        },
    ),
    "full_graph": (
        0.7,
        ("coauthor_physics", BUILT_IN),
        {
            "full_graph": _full_graph("full_graph"),
            "shared_preload": _full_graph("shared_preload"),
            "EAS": _full_graph("shared_preload", *_SAMPLED),
            "cooperative with EAS": _full_graph("cooperative", "--option", "batches=2", *_SAMPLED),
        },
    ),
    "staleness": (
        0.5,
        ("cora", "dblp_full", "coauthor_physics"),
        {
            "exact": Setting(strategy=("full_graph",)),
            "staleness=1": Setting(strategy=("full_graph", *_STALE)),
        },
    ),
    "wire_dtype": (
        0.5,
        ("cora", "dblp_full", "coauthor_physics"),
        {
            wire: Setting(method="hash", strategy=("full_graph", "--option", f"wire_dtype={wire}"))
            for wire in ("same", "bfloat16", "int8", "int4")
        },
    ),
}
"""Name -> points that others may be behind the first (with push_pull: or ahead), graphs, columns."""


def test_accuracy(source: str, run: Path, setting: Setting, seed: int, epochs: int) -> float:
    """Partition (once) and train; return the exact test accuracy of the last epoch, in percent."""
    data = run.parent / f"{run.name.partition('-')[0]}-{setting.parts}-{setting.method}"
    if not data.exists():
        dglx("partition", source, "--parts", setting.parts, "--method", setting.method, "--out", data)
    if not (run / "summary.json").exists():
        launch = ("--ranks", setting.ranks, "--servers", setting.servers) if setting.ranks > 1 else ()
        model = ("--model", "sage", "--layers", 2, "--hidden", 64, "--dropout", 0.5, "--lr", 0.01)
        # Strategies that take whole neighbourhoods have neither.
        batch = ("--fanout", "15,10", "--batch-size", 32 // setting.ranks) if setting.samples else ()
        steps = ("--epochs", epochs, "--eval-every", epochs, "--seed", seed)
        dglx("train", data, *launch, "--strategy", *setting.strategy, *model, *batch, *steps, "--out", run)
    return 100 * float(json.loads((run / "summary.json").read_text())["test_accuracy"])


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a graph misses the bound."""
    options = parser("real_data", __doc__)
    options.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of the .npz graphs"
    )
    options.add_argument("--out", type=Path, default=Path("runs/real_data"), help="partitions and runs")
    options.add_argument("--compare", choices=COMPARED, default="ranks")
    options.add_argument("--graphs", nargs="*", help="which graphs, or synthetic:...")
    options.add_argument("--epochs", type=int, default=20)
    chosen = options.parse_args(argv)
    bound, graphs, settings = COMPARED[chosen.compare]
    print("| graph | " + " | ".join(settings) + " |\n" + "|---" * (len(settings) + 1) + "|")
    missed = False
    for graph in chosen.graphs or graphs:
        name, _, made = graph.partition(":")
        source = graph if made else str(chosen.data / f"{graph}.npz")
        means, cells = [], []
        for title, setting in settings.items():
            run = chosen.out / f"{name}-{title.replace(', ', '-').replace(' ', '_')}"
            values = [
                test_accuracy(source, run.with_name(f"{run.name}-{seed}"), setting, seed, chosen.epochs)
                for seed in SEEDS
            ]
            means.append(statistics.mean(values))
            cells.append(f"{means[-1]:.2f} ({', '.join(f'{value:.1f}' for value in values)})")
        behind = [means[0] - mean for mean in means]
        missed = missed or max(behind) > bound or (chosen.compare == "push_pull" and min(behind) < -bound)
        print(f"| {graph} | " + " | ".join(cells) + " |", flush=True)
    return int(missed)
