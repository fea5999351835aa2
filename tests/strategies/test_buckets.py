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
