"""The model that the systems on DGL train, and the first rows of trainable embeddings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from scripts.bench.peers.meter import Clock
from scripts.bench.peers.workload import Workload


class Sage(nn.Module):
    """GraphSAGE with the mean of the neighbours, on unchanged ``dgl.nn``."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        hops = len(workload.fanouts)
        first = workload.embedding or workload.features
        widths = [first, *[workload.hidden] * (hops - 1), workload.classes]
        self.layers = nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in pairwise(widths))

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        """Map the rows of the first block's sources to (B, classes) scores of the last one's destinations."""
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, h)
            if number < len(self.layers) - 1:
                h = torch.relu(h)
        return h


def initial(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return first rows of an embedding; stock DGL's servers find this by the name of its module."""
    return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1)


def note_blocks(clock: Clock, input_nodes: Tensor, seeds: Tensor, blocks: list[Any]) -> None:
    """Count what one batch of DGL's blocks holds; the sum of its seeds tells which seeds an epoch had."""
    clock.count("input_rows", len(input_nodes))
    clock.count("edges", sum(block.num_edges() for block in blocks))
    clock.count("seed_sum", int(seeds.sum()))
