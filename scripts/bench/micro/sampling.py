"""Neighbour sampling beside stock DGL, and slicing beside NumPy: one thread, interleaved, medians.

    OMP_NUM_THREADS=1 python scripts/bench sampling --json sampling.json

Both loaders see the built-in graph (200,000 nodes, 5 M edges), batches of 1000 and the same seeds in turn,
and both figures include building the blocks. DGL is used as it comes: int64, its fused sampler. Ours runs in
the calling thread. The second table has a graph of 4 node types and 8 edge types; DGL's fused sampler takes
several types as well.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.row_kernels import gather_rows
from dglx_dist.records import Assignment, RawGraph
from scripts.bench.micro.timing import in_turn, parser, table, time_call, write_json

BATCH, WARM_UP = 1000, 3
FANOUTS, RELATIONAL_FANOUTS = ([15, 10, 5], [25, 10]), ([5, 5], [10, 5, 3])
SPEED_TARGET, SLICING_TARGET = 1.7, 0.8
Row = dict[str, Any]


def relational(nodes: int, degree: float) -> RawGraph:
    """A random graph of 4 node types and 8 edge types."""
    rng, counts = np.random.default_rng(0), {f"n{t}": nodes * (t + 1) // 10 for t in range(4)}
    edges, num_edges = {}, int(nodes * degree / 8)
    for number in range(8):
        source, target = f"n{number % 4}", f"n{(number * 3 + number // 4) % 4}"
        ends = (rng.integers(0, counts[ntype], num_edges) for ntype in (source, target))
        edges[source, f"r{number}", target] = next(ends), next(ends)
    return RawGraph(name="relational", num_nodes=counts, edges=edges)


def open_both(raw: RawGraph, folder: Path) -> tuple[DistGraph, dgl.DGLGraph]:
    """Store ``raw`` in one part; return it as both systems have it, for DGL with int64 ids and in-edges."""
    owner = {ntype: np.zeros(count, np.int32) for ntype, count in raw.num_nodes.items()}
    write_dataset(raw, Assignment(num_parts=1, part_of=owner, method="file", seed=0), folder)
    g, data = DistGraph(folder), {}
    for etype in g.canonical_etypes:
        shard = g.structure(etype).shards[0]
        arrays = (shard.indptr, shard.indices, np.empty(0))
        data[etype] = ("csc", tuple(torch.from_numpy(array.astype(np.int64)) for array in arrays))
    return g, dgl.heterograph(data, num_nodes_dict=raw.num_nodes).formats("csc")


def compare_sampling(g: DistGraph, whole: dgl.DGLGraph, fanouts: list[int], steps: int) -> Row:
    """Million edges per second of both loaders, from seeds of the last (largest) type; medians, and ratio."""
    last = g.ntypes[-1]
    draw = torch.Generator().manual_seed(0)
    seeds: Any = torch.randperm(g.num_nodes(last), generator=draw)[: BATCH * steps]
    seeds = seeds if len(g.ntypes) == 1 else {last: seeds}
    ours = DataLoader(g, seeds, NeighborSampler(fanouts), batch_size=BATCH, num_threads=0)
    dgl_loader = dgl.dataloading.DataLoader(whole, seeds, NeighborSampler(fanouts), batch_size=BATCH)
    contestants = {"dgl": loader_rates(iter(dgl_loader)), "ours": loader_rates(iter(ours))}
    named = {name: rates.__next__ for name, rates in contestants.items()}
    rates = in_turn(named, min(steps, len(ours)), WARM_UP)
    medians = {f"{name}_m_edges_s": statistics.median(values) for name, values in rates.items()}
    pairs = zip(rates["ours"], rates["dgl"], strict=True)
    return {
        "fanouts": fanouts,
        **medians,
        "ratio": statistics.median(ours_s / dgl_s for ours_s, dgl_s in pairs),
    }


def loader_rates(loader: Iterator[tuple[object, object, list[dgl.DGLGraph]]]) -> Iterator[float]:
    """Million edges per second of a loader, blocks included, batch by batch."""
    while True:
        took, batch = time_call(lambda: next(loader, None))
        if batch is None:
            return
        yield sum(block.num_edges() for block in batch[2]) / took / 1e6


def compare_slicing(g: DistGraph, steps: int, rows_of_batch: int) -> Row:
    """Gather random feature rows into a kept buffer: ours, and numpy.take with out= (clip: its fast mode)."""
    rows = g.kvstore.column(g.ndata["feat"].kvstore_key).shards[0].rows
    rng = np.random.default_rng(0)
    out = np.empty((rows_of_batch, rows.shape[1]), rows.dtype)

    def rate(copy: Callable[[np.ndarray], object]) -> float:
        ids = rng.integers(0, len(rows), rows_of_batch)
        return out.nbytes / time_call(lambda: copy(ids))[0] / 1e9

    contestants = {
        "ours": lambda: rate(lambda ids: gather_rows(rows, 0, ids, out)),
        "take": lambda: rate(lambda ids: np.take(rows, ids, axis=0, out=out, mode="clip")),
    }
    rates = in_turn(contestants, steps, WARM_UP)
    ours, take = (statistics.median(values) for values in rates.values())
    return {"row_bytes": rows[0].nbytes, "ours_gb_s": ours, "take_gb_s": take, "ratio": ours / take}


def main(argv: list[str]) -> None:
    made = parser("sampling", __doc__)
    made.add_argument("--nodes", type=int, default=200_000)
    made.add_argument("--degree", type=float, default=25.0)
    made.add_argument("--steps", type=int, default=60, help="batches of each contestant and fan-out")
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*CPU affinity.*")
    graphs = {
        "sampling": (generate(SyntheticConfig(nodes=options.nodes, degree=options.degree)), FANOUTS),
        "relational": (relational(options.nodes, options.degree), RELATIONAL_FANOUTS),
    }
    with tempfile.TemporaryDirectory() as folder, start_session():
        rows_by_topic: dict[str, list[Row]] = {}
        for name, (raw, all_fanouts) in graphs.items():
            g, dgl_graph = open_both(raw, Path(folder) / name)
            rows_by_topic[name] = [
                compare_sampling(g, dgl_graph, fanouts, options.steps) for fanouts in all_fanouts
            ]
            if name == "sampling":
                rows_by_topic["slicing"] = [compare_slicing(g, options.steps, options.nodes // 2)]
    for name, rows in rows_by_topic.items():
        target = SLICING_TARGET if name == "slicing" else SPEED_TARGET
        print(table([{**row, f"at least {target}": row["ratio"] >= target} for row in rows]), end="\n\n")
    write_json(options.json, rows_by_topic)
