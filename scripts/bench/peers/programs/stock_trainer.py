"""A trainer of stock ``dgl.distributed``, as its own examples are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import dgl.distributed
import torch
import torch.distributed as dist

from scripts.bench.peers.loop import (
    Clock,
    Report,
    Sage,
    backward,
    initial,
    loss_of,
    note_batch,
    note_blocks,
    read_arguments,
)
from scripts.bench.peers.workload import Workload


class Trainer:
    """One trainer on its share of the training nodes."""

    def __init__(self, workload: Workload, config: str) -> None:
        self.g = g = dgl.distributed.DistGraph(Path(config).stem, part_config=config)
        nodes = dgl.distributed.node_split(g.ndata["train_mask"], g.get_partition_book(), force_even=True)
        self.loader = dgl.dataloading.DistNodeDataLoader(
            g,
            nodes,
            dgl.dataloading.NeighborSampler(list(workload.fanouts)),
            batch_size=workload.batch_size,
            shuffle=True,
            drop_last=False,
        )
        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(Sage(workload))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=workload.lr)
        self.embedding: Any = None
        if workload.embedding:
            self.embedding = dgl.distributed.DistEmbedding(g.num_nodes(), workload.embedding, "emb", initial)
            self.sparse = dgl.distributed.optim.SparseAdagrad([self.embedding], lr=workload.lr)
        # Without this, one trainer may have one batch more, and the other would hang.
        steps = torch.tensor(-(-len(nodes) // workload.batch_size))
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        self.steps = int(steps)

    def epoch(self, clock: Clock) -> None:
        """Train one epoch."""
        batches = iter(self.loader)
        for _ in range(self.steps):
            with clock.of("sample"):
                input_nodes, seeds, blocks = next(batches)
            with clock.of("pull"):
                labels = self.g.ndata["label"][seeds].long()
                x = self.embedding(input_nodes) if self.embedding else self.g.ndata["feat"][input_nodes]
            with clock.of("forward"):
                scores = self.model(blocks, x)
                loss = loss_of(scores, labels)
            with clock.of("backward"):
                self.optimizer.zero_grad()
                if self.embedding:
                    self.sparse.zero_grad()  # else every step applies all gradients since the start again
                backward(loss)
            with clock.of("update"):
                self.optimizer.step()
            if self.embedding:
                with clock.of("sparse update"):
                    self.sparse.step()
            note_batch(clock, loss, scores, labels)
            note_blocks(clock, input_nodes, seeds, blocks)

    def validate(self) -> tuple[float, int]:
        """Return how many of this trainer's validation nodes are hit, and their number; all neighbours."""
        nodes = dgl.distributed.node_split(
            self.g.ndata["val_mask"], self.g.get_partition_book(), force_even=True
        )
        layers = len(self.model.module.layers)
        loader = dgl.dataloading.DistNodeDataLoader(
            self.g, nodes, dgl.dataloading.MultiLayerFullNeighborSampler(layers), batch_size=len(nodes)
        )
        correct = 0.0
        with torch.no_grad():
            for input_nodes, seeds, blocks in loader:
                scores = self.model.module(blocks, self.g.ndata["feat"][input_nodes])
                correct += float((scores.argmax(1) == self.g.ndata["label"][seeds].long()).sum())
        return correct, len(nodes)


def main() -> None:
    """Train and report."""
    arguments = read_arguments()
    torch.set_num_threads(1)
    dgl.distributed.initialize(arguments.ip_config, net_type="socket")
    dist.init_process_group("gloo")
    trainer = Trainer(arguments.workload, arguments.data)
    report = Report(arguments.out, dist.get_rank(), dist.barrier, arguments.device)
    # After so many epochs; 0: never.
    every = int(arguments.options.get("accuracy_every", 0))
    for epoch in range(1, arguments.epochs + 1):
        with report.epoch() as clock:
            trainer.epoch(clock)
        if every and (epoch % every == 0 or epoch == arguments.epochs):
            report.note_validation(*trainer.validate())
    report.write()


if __name__ == "__main__":
    main()
