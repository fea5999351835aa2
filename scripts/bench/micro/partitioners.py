"""Seconds, memory and edge cut of the partitioners on the built-in graph.

    OMP_NUM_THREADS=1 python scripts/bench partitioners --nodes 1000000 --parts 4

Each method runs in a process of its own, one after the other; memory is what the process needs above the
loaded graph. The first row is the generator itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.files import peak
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.records import RawGraph

RUNS: tuple[tuple[str, dict[str, object]], ...] = (
    ("kaminpar", {}),
    ("kaminpar", {"balance": ("degree",)}),
    ("metis", {}),
    ("metis", {"balance": ("nodes", "train")}),
    ("metis", {"balance": ("nodes", "degree", "train")}),
    ("metis", {"fast": True}),
    ("ldg", {}),
    ("fennel", {}),
    ("hash", {}),
)


def peak_gb() -> float:
    """Largest resident memory of this process so far."""
    return peak() / 1e9


def make_graph(nodes: int) -> RawGraph:
    return generate(SyntheticConfig(nodes=nodes, degree=25))


def partition_once(run: int, nodes: int, parts: int) -> None:
    """Print one row as JSON; the work of one process."""
    graph = make_graph(nodes)
    method, options = RUNS[run]
    # A small graph first: libraries are loaded and kernels compiled outside the clock.
    partitioner = PARTITIONERS.get(method)(PartitionOptions(**options))  # type: ignore[arg-type]
    partitioner.assign(make_graph(2000), parts, 0)
    before, started = peak_gb(), time.perf_counter()
    assignment = partitioner.assign(graph, parts, 0)
    seconds, extra = time.perf_counter() - started, peak_gb() - before
    quality = measure(graph, assignment)
    row = {"seconds": seconds, "gb": extra, "cut": quality.edge_cut, "balance": quality.balance}
    print(json.dumps(row))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench partitioners",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--run", type=int, help="one row only, as JSON")
    chosen = parser.parse_args(argv)
    if chosen.run is not None:
        partition_once(chosen.run, chosen.nodes, chosen.parts)
        return
    make_graph(2000)
    started, before = time.perf_counter(), peak_gb()
    graph = make_graph(chosen.nodes)
    print(f"generated {graph.total_nodes} nodes, {graph.total_edges} edges in ", end="")
    print(f"{time.perf_counter() - started:.1f} s, {peak_gb() - before:.2f} GB above the start\n")
    print("| method | seconds | GB | edge cut | heaviest part: nodes / degree / train |")
    print("|---|---|---|---|---|")
    for run, (method, options) in enumerate(RUNS):
        size = ("--nodes", str(chosen.nodes), "--parts", str(chosen.parts))
        done = subprocess.run(
            [sys.executable, *sys.argv[:2], "--run", str(run), *size],
            capture_output=True,
            text=True,
            check=True,
        )
        row = json.loads(done.stdout.splitlines()[-1])
        told = " ".join(f"{name}={value}" for name, value in options.items())
        heaviest = " / ".join(f"{row['balance'][name]:.3f}" for name in ("nodes", "degree", "train"))
        print(f"| {method} {told} | {row['seconds']:.1f} | {row['gb']:.2f} | {row['cut']:.3f} | {heaviest} |")
