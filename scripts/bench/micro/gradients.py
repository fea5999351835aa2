"""Backward with our gradient exchange beside DistributedDataParallel's, on ranks of this machine.

Run: torchrun --nproc-per-node 2 scripts/bench gradients
Prints the median and the best milliseconds per step (forward, backward, exchange) of each, interleaved, for
five dense layers and 1000 rows a step; no graph is involved.
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from dglx_dist.comm.session import start_session
from dglx_dist.records import StepShare
from dglx_dist.strategies.data_parallel import DataParallelModel
from scripts.bench.micro.timing import in_turn, parser, timed

ROWS, STEPS, ROUNDS = 1000, 20, 8


def network() -> nn.Module:
    widths = (200, 256, 512, 256, 512, 47)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])


def milliseconds(model: nn.Module, x: torch.Tensor) -> float:
    def steps() -> None:
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            model(x).pow(2).mean().backward()

    return timed(steps)[0] / STEPS * 1e3


def main(argv: list[str]) -> None:
    parser("gradients", __doc__).parse_args(argv)
    torch.set_num_threads(1)
    with start_session() as session:
        world_size = session.topology.world_size
        session.step_share = StepShare(num_local=ROWS, num_global=world_size * ROWS)
        torch.manual_seed(0)
        x = torch.randn(ROWS, 200)
        models = {
            "ours": DataParallelModel(network(), session, reduction="mean", bucket_bytes=4 << 20),
            "ddp": nn.parallel.DistributedDataParallel(network()),
            "ddp, find_unused": nn.parallel.DistributedDataParallel(network(), find_unused_parameters=True),
        }
        times = in_turn({name: partial(milliseconds, model, x) for name, model in models.items()}, ROUNDS)
        if session.topology.rank == 0:
            for name, values in times.items():
                print(f"{name:18} {statistics.median(values):8.2f} ms/step   (min {min(values):.2f})")
