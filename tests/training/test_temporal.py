"""Models of the past do not know the future, and links over time give the same figures on any ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from dgl.dataloading import NeighborSampler

import dglx_dist as dx
from dglx_dist.cli.train_job import train_dataset
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, RawGraph
from dglx_dist.training.config import TrainConfig
from dglx_dist.training.metrics import roc_auc
from tests.dataloading.times import raw_timed_shop, write_parts
from tests.helpers.commands import dglx
from tests.helpers.ranks import run_ranks

NUM_TARGETS = 600


def raw_leak() -> RawGraph:
    """Each target has two in-edges at time 1 from nodes of random classes, and five at time 3 of its class.

    Targets are scored at time 2. The features of the other 100 nodes are their classes.
    """
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 2, NUM_TARGETS)
    classes = np.arange(100) % 2
    early = NUM_TARGETS + rng.integers(0, 100, (NUM_TARGETS, 2))
    late = NUM_TARGETS + 2 * rng.integers(0, 50, (NUM_TARGETS, 5)) + answers[:, None]
    sources = np.concatenate([early, late], axis=1)
    feat = np.zeros((NUM_TARGETS + 100, 2), np.float32)
    feat[NUM_TARGETS + np.arange(100), classes] = 1
    return RawGraph(
        name="leak",
        num_nodes={NODE_TYPE: len(feat)},
        edges={EDGE_TYPE: (sources.ravel(), np.repeat(np.arange(NUM_TARGETS), 7))},
        node_data={NODE_TYPE: {"feat": feat, "label": np.concatenate([answers, classes])}},
        edge_data={EDGE_TYPE: {"time": np.tile([1, 1, 3, 3, 3, 3, 3], NUM_TARGETS)}},
    )


class Sage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dgl.nn.SAGEConv(2, 16, "mean"), dgl.nn.SAGEConv(16, 2, "mean")

    def forward(self, blocks, h):
        return self.second(blocks[1], self.first(blocks[0], h).relu())


@pytest.mark.parametrize(("is_timed", "least", "most"), [(False, 0.95, 1.0), (True, 0.4, 0.6)])
def test_only_an_untimed_model_reads_answers_from_the_future(
    tmp_path: Path, is_timed: bool, least: float, most: float
) -> None:
    folder = write_parts(raw_leak(), tmp_path / "leak", 2)
    columns: dict[str, Any] = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    with start_session() as session:
        torch.manual_seed(0)
        g = DistGraph(folder)
        sampler = (
            dx.TemporalNeighborSampler([7, 7], **columns) if is_timed else NeighborSampler([7, 7], **columns)
        )
        options = {"seed_time": 2} if is_timed else {}
        ids = g.new_ids(torch.arange(NUM_TARGETS))
        loaders = [DataLoader(g, half, sampler, batch_size=50, **options) for half in ids.chunk(2)]
        model = dx.wrap(Sage(), g)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(30):
            for _, _, blocks in loaders[0]:
                scores = model(blocks, blocks[0].srcdata["feat"])
                torch.nn.functional.cross_entropy(scores, blocks[-1].dstdata["label"]).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            outputs = [
                (model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])
                for _, _, blocks in loaders[1]
            ]
        scores, labels = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        assert least <= roc_auc(scores[:, 1] - scores[:, 0], labels, session) <= most


def raw_visits() -> RawGraph:
    """Users visit the two items of their group. All edges have times, and their opposite edges too."""
    rng = np.random.default_rng(3)
    users = rng.integers(0, 30, 500)
    items = 30 + 2 * (users % 10) + rng.integers(0, 2, 500)
    times = np.sort(rng.integers(0, 1000, 500))
    ends = np.concatenate([users, items]), np.concatenate([items, users])
    return RawGraph(
        name="visits",
        num_nodes={NODE_TYPE: 50},
        edges={EDGE_TYPE: ends},
        node_data={NODE_TYPE: {"feat": np.eye(50, dtype=np.float32)}},
        edge_data={EDGE_TYPE: {"when": np.concatenate([times, times])}},
    )


LINKS: dict[str, Any] = {
    "task": "link",
    "time": "when",
    "split_time": (600, 800),
    "fanouts": (4, 4),
    "hidden": 16,
    "dropout": 0.0,
}


def train_links(folder: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    return dict(train_dataset(TrainConfig(data=folder, out=out, **{**LINKS, **options})).summary)


def test_links_over_time_learn_and_are_ranked_equally_on_any_ranks(tmp_path: Path) -> None:
    folder = str(write_parts(raw_visits(), tmp_path / "visits", 4))
    out = str(tmp_path / "run")
    (learned,) = run_ranks(train_links, 1, args=(folder, out, {"epochs": 8, "batch_size": 64}))
    assert learned["edge_split"] == "up to 600, up to 800, later, by when"
    assert learned["test_mrr"] > 0.4
    assert learned["test_auc"] > 0.8
    # Almost without learning, the weights are those of the start, so that ranking alone is compared.
    options: dict[str, Any] = {"epochs": 1, "lr": 1e-9, "batch_size": 1000, "overwrite": True}
    expected = None
    for world_size, structure in ((1, "replicated"), (2, "partitioned"), (4, "partitioned")):
        arguments = folder, out, {**options, "structure": structure}
        for summary in run_ranks(train_links, world_size, args=arguments, ranks_per_server=1):
            metrics = [summary[f"{split}_{name}"] for split in ("val", "test") for name in ("mrr", "auc")]
            expected = expected or metrics
            assert metrics == pytest.approx(expected, abs=1e-6)


def test_a_type_without_times_is_refused_because_it_would_show_the_future(tmp_path: Path) -> None:
    folder = write_parts(raw_timed_shop(), tmp_path / "shop", 2)
    options = {**LINKS, "time": "t", "target": ("visits",), "model": "rgcn"}
    with pytest.raises(ConfigError, match=r"likes.* have no times 't', so models would see"):
        train_dataset(TrainConfig(data=str(folder), out=str(tmp_path / "run"), **options))


def test_only_data_parallel_samples_by_time(tmp_path: Path) -> None:
    folder = write_parts(raw_visits(), tmp_path / "visits", 2)
    for strategy in ("push_pull", "full_graph", "shared_preload", "cooperative"):
        options = {**LINKS, "strategy": strategy, "fanouts": None if strategy != "push_pull" else (4, 4)}
        with pytest.raises(
            ConfigError, match=r"needs rows of its own for each seed.*strategy='data_parallel'"
        ):
            train_dataset(TrainConfig(data=str(folder), out=str(tmp_path / "run"), **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_time": None}, "--time when must be combined with --split-time T1,T2"),
        ({"time": None}, "--split-time .* must be two rising times, combined with --time"),
        ({"split_time": (5, 3)}, "must be two rising times"),
        ({"split_time": (5, float("nan"))}, "must be two rising times"),
        ({"model": "none", "embeddings": 4}, "--model none must be another model with --time"),
        ({"predictions": "x"}, "--predictions x must be left out with --time"),
        ({"task": "auto"}, "--time when must be left out without --task link"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(data="visits", out="run", **{**LINKS, **options})


def test_the_command_takes_dates_from_a_table_to_a_trained_model(tmp_path: Path) -> None:
    """One user and item per day; the last of three edges has no date and is never sampled."""
    raw = raw_visits()
    users, items = raw.edges[EDGE_TYPE]
    seconds = raw.edge_data[EDGE_TYPE]["when"] * 86400
    dates = pa.array(seconds).cast(pa.timestamp("s"))
    dates = pa.chunked_array([dates.slice(0, len(dates) - 1), pa.nulls(1, pa.timestamp("s"))])
    (tmp_path / "visits").mkdir()
    table = pa.table({"src": users, "dst": items, "when": dates.combine_chunks()})
    pyarrow.parquet.write_table(table, tmp_path / "visits" / "edges.parquet")
    data, parts = str(tmp_path / "visits"), str(tmp_path / "parts")
    done = dglx("partition", data, "--parts", "2", "--time", "when", "--out", parts)
    assert done.returncode == 0, done.stderr
    assert "sorted the edges _N:_E:_N by 'when' (int64)" in done.stdout
    orders = sorted((tmp_path / "parts").glob("cache/time-*/*/keys.npy"))
    assert len(orders) == 2
    assert sum(int((np.load(order) == np.iinfo(np.int64).max).sum()) for order in orders) == 1
    again = dglx("partition", parts, "--add-time", "--time", "when")
    assert again.returncode == 0, again.stderr
    arguments = ("--task", "link", "--time", "when", "--split-time", "1971-08-25,1972-03-12T00:00")
    options = ("--embeddings", "8", "--fanout", "3,3", "--epochs", "1", "--out", str(tmp_path / "run"))
    done = dglx("train", parts, *arguments, *options)
    assert done.returncode == 0, done.stderr
    assert "up to 51926400" in done.stdout.replace("\n", " ")
    wrong = dglx("partition", data, "--time", "who", "--out", str(tmp_path / "none"))
    assert wrong.returncode == 2
    assert "--time who: no edge type has this column (known: when)" in wrong.stderr.replace("\n", " ")


def test_partitioning_a_column_without_times_is_refused(tmp_path: Path) -> None:
    raw = raw_visits()
    edge_data = {EDGE_TYPE: {"when": np.zeros((1000, 2))}}
    folder = write_parts(replace(raw, edge_data=edge_data), tmp_path / "visits", 2)
    done = dglx("partition", str(folder), "--add-time", "--time", "when")
    assert done.returncode == 2
    assert "a time is one number per row" in done.stderr.replace("\n", " ")
    done = dglx("partition", str(folder), "--add-time")
    assert "Name it with --time COLUMN" in done.stderr.replace("\n", " ")
    done = dglx("partition", str(folder), "--add-time", "--time", "when", "--parts", "4")
    assert "so --parts would have no effect" in done.stderr.replace("\n", " ")
