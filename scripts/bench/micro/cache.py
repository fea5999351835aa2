"""What a cache of remote rows saves: policies and budgets on one graph, as a Markdown table.

    OMP_NUM_THREADS=1 python scripts/bench cache --servers 2 --json cache.json

The built-in graph cut by metis, one rank per server, GraphSAGE's sampling (fan-out 25,10, 1000 seeds per
rank) and feature pulls, without a model. "hits" is the share of remote input rows that lay in the cache,
"predicted" what policy vip expects of it; bytes and seconds are per epoch, of all ranks and of the slowest.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from typing import Any

import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.collectives import barrier, gather_json
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.report.tables import markdown_table
from scripts.bench.micro.starter import graph_parser, on_graph, timed, write_json

FANOUTS, BATCH = [25, 10], 1000
ALPHAS = (0.05, 0.1, 0.2, 0.5, 1.0)
HEAD = ("policy", "alpha", "MB cached", "hits", "predicted", "MB sent", "epoch s")

Row = dict[str, Any]


def epochs(g: DistGraph, loader: Any, policy: str, alpha: float, count: int) -> Row:
    """Fill the cache, run ``count`` epochs after one to warm up; figures of all ranks."""
    key = g.ndata["feat"].kvstore_key
    how: dict[str, Any] = {"fanouts": FANOUTS, "batch_size": BATCH} if policy == "vip" else {}
    plan = g.cache_rows("feat", alpha=alpha, policy=policy, **how)
    mine, seconds = [], []
    for epoch in range(count + 1):
        barrier(g.session, f"{policy} {alpha} epoch {epoch}")
        counts, sent = g.kvstore.cache_counts(key), g.session.ledger.total(phase="features")
        seconds.append(timed(lambda: deque(loader, maxlen=0))[0])
        counts = g.kvstore.cache_counts(key) - counts
        mine.append([counts.hits, counts.misses, g.session.ledger.total(phase="features") - sent])
    told: list[Any] = gather_json([mine[1:], seconds[1:], plan.bytes, plan.expected_hit_rate], g.session)
    hits, misses, sent = (sum(epoch[i] for rank in told for epoch in rank[0]) for i in range(3))
    expected = [rank[3] for rank in told if rank[3] is not None]
    return {
        "policy": policy if alpha else "none",
        "alpha": alpha,
        "cached_bytes": sum(rank[2] for rank in told) if alpha else 0,
        "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "expected": statistics.fmean(expected) if expected and alpha else None,
        "bytes_sent": sent / count,
        "epoch_s": statistics.median(max(times) for times in zip(*(rank[1] for rank in told), strict=True)),
    }


def measure(options: argparse.Namespace) -> None:
    """What each rank does; rank 0 prints the table."""
    torch.set_num_threads(1)
    with start_session() as session:
        g = DistGraph(options.folder, structure="replicated")
        sampler = NeighborSampler(FANOUTS, prefetch_node_feats=["feat"], prefetch_labels=["label"])
        loader = DataLoader(g, node_split(g.ndata["train_mask"]), sampler, batch_size=BATCH, shuffle=True)
        rows = [epochs(g, loader, "halo", 0.0, options.epochs)]
        for policy in ("degree", "halo", "vip"):
            rows += [epochs(g, loader, policy, alpha, options.epochs) for alpha in ALPHAS]
        if session.topology.rank == 0:
            print(markdown_table(HEAD, [cells(row) for row in rows]))
            write_json(options, rows)
        g.close()


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    return (
        row["policy"],
        f"{row['alpha']:g}",
        f"{row['cached_bytes'] / 1e6:.1f}",
        f"{row['hit_rate']:.1%}",
        "" if row["expected"] is None else f"{row['expected']:.1%}",
        f"{row['bytes_sent'] / 1e6:.1f}",
        f"{row['epoch_s']:.2f}",
    )


def main(argv: list[str]) -> int:
    """Start the ranks of this script, or be one of them."""
    parser = graph_parser("cache", __doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3, help="counted ones, for each row of the table")
    options = parser.parse_args(argv)
    return on_graph(lambda: measure(options), options.servers, options)
