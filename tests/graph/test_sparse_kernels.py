from __future__ import annotations

import numpy as np

from dglx_dist.graph.sparse_gradient import (
    NEVER,
    Gradient,
    add_rows,
    count_rows,
    forget_rows,
    group_by_owner,
    split_rows,
    take_weighted,
)


def test_positions_are_grouped_by_owner_in_their_order_and_an_owner_may_have_no_rows() -> None:
    # Owner 0 has rows 0 to 3, owner 1 none, owner 2 the rows 4 to 9.
    positions, first = group_by_owner(np.array([9, 0, 4, 3, 5]), np.array([0, 4, 4, 10]))
    assert positions.tolist() == [1, 3, 0, 2, 4]
    assert first.tolist() == [0, 2, 2, 5]
    none, first = group_by_owner(np.empty(0, np.int64), np.array([0, 4, 4, 10]))
    assert (none.tolist(), first.tolist()) == ([], [0, 0, 0, 0])


def test_taken_rows_follow_the_places_and_are_weighed() -> None:
    out = np.empty((2, 1))
    take_weighted(np.array([[1.0], [2.0], [3.0]]), 0.5, np.array([2, 0]), out)
    assert out.tolist() == [[1.5], [0.5]]


def test_rows_of_one_rank_stay_where_they_are_and_others_are_summed() -> None:
    slot_of, ids = np.full(4, NEVER, np.int32), (np.array([12, 10]), np.array([10, 13]))
    assert [count_rows(some, 10, slot_of) for some in ids] == [0, 1]
    touched, sums = np.empty(1, np.int64), np.full((1, 1), 99.0)
    first = Gradient(np.array([[2.0], [1.0]]), np.array([1, 0]), 0.5)
    rows, places, count = split_rows(ids[0], 10, first, slot_of, touched, sums, 0)
    assert (rows.tolist(), places.tolist(), count) == ([2], [1], 1)
    second = Gradient(np.array([[4.0], [8.0]]), np.array([0, 1]), 1.0)
    rows, places, count = split_rows(ids[1], 10, second, slot_of, touched, sums, count)
    assert (rows.tolist(), places.tolist(), count) == ([3], [1], 1)
    assert (touched.tolist(), sums.tolist()) == ([0], [[5.0]])
    for some in ids:
        forget_rows(some, 10, slot_of)
    assert slot_of.tolist() == [NEVER] * 4


def test_weighed_rows_are_added_where_their_places_say() -> None:
    out = np.zeros((2, 1), np.float32)
    add_rows(np.array([[1.0], [2.0], [4.0]], np.float32), 0.5, np.array([1, 0, 1]), out)
    assert out.tolist() == [[1.0], [2.5]]
