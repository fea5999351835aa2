"""Array folders and their cache: damage, concurrent writers, killed processes, full disks, eviction."""

import errno
import gc
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.data.storage import arrays
from dglx_dist.data.storage.arrays import STAMP, ArrayCache, ArrayFolder, ArrayWriter, checksum_of, map_array
from dglx_dist.data.storage.reader import open_dataset
from dglx_dist.errors import StorageError
from tests.data.storage.graphs import ODD_ONES_OUT, TWO_TRIANGLES, flip, flipped_bits, store

FACTS = {"dtype": "float32", "layers": [{"send": [1]}], "none": None}
ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


def write(folder: ArrayFolder, rows: Any = ROWS) -> None:
    with folder.open_writer() as writer:
        stream = writer.stream("rows", rows.dtype, rows.shape)
        stream.append(rows[:4])
        stream.append(rows[4:4])
        stream.append(rows[4:])
        writer.put("flags", np.array([True, False]))
        writer.put("none", np.empty((0, 3), np.float16))
        writer.publish(FACTS)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mode", ["r", "c"])
def test_what_is_written_is_mapped(tmp_path: Path, mode: Any) -> None:
    folder = ArrayFolder(tmp_path / "a").subfolder("b")
    assert folder.find() is None
    write(folder)
    facts, arrays = folder.read(mode)
    assert facts == FACTS
    assert np.array_equal(arrays["rows"], ROWS)
    assert (arrays["flags"].tolist(), arrays["none"].shape) == ([True, False], (0, 3))
    assert (arrays["rows"].flags.writeable, arrays["rows"].flags.owndata) == (mode == "c", False)
    assert names(tmp_path / "a") == ["b"]
    assert names(tmp_path / "a/b") == ["flags.npy", "none.npy", "rows.npy", STAMP]


@pytest.mark.parametrize("name", ["rows.npy", STAMP])
def test_flipped_bits_are_repaired(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = ArrayFolder(tmp_path / "a")
    write(folder)
    for at in flipped_bits(tmp_path / "a" / name, every=5):
        with pytest.raises(StorageError, match=f"{tmp_path / 'a'} is damaged .*writes it again"):
            folder.read()
        flip(tmp_path / "a" / name, at, at % 8)
        folder.read()
    flip(tmp_path / "a" / name, 9)
    assert folder.find() is None
    assert caplog.text.count("damaged") == 1
    write(folder)
    assert np.array_equal(folder.read()[1]["rows"], ROWS)
    assert names(tmp_path) == ["a"]


def write_stamp(head: object) -> str:
    return json.dumps({"crc32": checksum_of(head), "head": head})


HEADS = [{}, [], None, {"files": {}}, {"files": 1, "told": {}}, {"files": {"x.npy": 1}, "told": {}}]


@pytest.mark.parametrize(
    "stamp", ["", "[]", "{}", "1", '{"crc32": 1, "head": {}}', "[" * 100_000, *map(write_stamp, HEADS)]
)
def test_another_stamp_is_damage(tmp_path: Path, stamp: str) -> None:
    write(ArrayFolder(tmp_path / "a"))
    (tmp_path / "a" / STAMP).write_text(stamp)
    assert ArrayFolder(tmp_path / "a").find() is None


def test_an_array_with_too_few_rows_is_not_published(tmp_path: Path) -> None:
    folder = ArrayFolder(tmp_path / "a")
    with folder.open_writer() as writer:
        writer.stream("rows", ROWS.dtype, ROWS.shape).append(ROWS[:4])
        with pytest.raises(StorageError, match="has 4 rows instead of 10"):
            writer.publish(FACTS)
    assert not folder.path.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_trusted_folders_are_not_read_but_sizes_and_stamps_are_compared(
    tmp_path: Path, trusted: bool
) -> None:
    folder, rows = ArrayFolder(tmp_path / "a", trusted=trusted), tmp_path / "a" / "rows.npy"
    write(folder)
    flip(rows, rows.stat().st_size - 1)
    assert (folder.find() is not None) is trusted
    rows.write_bytes(rows.read_bytes()[:-4])
    assert folder.find() is None
    rows.unlink()
    assert folder.find() is None


def test_an_intact_folder_stays_unless_it_has_other_facts(tmp_path: Path) -> None:
    folder = ArrayFolder(tmp_path / "a")
    write(folder)
    write(folder, ROWS + 1)
    assert np.array_equal(folder.read()[1]["rows"], ROWS)
    mapped = folder.read()[1]["rows"]
    assert folder.find({"dtype": "other"}) is None
    with folder.open_writer() as writer:
        writer.put("rows", ROWS + 2)
        writer.publish({"dtype": "other"})
    assert folder.read()[0] == {"dtype": "other"}
    # A process that has it open continues to read what it was.
    assert np.array_equal(mapped, ROWS)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_of_several_writers_the_first_wins(tmp_path: Path, is_damaged: bool) -> None:
    folder = ArrayFolder(tmp_path / "x")
    if is_damaged:
        write(folder)
        (tmp_path / "x" / "rows.npy").write_bytes(b"nothing")
    start, results = threading.Barrier(4), []

    def one() -> None:
        start.wait(10)
        write(folder)
        results.append(folder.read()[1]["rows"])

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [np.array_equal(rows, ROWS) for rows in results] == [True] * 4
    assert names(tmp_path) == ["x"]


def test_finds_a_full_disk_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(119))
    with pytest.raises(OSError, match="no room for 120 bytes"):
        write(ArrayFolder(tmp_path / "x"))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        assert not ArrayFolder(tmp_path / "x").save({"x": np.arange(1 << 17)}, {}, "the plan")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the plan is not kept" in caplog.text
    assert not list(tmp_path.iterdir())


def test_another_failure_of_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ArrayWriter, "put", broken)
    with pytest.raises(StorageError, match="check the disk"):
        ArrayFolder(tmp_path / "x").save({"x": ROWS}, {}, "the plan")


def write_until_killed(folder: Path, when: str) -> None:
    if when == "published":
        ArrayWriter.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with ArrayCache(folder, "abc").entry("columns", "_N/feat/0-3").open_writer() as writer:
        writer.put("rows", ROWS)
        if when == "written":
            os.kill(os.getpid(), signal.SIGKILL)
        writer.publish({})


@pytest.mark.parametrize("when", ["written", "published"])
def test_the_next_opening_removes_what_a_killed_write_left(tmp_path: Path, when: str) -> None:
    store(TWO_TRIANGLES, ODD_ONES_OUT, tmp_path / "d")
    cache = tmp_path / "d" / "cache"
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(cache, when))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [path.suffix for path in (cache / "columns-abc/_N/feat").iterdir() if path.is_dir()] == [
        ".partial"
    ]
    open_dataset(tmp_path / "d")
    assert not list(cache.rglob("*0-3*"))


def used(cache: Path, name: str, days_ago: float, num_bytes: int = 8000) -> Path:
    entry = ArrayCache(cache, "abc").entry("columns", name)
    write(entry, np.zeros((num_bytes // 8, 1)))
    lock = entry.path.with_name(f"{name}.lock")
    os.utime(lock, (time.time() - 86400 * days_ago,) * 2)
    return entry.path


def list_entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "columns-abc").iterdir() if path.suffix != ".lock")


def leave_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(num_bytes))


AGES, TWO = {"days": 3, "now": 0, "month": 31}, {"old": 3, "new": 1}


@pytest.mark.parametrize(
    ("free", "ages", "expected"),
    [
        (None, AGES, ["days", "now"]),
        (None, {"a": 300, "b": 310, "c": 331}, ["a", "b"]),  # of a dataset that rested
        (None, {"ahead": -700, "days": 3, "now": 0}, ["ahead", "days", "now"]),  # by another clock
        (70_000, AGES, ["days", "now"]),
        (20_000, AGES, ["now"]),
        (0, {"now": 0}, []),
        (60_000, TWO, ["new", "old"]),
        (20_000, TWO, ["new"]),
    ],
)
def test_entries_are_evicted_by_age_and_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int | None,
    ages: dict[str, int],
    expected: list[str],
) -> None:
    for name, days_ago in ages.items():
        used(tmp_path, name, days_ago)
    if free is not None:
        leave_free(monkeypatch, free)
    with caplog.at_level(logging.INFO):
        ArrayCache(tmp_path, "def").clean()
    assert list_entries(tmp_path) == expected
    assert caplog.text.count("was evicted") == len(ages) - len(expected)
    assert len(list(tmp_path.rglob("*.lock"))) == len(expected)


def test_what_the_latest_runs_used_is_not_evicted_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, days_ago in (("old", 9), ("recent", 7.5), ("last", 7)):
        used(tmp_path, name, days_ago)
    other_cache = used(tmp_path, "other", 7)
    leave_free(monkeypatch, 0)
    (tmp_path / "columns-old").mkdir()
    for name in ("other", "other.lock"):
        other_cache.with_name(name).rename(tmp_path / "columns-old" / name)
    ArrayCache(tmp_path, "abc").clean()
    assert list_entries(tmp_path) == ["last", "recent"]
    assert not list((tmp_path / "columns-old").iterdir())
    assert "more than a quarter of the free disk" in caplog.text


def test_entries_without_a_lock_are_evicted_too(tmp_path: Path) -> None:
    for name, days_ago in (("copied", 40), ("now", 0)):
        path = used(tmp_path, name, days_ago)
        os.utime(path / STAMP, (time.time() - 86400 * days_ago,) * 2)
        path.with_name(f"{name}.lock").unlink()
    ArrayCache(tmp_path, "abc").clean()
    assert list_entries(tmp_path) == ["now"]
    assert not list(tmp_path.rglob("*copied*"))


def hold_until_told(folder: Path, ready: Any, end: Any) -> None:
    cache = ArrayCache(folder, "abc")
    cache.entry("columns", "mine")
    ready.set()
    end.wait(60)


def test_what_a_live_process_uses_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = used(tmp_path, "mine", 99)
    leave_free(monkeypatch, 0)
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    process = context.Process(target=hold_until_told, args=(tmp_path, ready, end))
    process.start()
    assert ready.wait(60)
    os.utime(path.with_name("mine.lock"), (0, 0))
    ArrayCache(tmp_path, "def").clean()
    assert list_entries(tmp_path) == ["mine"]
    end.set()
    process.join(60)
    # Nor what this process uses, until it drops its cache.
    own = ArrayCache(tmp_path, "abc")
    own.entry("columns", "mine")
    ArrayCache(tmp_path, "def").clean()
    assert list_entries(tmp_path) == ["mine"]
    del own
    ArrayCache(tmp_path, "def").clean()
    assert list_entries(tmp_path) == []


def open_and_write(folder: Path) -> None:
    for turn in range(20):
        ArrayCache(folder, "def").clean()
        cache = ArrayCache(folder, "abc")
        entry = cache.entry("columns", f"{turn % 3}")
        write(entry)
        assert np.array_equal(entry.read()[1]["rows"], ROWS)
        del cache


def test_processes_may_evict_and_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_SHARE_OF_DISK", 1 << 60)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=open_and_write, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    ArrayCache(tmp_path, "def").clean()
    assert list_entries(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = used(tmp_path, "mine", 99)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "open", refuse)
    cache = ArrayCache(tmp_path, "abc")
    cache.clean()
    monkeypatch.undo()
    assert cache.entry("columns", "mine").find() is not None
    assert path.exists()


class Yields:
    """Collected with its cycle, it lets another thread run."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        time.sleep(0)


def test_threads_map_arrays_at_once(tmp_path: Path) -> None:
    """While one thread parses a header, garbage is collected and another one parses its own."""
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    before = gc.get_threshold()
    gc.set_threshold(20)
    try:

        def read(_: int) -> int:
            Yields()
            return int(map_array(tmp_path / "a.npy", "r").sum())

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(read, range(2_000))) == {15}
    finally:
        gc.set_threshold(*before)
