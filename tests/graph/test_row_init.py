from __future__ import annotations

import pytest
import torch

from dglx_dist.graph import embedding as row_init
from dglx_dist.graph.embedding import fill_uniform


def filled(first: int, count: int, dtype: torch.dtype = torch.float32, name: str = "e") -> torch.Tensor:
    rows = torch.empty(count, 3, dtype=dtype)
    fill_uniform(rows, first, 5, name)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_row_is_the_same_whoever_makes_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled(0, 50, dtype)
    assert torch.equal(torch.cat([filled(0, 7, dtype), filled(7, 0, dtype), filled(7, 43, dtype)]), whole)
    assert torch.equal(whole, filled(0, 50).to(dtype))
    # Four rows at a time: short rows are made through a buffer.
    monkeypatch.setattr(row_init, "_CHUNK_BYTES", 4 * 4 * 3)
    assert torch.equal(filled(0, 50, dtype), whole)


def test_draws_are_uniform_and_streams_are_told_apart_by_name() -> None:
    rows = filled(0, 20_000).double()
    assert -1.0 <= float(rows.min()) < -0.999
    assert 0.999 < float(rows.max()) < 1.0
    assert abs(float(rows.mean())) < 4 / (3 * 60_000) ** 0.5
    assert not torch.equal(filled(0, 4), filled(0, 4, name="other"))
