"""A rank of ``data_parallel``: the loop of the documentation, with a clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl
import torch
import torch.distributed as dist

import dglx_dist as dx
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
    """One rank on its share of the training nodes."""

    def __init__(self, workload: Workload, folder: str, options: Mapping[str, Any]) -> None:
        self.g = g = dx.DistGraph(folder)
        if options.get("cache"):
            g.cache_rows("feat", alpha=float(options["cache"]), policy="halo")
        feats = [] if workload.embedding else ["feat"]
        self.loader = dx.DataLoader(
            g,
            dx.node_split(g.ndata["train_mask"]),
            dgl.dataloading.NeighborSampler(
                list(workload.fanouts), prefetch_node_feats=feats, prefetch_labels=["label"]
            ),
            batch_size=workload.batch_size,
            shuffle=True,
        )
        torch.manual_seed(0)
        self.model = dx.wrap(Sage(workload), g)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=workload.lr)
        self.embedding: Any = None
        if workload.embedding:
            self.embedding = dx.DistEmbedding(g.num_nodes(), workload.embedding, "emb", initial)
            self.sparse = dx.optim.SparseAdagrad([self.embedding], lr=workload.lr)

    def epoch(self, clock: Clock) -> None:
        """Train one epoch."""
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            with clock.of("wait"):
                input_nodes, seeds, blocks = next(batches)
            with clock.of("pull"):
                x = self.embedding(input_nodes) if self.embedding else blocks[0].srcdata["feat"]
            labels = blocks[-1].dstdata["label"]
            with clock.of("forward"):
                scores = self.model(blocks, x)
                loss = loss_of(scores, labels)
            with clock.of("backward"):
                self.optimizer.zero_grad()
                backward(loss)
            with clock.of("update"):
                self.optimizer.step()
            if self.embedding:
                with clock.of("sparse update"):
                    self.sparse.step()
            note_batch(clock, loss, scores, labels)
            note_blocks(clock, input_nodes, seeds, blocks)
        times = self.loader.times(reset=True)
        clock.add("loader sample", times.sample_s)
        clock.add("loader fetch", times.fetch_s)
        clock.add("exchange", self.model.exchange_seconds(reset=True))


def main() -> None:
    """Train and report."""
    arguments = read_arguments()
    torch.set_num_threads(1)
    with dx.init(strategy="data_parallel") as session:
        trainer = Trainer(arguments.workload, arguments.data, arguments.options)
        report = Report(arguments.out, dist.get_rank(), dist.barrier, arguments.device)
        for _ in range(arguments.epochs):
            with report.epoch() as clock:
                before = session.ledger.snapshot()
                trainer.epoch(clock)
                for row in session.ledger.since(before):
                    clock.count("ledger inside" if row.inside else "ledger outside", row.num_bytes)
        report.write()


if __name__ == "__main__":
    main()
