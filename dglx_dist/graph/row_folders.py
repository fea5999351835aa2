"""Folders of rows that all ranks write together, and that appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, cast

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.errors import DglxError, StorageError
from dglx_dist.graph.opening import together
from dglx_dist.storage.folders import named_failures, publish, replace_folder
from dglx_dist.storage.layout import PARTIAL_SUFFIX
from dglx_dist.storage.row_files import RowFile, check_replaceable, write_index

WriteOwn: TypeAlias = Callable[[Path], Sequence[RowFile]]
"""Write this rank's rows into a folder; calls no collective."""


def save_folder(session: Session, target: Path, write_own: WriteOwn, facts: Mapping[str, object]) -> None:
    """Write rows of all ranks as ``target``, which holds all of them or what it held. All ranks call it.

    Args:
        session: The run.
        target: Seen by all ranks under this name; rows that were saved there before are replaced.
        write_own: See :data:`WriteOwn`.
        facts: What the index keeps of the whole; those of rank 0 count.

    Raises:
        StorageError: on all ranks, when one cannot write or does not see the folder, or when it holds
            something else than saved rows; what was there is unchanged.
    """
    is_first = session.topology.rank == 0
    temporary = target.with_name(f".{target.name}.writing{PARTIAL_SUFFIX}")

    def make() -> None:
        with named_failures(target):
            check_replaceable(target)
            # Left by a save that was killed.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def finish() -> None:
        with named_failures(target):
            # Once more: much may have been put there meanwhile.
            check_replaceable(target)
            if not publish(temporary, target):
                replace_folder(temporary, target)

    try:
        together(session, lambda: make() if is_first else None)
        fill_folder(session, temporary, write_own, facts)
        together(session, lambda: finish() if is_first else None)
    except DglxError:
        if is_first:
            # What is half written would keep a full disk full.
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def fill_folder(session: Session, folder: Path, write_own: WriteOwn, facts: Mapping[str, object]) -> None:
    """Let every rank write its rows into an empty folder, then rank 0 the index. Every rank must call it.

    Raises:
        StorageError: on all ranks, when one cannot write or does not see the folder.
    """
    rank = session.topology.rank

    def write() -> list[dict[str, Any]]:
        if not folder.is_dir():
            raise StorageError(
                f"{folder.parent} is not the same folder on {session.hosts[rank]} as on {session.hosts[0]}; "
                "choose one that all machines share"
            )
        with named_failures(folder):
            return [asdict(file) for file in write_own(folder)]

    def finish(lines_of_ranks: Sequence[object]) -> None:
        files = [
            RowFile(**{**line, "row_shape": tuple(line["row_shape"])})
            for lines in lines_of_ranks
            for line in cast("list[dict[str, Any]]", lines)
        ]
        with named_failures(folder):
            write_index(folder, files, facts)

    lines = gather_json(together(session, write), session)
    together(session, lambda: finish(lines) if rank == 0 else None)
