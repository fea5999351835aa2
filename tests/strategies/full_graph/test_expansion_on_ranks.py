"""External nodes that servers keep, on real ranks against sets over the edge list; also when drawn anew."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.nn.functional as F

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph.expansion import EasOptions, EasSelector, read_eas_options
from dglx_dist.strategies.full_graph.plan_builder import PlanRequest, WholeGraphPlans, make_plans
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.full_graph.plan_cases import NUM_NODES, write_chains

POLICIES = ("uniform_external", "degree", "shadow")
HOPS, FANOUTS = (0, 1, 2, 3), (1, 2, 3, -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chains(tmp_path_factory.mktemp("eas"))


def select_everything(folder: str, structure: Any) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure=structure)
    selector = EasSelector(g)
    barrier(session, "selectors")
    server = session.topology.server
    bounds = g.get_node_partition_policy("_N").bounds
    inner = np.arange(bounds[server], bounds[server + 1])
    found = {}
    for policy, hops, fanout in product(POLICIES, HOPS, FANOUTS):
        options = EasOptions(hops=hops, fanout=fanout, policy=policy)  # type: ignore[arg-type]
        nodes = selector.select(inner, options, seed=3).tolist()
        # Each round extends the selection of one hop less.
        before, *rounds = found[policy, hops - 1, fanout] if hops else [nodes]
        added = sorted(set(nodes) - set(before))
        found[policy, hops, fanout] = [nodes, *rounds, *([added] if added else [])]
    again = selector.select(inner, EasOptions(fanout=1), seed=3, draw=1).tolist()
    rule = selector.rule(EasOptions(inner="batch"), seed=3)
    of_batch = rule(g.structure(), (0, 0), inner[:4]).tolist()
    barrier(session, "everybody has chosen")
    source, destination = g.find_edges(np.arange(g.num_edges()))
    scores = selector._external_degrees.of(np.arange(NUM_NODES)).tolist()
    g.close()
    return {
        "found": found,
        "again": again,
        "of_batch": of_batch,
        "inner": inner.tolist(),
        "edges": (source.numpy(), destination.numpy()),
        "scores": scores,
        "server": server,
    }


@pytest.fixture(
    scope="module", params=[(4, 2, "replicated"), *wide(((2, 1, "partitioned"),), ((3, 1, "partitioned"),))]
)
def results(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    ranks, per_server, structure = request.param
    return run_ranks(select_everything, ranks, args=(str(folder), structure), ranks_per_server=per_server)


def in_neighbours(result: dict[str, Any], nodes: set[int]) -> set[int]:
    source, destination = result["edges"]
    return set(source[np.isin(destination, list(nodes))].tolist())


def test_ranks_of_a_server_choose_alike(results: list[dict[str, Any]]) -> None:
    for one, other in product(results, results):
        if one["server"] == other["server"]:
            assert one["found"] == other["found"]


@pytest.mark.wide
def test_servers_of_any_number_of_ranks_choose_alike(folder: Path) -> None:
    two = run_ranks(select_everything, 2, args=(str(folder), "partitioned"), ranks_per_server=1)
    three = run_ranks(select_everything, 3, args=(str(folder), "partitioned"), ranks_per_server=2)
    assert two[0]["found"] == three[0]["found"] == three[1]["found"]
    assert two[1]["found"] == three[2]["found"]


def test_rounds_by_the_definition(results: list[dict[str, Any]]) -> None:
    for result, (policy, hops, fanout) in product(results, product(POLICIES, HOPS, FANOUTS)):
        nodes, *rounds = result["found"][policy, hops, fanout]
        selected = frontier = set(result["inner"])
        assert len(rounds) <= hops
        for found in map(set, rounds):
            read = in_neighbours(result, frontier)
            assert found <= read - selected
            if fanout == -1:
                assert found == read - selected
            else:
                assert len(found) <= fanout * len(frontier)
            for node in frontier if fanout > 0 and policy != "shadow" else ():
                candidates = in_neighbours(result, {node}) - selected
                # Others may have chosen more of them; of its own choice none is missing.
                assert len(candidates & found) >= min(fanout, len(candidates))
            selected = selected | found
            frontier = selected if policy == "shadow" else found
        assert nodes == sorted(selected)
        assert nodes == sorted(set(nodes))


def test_no_hops_no_external_nodes(results: list[dict[str, Any]]) -> None:
    for result, policy, fanout in product(results, POLICIES, FANOUTS):
        assert result["found"][policy, 0, fanout] == [result["inner"]]


@pytest.mark.parametrize("policy", POLICIES)
def test_selections_contain_each_other(results: list[dict[str, Any]], policy: str) -> None:
    for result, hops, fanout in product(results, HOPS, FANOUTS):
        found = set(result["found"][policy, hops, fanout][0])
        if hops + 1 in HOPS:
            assert found <= set(result["found"][policy, hops + 1, fanout][0])
        if fanout > 0 and hops <= 2:
            wider = fanout + 1 if fanout + 1 in FANOUTS else -1
            assert found <= set(result["found"][policy, hops, wider][0])


def test_degree_prefers_nodes_that_read_much_from_outside(results: list[dict[str, Any]]) -> None:
    for result in results:
        inner, scores = set(result["inner"]), result["scores"]
        found = set(result["found"]["degree", 1, 1][1]) if len(result["found"]["degree", 1, 1]) > 1 else set()
        for node in range(NUM_NODES):
            outside = [u for u in result["edges"][0][result["edges"][1] == node].tolist() if u not in inner]
            assert scores[node] == len(outside)
        for node in inner:
            candidates = in_neighbours(result, {node}) - inner
            if candidates:
                best = max(scores[one] for one in candidates)
                assert any(scores[one] == best for one in candidates & found)


def test_another_draw_is_another_choice(results: list[dict[str, Any]]) -> None:
    assert any(result["again"] != result["found"]["uniform_external", 1, 1][0] for result in results)


def test_a_batch_may_be_what_the_expansion_starts_from(results: list[dict[str, Any]]) -> None:
    for result in results:
        seeds = set(result["inner"][:4])
        assert set(result["of_batch"]) == seeds | in_neighbours(result, seeds)


def plans_of(folder: str) -> list[dict[str, Any]]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    selector = EasSelector(g)
    barrier(session, "selectors")
    seeds = np.flatnonzero(g.ndata["train_mask"][:].numpy())
    found = []
    server = session.topology.server
    inner = np.arange(*g.get_node_partition_policy("_N").bounds[server : server + 2])
    ends = g.find_edges(np.arange(g.num_edges()))
    for options in (None, EasOptions(hops=3, fanout=-1), EasOptions(hops=0), EasOptions(fanout=1)):
        rule = None if options is None else selector.rule(options, seed=3)
        plan = make_plans(g, seeds, 3, 3, eas=rule)
        found.append(
            {
                "nodes": plan.nodes.copy(),
                "edges": [layer.edge_ids.copy() for layer in plan.layers],
                "rows": [plan.rows(level).copy() for level in range(4)],
                "external": plan.external_nodes,
                "selected": inner if options is None else selector.select(inner, options, seed=3),
                "ends": [end.numpy() for end in ends],
            }
        )
    barrier(session, "everybody has chosen")
    g.close()
    return found


@pytest.fixture(scope="module")
def plans(folder: Path) -> list[Any]:
    return run_ranks(plans_of, 3, args=(str(folder),), ranks_per_server=1)


def test_every_edge_between_chosen_nodes_is_kept_and_no_other(plans: list[Any]) -> None:
    """Of inner nodes and external ones alike, in-edges of every row that is computed."""
    for _, *sampled in plans:
        for plan in sampled:
            source, destination = plan["ends"]
            inside = np.isin(source, plan["selected"]) & np.isin(destination, plan["selected"])
            for level, edges in enumerate(plan["edges"], start=1):
                wanted = np.flatnonzero(inside & np.isin(destination, plan["rows"][level]))
                assert np.array_equal(np.sort(edges), wanted)
                assert set(source[wanted]) <= set(plan["rows"][level - 1].tolist())
    assert any(0 < few["external"] < everything["external"] for _, everything, _, few in plans)


def test_all_hops_and_all_neighbours_are_the_whole_closure(plans: list[Any]) -> None:
    for whole, everything, nothing, _ in plans:
        assert np.array_equal(whole["nodes"], everything["nodes"])
        for one, other in zip(whole["edges"], everything["edges"], strict=True):
            assert np.array_equal(one, other)
        assert whole["external"] > nothing["external"] == 0


def test_draws_of_epochs() -> None:
    assert [EasOptions().draw(epoch) for epoch in (0, 1, 9)] == [0, 0, 0]
    assert [EasOptions(resample_every=3).draw(epoch) for epoch in (0, 2, 3, 8)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": -1}, "external_hops=-1"),
        ({"fanout": 0}, "external_fanout=0"),
        ({"fanout": -2}, "external_fanout=-2"),
        ({"policy": "best"}, "external_policy='best'"),
        ({"inner": "graph"}, "external_inner='graph'"),
        ({"resample_every": -1}, "resample_every=-1"),
    ],
)
def test_what_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EasOptions(**options)


def test_what_the_user_may_leave_out() -> None:
    assert read_eas_options(external_hops=None, external_fanout=None) is None
    assert read_eas_options(external_hops=None, external_fanout=5) == EasOptions(hops=1, fanout=5)
    assert read_eas_options(external_hops=0, external_fanout=None) == EasOptions(hops=0)
    only_policy = read_eas_options(external_hops=None, external_fanout=None, external_policy="degree")
    assert only_policy == EasOptions(hops=1, fanout=15, policy="degree")
    with pytest.raises(ConfigError, match="external_hops=2 without external_fanout"):
        read_eas_options(external_hops=2, external_fanout=None)
    with pytest.raises(ConfigError, match="external_hops=1 without external_fanout"):
        read_eas_options(external_hops=1, external_fanout=None, external_policy="degree")
    with pytest.raises(ConfigError, match="resample_every=2"):
        read_eas_options(external_hops=None, external_fanout=None, resample_every=2)


EPOCHS = 5
OPTIONS = {"external_hops": 1, "external_fanout": 1, "resample_every": 2}


@pytest.fixture(scope="module")
def resampled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By the number of ranks, on two servers."""
    folder = str(equality.write_parts(tmp_path_factory.mktemp("resampled")))
    return {
        ranks: run_ranks(epochs_of, ranks, args=(folder,), ranks_per_server=ranks // 2) for ranks in (2, 4)
    }


def an_epoch(loader: Any, model: Any) -> dict[str, Any]:
    ((_, output_nodes, blocks),) = loader
    model.zero_grad()
    scores = model(blocks, blocks[0].srcdata["feat"])
    F.cross_entropy(scores, blocks[-1].dstdata["label"]).backward()
    share = blocks[-1].step_share
    return {
        "nodes": loader.plan.nodes.tolist(),
        "external": loader.plan.external_nodes,
        "seeds": output_nodes.tolist(),
        "share": (share.num_local, share.num_global),
        "gradients": [parameter.grad.numpy().copy() for parameter in model.parameters()],
    }


def epochs_of(folder: str) -> list[dict[str, Any]]:
    """Five epochs, and then the first and the last once more."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    strategy: Any = STRATEGIES.get("shared_preload")(session, OPTIONS)
    loader = strategy.loader(g, runs.my_share(g), runs.sampler())
    model = strategy.wrap(runs.first_model("sage"), g)
    found = [an_epoch(loader, model) for _ in range(EPOCHS)]
    for epoch in (0, EPOCHS - 1):
        loader.set_epoch(epoch)
        found.append(an_epoch(loader, model))
    g.close()
    return found


def nodes_of(resampled: list[Any], epoch: int) -> list[int]:
    """What the ranks hold together, replicas as often as servers have them."""
    return sorted(node for rank in resampled for node in rank[epoch]["nodes"])


def difference(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_choice_changes_every_two_epochs_and_comes_again(
    resampled: dict[int, list[Any]], ranks: int
) -> None:
    first, second, third, fourth, fifth, first_again, fifth_again = (
        nodes_of(resampled[ranks], epoch) for epoch in range(EPOCHS + 2)
    )
    assert first == second == first_again
    assert third == fourth
    assert fifth == fifth_again
    assert len({tuple(nodes) for nodes in (first, third, fifth)}) == 3
    for rank in resampled[ranks]:
        assert difference(rank[0]["gradients"], rank[5]["gradients"]) == 0
        assert difference(rank[0]["gradients"], rank[2]["gradients"]) > 1e-6
        assert rank[0]["external"] > 0


def test_seeds_are_trained_once_whatever_is_chosen(resampled: dict[int, list[Any]]) -> None:
    for of_ranks in resampled.values():
        for epoch in range(EPOCHS):
            seeds = [node for rank in of_ranks for node in rank[epoch]["seeds"]]
            assert len(seeds) == len(set(seeds)) == of_ranks[0][epoch]["share"][1]
            assert all(rank[epoch]["share"] == (len(rank[epoch]["seeds"]), len(seeds)) for rank in of_ranks)


def test_any_number_of_ranks_per_server_chooses_and_trains_alike(resampled: dict[int, list[Any]]) -> None:
    for epoch in range(EPOCHS):
        assert nodes_of(resampled[2], epoch) == nodes_of(resampled[4], epoch)
        for rank in resampled[4]:
            assert difference(rank[epoch]["gradients"], resampled[2][0][epoch]["gradients"]) <= 1e-10


def test_a_choice_that_failed_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    with start_session():
        request = PlanRequest(seeds=[1, 2], num_layers=2, hops=2)
        g = DistGraph(str(equality.write_parts(tmp_path)))
        plans = WholeGraphPlans(g, request, EasOptions(resample_every=2), seed=0)
        before = plans.plan(1, 0)
        with (
            mock.patch.object(plans._planner, "plan", side_effect=PeerError("gone")),
            pytest.raises(PeerError, match="gone"),
        ):
            plans.plan(2, 0)
        assert plans.plan(2, 0) is not before
