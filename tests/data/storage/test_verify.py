"""Parts that are here or not, unknown names and versions; damaged bytes and wrong ids name the file, once."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dglx_dist.data.storage import columns
from dglx_dist.data.storage import reader as verify
from dglx_dist.data.storage.arrays import checksum_of
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


@pytest.fixture(scope="module")
def stored_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "d"
    store(TWO_TRIANGLES, ODD_ONES_OUT, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, stored_dataset: Path) -> Path:
    return Path(shutil.copytree(stored_dataset, tmp_path / "d", ignore=shutil.ignore_patterns("cache")))


def test_arrays_are_read_only_maps(stored_dataset: Path) -> None:
    part = open_dataset(stored_dataset).part(0)
    for array in (part.node_data(NODE_TYPE, "feat"), part.indices(EDGE_TYPE), part.indptr(EDGE_TYPE)):
        assert not array.flags.owndata
        with pytest.raises(ValueError, match=r"read-only"):
            array[0] = 0
    assert part.indices(EDGE_TYPE).dtype == np.int32
    assert part.indices(EDGE_TYPE) is part.indices(EDGE_TYPE)


def test_a_part_that_is_elsewhere_or_lacks_a_file_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "part1")
    dataset = open_dataset(folder, verify="full")
    assert (dataset.has_part(0), dataset.has_part(1)) == (True, False)
    assert len(dataset.part(0).original_node_ids(NODE_TYPE)) == 3
    with pytest.raises(StorageError, match=r"part 1 .* part1/nodes/_N/original_ids\.arrow.* copy"):
        dataset.part(1)
    (folder / "part0/nodes/_N/data/label.arrow").unlink()
    assert not open_dataset(folder).has_part(0)
    with pytest.raises(StorageError, match=r"label\.arrow missing"):
        open_dataset(folder).part(0)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda dataset: dataset.part(-1), r"parts 0\.\.1, not -1"),
        (lambda dataset: dataset.part(2), r"parts 0\.\.1, not 2"),
        (
            lambda dataset: dataset.part(0).node_data(NODE_TYPE, "features"),
            "'features' .*known: 'feat', 'label', 'train_mask'",
        ),
        (lambda dataset: dataset.part(0).original_node_ids("user"), "node type 'user' .*known: '_N'"),
        (lambda dataset: dataset.part(0).indices(RATES), "edge type .*'rates'"),
        (lambda dataset: dataset.part(0).edge_data(EDGE_TYPE, "w"), "known: 'weight'"),
        (lambda dataset: open_dataset(dataset.folder, verify="maybe"), "'maybe'"),
    ],
)
def test_unknown_names_list_others(stored_dataset: Path, read: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(open_dataset(stored_dataset))


def test_a_newer_format_says_so(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2, "more": 1}))
    with pytest.raises(StorageError, match=r"manifest\.json has format version 2.* up to version 1;"):
        open_dataset(folder)


def stored_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("how", ["auto", *wide("full")])
def test_finds_any_flipped_byte(stored_dataset: Path, how: verify.Verify, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(stored_files(stored_dataset)))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        with pytest.raises(StorageError) as caught:
            open_dataset(stored_dataset, verify=how)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(content)
    open_dataset(stored_dataset, verify=how)


def test_a_shortened_file_is_found(folder: Path) -> None:
    path = folder / "part0/nodes/_N/data/feat.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"feat\.arrow has \d+ bytes instead of"):
        open_dataset(folder)


def record_paths(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, path_at: int) -> list[str]:
    paths: list[str] = []
    real = getattr(module, name)

    def recording(*arguments: Any) -> object:
        paths.append(str(arguments[path_at]))
        return real(*arguments)

    monkeypatch.setattr(module, name, recording)
    return paths


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_paths(monkeypatch, columns, "checksum", 0)


@pytest.fixture
def compared_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_paths(monkeypatch, verify, "_check_values", 1)


def test_only_a_changed_file_is_read_again(folder: Path, read_files: list[str]) -> None:
    open_dataset(folder)
    read_files.clear()
    path = folder / "part1/nodes/_N/data/label.arrow"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    open_dataset(folder)
    assert read_files == [str(path)]


def test_a_damaged_stamp_only_costs_time(folder: Path, read_files: list[str]) -> None:
    num_files, stamps = len(stored_files(folder)) - 1, folder / "cache/verified.json"
    open_dataset(folder)
    stamps.write_text("[")
    open_dataset(folder)
    assert len(read_files) == 2 * num_files
    for _ in flipped_bits(stamps, every=29):
        read_files.clear()
        open_dataset(folder)
        assert read_files


def test_a_folder_that_cannot_be_written_is_read_each_time(
    folder: Path, read_files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    # A file where the cache folder would be stops root too, whom permissions do not.
    (folder / "cache").write_text("")
    open_dataset(folder)
    open_dataset(folder)
    assert len(read_files) == 2 * (len(stored_files(folder)) - 1)
    assert "reads all its files" in caplog.text


def renew(folder: Path, path: str, file: columns.FileInfo) -> None:
    manifest = read_manifest(folder)
    write_manifest(replace(manifest, files={**manifest.files, path: file}), folder)


def rewrite(folder: Path, path: str, info: ColumnInfo, values: Any) -> None:
    (folder / path).unlink()
    renew(folder, path, write_column(folder / path, info, len(values), [values]))


EDGES = "part1/edges/_N._E._N"
# Part 1 has the indptr [0, 1, 3, 4] of 4 edges; there are 6 nodes and 7 edges.
WRONG_IDS = [
    (f"{EDGES}/indices.arrow", 2, 6),
    ("part1/nodes/_N/data/label.arrow", 1, 3),
    ("part1/nodes/_N/data/label.arrow", 2, 2**62),
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
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, at: int, value: int, how: verify.Verify
) -> None:
    # Few at a time: neighbours are compared across the borders too.
    monkeypatch.setattr(verify, "_VALUES", 2)
    open_dataset(folder)
    put_value(folder, path, at, value)
    for _ in range(2):
        with pytest.raises(DatasetError) as caught:
            open_dataset(folder, verify=how)
        message = f"{folder}: part 1 is wrong: in {path}, {Path(path).stem}[{at}] is {value}, expected "
        assert str(caught.value).startswith(message)
        assert "partition the graph again" in str(caught.value)


def test_a_mask_holds_booleans_only(folder: Path) -> None:
    path = "part1/nodes/_N/data/train_mask.arrow"
    rewrite(folder, path, ColumnInfo(dtype="bool", row_shape=()), np.array([1, 2, 0], np.uint8))
    with pytest.raises(DatasetError, match=r"train_mask\.arrow, train_mask\[1\] is 2, expected 0 to 1"):
        open_dataset(folder)


def test_offsets_of_texts_are_checked(folder: Path) -> None:
    path = "part1/nodes/_N/user_ids.arrow"
    file = folder / path
    # Offsets 0, 1, 2, 9 of "b", "d", "längst"; Arrow itself reads wherever they lead.
    damaged = file.read_bytes().replace(
        np.array([0, 1, 2, 9]).tobytes(), np.array([0, 1, 2**40, 9]).tobytes()
    )
    file.write_bytes(damaged)
    renew(folder, path, columns.checksum(file))
    with pytest.raises(StorageError, match=r"user_ids\.arrow .*is damaged"):
        open_dataset(folder, verify="full").part(1).user_ids(NODE_TYPE)


def test_stamps_that_came_with_a_dataset_are_not_believed(folder: Path, read_files: list[str]) -> None:
    path = folder / f"{EDGES}/indices.arrow"
    open_dataset(folder)
    times = path.stat()
    put_value(folder, f"{EDGES}/indices.arrow", 0, 6)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    stamps, manifest = folder / "cache/verified.json", read_manifest(folder)
    files = json.loads(stamps.read_text())["files"]
    for name, stamp in files.items():
        stamp[3:] = [manifest.files[name].checksum, *[manifest.checksum] * (len(stamp) > 4)]
    stamps.write_text(json.dumps({"crc32": checksum_of(files), "files": files}))
    with pytest.raises(DatasetError, match=r"indices\[0\] is 6"):
        open_dataset(folder)


def test_a_copy_of_the_structure_is_not_believed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = open_dataset(folder)
    right = verify.open_structure(dataset, EDGE_TYPE)
    copy = dataset.cache.entry("structure", "_N._E._N")
    for name, at, value in (("indices", 3, 6), ("indices", 0, -1), ("indptr", 2, 99)):
        facts, arrays = copy.read()
        wrong = {key: array.copy() for key, array in arrays.items()}
        wrong[name][at] = value
        copy.save(wrong, facts, "it")
        caplog.clear()
        structure = verify.open_structure(open_dataset(folder), EDGE_TYPE)
        assert structure.indices.tolist() == right.indices.tolist()
        assert f"{name}[{at}] is {value}, which is out of range" in caplog.text
        assert copy.read()[1][name].tolist() == getattr(right, name).tolist()
    # A head that NumPy's parser ends in the middle of, with a checksum that is right.
    path, stamp = copy.path / "indptr.npy", json.loads((copy.path / "stamp.json").read_text())
    path.write_bytes(path.read_bytes().replace(b"'shape': (", b"'shape':(((", 1))
    stamp["head"]["files"]["indptr.npy"][1] = columns.checksum(path).checksum
    (copy.path / "stamp.json").write_text(
        json.dumps({"crc32": checksum_of(stamp["head"]), "head": stamp["head"]})
    )
    structure = verify.open_structure(open_dataset(folder), EDGE_TYPE)
    assert structure.indptr.tolist() == right.indptr.tolist()


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


def test_an_array_that_holds_no_ids_is_named(folder: Path) -> None:
    rewrite(
        folder, f"{EDGES}/indices.arrow", ColumnInfo(dtype="float32", row_shape=()), np.zeros(4, np.float32)
    )
    with pytest.raises(DatasetError, match=r"indices is float32 .* expected int32 or int64"):
        open_dataset(folder)


def test_files_are_read_and_compared_once(
    folder: Path, compared_paths: list[str], read_files: list[str]
) -> None:
    files = read_manifest(folder).files
    other_names = ("user_ids", "feat", "weight")
    arrays = sorted(path for path in files if not any(name in path for name in other_names))
    for how, times in (("never", 0), ("auto", 1), ("auto", 1), ("full", 2)):
        open_dataset(folder, verify=how)  # type: ignore[arg-type]
        assert (len(read_files), sorted(compared_paths)) == (times * len(files), sorted(times * arrays))
    # Stamps of an earlier version do not say that ids are in range, nor do another manifest's.
    stamps = folder / "cache/verified.json"
    unchecked = {path: stamp[:4] for path, stamp in json.loads(stamps.read_text())["files"].items()}
    stamps.write_text(json.dumps({"crc32": checksum_of(unchecked), "files": unchecked}))
    compared_paths.clear()
    read_files.clear()
    open_dataset(folder)
    assert len(compared_paths) == len(read_files) == len(arrays)
    write_manifest(replace(read_manifest(folder), seed=8), folder)
    open_dataset(folder)
    assert len(compared_paths) == len(read_files) == 2 * len(arrays)
