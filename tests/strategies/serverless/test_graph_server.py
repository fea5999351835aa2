"""A graph server alone: what it refuses of others, and parts that do not fit the program."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.program import Gather
from dglx_dist.serverless.tasks import TaskKey
from dglx_dist.strategies.serverless import graph_rows as over_edges
from dglx_dist.strategies.serverless.graph_rows import SharedRows
from dglx_dist.strategies.serverless.graph_server import (
    GraphServer,
    SubmitResult,
    TaskKind,
)

from . import cases
from .serial_scheduler import LocalParameters, compute_task

STARTS = [0, 17, 40]


def test_messages_that_are_not_what_a_scatter_sends_are_refused() -> None:
    (server, peer), _ = cases.servers(cases.gcn(), STARTS, 2)
    messages = peer.ghost_messages(1, peer.schedule[2])
    (message,) = messages
    good = [message.positions, *message.rows]
    assert message.rows[0].shape == (len(message.positions), 4)
    server.receive(1, TaskKind.SCATTER, 2, good)
    size = len(server.part.graph.ghost_ids(1))
    wrong = {
        "not positions and 1 slots": [good[0]],
        "not int32": [good[0].astype(np.int64), good[1]],
        f"of {size} came from graph server 1 for step 'SC1'": [good[0] + np.int32(size), good[1]],
        "positions from -1": [good[0] - good[0][0] - np.int32(1), good[1]],
        "'h1' came from graph server 1": [good[0], good[1][:, :3]],
        r"as float32 \(": [good[0], good[1].astype(np.float32)],
        r"not float64 \(1, 4\)": [good[0][:1], good[1][:0]],
    }
    for message, arrays in wrong.items():
        with pytest.raises(ConfigError, match=message):
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
    computed = compute_task(server, LocalParameters(parameters), key)
    first, second = computed.halves
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
    with pytest.raises(ConfigError, match="is over"):
        server.task_table.pull(key, 0)
    rows = server.part.nodes_of(0)
    np.testing.assert_array_equal(server._stores.own("h1", rows), np.concatenate([first[0], second[0]]))


def test_a_sum_lets_writers_in_between_pieces_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (server, _), _ = cases.servers(cases.gcn(), STARTS, 2)
    held: list[str] = []
    reading = SharedRows.reading

    def counted(rows: SharedRows) -> Any:
        held.append("rows")
        return reading(rows)

    monkeypatch.setattr(SharedRows, "reading", counted)
    (step, *_), nodes = server.program.steps, server.part.nodes_of(1)
    assert isinstance(step, Gather)
    whole = server._edge_operations.gather(step, 1)
    assert held == ["rows", "rows"]  # and the values of its edges
    monkeypatch.setattr(over_edges, "_PIECE_NUMBERS", 3 * whole.shape[1])
    edges = server.part.edges_of(1)
    np.testing.assert_array_equal(server._edge_operations.gather(step, 1), whole)
    pieces = list(server._edge_operations._pieces(nodes, whole.shape[1]))
    assert len(held) == 2 + 2 * len(pieces) > 6
    assert [pieces[0][0], pieces[-1][1]] == [nodes.start, nodes.stop]
    bounds = server.part.graph.indptr
    assert all(bounds[end - 1] - bounds[first] < 3 for first, end in pieces)
    assert sum(bounds[end] - bounds[first] for first, end in pieces) == edges.stop - edges.start


def test_parts_that_do_not_fit_are_refused() -> None:
    program, (part, _) = cases.gcn(), cases.case().parts(STARTS, 2)
    GraphServer(part, program)
    labels = part.labels.copy()
    labels[3] = 3
    wrong = {
        "features of graph server 0 are float32": {"features": part.features.astype(np.float32)},
        r"features .* not float64 of shape": {"features": part.features[: part.graph.num_own]},
        "labels of graph server 0 are int64": {"labels": part.labels.astype(np.int64)},
        "run from -1 to 3; give classes below 3": {"labels": labels},
        "edge values 'fixed:0', which are not given": {"fixed": {}},
        "fixed:0 of graph server 0": {"fixed": {"fixed:0": part.fixed["fixed:0"][:, 0]}},
    }
    for message, change in wrong.items():
        with pytest.raises(ConfigError, match=message):
            GraphServer(dataclasses.replace(part, **change), program)


def test_stores_keep_each_row_once() -> None:
    (server, _), _ = cases.servers(cases.gcn(), STARTS, 2)
    graph, boundary = server.part.graph, sum(len(nodes) for nodes in server.part.routes.boundary)
    rows = graph.num_local * (5 + 4) + graph.num_own * (5 + 4 + 3) + graph.num_own * 4 + boundary * 4
    kept = [*vars(server._stores).values()]
    stored = [one for group in kept if isinstance(group, dict) for one in group.values()]
    assert sum(one.array.nbytes for one in stored) == 8 * (rows + len(graph.sources))
