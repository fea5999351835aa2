from __future__ import annotations

import numpy as np

from dglx_dist.graph.sparse_kernels import add_rows, free_slots, gather_sum, group_by_owner, take_rows


def test_positions_are_grouped_by_owner_in_their_order_and_an_owner_may_have_no_rows() -> None:
    # Owner 0 has rows 0 to 3, owner 1 none, owner 2 the rows 4 to 9.
    positions, first = group_by_owner(np.array([9, 0, 4, 3, 5]), np.array([0, 4, 4, 10]))
    assert positions.tolist() == [1, 3, 0, 2, 4]
    assert first.tolist() == [0, 2, 2, 5]
    none, first = group_by_owner(np.empty(0, np.int64), np.array([0, 4, 4, 10]))
    assert (none.tolist(), first.tolist()) == ([], [0, 0, 0, 0])


def test_taken_rows_follow_the_positions() -> None:
    ids, rows = np.array([5, 6, 7]), np.array([[1.0], [2.0], [3.0]])
    out_ids, out_rows = np.empty(2, np.int64), np.empty((2, 1))
    take_rows(ids, rows, np.array([2, 0]), out_ids, out_rows)
    assert (out_ids.tolist(), out_rows.tolist()) == ([7, 5], [[3.0], [1.0]])


def test_rows_are_summed_by_id_and_slots_are_given_back() -> None:
    slot_of, touched = np.full(4, -1, np.int32), np.empty(4, np.int64)
    sums = np.full((4, 1), 99.0)
    count = gather_sum(np.array([12, 10]), np.array([[1.0], [2.0]]), 10, slot_of, touched, sums, 0)
    count = gather_sum(np.array([10, 13]), np.array([[4.0], [8.0]]), 10, slot_of, touched, sums, count)
    assert touched[:count].tolist() == [2, 0, 3]
    assert sums[:count].tolist() == [[1.0], [6.0], [8.0]]
    free_slots(slot_of, touched[:count])
    assert slot_of.tolist() == [-1, -1, -1, -1]


def test_weighed_rows_are_added_where_their_places_say() -> None:
    out = np.zeros((2, 1), np.float32)
    add_rows(np.array([[1.0], [2.0], [4.0]], np.float32), 0.5, np.array([1, 0, 1]), out)
    assert out.tolist() == [[1.0], [2.5]]
