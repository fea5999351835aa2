"""How much of a link's rate the halo exchange uses, in both directions at once, beside gloo's ways.

    python scripts/netlab run --servers 2 --external 1gbit -- python scripts/bench halo --rate 1gbit

Every rank sends rows of 64 float32, picked at random, to every rank of the other servers and gets as many;
a size is what leaves one server in one exchange. Timed from when all ranks begin to when the last one has
its rows, copies and sums included. "forward" and "backward" are HaloExchange's; "all to all" and "messages"
do the same as forward by torch.distributed. "one after the other" is the mean over forward and backward
without a common start. Shares are payload over the rate that is set, headers not counted; medians.

    python scripts/netlab run --servers 2 --external 1gbit -- python scripts/bench halo --dataset DIR

Instead goes over the batches of a dataset (fan-out 25,10, batch size 1000) for two epochs with each policy of
caches of remote rows, and without one: megabytes of features between servers in both, hits and seconds of the
second. "distinct" is what each rank would fetch if it kept every row until the end of the epoch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.collectives import gather_int64, gather_json
from dglx_dist.comm.session import Session, start_session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.cache import POLICIES
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import node_split
from dglx_dist.planner.records import Rate
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer
from scripts.bench.micro.timing import parser, table, time_call, write_json

WIDTH = 64
FEATURE, FANOUTS, BATCH = "feat", [25, 10], 1000


def make_layer(session: Session, server_bytes: int) -> HaloLayer:
    """Rows to and from every rank of the other servers, ``server_bytes`` out of each server in all."""
    topology = session.topology
    remote_ranks = [
        rank for rank in range(topology.world_size) if topology.server_of_rank[rank] != topology.server
    ]
    per_server = len(topology.ranks_of_server(topology.server))
    count = max(server_bytes // (per_server * len(remote_ranks) * WIDTH * 4), 1)
    random = np.random.default_rng(topology.rank)
    own_rows = 2 * count
    return HaloLayer(
        own_rows=own_rows,
        targets=0,
        indptr=np.zeros(1, dtype=np.int64),
        indices=np.zeros(0, dtype=np.int64),
        edge_ids=np.zeros(0, dtype=np.int64),
        halo_nodes=np.arange(count * len(remote_ranks)),
        receive=tuple((rank, count) for rank in remote_ranks),
        send=tuple((rank, random.permutation(own_rows)[:count]) for rank in remote_ranks),
    )


class Gloo:
    """The forward exchange by torch.distributed, into kept buffers."""

    def __init__(self, session: Session, layer: HaloLayer) -> None:
        world_size = session.topology.world_size
        self.rows = torch.from_numpy(np.concatenate([rows for _, rows in layer.send]))
        sent, came = {rank: len(rows) for rank, rows in layer.send}, dict(layer.receive)
        self.sent = [sent.get(rank, 0) for rank in range(world_size)]
        self.came = [came.get(rank, 0) for rank in range(world_size)]
        self.room = torch.empty(len(self.rows), WIDTH)
        self.own_rows, self.num_sources = layer.own_rows, layer.num_sources
        self.session = session

    def all_to_all(self, h: torch.Tensor) -> torch.Tensor:
        out = self._begin(h)
        dist.all_to_all_single(out[self.own_rows :], self.room, self.came, self.sent)
        return out

    def messages(self, h: torch.Tensor) -> torch.Tensor:
        out = self._begin(h)
        halo = out[self.own_rows :].split(self.came)
        works = [dist.irecv(room, rank) for rank, room in enumerate(halo) if len(room)]
        works += [dist.isend(part, rank) for rank, part in enumerate(self.room.split(self.sent)) if len(part)]
        for work in works:
            work.wait()
        return out

    def _begin(self, h: torch.Tensor) -> torch.Tensor:
        torch.index_select(h, 0, self.rows, out=self.room)
        out = torch.empty(self.num_sources, WIDTH)
        out[: self.own_rows] = h
        # So that the lab's count of bytes on the cards can be compared.
        for rank, count in enumerate(self.sent):
            self.session.ledger.add("gloo", 1, self.session.topology.rank, rank, count * WIDTH * 4)
        return out


def seconds_of(session: Session, action: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round on the slowest rank."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        seconds.append(time_call(action)[0])
    seconds_by_rank = gather_json(seconds, session)
    assert all(isinstance(values, list) for values in seconds_by_rank)
    return [max(times) for times in zip(*seconds_by_rank, strict=True)][1:]


def shares_of(session: Session, megabytes: float, rounds: int, rate: Rate) -> dict[str, float]:
    """Share of the rate that each way reaches at one size."""
    layer = make_layer(session, round(megabytes * 1e6))
    halo, gloo = HaloExchange(session, layer, 1), Gloo(session, layer)
    h = torch.randn(layer.own_rows, WIDTH)
    gradient = torch.randn(layer.num_sources, WIDTH)
    assert torch.equal(gloo.messages(h), halo.exchange(h))

    def both() -> None:
        for _ in range(rounds):
            halo.append(h, None)
            halo.return_gradients(gradient)

    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: halo.append(h, None),
        "backward": lambda: halo.return_gradients(gradient),
        "all to all": lambda: gloo.all_to_all(h),
        "messages": lambda: gloo.messages(h),
    }
    took = {name: statistics.median(seconds_of(session, action, rounds + 1)) for name, action in ways.items()}
    took["one after the other"] = statistics.median(seconds_of(session, both, 2)) / (2 * rounds)
    ranks = len(session.topology.ranks_of_server(0))
    server_bytes = ranks * sum(len(rows) for _, rows in layer.send) * WIDTH * 4
    return {"MB": server_bytes / 1e6} | {
        name: server_bytes * 8 / seconds / rate.bits_per_s for name, seconds in took.items()
    }


def epochs_of(session: Session, g: DistGraph, policy: str, alpha: float) -> dict[str, object]:
    """Count the rows that two epochs of batches move with a cache of remote rows."""
    column = g.kvstore.column(g.ndata[FEATURE].kvstore_key)
    how: dict[str, object] = {"fanouts": FANOUTS, "batch_size": BATCH} if policy == "vip" else {}
    g.cache_rows(FEATURE, alpha=alpha, policy=policy if alpha else "degree", **how)  # type: ignore[arg-type]
    sampler = NeighborSampler(FANOUTS, prefetch_node_feats=[FEATURE])
    loader = DataLoader(g, node_split(g.ndata["train_mask"]), sampler, batch_size=BATCH, shuffle=True)
    first, end = column.bounds[session.topology.server : session.topology.server + 2]
    counts = []
    for _ in range(2):
        seen = np.zeros(column.num_rows, bool)
        before, counted = session.ledger.total(phase="features"), g.kvstore.cache_counts(column.name)
        dist.barrier()
        seconds, _ = time_call(lambda seen=seen: [seen.__setitem__(inputs, True) for inputs, _, _ in loader])
        seen[first:end] = False
        counts_now = g.kvstore.cache_counts(column.name) - counted
        sent = session.ledger.total(phase="features") - before
        counts.append(
            [sent, np.count_nonzero(seen), counts_now.hits, counts_now.misses, round(seconds * 1e6)]
        )
    every = gather_int64([int(count) for epoch in counts for count in epoch], session).reshape(-1, 2, 5)
    total, distinct = every.sum(0), (8 + column.row_bytes) / 1e6
    return {
        "policy": policy,
        "alpha": alpha,
        "MB, epoch 1": total[0, 0] / 1e6,
        "MB, epoch 2": total[1, 0] / 1e6,
        "hits %": 100 * total[1, 2] / max(total[1, 2] + total[1, 3], 1),
        "distinct MB": total[1, 1] * distinct,
        "s": every[:, 1, 4].max() / 1e6,
    }


def main(argv: list[str]) -> int:
    """Measure on each rank. Rank 0 prints the shares."""
    arguments = parser("halo", __doc__)
    arguments.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument(
        "--rate", type=Rate.parse, default=Rate.parse("1gbit"), help="what the lab was given"
    )
    arguments.add_argument("--dataset", type=Path, help="compare caches of remote rows on this one")
    arguments.add_argument("--alphas", type=float, nargs="+", default=[0.05, 0.1])
    arguments.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    arguments.add_argument("--json", type=Path, help="write the figures to this file too")
    options: argparse.Namespace = arguments.parse_args(argv)
    torch.set_num_threads(1)
    with start_session() as session:
        if session.topology.num_servers == 1:
            arguments.error("one server has no link to another: python scripts/netlab run --servers 2 -- ...")
        if options.dataset:
            g = DistGraph(options.dataset, structure="replicated")
            caches = [(policy, alpha) for alpha in options.alphas for policy in options.policies]
            epochs = [epochs_of(session, g, *alpha) for alpha in [("none", 0.0), *caches]]
            if session.topology.rank == 0:
                print(table(epochs), flush=True)
                write_json(options.json, epochs)
            return 0
        rows = [shares_of(session, size, options.rounds, options.rate) for size in options.megabytes]
        if session.topology.rank == 0:
            shown = [
                {"MB": f"{row['MB']:.1f}", **{name: f"{row[name]:.1%}" for name in row if name != "MB"}}
                for row in rows
            ]
            print(table(shown), flush=True)
            write_json(options.json, {"rate": str(options.rate), "shares": rows})
    return 0
