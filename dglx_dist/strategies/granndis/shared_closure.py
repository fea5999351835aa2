"""A server's rows in files in its shared memory: written by its first rank, mapped by all."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import final

import numpy as np

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
    """Write ``held`` into the new ``folder``."""
    folder.mkdir()
    for field in fields(Closure):
        np.save(folder / f"{field.name}.npy", getattr(held.closure, field.name))
    np.save(folder / f"{_HOLDERS}.npy", held.holders)


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
