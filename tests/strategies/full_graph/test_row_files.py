"""Rows that are kept on disk: found again by column and ids, mapped, checked; and who reads them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dglx_dist.data.storage.files import STAMP
from dglx_dist.dataloading.feature_fetch import Columns
from dglx_dist.graph.column import Column
from dglx_dist.graph.row_kernels import column_info
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array
from dglx_dist.strategies.full_graph import halo_plan
from dglx_dist.strategies.full_graph.halo_plan import ROWS, RowFiles
from dglx_dist.strategies.full_graph.loader import ColumnReader
from tests.data.storage.graphs import flip, flipped_bits
from tests.strategies.full_graph.test_plan_files import a_plan

IDS = np.array([5, 2, 40])


def column(dtype: torch.dtype = torch.float32, name: str = "feat", writable: bool = False) -> Column:
    """Rows of two numbers; server 0 owns 0..9, server 1 the others."""
    return Column(
        name=name,
        info=column_info(dtype, (2,)),
        bounds=np.array([0, 10, 100]),
        shards=(),
        writable=writable,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_rows_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    files, rows = RowFiles(tmp_path, 0), torch.tensor([[0, 1], [1, 0], [3, 4]]).to(dtype)
    assert files.read(column(dtype), IDS) is None
    assert files.write(column(dtype), IDS, rows)
    found = RowFiles(tmp_path, 0).read(column(dtype), IDS)
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found, rows)
    found.zero_()
    again = files.read(column(dtype), IDS)
    assert again is not None
    assert torch.equal(again, rows)


def test_others_are_not_found(tmp_path: Path) -> None:
    files = RowFiles(tmp_path, 0)
    files.write(column(), IDS, torch.zeros(3, 2))
    assert files.read(column(), IDS[[1, 0, 2]]) is None
    assert files.read(column(), IDS[:2]) is None
    assert files.read(column(name="other"), IDS) is None
    assert files.read(column(torch.float64), IDS) is None


def test_only_what_comes_from_elsewhere_and_stays_is_worth_it(tmp_path: Path) -> None:
    files = RowFiles(tmp_path, 0)
    assert files.takes(column(), IDS)
    assert not files.takes(column(), IDS[:2])
    assert not files.takes(column(), IDS[:0])
    assert RowFiles(tmp_path, 1).takes(column(), IDS)
    assert not files.takes(column(writable=True), IDS)


def test_a_damaged_file_is_told_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = RowFiles(tmp_path, 0)
    files.write(column(), IDS, torch.ones(3, 2))
    (kept,) = tmp_path.glob(f"*/{ROWS}")
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    for damaged in (bytes(content), bytes(content[:-8]), b""):
        kept.write_bytes(damaged)
        assert files.read(column(), IDS) is None
        assert "damaged" in caplog.text
        caplog.clear()
    assert files.write(column(), IDS, torch.ones(3, 2))
    assert files.read(column(), IDS) is not None


@pytest.mark.parametrize("name", [ROWS, STAMP])
def test_a_flipped_bit_is_told(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    files = RowFiles(tmp_path, 0)
    files.write(column(), IDS, torch.ones(3, 2))
    (kept,) = tmp_path.glob(f"*/{name}")
    for times, at in enumerate(flipped_bits(kept, every=3), 1):
        assert files.read(column(), IDS) is None
        assert caplog.text.count("damaged") == times
        flip(kept, at, at % 8)
    assert files.read(column(), IDS) is not None


class Store:
    """Row i of a column is (i, i), and every pull is noted."""

    def __init__(self) -> None:
        self.pulled: list[tuple[str, list[int]]] = []

    def column(self, name: str) -> Column:
        return column(name=name)

    def submit_pull(self, name: str, ids: Array, **_: Any) -> Any:
        self.pulled.append((name, ids.tolist()))
        rows = torch.from_numpy(ids).float()[:, None].expand(-1, 2).contiguous()
        return type("Pull", (), {"result": lambda _: rows})()


def columns_of(store: Store, files: RowFiles | None) -> list[Tensor]:
    graph: Any = type("Graph", (), {"kvstore": store})()
    columns = Columns(
        inputs={NODE_TYPE: {"x": "feat"}},
        targets={NODE_TYPE: {"y": "label"}},
        edges={EDGE_TYPE: {"w": "weight"}},
    )
    read = ColumnReader(graph, columns, files).read(a_plan())
    return [read.inputs["x"], read.targets["y"], *(edges["w"] for edges in read.edges)]


def test_a_plans_columns_are_fetched_once_where_some_rows_are_foreign(tmp_path: Path) -> None:
    """Nodes 5, 2, 9 and the one seed are server 0's own; edges 10, 11 and 17 of layer 1 are not."""
    store, files = Store(), RowFiles(tmp_path, 0)
    first = columns_of(store, files)
    local = [("feat", [5, 2, 9]), ("label", [5])]
    assert sorted(store.pulled) == sorted([*local, ("weight", [10, 11, 17])])
    store.pulled.clear()
    for one, other in zip(first, columns_of(store, files), strict=True):
        assert torch.equal(one, other)
    assert sorted(store.pulled) == sorted(local)
    # For server 1 the nodes are foreign, and they are kept too.
    elsewhere = RowFiles(tmp_path / "other", 1)
    columns_of(store, elsewhere)
    store.pulled.clear()
    columns_of(store, elsewhere)
    assert store.pulled == [("weight", [10, 11, 17])]


def test_without_room_rows_are_fetched_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(halo_plan.np, "save", full)
    store, files = Store(), RowFiles(tmp_path, 0)
    for _ in range(2):
        columns_of(store, files)
    assert store.pulled.count(("weight", [10, 11, 17])) == 2
    # Told once, not for each of the many rows of many epochs.
    assert caplog.text.count("the fetched rows of 'weight' is not kept on disk") == 1
    assert caplog.text.count("is not kept on disk") == 1
    assert not list(tmp_path.rglob("*.partial"))
