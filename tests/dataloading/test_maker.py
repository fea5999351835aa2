import dataclasses

import numpy as np
import pytest
import torch

from dglx_dist.dataloading.kernels import Workspace
from dglx_dist.dataloading.minibatch import Draws, LocalColumn, LocalSlicer, Workspaces, ids_by_type
from dglx_dist.dataloading.sampler import WholeSource
from tests.dataloading.graphs import random_csc

CSC = random_csc(100, 5)
DRAWS = Draws(fanouts=(2, 3), replace=False, exclude=np.empty(0, np.int64), seed=1, idtype=np.dtype(np.int64))


def test_hops_start_at_the_seeds_and_have_keys_of_their_own() -> None:
    request = DRAWS.request(np.array([4]), 0)
    assert request.fanouts.tolist() == [3, 2]
    keys = {int(key) for epoch in range(3) for key in DRAWS.request(np.array([4]), epoch).streams}
    assert len(keys) == 6


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (np.arange(300, dtype=np.float32).reshape(100, 3), torch.float32),
        (np.arange(100, dtype=np.int64), torch.int64),
        (np.arange(100) % 2 == 0, torch.bool),
        (np.arange(400, dtype=np.uint16).reshape(100, 2, 2), torch.bfloat16),
    ],
    ids=["float32", "scalar", "bool", "bfloat16"],
)
def test_local_columns_of_any_dtype_and_shape(rows: np.ndarray, dtype: torch.dtype) -> None:
    slicer = LocalSlicer(WholeSource(CSC), LocalColumn(name="x", rows=rows, dtype=dtype), num_batches=2)
    for seed in (0, 5, 9):
        batch, ready = slicer.sample(DRAWS.request(np.array([seed]), 0), Workspace(100))
        expected = torch.from_numpy(rows[batch.nodes])
        assert ready["x"].dtype == dtype
        assert torch.equal(ready["x"].view(expected.dtype), expected)


def test_what_a_batch_leaves_out_is_told_apart_from_what_is_always_left_out() -> None:
    draws = dataclasses.replace(DRAWS, exclude=np.array([3, 9]))
    request = draws.request(np.array([4]), 0, np.array([5, 9]))
    assert request.rule.exclude.tolist() == [3, 5, 9]
    assert request.batch_exclude.tolist() == [5, 9]
    assert draws.request(np.array([4]), 0).rule.exclude.tolist() == [3, 9]


def test_workspaces_are_lent_to_one_borrower_at_a_time_and_used_again() -> None:
    workspaces = Workspaces(10)
    with workspaces.borrowed() as one, workspaces.borrowed() as other:
        assert one is not other
    with workspaces.borrowed() as again:
        assert again in (one, other)


def test_ids_come_without_a_dict_where_there_is_one_type() -> None:
    ids = torch.tensor([1])
    assert ids_by_type({"_N": ids}) is ids
    assert ids_by_type({"a": ids, "b": ids}) == {"a": ids, "b": ids}
