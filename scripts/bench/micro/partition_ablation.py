"""What a partition is worth: random, metis, and metis with balance constraints, on a skewed graph.

    python scripts/bench partition_ablation --nodes 100000 --parts 4

Generates a graph whose training nodes lie in a tenth of its communities, cuts it three times, and trains the
same GraphSAGE on each: one rank per part, every rank a server of its own on this machine, epochs of the three
in turn. Prints a Markdown table of medians.

With ``--seeds own`` every rank trains on the training nodes of its part, as uneven as the partition is; with
``even`` (what ``node_split`` does unless told otherwise) shares are even, and what a part has too many of is
trained on elsewhere. ``--structure replicated`` lets every rank map
the whole structure, so that only features cross the network.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.collectives import gather_int64, sum_over_ranks
from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.training.models import build_model
from scripts.bench.micro.starter import torchrun_command

CONSTRAINTS = ("nodes", "degree", "train")
SETTINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("random", "random", ()),
    ("metis", "metis", ()),
    ("metis + constraints", "metis", CONSTRAINTS),
)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch over all ranks."""

    seconds: float
    """From a barrier until the slowest rank is done."""
    remote: float
    """Share of the input rows that lie on another server."""
    features: int
    """Bytes between servers for features and labels."""
    sampling: int
    """The same for sampling."""


class Trainer:
    """One partition with its loader and model."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.g = dx.DistGraph(folder, structure=options.structure)
        self.session = self.g.session
        mask = self.g.ndata["train_mask"]
        own = dx.node_split(mask, self.g.get_partition_book(), force_even=False)
        seeds = own if options.seeds == "own" else dx.node_split(mask, self.g.get_partition_book())
        self.train_nodes = gather_int64([len(own)], self.session)[:, 0]
        self.edges = gather_int64([int(self.g.in_degrees(self.g.local_nodes()).sum())], self.session)[:, 0]
        sampler = dgl.dataloading.NeighborSampler(
            options.fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        self.loader = dx.DataLoader(self.g, seeds, sampler, batch_size=options.batch_size, shuffle=True)
        torch.manual_seed(0)
        width, classes = self.g.ndata["feat"].shape[1], self.g.num_classes("_N")
        layers = len(options.fanouts)
        model = build_model("sage", width, options.hidden, int(classes or 0), layers, 0.0, 1, graph=self.g)
        self.model = dx.wrap(model, self.g)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def epoch(self) -> Epoch:
        """Train one epoch; collective."""
        first, last = self.g.get_node_partition_policy("_N").bounds[self.session.topology.server :][:2]
        before = self.session.ledger.snapshot()
        rows, remote = 0, 0
        self.g.barrier()
        start = time.perf_counter()
        for inputs, _, blocks in self.loader:
            rows += len(inputs)
            remote += int(((inputs < first) | (inputs >= last)).sum())
            loss = F.cross_entropy(self.model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        mine = int((time.perf_counter() - start) * 1e6)
        sent = {"features": 0, "labels": 0, "sampling": 0}
        for row in self.session.ledger.since(before):
            if not row.inside and row.phase in sent:
                sent[row.phase] += row.num_bytes
        slowest = int(gather_int64([mine], self.session).max())
        counts = torch.tensor([rows, remote, sent["features"] + sent["labels"], sent["sampling"]])
        total: Tensor = sum_over_ranks(counts, self.session, phase="bench")
        return Epoch(
            seconds=slowest / 1e6,
            remote=int(total[1]) / max(int(total[0]), 1),
            features=int(total[2]),
            sampling=int(total[3]),
        )


def worker(options: argparse.Namespace) -> None:
    """Train on all partitions in turn and print the table on rank 0; each rank runs this."""
    with dx.init() as session:
        trainers = {
            title: Trainer(options.work / str(number), options)
            for number, (title, _, _) in enumerate(SETTINGS)
        }
        for trainer in trainers.values():
            trainer.epoch()
        epochs: dict[str, list[Epoch]] = {title: [] for title in trainers}
        for _ in range(options.epochs):
            for title, trainer in trainers.items():
                epochs[title].append(trainer.epoch())
        if session.topology.rank == 0:
            print(table(trainers, epochs), flush=True)
        for trainer in trainers.values():
            trainer.g.close()


def table(trainers: dict[str, Trainer], epochs: dict[str, list[Epoch]]) -> str:
    """Return the Markdown table."""
    head = (
        "partition", "edges cut", "max / mean training nodes", "max / mean edges", "input rows remote",
        "features MB", "sampling MB", "epoch s (min-max)",
    )  # fmt: skip
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for title, trainer in trainers.items():
        runs = epochs[title]
        seconds = [run.seconds for run in runs]
        cells = (
            title,
            f"{float(str(trainer.g.dataset.manifest.quality['edge_cut'])):.3f}",
            f"{trainer.train_nodes.max() / trainer.train_nodes.mean():.2f}",
            f"{trainer.edges.max() / trainer.edges.mean():.2f}",
            f"{statistics.median(run.remote for run in runs):.3f}",
            f"{statistics.median(run.features for run in runs) / 1e6:.1f}",
            f"{statistics.median(run.sampling for run in runs) / 1e6:.1f}",
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
        )
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def prepare(options: argparse.Namespace) -> None:
    """Generate the graph and cut it in every way."""
    skewed = SyntheticConfig(
        nodes=options.nodes, degree=options.degree, features=options.features, skew=options.skew, seed=1
    )
    graph = generate(skewed)
    for number, (_, method, balance) in enumerate(SETTINGS):
        plan = PartitionPlan(
            num_parts=options.parts, method=method, options=PartitionOptions(balance=balance), overwrite=True
        )
        quality = partition_to_disk(graph, options.work / str(number), plan)
        missed = f", missed {quality.missed}" if quality.missed else ""
        print(f"{method} {','.join(balance)}: {quality.edge_cut:.3f} cut{missed}", file=sys.stderr)


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench partition_ablation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=float, default=20.0)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--skew", type=float, default=0.9)
    parser.add_argument("--parts", type=int, default=4, help="and ranks, and servers")
    parser.add_argument("--epochs", type=int, default=5, help="measured, after one that warms up")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--fanouts", type=lambda s: [int(k) for k in s.split(",")], default=[10, 10])
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--seeds", choices=("own", "even"), default="own")
    parser.add_argument("--structure", choices=("partitioned", "replicated"), default="partitioned")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    options = read_options(argv)
    if options.work is not None:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        prepare(options)
        arguments = [*sys.argv, "--work", folder]
        command, environment = torchrun_command(arguments, options.parts, options.parts)
        subprocess.run(command, env=environment, check=True)
