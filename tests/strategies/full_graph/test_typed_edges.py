"""Batches of edges of several types under full_graph, shared_preload and cooperative."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading import NeighborSampler

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.dataloading import edge_loader
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import Assignment, RawGraph
from dglx_dist.strategies.base import STRATEGIES
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

CASES = [
    Case(kind="rgcn", task="dot"),
    Case(strategy="shared_preload", kind="sage", task="distmult"),
    Case(strategy="cooperative", kind="rgcn", task="distmult"),
    Case(kind="sage", task="classes", outside=True),
    Case(kind="hgt", task="distmult"),
    Case(strategy="shared_preload", options={"hops": 1}, kind="basis"),
    Case(strategy="cooperative", mask="train_mask", kind="sage"),
    Case(etypes=[APPEARS], task="distmult"),
    Case(options={"edge_batches_per_step": 2}, task="distmult"),
    Case(options={"aggregate": "cover", "use_pp": False}, kind="sage", task="distmult"),
]
MORE_CASES = [
    *(Case(kind=kind, task=task) for kind in ("rgcn", "basis", "sage") for task in ("dot", "distmult")),
    Case(task="classes"),
    Case(task="distmult", outside=True),
    Case(strategy="shared_preload", kind="rgcn", task="distmult"),
    Case(strategy="cooperative", kind="sage", task="distmult"),
    Case(mask="train_mask", task="distmult"),
    Case(strategy="cooperative", etypes=[CITES], kind="sage"),
]
# (ranks, ranks per server, cases): with --all, all cases on all of them.
PLACEMENTS = [
    (1, 1, CASES[:4]),
    (2, 1, CASES[:4]),
    (4, 2, CASES),
    *wide(*((*ranks, CASES + MORE_CASES) for ranks in ((1, 1), (3, 1), (4, 2), (2, 2), (2, 1), (3, 3)))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_parts(tmp_path_factory.mktemp("typed_edges"))


@pytest.mark.parametrize(("ranks", "ranks_per_server", "trained"), PLACEMENTS)
def test_weights_and_bytes_match_one_process(
    folder: Path, ranks: int, ranks_per_server: int, trained: list[Case]
) -> None:
    results = run_ranks(cases.on_ranks, ranks, args=(str(folder), trained), ranks_per_server=ranks_per_server)
    for case, by_rank in zip(trained, zip(*results, strict=True), strict=True):
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


def gather_ids(folder: str, relations: str) -> list[bool]:
    """Gather the ids of nodes as their rows. With one node type, rows may be a tensor."""
    with start_session(timeout_s=60) as session:
        equal = []
        for name, etypes in ((folder, list(cases.ETYPES)), (relations, [("_N", "b", "_N")])):
            g = DistGraph(name)
            strategy: Any = STRATEGIES.get("shared_preload")(session, {}).open(g)
            seeds = {etype: torch.arange(*g.get_edge_partition_policy(etype).owned_range) for etype in etypes}
            for _, pairs, blocks in strategy.edge_loader(seeds, NeighborSampler([-1]), batch_size=50):
                ids = {ntype: blocks[-1].dstnodes[ntype].data[dgl.NID].double() for ntype in g.ntypes}
                rows = edge_loader.gather_pair_rows(pairs, ids)
                if len(ids) == 1:
                    equal.append(torch.equal(edge_loader.gather_pair_rows(pairs, ids["_N"]), rows["_N"]))
                equal += [torch.equal(rows[ntype].long(), pairs.nodes[ntype].data[dgl.NID]) for ntype in rows]
        return equal


def test_each_node_gets_its_row(folder: Path, tmp_path: Path) -> None:
    ends = np.arange(30)
    edges = {("_N", name, "_N"): (ends, (ends * 7 + shift) % 30) for shift, name in enumerate("ab")}
    raw = RawGraph(name="relations", num_nodes={"_N": 30}, edges=edges)
    part_of = {"_N": (ends % 3).astype(np.int32)}
    write_dataset(raw, Assignment(num_parts=3, part_of=part_of, method="test", seed=0), tmp_path / "parts")
    for equal in run_ranks(gather_ids, 3, args=(str(folder), str(tmp_path / "parts")), ranks_per_server=1):
        assert len(equal) > 10
        assert all(equal)


# Mistakes that leave other weights.

return_gradients = HaloExchange.return_gradients
build_pairs = edge_loader.build_pairs


def count_twice(halo: HaloExchange, gradient: torch.Tensor) -> torch.Tensor:
    total, own = return_gradients(halo, gradient), gradient[: halo.own_rows]
    return 2 * total - own if halo.number == PAIR_LAYER else total


def swap_negatives(ntypes: Any, ids: Any, positive: Any, negative: Any, times: Any) -> Any:
    """Score the negatives of one relation as pairs of another one between the same types."""
    swapped = {**negative, CITES: negative[EXTENDS], EXTENDS: negative[CITES]}
    return build_pairs(ntypes, ids, positive, swapped, times)


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
