from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.graph.row_kernels import number_distinct, plan_remote

BOUNDS = np.array([0, 10, 20, 20, 30])


def test_remote_ids_once_grouped_by_server_with_their_places() -> None:
    plan = plan_remote(np.array([25, 12, 3, 25, 3, 29, 14]), BOUNDS, own_server=1)
    assert plan.ids.tolist() == [3, 25, 29]
    assert plan.server_starts.tolist() == [0, 1, 1, 1, 3]
    assert plan.starts.tolist() == [0, 2, 4, 5]
    assert plan.positions.tolist() == [2, 4, 0, 3, 5]


@pytest.mark.parametrize("ids", [[], [12, 19, 10]])
def test_nothing_remote(ids: list[int]) -> None:
    plan = plan_remote(np.array(ids, dtype=np.int64), BOUNDS, own_server=1)
    assert plan.ids.tolist() == []
    assert plan.server_starts.tolist() == [0] * 5


@pytest.mark.parametrize("own", [0, 1, 2, 3])
def test_many_ids_against_numpy(own: int) -> None:
    ids = np.random.default_rng(own).integers(0, 30, 500)
    plan = plan_remote(ids, BOUNDS, own)
    remote = ids[(ids < BOUNDS[own]) | (ids >= BOUNDS[own + 1])]
    assert sorted(plan.ids.tolist()) == np.unique(remote).tolist()
    assert np.array_equal(np.repeat(plan.ids, np.diff(plan.starts)), ids[plan.positions])
    server_of_slot = np.repeat(np.arange(4), np.diff(plan.server_starts))
    assert np.array_equal(server_of_slot, np.searchsorted(BOUNDS, plan.ids, side="right") - 1)


def test_distinct_ids_are_numbered_in_order_of_appearance() -> None:
    distinct, places = number_distinct(np.array([7, 3, 7, 0, 3]))
    assert (distinct.tolist(), places.tolist()) == ([7, 3, 0], [0, 1, 0, 2, 1])
    none, places = number_distinct(np.empty(0, np.int64))
    assert (none.tolist(), places.tolist()) == ([], [])
