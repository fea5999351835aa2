"""DGL's kernels on the CPU beside the torch path: operators and convolutions, interleaved, medians.

    OMP_NUM_THREADS=1 python scripts/bench message_passing --json message_passing.json

The torch path runs on the CPU too, or on the device that DGLX_DEVICE names.

The block is one of a mini-batch: random sources, every destination has equally many in-edges. Each figure is
milliseconds of forward and backward, of all operands.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from dgl import ops
from dgl.nn import pytorch as dglnn
from torch import Tensor, nn

from dglx_dist.comm.devices import synchronize
from dglx_dist.internals.graphs import build_block
from dglx_dist.internals.message_passing import place
from scripts.bench.micro.timing import in_turn, parser, table, time_call, write_json

HEADS, WARM_UP = 4, 1


def work_of(block: Any, width: int) -> Mapping[str, Callable[[Any], Tensor]]:
    """Name -> what is computed on a block."""
    x = torch.randn(block.num_src_nodes(), width, requires_grad=True)
    heads = torch.randn(block.num_src_nodes(), HEADS, width // HEADS, requires_grad=True)
    weight, scores = (torch.rand(block.num_edges(), count, 1, requires_grad=True) for count in (1, HEADS))
    own = x[: block.num_dst_nodes()]
    layers: dict[str, nn.Module] = {
        "SAGEConv mean": dglnn.SAGEConv(width, width, "mean"),
        "SAGEConv pool": dglnn.SAGEConv(width, width, "pool"),
        "GraphConv": dglnn.GraphConv(width, width),
        "GATConv": dglnn.GATConv(width, width // HEADS, HEADS),
    }
    return {
        "copy_u, sum": lambda g: ops.copy_u_sum(g, x),
        "copy_u, max": lambda g: ops.copy_u_max(g, x),
        "u_mul_e, sum, one weight": lambda g: ops.u_mul_e_sum(g, x, weight[:, 0]),
        "u_mul_e, sum, weight a head": lambda g: ops.u_mul_e_sum(g, heads, scores),
        "u_dot_v": lambda g: ops.u_dot_v(g, x, own),
        "edge_softmax": lambda g: ops.edge_softmax(g, scores),
        **{name: (lambda g, layer=layer: layer(g, x)) for name, layer in layers.items()},
    }


def milliseconds(compute: Callable[[Any], Tensor], block: Any) -> float:
    def work() -> None:
        compute(block).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        synchronize(block.device)

    return 1e3 * time_call(work)[0]


def main(argv: list[str]) -> None:
    made = parser("message_passing", __doc__)
    made.add_argument("--destinations", type=int, default=20_000)
    made.add_argument("--degree", type=int, default=10)
    made.add_argument("--width", type=int, default=64)
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_src, num_edges = 4 * options.destinations, options.destinations * options.degree
    offsets = torch.arange(0, num_edges + 1, options.degree, dtype=torch.int32)
    block = build_block(offsets, torch.randint(num_src, (num_edges,), dtype=torch.int32), num_src)
    os.environ["DGLX_MESSAGE_PASSING"] = "torch"
    blocks = {"dgl": block, "torch": place(block, os.environ.get("DGLX_DEVICE") or "cpu")}
    works: dict[str, Mapping[str, Callable[[Any], Tensor]]] = {}
    for kind, g in blocks.items():
        with g.device:
            works[kind] = work_of(g, options.width)
    rows: list[dict[str, Any]] = []
    for name in works["dgl"]:
        contestants = {
            kind: lambda compute=works[kind][name], g=g: milliseconds(compute, g)
            for kind, g in blocks.items()
        }
        times = in_turn(contestants, options.rounds + WARM_UP, WARM_UP)
        ratio = statistics.median(b / a for a, b in zip(times["dgl"], times["torch"], strict=True))
        medians = {f"{kind} ms": statistics.median(values) for kind, values in times.items()}
        rows.append({"work": name, **medians, "torch / dgl": ratio})
    print(table(rows))
    write_json(options.json, rows)
