"""Batches of edges under full_graph, shared_preload and cooperative."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import current_session, start_session
from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph import pair_rows
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.plan_builder import make_plans
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import edge_equality
from tests.strategies.edge_equality import EPOCHS, HALF, HIDDEN
from tests.strategies.full_graph import edge_cases
from tests.strategies.full_graph.edge_cases import EMPTY, Case, one_process
from tests.strategies.test_equality import difference

TOLERANCE = 1e-10
PAIR_LAYER = 3
"""Number of the exchange behind the two layers."""
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
SOME_CASES = [*CASES[1:6:2], *CASES[6:14], *CASES[16:]]
"""Of the models with each task one, and of the masks one."""
# (ranks, ranks per server, structure, cases)
PLACEMENTS: list[Any] = [
    (1, 1, "replicated", SOME_CASES),
    (3, 1, "partitioned", SOME_CASES),
    *wide(
        *((1, 1, "replicated", CASES), (3, 1, "partitioned", CASES)),
        *((2, 2, "replicated", CASES), (3, 2, "partitioned", CASES)),
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edge_equality.write_parts(tmp_path_factory.mktemp("bonds"))


@pytest.mark.parametrize(("ranks", "ranks_per_server", "structure", "trained"), PLACEMENTS)
def test_weights_and_bytes_match_one_process(
    folder: Path, ranks: int, ranks_per_server: int, structure: str, trained: list[Case]
) -> None:
    results = run_ranks(
        edge_cases.on_ranks, ranks, args=(str(folder), structure, trained), ranks_per_server=ranks_per_server
    )
    for case, by_rank in zip(trained, zip(*results, strict=True), strict=True):
        steps = [result["steps"] for result in by_rank]
        assert len(steps[0]) >= EPOCHS, case
        weights = one_process(case, steps)
        for result in by_rank:
            assert difference(result["weights"], weights) <= TOLERANCE, case
        check_bytes(by_rank)


def check_bytes(by_rank: Any) -> None:
    """Each row of a pair that another rank holds is requested, sent and gets its gradient once."""
    num_rows = [sum(result["foreign"]) for result in by_rank]
    assert (
        sum(result["sent"].get(("halo", PAIR_LAYER), 0) for result in by_rank) == sum(num_rows) * 8 * HIDDEN
    )
    for result, number in zip(by_rank, num_rows, strict=True):
        assert result["sent"].get(("halo_gradients", PAIR_LAYER), 0) == number * 8 * HIDDEN
        assert result["sent"].get(("plan", 0), 0) == number * 8


REGULAR = [
    Case(strategy=strategy, task=task, options=options, batch=2 * HALF, regular=True)
    for task in ("dot", "classes")
    for strategy, options in (("full_graph", {}), ("shared_preload", {}), ("shared_preload", {"hops": 1}))
]


def test_dropout_and_batch_norms_are_those_of_one_rank(folder: Path) -> None:
    """A step has all edges, so the steps of one rank and of three ranks are equal."""
    (alone,) = run_ranks(edge_cases.on_ranks, 1, args=(str(folder), "replicated", REGULAR))
    for result in run_ranks(
        edge_cases.on_ranks, 3, args=(str(folder), "replicated", REGULAR), ranks_per_server=1
    ):
        for case, single, several in zip(REGULAR, alone, result, strict=True):
            assert difference(several["weights"], single["weights"]) <= TOLERANCE, case


def request_rows(folder: str) -> str:
    """Ask rank 0 for a row that it does not compute."""
    with start_session(strategy="full_graph", timeout_s=30) as session:
        g = DistGraph(folder)
        own_nodes = np.arange(*g.get_node_partition_policy(g.ntypes[0]).owned_range)
        planner = pair_rows.PairPlanner(g, make_plans(g, own_nodes, 1, 0), "same")
        if session.topology.rank:
            planner._holders["_N"][:] = 0
        try:
            planner.plan({"_N": own_nodes[:3]})
        except (PeerError, RemoteError) as error:
            return str(error)
        return ""


def test_refuses_requests_of_rows_that_are_not_computed(folder: Path) -> None:
    first, _ = run_ranks(request_rows, 2, args=(str(folder),), ranks_per_server=1)
    assert "rank 1 requests rows of nodes that this rank does not compute" in first


WRONG = [Case(), Case(outside=True), Case(strategy="shared_preload", task="classes")]


def train_wrongly(folder: str, cases: list[Case]) -> list[list[Any]]:
    """Train with each of three mistakes: gradients counted twice, not returned, or weighed by their owner."""
    return_gradients = HaloExchange.return_gradients

    def count_twice(halo: HaloExchange, gradient: torch.Tensor) -> torch.Tensor:
        total, own = return_gradients(halo, gradient), gradient[: halo.own_rows]
        return 2 * total - own if halo.number == PAIR_LAYER else total

    def drop(halo: HaloExchange, gradient: torch.Tensor) -> torch.Tensor:
        total = return_gradients(halo, gradient)
        return gradient[: halo.own_rows].clone() if halo.number == PAIR_LAYER else total

    results = []
    for target, name, wrong in (
        (HaloExchange, "return_gradients", count_twice),
        (HaloExchange, "return_gradients", drop),
        (pair_rows, "weigh_gradients", lambda rows, weight: rows),
    ):
        with patch.object(target, name, wrong):
            results.append(edge_cases.on_ranks(folder, "replicated", cases))
            current_session().close()
    return results


def test_wrong_gradients_leave_other_weights(folder: Path) -> None:
    results = run_ranks(train_wrongly, 2, args=(str(folder), WRONG), ranks_per_server=1)
    for mistake, by_rank in enumerate(zip(*results, strict=True)):
        for case, result in zip(WRONG, zip(*by_rank, strict=True), strict=True):
            weights = one_process(case, [rank["steps"] for rank in result])
            # Gradients that are not gathered outside of the model are weighed at its output.
            is_wrong = mistake < 2 or case.outside
            assert (difference(result[0]["weights"], weights) > 1e-6) == is_wrong, (mistake, case)


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
