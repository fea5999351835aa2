"""Mean and variance are those of the rows, also where squares would swallow what differs."""

from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import Session, start_session
from dglx_dist.records import ColumnInfo
from dglx_dist.strategies.push_pull import feature_columns as moments
from dglx_dist.strategies.push_pull.feature_columns import moments_of_rows


@pytest.fixture
def session() -> Any:
    with start_session(timeout_s=30) as opened:
        yield opened


def test_by_hand(session: Session) -> None:
    one = np.array([[1, 2], [5, 5]], np.float32)
    bits = np.array([[0x4040], [0x40A0]], np.uint16)  # 3 and 5 in bfloat16
    slices = [
        (one, ColumnInfo(dtype="float32", row_shape=(2,))),
        (bits, ColumnInfo(dtype="bfloat16", row_shape=(1,))),
    ]
    mean, variance = moments_of_rows(slices, 2, 3, session, "columns")
    assert mean.tolist() == [2.0, 5.0]
    assert variance.tolist() == [2 / 3, 0.0]


def test_a_large_mean_hides_no_variance(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CHUNK_VALUES", 8)
    rows = 1e9 + np.tile(np.array([-1.0, 1.0]), (7, 4))
    mean, variance = moments_of_rows(
        [(rows, ColumnInfo(dtype="float64", row_shape=(8,)))], 7, 8, session, "columns"
    )
    assert mean.tolist() == [1e9] * 7
    assert variance.tolist() == [1.0] * 7


def test_no_rows_and_no_columns(session: Session) -> None:
    none = (np.empty((2, 0), np.float32), ColumnInfo(dtype="float32", row_shape=(0,)))
    mean, variance = moments_of_rows([none], 2, 4, session, "columns")
    assert mean.dtype == variance.dtype == torch.float64
    assert mean.tolist() == variance.tolist() == [0.0, 0.0]
    assert moments_of_rows([], 0, 4, session, "columns")[0].shape == (0,)
