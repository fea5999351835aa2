"""Plans of full-graph steps: records, sources of plans, and their files beside the dataset.

A plan on disk is a folder with one array file and one JSON header. The array is memory-mapped. A folder is
written under a temporary name and renamed; see :mod:`dglx_dist.data.storage.files`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from numba import njit
from torch import Tensor

from dglx_dist.data.storage.columns import CACHE
from dglx_dist.data.storage.files import (
    damaged,
    partial_folder,
    publish,
    remove_abandoned,
    replace_folder,
    seal,
    unseal,
)
from dglx_dist.data.storage.reader import StoredDataset
from dglx_dist.errors import StorageError
from dglx_dist.graph.column import Column
from dglx_dist.graph.row_kernels import SlotTable, fill_table, numpy_view, slot_of, table_sizes, tensor_view
from dglx_dist.records import Array, StepShare

_LOG = logging.getLogger(__name__)
# None: NumPy raises an OSError without errno when the disk fills up in the middle of an array.
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, None)

Received: TypeAlias = tuple[tuple[int, int], ...]
"""(rank, rows received from it), ascending by rank, without ranks that send nothing."""

Sent: TypeAlias = tuple[tuple[int, Array], ...]
"""(rank, (n,) int64 own rows sent to it), ascending by rank, without ranks that receive nothing."""


@final
@dataclass(frozen=True, kw_only=True)
class HaloLayer:
    """One layer's block on one rank, l of ``1..L``.

    The sources are the rank's own rows of the previous layer, followed by the halo: rows of other ranks,
    grouped by rank in ascending order and ascending by id within a rank. The targets are the first
    ``targets`` own rows. The block holds each in-edge of every target once, and no other edges.
    """

    own_rows: int
    """Rows of layer l - 1 that this rank holds: at layer 1 rows of the features."""
    targets: int
    """Rows of layer l that this rank computes; at most :attr:`own_rows`."""
    indptr: Array
    """(targets + 1,) int64; the in-edges of target i are at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(E,) int64 sources: own rows below :attr:`own_rows`, then positions in the halo."""
    edge_ids: Array
    """(E,) int64 global edge ids."""
    halo_nodes: Array
    """(n_halo,) int64 global ids of the halo rows, in the order of arrival."""
    receive: Received
    """Ranks that send the halo; the counts add up to n_halo."""
    send: Sent
    """Own rows that other ranks need, ordered by id; as many as the peer's :attr:`receive` says."""

    @property
    def num_sources(self) -> int:
        return self.own_rows + len(self.halo_nodes)

    def halo_of(self, rank: int) -> Array:
        """Return the (n,) ascending int64 global ids of the halo rows that ``rank`` holds."""
        first = 0
        for other, count in self.receive:
            if other == rank:
                return self.halo_nodes[first : first + count]
            first += count
        return self.halo_nodes[:0]


@final
@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's share of a full-graph step.

    Rows are sorted by the last layer that needs them (latest first), then by id. So the rows of layer l are a
    prefix of the rows of layer l - 1, and their in-edges a prefix of the in-edges of layer l - 1.
    """

    nodes: Array
    """(n,) int64 global ids of the feature rows of this rank."""
    layers: tuple[HaloLayer, ...]
    """The L layers, input layer first."""
    hops: int
    """k: number of layers that the server computes alone (0: full_graph, L: no rows cross servers)."""
    server_nodes: int
    """|R_i^0|: feature rows of all ranks of this server."""
    inner_nodes: int
    """|I_i|: nodes owned by the server."""
    external_nodes: int
    """|R_i^0 without I_i|: feature rows fetched from other servers, once."""

    @property
    def seeds(self) -> int:
        return self.layers[-1].targets

    def rows(self, level: int) -> Array:
        """Return the (n_l,) int64 global ids of this rank's rows of the output of layer ``level``, 0..L."""
        count = self.layers[0].own_rows if level == 0 else self.layers[level - 1].targets
        return self.nodes[:count]


@final
class RowIndex:
    """Hash index from (n,) int64 distinct ids in [0, ``num_ids``) to their positions.

    Takes 4 bytes for each of ``num_ids`` ids, or 24 to 48 bytes per row if that is less.
    """

    def __init__(self, ids: Array, num_ids: int) -> None:
        num_slots, num_keys = table_sizes(len(ids), num_ids, direct_limit=0)
        self._table = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
        fill_table(self._table, ids)

    def places(self, ids: Array) -> Array:
        """Return the (K,) int64 positions of the (K,) int64 ``ids``; -1 for ids without a row."""
        places = np.empty(len(ids), np.int64)
        _places(self._table, ids, places)
        return places


@njit(cache=True, nogil=True)
def _places(table: SlotTable, ids: Array, places: Array) -> None:
    for k in range(len(ids)):
        places[k] = slot_of(table, ids[k])


class PlanSource(ABC):
    """The plans of this rank. All ranks have the same number of steps and request them in the same order.

    No method uses collectives, so a loader thread can request plans while the model trains.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, equal on all ranks."""

    @abstractmethod
    def plan(self, epoch: int, step: int) -> RankPlan:
        """Return the plan of a step; the same object again if it is unchanged. Raises PeerError."""

    @abstractmethod
    def share(self, epoch: int, step: int) -> StepShare:
        """Return the seeds of this rank and of all ranks in a planned step."""

    @property
    def row_files(self) -> RowFiles | None:
        """Files of the columns of planned rows; None: not kept on disk, or held by the loader."""
        return None

    def close(self) -> None:
        """Finish pending plans. No requests follow. May be called twice."""
        return


VERSION = 3
NUMBERS = "numbers.npy"

_ARRAYS = ("indptr", "indices", "edge_ids", "halo_nodes")
_COUNTS = ("own_rows", "targets")


def write_plan(folder: Path, plan: RankPlan) -> None:
    """Write ``plan``, whose arrays are int64, into the existing empty ``folder``; may raise OSError."""
    arrays = [np.ascontiguousarray(array, np.int64) for array in _arrays(plan)]
    flat = np.concatenate(arrays)
    np.save(folder / NUMBERS, flat, allow_pickle=False)
    head = {
        "lengths": [len(array) for array in arrays],
        "scalars": {name: getattr(plan, name) for name in _scalars()},
        "layers": [
            {name: getattr(layer, name) for name in _COUNTS}
            | {"receive": layer.receive, "send": [rank for rank, _ in layer.send]}
            for layer in _distinct(plan)
        ],
        "same_as_before": [bool(n) and layer is plan.layers[n - 1] for n, layer in enumerate(plan.layers)],
    }
    seal(folder, head)


def read_plan(folder: Path) -> RankPlan:
    """Return the plan in ``folder``, mapped copy-on-write; StorageError if it is missing or damaged."""
    head = unseal(folder)
    try:
        flat = np.load(folder / NUMBERS, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise damaged(folder, problem) from problem
    ends = np.cumsum([0, *head["lengths"]])
    pieces = iter([np.asarray(flat[first:last]) for first, last in pairwise(ends)])
    nodes = next(pieces)
    distinct = iter([_layer(header, pieces) for header in head["layers"]])
    layers: list[HaloLayer] = []
    for is_same in head["same_as_before"]:
        layers.append(layers[-1] if is_same else next(distinct))
    return RankPlan(nodes=nodes, layers=tuple(layers), **head["scalars"])


def _scalars() -> tuple[str, ...]:
    return tuple(field.name for field in fields(RankPlan) if field.name not in ("nodes", "layers"))


def _distinct(plan: RankPlan) -> list[HaloLayer]:
    # Deep models have many layers on one structure.
    return [layer for n, layer in enumerate(plan.layers) if not n or layer is not plan.layers[n - 1]]


def _arrays(plan: RankPlan) -> Iterator[Array]:
    yield plan.nodes
    for layer in _distinct(plan):
        for name in _ARRAYS:
            yield getattr(layer, name)
        for _, rows in layer.send:
            yield rows


def _layer(header: Mapping[str, Any], pieces: Iterator[Array]) -> HaloLayer:
    scalars: dict[str, Any] = {name: int(header[name]) for name in _COUNTS}
    arrays: dict[str, Any] = {name: next(pieces) for name in _ARRAYS}
    return HaloLayer(
        **scalars,
        **arrays,
        receive=tuple((int(rank), int(count)) for rank, count in header["receive"]),
        send=tuple((int(rank), next(pieces)) for rank in header["send"]),
    )


@final
class PlanCache:
    """The plans of one rank on disk, in the cache folder of ``dataset``. Not collective, not thread-safe.

    ``facts`` are all other inputs of the plans as JSON values, equal on all ranks. The constructor removes
    partial writes of killed ranks, for all plans of the dataset.
    """

    def __init__(self, dataset: StoredDataset, facts: Mapping[str, Any], rank: int) -> None:
        text = json.dumps({**facts, "version": VERSION}, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.folder = dataset.folder / CACHE / f"cobatches-{dataset.manifest.checksum}" / key
        self._rank, self._can_write = rank, True
        remove_abandoned(self.folder.parent)

    @property
    def rows_folder(self) -> Path:
        return self.folder / f"rows-{self._rank}"

    def holds(self, step: int) -> bool:
        """Return whether the plan of ``step`` exists and is undamaged; damage is logged."""
        target = self._folder_of(step)
        if not target.exists():
            return False
        try:
            read_plan(target)
        except StorageError as problem:
            _LOG.warning("%s", problem)
            return False
        return True

    def read(self, step: int) -> RankPlan:
        """Return the mapped plan of ``step``; raise StorageError if it is missing or damaged."""
        return read_plan(self._folder_of(step))

    def write(self, step: int, plan: RankPlan) -> bool:
        """Store the plan of ``step``; return whether it was written.

        The first failure is logged, and later calls do not try again. An existing plan is replaced even if it
        is undamaged: it may stem from an earlier run whose plans other ranks have lost, and only plans made
        together fit together.
        """
        self._can_write = self._can_write and write_folder_if_possible(
            self._folder_of(step), lambda partial: write_plan(partial, plan), "the plan"
        )
        return self._can_write

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"{step}-{self._rank}"


ROWS = "rows.npy"


@final
class RowFiles:
    """Fetched column rows of one rank on disk. Not collective, not thread-safe."""

    def __init__(self, folder: Path, server: int) -> None:
        self._folder, self._server = folder, server
        self._can_write = True

    def takes(self, column: Column, ids: Array) -> bool:
        """Return whether to store the rows of ``ids``: read-only, and some from other servers."""
        first, last = column.bounds[self._server : self._server + 2]
        has_foreign = bool(((ids < first) | (ids >= last)).any())
        return has_foreign and not column.writable and column.row_bytes > 0

    def read(self, column: Column, ids: Array) -> Tensor | None:
        """Return (K, *row), copy-on-write mapped, in the stored dtype; None if missing or damaged (logged).

        The checksum is verified, so the rows are in the page cache when they are used.
        """
        target = self._folder_of(column, ids)
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
        """Store ``rows`` (K, *row) in the stored dtype; return whether they were written."""
        values = np.ascontiguousarray(numpy_view(rows))

        def fill(partial: Path) -> None:
            np.save(partial / ROWS, values, allow_pickle=False)
            seal(partial, {})

        what = f"the fetched rows of {column.name!r}"
        self._can_write = self._can_write and write_folder_if_possible(
            self._folder_of(column, ids), fill, what
        )
        return self._can_write

    def _folder_of(self, column: Column, ids: Array) -> Path:
        digest = hashlib.blake2b(np.ascontiguousarray(ids, np.int64).data, digest_size=16)
        digest.update(json.dumps([column.name, column.info.dtype, *column.info.row_shape]).encode())
        return self._folder / digest.hexdigest()


def write_folder_if_possible(target: Path, fill: Callable[[Path], None], what: str) -> bool:
    """Replace ``target`` atomically by what ``fill`` writes; log and return False if there is no space."""
    try:
        with partial_folder(target) as partial:
            fill(partial)
            if not publish(partial, target):
                replace_folder(partial, target)
    except OSError as problem:
        if problem.errno in _CANNOT_WRITE:
            _LOG.warning("%s cannot be written (%s): %s is not kept on disk", target, problem, what)
            return False
        raise StorageError(f"{target} cannot be written ({problem}); check the disk") from problem
    return True
