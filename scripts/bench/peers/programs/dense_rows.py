"""Trainable rows without any sparse help: ``nn.Embedding(sparse=False)`` under DistributedDataParallel.

Batches come from our loader, so that only the treatment of the trainable rows differs.
"""

from __future__ import annotations

import dgl
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dglx_dist as dx
from scripts.bench.peers.loop import (
    Clock,
    Report,
    Sage,
    backward,
    loss_of,
    note_batch,
    note_blocks,
    read_arguments,
)
from scripts.bench.peers.workload import Workload


class Table(nn.Module):
    """The rows and the model in one module, as plain DDP wants it."""

    def __init__(self, rows: nn.Embedding, model: nn.Module) -> None:
        super().__init__()
        self.rows, self.model = rows, model

    def forward(self, blocks: list[dgl.DGLGraph], nodes: Tensor) -> Tensor:
        """Map ids of the first block's sources to scores of the last one's destinations."""
        return self.model(blocks, self.rows(nodes))


class Trainer:
    """One rank on its share of the training nodes."""

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

    def epoch(self, clock: Clock) -> None:
        """Train one epoch."""
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            with clock.of("wait"):
                input_nodes, seeds, blocks = next(batches)
            labels = blocks[-1].dstdata["label"]
            with clock.of("forward"):
                scores = self.model(blocks, input_nodes)
                loss = loss_of(scores, labels)
            with clock.of("backward"):
                self.model.zero_grad()
                backward(loss)
            with clock.of("update"):
                for optimizer in self.optimizers:
                    optimizer.step()
            note_batch(clock, loss, scores, labels)
            note_blocks(clock, input_nodes, seeds, blocks)
        times = self.loader.times(reset=True)
        clock.add("loader sample", times.sample_s)
        clock.add("loader fetch", times.fetch_s)


def main() -> None:
    """Train and report."""
    arguments = read_arguments()
    torch.set_num_threads(1)
    with dx.init():
        trainer = Trainer(arguments.workload, arguments.data)
        report = Report(arguments.out, dist.get_rank(), dist.barrier, arguments.device)
        for _ in range(arguments.epochs):
            with report.epoch() as clock:
                trainer.epoch(clock)
        report.write()


if __name__ == "__main__":
    main()
