"""The smallest exchange of sums: covers against all subsets, the same sums, the bytes of the formula."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.arrays import ArrayCache
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.records import NODE_TYPE, Array
from dglx_dist.strategies.full_graph.halo_exchange import BACKWARD, FORWARD, ONCE
from dglx_dist.strategies.full_graph.halo_plan import (
    HaloLayer,
    PairCover,
    RankPlan,
    minimum_cover,
    read_plan,
    write_plan,
)
from dglx_dist.strategies.full_graph.plan_builder import (
    PartitionContext,
    border_rows,
    make_all_plans,
    make_plans,
)
from dglx_dist.training.models import SymmetricConv
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph import plan_cases


def smallest(edges: set[tuple[int, int]], num_sources: int, num_targets: int) -> int:
    ends = [(0, n) for n in range(num_sources)] + [(1, n) for n in range(num_targets)]
    for size in range(len(ends)):
        for chosen in combinations(ends, size):
            if all((0, source) in chosen or (1, target) in chosen for source, target in edges):
                return size
    raise AssertionError


def test_covers_are_minimal() -> None:
    random = np.random.default_rng(0)
    for _ in range(40):
        num_sources, num_targets = random.integers(1, 6, size=2).tolist()
        sources = np.concatenate([random.integers(num_sources, size=8), np.arange(num_sources)])
        targets = random.integers(num_targets, size=len(sources))
        rows, sums = minimum_cover(sources, targets, num_sources, num_targets)
        assert (rows[sources] | sums[targets]).all()
        edges = set(zip(sources.tolist(), targets.tolist(), strict=True))
        assert rows.sum() + sums.sum() == smallest(edges, num_sources, num_targets)


def test_a_star_is_one_row_either_way() -> None:
    hub, leaves = np.zeros(5, np.int64), np.arange(5)
    assert [int(side.sum()) for side in minimum_cover(hub, leaves, 1, 5)] == [1, 0]
    assert [int(side.sum()) for side in minimum_cover(leaves, hub, 5, 1)] == [0, 1]


@pytest.mark.parametrize(
    "numbers",
    [
        *(
            [1, 0, 0, 3],
            [1, 0, 0, -1],
            [0, 1, 2, 1, 0, 0],
            [0, 1, 1, 1, 3],
            [9, 0, 0, 1],
            [-1, 1, 0],
            [],
            [0, 0],
        ),
        # As int64, these counts add up to the number of sources.
        [0, 3, 1, 2**63 - 1, 2**63 - 1, 3, 0],
    ],
)
def test_numbers_of_another_rank_are_checked(numbers: list[int]) -> None:
    with pytest.raises(PeerError, match="rank 7 asks for partial sums of rows"):
        PairCover.from_message(7, np.array(numbers, np.int64), num_rows=3)


NUM_LAYERS = 3


def plans(servers: int, per_server: int, hops: int) -> list[RankPlan]:
    context = plan_cases.plain_context(servers, per_server)
    seeds = np.arange(3, plan_cases.NUM_NODES, 2)
    own = np.split(seeds, np.searchsorted(seeds, context.bounds[1:-1]))
    return make_all_plans(context, own, NUM_LAYERS, hops, cover=True)


def sum_in_edges(indptr: Array, indices: Array, rows: Array, weights: Array) -> Array:
    ends = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    total = np.zeros(len(indptr) - 1)
    np.add.at(total, ends, rows[indices] * weights)
    return total


@pytest.mark.parametrize(("servers", "per_server", "hops"), [(4, 1, 0), (2, 2, 0), (2, 2, 1), (1, 4, 0)])
def test_sums_of_all_ranks_are_those_of_the_whole_halo(servers: int, per_server: int, hops: int) -> None:
    made, value = plans(servers, per_server, hops), np.random.default_rng(1).random(plan_cases.NUM_NODES)
    fewer = 0
    for number in range(NUM_LAYERS):
        layers: list[Any] = [plan.layers[number] for plan in made]
        weights = [np.random.default_rng(2).random(10**4)[layer.edge_ids] for layer in layers]
        extended = []
        for rank, layer in enumerate(layers):
            cover, own = layer.cover, value[made[rank].rows(number)]
            assert cover is not None
            needed = [
                weights[peer][dict(layers[peer].cover.send_edges)[rank]] for peer, _ in cover.receive_edges
            ]
            partial = sum_in_edges(cover.indptr, cover.indices, own, np.concatenate([np.empty(0), *needed]))
            extended.append(np.concatenate([own, partial]))
            assert len(extended[-1]) == cover.layer.own_rows
        for rank, layer in enumerate(layers):
            cover = layer.cover
            halo = [extended[peer][dict(layers[peer].cover.layer.send)[rank]] for peer, _ in layer.receive]
            assert [(peer, len(rows)) for (peer, _), rows in zip(layer.receive, halo, strict=True)] == [
                *cover.layer.receive
            ]
            fewer += sum(count for _, count in layer.receive) - sum(map(len, halo))
            sums = sum_in_edges(
                cover.layer.indptr,
                cover.layer.indices,
                np.concatenate([extended[rank], *halo]),
                np.append(weights[rank], 1.0)[cover.layer.edge_ids],
            )
            sources = np.concatenate([value[made[rank].rows(number)], value[layer.halo_nodes]])
            expected = sum_in_edges(layer.indptr, layer.indices, sources, weights[rank])
            np.testing.assert_allclose(sums, expected, rtol=0, atol=1e-12)
            for covered, most in zip(cover.layer.receive, layer.receive, strict=True):
                assert covered[1] <= most[1]
    assert fewer > 0


def test_a_written_plan_keeps_its_covers(tmp_path: Path) -> None:
    plan, folder = (
        plans(2, 2, 1)[1],
        ArrayCache(tmp_path / "data", "content").entry("cobatches", "key").subfolder("0-1"),
    )
    assert write_plan(folder, plan)
    again = read_plan(folder)
    for first, second in zip(again.layers, plan.layers, strict=True):
        assert first.cover is not None
        assert second.cover is not None
        assert isinstance(first.cover.layer, HaloLayer)
        for name, array in vars(second.cover.layer).items():
            np.testing.assert_equal(getattr(first.cover.layer, name), array)
        for name in ("indptr", "indices", "send_edges", "receive_edges"):
            np.testing.assert_equal(getattr(first.cover, name), getattr(second.cover, name))


PHASES = (FORWARD, BACKWARD, ONCE)


def count_bytes(session: Session, work: Callable[[], Any]) -> dict[str, int]:
    before = session.ledger.snapshot()
    work()
    counts = Counter[str]()
    for row in session.ledger.since(before):
        counts[row.phase] += row.num_bytes
    return {phase: counts[phase] for phase in PHASES}


WIDTH, NARROW, SIZE = 3, 2, 8
LAYERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "symmetric": lambda lg, x: SymmetricConv(WIDTH, NARROW, lg.whole)(lg, x),
    "mean": lambda lg, x: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean")(lg, x),
    "sum": lambda lg, x: dgl.nn.GINConv(None, "sum")(lg, x),
    "narrows first": lambda lg, x: dgl.nn.SAGEConv(WIDTH, NARROW, "mean")(lg, x),
    "weights": lambda lg, x: dgl.nn.GraphConv(WIDTH, WIDTH, "none", allow_zero_in_degree=True)(
        lg, x, edge_weight=lg.edata["w"]
    ),
    "learned weights": lambda lg, x: dgl.nn.GraphConv(WIDTH, WIDTH, "none", allow_zero_in_degree=True)(
        lg, x, edge_weight=lg.edata["w"].clone().requires_grad_()
    ),
    "max": lambda lg, x: dgl.nn.GINConv(None, "max")(lg, x),
    "attention": lambda lg, x: dgl.nn.GATConv(WIDTH, NARROW, 1, allow_zero_in_degree=True)(lg, x),
}


def check_changed_weights(lg: Any, x: Tensor) -> None:
    """Another tensor, or changed in place: other ranks sum with the new ones."""

    def total() -> Tensor:
        lg.srcdata["h"] = x
        lg.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
        return lg.dstdata["o"].clone()

    first = total()
    # Of the same version as the first one.
    lg.edata["w"] = 3 * lg.edata["w"]
    torch.testing.assert_close(total(), 3 * first, rtol=1e-12, atol=1e-12)
    lg.edata["w"].mul_(2)
    torch.testing.assert_close(total(), 6 * first, rtol=1e-12, atol=1e-12)


def on_rank(folder: str) -> tuple[HaloLayer, dict[str, list[dict[str, int]]]]:
    torch.set_default_dtype(torch.float64)
    with start_session(strategy="full_graph", timeout_s=60, options={"aggregate": "cover"}) as session:
        g = DistGraph(folder)
        lg = dx.local_graph(g, columns=[], edge_columns=["weight"], targets=None)
        lg.edata["w"], lg.whole = lg.edata["weight"][:, 0].clone(), g
        results = {}
        for name, layer in LAYERS.items():
            torch.manual_seed(0)
            x = torch.randn(lg.num_nodes(), WIDTH, requires_grad=True)
            steps = [lambda x=x, layer=layer: layer(lg, x).sum().backward()] * 2
            results[name] = [count_bytes(session, step) for step in steps]
        check_changed_weights(lg, x.detach())
        owned = np.arange(*g.get_node_partition_policy(NODE_TYPE).bounds[g.rank() : g.rank() + 2])
        (planned,) = make_plans(g, owned, 1, 0, cover=True).layers
        g.barrier()
        return planned, results


def test_bytes_are_the_rows_of_the_covers(tmp_path: Path) -> None:
    """Weights are sent once; learned weights and what is no sum need the rows of the halo."""
    folder = plan_cases.write_chains(tmp_path)
    results = run_ranks(on_rank, 4, args=(str(folder),), ranks_per_server=1)
    layers = [layer for layer, _ in results]
    covers = [layer.cover for layer in layers if layer.cover is not None]
    halo = sum(count for layer in layers for _, count in layer.receive) * SIZE
    cover = sum(count for plan in covers for _, count in plan.layer.receive) * SIZE
    weights = sum(count for plan in covers for _, count in plan.receive_edges) * SIZE
    assert 0 < cover < halo
    assert weights > 0
    assert border_rows(open_dataset(folder), 4) == ({NODE_TYPE: halo // SIZE}, cover // SIZE)
    expected = {
        "symmetric": cover * NARROW,
        "mean": cover * WIDTH,
        "sum": cover * WIDTH,
        "narrows first": cover * NARROW,
        "weights": cover * WIDTH,
        "learned weights": halo * WIDTH,
        "max": halo * WIDTH,
        "attention": halo * (NARROW + 1),
    }
    for name, num_bytes in expected.items():
        for step in range(2):
            once = weights if (name, step) == ("weights", 0) else 0
            total = {
                phase: sum(rank_results[name][step][phase] for _, rank_results in results) for phase in PHASES
            }
            assert total == {FORWARD: num_bytes, BACKWARD: num_bytes, ONCE: once}, (name, step)


def test_covers_halve_the_rows_of_a_power_law_graph_cut_at_random() -> None:
    """20,000 nodes, 100,000 edges both ways, the share of a node falls as 1 / rank."""
    random, num_nodes = np.random.default_rng(0), 20_000
    share = 1.0 / np.arange(1, num_nodes + 1)
    ends = random.permutation(num_nodes)[random.choice(num_nodes, (2, 5 * num_nodes), p=share / share.sum())]
    bounds = np.arange(0, num_nodes + 1, num_nodes // 4)
    structure = plan_cases.structure_of(num_nodes, np.concatenate(ends), np.concatenate(ends[::-1]))
    context = PartitionContext(structure=structure, bounds=bounds, topology=build_topology(4, 1), seed=0)
    made = make_all_plans(context, np.split(np.arange(num_nodes), bounds[1:-1]), 1, 0, cover=True)
    layers: list[Any] = [plan.layers[0] for plan in made]
    halo = sum(count for layer in layers for _, count in layer.receive)
    cover = sum(count for layer in layers for _, count in layer.cover.layer.receive)
    assert cover <= 0.6 * halo
