"""Halo plans built by real ranks, against sets over the whole edge list; messages that go astray."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, DglxError, PeerError, UnknownNameError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph import plan_builder
from dglx_dist.strategies.full_graph.plan_builder import PlanExchange, Planner, PlanRequest, make_plans
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph.plan_cases import NUM_NODES, Whole, check_plans, write_chains

DEPTHS = (1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chains(tmp_path_factory.mktemp("plans"))


def seeds_of(name: str, rank: int, world_size: int, g: DistGraph) -> Array:
    """``spread``: training nodes dealt out, wherever they lie; ``one``: one rank has two, each twice."""
    if name == "spread":
        return np.flatnonzero(g.ndata["train_mask"][:].numpy())[rank::world_size]
    return np.array([100, 3, 100, 3]) if rank == world_size - 1 else np.empty(0, np.int64)


def facts(g: DistGraph) -> dict[str, Any]:
    source, destination = g.find_edges(np.arange(g.num_edges()))
    bounds = g.get_node_partition_policy("_N").bounds
    return {"source": source.numpy(), "destination": destination.numpy(), "bounds": bounds}


def whole_of(result: dict[str, Any], servers: int, per_server: int) -> Whole:
    server_of_rank = tuple(rank // per_server for rank in range(servers * per_server))
    return Whole(**result["facts"], topology=Topology(0, len(server_of_rank), server_of_rank))


def plan_everything(folder: str, structure: Any, depths: Sequence[int] = DEPTHS) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure=structure)
    rank, world_size = session.topology.rank, session.topology.world_size
    asked: list[int] = []
    submit = g.structure().submit

    def counted(op: str, nodes: Array, *args: Any, **options: Any) -> Any:
        asked.append(len(nodes))
        return submit(op, nodes, *args, **options)

    g.structure().submit = counted  # type: ignore[method-assign]
    planner = Planner(g)
    found: dict[Any, Any] = {}
    for name in ("spread", "one"):
        seeds = seeds_of(name, rank, world_size, g)
        for num_layers in depths:
            for hops in range(num_layers + 1):
                before, _ = session.ledger.snapshot(), asked.clear()
                plan = planner.plan(PlanRequest(seeds=seeds, num_layers=num_layers, hops=hops))
                sent = session.ledger.since(before)
                moved = sum(row.num_bytes for row in sent if row.phase == "preload_structure")
                others = {row.phase for row in sent} - {"preload_structure", "plan"}
                found[name, num_layers, hops] = (plan, moved, sum(asked), others)
    barrier(session, "all planned")
    return {
        "found": found,
        "facts": facts(g),
        "seeds": {name: seeds_of(name, rank, world_size, g) for name in ("spread", "one")},
    }


@pytest.mark.parametrize(("servers", "per_server"), [(1, 1), (2, 1), (2, 2), *wide((1, 2), (3, 1), (2, 3))])
def test_plans_are_those_of_the_definition(folder: Path, servers: int, per_server: int) -> None:
    results = run_ranks(
        plan_everything,
        servers * per_server,
        args=(str(folder), "partitioned"),
        ranks_per_server=per_server,
    )
    whole = whole_of(results[0], servers, per_server)
    for key in results[0]["found"]:
        name, num_layers, hops = key
        seeds = {int(node) for result in results for node in result["seeds"][name]}
        rows = whole.needed(seeds, num_layers, hops)
        plans = [result["found"][key][0] for result in results]
        check_plans(plans, whole, rows)
        assert all(plan.hops == hops for plan in plans)
        if hops == 0:
            owners = RowOwners(whole.bounds, whole.topology)
            for rank, plan in enumerate(plans):
                assert (owners.rank_of(plan.nodes) == rank).all()
                assert plan.external_nodes == 0
        _check_asked(results, key, whole, rows)
        if name == "one" and servers == 2:
            # Of 240 nodes, two seeds and three hops need a few, and nobody reads more.
            assert sum(result["found"][key][2] for result in results) < NUM_NODES // 4


def _check_asked(results: list[Any], key: Any, whole: Whole, rows: list[list[set[int]]]) -> None:
    """Heads ask for the in-edges of each row of level 1 once, the others for nothing; bytes to the byte."""
    for rank, result in enumerate(results):
        _, moved, asked, other_phases = result["found"][key]
        server = whole.topology.server_of_rank[rank]
        is_head = whole.topology.ranks_of_server(server)[0] == rank
        computed = rows[server][1]
        outside = computed - whole.owned(server)
        assert asked == (len(computed) if is_head else 0)
        assert moved == (8 * len(outside) + 24 * len(whole.in_edges(outside)) if is_head else 0)
        assert not other_phases


def test_replicated_structure_gives_the_same_plans(folder: Path) -> None:
    one, other = (
        run_ranks(plan_everything, 2, args=(str(folder), structure, (2,)), ranks_per_server=1)
        for structure in ("partitioned", "replicated")
    )
    for first, second in zip(one, other, strict=True):
        for key, (plan, *_) in first["found"].items():
            again, moved, *_ = second["found"][key]
            assert moved == 0
            assert np.array_equal(plan.nodes, again.nodes)
            for layer, layer_again in zip(plan.layers, again.layers, strict=True):
                for field in ("indptr", "indices", "edge_ids", "halo_nodes"):
                    assert np.array_equal(getattr(layer, field), getattr(layer_again, field))


def half_of_the_graph(_structure: Any, own: tuple[int, int], seeds: Array) -> Array:
    return np.union1d(np.arange(*own), np.arange(0, NUM_NODES, 2))


def everything(_structure: Any, _own: tuple[int, int], _seeds: Array) -> Array:
    return np.arange(NUM_NODES)


def plan_specially(folder: str) -> dict[str, Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    topology = session.topology
    seeds = seeds_of("spread", topology.rank, topology.world_size, g)
    found = {
        "half": make_plans(g, seeds, 2, 2, eas=half_of_the_graph),
        "everything": make_plans(g, seeds, 2, 2, eas=everything),
        "plain": make_plans(g, seeds, 2, 2),
        "stay": make_plans(g, seeds, 2, 2, seeds_stay=True),
        "contiguous": make_plans(g, seeds, 2, 1, split="contiguous"),
        "one layer is enough": make_plans(g, np.arange(NUM_NODES)[topology.rank :: 4], 9, 4),
    }
    found |= _beside_collectives(g, seeds)
    return {"found": found, "facts": facts(g), "seeds": seeds}


def _beside_collectives(g: DistGraph, seeds: Array) -> dict[str, Any]:
    """Plan on a thread while the ranks exchange numbers on this one."""
    planner = Planner(g)
    made: dict[str, Any] = {}

    def work() -> None:
        for hops in (0, 1, 2):
            made[f"thread {hops}"] = planner.plan(PlanRequest(seeds=seeds, num_layers=2, hops=hops))

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(30):
        assert (gather_int64([number], g.session)[:, 0] == number).all()
    thread.join(60)
    return made


def test_selections_other_splits_and_threads(folder: Path) -> None:
    results = run_ranks(plan_specially, 4, args=(str(folder),), ranks_per_server=2)
    whole = whole_of(results[0], 2, 2)
    plans = {name: [result["found"][name] for result in results] for name in results[0]["found"]}
    seeds = {int(node) for result in results for node in result["seeds"]}
    for name in ("everything", "plain", "thread 2"):
        check_plans(plans[name], whole, whole.needed(seeds, 2, 2))
    for name, hops in (("contiguous", 1), ("thread 0", 0), ("thread 1", 1)):
        check_plans(plans[name], whole, whole.needed(seeds, 2, hops))
    check_plans(plans["one layer is enough"], whole, whole.needed(set(range(NUM_NODES)), 9, 4))
    layers = plans["one layer is enough"][0].layers
    assert layers[8] is layers[5] is layers[4]
    assert layers[3].own_rows > layers[3].targets
    _check_half(plans["half"], whole, seeds)
    _check_stay(plans["stay"], whole, [result["seeds"] for result in results])


def _check_half(plans: list[Any], whole: Whole, seeds: set[int]) -> None:
    allowed = [whole.owned(server) | set(range(0, NUM_NODES, 2)) for server in range(2)]
    rows = []
    for server in range(2):
        levels = [seeds & whole.owned(server)]
        for _ in range(2):
            levels.insert(0, levels[0] | whole.in_neighbours(levels[0]) & allowed[server])
        rows.append(levels)
    check_plans(plans, whole, rows, allowed)
    assert any(plan.external_nodes for plan in plans)


def _check_stay(plans: list[Any], whole: Whole, given: list[Array]) -> None:
    rows = []
    for server in range(2):
        levels = [{int(n) for rank in whole.topology.ranks_of_server(server) for n in given[rank]}]
        for _ in range(2):
            levels.insert(0, levels[0] | whole.in_neighbours(levels[0]))
        rows.append(levels)
    check_plans(plans, whole, rows)


def refuse(folder: str) -> list[str]:
    """What each bad request raises here, by turn."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder, structure="partitioned")
    rank = session.topology.rank
    planner = Planner(g)
    messages = []
    for request in (
        PlanRequest(seeds=[1], num_layers=2, hops=1 + rank),
        PlanRequest(seeds=[], num_layers=2, hops=2),
        PlanRequest(seeds=[NUM_NODES if rank else 0], num_layers=2, hops=2),
        PlanRequest(seeds=[0], num_layers=2, hops=2, eas=bad_selection),
    ):
        try:
            planner.plan(request)
            messages.append("nothing")
        except (DglxError, IndexError, ZeroDivisionError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert planner.plan(PlanRequest(seeds=[1], num_layers=2, hops=1)).hops == 1
    return messages


def bad_selection(_structure: Any, own: tuple[int, int], _seeds: Array) -> Array:
    return np.arange(*own) if own[0] == 0 else np.arange(1 // own[0] // 0)


def test_what_makes_no_sense_is_refused_on_every_rank(folder: Path) -> None:
    first, second = run_ranks(refuse, 2, args=(str(folder),), ranks_per_server=1)
    assert first[0].startswith("ConfigError: rank 0 plans with hops 1 and rank 1 with 2; use the same")
    assert second[0].startswith("ConfigError: rank 1 plans with hops 2 and rank 0 with 1; use the same")
    for messages in (first, second):
        assert messages[1] == "ConfigError: no rank was given a node to compute; give the loader at least one"
    assert second[2].startswith("IndexError")
    assert first[2].startswith("FailedOnAnotherRankError: rank 1")
    assert "IndexError" in first[2]
    assert second[3].startswith("ZeroDivisionError")
    assert "ZeroDivisionError" in first[3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hops": -1}, "hops is -1; with 2 layers it is 0"),
        ({"hops": 3}, "hops is 3"),
        ({"num_layers": 0, "hops": 0}, "0 layers"),
        ({"hops": 1, "eas": everything}, "hops is 1 with eas"),
        ({"hops": 0, "seeds_stay": True}, "set hops to the number of layers, 2"),
    ],
)
def test_requests_are_checked(folder: Path, options: dict[str, Any], text: str) -> None:
    with start_session():
        planner = Planner(DistGraph(folder))
        with pytest.raises(ConfigError, match=text):
            planner.plan(PlanRequest(**{"seeds": [1], "num_layers": 2, **options}))
        with pytest.raises(UnknownNameError, match="metis"):
            planner.plan(PlanRequest(seeds=[1], num_layers=2, hops=1, split="metsi"))


def refuse_graphs(folder: str) -> str:
    start_session(timeout_s=60)
    with pytest.raises(ConfigError) as caught:
        make_plans(DistGraph(folder), [0], 2, 1)
    return str(caught.value)


def test_a_server_without_nodes_and_too_many_ranks_are_refused(tmp_path: Path) -> None:
    from dglx_dist.data.storage.writer import write_dataset
    from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Assignment, RawGraph

    raw = RawGraph(name="two", num_nodes={NODE_TYPE: 2}, edges={EDGE_TYPE: (np.array([0]), np.array([1]))})
    assignment = Assignment(num_parts=2, part_of={NODE_TYPE: np.zeros(2, np.int32)}, method="test", seed=0)
    write_dataset(raw, assignment, tmp_path / "parts")
    messages = run_ranks(refuse_graphs, 2, args=(str(tmp_path / "parts"),), ranks_per_server=1)
    assert all("server 1 of 2 owns no node" in text and "--parts 2" in text for text in messages)
    messages = run_ranks(refuse_graphs, 3, args=(str(tmp_path / "parts"),), ranks_per_server=3)
    assert all("2 nodes for 3 ranks" in text for text in messages)


def talk() -> str:
    session = start_session(timeout_s=2)
    rank, exchange = session.topology.rank, PlanExchange(session, "test")
    barrier(session, "start")
    with exchange.job():
        if rank == 1:
            # Longer than the time-out, but inside the job.
            time.sleep(5)
        got = exchange.exchange("numbers", {0: [np.array([rank])], 1: [np.array([rank + 10])]}, (0, 1))
        assert [int(got[other][0][0]) for other in (0, 1)] == [rank * 10, rank * 10 + 1]
        assert exchange.exchange("nothing", {}, (0, 1)) == {0: [], 1: []}
    message = ""
    if rank == 0:
        with pytest.raises(PeerError) as caught, exchange.job():
            exchange.exchange("alone", {}, (0, 1))
        message = str(caught.value)
    else:
        while not exchange._mailbox._arrived:
            time.sleep(0.1)
        time.sleep(4)
    assert session.ledger.total(phase="plan") == 8
    return message


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
            mock.patch.object(plan_builder, "_NOTIFY_FAILURE_S", 0.5),
            pytest.raises(ValueError, match="a bug"),
            exchange.job(),
        ):
            raise ValueError("a bug")
        assert time.monotonic() - started < 30
    barrier(session, "failed")
    done.set()


def test_a_rank_that_fails_does_not_wait_for_one_that_hangs() -> None:
    run_ranks(fail_beside_a_rank_that_hangs, 2)


def test_one_rank_sends_itself_what_it_wants() -> None:
    with start_session() as session:
        exchange = PlanExchange(session, "test")
        with exchange.job():
            array = np.arange(3)
            assert exchange.exchange("own", {0: [array]}, (0,))[0][0] is array
        session.rpc.register("again", lambda _name, _arrays: [])
