"""How fast feature rows arrive: from own memory, from a cache, from another server; two servers of one rank.

    OMP_NUM_THREADS=1 python scripts/bench pull --json pull.json

The built-in graph (200,000 nodes, 5 M edges, 100 float32 features) in two parts. "rows" pulls random distinct
rows of one kind only, into a kept buffer and into a fresh one; "batches" pulls what the batches of a loader
need (fan-out 25,10, 1000 seeds), without and with a cache of all remote rows that they may need. Both ranks
work at the same time, so each also serves. Medians.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.column import RowCache
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.row_kernels import SlotTable, fill_table, table_sizes
from dglx_dist.graph.split import node_split
from dglx_dist.records import Array
from scripts.bench.micro.starter import graph_parser, median_seconds, on_graph, text_table, write_json

FANOUTS, BATCH = [25, 10], 1000


def private_cache(g: DistGraph, key: str, ids: Array) -> RowCache:
    """A cache of ``ids`` in memory of this rank alone."""
    num_slots, num_keys = table_sizes(len(ids), g.num_nodes())
    table = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
    fill_table(table, ids)
    return RowCache(table=table, rows=g.kvstore.pull(key, ids, phase="cache").numpy())


def rows_per_kind(g: DistGraph, count: int, rounds: int) -> dict[str, float]:
    """GB/s of random distinct rows of one kind at a time; all ranks at once."""
    key = g.ndata["feat"].kvstore_key
    column = g.kvstore.column(key)
    server, bounds = g.session.topology.server, column.bounds
    random, everything = np.random.default_rng(g.rank()), np.arange(g.num_nodes())
    own = (everything >= bounds[server]) & (everything < bounds[server + 1])
    count = min(count, int(own.sum()), int((~own).sum()))
    local, remote = (random.permutation(everything[mask])[:count] for mask in (own, ~own))
    kept = torch.empty(count, *column.info.row_shape)
    rates = {}

    def measure(name: str, ids: Array, out: torch.Tensor | None) -> None:
        barrier(g.session, name)
        took = median_seconds(lambda: g.kvstore.pull(key, ids, out=out, distinct=True), rounds)
        rates[f"{name}_gb_s"] = count * column.row_bytes / took / 1e9

    measure("local", local, kept)
    measure("local_fresh", local, None)
    measure("remote", remote, kept)
    barrier(g.session, "remote rows")
    g.kvstore.set_cache(key, private_cache(g, key, np.sort(remote)))
    measure("cached", remote, kept)
    g.kvstore.set_cache(key, None)
    return rates


def batch_times(g: DistGraph, alpha: float, steps: int) -> dict[str, float]:
    """Milliseconds per batch of a loader that runs in the calling thread, and what it pulled."""
    key, seeds = g.ndata["feat"].kvstore_key, node_split(g.ndata["train_mask"])
    plan = g.cache_rows("feat", alpha=alpha, policy="vip", fanouts=FANOUTS, batch_size=BATCH)
    sampler = NeighborSampler(FANOUTS, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(g, seeds, sampler, batch_size=BATCH, shuffle=True, num_threads=0)
    times, rows = [], []
    counted, sent = g.kvstore.cache_counts(key), g.session.ledger.total(phase="features")
    while len(times) < steps:
        for nodes, _, _ in loader:
            spent = loader.times(reset=True)
            times.append((spent.sample_s * 1e3, spent.fetch_s * 1e3))
            rows.append(len(nodes))
    counts = g.kvstore.cache_counts(key) - counted
    sent = g.session.ledger.total(phase="features") - sent
    fetch_ms = statistics.median(fetch for _, fetch in times[3:])
    row_bytes = g.kvstore.column(key).row_bytes
    return {
        "alpha": alpha,
        "cached_rows": plan.rows,
        "hit_rate": counts.hit_rate or 0.0,
        "expected": plan.expected_hit_rate or 0.0,
        "rows": statistics.median(rows),
        "sample_ms": statistics.median(sample for sample, _ in times[3:]),
        "fetch_ms": fetch_ms,
        "gb_s": statistics.median(rows) * row_bytes / fetch_ms / 1e6,
        "mb_sent": sent / len(times) / 1e6,
    }


def measure(options: argparse.Namespace) -> None:
    """What each rank does; rank 0 prints its figures."""
    torch.set_num_threads(1)
    with start_session() as session:
        g = DistGraph(options.folder, structure="replicated")
        rates = rows_per_kind(g, options.rows, options.rounds)
        batches = [batch_times(g, alpha, options.steps) for alpha in (0.0, 0.2, 1.0)]
        if session.topology.rank == 0:
            print(text_table([rates]), text_table(batches), sep="\n\n")
            write_json(options, {"rows": rates, "batches": batches})
        g.close()


def main(argv: list[str]) -> int:
    """Start two ranks of this script, or be one of them."""
    parser = graph_parser("pull", __doc__)
    parser.add_argument("--rows", type=int, default=60_000, help="of one pull of one kind")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24, help="batches of each kind, at least")
    options = parser.parse_args(argv)
    return on_graph(lambda: measure(options), 2, options)
