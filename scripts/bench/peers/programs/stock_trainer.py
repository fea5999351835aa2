"""A trainer of stock ``dgl.distributed``, as its own examples are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import dgl.distributed
import torch
import torch.distributed as dist
from torch import Tensor

from scripts.bench.peers.loop import Clock, Sage, Trainer, initial, read_arguments, train
from scripts.bench.peers.workload import Launch


class Stock(Trainer):
    """Whatever is read is pulled in the loop, which waits for it."""

    sampled = "sample"

    def __init__(self, launch: Launch) -> None:
        self.launch, workload, config = launch, launch.workload, launch.data
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
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=workload.lr)]
        self.embedding: Any = None
        if workload.embedding:
            self.embedding = dgl.distributed.DistEmbedding(g.num_nodes(), workload.embedding, "emb", initial)
            self.sparse = dgl.distributed.optim.SparseAdagrad([self.embedding], lr=workload.lr)
        # Without this, one trainer may have one batch more, and the other would hang.
        steps = torch.tensor(-(-len(nodes) // workload.batch_size))
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        self._steps = int(steps)

    @property
    def num_steps(self) -> int:
        """The least of all trainers."""
        return self._steps

    def inputs(self, batch: Any, clock: Clock) -> tuple[tuple[Any, ...], Tensor]:
        input_nodes, seeds, blocks = batch
        with clock.of("pull"):
            labels = self.g.ndata["label"][seeds].long()
            x = self.embedding(input_nodes) if self.embedding else self.g.ndata["feat"][input_nodes]
        return (blocks, x), labels

    def clear(self) -> None:
        super().clear()
        if self.sparse is not None:
            self.sparse.zero_grad()  # else every step applies all gradients since the start again

    def validate(self, epoch: int) -> tuple[float, int] | None:
        # After so many epochs, and the last; 0: never. All neighbours.
        every = int(self.launch.options.get("accuracy_every", 0))
        if not every or (epoch % every and epoch != self.launch.warmup + self.launch.epochs):
            return None
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
    arguments = read_arguments()
    torch.set_num_threads(1)
    dgl.distributed.initialize(arguments.ip_config, net_type="socket")
    dist.init_process_group("gloo")
    train(Stock(arguments.launch), arguments)


if __name__ == "__main__":
    main()
