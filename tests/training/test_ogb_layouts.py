"""Small graphs with the types, relations and columns of ogbn-mag, ogbl-biokg and ogbl-wikikg2.

Sizes are odd, some relations have few or no edges, and triples are repeated. Every strategy that can trains
them, and metrics are compared with NumPy.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow.dataset import dataset

from dglx_dist.cli.train_job import train_dataset
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.sources import raw_graph_from_ogb
from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import ConfigError
from dglx_dist.records import SPLITS, Array, EdgeType, RawGraph
from dglx_dist.report.run_folder import read_epochs
from dglx_dist.training.config import TrainConfig
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

FULL_GRAPH = ("full_graph", "shared_preload", "cooperative")
VENUES = 5


def mag() -> RawGraph:
    """Papers have features, years and venues to predict, and are split by year. Other nodes have nothing."""
    random = np.random.default_rng(0)
    counts = {"author": 311, "field_of_study": 53, "institution": 17, "paper": 207}
    sizes = {
        ("author", "affiliated_with", "institution"): 283,
        ("author", "writes", "paper"): 701,
        ("paper", "cites", "paper"): 523,
        ("paper", "has_topic", "field_of_study"): 617,
    }
    venue = random.integers(VENUES, size=counts["paper"])
    features = np.eye(VENUES, 128)[venue] + 0.3 * random.normal(size=(len(venue), 128))
    year = random.integers(2010, 2020, size=counts["paper"])
    edges = {
        (source, name, destination): np.stack(
            [random.integers(counts[source], size=size), random.integers(counts[destination], size=size)]
        )
        for (source, name, destination), size in sizes.items()
    }
    graph = {
        "edge_index_dict": edges,
        "edge_feat_dict": {},
        "edge_reltype": {etype: np.full((size, 1), k) for k, (etype, size) in enumerate(sizes.items())},
        "node_feat_dict": {"paper": features.astype(np.float32)},
        "node_year": {"paper": year[:, None]},
        "num_nodes_dict": counts,
    }
    split = {"train": year < 2018, "valid": year == 2018, "test": year == 2019}
    papers = {name: {"paper": mask.nonzero()[0]} for name, mask in split.items()}
    return raw_graph_from_ogb("ogbn-mag", graph, {"paper": venue[:, None]}, papers)


def knowledge_graph(
    name: str, counts: Mapping[str, int], relations: Mapping[EdgeType, int], seed: int
) -> RawGraph:
    """Triples join nodes of near clusters. Each edge has its relation id as a column, and a split."""
    random = np.random.default_rng(seed)
    edges, columns = {}, {}
    for number, (etype, size) in enumerate(relations.items()):
        source, destination = counts[etype[0]], counts[etype[2]]
        head = random.integers(source, size=size)
        tail = (head * destination // source + number + random.integers(3, size=size)) % destination
        side = random.choice(3, size=size, p=[0.8, 0.1, 0.1])
        edges[etype] = head, tail
        columns[etype] = {mask: side == k for k, mask in enumerate(SPLITS)}
        columns[etype]["reltype"] = np.full(size, number)
    return RawGraph(name=name, num_nodes=counts, edges=edges, edge_data=columns)


def biokg() -> RawGraph:
    """Five types without features and 51 relations, most of them between drugs or between proteins."""
    counts = {"disease": 101, "drug": 103, "function": 127, "protein": 89, "sideeffect": 97}
    pairs = {
        ("disease", "disease-protein", "protein"): 73,
        ("drug", "drug-disease", "disease"): 5,
        **{("drug", f"drug-drug_{number}", "drug"): 11 + number % 7 for number in range(38)},
        ("drug", "drug-protein", "protein"): 117,
        ("drug", "drug-sideeffect", "sideeffect"): 172,
        ("function", "function-function", "function"): 143,
        **{("protein", f"protein-protein_{number}", "protein"): 29 * number % 61 for number in range(7)},
        ("protein", "protein-function", "function"): 77,
    }
    return knowledge_graph("ogbl-biokg", counts, pairs, seed=1)


def wikikg2() -> RawGraph:
    """One type without features, and many relations, of which most are rare and some have no triples."""
    relations = {("entity", f"relation_{number}", "entity"): 400 // (number + 1) for number in range(61)}
    relations |= {("entity", f"relation_{number}", "entity"): 0 for number in range(61, 67)}
    return knowledge_graph("ogbl-wikikg2", {"entity": 251}, relations, seed=2)


GRAPHS: dict[str, Callable[[], RawGraph]] = {"mag": mag, "biokg": biokg, "wikikg2": wikikg2}
LINKS: dict[str, Any] = {"task": "link", "decoder": "distmult", "loss": "bce", "negatives": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "mag": {},
    "biokg": {**LINKS, "target": tuple(etype[1] for etype in biokg().edges)},
    "wikikg2": LINKS,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("ogb")
    for name, make in GRAPHS.items():
        raw = make()
        check_raw_graph(raw, name)
        partition_to_disk(raw, root / name, PartitionPlan(num_parts=2, method="metis"))
    return {name: str(root / name) for name in GRAPHS}


def train(folder: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    config = {"model": "rgcn", "hidden": 8, "epochs": 2, "batch_size": 5000, "dropout": 0.2, "lr": 0.02}
    return dict(train_dataset(TrainConfig(data=folder, out=out, **{**config, **options})).summary)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("mag", "push_pull"),
        ("wikikg2", "cooperative"),
        *wide(*((name, strategy) for name in GRAPHS for strategy in ("data_parallel", *FULL_GRAPH))),
    ],
)
def test_ranks_learn_like_one_rank(name: str, strategy: str, folders: dict[str, str], tmp_path: Path) -> None:
    """Steps have all seeds. A rank of data_parallel leaves out its own edges, so those steps differ."""
    options = {**OPTIONS[name], "strategy": strategy}
    if strategy in ("data_parallel", "push_pull"):
        options |= {"fanouts": (-1, -1)}
    is_apart = strategy == "data_parallel" and name != "mag"
    if is_apart:
        options["lr"] = 1e-9
    runs = {}
    for ranks in (1, 2):
        out = str(tmp_path / str(ranks))
        runs[ranks] = run_ranks(train, ranks, args=(folders[name], out, options), ranks_per_server=1)[0]
        runs[ranks]["losses"] = [epoch.loss for epoch in read_epochs(Path(out))]
    metrics = [key for key in runs[1] if key.startswith(("val_", "test_"))]
    assert len(metrics) == (10 if "task" in options else 2)
    for key in (*metrics, *([] if is_apart else ["losses"])):
        assert runs[2][key] == pytest.approx(runs[1][key], abs=1e-4), key


@pytest.mark.parametrize("name", ["biokg", *wide("wikikg2")])
def test_metrics_of_links_are_exact(name: str, folders: dict[str, str], tmp_path: Path) -> None:
    """Metrics of a run follow from its rows and relations by brute force."""
    rows, said = tmp_path / "rows", tmp_path / "said"
    options = {
        **OPTIONS[name],
        "strategy": "full_graph",
        "save_embeddings": str(rows),
        "predictions": str(said),
    }
    summary, _ = run_ranks(train, 2, args=(folders[name], str(tmp_path / "run"), options), ranks_per_server=1)
    raw = GRAPHS[name]()
    relations = pq.read_table(rows / "_relations.parquet").to_pydict()
    weight = dict(zip(relations["etype"], np.array(relations["relations"]), strict=True))
    many = len(raw.num_nodes) > 1
    nodes = {ntype: read_rows(rows / ntype if many else rows) for ntype in raw.num_nodes}
    ranks: list[float] = []
    for etype, (head, tail) in raw.edges.items():
        source, destination = nodes[etype[0]] * weight[":".join(etype)], nodes[etype[2]]
        test = np.asarray(raw.edge_data[etype][SPLITS[2]]).nonzero()[0]
        ranks += rank_tails(source @ destination.T, head, tail, test)
        if etype[0] == etype[2]:
            ranks += rank_tails((source @ destination.T).T, tail, head, test)
    assert summary["test_mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-6)
    for k in (1, 3, 10):
        assert summary[f"test_hits@{k}"] == pytest.approx(np.mean(np.array(ranks) <= k), abs=1e-12)


def read_rows(folder: Path) -> Array:
    """Return the rows of a folder of embeddings, by original id."""
    columns = dataset(folder).to_table().to_pydict()
    rows = np.empty((len(columns["id"]), len(columns["embedding"][0])))
    rows[np.array(columns["id"])] = columns["embedding"]
    return rows


def rank_tails(scores: Array, head: Array, tail: Array, test: Array) -> list[float]:
    """Return the filtered ranks of test triples. Ties count half."""
    ranks = []
    for edge in test:
        row = scores[head[edge]].copy()
        answer = row[tail[edge]]
        row[tail[head == head[edge]]] = -np.inf
        ranks.append(1 + np.sum(row > answer) + np.sum(row == answer) / 2)
    return ranks


def refuse(folder: str, out: str, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refusal:
        train(folder, out, options)
    return str(refusal.value)


def test_push_pull_needs_features(folders: dict[str, str], tmp_path: Path) -> None:
    options = {**OPTIONS["wikikg2"], "strategy": "push_pull", "fanouts": (-1, -1)}
    (message,) = run_ranks(refuse, 1, args=(folders["wikikg2"], str(tmp_path), options))
    assert "'push_pull' does not fetch its rows" in message
