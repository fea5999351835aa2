"""Rows of features and edges that are kept on disk, so that they come over the network once.

What GraNNDis calls LOAD and UNLOAD of a co-batch (algorithms 3.4): ``<folder>/<digest>/``, where the digest
stands for the column and the ids. Rows are mapped, so that memory holds those of the co-batches in use.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor

from dglx_dist.errors import StorageError
from dglx_dist.graph.column import Column
from dglx_dist.graph.dtypes import numpy_view, tensor_view
from dglx_dist.records import Array
from dglx_dist.storage.folders import seal, unseal
from dglx_dist.strategies.granndis.kept_folders import keep_folder

_LOG = logging.getLogger(__name__)
ROWS = "rows.npy"


@final
class RowFiles:
    """The rows of one rank. Not collective; one thread at a time.

    Args:
        folder: Where to, beside the dataset that the columns are of.
        server: Of this rank.
    """

    def __init__(self, folder: Path, server: int) -> None:
        self._folder, self._server = folder, server
        self._has_room = True

    def takes(self, column: Column, ids: Array) -> bool:
        """Whether rows are worth keeping: they cannot change, and some are not this server's own.

        Those of the own server alone lie in its files already.

        Args:
            column: Of what.
            ids: (K,) int64.
        """
        first, last = column.bounds[self._server : self._server + 2]
        has_foreign = bool(((ids < first) | (ids >= last)).any())
        return has_foreign and not column.writable and column.row_bytes > 0

    def read(self, column: Column, ids: Array) -> Tensor | None:
        """Return (K, *row), mapped, of the stored dtype; None where they are not here or damaged (logged).

        Reads them once, to compare their checksum, so that they are in memory when they are used. What is
        written to them stays in memory.
        """
        target = self._of(column, ids)
        if not target.exists():
            return None
        try:
            unseal(target)
            rows = np.load(target / ROWS, mmap_mode="c", allow_pickle=False)
        except (StorageError, OSError, ValueError) as problem:
            _LOG.warning("%s", problem)
            return None
        return tensor_view(np.asarray(rows), column.info)

    def write(self, column: Column, ids: Array, rows: Tensor) -> bool:
        """Keep ``rows`` (K, *row), as they are stored; return whether that could be done.

        When it could not, that is logged, once, and not tried again.

        Raises:
            StorageError: the system fails in another way than by refusing to write.
        """
        values = np.ascontiguousarray(numpy_view(rows))

        def fill(partial: Path) -> None:
            np.save(partial / ROWS, values, allow_pickle=False)
            seal(partial, {})

        what = f"what was fetched of {column.name!r}"
        self._has_room = self._has_room and keep_folder(self._of(column, ids), fill, what)
        return self._has_room

    def _of(self, column: Column, ids: Array) -> Path:
        digest = hashlib.blake2b(np.ascontiguousarray(ids, np.int64).data, digest_size=16)
        digest.update(json.dumps([column.name, column.info.dtype, *column.info.row_shape]).encode())
        return self._folder / digest.hexdigest()
