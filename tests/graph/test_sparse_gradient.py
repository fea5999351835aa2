from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_gradient import Parcel, RowGradient, weight_of, weighted_copy, weighted_sum
from dglx_dist.records import StepShare

QUARTER, NONE = StepShare(num_local=1, num_global=4), StepShare(num_local=0, num_global=4)


def gradient(ids: list[int], value: float, share: StepShare | None) -> RowGradient:
    return RowGradient(ids=np.array(ids, np.int64), rows=np.full((len(ids), 1), value), share=share)


def test_a_mean_weighs_as_much_as_its_targets_and_a_sum_one() -> None:
    assert (weight_of(QUARTER, "mean", 2), weight_of(QUARTER, "sum", 2)) == (0.25, 1.0)
    assert (weight_of(NONE, "mean", 2), weight_of(NONE, "sum", 2)) == (0.0, 0.0)
    assert (weight_of(None, "mean", 1), weight_of(None, "sum", 2)) == (1.0, 1.0)
    with pytest.raises(ConfigError, match="cannot be weighted; take its ids"):
        weight_of(None, "mean", 2)


def test_calls_are_summed_by_row_each_with_its_own_weight() -> None:
    given = [gradient([7, 3], 8.0, QUARTER), gradient([3], float("nan"), NONE), gradient([5, 3], 1.0, None)]
    total = weighted_sum(given, "mean", 1)
    assert total is not None
    assert total.ids.tolist() == [3, 5, 7]
    assert total.rows.tolist() == [[3.0], [1.0], [2.0]]


def test_without_targets_there_is_no_gradient() -> None:
    assert weighted_sum([], "mean", 2) is None
    assert weighted_sum([gradient([3], 1.0, NONE)], "sum", 2) is None


def test_a_single_gradient_is_neither_copied_nor_changed() -> None:
    given = gradient([7, 3], 8.0, QUARTER)
    total = weighted_sum([given], "mean", 2)
    assert total is not None
    assert total.rows is given.rows
    assert (total.weight, given.rows.tolist()) == (0.25, [[8.0], [8.0]])


def test_what_is_sent_is_weighed_and_in_order() -> None:
    rows = np.array([[1.0], [2.0], [4.0]])
    sent = weighted_copy(Parcel(ids=np.array([9, 5]), rows=rows, places=np.array([2, 0]), weight=0.5))
    assert (sent.ids.tolist(), sent.rows.tolist()) == ([9, 5], [[2.0], [0.5]])
    assert (sent.places.tolist(), sent.weight) == ([0, 1], 1.0)
