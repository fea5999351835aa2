"""How fast rows are written: overwritten and added, own and another server's, beside a copy and a bare call.

    OMP_NUM_THREADS=1 python scripts/bench push --json push.json

Two servers of one rank, a float32 tensor in memory. Rank 0 pushes random rows, distinct or each about three
times, while rank 1 serves. "copy" is one NumPy copy of as many bytes, "call" a one-sided call that carries
the same ids and rows, in pieces of the same size, to a handler that does nothing. Medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import Session, start_session
from dglx_dist.graph.column import Column, Shard
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import MAX_MESSAGE_BYTES, Placement
from dglx_dist.graph.shared_memory import shared_rows
from dglx_dist.records import Array, ColumnInfo
from scripts.bench.micro.starter import median_seconds, on_ranks, parser, write_json

ROWS_PER_SERVER = 400_000


def open_store(session: Session, columns: int) -> KVStore:
    """One writable tensor ``x`` over two servers."""
    store = KVStore(session, Placement(2, session.topology))
    info = ColumnInfo(dtype="float32", row_shape=(columns,))
    rows = shared_rows(session, "bench-push", ROWS_PER_SERVER, info)
    shard = Shard(first=session.topology.server * ROWS_PER_SERVER, rows=rows)
    bounds = np.arange(3) * ROWS_PER_SERVER
    store.add_column(Column(name="x", info=info, bounds=bounds, shards=(shard,), writable=True))
    session.rpc.register("bench.sink", lambda _name, _arrays: [])
    barrier(session, "opening")
    return store


def call_in_pieces(session: Session, ids: Array, rows: Array) -> None:
    """Send ids and rows to rank 1 as a push does, and wait."""
    step = MAX_MESSAGE_BYTES // rows[0].nbytes
    pending = [
        session.rpc.submit(1, "bench.sink", "", [ids[at : at + step], rows[at : at + step]], phase="bench")
        for at in range(0, len(ids), step)
    ]
    for call in pending:
        call.result()


def rates(session: Session, store: KVStore, count: int, columns: int, rounds: int) -> list[dict[str, object]]:
    """GB/s and milliseconds of each kind of write of ``count`` rows."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((count, columns), dtype=np.float32)
    distinct = random.permutation(ROWS_PER_SERVER)[:count]
    repeated = random.choice(distinct[: count // 3], count)
    target = np.empty_like(rows)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, rows),
        "call": lambda: call_in_pieces(session, distinct, rows),
    }
    for place, first in (("own", 0), ("remote", ROWS_PER_SERVER)):
        for what, ids in (("distinct", distinct + first), ("repeated", repeated + first)):
            for accumulate in (False, True):
                kind = f"{place} {what} {'add' if accumulate else 'overwrite'}"
                works[kind] = lambda ids=ids, accumulate=accumulate: store.push(
                    "x", ids, rows, accumulate=accumulate
                )
    ids = distinct + ROWS_PER_SERVER
    works["remote distinct add, not waited for"] = lambda: store.push(
        "x", ids, rows, accumulate=True, wait=False
    )
    figures = []
    for kind, work in works.items():
        seconds = median_seconds(work, rounds)
        store.fence()
        figures.append({"kind": kind, "ms": seconds * 1e3, "gb_s": rows.nbytes / seconds / 1e9})
    return figures


def measure(options: argparse.Namespace) -> None:
    """What each rank does; rank 0 pushes and prints."""
    torch.set_num_threads(1)
    with start_session() as session:
        store = open_store(session, options.columns)
        if session.topology.rank == 0:
            figures = rates(session, store, options.rows, options.columns, options.rounds)
            for one in figures:
                print(f"{one['kind']:<40}{one['ms']:>10.2f} ms{one['gb_s']:>8.2f} GB/s")
            write_json(options, figures)
        barrier(session, "measuring")
        store.close()


def main(argv: list[str]) -> int:
    """Start two ranks of this script, or be one of them."""
    options_of = parser("push", __doc__)
    options_of.add_argument("--rows", type=int, default=100_000, help="of one push")
    options_of.add_argument("--columns", type=int, default=64)
    options_of.add_argument("--rounds", type=int, default=9)
    options = options_of.parse_args(argv)
    return on_ranks(lambda: measure(options), 2, sys.argv)
