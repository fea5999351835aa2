"""Rows in memory that a server's ranks share: allocation, checks for free memory, and saving."""

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, broadcast_json, gather_json, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.columns import numpy_dtype
from dglx_dist.data.storage.files import (
    name_write_failures,
    partial_folder,
    publish_or_replace,
    remove_abandoned,
)
from dglx_dist.data.storage.row_files import RowFile, check_replaceable, write_index
from dglx_dist.errors import ConfigError, DglxError, StorageError
from dglx_dist.graph.row_kernels import torch_dtype, view_as_numpy
from dglx_dist.memory import machine_memory
from dglx_dist.records import Array, ColumnInfo

log = logging.getLogger(__name__)


def check_memory(session: Session, bounds: Array, row_bytes: int, what: str, remedy: str) -> None:
    """Raise ConfigError on all ranks if rows exceed a machine's free memory. Every rank must call this.

    Args:
        bounds: (S + 1,) int64. Server s will have the rows ``bounds[s]:bounds[s + 1]`` in the session's
            scratch.
        row_bytes: Size of a row in bytes.
        what: Name for the rows in the message.
        remedy: What the user can do, for the message.
    """

    def check_local_memory() -> None:
        host, num_rows = _count_local_rows(session, bounds)
        num_bytes = num_rows * row_bytes
        # The shared memory file system (/dev/shm) has its own limit.
        free_bytes = shutil.disk_usage(session.scratch).free
        if session.scratch_in is None:
            free_bytes = min(machine_memory()[1], free_bytes)
        if num_bytes > free_bytes:
            raise ConfigError(
                f"{what} needs {num_bytes / 1e9:.3f} GB for {num_rows} rows of {row_bytes} "
                f"bytes on {host}, but {free_bytes / 1e9:.3f} GB are free; {remedy}"
            )

    run_on_all_ranks(session, check_local_memory, ConfigError)


def warn_about_edges(session: Session, edge_bounds: Iterable[Array], edge_bytes: int) -> None:
    """Log a warning if the edges on this machine's servers need more memory than is free. Not collective.

    A strategy that holds edges calls this before it reads any. For each edge type, server s has the edges
    ``bounds[s]:bounds[s + 1]``, and each edge takes about ``edge_bytes``.
    """
    # Each machine logs one message.
    if not session.is_first_on_machine:
        return

    host, num_edges = "", 0
    for bounds in edge_bounds:
        host, num_edges_of_type = _count_local_rows(session, bounds)
        num_edges += num_edges_of_type
    num_bytes = num_edges * edge_bytes
    _, free_bytes = machine_memory()
    if num_bytes > free_bytes:
        message = (
            "strategy %r holds edges in memory: up to %.3f GB on %s for %d edges, but %.3f GB are free. "
        )
        message += "data_parallel and push_pull leave edges on disk."
        log.warning(message, session.strategy, num_bytes / 1e9, host, num_edges, free_bytes / 1e9)


def _count_local_rows(session: Session, bounds: Array) -> tuple[str, int]:
    """Return this machine's name, and how many rows its servers have."""
    topology = session.topology
    own_host = session.hosts[topology.rank]
    hosts = zip(topology.server_of_rank, session.hosts, strict=True)
    servers = {server for server, host in hosts if host == own_host}
    return own_host, sum(int(bounds[server + 1] - bounds[server]) for server in servers)


@contextmanager
def open_partial_folder(session: Session, target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that all ranks fill and rank 0 renames. All ranks call this.

    If the folder still exists at the end, it is removed. Folders that killed runs left beside ``target`` are
    removed, too. Raises StorageError on all ranks if rank 0 cannot make the folder, or another rank does not
    see it.
    """
    rank = session.topology.rank
    with ExitStack() as stack:

        def make_folder() -> str:
            if rank != 0:
                return ""
            with name_write_failures(target):
                remove_abandoned(target.parent, below=False)
                return str(stack.enter_context(partial_folder(target)))

        def check_folder() -> None:
            if not folder.is_dir():
                raise StorageError(
                    f"{target.parent} is not the same folder on {session.hosts[rank]} as on "
                    f"{session.hosts[0]}. Choose a folder that all machines share."
                )

        folder = Path(broadcast_json(run_on_all_ranks(session, make_folder), session))
        run_on_all_ranks(session, check_folder)
        yield folder


WriteOwn: TypeAlias = Callable[[Path], Sequence[RowFile]]
"""Function that writes this rank's rows into a folder. It calls no collective."""


def save_folder(session: Session, target: Path, write_own: WriteOwn, facts: Mapping[str, object]) -> None:
    """Write the rows from all ranks into one folder, in place of rows that were saved there before.

    All ranks call this, and must see the folder under the same name. After an error, the folder is unchanged.

    Args:
        target: The folder.
        write_own: Function that writes this rank's rows.
        facts: Facts to store in the index. Those of rank 0 count.

    Raises:
        StorageError: on all ranks, if a rank cannot write or does not see the folder, or if the folder holds
            something other than saved rows.
    """
    is_first = session.topology.rank == 0

    def publish(lines: Sequence[object]) -> None:
        index_shares(folder, lines, facts)
        with name_write_failures(target):
            # Check again, because files may have been added meanwhile.
            check_replaceable(target)
            publish_or_replace(folder, target)

    run_on_all_ranks(session, lambda: check_replaceable(target) if is_first else None)
    with open_partial_folder(session, target) as folder:
        own_lines = run_on_all_ranks(session, lambda: write_share(folder, write_own))
        lines = gather_json(own_lines, session)
        run_on_all_ranks(session, lambda: publish(lines) if is_first else None)


def write_share(folder: Path, write_own: WriteOwn) -> list[dict[str, Any]]:
    """Write this rank's rows into a folder and return its lines for the index. The folder may be missing.

    Raises StorageError if the folder cannot be written.
    """
    with name_write_failures(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return [asdict(file) for file in write_own(folder)]


def index_shares(folder: Path, lines_of_ranks: Sequence[Any], facts: Mapping[str, object]) -> None:
    """Write the index from what :func:`write_share` returned on all ranks. One rank calls this."""
    lines = chain.from_iterable(lines_of_ranks)
    files = [RowFile(**line | {"row_shape": tuple(line["row_shape"])}) for line in lines]
    with name_write_failures(folder):
        write_index(folder, files, facts)


InitRows: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Function from (shape, dtype) to first values for the local server's rows. One rank per server calls it."""


def map_shared_rows(
    session: Session, file_name: str, count: int, info: ColumnInfo, init: InitRows | None = None
) -> Array:
    """Return writable (``count``, *row) rows that the local server's ranks share. All ranks call this.

    The memory is freed when no rank holds the array any more. bfloat16 is stored as uint16.

    Args:
        file_name: Unused name in the session's ``scratch``, the same on all ranks of a server.
        init: Function that returns the first values. Without it, rows are 0.

    Raises:
        ConfigError: on all ranks, if memory is short on one of them, or if ``init`` raised or returned
            another shape or dtype.
    """
    path = session.scratch / file_name
    is_leader = session.topology.local_rank == 0
    problem = ""
    if is_leader:
        problem = _create_file(path, count, info, init)
    for text in gather_json(problem, session):
        if text:
            path.unlink(missing_ok=True)
            raise ConfigError(text)

    rows = _map_file(path, count, info)
    barrier(session, f"opening {file_name}")
    if is_leader:
        # Without a name the file is freed when the last rank drops it, however that rank ends.
        path.unlink()
    return rows


def _create_file(path: Path, count: int, info: ColumnInfo, init: InitRows | None) -> str:
    """Create and fill the file. Return an error's text, or "" if there was none."""
    # An empty file cannot be mapped.
    num_bytes = max(1, count * math.prod(info.row_shape) * numpy_dtype(info.dtype).itemsize)
    try:
        with path.open("xb") as file:
            # Reserve the memory now. A full memory file system would kill the process at the first write.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        if init is not None:
            rows = _map_file(path, count, info)
            rows[...] = _compute_first_values(init, rows, info)
    except OSError as error:
        problem = f"{path} cannot be made with {num_bytes} bytes ({error})"
        return f"{problem}. Free memory or use smaller tensors."
    except DglxError as error:
        return str(error)
    return ""


def _compute_first_values(init: InitRows, rows: Array, info: ColumnInfo) -> Array:
    """Return the rows that ``init`` computes. Raise ConfigError if it raises or the rows do not fit."""
    shape = rows.shape
    dtype = torch_dtype(info.dtype)
    try:
        values = init(shape, dtype)
    except Exception as error:
        raise ConfigError(f"init_func raised {type(error).__name__}: {error}") from error
    if not isinstance(values, Tensor):
        raise ConfigError(f"init_func returned a {type(values).__name__}, but it must return a tensor")
    if tuple(values.shape) != shape or values.dtype != dtype:
        raise ConfigError(f"init_func returned {values.dtype} {tuple(values.shape)}, not {dtype} {shape}")
    return view_as_numpy(values.detach().contiguous())


def _map_file(path: Path, count: int, info: ColumnInfo) -> Array:
    return np.asarray(np.memmap(path, numpy_dtype(info.dtype), "r+", shape=(count, *info.row_shape)))
