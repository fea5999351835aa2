"""Parts that are here or not, unknown names and versions; damaged bytes and wrong ids name the file, once."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.data.storage import columns
from dglx_dist.data.storage import reader as verify
from dglx_dist.data.storage.columns import write_column
from dglx_dist.data.storage.manifest import read_manifest, write_manifest
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, DatasetError, StorageError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, ColumnInfo
from tests.data.storage.graphs import (
    FOLLOWS,
    ODD_ONES_OUT,
    RATES,
    TWO_TRIANGLES,
    flipped_bits,
    put_value,
    random_heterogeneous,
    random_owners,
    store,
)
from tests.helpers import wide


def test_arrays_are_read_only_maps(tmp_path: Path) -> None:
    part = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d").part(0)
    for array in (part.node_data(NODE_TYPE, "feat"), part.indices(EDGE_TYPE), part.indptr(EDGE_TYPE)):
        assert not array.flags.owndata
        with pytest.raises(ValueError, match=r"read-only"):
            array[0] = 0
    assert part.indices(EDGE_TYPE).dtype == np.int32
    assert part.indices(EDGE_TYPE) is part.indices(EDGE_TYPE)


def test_a_part_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    shutil.rmtree(folder / "part1")
    dataset = open_dataset(folder, verify="full")
    assert (dataset.has_part(0), dataset.has_part(1)) == (True, False)
    assert dataset.part(0).num_nodes(NODE_TYPE) == 3
    with pytest.raises(StorageError, match=r"part 1 .* part1/nodes/_N/original_ids\.arrow.* copy"):
        dataset.part(1)


def test_one_missing_file_makes_a_part_missing(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    (folder / "part0/nodes/_N/data/label.arrow").unlink()
    dataset = open_dataset(folder)
    assert not dataset.has_part(0)
    with pytest.raises(StorageError, match=r"label\.arrow missing"):
        dataset.part(0)


@pytest.mark.parametrize("part", [-1, 2])
def test_there_is_no_such_part(tmp_path: Path, part: int) -> None:
    dataset = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    with pytest.raises(ConfigError, match=rf"parts 0\.\.1, not {part}"):
        dataset.part(part)


def test_unknown_names_list_what_exists(tmp_path: Path) -> None:
    part = store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d").part(0)
    with pytest.raises(ConfigError, match=r"'features' .*known: 'feat', 'label', 'train_mask'"):
        part.node_data(NODE_TYPE, "features")
    with pytest.raises(ConfigError, match=r"node type 'user' .*known: '_N'"):
        part.original_node_ids("user")
    with pytest.raises(ConfigError, match=r"edge type .*'rates'"):
        part.indices(RATES)
    with pytest.raises(ConfigError, match=r"known: 'weight'"):
        part.edge_data(EDGE_TYPE, "w")


def test_an_unknown_way_to_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'maybe'"):
        open_dataset(tmp_path, verify="maybe")  # type: ignore[arg-type]  # the point of the test


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2, "more": 1}))
    with pytest.raises(StorageError, match=r"manifest\.json is of format version 2.* up to version 1;"):
        open_dataset(folder)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "d"
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    open_dataset(folder)
    return folder


def stored_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("how", ["auto", *wide("full")])
def test_one_flipped_byte_anywhere_is_found(stored: Path, how: verify.Verify, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(stored_files(stored)))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        with pytest.raises(StorageError) as caught:
            open_dataset(stored, verify=how)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(content)
    open_dataset(stored, verify=how)


def test_a_shortened_file_is_found(stored: Path) -> None:
    path = stored / "part0/nodes/_N/data/feat.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    try:
        with pytest.raises(StorageError, match=r"feat\.arrow has \d+ bytes instead of"):
            open_dataset(stored)
    finally:
        path.write_bytes(content)


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to verify them."""
    names: list[str] = []
    real = columns.checksum

    def recording(path: Path) -> object:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(columns, "checksum", recording)
    return names


def test_only_a_changed_file_is_read_again(tmp_path: Path, read_files: list[str]) -> None:
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    open_dataset(tmp_path / "d")
    read_files.clear()
    path = tmp_path / "d/part1/nodes/_N/data/label.arrow"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    open_dataset(tmp_path / "d")
    assert read_files == ["label.arrow"]


def test_a_damaged_stamp_only_costs_time(tmp_path: Path, read_files: list[str]) -> None:
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    open_dataset(tmp_path / "d")
    (tmp_path / "d/cache/verified.json").write_text("[")
    open_dataset(tmp_path / "d")
    assert len(read_files) == 2 * len(manifest.files)
    for _ in flipped_bits(tmp_path / "d/cache/verified.json", every=29):
        read_files.clear()
        open_dataset(tmp_path / "d")
        assert read_files


def test_a_folder_that_cannot_be_written_is_read_each_time(
    tmp_path: Path, read_files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    # A file where the cache folder would be stops root too, whom permissions do not.
    (tmp_path / "d/cache").write_text("")
    with caplog.at_level(logging.WARNING):
        open_dataset(tmp_path / "d")
        open_dataset(tmp_path / "d")
    assert len(read_files) == 2 * len(manifest.files)
    assert "reads all its files" in caplog.text


EDGES = "part1/edges/_N._E._N"
# Part 1 has the indptr [0, 1, 3, 4] of 4 edges; there are 6 nodes and 7 edges.
WRONG_IDS = [
    (f"{EDGES}/indices.arrow", 2, 6),
    (f"{EDGES}/indices.arrow", 0, -1),
    (f"{EDGES}/indices.arrow", 1, 2**31 - 1),
    (f"{EDGES}/original_ids.arrow", 1, 7),
    (f"{EDGES}/original_ids.arrow", 1, -(2**63)),
    (f"{EDGES}/indptr.arrow", 0, 1),
    (f"{EDGES}/indptr.arrow", 1, 2**40),
    (f"{EDGES}/indptr.arrow", 1, -1),
    (f"{EDGES}/indptr.arrow", 2, 0),
    (f"{EDGES}/indptr.arrow", 3, 3),
    ("part1/nodes/_N/original_ids.arrow", 2, 6),
    ("part1/nodes/_N/original_ids.arrow", 0, -1),
]


@pytest.mark.parametrize("how", ["auto", *wide("full")])
@pytest.mark.parametrize(("path", "at", "value"), WRONG_IDS)
def test_an_id_out_of_range_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, at: int, value: int, how: verify.Verify
) -> None:
    # Few at a time: neighbours are compared across the borders too.
    monkeypatch.setattr(verify, "_VALUES", 2)
    folder = tmp_path / "d"
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    open_dataset(folder)
    put_value(folder, path, at, value)
    for _ in range(2):
        with pytest.raises(DatasetError) as caught:
            open_dataset(folder, verify=how)
        said = f"{folder}: part 1 is wrong: in {path}, {Path(path).stem}[{at}] is {value}, expected "
        assert str(caught.value).startswith(said)
        assert "partition the graph again" in str(caught.value)


@pytest.mark.parametrize("etype", [RATES, FOLLOWS])
def test_ids_are_those_of_their_own_type(tmp_path: Path, etype: tuple[str, str, str]) -> None:
    graph, folder = random_heterogeneous(0), tmp_path / "d"
    write_dataset(graph, random_owners(graph, 2, 0), folder)
    path = f"part0/edges/{'.'.join(etype)}/indices.arrow"
    put_value(folder, path, 3, 19)
    open_dataset(folder)
    put_value(folder, path, 3, 20)
    with pytest.raises(DatasetError, match=re.escape(f"{path}, indices[3] is 20, expected 0 to 19 ('user'")):
        open_dataset(folder)


def test_an_array_that_holds_no_ids_is_named(tmp_path: Path) -> None:
    folder, path = tmp_path / "d", f"{EDGES}/indices.arrow"
    manifest = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    (folder / path).unlink()
    num_edges = int(np.diff(next(iter(manifest.edge_offsets.values())))[1])
    info = ColumnInfo(dtype="float32", row_shape=())
    file = write_column(folder / path, info, num_edges, [np.zeros(num_edges, np.float32)])
    write_manifest(replace(read_manifest(folder), files={**manifest.files, path: file}), folder)
    with pytest.raises(DatasetError, match=r"indices is float32 .* expected int32 or int64"):
        open_dataset(folder)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the arrays whose ids are compared with their ranges."""
    names: list[str] = []
    real = verify._check_ids

    def recording(folder: Path, path: str, *ranges: Any) -> None:
        names.append(path)
        real(folder, path, *ranges)

    monkeypatch.setattr(verify, "_check_ids", recording)
    return names


def test_whole_files_are_read_and_ids_compared_once(
    tmp_path: Path, compared: list[str], read_files: list[str]
) -> None:
    folder = tmp_path / "d"
    files = write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder).files
    arrays = sorted(path for path in files if "/data/" not in path and "user_ids" not in path)
    for how, times in (("never", 0), ("auto", 1), ("auto", 1), ("full", 2)):
        open_dataset(folder, verify=how)  # type: ignore[arg-type]
        assert (len(read_files), sorted(compared)) == (times * len(files), sorted(times * arrays))


def test_what_an_earlier_version_found_whole_is_compared_with_its_ranges(
    tmp_path: Path, compared: list[str], read_files: list[str]
) -> None:
    """Its stamps do not say that ids are in range, nor does another manifest's."""
    folder = tmp_path / "d"
    write_dataset(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    open_dataset(folder)
    stamps = folder / "cache/verified.json"
    stamps.write_text(json.dumps({path: one[:3] for path, one in json.loads(stamps.read_text()).items()}))
    compared.clear()
    read_files.clear()
    open_dataset(folder)
    assert len(compared) == len(read_files) == 8
    write_manifest(replace(read_manifest(folder), seed=8), folder)
    open_dataset(folder)
    assert len(compared) == len(read_files) == 16
