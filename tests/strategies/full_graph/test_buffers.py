"""Memory that is kept between exchanges."""

from __future__ import annotations

import torch

from dglx_dist.strategies.full_graph.halo_exchange import ReusableBuffer, bytes_of


def test_memory_is_kept_and_grows_only() -> None:
    kept = ReusableBuffer()
    first = kept.take((3, 5), torch.float64)
    assert first.shape == (3, 5)
    assert first.is_contiguous()
    again = kept.take((7,), torch.bfloat16)
    assert again.data_ptr() == first.data_ptr()
    kept.take((4, 8), torch.float64)
    assert kept.take((0, 4), torch.int64).shape == (0, 4)
    assert kept.take((2, 0), torch.bool).shape == (2, 0)
    assert kept.take((), torch.float32).shape == ()


def test_bytes_are_a_view() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.zeros(2, 3, dtype=dtype)
        view = bytes_of(tensor)
        assert len(view) == 6 * dtype.itemsize
        view[0] = 1
        assert tensor.view(torch.uint8).reshape(-1)[0] == 1
    assert len(bytes_of(torch.zeros(0, 3))) == 0
