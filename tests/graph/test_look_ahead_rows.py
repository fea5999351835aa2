"""Rows kept by look-ahead: as few fetched as by any choice, and as many batches announced as that needs."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from dglx_dist.graph.column import LookAheadRows
from dglx_dist.graph.row_kernels import RemotePlan, plan_remote
from dglx_dist.records import ColumnInfo

OWN, BOUNDS = (0, 3), np.array([0, 3, 1000])
NUM_IDS = pytest.mark.parametrize("num_ids", [1000, 1 << 40], ids=["direct", "hashed"])
INFO = ColumnInfo(dtype="int64", row_shape=())


def least_fetched(batches: list[list[int]], capacity: int) -> int:
    """The optimum over every choice of what to keep after each batch."""
    costs: dict[tuple[int, ...], int] = {(): 0}
    for batch in batches:
        following: dict[tuple[int, ...], int] = {}
        for kept, cost in costs.items():
            known = sorted({*kept, *batch})
            fetched = cost + len(known) - len(kept)
            for choice in combinations(known, min(capacity, len(known))):
                following[choice] = min(fetched, following.get(choice, fetched))
        costs = following
    return min(costs.values())


class Loader:
    """Goes over batches as a loader does, whose rows are the ids; at most ``window`` wait."""

    def __init__(self, rows: LookAheadRows, batches: list[np.ndarray], window: int) -> None:
        self.rows, self.batches, self.window = rows, batches, window
        self.announced, self.done, self.fetched, self.most_ahead = 0, 0, 0, 0
        assert rows.claim()
        rows.announce_more = self.announce_more

    def announce_more(self) -> bool:
        if self.announced == len(self.batches) or self.announced - self.done >= self.window:
            return False
        self.rows.announce(self.batches[self.announced])
        self.announced += 1
        self.most_ahead = max(self.most_ahead, self.announced - self.done)
        return True

    def step(self) -> None:
        assert self.announced > self.done or self.announce_more()
        ids = self.batches[self.done]
        plan = plan_remote(ids, BOUNDS, 0, self.rows.table, distinct=True)
        assert self.rows.rows[plan.hit_slots].tolist() == ids[plan.hit_positions].tolist()
        assert len(plan.hit_positions) + len(plan.ids) == np.count_nonzero(ids >= OWN[1])
        self.fetched += len(plan.ids)
        self.rows.admit(plan)(ids)
        self.done += 1

    def run(self) -> int:
        while self.done < len(self.batches):
            self.step()
        self.rows.release()
        return self.fetched


def draw_batches(random: np.random.Generator, num: int, most: int, nodes: int) -> list[np.ndarray]:
    """Batches of up to ``most`` distinct ids of ``nodes``, the first of them local."""
    return [random.permutation(nodes)[: random.integers(0, most + 1)] + OWN[1] - 1 for _ in range(num)]


@NUM_IDS
def test_no_choice_fetches_fewer(num_ids: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        batches = draw_batches(random, int(random.integers(1, 8)), 4, 8)
        remote = [[int(row) for row in batch if row >= OWN[1]] for batch in batches]
        for capacity in (0, 1, 3):
            loader = Loader(LookAheadRows(capacity, INFO, OWN, num_ids), batches, window=len(batches))
            assert loader.run() == least_fetched(remote, capacity), (capacity, batches)


@NUM_IDS
def test_rows_stay_for_the_next_loader_and_one_at_a_time_has_them(num_ids: int) -> None:
    rows, batch = LookAheadRows(4, INFO, OWN, num_ids), np.arange(3, 7)
    assert Loader(rows, [batch, batch[::-1]], window=1).run() == 4
    loader = Loader(rows, [batch, np.arange(5, 9)], window=2)
    assert not rows.claim()
    assert loader.run() == 2


@pytest.mark.parametrize("finished", [False, True])
@NUM_IDS
def test_rows_of_a_loader_that_ended_early_are_forgotten(finished: bool, num_ids: int) -> None:
    rows, batches = LookAheadRows(4, INFO, OWN, num_ids), [np.arange(3, 7), np.arange(5, 9)]
    loader = Loader(rows, batches, window=2)
    rows.announce(batches[0])
    if not finished:  # rows that have a slot and never arrive
        rows.admit(plan_remote(batches[0], BOUNDS, 0, rows.table, distinct=True))
    rows.release()
    del loader
    assert Loader(rows, batches, window=2).run() == 6


@NUM_IDS
def test_looks_no_further_than_the_choice_needs_and_memory_stays_bounded(num_ids: int) -> None:
    random = np.random.default_rng(1)
    batches = draw_batches(random, 300, 60, 100)
    far, near = (Loader(LookAheadRows(20, INFO, OWN, num_ids), batches, window=window) for window in (300, 2))
    fetched, sizes = far.run(), []
    assert far.most_ahead < 20
    for _ in range(len(batches)):
        near.step()
        sizes.append(near.rows.num_bytes)
    assert sizes[-1] == sizes[20] < 1 << 15
    assert fetched < near.fetched
    # Room for all: nothing has to be known of later batches.
    loader = Loader(LookAheadRows(100, INFO, OWN, num_ids), batches, window=300)
    assert loader.run() == len({int(row) for batch in batches for row in batch if row >= OWN[1]})
    assert loader.most_ahead == 1


class Answer:
    """The rows of a message, which are ten times their ids; ``late`` ones have not arrived."""

    def __init__(self, ids: np.ndarray, late: set[int]) -> None:
        self.ids, self.late = ids, late

    def is_ready(self) -> bool:
        return not self.late & set(self.ids.tolist())

    def result(self) -> list[np.ndarray]:
        return [10 * self.ids]


Sent = list[list[tuple[int, list[int]]]]


def pulls(info: ColumnInfo, batches: list[np.ndarray], late: set[int], sent: Sent) -> Iterator[Any]:
    """Pull batch after batch of servers 7, 8 and 9, at most two rows a message."""
    bounds, rows = np.array([0, 3, 10, 20]), LookAheadRows(0, info, OWN, 20)

    def ask(plan: RemotePlan) -> list[tuple[Any, int, int]]:
        pieces = plan.requests([7, 8, 9], 2)
        sent.append([(rank, plan.ids[first:last].tolist()) for rank, first, last in pieces])
        return [(Answer(plan.ids[first:last], late), first, last) for _, first, last in pieces]

    for ids in batches:
        rows.announce(ids)
    return (rows.pull(plan_remote(ids, bounds, 0, distinct=True), ask) for ids in batches)


def test_a_batch_does_not_wait_for_a_much_larger_one() -> None:
    sent: Sent = []
    wide = ColumnInfo(dtype="int64", row_shape=(1 << 17,))  # of which two make a request full
    batches = [np.array(item) for item in ([3], [4], [5, 6, 7])]
    assert len(list(pulls(wide, batches, {3}, sent))) == 3
    assert sent == [[(8, [3])], [(8, [4])], [(8, [5, 6]), (8, [7])]]


def test_pulls_share_sorted_messages_while_the_last_one_is_not_answered() -> None:
    sent: Sent = []
    late = {9}
    batches = [np.array(item, np.int64) for item in ([9, 1, 12], [15, 0, 4, 9], [2, 13, 9, 3], [], [11, 5])]
    requests = pulls(INFO, batches, late, sent)
    # Nothing was asked before the first.
    copies = [next(requests) for _ in range(3)]
    assert sent == [[(8, [9]), (9, [12])]]
    late.clear()
    copies.append(next(requests))
    assert sent[1:] == [[(8, [3, 4]), (8, [9, 9]), (9, [13, 15])]]
    late.add(4)
    copies.append(next(requests))
    assert len(sent) == 2
    results = [np.zeros(len(ids), np.int64) for ids in batches]
    for copy, out in zip(copies, results, strict=True):
        copy(out)
    # What is waited for leaves.
    assert sent[2:] == [[(8, [5]), (9, [11])]]
    assert [out.tolist() for out in results] == [[10 * id if id > 2 else 0 for id in ids] for ids in batches]
