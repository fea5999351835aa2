"""Rows in memory that the ranks of one server share, in a file that has no name any more."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.graph.dtypes import numpy_view, torch_dtype
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.storage.columns import numpy_dtype

InitRows: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(shape of the own server's rows, dtype) to their first values; called on one rank of each server."""


def shared_rows(
    session: Session, file_name: str, count: int, info: ColumnInfo, init: InitRows | None = None
) -> Array:
    """Return writable rows that all ranks of the own server see. Every rank must call it.

    Args:
        session: The run; the memory lies in its ``scratch``.
        file_name: Not in use; the same on the ranks of a server.
        count: Rows of the own server; may be 0.
        info: Dtype and row shape.
        init: First values; zeros when None.

    Returns:
        (``count``, *row); bfloat16 as uint16. The memory lives as long as a rank holds the array.

    Raises:
        ConfigError: on all ranks, when on one of them there is no room, or ``init`` raised or returned
            something else.
    """
    path = session.scratch / file_name
    problem = ""
    if session.topology.local_rank == 0:
        problem = _make(path, count, info, init)
    problems = [text for text in gather_json(problem, session) if text]
    if problems:
        path.unlink(missing_ok=True)
        raise ConfigError(str(problems[0]))
    rows = _map(path, count, info)
    barrier(session, f"opening {file_name}")
    if session.topology.local_rank == 0:
        # Without a name it is freed when the last rank lets go of it, however that rank ends.
        path.unlink()
    return rows


def _make(path: Path, count: int, info: ColumnInfo, init: InitRows | None) -> str:
    """Create and fill the file; return what went wrong, for all ranks to hear."""
    num_bytes = max(1, count * math.prod(info.row_shape) * numpy_dtype(info.dtype).itemsize)
    try:
        with path.open("xb") as file:
            # Reserved now: a full memory file system would otherwise end the process at the first write.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        if init is not None:
            rows = _map(path, count, info)
            rows[...] = _first_values(init, rows, info)
    except OSError as error:
        return f"{path} cannot be made with {num_bytes} bytes ({error}); free memory or use smaller tensors"
    except DglxError as error:
        return str(error)
    return ""


def _first_values(init: InitRows, rows: Array, info: ColumnInfo) -> Array:
    shape, dtype = rows.shape, torch_dtype(info.dtype)
    try:
        values = init(shape, dtype)
    except Exception as error:
        raise ConfigError(f"init_func raised {type(error).__name__}: {error}") from error
    if not isinstance(values, Tensor):
        raise ConfigError(f"init_func returned a {type(values).__name__}; it must return a tensor")
    if tuple(values.shape) != shape or values.dtype != dtype:
        raise ConfigError(
            f"init_func returned {values.dtype} of shape {tuple(values.shape)} for {dtype} of shape {shape}"
        )
    return numpy_view(values.detach().contiguous())


def _map(path: Path, count: int, info: ColumnInfo) -> Array:
    dtype = numpy_dtype(info.dtype)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    size = count * math.prod(info.row_shape)
    return (
        np.frombuffer(memory, dtype, count=size).reshape(count, *info.row_shape)
        if size
        else np.empty((count, *info.row_shape), dtype)
    )
