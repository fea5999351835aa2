"""Rows of a server dealt to its ranks."""

from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import UnknownNameError
from dglx_dist.strategies.full_graph.expansion import (
    TOLERANCE,
    KHopNeighborhood,
    check_split,
    split_rows,
    work_of_groups,
)


def random_closure(num_rows: int = 400, counts: tuple[int, ...] = (400, 300, 200, 100)) -> KHopNeighborhood:
    """Rows that read six others each, mostly near ones."""
    random = np.random.default_rng(2)
    near = np.arange(counts[1])[:, None] + random.integers(-9, 10, size=(counts[1], 6))
    return KHopNeighborhood(
        nodes=np.arange(num_rows) * 3,
        counts=np.array(counts),
        indptr=np.arange(counts[1] + 1) * 6,
        sources=(np.clip(near, 0, num_rows - 1) * 3).reshape(-1),
        edge_ids=np.arange(counts[1] * 6),
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_work_of_each_layer_is_balanced(num_ranks: int) -> None:
    closure = random_closure()
    rank_of = split_rows(closure, num_ranks, "auto", seed=1)
    assert rank_of.dtype == np.int32
    for weights in work_of_groups(closure).values():
        loads = np.bincount(rank_of, weights=weights, minlength=num_ranks)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + weights.max()
    assert np.array_equal(rank_of, split_rows(closure, num_ranks, "auto", seed=1))


def test_a_partitioner_of_one_weight_balances_the_sum_of_the_layers() -> None:
    closure = random_closure()
    for method in ("contiguous", "kaminpar"):
        loads = np.bincount(split_rows(closure, 2, method, seed=1), weights=closure.work)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + closure.work.max()
    assert set(split_rows(closure, 3, "random", seed=1).tolist()) == {0, 1, 2}


def test_groups_of_layers_add_up_to_the_work() -> None:
    for counts in ((9, 9, 9), (9, 5, 5, 2), (9, 8, 7, 6, 5, 4, 3, 2), (9, 6, 0)):
        closure = random_closure(9, counts)
        groups = work_of_groups(closure)
        assert len(groups) == min(len(set(counts[1:])), 4)
        assert np.array_equal(sum(groups.values()), closure.work)


def test_few_rows_no_rows_and_no_edges() -> None:
    assert split_rows(random_closure(0, (0, 0)), 2, "auto", seed=0).tolist() == []
    assert split_rows(random_closure(), 1, "auto", seed=0).max() == 0
    assert sorted(split_rows(random_closure(2, (2, 1)), 3, "auto", seed=0).tolist()) == [0, 1]
    alone = KHopNeighborhood(
        nodes=np.arange(4),
        counts=np.array([4, 4]),
        indptr=np.zeros(5, np.int64),
        sources=np.empty(0, np.int64),
        edge_ids=np.empty(0, np.int64),
    )
    assert np.bincount(split_rows(alone, 2, "auto", seed=0)).tolist() == [2, 2]


def test_unknown_partitioners_are_refused() -> None:
    assert check_split("auto") == "metis"
    with pytest.raises(UnknownNameError, match="kaminpar"):
        check_split("kaminpa")
