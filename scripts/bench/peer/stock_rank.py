"""A trainer of stock ``dgl.distributed``, as its own examples are written."""

from __future__ import annotations

import os
from typing import Any

import dgl
import dgl.distributed
import torch
import torch.distributed as dist

from peer.cases import Case
from peer.training import Clock, Report, Sage, initial, loss_of, read_arguments


class Trainer:
    """One trainer on its share of the training nodes."""

    def __init__(self, case: Case, config: str) -> None:
        self.case = case
        name = os.path.basename(config).removesuffix(".json")
        self.g = g = dgl.distributed.DistGraph(name, part_config=config)
        nodes = dgl.distributed.node_split(g.ndata["train_mask"], g.get_partition_book(), force_even=True)
        self.loader = dgl.dataloading.DistNodeDataLoader(
            g,
            nodes,
            dgl.dataloading.NeighborSampler(list(case.fanouts)),
            batch_size=case.batch_size,
            shuffle=True,
            drop_last=False,
        )
        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(Sage(case))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=case.lr)
        self.embedding: Any = None
        if case.embedding:
            self.embedding = dgl.distributed.DistEmbedding(g.num_nodes(), case.embedding, "emb", initial)
            self.sparse = dgl.distributed.optim.SparseAdagrad([self.embedding], lr=case.lr)
        # Without this, one trainer may have one batch more, and the other would hang.
        steps = torch.tensor(-(-len(nodes) // case.batch_size))
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        self.steps = int(steps)

    def epoch(self, clock: Clock) -> None:
        batches = iter(self.loader)
        for _ in range(self.steps):
            with clock.of("sample"):
                input_nodes, seeds, blocks = next(batches)
            with clock.of("pull"):
                labels = self.g.ndata["label"][seeds].long()
                x = self.embedding(input_nodes) if self.embedding else self.g.ndata["feat"][input_nodes]
            with clock.of("forward"):
                loss = loss_of(self.model(blocks, x), labels)
            with clock.of("backward"):
                self.optimizer.zero_grad()
                if self.embedding:
                    self.sparse.zero_grad()  # else every step applies all gradients since the start again
                loss.backward()
            with clock.of("update"):
                self.optimizer.step()
                if self.embedding:
                    self.sparse.step()
            clock.count("loss_sum", float(loss.detach()) * len(seeds))
            clock.count("targets", len(seeds))
            clock.count("input_rows", len(input_nodes))
            clock.count("edges", sum(block.num_edges() for block in blocks))


def main() -> None:
    arguments, case = read_arguments()
    torch.set_num_threads(1)
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"], net_type="socket")
    dist.init_process_group("gloo")
    trainer = Trainer(case, arguments.data)
    report = Report(arguments.out)
    for _ in range(arguments.epochs):
        with report.epoch(dist.barrier) as clock:
            trainer.epoch(clock)
    report.write()


main()
