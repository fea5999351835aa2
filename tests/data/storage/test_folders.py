"""Folders appear whole or not at all, and the old one stands until the new one does."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.data.storage import files as folders
from dglx_dist.data.storage.columns import FileInfo
from dglx_dist.data.storage.files import (
    STAMP,
    partial_folder,
    publish,
    remove_abandoned,
    replace_folder,
    seal,
    unseal,
)
from dglx_dist.errors import StorageError
from tests.data.storage.graphs import flip, flipped_bits


def filled(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "x").write_text(text)
    return folder


def test_a_published_folder_has_the_name_and_the_content(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "deep" / "d") as partial:
        (partial / "x").write_text("new")
        assert publish(partial, tmp_path / "deep" / "d")
    assert (tmp_path / "deep/d/x").read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["d"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with partial_folder(tmp_path / "d") as partial:
            (partial / "x").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_publishing_never_replaces(tmp_path: Path) -> None:
    old, new = filled(tmp_path / "old", "old"), filled(tmp_path / "new", "new")
    assert not publish(new, old)
    assert (old / "x").read_text() == "old"
    assert (new / "x").read_text() == "new"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    old, new = filled(tmp_path / "old", "old"), filled(tmp_path / "new", "new")
    replace_folder(new, old)
    assert (old / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_system_here_exchanges_in_one_step(tmp_path: Path) -> None:
    old, new = filled(tmp_path / "old", "old"), filled(tmp_path / "new", "new")
    if not folders._exchange(new, old):
        pytest.skip("this file system cannot exchange two names")
    assert ((old / "x").read_text(), (new / "x").read_text()) == ("new", "old")


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
    set_aside = filled(tmp_path / "d.old-0123abcd.partial", "the only one")
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


def test_what_others_remove_meanwhile_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_by_a_killed_process(tmp_path / "z" / "d")
    (tmp_path / "gone").mkdir()
    scan = os.scandir

    def scan_late(path: Any = ".") -> Any:
        if str(path).endswith("gone"):
            (tmp_path / "gone").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    remove_abandoned(tmp_path)
    assert not left.exists()
    assert not (tmp_path / "gone").exists()


TOLD = {"dtype": "float32", "shape": [10, 3], "layers": [{"send": [1]}], "none": None}


@pytest.mark.parametrize("files", [None, {"x": FileInfo(num_bytes=3, checksum="352441c2")}])
def test_what_was_sealed_is_told_as_long_as_no_bit_differs(
    tmp_path: Path, files: dict[str, FileInfo] | None
) -> None:
    folder = filled(tmp_path / "d", "abc")
    seal(folder, TOLD, files)
    assert unseal(folder) == TOLD
    for name in ("x", STAMP):
        for at in flipped_bits(folder / name):
            with pytest.raises(StorageError, match=f"{folder} is damaged .*writes it again"):
                unseal(folder)
            flip(folder / name, at, at % 8)
    assert unseal(folder) == TOLD
    (folder / "x").write_text("abcd")
    with pytest.raises(StorageError, match="x does not match"):
        unseal(folder)
    (folder / "x").unlink()
    with pytest.raises(StorageError, match="No such file"):
        unseal(folder)


@pytest.mark.parametrize("stamp", ["", "[]", "{}", "1", '{"crc32": 1, "head": {}}', "[" * 100_000])
def test_a_stamp_of_something_else_is_damage(tmp_path: Path, stamp: str) -> None:
    (tmp_path / STAMP).write_text(stamp)
    with pytest.raises(StorageError, match="damaged"):
        unseal(tmp_path)
