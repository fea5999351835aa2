"""Halo plans against sets over the whole edge list, made by one process and by real ranks."""

import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, Assignment, RawGraph
from dglx_dist.strategies.full_graph import plan_builder
from dglx_dist.strategies.full_graph.expansion import EasOptions, make_selection
from dglx_dist.strategies.full_graph.plan_builder import (
    PartitionContext,
    PlanExchange,
    Planner,
    PlanRequest,
    PlanStep,
    make_all_plans,
    make_plans,
    split_by_server,
)
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph.plan_cases import (
    NUM_NODES,
    check_plans,
    plain_context,
    structure_of,
    whole_of,
    write_chains,
)
from tests.strategies.full_graph.test_halo_plan import same

SPREAD, FEW = np.arange(3, NUM_NODES, 11), np.array([3, 100])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chains(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize(("servers", "per_server"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 1), (4, 2)])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_plans_are_those_of_the_definition(servers: int, per_server: int, num_layers: int) -> None:
    context = plain_context(servers, per_server)
    whole_graph, owners = whole_of(context), RowOwners(context.bounds, context.topology)
    for seeds in (SPREAD, FEW):
        for hops in range(num_layers + 1):
            plans = make_all_plans(context, split_by_server(context, seeds), num_layers, hops)
            check_plans(plans, whole_graph, whole_graph.find_levels(set(seeds.tolist()), num_layers, hops))
            for rank, plan in enumerate(plans):
                assert hops or not plan.external_nodes
                assert hops or (owners.find_rank(plan.nodes) == rank).all()


def test_layers_that_are_alike_are_one_object() -> None:
    context = plain_context(2, 2)
    plans = make_all_plans(context, split_by_server(context, np.arange(NUM_NODES)), 9, 4)
    layers = plans[0].layers
    assert layers[8] is layers[5] is layers[4]
    assert layers[3].own_rows > layers[3].targets


def half_of_the_graph(_structure: Any, own: tuple[int, int], _seeds: Array) -> Array:
    return np.union1d(np.arange(*own), np.arange(0, NUM_NODES, 2))


def test_edges_from_nodes_that_were_not_chosen_are_left_out() -> None:
    context = plain_context(2, 2)
    whole_graph, rows = whole_of(context), []
    plans = make_all_plans(context, split_by_server(context, SPREAD), 2, 2, eas=half_of_the_graph)
    allowed = [whole_graph.own_nodes(server) | set(range(0, NUM_NODES, 2)) for server in range(2)]
    for server in range(2):
        levels = [set(SPREAD.tolist()) & whole_graph.own_nodes(server)]
        for _ in range(2):
            levels.insert(0, levels[0] | whole_graph.in_neighbours(levels[0]) & allowed[server])
        rows.append(levels)
    check_plans(plans, whole_graph, rows, allowed)
    assert any(plan.external_nodes for plan in plans)


REQUESTS: dict[str, dict[str, Any]] = {
    **{f"{hops} hops": {"hops": hops} for hops in range(4)},
    # Nothing is computed by the last server.
    "one seed": {"hops": 3, "seeds": [3]},
    "half": {"hops": 3, "eas": half_of_the_graph},
    **{
        policy: {"hops": 3, "eas": make_selection(EasOptions(hops=2, fanout=1, policy=policy), seed=3)}  # type: ignore[arg-type]
        for policy in ("uniform_external", "degree")
    },
}


def plan_on_rank(folder: str, structure: Any) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure=structure)
    rank, world_size, submit = session.topology.rank, session.topology.world_size, g.structure().submit
    requested: list[int] = []

    def count_nodes(op: str, nodes: Array, *args: Any, **options: Any) -> Any:
        requested.append(len(nodes))
        return submit(op, nodes, *args, **options)

    g.structure().submit = count_nodes  # type: ignore[method-assign]
    planner, results = Planner(g), {}
    for name, options in REQUESTS.items():
        before, _ = session.ledger.snapshot(), requested.clear()
        # Seeds are dealt out, wherever they lie; the last rank repeats one.
        seeds = [*SPREAD[rank::world_size], *([3] if rank == world_size - 1 else [])]
        plan = planner.plan(PlanRequest(**{"seeds": seeds, "num_layers": 3, **options}))
        moved: dict[str, int] = {}
        for row in session.ledger.since(before):
            moved[row.phase] = moved.get(row.phase, 0) + row.num_bytes
        results[name] = plan, sum(requested), moved
    barrier(session, "all planned")
    source, destination = g.find_edges(np.arange(g.num_edges()))
    bounds = g.get_node_partition_policy("_N").bounds
    return {"found": results, "edges": (source.numpy(), destination.numpy()), "bounds": bounds}


@pytest.mark.parametrize(
    ("ranks", "per_server", "structure"), [(4, 2, "partitioned"), (2, 1, "partitioned"), (2, 1, "replicated")]
)
def test_ranks_make_plans_of_one_process(folder: Path, ranks: int, per_server: int, structure: str) -> None:
    results = run_ranks(plan_on_rank, ranks, args=(str(folder), structure), ranks_per_server=per_server)
    context = PartitionContext(
        structure=structure_of(NUM_NODES, *results[0]["edges"]),
        bounds=results[0]["bounds"],
        topology=build_topology(ranks // per_server, per_server),
        seed=0,
    )
    whole_graph, topology = whole_of(context), context.topology
    for name, options in REQUESTS.items():
        plans = [result["found"][name][0] for result in results]
        same_options = {key: value for key, value in options.items() if key != "seeds"}
        seeds = split_by_server(context, np.array(options.get("seeds", SPREAD)))
        expected = make_all_plans(context, seeds, 3, **same_options)
        assert all(same(plan, member) for plan, member in zip(plans, expected, strict=True)), name
        if "eas" in options:
            continue
        for rank, result in enumerate(results):
            # Leaders ask for the in-edges of each row of level 1 once, the others for nothing.
            server = topology.server_of_rank[rank]
            members = topology.ranks_of_server(server)
            computed = {node for member in members for node in plans[member].rows(1).tolist()}
            outside = computed - whole_graph.own_nodes(server)
            _, requested, moved = result["found"][name]
            is_leader = rank == members[0]
            assert requested == (len(computed) if is_leader else 0)
            partitioned = is_leader and structure == "partitioned"
            expected_bytes = 8 * len(outside) + 24 * len(whole_graph.in_edges(outside)) if partitioned else 0
            assert moved.pop("preload_structure", 0) == expected_bytes
            assert moved.keys() <= {"plan"}


def refuse(folder: str) -> list[str]:
    session = start_session(timeout_s=60)
    planner, rank = Planner(DistGraph(folder, structure="partitioned")), session.topology.rank
    messages = []
    for request in (
        PlanRequest(seeds=[], num_layers=2, hops=2),
        PlanRequest(seeds=[NUM_NODES if rank else 0], num_layers=2, hops=2),
        PlanRequest(seeds=[0], num_layers=2, hops=2, eas=bad_selection),
    ):
        try:
            planner.plan(request)
            messages.append("nothing")
        except (DglxError, IndexError, ZeroDivisionError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert len(planner.plan(PlanRequest(seeds=[1], num_layers=2, hops=1)).layers) == 2
    return messages


def bad_selection(_structure: Any, own: tuple[int, int], _seeds: Array) -> Array:
    return np.arange(*own) if own[0] == 0 else np.arange(1 // own[0] // 0)


def test_what_makes_no_sense_is_refused_on_every_rank(folder: Path) -> None:
    first, second = run_ranks(refuse, 2, args=(str(folder),), ranks_per_server=1)
    for messages in (first, second):
        assert messages[0] == "ConfigError: no rank was given a node to compute; give the loader at least one"
    assert second[1].startswith("IndexError")
    assert first[1].startswith("FailedOnAnotherRankError: rank 1")
    assert "IndexError" in first[1]
    assert second[2].startswith("ZeroDivisionError")
    assert "ZeroDivisionError" in first[2]


def refuse_graphs(folder: str) -> str:
    start_session(timeout_s=60)
    with pytest.raises(ConfigError) as caught:
        make_plans(DistGraph(folder), [0], 2, 1)
    return str(caught.value)


def test_a_server_without_nodes_and_too_many_ranks_are_refused(tmp_path: Path) -> None:
    raw = RawGraph(name="two", num_nodes={NODE_TYPE: 2}, edges={EDGE_TYPE: (np.array([0]), np.array([1]))})
    assignment = Assignment(num_parts=3, part_of={NODE_TYPE: np.zeros(2, np.int32)}, method="test", seed=0)
    write_dataset(raw, assignment, tmp_path / "parts")
    for ranks, per_server, words in (
        (2, 1, "server 1 of 2 owns none of the 2 nodes of two; .* --parts 2"),
        (3, 1, "of 3 owns none of the 2 nodes of two; start fewer servers"),
        (3, 3, "2 nodes for 3 ranks"),
    ):
        messages = run_ranks(
            refuse_graphs, ranks, args=(str(tmp_path / "parts"),), ranks_per_server=per_server
        )
        assert all(re.search(words, text) for text in messages)


def talk() -> str:
    session = start_session(timeout_s=2)
    rank, exchange = session.topology.rank, PlanExchange(session, "test")
    barrier(session, "start")
    with exchange.job():
        if rank == 1:
            # Longer than the time-out, but inside the job.
            time.sleep(5)
        outgoing = {0: [np.array([rank])], 1: [np.array([rank + 10])]}
        got = exchange.exchange(PlanStep(name="numbers", among=(0, 1), outgoing=outgoing))
        assert [int(got[peer][0][0]) for peer in (0, 1)] == [rank * 10, rank * 10 + 1]
        # To itself a rank sends the array, not a copy.
        assert got[rank][0] is outgoing[rank][0]
        assert exchange.exchange(PlanStep(name="nothing", among=(0, 1), outgoing={})) == {0: [], 1: []}
    message = ""
    if rank == 0:
        with pytest.raises(PeerError) as caught, exchange.job():
            exchange.exchange(PlanStep(name="alone", among=(0, 1), outgoing={}))
        message = str(caught.value)
    else:
        while not exchange._mailbox._arrived:
            time.sleep(0.1)
        time.sleep(4)
    assert session.ledger.total(phase="plan") == 8
    return message


@pytest.mark.wide
def test_slow_ranks_are_waited_for_and_missing_ones_are_named() -> None:
    message, _ = run_ranks(talk, 2, ranks_per_server=1)
    assert "rank 1 on " in message
    assert "did not send 'alone' of plan 2 within 2 s" in message


def fail_beside_a_rank_that_hangs() -> None:
    session = start_session(timeout_s=60)
    exchange, done = PlanExchange(session, "test"), threading.Event()
    if session.topology.rank == 0:
        session.rpc.unregister("test.failed")
        session.rpc.register("test.failed", lambda *_: [np.array(done.wait())])
    barrier(session, "start")
    if session.topology.rank == 1:
        started = time.monotonic()
        with (
            mock.patch.object(plan_builder, "_NOTIFY_FAILURE_TIMEOUT_S", 0.5),
            pytest.raises(ValueError, match="a bug"),
            exchange.job(),
        ):
            raise ValueError("a bug")
        assert time.monotonic() - started < 30
    barrier(session, "failed")
    done.set()


def test_a_rank_that_fails_does_not_wait_for_one_that_hangs() -> None:
    run_ranks(fail_beside_a_rank_that_hangs, 2)
