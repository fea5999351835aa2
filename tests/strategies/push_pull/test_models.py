"""Supported models and loops: several features, halves, embeddings, norms, dropout, tied weights, links.

Each trains to the weights of data_parallel on the same ranks and seeds, or of one rank where the masks of
dropout are keyed or the batches are late.
"""

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

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.layers.base import SplittableConv, StageInput
from dglx_dist.records import NODE_TYPE, Assignment
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull.options import read_push_pull_options
from tests.helpers.ranks import run_ranks
from tests.strategies import edge_equality, equality
from tests.strategies.equality import CLASSES, HIDDEN, NUM_NODES, RATE, WIDTH
from tests.strategies.push_pull.runs import SHARES, size_of

EXTRA, EPOCHS, P, TOLERANCE = 4, 3, 0.3, 1e-10


class Net(nn.Module):
    """A first layer with something before it, over features or an embedding, and a second one."""

    def __init__(
        self,
        first: Callable[[int], nn.Module] = lambda width: dgl.nn.SAGEConv(width, HIDDEN, "mean"),
        width: int = WIDTH,
        *,
        before: nn.Module | None = None,
        between: nn.Module | None = None,
        sparse: bool | None = None,
    ) -> None:
        super().__init__()
        self.rows = None if sparse is None else nn.Embedding(NUM_NODES, width, 2, sparse=sparse)
        self.before = before or nn.Identity()
        self.first = first(width)
        self.between = between or nn.Identity()
        self.last = dgl.nn.SAGEConv(HIDDEN, CLASSES, "mean")

    def forward(self, blocks: list[Any], *features: Tensor) -> Tensor:
        x = torch.cat(features, 1) if len(features) > 1 else features[0]
        if self.rows is not None:
            x = self.rows(blocks[0].srcdata[dgl.NID] if x.is_floating_point() else x)
        h = self.first(blocks[0], self.before(x.to(self.last.fc_neigh.weight.dtype))).flatten(1)
        return self.last(blocks[1], torch.tanh(self.between(h)))


class Tied(nn.Module):
    """Two layers as wide as the features, and a head; what is used twice depends on ``kind``."""

    rows = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        slope = nn.PReLU()
        first = dgl.nn.SAGEConv(WIDTH, WIDTH, "mean", activation=slope)
        second = dgl.nn.SAGEConv(WIDTH, WIDTH, "mean", activation=slope)
        self.layers = nn.ModuleList([first, second])
        if kind == "two names":
            self.begin = first
        if kind == "bias":
            second.fc_self.bias = first.fc_self.bias
        if kind == "weight":
            second.fc_neigh.weight = first.fc_neigh.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kind = kind

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        first, second = self.layers
        h = (self.begin if self.kind == "two names" else first)(blocks[0], x)
        scores: Tensor = self.head(second(blocks[1], h))
        return scores


class Shifted(SplittableConv):
    """The sum of relu(x + e) over in-edges, of a value for each edge and input column."""

    edge_arguments = ()
    edges_by_column = ("shift",)

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.cut, self.columns = {"weight": 0}, columns
        self.weight = nn.Parameter(torch.randn(columns, HIDDEN))

    def own_edges(self, block: Any) -> dict[str, Tensor]:
        degrees = block.in_degrees()[block.edges()[1].long()].double()
        return {"shift": torch.outer(degrees, torch.arange(self.columns)).cos()}

    def gather(self, given: StageInput, transformed: Tensor, scattered: Any) -> tuple[Tensor]:
        sources, targets = (ends.long() for ends in given.block.edges())
        messages = torch.relu(transformed[sources] + given.edges["shift"])
        sums = transformed.new_zeros(given.block.num_dst_nodes(), transformed.shape[1])
        return (sums.index_add(0, targets, messages) @ self.weight,)

    def apply_nodes(self, block: Any, gathered: Any) -> Tensor:
        out: Tensor = gathered[0]
        return out


class Narrow(Shifted):
    """One value for each edge, which one process would broadcast."""

    def own_edges(self, block: Any) -> dict[str, Tensor]:
        return {"shift": super().own_edges(block)["shift"][:, 1:2]}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Net
    features: tuple[str, ...] = ("feat",)
    options: Mapping[str, Any] = field(default_factory=dict)
    reduction: Any = "mean"
    dtype: torch.dtype = torch.float64
    data: str = "parts"


SIDE_BY_SIDE = {"features": "feat,extra"}
WIDE = WIDTH + EXTRA
ZERO = {"allow_zero_in_degree": True}
CASES: Mapping[str, Case] = {
    "side by side": Case(lambda: Net(width=WIDE), ("feat", "extra"), SIDE_BY_SIDE),
    "halves": Case(lambda: Net(width=EXTRA), ("half",), {"features": "half"}),
    "halves in float32": Case(lambda: Net(width=EXTRA), ("half",), {"features": "half"}, dtype=torch.float32),
    "fewer columns than ranks": Case(lambda: Net(width=1), ("narrow",), {"features": "narrow"}),
    "norm of hidden": Case(lambda: Net(between=nn.BatchNorm1d(HIDDEN))),
    "norm of hidden, sum": Case(lambda: Net(between=nn.BatchNorm1d(HIDDEN)), reduction="sum"),
    "sum": Case(reduction="sum"),
    "norm": Case(lambda: Net(before=nn.LayerNorm(WIDTH))),
    "norm without weights": Case(lambda: Net(before=nn.LayerNorm(WIDTH, elementwise_affine=False))),
    "embedding": Case(lambda: Net(sparse=False)),
    "embedding of another width": Case(lambda: Net(width=3, sparse=False)),
    "embedding without features": Case(lambda: Net(width=3, sparse=False), (), data="bare"),
    "embedding of replicas": Case(lambda: Net(sparse=False), options={"group_size": 1}),
    "sparse embedding of replicas": Case(lambda: Net(sparse=True), options={"group_size": 1}),
    "values of edges by column": Case(lambda: Net(Shifted)),
    **{f"tied {kind}": Case(lambda kind=kind: Tied(kind)) for kind in ("activation", "bias", "two names")},
}
"""Equal to data_parallel."""


def dropping(width: int) -> nn.Module:
    return dgl.nn.SAGEConv(width, HIDDEN, "mean", feat_drop=P)


KEYED: Mapping[str, Case] = {
    "norm": Case(lambda: Net(dropping, before=nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(P)))),
    "embedding": Case(lambda: Net(dropping, before=nn.Dropout(P), sparse=True)),
    "attention": Case(
        lambda: Net(
            lambda width: dgl.nn.GATConv(width, HIDDEN // 2, 2, feat_drop=P, attn_drop=P, **ZERO),
            before=nn.Dropout(P),
        )
    ),
}
"""With dropout: equal to one rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of the equality matrix with more features, without any, and with whole numbers."""
    raw = equality.raw_graph()
    random = np.random.default_rng(8)
    more = {
        "extra": random.standard_normal((NUM_NODES, EXTRA)),
        "half": random.standard_normal((NUM_NODES, EXTRA)).astype(np.float16),
        "narrow": random.standard_normal((NUM_NODES, 1)),
    }
    part_of = random.integers(3, size=NUM_NODES).astype(np.int32)
    assignment = Assignment(num_parts=3, part_of={NODE_TYPE: part_of}, method="test", seed=0)
    folder, data = tmp_path_factory.mktemp("models"), raw.node_data[NODE_TYPE]
    bare = {name: values for name, values in data.items() if name != "feat"}
    for name, columns in {
        "parts": {**data, **more},
        "bare": bare,
        "whole": {**bare, "feat": np.ones((NUM_NODES, 5), np.int64)},
    }.items():
        write_dataset(replace(raw, node_data={NODE_TYPE: columns}), assignment, folder / name)
    edge_equality.write_parts(folder)
    return folder


def train(
    g: DistGraph, case: Case, strategy: str, seeds: Tensor | None = None, **options: Any
) -> dict[str, Any]:
    session = g.session
    rank, world_size = session.topology.rank, session.topology.world_size
    if seeds is None:
        seeds = equality.cut(equality.new_ids_of_training(g), SHARES["uneven"], rank, world_size)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=list(case.features), prefetch_labels=["label"]
    )
    ours = STRATEGIES.get(strategy)(
        session, {**case.options, **options} if strategy == "push_pull" else {}
    ).open(g)
    loader = ours.loader(seeds, sampler, batch_size=40)
    torch.manual_seed(1)
    net: Any = case.make().to(case.dtype)
    if strategy == "data_parallel" and net.rows is not None:
        # Data parallel training has no sparse gradients.
        net.rows.sparse = False
    values = getattr(getattr(net, "first", None), "edges_by_column", ())
    model: Any = ours.wrap(net, reduction=case.reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE if case.reduction == "mean" else RATE / 100)
    before, pushed, model_parts = session.ledger.snapshot(), 0, case.options.get("group_size", world_size)
    for _ in range(EPOCHS):
        for nodes, _, blocks in loader:
            # Pushed structure, and of values by column each of the other parts' columns once.
            sources, targets, edges = size_of(blocks[0])
            pushed += (model_parts - 1) * 4 * (sources + targets + 1 + edges)
            pushed += 8 * edges * (WIDTH - len(model.module.first.weight)) if "shift" in values else 0
            inputs = [blocks[0].srcdata[name] for name in case.features] or [nodes]
            labels = blocks[-1].dstdata["label"]
            optimizer.zero_grad()
            F.cross_entropy(model(blocks, *inputs), labels, reduction=case.reduction).backward()
            optimizer.step()
    if options.get("structure") == "push":
        assert pushed == equality.moved_since(session, before)["structure"]
    whole_model, state = model.whole(), model.state_dict()
    assert len(list(whole_model.parameters())) == len(list(model.parameters()))
    state_arrays = {name: value.numpy().copy() for name, value in whole_model.state_dict().items()}
    assert sorted(state_arrays) == sorted(state)
    return state_arrays


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        rank, world_size = session.topology.rank, session.topology.world_size
        graphs = {name: DistGraph(f"{folder}/{name}") for name in ("parts", "bare", "whole")}
        g, results = graphs["parts"], {}
        everyone = equality.new_ids_of_training(g)
        for name, case in KEYED.items():
            # One batch of all; and late, the first rank has all seeds, so that batches are the same.
            results[f"{name}, keyed"] = train(g, case, "push_pull", everyone[:40][rank::world_size])
            first = everyone if rank == 0 else everyone[:0]
            results[f"{name}, keyed, late"] = train(g, case, "push_pull", first, depth=3)
        if world_size == 1:
            return results
        for name, case in CASES.items():
            results[name] = train(graphs[case.data], case, "push_pull", structure="push")
            results[f"{name}, rows"] = train(graphs[case.data], case, "data_parallel")
        for name in LATE:
            results[f"{name}, late"] = train(graphs[CASES[name].data], CASES[name], "push_pull", depth=3)
        with pytest.raises(dx.ConfigError, match=TIED):
            train(g, Case(lambda: Tied("weight")), "push_pull")
        with pytest.raises(dx.ConfigError, match=r"'feat' is torch.int64.*store it as float32"):
            STRATEGIES.get("push_pull")(session, {}).open(graphs["whole"]).wrap(dgl.nn.SAGEConv(5, 7, "mean"))
        with pytest.raises(dx.ConfigError, match=rf"'shift' has shape .*each of the {WIDTH} input columns"):
            train(g, Case(lambda: Net(Narrow)), "push_pull")
        bonds, task = DistGraph(f"{folder}/bonds"), "links reverse_id"
        for name, strategy, options in LINKS:
            weights = edge_equality.train_tasks(bonds, [task], strategy, **options)[task]["weights"]
            # But for the layer of classes, which links do not train.
            results[name] = {str(n): value for n, value in enumerate(weights[:-2])}
        g.barrier()
        return results


TIED = "'layers.[01].fc_neigh.weight' and 'layers.[01].fc_neigh.weight' are the same parameter.*data_parallel"
LINKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("links", "push_pull", {}),
    ("links, rows", "data_parallel", {}),
    ("links, late", "push_pull", {"depth": 3}),
)

LATE = ("side by side", "embedding without features")
"""Also with batches in flight."""


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        ranks: run_ranks(on_rank, ranks, args=(str(folder),), ranks_per_server=2 if ranks > 1 else 1)
        for ranks in (1, 3)
    }


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_that_of_data_parallel(results: dict[int, list[dict[str, Any]]], name: str) -> None:
    torch.manual_seed(1)
    first = {
        key: value.numpy() for key, value in CASES[name].make().to(CASES[name].dtype).state_dict().items()
    }
    for result in results[3]:
        weights, rows = result[name], result[f"{name}, rows"]
        assert weights.keys() == rows.keys() == first.keys()
        allowed = 1e-5 if CASES[name].dtype == torch.float32 else TOLERANCE
        for key in weights:
            assert weights[key].dtype == rows[key].dtype
            assert np.abs(weights[key] - rows[key]).max() <= allowed, key
            # A batch norm takes away what the bias before it adds.
            still = name.startswith("norm of") and key == "first.fc_self.bias"
            assert still or np.abs(weights[key] - first[key]).max() > 1e-5, f"{key} has not been trained"


@pytest.mark.parametrize("how", ["keyed", "keyed, late"])
@pytest.mark.parametrize("name", KEYED)
def test_dropout_is_equal_on_all_parts(results: dict[int, list[dict[str, Any]]], name: str, how: str) -> None:
    (alone,) = results[1]
    for result in results[3]:
        for key, value in alone[f"{name}, {how}"].items():
            np.testing.assert_allclose(result[f"{name}, {how}"][key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*LATE, "links"])
def test_late_batches_leave_all_ranks_the_same(results: dict[int, list[dict[str, Any]]], name: str) -> None:
    states = [result[f"{name}, late"] for result in results[3]]
    for key, value in states[0].items():
        assert all(np.array_equal(value, state[key]) for state in states)
        assert np.abs(value - results[3][0][name][key]).max() > 1e-6


def test_links_are_learnt_as_by_data_parallel(results: dict[int, list[dict[str, Any]]]) -> None:
    for result in results[3]:
        for key, value in result["links, rows"].items():
            assert np.abs(result["links"][key] - value).max() <= TOLERANCE


def test_memory_may_be_a_number_of_bytes() -> None:
    assert read_push_pull_options({"memory": 1000}) == read_push_pull_options({"memory": "1000"})
    with pytest.raises(dx.ConfigError, match="type str, not bool"):
        read_push_pull_options({"memory": True})
