"""LABOR beside neighbour sampling: rows of a batch, bytes of an epoch, time of a draw.

    dglx partition synthetic:nodes=200000,degree=25,seed=0 --parts 2 --method metis --out DIR
    DGLX_RANKS_PER_SERVER=1 torchrun --nproc-per-node 2 scripts/bench labor DIR

Every rank is a server and goes over its training nodes for two epochs with each sampler, without a cache of
remote rows and with one that looks ahead. ``rows`` are the distinct inputs of a batch and ``edges`` the drawn
edges, means over the second epoch; ``MB`` are the features that all ranks fetched in it; ``ms`` is the median
time of the thread that draws a batch and builds its blocks, taken in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dgl.dataloading import LaborSampler, NeighborSampler

from dglx_dist.comm.collectives import gather_int64
from dglx_dist.comm.session import Session, start_session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from scripts.bench.micro.timing import in_turn, parser, table, write_json

SAMPLERS: dict[str, tuple[type, dict[str, Any]]] = {
    "neighbour": (NeighborSampler, {}),
    "labor": (LaborSampler, {}),
    "labor, layer_dependency": (LaborSampler, {"layer_dependency": True}),
    "labor, batch_dependency 8": (LaborSampler, {"batch_dependency": 8}),
    "labor, both": (LaborSampler, {"layer_dependency": True, "batch_dependency": 8}),
    "labor, importance 1": (LaborSampler, {"importance_sampling": 1}),
}
WARM_UP = 3


def loader_of(g: DistGraph, name: str, options: argparse.Namespace, **more: Any) -> DataLoader:
    kind, arguments = SAMPLERS[name]
    sampler = kind(options.fanouts, prefetch_node_feats=more.pop("prefetch", []), **arguments)
    seeds = node_split(g.ndata["train_mask"])
    return DataLoader(g, seeds, sampler, batch_size=options.batch_size, shuffle=True, **more)


def epoch_of(
    session: Session, g: DistGraph, name: str, options: argparse.Namespace, alpha: float = 0.0
) -> tuple[float, ...]:
    """Input rows and edges of a batch of the second epoch, and megabytes that all ranks fetched in it."""
    # Anew for each, or one would find the rows of the one before.
    g.cache_rows("feat", alpha=alpha, policy="lookahead")
    loader, counts = loader_of(g, name, options, prefetch=["feat"]), [0, 0, 0]
    for _ in range(2):
        before, counts = session.ledger.total(phase="features"), [0, 0, 0]
        for inputs, _, blocks in loader:
            counts[0] += len(inputs)
            counts[1] += sum(block.num_edges() for block in blocks)
        counts[2] = session.ledger.total(phase="features") - before
        dist.barrier()
    rows, edges, sent = gather_int64(counts, session).reshape(-1, 3).sum(0)
    batches = len(loader) * session.topology.world_size
    return rows / batches, edges / batches, sent / 1e6


def seconds_of(g: DistGraph, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of this thread for a batch without features."""

    def endless(name: str) -> Any:
        loader = loader_of(g, name, options, num_threads=0)
        while True:
            yield from loader

    def next_of(name: str) -> Callable[[], float]:
        batches = endless(name)

        def one() -> float:
            begin = time.thread_time()
            next(batches)
            return time.thread_time() - begin

        return one

    seconds_by_name = in_turn({name: next_of(name) for name in SAMPLERS}, options.steps, WARM_UP)
    return {name: statistics.median(seconds) for name, seconds in seconds_by_name.items()}


def main(argv: list[str]) -> int:
    """Measure on each rank. Rank 0 prints the table."""
    arguments = parser("labor", __doc__)
    arguments.add_argument("dataset", type=Path)
    arguments.add_argument("--fanouts", type=int, nargs="+", default=[10, 10], help="input-most first")
    arguments.add_argument("--batch-size", type=int, default=1000)
    arguments.add_argument("--alpha", type=float, default=0.1, help="of the cache, of a server's rows")
    arguments.add_argument("--steps", type=int, default=23, help="batches that are timed")
    arguments.add_argument("--json", type=Path, help="write the figures to this file too")
    options = arguments.parse_args(argv)
    torch.set_num_threads(1)
    with start_session() as session:
        if session.topology.num_servers == 1:
            arguments.error(
                "one server fetches nothing: DGLX_RANKS_PER_SERVER=1 torchrun --nproc-per-node 2 ..."
            )
        g = DistGraph(options.dataset, structure="replicated")
        plain = {name: epoch_of(session, g, name, options) for name in SAMPLERS}
        cached = {name: epoch_of(session, g, name, options, options.alpha)[2] for name in SAMPLERS}
        seconds = seconds_of(g, options)
        dist.barrier()
        rows = [
            {
                "sampler": name,
                "rows": plain[name][0],
                "edges": plain[name][1],
                "MB": plain[name][2],
                f"MB, lookahead {options.alpha:g}": cached[name],
                "ms": 1e3 * seconds[name],
            }
            for name in SAMPLERS
        ]
        if session.topology.rank == 0:
            print(table(rows), flush=True)
            write_json(options.json, rows)
    return 0
