"""A graph server alone: intervals, halo, rows, and refused requests."""

from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.graph_partition import crossing_edges, cut_intervals
from dglx_dist.strategies.serverless.graph_server import SubmitResult, TaskKind
from dglx_dist.strategies.serverless.tasks import TASK_OVER, TaskKey

from . import cases
from .programs import gcn
from .serial_scheduler import compute_task

STARTS = [0, 17, 40]


def test_messages_that_are_not_what_a_scatter_sends_are_refused() -> None:
    (server, peer), _ = cases.servers(gcn(), STARTS, 2)
    ((_, good),) = peer.halo_messages(1, peer.schedule[2])
    assert good[1].shape == (len(good[0]), 4)
    server.receive(1, TaskKind.SCATTER, 2, good)
    size = len(server.part.graph.halo_ids(1))
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
    """Tests of refusals before and after it are in test_worker_access.py."""
    (server, _), parameters = cases.servers(gcn(), STARTS, 2)
    key = TaskKey.parse("r0.e0.s1.i0.f")
    assert server.pull(key, 0) == []
    server.compute(0, 0, server.schedule[0])
    server.open(0, 0, server.schedule[1])
    first, second = (half.rows for half in compute_task(server, parameters, key))
    with pytest.raises(ConfigError, match="output h2 of shape"):
        server.submit(key, 0, [first[0][:-1]])
    assert server.submit(key, 0, first) is SubmitResult.TAKEN
    assert server.submit(key, 0, first) is SubmitResult.AGAIN
    assert server.open_tasks == [key]
    assert server.submit(key, 1, second) is SubmitResult.LAST
    assert server.open_tasks == []
    for half in (0, 1):
        assert server.submit(key, half, first) is SubmitResult.LATE
        assert server.pull(key, half) == [TASK_OVER]
    rows = server.part.nodes_of(0)
    np.testing.assert_array_equal(server._rows["h2"][rows], np.concatenate([first[0], second[0]]))


def test_lists_of_another_partition_are_refused() -> None:
    first = cases.case().graphs(STARTS)[0]
    assert first.own_positions(np.array([0, 1, 16]), 1).dtype == np.int32
    for wrong in ([17], [-1, 0], [1, 0], [0, 0]):
        with pytest.raises(ConfigError, match=r"graph server 1 asked 0 .* nodes 0 to 16"):
            first.own_positions(np.array(wrong), 1)
    with pytest.raises(ConfigError, match="same partition"):
        first.own_positions(np.array([0], np.int32), 1)


def test_edges_of_a_path_cross_where_it_is_cut() -> None:
    """0 -> 1 -> 2 -> 3, and a halo node -> 0; cut between 1 and 2."""
    indptr, sources = np.array([0, 1, 2, 3, 4]), np.array([4, 0, 1, 2], np.int32)
    for bounds, crossing in (([0, 2, 4], [1, 0, 1, 0]), ([0, 4], [1, 0, 0, 0]), ([0, 0, 1, 4], [1, 1, 0, 0])):
        assert crossing_edges(indptr, sources, np.array(bounds)).tolist() == crossing


@pytest.mark.parametrize("intervals", [1, 3, 7, 100])
def test_no_interval_has_more_than_twice_the_mean(intervals: int) -> None:
    """The mean is of nodes and of edges. A tenth of the nodes has nine tenths of the edges, all from halo."""
    counts = np.full(100, 1)
    counts[:10] = 81
    indptr = np.concatenate([[0], np.cumsum(counts)])
    bounds = cut_intervals(indptr, np.full(indptr[-1], 100, np.int32), intervals)
    assert (bounds.dtype, len(bounds), bounds[0], bounds[-1]) == (np.int64, intervals + 1, 0, 100)
    assert (np.diff(bounds) >= 0).all()
    assert np.diff(bounds).max() <= 2 * 100 / intervals + 1
    assert np.diff(indptr[bounds]).max() <= 2 * 900 / intervals + 81


def test_graphs_without_edges_are_cut_evenly() -> None:
    none = np.zeros(0, np.int32)
    assert cut_intervals(np.zeros(1, np.int64), none, 3).tolist() == [0, 0, 0, 0]
    assert cut_intervals(np.zeros(5, np.int64), none, 2).tolist() == [0, 2, 4]
