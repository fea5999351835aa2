"""Seconds to write, open and map a partitioned dataset of the built-in graph.

OMP_NUM_THREADS=1 python scripts/bench storage --nodes 1000000 --parts 4
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dglx_dist.data.partition.base import PARTITIONERS, PartitionOptions
from dglx_dist.data.storage.reader import open_dataset, open_structure
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.records import EDGE_TYPE
from scripts.bench.micro.starter import timed

T = TypeVar("T")


def shown(what: str, work: Callable[[], T]) -> T:
    took, result = timed(work)
    print(f"| {what} | {took:.4f} |")
    return result


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench storage",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=4)
    chosen = parser.parse_args(argv)
    hashed = PARTITIONERS.get("hash")(PartitionOptions())
    with tempfile.TemporaryDirectory() as scratch:
        small, folder = generate(SyntheticConfig(nodes=2000)), Path(scratch) / "graph"
        # Compiles the kernels outside the clock.
        write_dataset(small, hashed.assign(small, chosen.parts, 0), Path(scratch) / "small")
        graph = generate(SyntheticConfig(nodes=chosen.nodes, degree=25))
        assignment = hashed.assign(graph, chosen.parts, 0)
        print("| step | seconds |\n|---|---|")
        shown(
            "relabel and write, checksums and fsync included",
            lambda: write_dataset(graph, assignment, folder),
        )
        shown("first opening: reads and checks every byte", lambda: open_dataset(folder))
        dataset = shown("later opening", lambda: open_dataset(folder))
        shown("structure of the whole graph, first time", lambda: open_structure(dataset, EDGE_TYPE))
        shown("structure of the whole graph, later", lambda: open_structure(dataset, EDGE_TYPE))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"\n{size / 1e9:.2f} GB on disk, the structure of the whole graph included")
