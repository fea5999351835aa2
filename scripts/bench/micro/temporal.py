"""Sampling by time beside ordinary sampling: edges per second, and links of the future on a table of visits.

    OMP_NUM_THREADS=1 python scripts/bench temporal --json temporal.json

The first table has the built-in graph (200,000 nodes, 5 M edges) with random times. Loaders take turns, one
thread, batches of 1000, blocks included; ``ratio`` is to ordinary sampling. The second table has visits of
users to items: each user follows one of 20 topics and changes it now and then, and a visit goes to a popular
item of the topic. SAGE learns which item a user visits next, and ranks it among 50 random ones at the time of
the visit: from the last visits before it (``last``), from random earlier ones (``uniform``), and without
times, from visits of the training period (``untimed``). Figures are means and standard deviations over seeds.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.dataloading import NeighborSampler

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from scripts.bench.micro.timing import in_turn, parser, table, time_call, write_json

BATCH, WARM_UP, TARGET = 1000, 3, 0.5
FANOUTS = ([15, 10, 5], [25, 10], [10, 10])
LAST_TIME = 1_000_000
Row = dict[str, Any]


def write_single_part(raw: RawGraph, folder: Path) -> Path:
    part_of = {ntype: np.zeros(count, np.int32) for ntype, count in raw.num_nodes.items()}
    write_dataset(raw, Assignment(num_parts=1, part_of=part_of, method="file", seed=0), folder)
    return folder


def loader_rates(loader: DataLoader) -> Iterator[float]:
    """Million edges per second of a loader, blocks included, batch by batch."""
    batches = iter(loader)
    while True:
        seconds, batch = time_call(lambda: next(batches))
        yield sum(block.num_edges() for block in batch[2]) / seconds / 1e6


def compare_speed(g: DistGraph, fanouts: list[int], steps: int) -> Row:
    draw = torch.Generator().manual_seed(0)
    seeds = torch.randperm(g.num_nodes(), generator=draw)[: BATCH * steps]
    moments = torch.randint(LAST_TIME, (len(seeds),), generator=draw)
    options: dict[str, Any] = {"batch_size": BATCH, "num_threads": 0}
    loaders = {
        "ordinary": DataLoader(g, seeds, NeighborSampler(fanouts), **options),
        "disjoint": DataLoader(g, seeds, NeighborSampler(fanouts), disjoint=True, **options),
    }
    for strategy in ("uniform", "last"):
        sampler = dx.TemporalNeighborSampler(fanouts, strategy=strategy)
        loaders[strategy] = DataLoader(g, seeds, sampler, seed_time=moments, **options)
    contestants = {name: loader_rates(loader).__next__ for name, loader in loaders.items()}
    rates = {name: statistics.median(values) for name, values in in_turn(contestants, steps, WARM_UP).items()}
    ratios = {f"{name} ratio": rate / rates["ordinary"] for name, rate in rates.items() if name != "ordinary"}
    return {"fanouts": fanouts, **{f"{name} M/s": rate for name, rate in rates.items()}, **ratios}


NUM_USERS, NUM_ITEMS, NUM_TOPICS = 300, 400, 20


def generate_visits(seed: int, count: int = 12_000) -> RawGraph:
    """Visits of users to items and their opposite edges, with rising times. Features are random."""
    rng = np.random.default_rng(seed)
    topic_of_user = rng.integers(0, NUM_TOPICS, NUM_USERS)
    users, items = np.empty(count, np.int64), np.empty(count, np.int64)
    for visit in range(count):
        user = rng.integers(NUM_USERS)
        if rng.random() < 0.08:
            topic_of_user[user] = rng.integers(NUM_TOPICS)
        # The first items of a topic are the popular ones.
        place = min(int(rng.exponential(4.0)), NUM_ITEMS // NUM_TOPICS - 1)
        users[visit], items[visit] = user, NUM_USERS + place * NUM_TOPICS + topic_of_user[user]
    moments = np.sort(rng.integers(0, LAST_TIME, count))
    ends = np.concatenate([users, items]), np.concatenate([items, users])
    feat = rng.normal(size=(NUM_USERS + NUM_ITEMS, 32)).astype(np.float32)
    times = np.concatenate([moments, moments])
    is_visit = np.arange(2 * count) < count
    return RawGraph(
        name="visits",
        num_nodes={NODE_TYPE: len(feat)},
        edges={EDGE_TYPE: ends},
        node_data={NODE_TYPE: {"feat": feat}},
        edge_data={EDGE_TYPE: {"time": times, "train": times < 0.7 * LAST_TIME, "visit": is_visit}},
    )


class Sage(torch.nn.Module):
    """Rows of nodes from random features, and the product of the rows of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dgl.nn.SAGEConv(32, 64, "mean"), dgl.nn.SAGEConv(64, 64, "mean")
        self.item = torch.nn.Linear(32, 64)

    def forward(self, blocks: Any, x: torch.Tensor, *pair_graphs: Any) -> list[torch.Tensor]:
        rows = self.second(blocks[1], self.first(blocks[0], x).relu())
        items = self.item(x[: len(rows)])
        ends = [graph.edges() for graph in pair_graphs]
        return [(rows[users] * items[visited]).sum(1) for users, visited in ends]


def measure_mrr(g: DistGraph, kind: str, seed: int, epochs: int) -> float:
    """Train on visits of the training period, and return the MRR of the later ones."""
    torch.manual_seed(seed)
    columns: dict[str, Any] = {"prefetch_node_feats": ["feat"]}
    sampler: Any = NeighborSampler([10, 10], mask="train", **columns)
    if kind != "untimed":
        sampler = dx.TemporalNeighborSampler([10, 10], strategy=kind, **columns)
    is_train, is_visit = (g.edata[name][:].bool() for name in ("train", "visit"))
    model = dx.wrap(Sage(), g)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def open_loader(ids: torch.Tensor, num_negatives: int, **options: Any) -> DistEdgeDataLoader:
        if kind != "untimed":
            options["seed_time"] = g.edata["time"][ids] - 1
        elif options.get("shuffle"):
            options |= {"exclude": "reverse_id", "reverse_eids": dx.reverse_edge_ids(g)}
        negatives = dx.negative.Uniform(num_negatives)
        return DistEdgeDataLoader(g, ids, sampler, negative_sampler=negatives, batch_size=256, **options)

    loader = open_loader((is_train & is_visit).nonzero()[:, 0], 4, shuffle=True)
    for _ in range(epochs):
        for _, pairs, negative_pairs, blocks in loader:  # type: ignore[misc]  # there are negatives
            positive, negative = model(blocks, blocks[0].srcdata["feat"], pairs, negative_pairs)
            scores = torch.cat([positive[:, None], negative.view(len(positive), -1)], 1)
            torch.nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64)).backward()
            optimizer.step()
            optimizer.zero_grad()
    ranks = []
    with torch.no_grad():
        for _, pairs, negative_pairs, blocks in open_loader((~is_train & is_visit).nonzero()[:, 0], 50):  # type: ignore[misc]  # there are negatives
            positive, negative = model(blocks, blocks[0].srcdata["feat"], pairs, negative_pairs)
            ranks.append(1 + (negative.view(len(positive), -1) > positive[:, None]).sum(1))
    return float((1 / torch.cat(ranks)).mean())


def main(argv: list[str]) -> None:
    made = parser("temporal", __doc__)
    made.add_argument("--nodes", type=int, default=200_000)
    made.add_argument("--steps", type=int, default=40, help="batches of each contestant and fan-out")
    made.add_argument("--epochs", type=int, default=10, help="epochs of each model on visits")
    made.add_argument("--seeds", type=int, default=3, help="tables of visits, one per seed")
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*CPU affinity.*")
    with tempfile.TemporaryDirectory() as name, start_session():
        raw = generate(SyntheticConfig(nodes=options.nodes, degree=25.0))
        times = np.random.default_rng(0).integers(0, LAST_TIME, len(raw.edges[EDGE_TYPE][0]))
        raw = replace(raw, edge_data={EDGE_TYPE: {"time": times}})
        g = DistGraph(write_single_part(raw, Path(name) / "speed"))
        speed = [compare_speed(g, fanouts, options.steps) for fanouts in FANOUTS]
        g.close()
        mrr: dict[str, list[float]] = {"last": [], "uniform": [], "untimed": []}
        for seed in range(options.seeds):
            g = DistGraph(write_single_part(generate_visits(seed), Path(name) / f"visits{seed}"))
            for kind, values in mrr.items():
                values.append(measure_mrr(g, kind, seed, options.epochs))
            g.close()
    best = [{**row, f"uniform at least {TARGET}": row["uniform ratio"] >= TARGET} for row in speed]
    print(table(best), end="\n\n")
    rows = [
        {"neighbours": kind, "MRR": statistics.mean(values), "deviation": statistics.pstdev(values)}
        for kind, values in mrr.items()
    ]
    print(table(rows))
    write_json(options.json, {"speed": speed, "mrr": mrr})
