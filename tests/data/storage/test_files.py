"""Folders replaced as a whole by concurrent writers, merged replicas, and the memory of a process."""

import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.storage import files as folders
from dglx_dist.data.storage.arrays import ArrayFolder
from dglx_dist.data.storage.files import (
    lock_shared,
    partial_folder,
    read_small_file,
    remove_abandoned,
    replace_folder,
)
from dglx_dist.data.storage.reader import CSC, StoredDataset, open_dataset, open_structure
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.records import EDGE_TYPE, EdgeType
from tests.data.storage.graphs import (
    FOLLOWS,
    ODD_ONES_OUT,
    RATES,
    TWO_TRIANGLES,
    flip,
    put_together,
    random_heterogeneous,
    random_homogeneous,
    random_owners,
    store,
)


def make_folder(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "x").write_text(text)
    return folder


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        lock_shared(tmp_path / "lock")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replaces_a_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    old, new = make_folder(tmp_path / "old", "old"), make_folder(tmp_path / "new", "new")
    replace_folder(new, old)
    assert (old / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def killed_while_filling(target: Path) -> None:
    with partial_folder(target):
        os.kill(os.getpid(), signal.SIGKILL)


def left_by_a_killed_process(target: Path) -> Path:
    process = multiprocessing.get_context("fork").Process(target=killed_while_filling, args=(target,))
    process.start()
    process.join(60)
    (left,) = target.parent.glob(f"{target.name}.*.partial")
    return left


def test_what_the_killed_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left_by_a_killed_process(tmp_path / "deep" / "a.b-c")
    of_another = left_by_a_killed_process(tmp_path / "d")
    of_another = of_another.rename(
        str(of_another).replace(os.uname().nodename.replace(".", "_"), "elsewhere")
    )
    in_a_container = left_by_a_killed_process(tmp_path / "c")
    in_a_container = in_a_container.rename(
        str(in_a_container).replace(str(Path("/proc/self/ns/pid").stat().st_ino), "1")
    )
    set_aside = make_folder(tmp_path / "d.old-0123abcd.partial", "the only one")
    with partial_folder(tmp_path / "e") as under_way:
        remove_abandoned(tmp_path)
        assert under_way.exists()
        assert sorted(tmp_path.rglob("*.partial")) == sorted(
            [of_another, in_a_container, set_aside, under_way]
        )
        os.utime(of_another, (0, 0))
        os.utime(in_a_container, (0, 0))
        remove_abandoned(tmp_path)
        assert sorted(tmp_path.rglob("*.partial")) == sorted([set_aside, under_way])
    remove_abandoned(tmp_path / "nowhere")


def test_the_next_run_removes_what_the_killed_one_left_of_its_target(tmp_path: Path) -> None:
    left, of_another = (left_by_a_killed_process(tmp_path / name) for name in ("d", "d.work"))
    with partial_folder(tmp_path / "d") as partial:
        assert sorted(tmp_path.iterdir()) == sorted([of_another, partial])
        with partial_folder(tmp_path / "d"):
            assert partial.exists()
    assert not left.exists()


def edges_of(structure: CSC, dataset: StoredDataset, etype: EdgeType) -> list[tuple[int, int]]:
    destinations = np.repeat(np.arange(len(structure.indptr) - 1), np.diff(structure.indptr))
    sources = put_together(dataset, etype[0])[structure.indices]
    return sorted(zip(sources.tolist(), put_together(dataset, etype[2])[destinations].tolist(), strict=True))


@pytest.fixture
def dataset(tmp_path: Path) -> StoredDataset:
    return store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("etype", [RATES, FOLLOWS])
def test_it_has_the_edges_of_the_source(tmp_path: Path, num_parts: int, etype: EdgeType) -> None:
    graph = random_heterogeneous(num_parts)
    dataset = store(graph, random_owners(graph, num_parts, 0), tmp_path / "d")
    structure = open_structure(dataset, etype)
    expected = sorted(zip(*(end.tolist() for end in graph.edges[etype]), strict=True))
    assert edges_of(structure, dataset, etype) == expected
    for first, last in zip(structure.indptr[:-1], structure.indptr[1:], strict=True):
        assert (np.diff(structure.indices[first:last]) >= 0).all()


def test_one_part_needs_no_copy(tmp_path: Path) -> None:
    graph = random_homogeneous(0)
    dataset = store(graph, random_owners(graph, 1, 0), tmp_path / "d")
    assert open_structure(dataset, EDGE_TYPE).indices is dataset.part(0).indices(EDGE_TYPE)
    assert list(tmp_path.rglob("structure-*")) == []


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("cache/structure-*/*") if path.is_dir())


def test_the_second_opening_uses_the_copy(tmp_path: Path, dataset: StoredDataset) -> None:
    open_structure(dataset, EDGE_TYPE)
    (copy,) = copies(tmp_path / "d")
    before = (copy / "indices.npy").stat()
    shutil.rmtree(tmp_path / "d/part0")
    open_structure(open_dataset(tmp_path / "d"), EDGE_TYPE)
    after = (copy / "indices.npy").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_copy_of_other_lengths_is_not_used(tmp_path: Path, dataset: StoredDataset) -> None:
    expected = open_structure(dataset, EDGE_TYPE).indices.tolist()
    (path,) = copies(tmp_path / "d")
    assert ArrayFolder(path).save({"indptr": np.arange(3), "indices": np.zeros(2, np.int32)}, {}, "it")
    assert open_structure(open_dataset(tmp_path / "d"), EDGE_TYPE).indices.tolist() == expected


def test_a_copy_of_an_older_dataset_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    graph = random_homogeneous(0)
    open_structure(store(graph, random_owners(graph, 2, 0), folder), EDGE_TYPE)
    shutil.copytree(folder / "cache", tmp_path / "old")
    write_dataset(graph, random_owners(graph, 2, 1), folder, overwrite=True)
    shutil.copytree(tmp_path / "old", folder / "cache")
    dataset = open_dataset(folder)
    expected = sorted(zip(*(end.tolist() for end in graph.edges[EDGE_TYPE]), strict=True))
    assert edges_of(open_structure(dataset, EDGE_TYPE), dataset, EDGE_TYPE) == expected
    assert len(copies(folder)) == 2


@pytest.mark.parametrize("how", ["auto", "full", "never"])
def test_a_damaged_copy_is_logged_once_and_rebuilt_unless_nothing_is_verified(
    tmp_path: Path, dataset: StoredDataset, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = open_structure(dataset, EDGE_TYPE).indices.tolist()
    (path,) = tmp_path.rglob("structure-*/*/indices.npy")
    flip(path, path.stat().st_size - 4)
    # Another process of the machine has opened the dataset.
    for checked in (False, True):
        structure = open_structure(open_dataset(tmp_path / "d", verify=how, checked=checked), EDGE_TYPE)
        assert (structure.indices.tolist() == expected) is (how != "never")
    assert [str(path.parent) in record.message for record in caplog.records] == [True] * (how != "never")


def test_without_permission_it_works_in_memory_and_a_full_disk_is_an_error(
    dataset: StoredDataset, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(Path, "mkdir", refuse)
    problem = OSError(13, "Permission denied")
    assert open_structure(dataset, EDGE_TYPE).indices.tolist() == [1, 3, 4, 0, 1, 5, 2]
    assert "copied to memory" in caplog.text
    problem = OSError(28, "No space left on device")
    with pytest.raises(StorageError, match="No space left"):
        open_structure(dataset, EDGE_TYPE)


def test_every_part_is_needed(tmp_path: Path, dataset: StoredDataset) -> None:
    shutil.rmtree(tmp_path / "d/part1")
    with pytest.raises(StorageError, match=r"part 1 .* is not on this machine"):
        open_structure(dataset, EDGE_TYPE)
    assert copies(tmp_path / "d") == []
    with pytest.raises(ConfigError, match="rates"):
        open_structure(dataset, RATES)


def _indices(folder: str) -> list[int]:
    return open_structure(open_dataset(folder), EDGE_TYPE).indices.tolist()


def test_processes_may_race(tmp_path: Path) -> None:
    graph = random_homogeneous(5, num_nodes=2000, num_edges=20_000)
    folder = tmp_path / "d"
    write_dataset(graph, random_owners(graph, 3, 0), folder)
    with ProcessPoolExecutor(3, mp_context=get_context("forkserver")) as pool:
        result = list(pool.map(_indices, [str(folder)] * 6))
    dataset = open_dataset(folder)
    expected = np.concatenate([dataset.part(part).indices(EDGE_TYPE) for part in range(3)]).tolist()
    assert result == [expected] * 6
    (copy,) = copies(folder)
    assert sorted(path.name for path in copy.iterdir()) == ["indices.npy", "indptr.npy", "stamp.json"]


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "large"])
def test_only_a_small_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "settings.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        path.write_bytes(b"12345")
        assert read_small_file(path, 5) == b"12345"
    with pytest.raises(OSError, match=r"settings\.json"):
        read_small_file(path, 4)
