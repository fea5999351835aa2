"""A rank of ``data_parallel``: the loop of the documentation, with a clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.session import Session
from scripts.bench.peers.loop import Clock, Sage, Trainer, initial, read_arguments, train
from scripts.bench.peers.workload import Workload


class Ours(Trainer):
    """The model under ``wrap``, and trainable rows in a DistEmbedding."""

    def __init__(self, workload: Workload, folder: str, options: Mapping[str, Any], session: Session) -> None:
        self.session = session
        g = dx.DistGraph(folder)
        if options.get("cache"):
            g.cache_rows("feat", alpha=float(options["cache"]), policy="halo")
        feats = [] if workload.embedding else ["feat"]
        sampler = dgl.dataloading.NeighborSampler(
            list(workload.fanouts), prefetch_node_feats=feats, prefetch_labels=["label"]
        )
        nodes = dx.node_split(g.ndata["train_mask"])
        self.loader = dx.DataLoader(g, nodes, sampler, batch_size=workload.batch_size, shuffle=True)
        torch.manual_seed(0)
        self.model = dx.wrap(Sage(workload), g)
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=workload.lr)]
        self.embedding: Any = None
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
        clock.add("exchange", self.model.exchange_seconds(reset=True))
        for row in self.session.ledger.since(before):
            clock.count("ledger inside" if row.inside else "ledger outside", row.num_bytes)


def main() -> None:
    told = read_arguments()
    torch.set_num_threads(1)
    with dx.init(strategy="data_parallel") as session:
        train(Ours(told.launch.workload, told.launch.data, told.launch.options, session), told)


if __name__ == "__main__":
    main()
