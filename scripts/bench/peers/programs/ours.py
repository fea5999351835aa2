"""A rank of ``data_parallel``: the loop of the documentation with a clock, and one without sparse rows."""

from __future__ import annotations

from typing import Any

import dgl
import torch
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.session import Session
from scripts.bench.peers.loop import Clock, Sage, Trainer, initial, read_arguments, train
from scripts.bench.peers.workload import Launch


class Ours(Trainer):
    """The model under ``wrap``, and trainable rows in a DistEmbedding."""

    counts_itself = True
    """Whether the package knows what the model exchanges."""

    def __init__(self, launch: Launch, session: Session) -> None:
        self.session = session
        workload, options = launch.workload, launch.options
        g = dx.DistGraph(launch.data)
        if options.get("cache"):
            g.cache_rows("feat", alpha=float(options["cache"]), policy="halo")
        feats = [] if workload.embedding else ["feat"]
        sampler = dgl.dataloading.NeighborSampler(
            list(workload.fanouts), prefetch_node_feats=feats, prefetch_labels=["label"]
        )
        nodes = dx.node_split(g.ndata["train_mask"])
        self.loader = dx.DataLoader(g, nodes, sampler, batch_size=workload.batch_size, shuffle=True)
        torch.manual_seed(0)
        self.embedding: Any = None
        self.wrap(g, launch)

    def wrap(self, g: dx.DistGraph, launch: Launch) -> None:
        """Make model, rows and optimisers."""
        workload = launch.workload
        self.model = dx.wrap(Sage(workload), g)
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=workload.lr)]
        if workload.embedding:
            self.embedding = dx.DistEmbedding(g.num_nodes(), workload.embedding, "emb", initial)
            self.sparse = dx.optim.SparseAdagrad([self.embedding], lr=workload.lr)

    def inputs(self, batch: Any, clock: Clock) -> tuple[tuple[Any, ...], Tensor]:
        input_nodes, _, blocks = batch
        with clock.of("pull"):
            x = self.embedding(input_nodes) if self.embedding else blocks[0].srcdata["feat"]
        return (blocks, x), blocks[-1].dstdata["label"]

    def epoch(self, clock: Clock) -> None:
        """Train one epoch, and count what the loader's threads and the ledger have of it."""
        before = self.session.ledger.snapshot()
        super().epoch(clock)
        times = self.loader.times(reset=True)
        clock.add("loader sample", times.sample_s)
        clock.add("loader fetch", times.fetch_s)
        if self.counts_itself:
            clock.add("exchange", self.model.exchange_seconds(reset=True))
            for row in self.session.ledger.since(before):
                clock.count("ledger inside" if row.inside else "ledger outside", row.num_bytes)


class DenseRows(Ours):
    """Trainable rows without any sparse help: ``nn.Embedding(sparse=False)`` under plain DDP."""

    counts_itself = False

    def wrap(self, g: dx.DistGraph, launch: Launch) -> None:
        workload = launch.workload
        rows, model = nn.Embedding(g.num_nodes(), workload.embedding), Sage(workload)
        nn.init.uniform_(rows.weight, -0.1, 0.1)
        self.model = nn.parallel.DistributedDataParallel(Table(rows, model))
        self.optimizers = [
            torch.optim.Adam(model.parameters(), lr=workload.lr),
            torch.optim.Adagrad(rows.parameters(), lr=workload.lr),
        ]

    def inputs(self, batch: Any, clock: Clock) -> tuple[tuple[Any, ...], Tensor]:
        input_nodes, _, blocks = batch
        return (blocks, input_nodes), blocks[-1].dstdata["label"]


class Table(nn.Module):
    """The rows and the model in one module, as plain DDP wants it."""

    def __init__(self, rows: nn.Embedding, model: nn.Module) -> None:
        super().__init__()
        self.rows, self.model = rows, model

    def forward(self, blocks: list[dgl.DGLGraph], nodes: Tensor) -> Tensor:
        """Map ids of the first block's sources to scores of the last one's destinations."""
        return self.model(blocks, self.rows(nodes))


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(1)
    with dx.init(strategy="data_parallel") as session:
        system = DenseRows if arguments.launch.system == "dense" else Ours
        train(system(arguments.launch, session), arguments)


if __name__ == "__main__":
    main()
