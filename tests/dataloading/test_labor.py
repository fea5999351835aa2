"""LABOR: draws keyed by the source are unbiased, equal on any number of ranks, and shared as options say."""

from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import LaborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.edge_loader import DistEdgeDataLoader
from dglx_dist.dataloading.kernels import Schema, ThreadTable, draw_by_importance
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.dataloading.sampler import DrawSettings, LocalSource, SourceDraws
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.keyed_random import Rule, draw_edges, hash_ids
from tests.dataloading.graphs import csc_from, random_csc
from tests.dataloading.rings import NUM_NODES, write_rings
from tests.helpers.ranks import RankError, run_ranks

NO_IDS = np.empty(0, np.int64)
EVERY_BATCH = SourceDraws(layer_dependency=False, batch_dependency=1)


def draw_in_edges(csc, nodes, fanout, stream, exclude=NO_IDS):
    return draw_edges(csc, np.asarray(nodes), fanout, np.uint64(stream), Rule(False, exclude, True))


def test_weighted_sums_are_unbiased() -> None:
    """The mean of sum x / (degree p) over 10,000 draws is that over all in-edges; edge 2 is excluded."""
    csc = csc_from([[0, 1, 2, 3, 4, 5], [1, 2, 3], [5, 4, 0, 1], [], [2, 2, 0]], dtype="int64")
    x, fanout, exclude = np.array([3.0, -1, 7, 2, 11, 0.5]), 2, np.array([2])
    nodes = np.arange(5)
    kept = np.delete(np.arange(len(csc.indices)), exclude)
    of_edge = np.repeat(nodes, np.diff(csc.indptr))
    degrees = np.bincount(of_edge[kept], minlength=5)
    weights = 1 / np.minimum(fanout, degrees.clip(1))
    sums = np.zeros((10_000, 5))
    for draw, row in enumerate(sums):
        indptr, sources, edges = draw_in_edges(csc, nodes, fanout, draw, exclude)
        assert (csc.indices[edges] == sources).all()
        destinations = np.repeat(nodes, np.diff(indptr))
        assert (destinations == of_edge[edges]).all()
        np.add.at(row, destinations, x[sources] * weights[destinations])
    exact = np.bincount(of_edge[kept], x[csc.indices[kept]], minlength=5) / degrees.clip(1)
    sigma = sums.std(axis=0) / np.sqrt(len(sums))
    assert (np.abs(sums.mean(axis=0) - exact) <= 5 * sigma).all()
    assert sigma[[0, 1, 2, 4]].min() > 0
    assert sigma[3] == 0


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_edges_are_those_whose_source_draws_below_fanout_by_degree(dtype: str) -> None:
    csc = random_csc(300, 12, dtype=dtype)
    exclude, nodes, stream = np.arange(0, len(csc.indices), 7), np.array([4, 0, 123, 9]), 77
    for fanout in (-1, 0, 1, 5, 20, 1000):
        indptr, _, edges = draw_in_edges(csc, nodes, fanout, stream, exclude)
        for i, node in enumerate(nodes):
            all_of_node = np.arange(csc.indptr[node], csc.indptr[node + 1])
            among = all_of_node[~np.isin(all_of_node, exclude)]
            unit = hash_ids(csc.indices[among].astype(np.int64), np.uint64(stream)) / 2.0**64
            take_all = fanout < 0 or fanout >= len(among)
            expected = among if take_all else among[unit < fanout / len(among)]
            assert edges[indptr[i] : indptr[i + 1]].tolist() == expected.tolist()


def unequal(csc, weights, fanout, rounds, stream):
    """Rows and positions of the kept edges, and weight / probability."""
    rows = np.empty(len(csc.indptr), np.int64)
    sources = csc.indices.astype(np.int64)
    kept, inverse = draw_by_importance(csc.indptr, sources, weights, fanout, np.uint64(stream), rounds, rows)
    return rows, kept, inverse


def probabilities(csc, weights, fanout: int, rounds: int):
    """By bisection: the variance of a weighted sum is that of as many draws without replacement."""
    runs = [slice(*ends) for ends in pairwise(csc.indptr)]

    def scales(shares) -> list[float]:
        factors = []
        for run in runs:
            w, share = weights[run], shares[run]
            target = w.sum() ** 2 * (1 / min(fanout, len(w)) - 1 / len(w)) + (w**2).sum()
            low, high = 0.0, 1 / share.min()
            for _ in range(200):
                middle = (low + high) / 2
                above = (w**2 / np.minimum(1, middle * share)).sum() > target
                low, high = (middle, high) if above else (low, middle)
            factors.append(high)
        return factors

    shares, pi = weights, np.ones(csc.indices.max() + 1)
    for done in range(rounds):
        largest = np.zeros(len(pi))
        for scale, run in zip(scales(shares), runs, strict=True):
            np.maximum.at(largest, csc.indices[run], scale * (shares[run] if done == 0 else 1))
        pi = pi * largest
        shares = pi[csc.indices]
    return np.minimum(1, np.repeat(scales(shares), np.diff(csc.indptr)) * shares)


KINDS = [(True, 0), (False, 1), (True, 1), (False, 3), (False, -1)]


@pytest.mark.parametrize(("weighted", "rounds"), KINDS)
def test_sums_of_unequal_draws_are_unbiased(weighted: bool, rounds: int) -> None:
    csc = csc_from([[0, 1, 2, 3, 4, 5], [1, 2, 3], [5, 4, 0, 1], [2, 3]], dtype="int64")
    weights = np.linspace(0.5, 3, len(csc.indices)) if weighted else np.ones(len(csc.indices))
    x, of_edge = np.array([3.0, -1, 7, 2, 11, 0.5]), np.repeat(np.arange(4), np.diff(csc.indptr))
    sums, counts = np.zeros((10_000, 4)), np.zeros((10_000, 4))
    for draw in range(len(sums)):
        rows, kept, inverse = unequal(csc, weights, 2, rounds, draw)
        assert (of_edge[kept] == np.repeat(np.arange(4), np.diff(rows))).all()
        np.add.at(sums[draw], of_edge[kept], x[csc.indices[kept]] * inverse)
        counts[draw] = np.diff(rows)
    expected = {0: np.bincount(of_edge, x[csc.indices] * weights)}
    if rounds >= 0:
        expected[1] = np.bincount(of_edge, probabilities(csc, weights, 2, rounds))
    for which, exact in expected.items():
        samples = (sums, counts)[which]
        sigma = samples.std(axis=0) / np.sqrt(len(samples))
        assert (np.abs(samples.mean(axis=0) - exact) <= 5 * sigma + 1e-12).all()
    # The node of in-degree 2 keeps both; the sums of the others are random.
    assert (counts[:, 3] == 2).all()
    assert sums.std(axis=0)[:3].min() > 0.1


@pytest.mark.wide
@pytest.mark.parametrize(("weighted", "rounds"), KINDS[:4])
def test_unequal_draws_keep_edges_whose_source_draws_below_their_probability(
    weighted: bool, rounds: int
) -> None:
    csc = random_csc(300, 12)
    csc = csc._replace(indptr=csc.indptr[np.flatnonzero(np.diff(csc.indptr, prepend=-1))])
    some = np.random.default_rng(1).random(len(csc.indices)) + 0.1
    weights = some if weighted else np.ones(len(some))
    for fanout in (1, 5, 40):
        likely = probabilities(csc, weights, fanout, rounds)
        _, kept, inverse = unequal(csc, weights, fanout, rounds, 77)
        draws = hash_ids(csc.indices.astype(np.int64), np.uint64(77)) / 2.0**64
        assert kept.tolist() == np.flatnonzero(draws <= likely * (1 + 1e-9)).tolist()
        assert inverse == pytest.approx(weights[kept] / likely[kept], rel=1e-9)
    assert unequal(csc, weights, -1, rounds, 77)[1].tolist() == list(range(len(weights)))
    if not rounds:
        mean = np.bincount(np.repeat(np.arange(len(csc.indptr) - 1), np.diff(csc.indptr)), likely)
        assert mean.max() <= 40 * (1 + 1e-9)


def batches_of(csc, by_source: SourceDraws | None, steps: int = 1, fanouts=(4, 4), seeds: int = 40):
    """Batches of consecutive steps over other seeds each, from the whole structure."""
    num_nodes = len(csc.indptr) - 1
    schema = Schema(ntypes=("_N",), num_nodes=(num_nodes,), etypes=(("_N", "_E", "_N"),))
    draws = DrawSettings(
        schema=schema,
        fanouts=np.array(fanouts)[:, None],
        replace=False,
        exclude={},
        seed=3,
        by_source=by_source,
    )
    source, workspace = LocalSource(schema, [csc]), ThreadTable(num_nodes)
    order = np.random.default_rng(0).permutation(num_nodes)
    return [
        source.sample(
            draws.request({"_N": order[step * seeds : (step + 1) * seeds]}, 0, {}, step), {}, workspace
        )
        for step in range(steps)
    ]


def rows_of(by_source: SourceDraws | None, steps: int = 1) -> list[set[int]]:
    return [set(batch.nodes.tolist()) for batch in batches_of(random_csc(2000, 30), by_source, steps)]


def test_fewer_distinct_rows_than_neighbour_sampling_and_fewer_still_with_equal_layers() -> None:
    (neighbours,), (rows,) = rows_of(None), rows_of(EVERY_BATCH)
    (dependent,) = rows_of(SourceDraws(layer_dependency=True, batch_dependency=1))
    assert len(dependent) < 0.95 * len(rows) < 0.95 * 0.95 * len(neighbours)
    one_round, all_rounds = (
        len(rows_of(SourceDraws(layer_dependency=False, batch_dependency=1, rounds=rounds))[0])
        for rounds in (1, -1)
    )
    assert all_rounds < one_round < 0.97 * len(rows)


def test_batches_share_rows_as_far_as_batch_dependency_says() -> None:
    def shared(batch_dependency: int) -> list[int]:
        by_source = SourceDraws(layer_dependency=False, batch_dependency=batch_dependency)
        rows = rows_of(by_source, steps=4)
        return [len(step_rows & next_rows) for step_rows, next_rows in pairwise(rows)]

    alone, pairs, always = shared(1), shared(2), shared(0)
    assert min(pairs[0], pairs[2]) > 1.2 * max(*alone, pairs[1])
    assert min(always) > 1.2 * max(alone)


def test_keys_are_of_seed_epoch_step_layer_and_source_type() -> None:
    source_types = np.array([1, 0, 1])

    def keys(epoch: int, step: int, **changes: Any) -> list[list[int]]:
        by_source = SourceDraws(**{"layer_dependency": False, "batch_dependency": 1} | changes)
        return by_source.streams(5, epoch, step, 2, source_types).tolist()

    first = keys(0, 0)
    assert first[0][0] == first[0][2]
    assert len({key for row in first for key in row}) == 4
    other_keys = [keys(0, 1), keys(1, 0)]
    assert not {key for row in first for key in row} & {
        key for keys_of_batch in other_keys for row in keys_of_batch for key in row
    }
    same = keys(0, 0, layer_dependency=True)
    assert same == [first[0], first[0]]
    assert keys(0, 2, batch_dependency=3) == first != keys(0, 3, batch_dependency=3)
    assert keys(4, 9, batch_dependency=0) == keys(0, 0, batch_dependency=0)


BATCH = 12

Edge: TypeAlias = tuple[int, int, int]
"""(source, destination, edge)"""


def edges_by_step(
    folder: str, structure: str, options: dict[str, Any] | None = None, is_whole: bool = False
) -> list[list[list[Edge]]]:
    """By step and hop of two epochs: (source, destination, edge) of this rank's share of each batch.

    ``is_whole``: of the complete batch, on every rank.
    """
    with start_session(timeout_s=60) as session:
        g, edges = DistGraph(folder, structure=structure), []
        rank, world = (0, 1) if is_whole else (session.topology.rank, session.topology.world_size)
        seeds = np.arange(NUM_NODES).reshape(-1, world, BATCH // world)[:, rank].ravel()
        sampler = LaborSampler([2, 3], batch_dependency=2, **(options or {}))
        loader = DataLoader(g, seeds, sampler, batch_size=BATCH // world, seed=5, num_threads=2)
        for _ in range(2):
            for _, _, blocks in loader:
                for block in blocks:
                    assert ("edge_weights" in block.edata) == bool(options)
                    if options:
                        check_means(block)
                edges.append([edges_in(block) for block in blocks])
        g.barrier()
        return edges


def check_means(block: dgl.DGLGraph) -> None:
    weights, destinations = block.edata["edge_weights"], block.edges()[1]
    sums = torch.zeros(block.num_dst_nodes()).index_add_(0, destinations, weights)
    torch.testing.assert_close(sums, block.in_degrees().float())


def edges_in(block: dgl.DGLGraph) -> list[Edge]:
    sources, destinations = block.edges()
    ids = (block.srcdata[dgl.NID][sources], block.dstdata[dgl.NID][destinations], block.edata[dgl.EID])
    return list(zip(*(array.tolist() for array in ids), strict=True))


def test_one_two_and_three_ranks_draw_the_same_from_both_structures(tmp_path: Path) -> None:
    folder = str(write_rings(tmp_path / "parts", 6))
    first = edges_by_step(folder, "replicated")
    for world, structure in ((2, "replicated"), (3, "partitioned")):
        ranks = run_ranks(edges_by_step, world, args=(folder, structure), ranks_per_server=1)
        union = [
            [
                sorted({edge for rank_edges in layer for edge in rank_edges})
                for layer in zip(*step, strict=True)
            ]
            for step in zip(*ranks, strict=True)
        ]
        assert union == [[sorted(layer) for layer in step] for step in first]
    # Steps 0 and 1 draw alike, but not step 2, and not step 0 of the next epoch.
    assert equal_where_both_reach(first[0], first[1])
    assert not equal_where_both_reach(first[1], first[2])
    assert not equal_where_both_reach(first[0], first[len(first) // 2])


@pytest.mark.parametrize("options", [{"prob": "source"}, {"importance_sampling": 1}])
def test_unequal_draws_are_the_same_on_any_rank(tmp_path: Path, options: dict[str, Any]) -> None:
    """Importance sampling depends on the whole batch of a rank, weights of edges do not."""
    folder = str(write_rings(tmp_path / "parts", 6))
    is_whole = "prob" not in options
    first = edges_by_step(folder, "replicated", options)
    ranks = run_ranks(edges_by_step, 3, args=(folder, "replicated", options, is_whole), ranks_per_server=1)
    for number, step in enumerate(zip(*ranks, strict=True)):
        for layer, of_ranks in enumerate(zip(*step, strict=True)):
            expected = set(first[number][layer])
            assert set().union(*of_ranks) == expected
            assert not is_whole or all(set(edges) == expected for edges in of_ranks)


def test_unequal_draws_of_a_part_of_the_structure_are_refused(tmp_path: Path) -> None:
    folder = str(write_rings(tmp_path / "parts", 2))
    with pytest.raises(RankError, match=r"ConfigError: .*structure='replicated'"):
        run_ranks(edges_by_step, 2, args=(folder, "partitioned", {"prob": "source"}), ranks_per_server=1)


def equal_where_both_reach(first: list[list[Edge]], second: list[list[Edge]]) -> bool:
    """Whether layer 1 has the same in-edges of the nodes that it has in both steps."""
    both = {edge[1] for edge in first[0]} & {edge[1] for edge in second[0]}
    assert both
    return {edge for edge in first[0] if edge[1] in both} == {edge for edge in second[0] if edge[1] in both}


def test_each_step_of_an_edge_loader_draws_again(graph: DistGraph) -> None:
    """All 16 in-edges of node 33, one a step: node 33 is drawn for in each."""
    edges = np.flatnonzero(graph.find_edges(np.arange(graph.num_edges()))[1].numpy() == 33)
    for batch_dependency, least, most in ((1, 9, 16), (0, 1, 1)):
        sampler = LaborSampler([8], batch_dependency=batch_dependency)
        loader = DistEdgeDataLoader(graph, edges, sampler, batch_size=1)
        drawn = [frozenset(edge for edge in edges_in(blocks[0]) if edge[1] == 33) for *_, blocks in loader]
        assert len(drawn) == 16
        assert least <= len(set(drawn)) <= most
