"""Mean and variance of rows whose columns lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dglx_dist.cluster.collectives import sum_over_ranks
from dglx_dist.cluster.session import Session
from dglx_dist.graph.dtypes import tensor_view
from dglx_dist.records import Array, ColumnInfo

Moments: TypeAlias = tuple[Tensor, Tensor]
"""(mean, biased variance), (V,) float64 each."""

CHUNK_VALUES = 1 << 20
"""So many values are seen as float64 at a time."""


def moments_of_rows(
    slices: Sequence[tuple[Array, ColumnInfo]], num_rows: int, width: int, session: Session, phase: str
) -> Moments:
    """Return mean and variance of every row, in two passes: sums first, then squares of what differs.

    Every rank must call it; the two sums over the ranks are 8 bytes a row each.

    Args:
        slices: (V, F_p) columns of the rows that only this rank adds, and their dtype; there may be none.
        num_rows: V.
        width: Columns of all ranks together, at least 1.
        session: The run.
        phase: For the ledger.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    mean = _sums(slices, num_rows, lambda values, _: values)
    sum_over_ranks(mean, session, phase=phase, in_place=True).div_(width)
    variance = _sums(slices, num_rows, lambda values, rows: (values - mean[rows, None]).square_())
    sum_over_ranks(variance, session, phase=phase, in_place=True).div_(width)
    return mean, variance


def _sums(
    slices: Sequence[tuple[Array, ColumnInfo]], num_rows: int, what: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Return (V,) sums over the columns of ``what`` makes of float64 values (k, F_p) of the rows given."""
    sums = torch.zeros(num_rows, dtype=torch.float64)
    for rows, info in slices:
        step = max(1, CHUNK_VALUES // max(1, rows.shape[1]))
        for first in range(0, num_rows, step):
            chunk = slice(first, min(first + step, num_rows))
            values = tensor_view(rows[chunk].copy(), info).to(torch.float64)
            sums[chunk] += what(values, chunk).sum(1)
    return sums
