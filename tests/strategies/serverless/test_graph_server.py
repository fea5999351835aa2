"""A graph server alone: intervals, ghosts, rows, refused requests, and sums over edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.rpc import Handler
from dglx_dist.errors import ConfigError
from dglx_dist.serverless.tasks import Address, Secrets, Task, TaskKey, parse_half
from dglx_dist.serverless.worker import PROGRAM, PULL, WEIGHTS, DirectCaller, Worker
from dglx_dist.strategies.serverless import graph_server as kernels
from dglx_dist.strategies.serverless.graph_partition import (
    crossing_edges,
    cut_intervals,
    local_graph,
    part_of,
)
from dglx_dist.strategies.serverless.graph_server import GraphServer, SubmitResult, TaskKind

from . import cases
from .cases import boundaries_of
from .serial_scheduler import LocalParameters, compute_task

STARTS = [0, 17, 40]


def test_messages_that_are_not_what_a_scatter_sends_are_refused() -> None:
    (server, peer), _ = cases.servers(cases.gcn(), STARTS, 2)
    ((_, good),) = peer.ghost_messages(1, peer.schedule[2])
    assert good[1].shape == (len(good[0]), 4)
    server.receive(1, TaskKind.SCATTER, 2, good)
    size = len(server.part.graph.ghost_ids(1))
    wrong = (
        [good[0]],
        [good[0].astype(np.int64), good[1]],
        [good[0] + np.int32(size), good[1]],
        [good[0] - good[0][0] - np.int32(1), good[1]],
        [good[0], good[1][:, :3]],
        [good[0], good[1].astype(np.float32)],
        [good[0][:1], good[1][:0]],
        [],
        [np.int32(0) + np.zeros((), np.int32), good[1]],
    )
    for arrays in wrong:
        with pytest.raises(
            ConfigError, match=rf"graph server 1 sent .* 'SC1', not .* positions below {size}"
        ):
            server.receive(1, TaskKind.SCATTER, 2, arrays)
    for peer_number, step in ((1, 1), (1, 99), (1, -1), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError, match="no such Scatter"):
            server.receive(peer_number, TaskKind.SCATTER, step, good)


def test_each_half_is_taken_once_and_only_while_its_task_is_open() -> None:
    (server, _), parameters = cases.servers(cases.gcn(), STARTS, 2)
    key, task = TaskKey.parse("r0.e0.s1.i0.f"), server.schedule[1]
    assert server.task_table.pull(key, 0) is None
    with pytest.raises(ConfigError, match="came before it began"):
        server.submit(key, 0, [])
    server.compute(0, 0, server.schedule[0])
    server.open(0, 0, task)
    first, second = (one.rows for one in compute_task(server, LocalParameters(parameters), key))
    with pytest.raises(ConfigError, match=r"what came of r0\.e0\.s1\.i0\.f has 0 arrays, not 1"):
        server.submit(key, 0, [])
    with pytest.raises(ConfigError, match="output h1 of shape"):
        server.submit(key, 0, [first[0][:-1]])
    assert server.submit(key, 0, first) is SubmitResult.TAKEN
    assert server.submit(key, 0, first) is SubmitResult.AGAIN
    assert server.task_table.keys == [key]
    assert server.submit(key, 1, second) is SubmitResult.LAST
    assert server.task_table.keys == []
    for half in (0, 1):
        assert server.submit(key, half, first) is SubmitResult.LATE
    assert worker_finds_it_over(server, LocalParameters(parameters), key)
    rows = server.part.nodes_of(0)
    np.testing.assert_array_equal(server._rows["h1"][rows], np.concatenate([first[0], second[0]]))


def worker_finds_it_over(server: GraphServer, parameters: LocalParameters, key: TaskKey) -> bool:
    """Run another attempt at a task that is done; return whether it ends without an error."""
    here = Address(rank=0, host="here", endpoint="tcp://127.0.0.1:1")
    task = Task(
        key=key,
        rows=server.rows_of(0),
        program=server.program.digest,
        graph_server=here,
        parameter_server=here,
        secrets=Secrets(secret="s"),
        timeout_s=5.0,
        attempt=1,
    )
    handlers: dict[str, Handler] = {
        PROGRAM: lambda _name, _arrays: [np.frombuffer(server.program.to_json(), np.uint8)],
        WEIGHTS: lambda name, _arrays: parameters.weights(TaskKey.parse(name)),
        PULL: lambda name, _arrays: server.task_table.pull(*parse_half(name)) or [],
    }
    answer = Worker(DirectCaller(handlers)).handle(task.to_event())
    return (answer["accepted"], answer["error"]) == (False, "")


# Nodes 0 1 | 2 3 | 4; edges 0->1, 1->0, 2->0, 4->0, 4->1, 0->2, 0->3, 1->3.
GHOST_STARTS = [0, 2, 4, 5]
IN_EDGES = [([0, 3, 5], [1, 2, 4, 0, 4]), ([0, 1, 3], [0, 0, 1]), ([0, 0], [])]


def graphs() -> list:
    return [
        local_graph(rank, GHOST_STARTS, np.array(indptr), np.array(sources, dtype=np.int64))
        for rank, (indptr, sources) in enumerate(IN_EDGES)
    ]


def test_local_ids_and_ghosts_by_hand() -> None:
    first, second, third = graphs()
    assert first.ghosts.tolist() == [2, 4]
    assert first.sources.tolist() == [1, 2, 3, 0, 3]
    assert [first.ghost_ids(owner).tolist() for owner in range(3)] == [[], [2], [4]]
    assert first.out_indptr.tolist() == [0, 1, 2, 3, 5]
    assert first.out_targets.tolist() == [1, 0, 0, 0, 1]
    assert first.out_edges.tolist() == [3, 0, 1, 2, 4]
    assert second.ghosts.tolist() == [0, 1]
    assert (third.num_own, third.num_ghosts, third.num_local, third.num_servers) == (1, 0, 1, 3)


def test_routes_by_hand() -> None:
    """One node per interval on the first two; the third has no ghosts."""
    all_graphs = graphs()
    boundary = boundaries_of(all_graphs)
    assert [[nodes.tolist() for nodes in row] for row in boundary] == [
        [[], [0, 1], []],
        [[0], [], []],
        [[0], [], []],
    ]

    def routes_of(rank: int, bounds: list[int]) -> Any:
        none: dict[str, Any] = {
            "interval_sizes": np.empty(0),
            "features": np.empty(0),
            "labels": np.empty(0),
            "fixed": {},
        }
        return part_of(all_graphs[rank], boundary[rank], np.array(bounds), **none)

    first = routes_of(0, [0, 1, 2])
    assert sum(len(nodes) for nodes in first.boundary) == 2
    assert first.boundary_bounds[1].tolist() == [0, 1, 2]
    # Ghost 2 has an edge to node 0 alone, ghost 4 to both: its home is the higher interval.
    assert [[some.tolist() for some in peer] for peer in first.returned] == [[[], []], [[0], []], [[], [0]]]
    second = routes_of(1, [0, 0, 1, 2])
    assert [some.tolist() for some in second.returned[0]] == [[], [], [0, 1]]
    third = routes_of(2, [0, 1])
    assert all(not len(some) for peer in third.returned for some in peer)


def test_lists_of_another_partition_are_refused() -> None:
    first = graphs()[0]
    assert first.own_positions(np.array([0, 1]), 1).dtype == np.int32
    for wrong in ([2], [-1, 0], [1, 0], [0, 0]):
        with pytest.raises(ConfigError, match=r"graph server 1 asked 0 .* nodes 0 to 1"):
            first.own_positions(np.array(wrong), 1)
    with pytest.raises(ConfigError, match="same partition"):
        first.own_positions(np.array([0], np.int32), 1)


def test_edges_of_a_path_cross_where_it_is_cut() -> None:
    """0 -> 1 -> 2 -> 3, and a ghost -> 0; cut between 1 and 2."""
    indptr, sources = np.array([0, 1, 2, 3, 4]), np.array([4, 0, 1, 2], np.int32)
    for bounds, crossing in (([0, 2, 4], [1, 0, 1, 0]), ([0, 4], [1, 0, 0, 0]), ([0, 0, 1, 4], [1, 1, 0, 0])):
        assert crossing_edges(indptr, sources, np.array(bounds)).tolist() == crossing


@pytest.mark.parametrize("intervals", [1, 3, 7, 100])
def test_no_interval_has_more_than_twice_the_mean(intervals: int) -> None:
    """Of nodes, and of edges: the first tenth of the nodes has nine tenths of the edges, all from ghosts."""
    counts = np.full(100, 1)
    counts[:10] = 81
    indptr = np.concatenate([[0], np.cumsum(counts)])
    bounds = cut_intervals(indptr, np.full(indptr[-1], 100, np.int32), intervals)
    assert (bounds.dtype, len(bounds), bounds[0], bounds[-1]) == (np.int64, intervals + 1, 0, 100)
    assert (np.diff(bounds) >= 0).all()
    assert np.diff(bounds).max() <= 2 * 100 / intervals + 1
    assert np.diff(indptr[bounds]).max() <= 2 * 900 / intervals + 81


def test_nothing_to_cut() -> None:
    none = np.zeros(0, np.int32)
    assert cut_intervals(np.zeros(1, np.int64), none, 3).tolist() == [0, 0, 0, 0]
    assert cut_intervals(np.zeros(5, np.int64), none, 2).tolist() == [0, 2, 4]


WIDTH = 6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_gather_is_a_matrix_product_and_going_back_its_transpose(heads: int, dtype: str) -> None:
    """On the second of three graph servers: ghosts, self loops, parallel edges, nodes without edges."""
    one, draw = cases.case(30, 90, 4).graphs([0, 8, 21, 30])[1], np.random.default_rng(heads)
    targets = np.repeat(np.arange(one.num_own), np.diff(one.indptr))
    assert one.num_ghosts
    assert (np.diff(one.indptr) == 0).any()
    rows = draw.standard_normal((one.num_local, WIDTH)).astype(dtype)
    gradients = draw.standard_normal((one.num_own, WIDTH)).astype(dtype)
    values = draw.standard_normal((len(one.sources), heads)).astype(dtype) if heads else None
    dense = np.zeros((one.num_own, one.num_local, WIDTH))
    spread = np.ones((len(targets), WIDTH)) if values is None else np.repeat(values, WIDTH // heads, 1)
    np.add.at(dense, (targets, one.sources), spread)
    tolerance = {"atol": 1e-12 if dtype == "float64" else 1e-5}

    out = np.full_like(gradients, np.nan)
    for first, end in ((0, 5), (5, 5), (5, one.num_own)):
        kernels.gather(one.indptr, one.sources, values, rows, first, out[first:end])
    np.testing.assert_allclose(out, np.einsum("tsw,sw->tw", dense, rows), **tolerance)
    back = np.zeros_like(rows)
    everybody = np.arange(one.num_local, dtype=np.int32)
    places = (one.out_indptr, one.out_targets, one.out_edges)
    kernels.pull_back(*places, values, gradients, everybody, back)
    np.testing.assert_allclose(back, np.einsum("tsw,tw->sw", dense, gradients), **tolerance)
    if values is None:
        return
    # The gradient of the values of edges, and their sums at both ends.
    products = np.full_like(values, np.nan)
    for first, end in ((0, 4), (4, one.num_own)):
        edges = slice(int(one.indptr[first]), int(one.indptr[end]))
        kernels.edge_products(one.indptr, one.sources, gradients[first:end], rows, first, products[edges])
    both = (gradients[targets] * rows[one.sources]).reshape(len(targets), heads, -1)
    np.testing.assert_allclose(products, both.sum(-1), **tolerance)
    dense = dense.reshape(one.num_own, one.num_local, heads, -1)[..., 0]
    to_targets, to_sources = np.full((one.num_own, heads), np.nan), np.zeros((one.num_local, heads))
    edges_alone = np.arange(len(values), dtype=np.int32)
    kernels.gather(one.indptr, edges_alone, None, values, 0, to_targets)
    np.testing.assert_allclose(to_targets, dense.sum(1), **tolerance)
    kernels.pull_back(one.out_indptr, one.out_edges, one.out_edges, None, values, everybody, to_sources)
    np.testing.assert_allclose(to_sources, dense.sum(0), **tolerance)
