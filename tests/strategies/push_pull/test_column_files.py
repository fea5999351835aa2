"""A slice's file is whole or not there, found again, and made anew when it is damaged."""

import logging
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.data.storage.files import STAMP, partial_folder
from dglx_dist.data.storage.reader import StoredDataset, open_dataset
from dglx_dist.layers.dropout import deal_out_columns
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.records import NODE_TYPE, Array, ColumnInfo
from dglx_dist.strategies.push_pull import feature_columns as column_files
from dglx_dist.strategies.push_pull.feature_columns import (
    VALUES,
    SliceWriter,
    publish_slice,
    read_slice,
    slice_folder,
    write_slices,
)
from tests.data.storage.graphs import flipped_bits, random_heterogeneous, random_homogeneous

INFO = ColumnInfo(dtype="float32", row_shape=(3,))
ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


def write(target: Path, rows: Array = ROWS) -> None:
    with partial_folder(target) as partial:
        writer = SliceWriter(partial, INFO, len(rows))
        writer.append(rows[:4])
        assert np.array_equal(writer.written(), rows[:4])
        writer.append(rows[4:4])
        writer.append(rows[4:])
        writer.finish()
        writer.close()
        publish_slice(partial, target, INFO, len(rows))


def test_what_is_written_is_mapped(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    assert read_slice(target, INFO, 10) is None
    write(target)
    found = read_slice(target, INFO, 10)
    assert found is not None
    assert np.array_equal(found, ROWS)
    assert (found.flags.writeable, found.flags.owndata, found.flags.c_contiguous) == (False, False, True)
    assert [path.name for path in target.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_file_of_something_else_is_not_taken(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "x")
    rows = 11 if dtype == "float32" else 10
    assert read_slice(tmp_path / "x", ColumnInfo(dtype=dtype, row_shape=(3,)), rows) is None


@pytest.mark.parametrize("damage", ["flip", "shorten", "no values", "stamp", "other stamp", "empty stamp"])
def test_damage_is_seen_and_mended(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "x"
    write(target)
    values, stamp = target / VALUES, target / STAMP
    raw = bytearray(values.read_bytes())
    if damage == "flip":
        raw[-5] ^= 1
        values.write_bytes(raw)
    elif damage == "shorten":
        values.write_bytes(raw[:-4])
    elif damage == "no values":
        values.unlink()
    else:
        stamp.write_text({"stamp": "{", "other stamp": "[1]", "empty stamp": "{}"}[damage])
    with caplog.at_level(logging.WARNING):
        assert read_slice(target, INFO, 10) is None
    assert "is damaged" in caplog.text
    write(target)
    assert np.array_equal(read_slice(target, INFO, 10), ROWS)  # type: ignore[arg-type]  # there again
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("name", [VALUES, STAMP])
def test_a_flipped_bit_is_told_once_and_mended(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "x")
    for _ in flipped_bits(tmp_path / "x" / name, every=5):
        caplog.clear()
        assert read_slice(tmp_path / "x", INFO, 10) is None
        write(tmp_path / "x")
        assert caplog.text.count("damaged") == 1
    assert np.array_equal(read_slice(tmp_path / "x", INFO, 10), ROWS)  # type: ignore[arg-type]  # there again


def test_a_full_disk_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(119))
    with pytest.raises(OSError, match="no room for 120 bytes"):
        SliceWriter(tmp_path, INFO, 10)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [False, True])
def test_of_several_at_once_the_first_wins(tmp_path: Path, damaged: bool) -> None:
    target = tmp_path / "x"
    if damaged:
        write(target)
        (target / VALUES).write_bytes(b"nothing")
    start, found = threading.Barrier(4), []

    def one() -> None:
        start.wait(10)
        write(target)
        found.append(read_slice(target, INFO, 10))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert all(rows is not None and np.array_equal(rows, ROWS) for rows in found)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def whole(dataset: StoredDataset, name: str) -> Array:
    parts = range(dataset.manifest.num_parts)
    return np.concatenate([dataset.part(part).node_data(NODE_TYPE, name) for part in parts])


@pytest.mark.parametrize("width", [1, 3, 7])
def test_feature_partitioning_writes_the_columns_of_each_part(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of two rows: what is in memory at a time does not depend on how many there are.
    monkeypatch.setattr(column_files, "CHUNK_BYTES", 2 * 4 * width)
    partition_to_disk(
        random_homogeneous(0, width=width), tmp_path / "d", PartitionPlan(num_parts=3, method="feature")
    )
    dataset = open_dataset(tmp_path / "d")
    for columns in deal_out_columns(width, 3):
        folder = slice_folder(dataset, NODE_TYPE, "feat", columns)
        assert folder.exists() is (len(columns) > 0)
        if folder.exists():
            info = ColumnInfo(dtype="float32", row_shape=(len(columns),))
            found = read_slice(folder, info, 40)
            assert found is not None
            assert np.array_equal(found, whole(dataset, "feat")[:, columns.cut])
    base = tmp_path / "d" / "cache" / f"columns-{dataset.manifest.checksum}" / NODE_TYPE
    assert [path.name for path in base.iterdir()] == ["feat"]
    assert len(list((base / "feat").iterdir())) == min(width, 3)


def test_other_partitions_have_no_columns(tmp_path: Path) -> None:
    partition_to_disk(random_homogeneous(0), tmp_path / "d", PartitionPlan(num_parts=3, method="hash"))
    partition_to_disk(random_homogeneous(0), tmp_path / "e", PartitionPlan(num_parts=1, method="feature"))
    partition_to_disk(random_heterogeneous(0), tmp_path / "f", PartitionPlan(num_parts=2, method="feature"))
    assert not list(tmp_path.glob("*/cache/columns-*"))


def test_a_dataset_whose_columns_find_no_room_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0))
    partition_to_disk(random_homogeneous(0), tmp_path / "d", PartitionPlan(num_parts=2, method="feature"))
    assert "the dataset is whole without them" in caplog.text
    dataset = open_dataset(tmp_path / "d", verify="full")
    assert not [path for path in (tmp_path / "d").rglob("*") if path.name.endswith((".partial", VALUES))]
    monkeypatch.undo()
    write_slices(dataset, 2)
    assert len(list((tmp_path / "d").rglob(VALUES))) == 2
