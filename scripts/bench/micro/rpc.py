"""Throughput and latency of one-sided calls beside bare pyzmq, on this machine, in one run.

    python scripts/bench rpc [--json FILE] [--rounds 15]

Two processes, TCP over loopback. Bare pyzmq is a ROUTER that answers each request with a buffer it holds
(copy=False) and a DEALER that takes it (copy=False): no head, no secret, no dtype. Ours is the same call
through `Rpc`. Both are measured in turn, round after round; medians are shown, and the ratio is the median of
the rounds' ratios, for the machine's speed drifts between rounds. The exit status is 1 when a pull of 64 KB
to 16 MB, one call at a time, is below 60 %.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from dglx_dist.comm.auth import Credentials
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.rpc import PeerAddress, Rpc, ServeConfig
from dglx_dist.comm.topology import Topology
from scripts.bench.micro.timing import parser, text_table, write_json

SIZES = [1 << power for power in (16, 18, 20, 22, 24)]
LATENCY_BYTES = 4096
REQUIRED = 0.6
Ask = Callable[[], Any]
Take = Callable[[Any], int]


def make_rpc(rank: int) -> Rpc:
    return Rpc(rank, Ledger(Topology(rank, 2, (0, 1))), 60.0, ServeConfig())


def serve(pipe: Any) -> None:
    """Answer both kinds of requests until the pipe says stop."""
    largest = np.random.default_rng(0).integers(0, 255, max(SIZES), dtype=np.uint8)
    rpc = make_rpc(1)
    rpc.register("pull", lambda _name, arrays: [largest[: int(arrays[0][0])]])
    endpoint = rpc.listen("127.0.0.1", Credentials(secret=b"bench"))
    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    pipe.send((endpoint, f"tcp://127.0.0.1:{port}"))
    while True:
        peer, request = router.recv_multipart()
        size = int.from_bytes(request, "little")
        if size == 0:
            break
        router.send(peer, zmq.SNDMORE)
        router.send(largest[:size], copy=False)
    rpc.close()


def seconds(ask: Ask, take: Take, size: int, repeats: int, depth: int) -> float:
    """Time ``repeats`` calls of ``size`` bytes with ``depth`` of them under way."""
    waiting: deque[Any] = deque()
    start = time.perf_counter()
    for _ in range(repeats):
        waiting.append(ask())
        if len(waiting) == depth:
            assert take(waiting.popleft()) == size
    while waiting:
        assert take(waiting.popleft()) == size
    return time.perf_counter() - start


def measure(rounds: int) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    endpoint, bare_endpoint = here.recv()
    rpc = make_rpc(0)
    rpc.listen("127.0.0.1", Credentials(secret=b"bench"))
    rpc.connect({1: PeerAddress(rank=1, host="localhost", endpoint=endpoint)})
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(bare_endpoint)

    rows = []
    for size, depth in [(LATENCY_BYTES, 1), *((size, depth) for depth in (1, 4) for size in SIZES)]:
        request = np.array([size], dtype=np.int64)
        raw = size.to_bytes(8, "little")
        repeats = max(min((48 << 20) // size, 400), 6)
        bare: list[float] = []
        ours: list[float] = []
        for round_number in range(rounds + 1):
            bare_s = seconds(
                lambda raw=raw: dealer.send(raw),
                lambda _: len(dealer.recv(copy=False).buffer),
                size,
                repeats,
                depth,
            )
            ours_s = seconds(
                lambda request=request: rpc.submit(1, "pull", "", [request], phase="bench"),
                lambda pending: pending.result()[0].nbytes,
                size,
                repeats,
                depth,
            )
            if round_number:  # the first round warms up
                bare.append(bare_s / repeats)
                ours.append(ours_s / repeats)
        rows.append(row(size, depth, bare, ours))
    dealer.send((0).to_bytes(8, "little"))
    process.join(10)
    rpc.close()
    return rows


def row(size: int, depth: int, bare: list[float], ours: list[float]) -> dict[str, float]:
    bare_s, ours_s = statistics.median(bare), statistics.median(ours)
    return {
        "bytes": size,
        "calls_under_way": depth,
        "bare_us": bare_s * 1e6,
        "ours_us": ours_s * 1e6,
        "bare_mb_s": size / bare_s / 1e6,
        "ours_mb_s": size / ours_s / 1e6,
        "ratio": statistics.median(b / o for b, o in zip(bare, ours, strict=True)),
    }


def main(argv: list[str]) -> int:
    made = parser("rpc", __doc__)
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    options = made.parse_args(argv)
    rows = measure(options.rounds)
    print(text_table(rows))
    write_json(options.json, rows)
    asked = [one for one in rows if one["bytes"] >= SIZES[0] and one["calls_under_way"] == 1]
    return int(any(one["ratio"] < REQUIRED for one in asked))
