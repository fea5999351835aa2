"""Exact inference of all nodes on ranks beside plain DGL's layer-wise inference in one process.

    OMP_NUM_THREADS=1 python scripts/bench inference --nodes 1000000 --degree 24 --json inference.json

The graph is synthetic, in two parts on one server. The model is GraphSAGE 2 x 64 on 64 features. Plain DGL
takes batches of all in-neighbours, with two threads. The figures are millions of edges per second of each
layer, and the largest difference of the scores in float64.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler

import dglx_dist as dx
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.records import EDGE_TYPE, FEATURE, NODE_TYPE
from dglx_dist.training.models import build_model
from scripts.bench.micro.timing import dglx, in_turn, parser, table, write_json

WIDTH, CLASSES, PARTS, THREADS = 64, 16, 2, 2


def make_layers(dtype: torch.dtype, starts: list[float]) -> list[Callable[[Any, Any], Any]]:
    """Return the layers of the model. They append the time of their first call to ``starts``."""
    torch.manual_seed(0)
    model = build_model("sage", WIDTH, WIDTH, CLASSES, layers=2).to(dtype).eval()

    def note_start(depth: int, layer: Any, block: Any, rows: Any) -> Any:
        if len(starts) == depth:
            starts.append(time.perf_counter())
        return layer(block, rows)

    return [
        lambda block, rows, depth=depth, layer=layer: note_start(depth, layer, block, rows)
        for depth, layer in enumerate(model.inference_layers())
    ]


def run_as_rank(folder: str, dtype: str, out: str) -> None:
    """Infer all nodes in a rank of torchrun, twice. Rank 0 saves seconds of the layers and the scores."""
    session = dx.init(seed=0)
    g = dx.DistGraph(folder)
    for _ in range(2):
        starts: list[float] = []
        layers = make_layers(getattr(torch, dtype), starts)
        begin = time.perf_counter()
        scores = dx.layerwise_inference(torch.nn.Linear(1, 1).to(getattr(torch, dtype)), g, layers=layers)
        seconds = np.diff([begin, starts[1], time.perf_counter()])
    if session.topology.rank == 0:
        np.savez(out, seconds=seconds, scores=scores[:].numpy())
    dx.shutdown()


def run_ranks(folder: Path, ranks: int, dtype: str, out: Path) -> Any:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [*launch, "scripts/bench", "inference", "rank", str(folder), dtype, str(out)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(THREADS // ranks or 1)})
    return np.load(out)


def run_plain(folder: Path, dtype: torch.dtype, batch_size: int) -> tuple[list[float], torch.Tensor]:
    """Infer all nodes with plain DGL on the numbering of the dataset. Return seconds by layer and scores."""
    dataset = open_dataset(folder)
    parts = [dataset.part(part) for part in range(PARTS)]
    indptr = [np.zeros(1, np.int64)]
    for part in parts:
        indptr.append(part.indptr(EDGE_TYPE)[1:] + indptr[-1][-1])
    indices = np.concatenate([part.indices(EDGE_TYPE) for part in parts]).astype(np.int64)
    graph = dgl.graph(("csc", (np.concatenate(indptr), indices, [])))
    rows = np.concatenate([part.node_data(NODE_TYPE, FEATURE) for part in parts])
    h = torch.from_numpy(rows).to(dtype)
    torch.set_num_threads(THREADS)
    seconds = []
    for layer in make_layers(dtype, []):
        begin = time.perf_counter()
        results = []
        sampler = MultiLayerFullNeighborSampler(1)
        for inputs, _, blocks in DataLoader(graph, graph.nodes(), sampler, batch_size=batch_size):
            with torch.no_grad():
                results.append(layer(blocks[0], h[inputs]))
        h = torch.cat(results)
        seconds.append(time.perf_counter() - begin)
    return seconds, h


def main(argv: list[str]) -> None:
    if argv[:1] == ["rank"]:
        run_as_rank(*argv[1:])
        return
    made = parser("inference", __doc__)
    made.add_argument("--nodes", type=int, default=1_000_000)
    made.add_argument("--degree", type=int, default=24)
    made.add_argument("--plain-batch", type=int, nargs="*", default=[10_000, 100_000], help="of plain DGL")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--work", type=Path, help="folder that keeps the dataset; default: a temporary one")
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    options = made.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = (options.work or Path(name)) / f"{options.nodes}-{options.degree}"
        if not folder.exists():
            data = (
                f"synthetic:nodes={options.nodes},degree={options.degree},features={WIDTH},classes={CLASSES}"
            )
            dglx("partition", data, "--parts", PARTS, "--out", folder)
        rows = compare(folder, options, Path(name) / "scores.npz")
    print(table(rows))
    write_json(options.json, rows)
    if max(float(row["difference"]) for row in rows) > 1e-12:
        raise SystemExit(1)


def compare(folder: Path, options: Any, out: Path) -> list[dict[str, Any]]:
    """Return a row of figures for each way: ranks, and plain DGL with each size of batches."""
    num_edges = options.nodes * options.degree
    _, exact_scores = run_plain(folder, torch.float64, max(options.plain_batch))
    ways: dict[str, Callable[[], Sequence[float]]] = {}
    differences = {}
    for ranks in (1, 2):
        scores = run_ranks(folder, ranks, "float64", out)["scores"]
        differences[f"{ranks} ranks"] = float(np.abs(scores - exact_scores.numpy()).max())
        ways[f"{ranks} ranks"] = lambda ranks=ranks: run_ranks(folder, ranks, "float32", out)["seconds"]
    for size in options.plain_batch:
        ways[f"plain DGL, {size}"] = lambda size=size: run_plain(folder, torch.float32, size)[0]
    seconds_of = in_turn(ways, options.rounds)
    rows = []
    for way, seconds in seconds_of.items():
        medians = [statistics.median(values) for values in zip(*seconds, strict=True)]
        row: dict[str, Any] = {"way": way, "seconds": sum(medians)}
        for depth, value in enumerate(medians, 1):
            row[f"layer {depth}, M edges/s"] = num_edges / value / 1e6
        rows.append({**row, "difference": f"{differences.get(way, 0.0):.1e}"})
    return rows
