"""Peak memory of full-graph training and of co-batches, beside what was predicted; then both under a limit.

    python scripts/bench memory
    python scripts/bench memory --nodes 1000000 --grants 8GB,4GB,2GB --limit 3GB --ranks 2

A ring whose nodes read the four on either side, GraphSAGE, Adam, two epochs, one server. Every line is
measured in processes of its own, after a small graph has had everything loaded and compiled: the growth of
the resident memory of the largest rank, files that are mapped not counted. glibc gives freed memory back in
all of them. In the last two lines RLIMIT_AS leaves each rank so many bytes more than it begins with.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.system import return_memory
from dglx_dist.comm.topology import launched_by_torchrun
from dglx_dist.data.storage.files import read_size
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.training.models import build_model
from scripts.bench.micro.starter import parser, torchrun_command, write_json

CLASSES, SMALL = 10, 2000
_ARENA_MAX = -8
"""Of <malloc.h>."""


def write_ring(folder: Path, nodes: int, width: int) -> None:
    """Write the graph, every node of which is for training, as one part."""
    steps = np.array([-4, -3, -2, -1, 1, 2, 3, 4])
    destination = np.repeat(np.arange(nodes), len(steps))
    random = np.random.default_rng(0)
    columns = {
        "feat": random.standard_normal((nodes, width), dtype=np.float32),
        "label": random.integers(CLASSES, size=nodes),
        "train_mask": np.ones(nodes, dtype=bool),
    }
    graph = RawGraph(
        name="ring",
        num_nodes={NODE_TYPE: nodes},
        edges={EDGE_TYPE: ((destination + np.tile(steps, nodes)) % nodes, destination)},
        node_data={NODE_TYPE: columns},
        num_classes={NODE_TYPE: CLASSES},
    )
    whole = Assignment(num_parts=1, part_of={NODE_TYPE: np.zeros(nodes, np.int32)}, method="ring", seed=0)
    write_dataset(graph, whole, folder)


def status(name: str) -> int:
    """Bytes that the system says of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def mapped() -> int:
    """Bytes of files and of shared memory."""
    return status("RssFile") + status("RssShmem")


def train(session: Session, g: DistGraph, case: dict[str, Any], epochs: int) -> tuple[int, int, float]:
    """Return the steps of an epoch, the bytes predicted (0: none), and the seconds of the last epoch."""
    strategy: Any = STRATEGIES.get(case["strategy"])(session, case["options"])
    width = g.ndata["feat"].shape[1]
    torch.manual_seed(0)
    layers = case["layers"]
    model = strategy.wrap(build_model("sage", width, case["hidden"], CLASSES, layers, dropout=0.5), g)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        layers, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    mine = torch.arange(session.topology.rank, g.num_nodes(), session.topology.world_size)
    loader = strategy.loader(g, mine, sampler)
    optimizer = torch.optim.Adam(model.parameters())
    seconds = 0.0
    for _ in range(epochs):
        begin = time.perf_counter()
        for _, _, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(scores, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            optimizer.step()
        seconds = time.perf_counter() - begin
    predicted = getattr(loader, "memory", None)
    return len(loader), predicted.total if predicted is not None else 0, seconds


def measure(options: argparse.Namespace) -> None:
    """One case, in a rank."""
    case = json.loads(options.case)
    # A heap for each thread reserves 64 MB of addresses that are never used.
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    session = start_session()
    return_memory()
    small = DistGraph(options.folder / "small")
    train(session, small, case | {"options": case["warm"]}, 1)
    g = DistGraph(options.folder / "large")
    gc.collect()
    return_memory()
    before, of_files = status("VmRSS"), mapped()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if case["limit"]:
        limit = status("VmSize") + case["limit"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    steps, predicted, seconds = train(session, g, case, 2)
    taken = status("VmHWM") - before - (mapped() - of_files)
    peaks, needs = gather_int64([taken, predicted], session).reshape(-1, 2).max(axis=0)
    if session.topology.rank == 0:
        found = {"steps": steps, "peak": int(peaks), "predicted": int(needs), "seconds": seconds}
        options.to.write_text(json.dumps(found), encoding="utf-8")
    g.close()
    small.close()
    session.close()


def run(folder: Path, case: dict[str, Any], ranks: int) -> dict[str, Any] | str:
    """Return what the ranks of one case found, or how they failed."""
    to = folder / "found.json"
    to.unlink(missing_ok=True)
    arguments = [*sys.argv[:2], "--folder", str(folder), "--case", json.dumps(case), "--to", str(to)]
    command, environment = torchrun_command(arguments, ranks, 1)
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if to.exists():
        found: dict[str, Any] = json.loads(to.read_text(encoding="utf-8"))
        return found
    told = [line for line in done.stderr.splitlines() if "allocate memory" in line or "MemoryError" in line]
    return "no memory left" if told else done.stderr[-2000:]


def line_of(name: str, granted: str, limit: str, found: dict[str, Any] | str) -> str:
    """Return a line of the table."""
    if isinstance(found, str):
        return f"| {name} | {granted} | {limit} | - | - | does not fit: {found} | - |"
    predicted = f"{found['predicted'] / 1e6:.0f}" if found["predicted"] else "-"
    peak, seconds = f"{found['peak'] / 1e6:.0f}", f"{found['seconds']:.1f}"
    return f"| {name} | {granted} | {limit} | {found['steps']} | {predicted} | {peak} | {seconds} |"


def main(argv: list[str]) -> int:
    """Measure, or be a rank that does."""
    made = parser("memory", __doc__)
    made.add_argument("--nodes", type=int, default=100_000)
    made.add_argument("--features", type=int, default=64)
    made.add_argument("--hidden", type=int, default=128)
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--ranks", type=int, default=1)
    made.add_argument("--grants", default="2GB,400MB,200MB,100MB", help="what cooperative is granted")
    made.add_argument("--limit", default="300MB", help="of addresses, for full_graph and the last grant")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--case", help=argparse.SUPPRESS)
    made.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    if options.case is not None and launched_by_torchrun():
        measure(options)
        return 0
    common = {"layers": options.layers, "hidden": options.hidden, "warm": {}, "limit": 0}
    full = common | {"strategy": "full_graph", "options": {}}
    ordered = {"composition": "ordered", "keep": "rebuild"}
    grants = options.grants.split(",")
    granted = [
        common
        | {
            "strategy": "cooperative",
            "options": ordered | {"memory": one},
            "warm": ordered | {"memory": "1GB"},
        }
        for one in grants
    ]
    limit = {"limit": read_size(options.limit)}
    cases = [("full_graph", "-", "-", full)]
    cases += [("cooperative", size, "-", case) for size, case in zip(grants, granted, strict=True)]
    cases += [
        ("full_graph", "-", options.limit, full | limit),
        ("cooperative", grants[-1], options.limit, granted[-1] | limit),
    ]
    print("| strategy | granted | limit | R | predicted MB | peak MB | s an epoch |")
    print("|---|---|---|---|---|---|---|")
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, nodes in (("small", SMALL), ("large", options.nodes)):
            write_ring(Path(scratch, name), nodes, options.features)
        for name, size, held, case in cases:
            found = run(Path(scratch), case, options.ranks)
            figures.append({"strategy": name, "granted": size, "limit": held, "found": found})
            print(line_of(name, size, held, found), flush=True)
    write_json(options, figures)
    return 0
