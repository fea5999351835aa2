"""Intervals: alike in nodes and in edges from outside; contiguous; empty where there are too few nodes."""

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.graph_partition import crossing_edges, cut_intervals

from . import cases


def test_edges_of_a_path_cross_where_it_is_cut() -> None:
    """0 -> 1 -> 2 -> 3, and a ghost -> 0; cut between 1 and 2."""
    indptr, sources = np.array([0, 1, 2, 3, 4]), np.array([4, 0, 1, 2], np.int32)
    assert crossing_edges(indptr, sources, np.array([0, 2, 4])).tolist() == [1, 0, 1, 0]
    assert crossing_edges(indptr, sources, np.array([0, 4])).tolist() == [1, 0, 0, 0]
    assert crossing_edges(indptr, sources, np.array([0, 0, 1, 4])).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("intervals", [1, 3, 7, 100])
def test_no_interval_has_more_than_twice_the_mean_of_nodes(intervals: int) -> None:
    (graph,) = cases.case().graphs([0, 40])
    bounds = cut_intervals(graph.indptr, graph.sources, intervals)
    assert bounds.dtype == np.int64
    assert len(bounds) == intervals + 1
    assert (bounds[0], bounds[-1]) == (0, 40)
    assert (np.diff(bounds) >= 0).all()
    assert np.diff(bounds).max() <= 2 * 40 / intervals + 1


def test_edges_from_outside_are_balanced_too() -> None:
    """The first tenth of the nodes has nine tenths of the edges, all from ghosts."""
    counts = np.full(100, 1)
    counts[:10] = 81
    indptr = np.concatenate([[0], np.cumsum(counts)])
    sources = np.full(indptr[-1], 100, np.int32)
    bounds = cut_intervals(indptr, sources, 4)
    loads = np.diff(indptr[bounds])
    even = np.diff(indptr[np.array([0, 25, 50, 75, 100])])
    assert even.max() / even.mean() > 3.5
    assert loads.max() <= 2 * loads.mean() + 81
    assert np.diff(bounds).max() <= 50
    assert (cut_intervals(indptr, sources, 4) == bounds).all()


def test_nothing_to_cut() -> None:
    none = np.zeros(0, np.int32)
    assert cut_intervals(np.zeros(1, np.int64), none, 3).tolist() == [0, 0, 0, 0]
    assert cut_intervals(np.zeros(5, np.int64), none, 2).tolist() == [0, 2, 4]
    with pytest.raises(ConfigError, match="intervals=0 per graph server must be at least 1"):
        cut_intervals(np.zeros(1, np.int64), none, 0)
