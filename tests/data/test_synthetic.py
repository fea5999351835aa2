"""The built-in graph: sizes, distributions, and labels that neighbours help to predict."""

import dataclasses
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.data.external_memory import Budget, Workspace
from dglx_dist.data.sources import load_dataset
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.synthetic import (
    SyntheticConfig,
    assign_communities,
    generate,
    parse_config,
    write_streamed,
)
from dglx_dist.data.validate import check_raw_graph
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, RawGraph
from tests.data.raw_graphs import columns_of
from tests.helpers.ranks import run_ranks

SMALL = SyntheticConfig(nodes=3000, degree=10, classes=5, features=20, communities=20, seed=3)


@pytest.fixture(scope="module")
def small() -> RawGraph:
    return generate(SMALL)


def ends(graph: RawGraph) -> tuple[Array, Array]:
    return graph.edges[EDGE_TYPE]


def test_sizes_and_dtypes_are_those_asked_for(small: RawGraph) -> None:
    check_raw_graph(small, "small")
    assert [(len(ids), ids.dtype) for ids in ends(small)] == [(30_000, np.int32)] * 2
    features = columns_of(small)["feat"]
    assert (features.shape, features.dtype) == ((3000, 20), np.float32)
    assert small.num_classes == {NODE_TYPE: 5}
    assert [columns_of(small)[f"{name}_mask"].sum() for name in ("train", "val", "test")] == [300, 300, 600]


def test_edges_are_distinct_sorted_without_loops_and_in_both_directions(small: RawGraph) -> None:
    source_ids, destination_ids = (ids.astype(np.int64) for ids in ends(small))
    keys = source_ids * 3000 + destination_ids
    assert (np.diff(keys) > 0).all()
    assert (source_ids != destination_ids).all()
    assert np.array_equal(np.sort(destination_ids * 3000 + source_ids), keys)
    assert np.bincount(destination_ids, minlength=3000).min() >= 1


def test_the_seed_decides_everything(small: RawGraph) -> None:
    again = generate(SMALL)
    other_seed = generate(dataclasses.replace(SMALL, seed=4))
    assert all(np.array_equal(a, b) for a, b in zip(ends(small), ends(again), strict=True))
    assert all(np.array_equal(value, columns_of(again)[name]) for name, value in columns_of(small).items())
    assert not np.array_equal(ends(small)[0], ends(other_seed)[0])
    assert not np.array_equal(columns_of(small)["feat"], columns_of(other_seed)["feat"])


def test_homophily_and_locality_are_shares_of_edges() -> None:
    config = dataclasses.replace(SMALL, homophily=0.6, locality=0.5, label_noise=0)
    graph = generate(config)
    source_ids, destination_ids = ends(graph)
    communities, labels = assign_communities(config), columns_of(graph)["label"]
    assert abs((labels[source_ids] == labels[destination_ids]).mean() - 0.6) < 0.02
    assert abs((communities[source_ids] == communities[destination_ids]).mean() - 0.3) < 0.02


def test_degrees_are_skewed_more_by_a_smaller_exponent() -> None:
    def top_share(exponent: float) -> float:
        graph = generate(dataclasses.replace(SMALL, exponent=exponent))
        degrees = np.sort(np.bincount(ends(graph)[1], minlength=3000))
        return float(degrees[-30:].sum() / degrees.sum())

    # One node in a hundred has a hundredth of the edges when all degrees are alike.
    assert 0.01 < top_share(50) < 0.025
    assert top_share(2.2) > 0.06


@pytest.mark.parametrize(
    ("skew", "rate", "least", "most"), [(0.0, 0.08, 0.08, 0.12), (0.9, 0.08, 0.75, 1.0), (1.0, 0.5, 0.2, 0.2)]
)
def test_skew_puts_training_nodes_into_a_tenth_of_the_communities_until_these_are_full(
    skew: float, rate: float, least: float, most: float
) -> None:
    config = dataclasses.replace(SMALL, skew=skew, train_rate=rate)
    train_mask = columns_of(generate(config))["train_mask"]
    assert train_mask.sum() == 3000 * rate
    assert least <= (assign_communities(config)[train_mask] < 2).mean() <= most


def test_columns_may_be_left_out_and_one_class_is_enough() -> None:
    config = SyntheticConfig(nodes=50, degree=4, classes=1, communities=1, features=0, test_rate=0.0)
    graph = generate(config)
    assert graph.total_edges == 200
    assert set(columns_of(graph)) == {"label", "train_mask", "val_mask"}


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("", {}, SyntheticConfig()),
        ("nodes=2e4,degree=7.5", {"seed": 9}, SyntheticConfig(nodes=20_000, degree=7.5, seed=9)),
        ("seed=1", {"seed": 2}, SyntheticConfig(seed=2)),
        ("", {"seed": 2**60 + 1}, SyntheticConfig(seed=2**60 + 1)),  # no float holds that number
        ("node=3", {}, "did you mean 'nodes'"),
        ("nodes", {}, "name=value"),
        ("degree=many", {}, "degree='many' of the synthetic graph must be of type float"),
        ("nodes=2.5", {}, "nodes=2.5 of the synthetic graph must be of type int"),
        ("homophily=1.5", {}, "homophily=1.5 .* from 0 to 1"),
        ("exponent=2", {}, "above 2"),
        ("communities=15", {}, "a multiple of classes=10"),
        ("nodes=100,degree=25", {}, "degree=25.0 .* between 2 and 5"),
        ("train_rate=0.8,val_rate=0.3", {}, "sum to more than 1"),
    ],
)
def test_a_spec_is_read_and_options_win_or_it_is_refused_with_the_remedy(
    text: str, options: dict[str, object], expected: SyntheticConfig | str
) -> None:
    if not isinstance(expected, str):
        assert parse_config(text, options) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        parse_config(text, options)


def test_neighbours_help_by_a_wide_margin() -> None:
    graph = generate(SyntheticConfig(nodes=4000, degree=15, classes=5, features=50, communities=20))
    source_ids, destination_ids = (torch.from_numpy(ids).long() for ids in ends(graph))
    data = {name: torch.from_numpy(column) for name, column in columns_of(graph).items()}
    features = data["feat"]
    sums = torch.zeros_like(features).index_add_(0, destination_ids, features[source_ids])
    means = sums / torch.bincount(destination_ids, minlength=4000)[:, None]
    alone = _accuracy_of_mlp(features, data)
    with_neighbours = _accuracy_of_mlp(torch.cat([features, means], dim=1), data)
    assert alone > 0.3  # better than one in five: features say something
    assert with_neighbours > alone + 0.1
    assert with_neighbours < 0.97  # and labels are noisy enough that models differ


def _accuracy_of_mlp(features: Tensor, data: dict[str, Tensor]) -> float:
    """Accuracy on the test nodes of a small classifier that sees nothing but ``features`` ((N, F))."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features.shape[1], 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-3)
    train, test = data["train_mask"], data["test_mask"]
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(features[train]), data["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    guesses = model.eval()(features[test]).argmax(dim=1)
    return float((guesses == data["label"][test]).float().mean())


def test_links_that_always_leave_the_class_reach_both_communities_of_the_other() -> None:
    config = SyntheticConfig(nodes=200, classes=2, communities=4, degree=8, homophily=0.0, locality=0.0)
    communities, (source_ids, destination_ids) = assign_communities(config), ends(generate(config))
    reached = np.bincount(communities[destination_ids[communities[source_ids] == 0]], minlength=4)
    assert reached[0] == reached[2] == 0
    assert min(reached[1], reached[3]) > 100


@pytest.mark.parametrize("seed", range(5))
def test_a_crowded_community_is_filled_until_the_number_of_edges_is_reached(seed: int) -> None:
    # Communities of 10 nodes, each wanting 5 of its 9 possible neighbours: most draws repeat.
    config = SyntheticConfig(nodes=40, classes=2, communities=4, degree=5, homophily=1, locality=1, seed=seed)
    source_ids, destination_ids = ends(generate(config))
    assert len(np.unique(source_ids.astype(np.int64) * 40 + destination_ids)) == 200
    assert len(np.unique(source_ids)) == 40


def test_streamed_graphs_are_symmetric_and_like_those_in_memory(
    tmp_path: Path,
) -> None:
    config = dataclasses.replace(SMALL, nodes=20_001, degree=25, communities=40, label_noise=0)
    write_streamed(config, tmp_path / "g", feature_dtype="float16")
    dataset = open_dataset(tmp_path / "g", verify="full")
    part = dataset.part(0)
    degrees, sources = np.diff(part.indptr(EDGE_TYPE)), part.indices(EDGE_TYPE).astype(np.int64)
    destinations = np.repeat(np.arange(config.nodes), degrees)
    keys = destinations * config.nodes + sources
    assert (np.diff(keys) > 0).all()
    assert (sources != destinations).all()
    assert np.array_equal(np.sort(sources * config.nodes + destinations), keys)
    assert np.array_equal(part.original_edge_ids(EDGE_TYPE), np.arange(len(keys)))
    # The same settings in memory: shares within 0.02, degrees within a tenth.
    graph, communities = generate(config), assign_communities(config)
    ours, in_memory = (sources, destinations), ends(graph)
    for per in (config.classes, config.num_communities):
        share, share_in_memory = (
            np.mean(communities[a] % per == communities[b] % per) for a, b in (ours, in_memory)
        )
        assert share == pytest.approx(share_in_memory, abs=0.02)
    usual = np.bincount(in_memory[1], minlength=config.nodes)
    for measure in (np.mean, np.median, np.max):
        assert measure(degrees) == pytest.approx(measure(usual), rel=0.15)
    columns = columns_of(graph)
    assert np.array_equal(part.node_data(NODE_TYPE, "feat"), columns.pop("feat").astype(np.float16))
    for name, values in columns.items():
        assert np.array_equal(part.node_data(NODE_TYPE, name), values)
    again = write_streamed(config, tmp_path / "again", feature_dtype="float16")
    assert again.checksum == dataset.manifest.checksum


def _streamed_within(folder: Path) -> int:
    config = SyntheticConfig(nodes=20_000, degree=400, features=4, communities=10)
    write_streamed(dataclasses.replace(config, degree=25), folder / "compiled")
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    # 7.4 M edges have 30 MB of sources; a piece of a million has 4 MB.
    resource.setrlimit(resource.RLIMIT_DATA, (held + (24 << 20),) * 2)
    return write_streamed(config, folder / "large").num_edges(EDGE_TYPE)


@pytest.mark.wide
def test_streamed_graphs_have_no_edges_in_memory(tmp_path: Path) -> None:
    (num_edges,) = run_ranks(_streamed_within, 1, args=(tmp_path,))
    assert num_edges > 6_000_000


def test_a_graph_larger_than_the_memory_granted_is_streamed_into_the_workspace(tmp_path: Path) -> None:
    def load_within(work: int) -> RawGraph:
        workspace = Workspace(folder=tmp_path / str(work), budget=Budget(work=work))
        return load_dataset("synthetic:nodes=3000,degree=10,features=20", workspace=workspace)

    usual, large = load_within(2_000_000), load_within(1_000_000)
    config = SyntheticConfig(nodes=3000, degree=10, features=20)
    assert np.array_equal(ends(usual)[0], ends(generate(config))[0])
    stored = open_dataset(tmp_path / "1000000" / "synthetic" / "dataset").part(0)
    assert np.array_equal(ends(large)[0], stored.indices(EDGE_TYPE))
    assert np.array_equal(columns_of(large)["feat"], columns_of(usual)["feat"])
    with pytest.raises(ConfigError, match=r"3000 nodes takes 240 KB .* grant --memory \d+MB"):
        load_within(200_000)


def test_a_resumed_run_keeps_the_generator_of_the_first(tmp_path: Path) -> None:
    config = "synthetic:nodes=500,degree=6,features=0"
    edges = []
    for work in (60_000, 1 << 30):
        workspace = Workspace(folder=tmp_path, budget=Budget(work=work))
        ((_, destinations),) = load_dataset(config, workspace=workspace).edges.values()
        edges.append(destinations.tolist())
    assert edges[0] == edges[1]
