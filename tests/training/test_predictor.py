"""``dx.Predictor``: results for single nodes, kept rows, and features that change."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph
from dglx_dist.training import predictor as predictor_module
from tests.dataloading.shop import write_shop
from tests.helpers.ranks import run_ranks

NUM_NODES = 90


def write_graph(folder: Path, num_parts: int) -> str:
    """A sparse directed graph, so that a changed feature reaches few nodes. Some nodes have no edges."""
    rng = np.random.default_rng(0)
    raw = RawGraph(
        name="sparse",
        num_nodes={NODE_TYPE: NUM_NODES},
        edges={EDGE_TYPE: tuple(rng.integers(0, NUM_NODES - 5, (2, 150)))},  # type: ignore[dict-item]  # two arrays
        node_data={NODE_TYPE: {"feat": rng.normal(size=(NUM_NODES, 4)), "other": rng.normal(size=NUM_NODES)}},
        edge_data={EDGE_TYPE: {"weight": rng.random((150, 1))}},
    )
    part_of = (np.arange(NUM_NODES) * num_parts // NUM_NODES).astype(np.int32)
    assignment = Assignment(num_parts=num_parts, part_of={NODE_TYPE: part_of}, method="file", seed=0)
    write_dataset(raw, assignment, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("sparse")
    return {parts: write_graph(folder / str(parts), parts) for parts in (1, 2)}


@pytest.fixture
def g(folders: dict[int, str]) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(folders[1])


class Net(nn.Module):
    """Three convolutions. ``GraphConv`` divides by the degrees of the whole graph."""

    def __init__(self, weight: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = dgl.nn.SAGEConv(4, 8, "mean")
        self.second = dgl.nn.GraphConv(8, 8, allow_zero_in_degree=True)
        self.third = dgl.nn.SAGEConv(8, 3, "mean")
        self.dropout = nn.Dropout(0.5)
        self.weight = weight
        self.double()

    def inference_layers(self) -> list[Any]:
        def first(block: Any, h: Tensor) -> Tensor:
            weights = None if self.weight is None else block.edata[self.weight]
            return self.dropout(self.first(block, h, edge_weight=weights).relu())

        return [first, lambda block, h: self.second(block, h).relu(), self.third]


def infer(model: nn.Module, g: DistGraph, **options: Any) -> Tensor:
    table = dx.layerwise_inference(model, g, **options)
    rows: Tensor = table[torch.arange(NUM_NODES)]
    table.delete()
    return rows


def measure_difference(rows: Tensor, expected: Tensor) -> float:
    return float((rows - expected).abs().max())


@pytest.mark.parametrize("cache_rows", [0, 1, 7, 100_000])
@pytest.mark.parametrize("batch_size", [1, 5, 1024])
def test_equals_the_table_of_all_nodes(g: DistGraph, cache_rows: int, batch_size: int) -> None:
    model = Net()
    expected = infer(model, g)
    predictor = dx.Predictor(model, g, cache_rows=cache_rows, batch_size=batch_size)
    rng = np.random.default_rng(1)
    for count in (1, 3, NUM_NODES, 1, 20, 20):
        ids = rng.integers(0, NUM_NODES, count)
        rows = predictor(ids)
        assert rows.shape == (count, 3)
        assert measure_difference(rows, expected[ids]) < 1e-12
    assert predictor([]).shape == (0, 3)
    assert model.training


def test_reads_edge_columns_and_functions_between_layers(g: DistGraph) -> None:
    model = Net("weight")
    options: dict[str, Any] = {"edge_feats": ["weight"], "between": torch.sigmoid}
    predictor = dx.Predictor(model, g, **options)
    assert measure_difference(predictor(torch.arange(30)), infer(model, g, **options)[:30]) < 1e-12


@pytest.mark.parametrize("cache_rows", [5, 100_000])
def test_layers_may_pass_on_several_tensors(g: DistGraph, cache_rows: int) -> None:
    """As jumping knowledge does."""
    model = Net()
    first, second, third = model.inference_layers()

    def keep(block: Any, h: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        rows, before = h
        return {"rows": second(block, rows), "before": before[: block.num_dst_nodes()]}

    def join(block: Any, h: dict[str, Tensor]) -> Tensor:
        scores: Tensor = third(block, h["rows"]) + h["before"][: block.num_dst_nodes(), :3]
        return scores

    layers = [lambda block, h: (first(block, h), h[: block.num_dst_nodes()]), keep, join]
    predictor = dx.Predictor(model, g, layers=layers, cache_rows=cache_rows)
    expected = infer(model, g, layers=layers)
    for ids in (torch.arange(20), torch.arange(10, 60), torch.arange(5)):
        assert measure_difference(predictor(ids), expected[ids]) < 1e-12


def test_kept_rows_are_not_computed_again(g: DistGraph) -> None:
    calls = []
    model = Net()
    steps = model.inference_layers()

    def count(block: Any, h: Tensor) -> Tensor:
        calls.append(block.num_dst_nodes())
        rows: Tensor = steps[0](block, h)
        return rows

    predictor = dx.Predictor(model, g, layers=[count, *steps[1:]])
    predictor(torch.arange(40))
    before = sum(calls)
    predictor(torch.arange(10, 40))
    assert sum(calls) == before
    predictor(torch.arange(80))
    assert sum(calls) <= NUM_NODES


def infer_with(model: nn.Module, g: DistGraph, features: Tensor) -> Tensor:
    """The table of all nodes with other features."""
    inputs = g.new_tensor(tuple(features.shape), features.dtype)
    inputs[torch.arange(NUM_NODES)] = features
    rows = infer(model, g, inputs=inputs)
    inputs.delete()
    return rows


@pytest.mark.parametrize("cache_rows", [7, 100_000])
def test_an_update_equals_a_fresh_computation(g: DistGraph, cache_rows: int) -> None:
    model = Net()
    predictor = dx.Predictor(model, g, cache_rows=cache_rows)
    before = predictor(torch.arange(NUM_NODES))
    features = g.ndata["feat"][torch.arange(NUM_NODES)]
    rng = np.random.default_rng(2)
    for _ in range(4):
        ids = rng.choice(NUM_NODES, 3, replace=False)
        features[ids] = torch.from_numpy(rng.normal(size=(3, 4)))
        predictor.update("feat", ids, features[ids])
        rows = predictor(torch.arange(NUM_NODES))
        assert measure_difference(rows, infer_with(model, g, features)) < 1e-12
    assert measure_difference(rows, before) > 1e-3

    # If a node is repeated, its last row counts.
    twice = torch.stack([features[5] + 1, features[8] + 1, features[5] + 2])
    predictor.update("feat", [5, 8, 5], twice)
    features[5] += 2
    features[8] += 1
    rows = predictor(torch.arange(NUM_NODES))
    assert measure_difference(rows, infer_with(model, g, features)) < 1e-12

    # The dataset has not changed.
    assert measure_difference(infer(model, g), before) < 1e-12


def test_an_update_forgets_only_what_it_changes(g: DistGraph) -> None:
    predictor = dx.Predictor(Net(), g)
    predictor(torch.arange(NUM_NODES))
    predictor.update("feat", [3], torch.zeros(1, 4, dtype=torch.float64))
    kept = [int((cache._node_of_slot >= 0).sum()) for cache in predictor._caches]
    assert NUM_NODES > kept[0] > kept[1] > kept[2] > 0


def test_forgetting_only_the_updated_nodes_is_seen(g: DistGraph) -> None:
    """What caches that know only ids of nodes would do."""
    model = Net()
    predictor = dx.Predictor(model, g)
    predictor(torch.arange(NUM_NODES))
    drop = predictor_module._RowCache.drop

    def drop_updated(cache: Any, is_changed: Any) -> None:
        drop(cache, np.arange(NUM_NODES) == 3)

    features = g.ndata["feat"][torch.arange(NUM_NODES)]
    features[3] = 9.0
    with mock.patch.object(predictor_module._RowCache, "drop", drop_updated):
        predictor.update("feat", [3], features[3:4])
    assert measure_difference(predictor(torch.arange(NUM_NODES)), infer_with(model, g, features)) > 1e-3


def test_changed_weights_change_the_rows(g: DistGraph) -> None:
    model = Net()
    predictor = dx.Predictor(model, g)
    before = predictor(torch.arange(NUM_NODES))
    with torch.no_grad():
        model.third.fc_self.bias.add_(1)
    rows = predictor(torch.arange(NUM_NODES))
    assert measure_difference(rows, infer(model, g)) < 1e-12
    assert measure_difference(rows, before) > 0.9


def test_a_failed_update_changes_nothing(g: DistGraph) -> None:
    predictor = dx.Predictor(Net().float(), g)
    before = predictor(torch.arange(NUM_NODES))
    with pytest.raises(ConfigError, match=r"1e\+300, which is too large"):
        predictor.update("feat", [3], torch.full((1, 4), 1e300, dtype=torch.float64))
    with pytest.raises(NotImplementedError):
        predictor.update("feat", [3], torch.empty((1, 4), device="meta"))
    assert torch.equal(predictor(torch.arange(NUM_NODES)), before)
    assert (predictor._slot_of_node == -1).all()


def test_updates_keep_no_graph_of_autograd(g: DistGraph) -> None:
    predictor = dx.Predictor(Net(), g)
    predictor.update("feat", [3], torch.ones(1, 4, dtype=torch.float64, requires_grad=True))
    assert not predictor._changed_rows.requires_grad


@pytest.mark.parametrize("cache_rows", [0, 100_000])
def test_every_layer_computes_at_most_a_batch(g: DistGraph, cache_rows: int) -> None:
    sizes = []
    model = Net()
    first, *others = model.inference_layers()

    def note_size(block: Any, h: Tensor) -> Tensor:
        sizes.append(block.num_dst_nodes())
        rows: Tensor = first(block, h)
        return rows

    predictor = dx.Predictor(model, g, layers=[note_size, *others], cache_rows=cache_rows, batch_size=4)
    assert measure_difference(predictor(torch.arange(60)), infer(model, g)[:60]) < 1e-12
    assert max(sizes) <= 4


def test_threads_get_right_rows(g: DistGraph) -> None:
    model = Net()
    expected = infer(model, g)
    predictor = dx.Predictor(model, g, cache_rows=20)
    differences = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            ids = rng.integers(0, NUM_NODES, 6)
            differences.append(measure_difference(predictor(ids), expected[ids]))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(differences) == 80
    assert max(differences) < 1e-12


def predict_on_ranks(folder: str, structure: Any, strategy: str) -> None:
    """Rank 0 asks alone. Its graph has a part of the structure, and its model may have a part of a weight."""
    dx.init(strategy, timeout=60)
    g = dx.DistGraph(folder, structure=structure)
    model = dx.wrap(Net(), g)
    expected = infer(model, g)
    predictor = dx.Predictor(model, g)
    g.barrier()
    if g.rank() == 0:
        ids = torch.arange(0, NUM_NODES, 7)
        assert measure_difference(predictor(ids), expected[ids]) < 1e-12
        if structure == "partitioned":
            with pytest.raises(ConfigError, match="structure='replicated'"):
                predictor.update("feat", [3], torch.zeros(1, 4, dtype=torch.float64))
    g.barrier()
    dx.shutdown()


@pytest.mark.parametrize(
    ("structure", "strategy"), [("partitioned", "data_parallel"), ("replicated", "push_pull")]
)
def test_one_of_two_ranks_predicts(folders: dict[int, str], structure: str, strategy: str) -> None:
    run_ranks(predict_on_ranks, 2, args=(folders[2], structure, strategy), ranks_per_server=1)


def test_mistakes_are_refused(g: DistGraph) -> None:
    predictor = dx.Predictor(Net(), g)
    with pytest.raises(IndexError, match="90"):
        predictor([90])
    with pytest.raises(ConfigError, match="update changes 'feat'"):
        predictor.update("other", [3], torch.zeros(1))
    with pytest.raises(ConfigError, match=r"rows of shape \(1, 3\) for 1 nodes"):
        predictor.update("feat", [3], torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="cache_rows=-1"):
        dx.Predictor(Net(), g, cache_rows=-1)
    with pytest.raises(ConfigError, match="inference_layers"):
        dx.Predictor(nn.Linear(4, 3), g)
    summing = dx.Predictor(Net(), g, layers=[lambda block, h: h.sum()])
    with pytest.raises(ConfigError, match="with a row for each"):
        summing([3])


def test_several_types_are_refused(tmp_path: Path) -> None:
    with start_session(), pytest.raises(ConfigError, match="dx.layerwise_inference"):  # noqa: RUF043
        dx.Predictor(Net(), DistGraph(write_shop(tmp_path / "shop", 1)))
