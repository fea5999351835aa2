"""Trainable rows without any sparse help: ``nn.Embedding(sparse=False)`` under DistributedDataParallel.

Batches come from our loader, so that only the treatment of the trainable rows differs.
"""

from __future__ import annotations

from typing import Any

import dgl
import torch
from torch import Tensor, nn

import dglx_dist as dx
from scripts.bench.peers.loop import Clock, Sage, Trainer, read_arguments, train
from scripts.bench.peers.workload import Workload


class Table(nn.Module):
    """The rows and the model in one module, as plain DDP wants it."""

    def __init__(self, rows: nn.Embedding, model: nn.Module) -> None:
        super().__init__()
        self.rows, self.model = rows, model

    def forward(self, blocks: list[dgl.DGLGraph], nodes: Tensor) -> Tensor:
        """Map ids of the first block's sources to scores of the last one's destinations."""
        return self.model(blocks, self.rows(nodes))


class DenseRows(Trainer):
    """Rows with a dense gradient, and their Adagrad."""

    def __init__(self, workload: Workload, folder: str) -> None:
        g = dx.DistGraph(folder)
        sampler = dgl.dataloading.NeighborSampler(list(workload.fanouts), prefetch_labels=["label"])
        nodes = dx.node_split(g.ndata["train_mask"])
        self.loader = dx.DataLoader(g, nodes, sampler, batch_size=workload.batch_size, shuffle=True)
        torch.manual_seed(0)
        rows = nn.Embedding(g.num_nodes(), workload.embedding)
        nn.init.uniform_(rows.weight, -0.1, 0.1)
        model = Sage(workload)
        self.model = nn.parallel.DistributedDataParallel(Table(rows, model))
        self.optimizers = [
            torch.optim.Adam(model.parameters(), lr=workload.lr),
            torch.optim.Adagrad(rows.parameters(), lr=workload.lr),
        ]

    def inputs(self, batch: Any, clock: Clock) -> tuple[tuple[Any, ...], Tensor]:
        input_nodes, _, blocks = batch
        return (blocks, input_nodes), blocks[-1].dstdata["label"]

    def epoch(self, clock: Clock) -> None:
        """Train one epoch, and count what the loader's threads have of it."""
        super().epoch(clock)
        times = self.loader.times(reset=True)
        clock.add("loader sample", times.sample_s)
        clock.add("loader fetch", times.fetch_s)


def main() -> None:
    told = read_arguments()
    torch.set_num_threads(1)
    with dx.init():
        train(DenseRows(told.launch.workload, told.launch.data), told)


if __name__ == "__main__":
    main()
