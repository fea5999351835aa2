"""A server's rows in files in its shared memory: written by its first rank, mapped by all."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.errors import StorageError
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.closure import Closure

_HOLDERS = "holders"


@final
@dataclass(frozen=True, kw_only=True)
class HeldClosure:
    """What a server computes, and which of its ranks holds which row."""

    closure: Closure
    holders: Array
    """(n,) int32 ranks."""


def write_held(folder: Path, held: HeldClosure) -> None:
    """Write ``held`` into the new ``folder``.

    Raises:
        StorageError: there is no room; what was written is removed.
    """
    arrays = {field.name: getattr(held.closure, field.name) for field in fields(Closure)}
    arrays[_HOLDERS] = held.holders
    try:
        folder.mkdir()
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
    except OSError as problem:
        remove_held(folder)
        needed = sum(array.nbytes for array in arrays.values())
        raise StorageError(
            f"{folder} cannot be written ({problem}): the ranks of a server share its rows there, which take "
            f"{needed / 1e6:.1f} MB; make room in {folder.parent.parent} (in a container: --shm-size), or "
            "start one rank on each server"
        ) from problem


def read_held(folder: Path) -> HeldClosure:
    """Map what :func:`write_held` wrote; the files may be removed while it is in use."""
    arrays = {field.name: _mapped(folder / f"{field.name}.npy") for field in fields(Closure)}
    return HeldClosure(closure=Closure(**arrays), holders=_mapped(folder / f"{_HOLDERS}.npy"))


def remove_held(folder: Path) -> None:
    """Remove the files; who has mapped them keeps them until it lets go."""
    shutil.rmtree(folder, ignore_errors=True)


def _mapped(path: Path) -> Array:
    # As a plain array, which compiled code knows; it keeps the mapping open.
    return np.load(path, mmap_mode="r").view(np.ndarray)
