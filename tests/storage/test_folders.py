"""Folders appear whole or not at all, and the old one stands until the new one does."""

from pathlib import Path

import pytest

from dglx_dist.storage import folders
from dglx_dist.storage.folders import partial_folder, publish, replace_folder


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
