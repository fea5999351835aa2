"""One part's columns of a feature in a file beside the dataset: written in one pass, checked, memory-mapped.

``<dataset>/cache/columns-<checksum>/<node type>/<feature>/<first>-<last>/`` has ``values.npy``, which NumPy
can read by itself, and ``stamp.json``, see :func:`seal`. A folder appears whole or not at all.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import final

import numpy as np

from dglx_dist.errors import StorageError
from dglx_dist.layers.columns import Columns, deal_out_columns
from dglx_dist.progress import progress
from dglx_dist.records import LABEL, Array, ColumnInfo
from dglx_dist.storage.columns import FileInfo, numpy_dtype
from dglx_dist.storage.folders import damaged, partial_folder, publish, replace_folder, seal, unseal
from dglx_dist.storage.layout import CACHE, safe_name
from dglx_dist.storage.reader import StoredDataset
from dglx_dist.storage.writer import CHUNK_BYTES

VALUES = "values.npy"
WORTH_SHOWING = 1 << 28
"""Bytes that take long enough for somebody to wonder."""

_LOG = logging.getLogger(__name__)


def slice_folder(dataset: StoredDataset, ntype: str, name: str, columns: Columns) -> Path:
    """Return where ``columns`` of the node feature ``name`` lie, written or not."""
    base = dataset.folder / CACHE / f"columns-{dataset.manifest.checksum}"
    return base / safe_name(ntype) / safe_name(name) / f"{columns.first}-{columns.last}"


def read_slice(folder: Path, info: ColumnInfo, num_rows: int) -> Array | None:
    """Map the (N, F_p) values of one folder, read-only; bfloat16 as its bits in uint16.

    The file is read once, to compare its checksum.

    Returns:
        None when there are none, or they are damaged or of something else, which is logged.
    """
    if not folder.exists():
        return None
    try:
        return _mapped(folder, info, num_rows)
    except StorageError as problem:
        _LOG.warning("%s", problem)
        return None


def _mapped(folder: Path, info: ColumnInfo, num_rows: int) -> Array:
    told = _told(info, num_rows)
    if (found := unseal(folder)) != told:
        raise damaged(folder, f"it is {found} instead of {told}")
    try:
        return np.asarray(np.load(folder / VALUES, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as problem:
        raise damaged(folder, problem) from problem


def _told(info: ColumnInfo, num_rows: int) -> dict[str, object]:
    return {"dtype": info.dtype, "shape": [num_rows, *info.row_shape]}


@final
class SliceWriter:
    """Writes the rows of one slice, in order, to ``folder``, which exists and is not yet seen by others.

    Args:
        folder: Where to.
        info: Dtype and row shape, (F_p,).
        num_rows: N.

    Raises:
        OSError: the folder cannot be written, or the disk has no room for all of it.
    """

    def __init__(self, folder: Path, info: ColumnInfo, num_rows: int) -> None:
        self._folder, self._info, self._num_rows = folder, info, num_rows
        self._dtype, self._checksum = numpy_dtype(info.dtype), 0
        needed = num_rows * info.row_shape[0] * self._dtype.itemsize
        if shutil.disk_usage(folder).free < needed:
            # Said before a byte has moved.
            raise OSError(errno.ENOSPC, f"no room for {needed} bytes", str(folder))
        head = io.BytesIO()
        shape = (num_rows, *info.row_shape)
        np.lib.format.write_array_header_2_0(
            head, {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        )
        self._file = (folder / VALUES).open("x+b", buffering=0)
        self.num_rows = 0
        """Rows that are in the file."""
        self._first_byte = self._put(head.getbuffer())

    def append(self, rows: Array) -> None:
        """Write the next (k, F_p) rows.

        Raises:
            OSError: they cannot be written; those before them are still there.
        """
        self._put(np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8).data)
        self.num_rows += len(rows)

    def written(self) -> Array:
        """Return the rows that are in the file, (k, F_p), in memory."""
        rows = np.empty((self.num_rows, *self._info.row_shape), self._dtype)
        data, done = rows.reshape(-1).view(np.uint8).data, 0
        while done < len(data):
            # From the open file: it may have another name by now, or none.
            count = os.preadv(self._file.fileno(), [data[done:]], self._first_byte + done)
            if not count:
                raise StorageError(f"{self._folder / VALUES} was cut short while it was written; try again")
            done += count
        return rows

    def finish(self) -> None:
        """Reach the disk, and stamp what is there as whole.

        Raises:
            OSError: the disk refuses.
        """
        os.fsync(self._file.fileno())
        known = FileInfo(num_bytes=self._file.tell(), checksum=f"{self._checksum:08x}")
        seal(self._folder, _told(self._info, self._num_rows), {VALUES: known})

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        self._file.close()

    def _put(self, data: memoryview) -> int:
        done = 0
        while done < len(data):
            done += self._file.write(data[done:]) or 0
        self._checksum = zlib.crc32(data, self._checksum)
        return done


def put_in_place(partial: Path, target: Path, info: ColumnInfo, num_rows: int) -> None:
    """Rename a finished folder to ``target``, unless somebody else's whole one is there already.

    Raises:
        OSError: it cannot be renamed.
    """
    if publish(partial, target):
        return
    try:
        _mapped(target, info, num_rows)
    except StorageError:
        replace_folder(partial, target)


def write_slices(dataset: StoredDataset, num_parts: int) -> None:
    """Write the columns that each of ``num_parts`` ranks holds, of every matrix of node features.

    Reads the dataset once, a chunk at a time; doubles the disk space of those features. One process calls
    it. Passed over are graphs of several node types, whose columns no strategy cuts, and one part of one
    rank, which maps the rows as they are.

    Raises:
        StorageError: the folder cannot be written, or a part is damaged.
    """
    manifest = dataset.manifest
    if len(manifest.node_types) > 1 or num_parts == manifest.num_parts == 1:
        return
    for ntype in manifest.node_types:
        for name, info in manifest.node_columns[ntype].items():
            if name != LABEL and len(info.row_shape) == 1 and info.row_shape[0] and manifest.num_nodes(ntype):
                try:
                    _write_feature(dataset, ntype, name, info, num_parts)
                except OSError as problem:
                    raise StorageError(
                        f"the columns of {name!r} cannot be written into {dataset.folder}: {problem}; the "
                        "dataset is whole without them, and training then makes them at the start"
                    ) from problem


def _write_feature(dataset: StoredDataset, ntype: str, name: str, info: ColumnInfo, num_parts: int) -> None:
    num_rows = dataset.manifest.num_nodes(ntype)
    cuts = [columns for columns in deal_out_columns(info.row_shape[0], num_parts) if len(columns)]
    infos = [ColumnInfo(dtype=info.dtype, row_shape=(len(columns),)) for columns in cuts]
    targets = [slice_folder(dataset, ntype, name, columns) for columns in cuts]
    row_bytes = info.row_shape[0] * numpy_dtype(info.dtype).itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    with (
        ExitStack() as stack,
        progress(f"Columns of {name}", num_rows, enabled=num_rows * row_bytes > WORTH_SHOWING) as advance,
    ):
        folders = [stack.enter_context(partial_folder(target)) for target in targets]
        writers = [SliceWriter(*job, num_rows) for job in zip(folders, infos, strict=True)]
        for writer in writers:
            stack.callback(writer.close)
        for part in range(dataset.manifest.num_parts):
            rows = dataset.part(part).node_data(ntype, name)
            for first in range(0, len(rows), step):
                chunk = rows[first : first + step]
                for writer, columns in zip(writers, cuts, strict=True):
                    writer.append(chunk[:, columns.cut])
                advance(len(chunk))
        for writer, folder, target, cut in zip(writers, folders, targets, infos, strict=True):
            writer.finish()
            put_in_place(folder, target, cut, num_rows)
