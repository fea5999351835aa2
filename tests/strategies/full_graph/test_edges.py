"""Batches of edges under full_graph, shared_preload and cooperative."""

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import edge_equality
from tests.strategies.edge_equality import EPOCHS, HALF, HIDDEN
from tests.strategies.full_graph import edge_cases
from tests.strategies.full_graph.edge_cases import EMPTY, Case, one_process
from tests.strategies.test_equality import difference

TOLERANCE = 1e-10
# (ranks, ranks per server, structure)
PLACEMENTS = [(1, 1, "replicated"), (3, 1, "partitioned"), *wide((2, 2, "replicated"), (3, 3, "partitioned"))]
CASES = [
    *(Case(kind=kind, task=task) for kind in ("sage", "gcn", "gat") for task in ("dot", "distmult")),
    *(Case(strategy=strategy, task=task) for strategy in ("shared_preload", "cooperative")
      for task in ("distmult", "classes")),
    Case(task="classes", shares=EMPTY),
    Case(outside=True),
    Case(strategy="shared_preload", outside=True, shares=EMPTY),
    Case(mask="train_mask"),
    Case(strategy="shared_preload", kind="gat", mask="train_mask"),
    Case(strategy="cooperative", mask="train_mask"),
    Case(strategy="shared_preload", options={"hops": 1}, kind="gcn"),
    Case(options={"edge_batches_per_step": 2}, task="distmult"),
    Case(options={"aggregate": "cover", "use_pp": False}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edge_equality.write_parts(tmp_path_factory.mktemp("bonds"))


@pytest.mark.parametrize(("ranks", "ranks_per_server", "structure"), PLACEMENTS)
def test_weights_and_bytes_match_one_process(
    folder: Path, ranks: int, ranks_per_server: int, structure: str
) -> None:
    results = run_ranks(
        edge_cases.on_ranks, ranks, args=(str(folder), structure, CASES), ranks_per_server=ranks_per_server
    )
    for case, by_rank in zip(CASES, zip(*results, strict=True), strict=True):
        steps = [result["steps"] for result in by_rank]
        assert len(steps[0]) >= EPOCHS, case
        weights = one_process(case, steps)
        for result in by_rank:
            assert difference(result["weights"], weights) <= TOLERANCE, case
        check_bytes(by_rank)
    check_wrong_gradients([result[0] for result in results])


def check_bytes(by_rank: Any) -> None:
    """Each row of a pair that another rank holds is requested, sent and gets its gradient once."""
    num_rows = [sum(result["foreign"]) for result in by_rank]
    assert sum(result["sent"].get(("halo", 3), 0) for result in by_rank) == sum(num_rows) * 8 * HIDDEN
    for result, number in zip(by_rank, num_rows, strict=True):
        assert result["sent"].get(("halo_gradients", 3), 0) == number * 8 * HIDDEN
        assert result["sent"].get(("plan", 0), 0) == number * 8


def check_wrong_gradients(by_rank: list[Any]) -> None:
    weights = one_process(CASES[0], [result["steps"] for result in by_rank], counts_rows_twice=True)
    assert difference(by_rank[0]["weights"], weights) > 1e-6


def count_masked_edges(folder: str) -> tuple[int, int, bool]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        strategy: Any = STRATEGIES.get("full_graph")(session, {}).open(g)
        sampler = NeighborSampler([-1], mask="train_mask")
        own_nodes = torch.arange(*g.get_node_partition_policy("_N").owned_range)
        ((_, _, (block,)),) = strategy.loader(own_nodes, sampler)
        marked = g.edata["train_mask"][block.edata[dgl.EID]].bool()
        return block.num_edges(), g.edata["train_mask"].count_nonzero(), bool(marked.all())


def test_node_loader_keeps_the_edges_of_a_mask(folder: Path) -> None:
    results = run_ranks(count_masked_edges, 2, args=(str(folder),), ranks_per_server=1)
    assert sum(count for count, _, _ in results) == results[0][1] == HALF * 2 // 12
    assert all(is_marked for _, _, is_marked in results)
