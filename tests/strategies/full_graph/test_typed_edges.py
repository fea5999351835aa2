"""Batches of edges of several types under full_graph, shared_preload and cooperative."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.dataloading import edge_loader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.full_graph import pair_rows
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph import typed_edge_cases as cases
from tests.strategies.full_graph.test_edges import PAIR_LAYER
from tests.strategies.full_graph.test_types import largest_difference
from tests.strategies.full_graph.typed_cases import HIDDEN
from tests.strategies.full_graph.typed_edge_cases import APPEARS, CITES, EXTENDS, Case
from tests.strategies.test_equality import TOLERANCE

PLACEMENTS = [(1, 1), (3, 1), (4, 2), *wide((2, 2), (2, 1), (3, 3))]
CASES = [
    *(Case(kind=kind, task=task) for kind in ("rgcn", "basis", "sage") for task in ("dot", "distmult")),
    Case(kind="hgt", task="distmult"),
    Case(task="classes"),
    Case(kind="sage", task="classes", outside=True),
    Case(task="distmult", outside=True),
    *(Case(strategy=strategy, kind=kind, task="distmult")
      for strategy in ("shared_preload", "cooperative") for kind in ("rgcn", "sage")),
    Case(strategy="shared_preload", options={"hops": 1}, kind="basis"),
    Case(mask="train_mask", task="distmult"),
    Case(strategy="cooperative", mask="train_mask", kind="sage"),
    Case(etypes=[APPEARS], task="distmult"),
    Case(strategy="cooperative", etypes=[CITES], kind="sage"),
    Case(options={"edge_batches_per_step": 2}, task="distmult"),
    Case(options={"aggregate": "cover", "use_pp": False}, kind="sage", task="distmult"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_parts(tmp_path_factory.mktemp("typed_edges"))


@pytest.mark.parametrize(("ranks", "ranks_per_server"), PLACEMENTS)
def test_weights_and_bytes_match_one_process(folder: Path, ranks: int, ranks_per_server: int) -> None:
    results = run_ranks(cases.on_ranks, ranks, args=(str(folder), CASES), ranks_per_server=ranks_per_server)
    for case, by_rank in zip(CASES, zip(*results, strict=True), strict=True):
        weights = cases.one_process(case, [result["steps"] for result in by_rank])
        for result in by_rank:
            assert largest_difference(result["weights"], weights) <= TOLERANCE, case
        check_bytes(case, by_rank)


def check_bytes(case: Case, by_rank: Sequence[Any]) -> None:
    """Each row of a pair that another rank holds is requested, sent and gets its gradient once."""
    row_bytes = 8 * (4 if case.kind == "sage" else HIDDEN)
    num_rows = [sum(result["foreign"].values()) for result in by_rank]
    sent = [result["sent"].get(("halo", PAIR_LAYER), 0) for result in by_rank]
    assert sum(sent) == sum(num_rows) * row_bytes, case
    for result, number in zip(by_rank, num_rows, strict=True):
        assert result["sent"].get(("halo_gradients", PAIR_LAYER), 0) == number * row_bytes, case
        assert result["sent"].get(("plan", 0), 0) == number * 8, case
    if len(by_rank) > 1 and not case.etypes:
        assert all(sum(result["foreign"][ntype] for result in by_rank) for ntype in ("paper", "venue"))


# Mistakes that leave other weights.

return_gradients = HaloExchange.return_gradients
build_pairs = edge_loader.build_pairs


def count_twice(halo: HaloExchange, gradient: torch.Tensor) -> torch.Tensor:
    total, own = return_gradients(halo, gradient), gradient[: halo.own_rows]
    return 2 * total - own if halo.number == PAIR_LAYER else total


def swap_negatives(ntypes: Any, ids: Any, positive: Any, negative: Any) -> Any:
    """Score the negatives of one relation as pairs of another one between the same types."""
    swapped = {**negative, CITES: negative[EXTENDS], EXTENDS: negative[CITES]}
    return build_pairs(ntypes, ids, positive, swapped)


LINKS, OUTSIDE = [Case(task="distmult"), Case(kind="sage", task="distmult")], [Case(outside=True)]
MISTAKES: dict[str, tuple[Callable[[], Any], list[Case]]] = {
    "gradients twice": (
        lambda: patch.object(HaloExchange, "return_gradients", count_twice),
        [*LINKS, *OUTSIDE],
    ),
    "relations of negatives": (lambda: patch.object(edge_loader, "build_pairs", swap_negatives), LINKS),
    # If the model gathers the rows, gradients are weighed at its output.
    "weights of ranks": (lambda: patch.object(pair_rows, "weigh_gradients", lambda rows, _: rows), OUTSIDE),
}
"""Mistakes, and the cases that show them."""


def train_wrongly(folder: str) -> list[list[Any]]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        return [
            [cases.train(g, case, mistake()) for case in shown_by] for mistake, shown_by in MISTAKES.values()
        ]


def test_mistakes_leave_other_weights(folder: Path) -> None:
    results = run_ranks(train_wrongly, 2, args=(str(folder),), ranks_per_server=1)
    for (name, (_, shown_by)), by_rank in zip(MISTAKES.items(), zip(*results, strict=True), strict=True):
        for case, trained in zip(shown_by, zip(*by_rank, strict=True), strict=True):
            weights = cases.one_process(case, [result["steps"] for result in trained])
            assert largest_difference(trained[0]["weights"], weights) > 1e-6, (name, case)
