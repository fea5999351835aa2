"""Graphs larger than memory: partitioned within a memory limit, then trained on by two ranks.

    python scripts/bench large --work /disk/large --json docs/results/large.json
    python scripts/bench large --work /disk/large --only 1M/25M

Graphs are streamed into the folder of --work, and kept. Peaks are private and shared memory, which the kernel
cannot drop: of all processes of a partitioning, and of the largest rank of a training (2 epochs of GraphSAGE
2 x 64 with fan-out 10,5, evaluated once). In memory only where 100 bytes an edge are available.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from dglx_dist.data.synthetic import SyntheticConfig, write_streamed
from dglx_dist.memory import machine_memory
from scripts.bench.micro.timing import parser, table, time_call, write_json

SIZES = {
    "1M/25M": (1_000_000, 25.0, "1GB"),
    "10M/250M": (10_000_000, 25.0, "2GB"),
    "30M/1G": (30_000_000, 33.3, "6GB"),
}
"""Nodes and mean degree, and the memory granted."""
_IN_MEMORY = 40
"""Bytes of partitioning in memory, an edge."""


def run_and_watch(work: Path, *arguments: object) -> tuple[float, int, int]:
    """Run a ``dglx`` command with its scratch in ``work``.

    Returns seconds, and peak bytes of all its processes and of the largest.
    """
    command = [sys.executable, "-m", "dglx_dist.cli", *map(str, arguments)]
    print(" ".join(command[2:]), file=sys.stderr, flush=True)
    begin, total, largest = time.perf_counter(), 0, 0
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=os.environ | {"DGLX_SCRATCH": str(work)}
    ) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            usage = [_read_memory(child.pid) for child in (root, *root.children(recursive=True))]
            # All processes see the same shared memory.
            total = max(total, sum(own for own, _ in usage) + max(shared for _, shared in usage))
            largest = max(largest, *(own + shared for own, shared in usage))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - begin, total, largest


def _read_memory(process: int) -> tuple[int, int]:
    # Private and shared bytes; nothing once the process has ended.
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0, 0
    matches = [re.search(rf"{name}:\s*(\d+) kB", text) for name in ("RssAnon", "RssShmem")]
    own, shared = (int(match[1]) << 10 if match else 0 for match in matches)
    return own, shared


def measure(size: str, work: Path, train: bool) -> list[dict[str, Any]]:
    nodes, degree, memory = SIZES[size]
    graph = work / size.replace("/", "-")
    if not graph.exists():
        config = SyntheticConfig(nodes=nodes, degree=degree, features=32)
        seconds, _ = time_call(lambda: write_streamed(config, graph, feature_dtype="float16"))
        print(f"{graph}: written in {seconds:.0f} s", file=sys.stderr)
    rows = []
    ways = {"in memory": (), f"--memory {memory}": ("--memory", memory, "--scratch", work)}
    if nodes * degree * _IN_MEMORY > machine_memory()[1]:
        del ways["in memory"]
    for way, options in ways.items():
        out = work / f"{graph.name}-4"
        shutil.rmtree(out, ignore_errors=True)
        seconds, peak, _ = run_and_watch(work, "partition", graph, "--parts", 4, "--out", out, *options)
        cut = json.loads((out / "manifest.json").read_text())["quality"]["edge_cut"]
        cells = {"graph": size, "partitioned": way, "s": round(seconds), "peak MB": peak // 10**6, "cut": cut}
        rows.append({**cells, "trained s": "", "rank MB": ""})
    if train:
        how = ("--layers", 2, "--hidden", 64, "--fanout", "10,5", "--epochs", 2, "--eval-every", 0)
        seconds, _, peak = run_and_watch(
            work, "train", out, "--ranks", 2, *how, "--out", work / "run", "--overwrite"
        )
        rows[-1] |= {"trained s": round(seconds), "rank MB": peak // 10**6}
    return rows


def main(argv: list[str]) -> None:
    options = parser("large", __doc__)
    options.add_argument("--work", type=Path, required=True, help="folder on a disk, for graphs and datasets")
    options.add_argument("--only", nargs="*", choices=SIZES, default=list(SIZES), help="these sizes")
    options.add_argument("--no-training", action="store_true", help="only partition")
    options.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = options.parse_args(argv)
    rows = []
    for size in chosen.only:
        rows += measure(size, chosen.work, not chosen.no_training)
        write_json(chosen.json, rows)
    print(table(rows))
