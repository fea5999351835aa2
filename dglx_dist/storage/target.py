"""The folder in which a dataset appears: whether it may, and putting it there."""

from __future__ import annotations

import re
from pathlib import Path

from dglx_dist.errors import StorageError
from dglx_dist.storage.folders import publish, replace_folder
from dglx_dist.storage.layout import CACHE, MANIFEST
from dglx_dist.storage.manifest import FORMAT

_PART = re.compile(r"part\d+")


def check_target(folder: Path, overwrite: bool) -> None:
    """Raise StorageError when ``folder`` holds something that may not be replaced; costs nothing."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StorageError(f"{folder} is a file; choose another folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise StorageError(f"{folder} exists already; choose another folder, or ask for overwriting")
    if not _is_ours(folder):
        raise StorageError(
            f"{folder} holds something that is no dataset of this program, and is not overwritten; "
            f"choose another folder, or remove it yourself"
        )


def put_in_place(partial: Path, folder: Path, overwrite: bool) -> None:
    """Rename the finished dataset ``partial`` to ``folder``; what was there is lost only when it stands.

    Raises:
        StorageError: ``folder`` has come to hold something that may not be replaced.
    """
    if publish(partial, folder):
        return
    if not overwrite:
        raise StorageError(f"{folder} appeared while it was being written; choose another folder")
    check_target(folder, overwrite)
    replace_folder(partial, folder)


def _is_ours(folder: Path) -> bool:
    """Whether there is nothing but a dataset, which may be damaged or of another version."""
    names = {path.name for path in folder.iterdir()}
    others = {name for name in names - {MANIFEST, CACHE} if not _PART.fullmatch(name)}
    return MANIFEST in names and not others and FORMAT.encode() in (folder / MANIFEST).read_bytes()
