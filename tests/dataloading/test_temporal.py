"""Samples never see the future, and are the same on any number of ranks."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler

import dglx_dist as dx
from dglx_dist.comm.session import start_session
from dglx_dist.data.times import NEVER, find_moment_before, sort_by_time, subtract_window, to_keys, to_times
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.dataloading.trees import TreeRule, hash_rows, make_row_draw, make_tree_keys
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.sampling import pack_hop_parameters
from dglx_dist.graph.structure import NO_EDGES, CSCShard, rows_from_wire
from dglx_dist.options import read_time
from dglx_dist.records import NODE_TYPE
from tests.dataloading.times import (
    LIKES,
    OWNS,
    TIME_KINDS,
    VISITS,
    list_draws,
    open_trees,
    random_timed_graph,
    raw_ring,
    raw_timed_shop,
    write_parts,
)
from tests.helpers.ranks import run_each, run_ranks

NUM_BATCHES = 10_000


@pytest.mark.parametrize("kind", TIME_KINDS)
def test_no_edge_is_later_than_its_seed(kind: str) -> None:
    rng = np.random.default_rng(5)
    num_graphs, num_edges = 10, 0
    for number in range(num_graphs):
        graph = random_timed_graph(kind, number)
        keys = to_keys(graph.times)
        window = [None, 2][number % 2]
        sample = open_trees(graph, [2, 3], takes_last=number % 3 == 0, window=window)
        for epoch in range(-(-NUM_BATCHES // (num_graphs * len(TIME_KINDS)))):
            # Times of edges are among the times of seeds, so that equality occurs.
            times = rng.choice(graph.times[keys != NEVER], 4)
            seeds = rng.integers(0, graph.num_nodes, 4)
            batch, trees = sample(seeds, times, epoch)
            for hop in range(2):
                edges = batch.edge_ids[batch.edge_ends[hop] : batch.edge_ends[hop + 1]]
                sources = batch.sources[batch.edge_ends[hop] : batch.edge_ends[hop + 1]]
                limits = times[trees[sources]]
                assert (keys[edges] != NEVER).all()
                assert (graph.times[edges] <= limits).all()
                assert window is None or (graph.times[edges] >= limits - window).all()
                assert (graph.indices[edges] == batch.nodes[sources]).all()
                num_edges += len(edges)
    assert num_edges > 1000


@pytest.mark.parametrize("kind", TIME_KINDS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("takes_last", [False, True])
def test_draws_agree_with_a_list_of_the_past(kind: str, window: float | None, takes_last: bool) -> None:
    graph = random_timed_graph(kind, 1)
    rng = np.random.default_rng(0)
    times = rng.choice(graph.times[to_keys(graph.times) != NEVER], graph.num_nodes)
    exclude = np.sort(rng.choice(len(graph.indices), 60, replace=False))
    for fanout in (3, -1, 0):
        sample = open_trees(graph, [fanout, 4], takes_last=takes_last, window=window)
        batch, trees = sample(np.arange(graph.num_nodes), times, exclude=exclude)
        num_drawn = 0
        for hop, size in ((0, 4), (1, fanout)):
            for tree, node, sources, edges in list_draws(batch, trees, hop):
                past = graph.past(node, times[tree], window, set(exclude.tolist()))
                expected = len(past) if size < 0 else min(size, len(past))
                assert len(set(edges)) == len(edges) == expected
                assert set(edges) <= set(past)
                assert sources == graph.indices[edges].tolist()
                if takes_last:
                    assert edges == past[len(past) - expected :]
                num_drawn += len(edges)
        assert num_drawn > 10


def test_uniform_draws_have_equal_frequencies() -> None:
    graph = random_timed_graph("negative", 0)
    graph.times[:150] = np.random.default_rng(0).permutation(150)
    time = 14
    past = graph.past(0, time)
    sample = open_trees(graph, [3])
    num_epochs = 4000
    counts: Counter[int] = Counter()
    repeats = 0
    for epoch in range(num_epochs):
        batch, trees = sample(np.array([0, 0]), np.array([time, time + 1]), epoch)
        (_, _, _, first), (_, _, _, second) = list_draws(batch, trees, 0)
        counts.update(first)
        repeats += len(set(first) & set(second))
    expected = 3 * num_epochs / len(past)
    chi_square = sum((counts[edge] - expected) ** 2 for edge in past) / (expected * (1 - 3 / len(past)))
    assert sum(counts.values()) == 3 * num_epochs
    assert len(past) == 15
    # 36.1 is the 99.9 % quantile for 14 degrees of freedom.
    assert chi_square * (len(past) - 1) / len(past) < 36.1
    # Trees of one node at two times draw independently. The share of equal edges would be 1 otherwise.
    later = graph.past(0, time + 1)
    assert abs(repeats / (3 * num_epochs) - 3 / len(later)) < 0.02


def test_keys_have_the_order_of_times() -> None:
    floats = np.array([-np.inf, -2.5, -1e-300, 0.0, 1e-300, 3.0, np.inf])
    assert (np.diff(to_keys(floats)) > 0).all()
    assert to_times(to_keys(floats), "float64").tolist() == floats.tolist()
    assert to_keys(np.array([-0.0, np.nan])).tolist() == [to_keys(np.array([0.0]))[0], NEVER]
    ints = np.array([np.iinfo(np.int64).min, -5, 0, 9], np.int64)
    assert to_keys(ints).tolist() == [NEVER, -5, 0, 9]
    assert subtract_window(np.array([-5, 9]), 7, "int64").tolist() == [-12, 2]
    # Times near the smallest integer have no earlier limit, and do not wrap around.
    assert subtract_window(np.array([-(2**63) + 3]), 7, "int64").tolist() == [-(2**63) + 1]
    assert to_times(subtract_window(to_keys(floats[1:2]), 0.5, "float64"), "float64").tolist() == [-3.0]


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_the_moment_before_is_earlier_at_zero_too(dtype: str) -> None:
    times = np.array([-2, -1, 0, 1, 2], dtype)
    assert (to_keys(find_moment_before(times)) < to_keys(times)).all()
    assert (to_keys(find_moment_before(times))[1:] >= to_keys(times)[:-1]).all()


def test_a_window_as_long_as_all_times_hides_no_edge() -> None:
    keys = np.array([-5, 0, 5, 2**62])
    for window in (2**62, 2**63 - 1, 10**30):
        assert (subtract_window(keys, window, "int64") <= keys).all()
        assert (subtract_window(keys, window, "int64") > np.iinfo(np.int64).min).all()


def test_reads_numbers_and_dates() -> None:
    assert [read_time(text) for text in ("12", "-3.5", "1970-01-02", "1970-01-01T01:00:00+01:00")] == [
        *(12, -3.5, 86400, 0),
    ]
    for text in ("soon", "2024-01-01T00:00:00.5"):
        with pytest.raises(ConfigError, match=text):
            read_time(text)


RING_SAMPLER = {"uniform": ([3, 2], "uniform", None), "last": ([2, -1], "last", 4)}


def describe_blocks(blocks, seeds) -> dict[tuple, list[tuple]]:
    """Return {(seed, time): edges of its tree as (layer, type, source, destination, edge)}."""
    trees: dict[tuple, list[tuple]] = {(*seed,): [] for seed in seeds}
    for layer, block in enumerate(blocks):
        for etype in block.canonical_etypes:
            u, v = block.edges(etype=etype)
            sources, targets = block.srcnodes[etype[0]].data, block.dstnodes[etype[2]].data
            assert (sources["seed_id"][u] == targets["seed_id"][v]).all()
            columns = (targets["seed_id"][v], sources[dgl.NID][u], targets[dgl.NID][v])
            rows = zip(*(c.tolist() for c in (*columns, block.edges[etype].data[dgl.EID])), strict=True)
            for seed_id, *edge in rows:
                trees[(*seeds[seed_id],)].append((layer, etype[1], *edge))
    return {seed: sorted(edges) for seed, edges in trees.items()}


def sample_ring(folder: str, structure: str, kind: str) -> list[tuple[dict, int]]:
    """The trees of this rank's share of all nodes, of two epochs, and the bytes that were sent."""
    fanouts, strategy, window = RING_SAMPLER[kind]
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        ids = torch.arange(session.topology.rank, g.num_nodes(), session.topology.world_size)
        sampler = dx.TemporalNeighborSampler(
            fanouts,
            strategy=strategy,
            window=window,
            prefetch_node_feats=["feat"],
            prefetch_edge_feats=["time"],
        )
        # Two rows of every node, at two times.
        twice, moments = torch.cat([ids, ids]), torch.cat([ids % 13 - 1, ids % 5 + 20])
        loader = DataLoader(g, twice, sampler, batch_size=9, shuffle=True, seed_time=moments, num_threads=2)
        epochs = []
        for _ in range(2):
            trees = {}
            for input_nodes, output_nodes, blocks in loader:
                times = blocks[-1].dstdata["time"]
                assert blocks[0].srcdata["feat"][:, 0].tolist() == g.orig_ids(input_nodes).tolist()
                for block in blocks:
                    assert (block.edata["time"] <= block.dstdata["time"][block.edges()[1]]).all()
                seeds = list(zip(output_nodes.tolist(), times.tolist(), strict=True))
                trees |= describe_blocks(blocks, seeds)
            epochs.append(trees)
        g.close()
        return epochs


def test_draws_are_equal_on_1_2_and_4_ranks_and_both_placements(tmp_path: Path) -> None:
    folder = str(write_parts(raw_ring(), tmp_path / "ring", 4))
    expected: dict[str, list[dict]] = {}
    cases = [
        (folder, structure, kind) for structure in ("replicated", "partitioned") for kind in RING_SAMPLER
    ]
    for world_size, ranks_per_server in ((1, None), (2, 1), (4, 2)):
        outcomes = run_each(sample_ring, cases, world_size, ranks_per_server=ranks_per_server)
        for (_, structure, kind), epochs_of_ranks in zip(cases, outcomes, strict=True):
            epochs = [
                {seed: edges for trees in of_epoch for seed, edges in trees.items()}
                for of_epoch in zip(*epochs_of_ranks, strict=True)
            ]
            assert len(epochs[0]) == 120
            assert epochs == expected.setdefault(kind, epochs), (world_size, structure)
    for kind, epochs in expected.items():
        assert (epochs[0] == epochs[1]) == (kind == "last"), "each epoch has its own draws"


def count_sampling_bytes(folder: str, window: int | None) -> tuple[int, int]:
    """The bytes of a batch by the ledger, and by the formula of docs/development/contracts.md."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure="partitioned")
        sampler = dx.TemporalNeighborSampler([3, 2], window=window)
        ids = torch.arange(session.topology.rank, 60, 2)
        loader = DataLoader(g, ids, sampler, batch_size=30, seed_time=9, num_threads=0)
        before = session.ledger.total(phase="sampling")
        ((_, _, blocks),) = loader
        num_bytes = session.ledger.total(phase="sampling") - before
        expected = 0
        for block in blocks:
            is_remote = ~torch.isin(block.dstdata[dgl.NID], g.local_nodes())
            num_rows, num_edges = int(is_remote.sum()), int(block.in_degrees()[is_remote].sum())
            expected += num_rows * (24 if window is None else 32) + 8 * num_rows + 16 * num_edges
        g.barrier()
        g.close()
        return num_bytes, expected


@pytest.mark.parametrize("window", [None, 3])
def test_bytes_of_remote_rows_are_those_of_the_formula(window: int | None, tmp_path: Path) -> None:
    folder = str(write_parts(raw_ring(), tmp_path / "ring", 2))
    for num_bytes, expected in run_ranks(count_sampling_bytes, 2, args=(folder, window), ranks_per_server=1):
        assert num_bytes == expected > 1000


def sample_shop_links(folder: str, structure: str) -> tuple[dict, list]:
    """The trees around visits and their negatives, and the pairs with their times."""
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder, structure=structure)
        sampler = dx.TemporalNeighborSampler([2, 3], edge_time="t", node_time="born")
        ids = torch.arange(session.topology.rank, g.num_edges(VISITS), session.topology.world_size)
        loader = DistEdgeDataLoader(
            g,
            {VISITS: ids},
            sampler,
            batch_size=16,
            exclude="reverse_types",
            reverse_etypes={VISITS: OWNS, OWNS: VISITS},
            negative_sampler=dx.negative.Uniform(2),
        )
        trees, pairs = {}, []
        visits = g.edges[VISITS].data["t"]
        born = g.nodes["item"].data["born"]
        for _, pair_graph, negative_graph, blocks in loader:
            edge_ids = pair_graph.edges[VISITS].data[dgl.EID]
            moments = visits[edge_ids]
            for graph, repeats in ((pair_graph, 1), (negative_graph, 2)):
                ends = dict(zip(("user", "item"), graph.edges(etype=VISITS), strict=True))
                for ntype, rows in ends.items():
                    last = blocks[-1].dstnodes[ntype].data
                    assert (graph.nodes[ntype].data[dgl.NID] == last[dgl.NID]).all()
                    assert (last["time"][rows] == moments.repeat_interleave(repeats)).all()
                columns = [graph.nodes[ntype].data[dgl.NID][rows].tolist() for ntype, rows in ends.items()]
                pairs += zip(*columns, moments.repeat_interleave(repeats).tolist(), strict=True)
            seeds = [
                (ntype, *row)
                for ntype in g.ntypes
                for row in zip(
                    *(blocks[-1].dstnodes[ntype].data[name].tolist() for name in (dgl.NID, "time")),
                    strict=True,
                )
            ]
            for block in blocks:
                for etype in (VISITS, OWNS):
                    ids_of_block = block.edges[etype].data[dgl.EID]
                    limits = block.dstnodes[etype[2]].data["time"][block.edges(etype=etype)[1]]
                    assert (g.edges[etype].data["t"][ids_of_block] <= limits).all()
                    if etype == OWNS:
                        items = block.srcnodes["item"].data[dgl.NID][block.edges(etype=etype)[0]]
                        assert (born[items] <= limits).all()
                    else:
                        assert not set(ids_of_block.tolist()) & set(edge_ids.tolist())
            trees |= {key: edges for key, edges in describe_blocks(blocks, seeds).items() if len(ids) == 400}
        g.close()
        return trees, sorted(pairs)


def test_links_of_several_types_respect_time_and_are_equal_on_any_ranks(tmp_path: Path) -> None:
    folder = str(write_parts(raw_timed_shop(), tmp_path / "shop", 4))
    ((expected_trees, expected_pairs),) = run_ranks(sample_shop_links, 1, args=(folder, "replicated"))
    kinds = Counter(edge[1] for edges in expected_trees.values() for edge in edges)
    assert set(kinds) == {VISITS[1], LIKES[1], OWNS[1]}
    ((trees, pairs),) = run_ranks(sample_shop_links, 1, args=(folder, "partitioned"))
    assert (trees, pairs) == (expected_trees, expected_pairs)
    by_rank = run_ranks(sample_shop_links, 2, args=(folder, "partitioned"), ranks_per_server=1)
    assert sorted(pair for _, pairs in by_rank for pair in pairs) == expected_pairs


def train_ring(folder: str, structure: str) -> list[float]:
    """Weights after an epoch with dropout and batch norm, on trees in float64."""
    with start_session(timeout_s=60) as session:
        torch.manual_seed(0)
        g = DistGraph(folder, structure=structure)
        sampler = dx.TemporalNeighborSampler([3, 3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
        ids = torch.arange(session.topology.rank, 48, session.topology.world_size)
        size = 16 // session.topology.world_size
        # Without shuffling, each step has the same nodes on any number of ranks.
        loader = DataLoader(g, ids, sampler, batch_size=size, seed_time=ids % 11)
        model = dx.wrap(TimedModel().double(), g)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _, _, blocks in loader:
            output = model(blocks, blocks[0].srcdata["feat"])
            torch.nn.functional.cross_entropy(output, blocks[-1].dstdata["label"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = torch.cat([p.detach().flatten() for p in model.whole().parameters()]).tolist()
        g.close()
        return weights


class TimedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dgl.nn.SAGEConv(2, 8, "mean"), dgl.nn.SAGEConv(8, 3, "mean")
        self.norm, self.dropout = dx.nn.BatchNorm(8), torch.nn.Dropout(0.4)

    def forward(self, blocks, h):
        return self.second(blocks[1], self.dropout(self.norm(self.first(blocks[0], h / 60)).relu()))


def test_training_on_trees_is_that_of_one_process(tmp_path: Path) -> None:
    folder = str(write_parts(raw_ring(), tmp_path / "ring", 4))
    (expected,) = run_ranks(train_ring, 1, args=(folder, "replicated"))
    for world_size, structure in ((2, "partitioned"), (4, "replicated")):
        for weights in run_ranks(train_ring, world_size, args=(folder, structure), ranks_per_server=1):
            np.testing.assert_allclose(weights, expected, atol=1e-10, rtol=0)


def test_rows_and_trees_with_swapped_numbers_have_their_own_draws() -> None:
    pairs = np.array([(a, b) for a in range(30) for b in range(30)])
    keys = np.empty(len(pairs), np.int64)
    make_tree_keys(*pairs.T, 0, keys)
    assert len(np.unique(keys)) == len(pairs)
    untimed = np.empty(30, np.int64)
    make_tree_keys(np.arange(30), np.empty(0, np.int64), 0, untimed)
    assert len(np.unique(hash_rows(untimed, *pairs.T))) == len(pairs)


@pytest.fixture
def ring(tmp_path: Path):
    with start_session():
        yield DistGraph(write_parts(raw_ring(), tmp_path / "ring", 2))


def test_a_disjoint_tree_does_not_depend_on_other_seeds(ring: DistGraph) -> None:
    sampler = NeighborSampler([3, 2])
    trees = {}
    for size in (60, 1):
        loader = DataLoader(ring, torch.arange(60), sampler, batch_size=size, disjoint=True)
        trees[size] = {}
        for _, output_nodes, blocks in loader:
            assert "time" not in blocks[0].srcdata
            trees[size] |= describe_blocks(blocks, [(node,) for node in output_nodes.tolist()])
    assert trees[60] == trees[1]
    # Nodes that two trees share have a row in each.
    loader = DataLoader(ring, torch.arange(60), sampler, batch_size=60, disjoint=True)
    ((input_nodes, _, blocks),) = loader
    assert len(set(input_nodes.tolist())) < len(input_nodes)
    rows = zip(blocks[0].srcdata["seed_id"].tolist(), input_nodes.tolist(), strict=True)
    assert len(set(rows)) == len(input_nodes)


@pytest.mark.parametrize("fanouts", [[-1, -1], [100, 100]])
def test_a_model_on_complete_disjoint_trees_gives_the_rows_of_ordinary_blocks(
    ring: DistGraph, fanouts
) -> None:
    torch.manual_seed(0)
    model = TimedModel().double().eval()
    sampler = NeighborSampler(fanouts, prefetch_node_feats=["feat"])
    outputs = []
    for disjoint in (False, True):
        loader = DataLoader(ring, torch.arange(60), sampler, batch_size=30, disjoint=disjoint)
        outputs.append(torch.cat([model(blocks, blocks[0].srcdata["feat"]) for _, _, blocks in loader]))
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)


def test_disjoint_trees_of_edges_and_draws_with_replacement(ring: DistGraph) -> None:
    loader = DistEdgeDataLoader(
        ring, torch.arange(40), NeighborSampler([2], replace=True), batch_size=10, disjoint=True
    )
    for _, pair_graph, (block,) in loader:
        assert block.dstdata["seed_id"].tolist() == list(range(block.num_dst_nodes()))
        assert (block.dstdata[dgl.NID] == pair_graph.ndata[dgl.NID]).all()
        assert set(block.in_degrees().tolist()) <= {0, 2}


def test_seeds_take_times_of_columns_numbers_and_tensors(ring: DistGraph) -> None:
    sampler = dx.TemporalNeighborSampler([2], node_time="label")
    ids = torch.tensor([4, 9])
    labels = ring.ndata["label"][ids]
    for seed_time, expected in (
        (None, labels),
        ("label", labels),
        (7, [7, 7]),
        (torch.tensor([3, 5]), [3, 5]),
    ):
        ((_, _, (block,)),) = DataLoader(ring, ids, sampler, batch_size=2, seed_time=seed_time)
        assert block.dstdata["time"].tolist() == list(expected)


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        ({}, {}, "times of the seed nodes '_N' are not named"),
        ({}, {"seed_time": "when"}, "have no column 'when'"),
        ({}, {"seed_time": torch.zeros(3, dtype=torch.int64)}, r"shape \(3,\) .* 2 nodes"),
        ({}, {"seed_time": 1.5}, "float64, but .* int64"),
        ({"edge_time": "when"}, {"seed_time": 1}, "no edges .* have the column 'when' of times .known: time"),
        ({"edge_time": None, "node_time": "feat"}, {"seed_time": 1}, "one number per row"),
        ({"window": 1.5}, {"seed_time": 1}, "window=1.5, but times are integers"),
        ({"prefetch_node_feats": ["time"]}, {"seed_time": 1}, "names 'time'"),
        ({}, {"seed_time": np.iinfo(np.int64).min}, "has no time"),
        ({}, {"seed_time": np.full(2, 2**63, np.uint64)}, "dtype uint64"),
        ({"window": True}, {"seed_time": 1}, "window=True"),
    ],
)
def test_refuses_times_that_do_not_fit(ring: DistGraph, sampler, options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(ring, torch.tensor([1, 2]), dx.TemporalNeighborSampler([2], **sampler), **options)


def test_a_column_that_the_program_renamed_is_refused(tmp_path: Path) -> None:
    """Edges are sorted by the times of the dataset, and the order is kept for later runs."""
    raw = raw_ring()
    born = {"born": np.zeros(60, np.int64)}
    raw = replace(raw, node_data={NODE_TYPE: {**raw.node_data[NODE_TYPE], **born}})
    with start_session():
        g = DistGraph(write_parts(raw, tmp_path / "ring", 2))
        g.ndata["born"] = g.new_tensor((60,), torch.int64, "mine")
        sampler = dx.TemporalNeighborSampler([2], node_time="born")
        with pytest.raises(ConfigError, match="assigned another tensor to the column 'born' of node"):
            DataLoader(g, torch.arange(60), sampler, seed_time=5)


@pytest.mark.parametrize("num_columns", [1, 2, 4])
def test_rows_of_another_server_must_have_all_columns(num_columns: int) -> None:
    order = sort_by_time(np.arange(0, 11), np.arange(10))
    draw = make_row_draw(TreeRule(dtype="int64"), NO_EDGES, {0: order})
    shard = CSCShard(indptr=np.arange(0, 11), indices=np.zeros(10, np.int32), first_node=0, first_edge=0)
    with pytest.raises(ValueError, match="rows must have 3 columns"):
        draw(shard, np.zeros((num_columns, 3), np.int64), pack_hop_parameters(-1, 1), NO_EDGES)


@pytest.mark.parametrize("degrees", [[1 << 40, 0], [-1, 1], [1, 1]])
def test_an_answer_with_other_counts_than_edges_is_refused(degrees: list[int]) -> None:
    edge = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="the answer"):
        rows_from_wire(2, [np.array(degrees), edge, edge], 10, (0, 100))


def test_refuses_what_trees_cannot_do(ring: DistGraph) -> None:
    for arguments in ({"strategy": "first"}, {"window": -1}, {"edge_time": None}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            dx.TemporalNeighborSampler([2], **arguments)
    with pytest.raises(ConfigError, match="once at one time"):
        DataLoader(ring, torch.tensor([1, 1]), dx.TemporalNeighborSampler([2]), seed_time=3)
    with pytest.raises(ConfigError, match=r"needs dx\.TemporalNeighborSampler"):
        DataLoader(ring, torch.tensor([1]), NeighborSampler([2]), seed_time=3)
    with pytest.raises(ConfigError, match="draws uniformly for each tree"):
        DataLoader(ring, torch.tensor([1]), NeighborSampler([2], prob="time"), disjoint=True)
    with pytest.raises(ConfigError, match=r"Pass it to dx\.DataLoader"):
        dx.TemporalNeighborSampler([2]).sample(ring, torch.tensor([1]))
    loader = DistEdgeDataLoader(
        ring,
        torch.tensor([1, 2]),
        dx.TemporalNeighborSampler([2]),
        batch_size=2,
        negative_sampler=lambda g, ids: (torch.zeros(5).long(), torch.zeros(5).long()),
    )
    with pytest.raises(ConfigError, match="5 pairs for 2 edges"):
        next(iter(loader))


def test_the_order_by_time_is_kept_and_a_damaged_one_is_made_again(tmp_path: Path, caplog) -> None:
    folder = write_parts(raw_ring(), tmp_path / "ring", 2)

    def sample() -> list:
        with start_session():
            g = DistGraph(folder, structure="partitioned")
            sampler = dx.TemporalNeighborSampler([2], strategy="last")
            loader = DataLoader(g, torch.arange(60), sampler, batch_size=60, seed_time=5)
            edges = [blocks[0].edata[dgl.EID].tolist() for _, _, blocks in loader]
            g.close()
            return edges

    expected = sample()
    files = sorted(folder.glob("cache/time-*/*/positions.npy"))
    assert len(files) == 2
    stamps = [file.stat().st_mtime_ns for file in files]
    assert sample() == expected
    assert [file.stat().st_mtime_ns for file in files] == stamps, "the order is not made again"
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"\x7f")
    assert sample() == expected
    assert "does not match its checksum" in caplog.text
