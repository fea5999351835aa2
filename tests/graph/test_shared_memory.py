"""Folders of rows: complete or absent, whoever dies, and no other folder is ever replaced."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.comm.session import Session, start_session
from dglx_dist.data.storage.row_files import RowFile, read_index, read_rows, write_rows
from dglx_dist.errors import DglxError, StorageError
from dglx_dist.graph import shared_memory
from dglx_dist.graph.shared_memory import open_partial_folder, save_folder
from tests.helpers import refusal, wide
from tests.helpers.ranks import run_ranks, start_ranks

PER_RANK = 3


def save(session: Session, folder: Path, value: int) -> None:
    rank = session.topology.rank

    def write_own(to: Path) -> Sequence[RowFile]:
        return [write_rows(to, "x", PER_RANK * rank, np.full(PER_RANK, value + rank))]

    save_folder(session, folder, write_own, {"value": value})


def load(folder: Path) -> list[int]:
    saved = read_index(folder).tensors["x"]
    out = np.empty(saved.num_rows, np.int64)
    read_rows(folder, saved, 0, saved.num_rows, out)
    return [int(value) for value in out]


def save_twice(folder: Path) -> list[int]:
    with start_session() as session:
        save(session, folder, 10)
        save(session, folder, 20)
        return load(folder)


def die_while_saving(folder: Path, victim: int) -> str:
    with start_session(timeout_s=20) as session:

        def write_own(to: Path) -> Sequence[RowFile]:
            rank = session.topology.rank
            file = write_rows(to, "x", PER_RANK * rank, np.zeros(PER_RANK, np.int64))
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return [file]

        try:
            save_folder(session, folder, write_own, {})
        except DglxError as error:
            session.close(failed=True)
            return f"{type(error).__name__}: {error}"
        return "saved"


def fail_on_one(folder: Path) -> str:
    with start_session() as session:

        def write_own(to: Path) -> Sequence[RowFile]:
            if session.topology.rank == 1:
                raise OSError(28, "No space left on device")
            return [write_rows(to, "x", 0, np.zeros(PER_RANK, np.int64))]

        return refusal(lambda: save_folder(session, folder, write_own, {}), StorageError)


@pytest.mark.parametrize("victim", [1, *wide(0)])
def test_the_saved_rows_stay_when_a_rank_is_killed_while_it_saves(tmp_path: Path, victim: int) -> None:
    folder = tmp_path / "rows"
    full = [20] * PER_RANK + [21] * PER_RANK
    assert run_ranks(save_twice, 2, args=(folder,)) == [full, full]
    outcomes = start_ranks(die_while_saving, 2, args=(folder, victim))
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert outcomes[1 - victim].result.startswith("PeerError")
    assert load(folder) == full
    # What the dead left over is gone after the next save.
    run_ranks(save_twice, 2, args=(folder,))
    assert os.listdir(tmp_path) == ["rows"]


def test_a_failure_of_one_rank_is_one_of_all_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    run_ranks(save_twice, 2, args=(folder,))
    for result in run_ranks(fail_on_one, 2, args=(folder,)):
        assert "No space left" in result
    assert os.listdir(tmp_path) == ["rows"]
    assert load(folder) == [20] * PER_RANK + [21] * PER_RANK


def test_nothing_but_saved_rows_is_replaced(alone: Session, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    save(alone, folder, 1)
    save(alone, folder / "below", 2)
    with pytest.raises(StorageError, match="has files other than saved rows, such as 'below'"):
        save(alone, folder, 3)
    assert load(folder / "below") == [2] * PER_RANK
    project = tmp_path / "project"
    project.mkdir()
    (project / "index.json").write_text("{}")
    (project / "thesis.tex").write_text("mine")
    with pytest.raises(StorageError, match=r"such as 'thesis\.tex'; choose another folder"):
        save(alone, project, 4)
    assert sorted(os.listdir(project)) == ["index.json", "thesis.tex"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        save(alone, tmp_path / "file", 5)
    with pytest.raises(StorageError, match="cannot be written"):
        save(alone, tmp_path / "file" / "below", 6)
    assert sorted(os.listdir(tmp_path)) == ["file", "project", "rows"]


def test_names_a_folder_unseen_by_a_rank(
    alone: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "broadcast_json", lambda *_: str(tmp_path / "of another machine"))
    with (
        pytest.raises(StorageError, match="Choose a folder that all machines share"),
        open_partial_folder(alone, tmp_path / "rows"),
    ):
        pass
    assert os.listdir(tmp_path) == []
