"""The embedding case without any sparse help: ``nn.Embedding(sparse=False)`` under DistributedDataParallel.

Batches come from our loader, so that only the treatment of the trainable rows differs.
"""

from __future__ import annotations

import dgl
import torch
import torch.distributed as dist
from torch import nn

import dglx_dist as dx
from peer.training import Report, Sage, loss_of, read_arguments


class Table(nn.Module):
    """The rows and the model in one module, as plain DDP wants it."""

    def __init__(self, rows: nn.Embedding, model: nn.Module) -> None:
        super().__init__()
        self.rows, self.model = rows, model

    def forward(self, blocks: list[dgl.DGLGraph], nodes: torch.Tensor) -> torch.Tensor:
        return self.model(blocks, self.rows(nodes))


def main() -> None:
    arguments, case = read_arguments()
    torch.set_num_threads(1)
    with dx.init():
        g = dx.DistGraph(arguments.data)
        sampler = dgl.dataloading.NeighborSampler(list(case.fanouts), prefetch_labels=["label"])
        nodes = dx.node_split(g.ndata["train_mask"])
        loader = dx.DataLoader(g, nodes, sampler, batch_size=case.batch_size, shuffle=True)
        torch.manual_seed(0)
        table = nn.Embedding(g.num_nodes(), case.embedding)
        nn.init.uniform_(table.weight, -0.1, 0.1)
        model = nn.parallel.DistributedDataParallel(Table(table, Sage(case)))
        dense = [parameter for name, parameter in model.named_parameters() if ".rows." not in f".{name}"]
        optimizers = [
            torch.optim.Adam(dense, lr=case.lr),
            torch.optim.Adagrad(table.parameters(), lr=case.lr),
        ]
        report = Report(arguments.out)
        for _ in range(arguments.epochs):
            with report.epoch(dist.barrier) as clock:
                for input_nodes, seeds, blocks in loader:
                    with clock.of("forward"):
                        loss = loss_of(model(blocks, input_nodes), blocks[-1].dstdata["label"])
                    with clock.of("backward"):
                        model.zero_grad()
                        loss.backward()
                    with clock.of("update"):
                        for optimizer in optimizers:
                            optimizer.step()
                    clock.count("loss_sum", float(loss.detach()) * len(seeds))
                    clock.count("targets", len(seeds))
                    clock.count("input_rows", len(input_nodes))
        report.write()


main()
