"""Seconds per step of trainable rows: DistEmbedding against DDP over a dense ``nn.Embedding``, interleaved.

    python scripts/bench embeddings [--rows 1000000] [--dim 64] [--touched 100000] [--rounds 7]

Starts 2 ranks, as one server and as two, on loopback, one thread each. Both sides look up the same ids, take
the mean of the squares and step: SparseAdam and torch's Adam (a dense gradient has no sparse optimiser).
Prints medians over the rounds of the slower rank, and their ratio; at most 0.1 is asked for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from dglx_dist.comm.collectives import barrier, gather_json
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph, StepShare
from scripts.bench.micro.starter import in_turn, timed
from tests.helpers.ranks import run_ranks

WARM_UP = 2


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python scripts/bench embeddings", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--touched", type=int, default=100_000, help="distinct rows of a rank's batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--profile", action="store_true", help="seconds of lookup, backward and step, and no DDP"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "rows"
        write_rows_only(args.rows, folder)
        for per_server in (2, 1):
            arguments = (folder, args.dim, args.touched, args.rounds, args.profile)
            times = run_ranks(measure, 2, args=arguments, ranks_per_server=per_server, timeout_s=550)[0]
            print(f"2 ranks, {2 // per_server} server(s): {describe(times)}", flush=True)


def write_rows_only(num_rows: int, folder: Path) -> None:
    """A dataset of nodes and one edge, in two halves."""
    end = np.zeros(1, dtype=np.int64)
    graph = RawGraph(
        name="rows",
        num_nodes={NODE_TYPE: num_rows},
        edges={EDGE_TYPE: (end, end)},
        node_data={NODE_TYPE: {}},
        edge_data={EDGE_TYPE: {}},
    )
    part_of = (np.arange(num_rows) >= num_rows // 2).astype(np.int32)
    write_dataset(
        graph, Assignment(num_parts=2, part_of={NODE_TYPE: part_of}, method="halves", seed=0), folder
    )


def measure(folder: Path, dim: int, touched: int, rounds: int, profile: bool) -> dict[str, list[float]]:
    with start_session(seed=0) as session:
        session.step_share = StepShare(num_local=1, num_global=2)
        g = DistGraph(folder)
        generator = torch.Generator().manual_seed(session.topology.rank)
        batches = [
            torch.randperm(g.num_nodes(), generator=generator)[:touched] for _ in range(rounds + WARM_UP)
        ]
        parts: dict[str, list[float]] = {}
        ours = make_ours(g, dim, parts)
        theirs = None if profile else make_ddp(g.num_nodes(), dim)

        def turn(step: Callable[[torch.Tensor], None]) -> Callable[[], float]:
            left = iter(batches)

            def once() -> float:
                barrier(session, "next")
                return timed(lambda: step(next(left)))[0]

            return once

        steps = {"DistEmbedding": ours} if theirs is None else {"DistEmbedding": ours, "DDP": theirs}
        times = in_turn({name: turn(step) for name, step in steps.items()}, len(batches), WARM_UP)
        times |= {name: values[WARM_UP:] for name, values in parts.items()}
        told = gather_json(times, session)
        return {
            name: [max(both) for both in zip(*(one[name] for one in told), strict=True)] for name in times
        }


def make_ours(g: DistGraph, dim: int, parts: dict[str, list[float]]) -> Callable[[torch.Tensor], None]:
    embedding = DistEmbedding(g.num_nodes(), dim, "rows")
    optimizer = optim.SparseAdam([embedding], lr=0.01)

    def step(ids: torch.Tensor) -> None:
        at = [time.perf_counter()]
        loss = embedding(ids).pow(2).mean()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        at.append(time.perf_counter())
        for name, start, end in zip(("lookup", "backward", "step"), at, at[1:], strict=False):
            parts.setdefault(name, []).append(end - start)

    return step


def make_ddp(num_rows: int, dim: int) -> Callable[[torch.Tensor], None]:
    model = DistributedDataParallel(torch.nn.Embedding(num_rows, dim, sparse=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> None:
        loss = model(ids).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def describe(times: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(values) for name, values in times.items()}
    shown = ", ".join(f"{name} {1000 * median:.0f} ms" for name, median in medians.items())
    return shown + (f"; {medians['DistEmbedding'] / medians['DDP']:.3f}x" if "DDP" in medians else "")
