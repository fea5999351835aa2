"""Epochs of R-GCN on a graph of two node types and four relations, under several strategies and slow links.

``python scripts/bench typed_epochs --out results.json`` makes the graph, cuts it with METIS, and trains with
``dglx train`` on emulated servers (scripts/netlab). The result has the median seconds and bytes of an epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.storage.columns import MANIFEST
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array, EdgeType, RawGraph

CLASSES = 16
RELATIONS: tuple[EdgeType, ...] = (
    ("user", "buys", "item"),
    ("item", "bought_by", "user"),
    ("user", "follows", "user"),
    ("item", "similar_to", "item"),
)
WIDTHS = {"user": 128, "item": 64}
STRATEGIES = (
    "data_parallel",
    "push_pull",
    "full_graph",
    "shared_preload --option hops=1",
    "cooperative --option batches=8",
)


def make_graph(num_nodes: int, num_edges: int, *, num_communities: int, seed: int) -> RawGraph:
    """Return a graph in which 9 of 10 edges stay within a community. Labels are communities modulo 16."""
    generator = np.random.default_rng(seed)
    counts = {"user": num_nodes * 3 // 5, "item": num_nodes * 2 // 5}
    communities = {name: generator.integers(0, num_communities, count) for name, count in counts.items()}
    orders = {name: np.argsort(values, kind="stable") for name, values in communities.items()}
    starts = {
        name: np.searchsorted(communities[name][order], np.arange(num_communities + 1))
        for name, order in orders.items()
    }

    def draw_edges(etype: EdgeType) -> tuple[Array, Array]:
        source_type, _, target_type = etype
        count = num_edges // len(RELATIONS)
        targets = generator.integers(0, counts[target_type], count)
        home = communities[target_type][targets]
        first, end = starts[source_type][home], starts[source_type][home + 1]
        neighbors = orders[source_type][first + (generator.random(count) * (end - first)).astype(np.int64)]
        strangers = generator.integers(0, counts[source_type], count)
        sources = np.where(generator.random(count) < 0.9, neighbors, strangers)
        return sources.astype(np.int32), targets.astype(np.int32)

    columns: dict[str, dict[str, Array]] = {
        name: {FEATURE: generator.standard_normal((counts[name], width), dtype=np.float32)}
        for name, width in WIDTHS.items()
    }
    columns["item"][LABEL] = (communities["item"] % CLASSES).astype(np.int64)
    split = generator.choice(len(SPLITS), counts["item"], p=(0.1, 0.05, 0.85))
    columns["item"] |= {mask: split == number for number, mask in enumerate(SPLITS)}
    return RawGraph(
        name="typed",
        num_nodes=counts,
        edges={etype: draw_edges(etype) for etype in RELATIONS},
        node_data=columns,
        num_classes={"item": CLASSES},
    )


def train(data: Path, strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train for one epoch that is not measured and ``options.epochs`` that are. Return their medians."""
    name = strategy.split()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "scripts/netlab", "run", "--servers", str(options.servers)]
        command += ["--external", options.rate, "--", "dglx", "train", str(data), "--model", "rgcn"]
        command += ["--hidden", str(options.hidden), "--strategy", *strategy.split(), "--out", str(run)]
        command += ["--epochs", str(1 + options.epochs), "--eval-every", "0"]
        if name in ("data_parallel", "push_pull"):
            command += ["--batch-size", str(options.batch_size), "--fanout", options.fanout]
        subprocess.run(command, check=True)
        epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
        summary = json.loads((run / "summary.json").read_text())
    seconds = [epoch["seconds"] for epoch in epochs]
    return {
        "strategy": strategy,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "bytes_outside": statistics.median(epoch["bytes_outside"] for epoch in epochs),
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/typed_epochs"), help="Folder of the graph.")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--communities", type=int, default=2_000)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-data", action="store_true", help="Make the graph, and train nothing.")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--out", type=Path, help="JSON file of the results.")
    options = parser.parse_args(arguments)
    if not (options.data / MANIFEST).is_file():
        graph = make_graph(
            options.nodes, options.edges, num_communities=options.communities, seed=options.seed
        )
        plan = PartitionPlan(num_parts=options.servers, method="metis", seed=options.seed)
        partition_to_disk(graph, options.data, plan)
    if options.only_data:
        return
    results = []
    for strategy in options.strategies:
        results.append(train(options.data, strategy, options))
        print(json.dumps(results[-1]), flush=True)
    if options.out is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
