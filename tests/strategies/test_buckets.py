"""Four parameters of 3, 2, 4 and 1 numbers, float64."""

import torch
from torch import nn

from dglx_dist.strategies.gradient_sync import make_buckets

PARAMETERS = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (3, 2, 4, 1)]


def test_last_parameters_come_first_and_size_is_kept() -> None:
    buckets = make_buckets(PARAMETERS, 5 * 8)
    assert [bucket.indices for bucket in buckets] == [(3, 2), (1, 0)]
    # 5 gradients and 2 flags each.
    assert [bucket.flat.nbytes for bucket in buckets] == [7 * 8, 7 * 8]


def test_a_parameter_larger_than_a_bucket_is_alone() -> None:
    assert [bucket.indices for bucket in make_buckets(PARAMETERS, 8)] == [(3,), (2,), (1,), (0,)]


def test_dtypes_do_not_mix() -> None:
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    assert [bucket.indices for bucket in make_buckets(mixed, 1 << 20)] == [(1,), (0,)]


def test_no_parameters_need_no_bucket() -> None:
    assert make_buckets([], 1) == []


def test_weight_zero_turns_nan_into_unused_zero() -> None:
    (bucket,) = make_buckets(PARAMETERS[:2], 1 << 20)
    bucket.put(0, torch.full((3,), float("nan"), dtype=torch.float64), 0.0)
    assert not bucket.complete
    bucket.put(1, torch.tensor([2.0, 4.0], dtype=torch.float64), 0.5)
    assert bucket.complete
    assert bucket.views[0].tolist() == [0, 0, 0]
    assert bucket.views[1].tolist() == [1, 2]
    assert bucket.used() == {0: False, 1: True}
    bucket.clear()
    assert not bucket.complete
    assert bucket.views[1].tolist() == [0, 0]
    assert bucket.used() == {0: False, 1: False}
