"""What else a first layer and a loop may be: several features, halves, few columns, edges, norms, sums.

Each trains to the weights of data_parallel on the same ranks and seeds, or of one process where that has not
the features side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading import negative
from dglx_dist.graph.analysis import reverse_edge_ids
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import NODE_TYPE, Assignment
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.strategies import edge_equality, equality
from tests.strategies.equality import CLASSES, HIDDEN, NUM_NODES, RATE, WIDTH
from tests.strategies.push_pull.runs import SHARES
from tests.strategies.test_equality import difference

EXTRA, EPOCHS, TOLERANCE = 4, 3, 1e-10


@dataclass(frozen=True)
class Case:
    """What is trained."""

    make: Callable[[], nn.Module]
    features: tuple[str, ...] = ("feat",)
    options: Mapping[str, Any] = field(default_factory=dict)
    reduction: Any = "mean"
    dtype: torch.dtype = torch.float64


class Net(nn.Module):
    """Two convolutions over features side by side, maybe with a norm between, maybe over an embedding."""

    def __init__(self, width: int = WIDTH, norm: bool = False, embedding: bool | None = None) -> None:
        super().__init__()
        self.rows = None if embedding is None else nn.Embedding(NUM_NODES, width, sparse=embedding)
        self.first = dgl.nn.SAGEConv(width, HIDDEN, "mean")
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.last = dgl.nn.SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks: list[Any], *features: Tensor) -> Tensor:
        x = torch.cat(features, 1) if len(features) > 1 else features[0]
        x = x if self.rows is None else self.rows(blocks[0].srcdata[dgl.NID])
        h = self.first(blocks[0], x.to(self.first.fc_neigh.weight.dtype))
        return self.last(blocks[1], torch.relu(self.norm(h)))


class Constants(Net):
    """Of narrow input."""

    def __init__(self) -> None:
        super().__init__(1)


SIDE_BY_SIDE = {"features": "feat,extra"}
CASES: Mapping[str, Case] = {
    "side by side": Case(lambda: Net(WIDTH + EXTRA), ("feat", "extra"), SIDE_BY_SIDE),
    "side by side, late": Case(lambda: Net(WIDTH + EXTRA), ("feat", "extra"), {**SIDE_BY_SIDE, "depth": 3}),
    "halves": Case(lambda: Net(EXTRA), ("half",), {"features": "half"}),
    "halves in float32": Case(lambda: Net(EXTRA), ("half",), {"features": "half"}, dtype=torch.float32),
    "fewer columns than ranks": Case(Constants, ("narrow",), {"features": "narrow"}),
    "norm of hidden": Case(lambda: Net(norm=True)),
    "norm of hidden, sum": Case(lambda: Net(norm=True), reduction="sum"),
    "sum": Case(Net, reduction="sum"),
    "embedding": Case(lambda: Net(embedding=False)),
    "embedding of replicas": Case(lambda: Net(embedding=False), options={"group_size": 1}),
    "sparse embedding of replicas": Case(lambda: Net(embedding=True), options={"group_size": 1}),
}
LATE = ("side by side, late",)
"""Not equal to data_parallel, but to one rank with the same seeds; here, that they are the same on all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of the equality matrix with more features."""
    raw = equality.raw_graph()
    random = np.random.default_rng(8)
    more = {
        "extra": random.standard_normal((NUM_NODES, EXTRA)),
        "half": random.standard_normal((NUM_NODES, EXTRA)).astype(np.float16),
        "narrow": random.standard_normal((NUM_NODES, 1)),
    }
    raw = replace(raw, node_data={NODE_TYPE: {**raw.node_data[NODE_TYPE], **more}})
    part_of = random.integers(3, size=NUM_NODES).astype(np.int32)
    assignment = Assignment(num_parts=3, part_of={NODE_TYPE: part_of}, method="test", seed=0)
    folder = tmp_path_factory.mktemp("tasks")
    write_dataset(raw, assignment, folder / "parts")
    edge_equality.write_parts(folder)
    return folder


def train(g: DistGraph, case: Case, strategy: str) -> dict[str, Any]:
    """Return the uncut state, buffers included."""
    session = g.session
    rank, world_size = session.topology.rank, session.topology.world_size
    mine = equality.cut(equality.new_ids_of_training(g), SHARES["uneven"], rank, world_size)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=list(case.features), prefetch_labels=["label"]
    )
    ours = STRATEGIES.get(strategy)(session, case.options if strategy == "push_pull" else {})
    loader = ours.loader(g, mine, sampler, batch_size=40)
    torch.manual_seed(1)
    net: Any = case.make().to(case.dtype)
    if strategy == "data_parallel" and net.rows is not None:
        # Data parallel training has no sparse gradients.
        net.rows.sparse = False
    model: Any = ours.wrap(net, g, reduction=case.reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE if case.reduction == "mean" else RATE / 100)
    for _ in range(EPOCHS):
        for _, _, blocks in loader:
            given = [blocks[0].srcdata[name] for name in case.features]
            labels = blocks[-1].dstdata["label"]
            optimizer.zero_grad()
            F.cross_entropy(model(blocks, *given), labels, reduction=case.reduction).backward()
            optimizer.step()
    return {name: value.numpy().copy() for name, value in model.whole().state_dict().items()}


def links(folder: str, strategy: str, options: dict[str, Any]) -> list[Any]:
    """Train link prediction as in the tests of data_parallel; return the weights."""
    g = DistGraph(folder)
    session = g.session
    ids = g.edata["train_mask"][:].nonzero()[:, 0]
    ids = ids[g.orig_edge_ids(ids).argsort()]
    mine = equality.cut(ids, edge_equality.SHARES, session.topology.rank, session.topology.world_size)
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"]),
        exclude="reverse_id",
        reverse_eids=reverse_edge_ids(g),
        negative_sampler=negative.Uniform(edge_equality.NEGATIVES),
        prefetch_labels=["label"],
    )
    ours = STRATEGIES.get(strategy)(session, options)
    loader = ours.edge_loader(g, mine, sampler, batch_size=edge_equality.BATCH, shuffle=True, seed=9)
    model: Any = ours.wrap(edge_equality.first_net(), g)
    edge_equality.train("links reverse_id", model, loader, g)
    return [parameter.detach().numpy().copy() for parameter in model.whole().parameters()]


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60):
        g = DistGraph(f"{folder}/parts")
        found: dict[str, Any] = {}
        for name, case in CASES.items():
            found[name] = train(g, case, "push_pull")
            if name not in LATE:
                found[f"{name}, rows"] = train(g, case, "data_parallel")
        bonds = f"{folder}/bonds"
        found["links"] = links(bonds, "push_pull", {})
        found["links, rows"] = links(bonds, "data_parallel", {})
        found["links, late"] = links(bonds, "push_pull", {"depth": 3})
        g.barrier()
        return found


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 3, args=(str(folder),), ranks_per_server=2)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LATE])
def test_the_state_is_that_of_data_parallel(results: list[dict[str, Any]], name: str) -> None:
    first = {key: value.numpy() for key, value in started(name).state_dict().items()}
    for found in results:
        mine, rows = found[name], found[f"{name}, rows"]
        assert mine.keys() == rows.keys() == first.keys()
        allowed = 1e-5 if CASES[name].dtype == torch.float32 else TOLERANCE
        for key in mine:
            assert mine[key].dtype == rows[key].dtype
            assert np.abs(mine[key] - rows[key]).max() <= allowed, key
            # A batch norm takes away what the bias before it adds.
            still = name.startswith("norm") and key == "first.fc_self.bias"
            assert still or np.abs(mine[key] - first[key]).max() > 1e-5, f"{key} has not been trained"


def started(name: str) -> nn.Module:
    torch.manual_seed(1)
    return CASES[name].make().to(CASES[name].dtype)


def test_running_statistics_are_among_them(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= found[
            "norm of hidden"
        ].keys()


def test_features_side_by_side_also_train_late(results: list[dict[str, Any]]) -> None:
    states = [found["side by side, late"] for found in results]
    for name, value in states[0].items():
        assert all(np.array_equal(value, other[name]) for other in states)
        assert np.abs(value - results[0]["side by side"][name]).max() > 1e-6


def test_links_are_learnt_as_by_data_parallel(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert difference(found["links"], found["links, rows"]) <= TOLERANCE
        assert difference(found["links"], results[0]["links"]) == 0
        assert difference(found["links, late"], found["links"]) > 1e-6
        assert difference(found["links, late"], results[0]["links, late"]) == 0
