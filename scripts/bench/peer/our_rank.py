"""A rank of ``data_parallel``: the loop of the documentation, with a clock."""

from __future__ import annotations

import json
from typing import Any

import dgl
import torch
import torch.distributed as dist

import dglx_dist as dx
from peer.cases import Case
from peer.training import Clock, Report, Sage, initial, loss_of, read_arguments


class Trainer:
    """One rank on its share of the training nodes."""

    def __init__(self, case: Case, folder: str, options: dict[str, Any]) -> None:
        self.case = case
        self.g = g = dx.DistGraph(folder)
        if options.get("cache"):
            g.cache_rows("feat", alpha=float(options["cache"]), policy="halo")
        feats = [] if case.embedding else ["feat"]
        self.loader = dx.DataLoader(
            g,
            dx.node_split(g.ndata["train_mask"]),
            dgl.dataloading.NeighborSampler(
                list(case.fanouts), prefetch_node_feats=feats, prefetch_labels=["label"]
            ),
            batch_size=case.batch_size,
            shuffle=True,
        )
        torch.manual_seed(0)
        self.model = dx.wrap(Sage(case), g)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=case.lr)
        self.embedding: Any = None
        if case.embedding:
            self.embedding = dx.DistEmbedding(g.num_nodes(), case.embedding, "emb", initial)
            self.sparse = dx.optim.SparseAdagrad([self.embedding], lr=case.lr)

    def epoch(self, clock: Clock) -> None:
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            with clock.of("wait"):
                input_nodes, seeds, blocks = next(batches)
            with clock.of("pull"):
                x = self.embedding(input_nodes) if self.embedding else blocks[0].srcdata["feat"]
            labels = blocks[-1].dstdata["label"]
            with clock.of("forward"):
                loss = loss_of(self.model(blocks, x), labels)
            with clock.of("backward"):
                self.optimizer.zero_grad()
                loss.backward()
            with clock.of("update"):
                self.optimizer.step()
                if self.embedding:
                    self.sparse.step()
            clock.count("loss_sum", float(loss.detach()) * len(seeds))
            clock.count("targets", len(seeds))
            clock.count("input_rows", len(input_nodes))
            clock.count("edges", sum(block.num_edges() for block in blocks))
        times = self.loader.times(reset=True)
        clock.seconds["thread sample"] = times.sample_s
        clock.seconds["thread pull"] = times.fetch_s
        clock.seconds["exchange wait"] = self.model.exchange_seconds(reset=True)


def main() -> None:
    arguments, case = read_arguments()
    torch.set_num_threads(1)
    with dx.init(strategy="data_parallel") as session:
        trainer = Trainer(case, arguments.data, json.loads(arguments.options))
        report = Report(arguments.out)
        for _ in range(arguments.epochs):
            with report.epoch(dist.barrier) as clock:
                before = session.ledger.snapshot()
                trainer.epoch(clock)
                for row in session.ledger.since(before):
                    if not row.inside:
                        clock.count(f"ledger {row.phase}", row.num_bytes)
        report.write()


main()
