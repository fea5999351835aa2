"""A rank's plan in a folder: one file of numbers and one that says where each array stands in it.

Numbers are mapped, not read, so that ranks of a server may have a plan before it is used. A folder is written
under another name and renamed; see :mod:`dglx_dist.data.storage.files`.
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
# What numpy raises in the middle of an array, when the disk is full, has no number.
_NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, None)


def keep_folder(target: Path, fill: Callable[[Path], None], what: str) -> bool:
    """Have ``fill`` write into a folder, and name it ``target``, in the place of what is there.

    Args:
        target: It appears whole or not at all.
        fill: Is given an empty folder.
        what: For messages: "the plan".

    Returns:
        Whether that could be done; it is logged when not.

    Raises:
        StorageError: the system fails in another way than by refusing to write.
    """
    try:
        with partial_folder(target) as partial:
            fill(partial)
            if not publish(partial, target):
                replace_folder(partial, target)
    except OSError as problem:
        if problem.errno in _NO_ROOM:
            _LOG.warning("%s cannot be written (%s): %s is not kept on disk", target, problem, what)
            return False
        raise StorageError(f"{target} cannot be written ({problem}); see to the disk") from problem
    return True


Received: TypeAlias = tuple[tuple[int, int], ...]
"""(rank, rows that come from it), ascending by rank; ranks that send nothing are left out."""

Sent: TypeAlias = tuple[tuple[int, Array], ...]
"""(rank, (n,) int64 own rows that go to it), ascending by rank; ranks that get nothing are left out."""


@final
@dataclass(frozen=True, kw_only=True)
class HaloLayer:
    """One layer's block on one rank, l of ``1..L`` (algorithms 3.1, 3.2b).

    Its sources are the rank's own rows of the layer before, then the halo: rows that other ranks hold,
    contiguous by rank in ascending order and ascending by id within a rank. Its targets are the first
    ``targets`` of the own rows. All in-edges of every target are here, each once, and no others.
    """

    own_rows: int
    """Rows of layer l - 1 that this rank holds: at layer 1 rows of the features."""
    targets: int
    """Rows of layer l that this rank computes; at most :attr:`own_rows`."""
    indptr: Array
    """(targets + 1,) int64; the in-edges of target i are at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(E,) int64 sources: below :attr:`own_rows` own rows, then places in the halo."""
    edge_ids: Array
    """(E,) int64 global edge ids."""
    halo_nodes: Array
    """(n_halo,) int64 global ids of the halo's rows, in the order in which they arrive."""
    receive: Received
    """Which ranks the halo comes from; the counts add up to n_halo."""
    send: Sent
    """Which own rows others need; as many as the peer's :attr:`receive` says, in the order of their ids."""

    @property
    def num_sources(self) -> int:
        """Own rows and halo together."""
        return self.own_rows + len(self.halo_nodes)

    def halo_of(self, rank: int) -> Array:
        """Return the (n,) ascending int64 global ids of the halo's rows that ``rank`` holds."""
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

    Rows are ordered by the last layer that needs them, latest first, and by id within: the rows of layer l
    are the first ones of the rows of layer l - 1, and their in-edges the first ones of layer l - 1's.
    """

    nodes: Array
    """(n,) int64 global ids of the rows of the features that this rank holds."""
    layers: tuple[HaloLayer, ...]
    """The L layers, input-most first."""
    hops: int
    """k: how many layers the server computes without others (0: full_graph, L: nothing crosses)."""
    server_nodes: int
    """|R_i^0|: rows of the features that the ranks of this server hold together."""
    inner_nodes: int
    """|I_i|: nodes that the server owns."""
    external_nodes: int
    """|R_i^0 without I_i|: rows of the features that come from other servers, once."""

    @property
    def seeds(self) -> int:
        """Rows of the output that this rank computes."""
        return self.layers[-1].targets

    @property
    def expansion(self) -> float:
        """D_i: how many rows of the features the server holds per node of its own (algorithms 3.1).

        Below 1 where the seeds do not need all of the server's own nodes.
        """
        return self.server_nodes / self.inner_nodes

    def rows(self, level: int) -> Array:
        """Return the (n_l,) int64 global ids of this rank's rows of the output of layer ``level``, 0..L."""
        count = self.layers[0].own_rows if level == 0 else self.layers[level - 1].targets
        return self.nodes[:count]


VERSION = 3
NUMBERS = "numbers.npy"

_ARRAYS = ("indptr", "indices", "edge_ids", "halo_nodes")
_COUNTS = ("own_rows", "targets")


def write_plan(folder: Path, plan: RankPlan) -> None:
    """Write ``plan`` into ``folder``, which exists and is empty.

    Args:
        folder: Where to.
        plan: All of its arrays are int64.

    Raises:
        OSError: the system refuses; see ``named_failures``.
    """
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
    """Return the plan in ``folder``, with arrays that are mapped; what is written to them stays in memory.

    Reads them once, to compare their checksum.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    head = unseal(folder)
    try:
        flat = np.load(folder / NUMBERS, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise damaged(folder, problem) from problem
    ends = np.cumsum([0, *head["lengths"]])
    pieces = iter([np.asarray(flat[first:last]) for first, last in pairwise(ends)])
    nodes = next(pieces)
    distinct = iter([_layer(told, pieces) for told in head["layers"]])
    layers: list[HaloLayer] = []
    for is_same in head["same_as_before"]:
        layers.append(layers[-1] if is_same else next(distinct))
    return RankPlan(nodes=nodes, layers=tuple(layers), **head["scalars"])


def _scalars() -> tuple[str, ...]:
    return tuple(field.name for field in fields(RankPlan) if field.name not in ("nodes", "layers"))


def _distinct(plan: RankPlan) -> list[HaloLayer]:
    """Return the layers that are not the one before: deep models have many on one structure."""
    return [one for n, one in enumerate(plan.layers) if not n or one is not plan.layers[n - 1]]


def _arrays(plan: RankPlan) -> Iterator[Array]:
    yield plan.nodes
    for layer in _distinct(plan):
        for name in _ARRAYS:
            yield getattr(layer, name)
        for _, rows in layer.send:
            yield rows


def _layer(told: Mapping[str, Any], pieces: Iterator[Array]) -> HaloLayer:
    scalars: dict[str, Any] = {name: int(told[name]) for name in _COUNTS}
    arrays: dict[str, Any] = {name: next(pieces) for name in _ARRAYS}
    return HaloLayer(
        **scalars,
        **arrays,
        receive=tuple((int(rank), int(count)) for rank, count in told["receive"]),
        send=tuple((int(rank), next(pieces)) for rank in told["send"]),
    )


@final
class PlanCache:
    """The plans of one rank. Not collective; one thread at a time.

    What a rank that was killed left half written is removed, of any plans of the dataset.

    Args:
        dataset: Beside which they are kept.
        facts: Everything that they depend on besides the dataset, JSON values, equal on all ranks.
        rank: Whose plans.
    """

    def __init__(self, dataset: StoredDataset, facts: Mapping[str, Any], rank: int) -> None:
        text = json.dumps({**facts, "version": VERSION}, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.folder = dataset.folder / CACHE / f"cobatches-{dataset.manifest.checksum}" / key
        self._rank, self._has_room = rank, True
        remove_abandoned(self.folder.parent)

    @property
    def rows_folder(self) -> Path:
        """Where this rank keeps the columns of its plans' rows; see :class:`RowFiles`."""
        return self.folder / f"rows-{self._rank}"

    def holds(self, step: int) -> bool:
        """Whether the plan of ``step`` is here and sound; a damaged one is logged."""
        target = self._of(step)
        if not target.exists():
            return False
        try:
            read_plan(target)
        except StorageError as problem:
            _LOG.warning("%s", problem)
            return False
        return True

    def read(self, step: int) -> RankPlan:
        """Return the plan of ``step``, mapped.

        Raises:
            StorageError: it is not there, or damaged.
        """
        return read_plan(self._of(step))

    def write(self, step: int, plan: RankPlan) -> bool:
        """Keep the plan of ``step``; return whether that could be done.

        When it could not, that is logged, once, and not tried again. What is there is replaced, sound or not:
        it may be of an earlier run whose plans the other ranks have lost, and the ranks' plans fit together
        only when they were made together.

        Raises:
            StorageError: the system fails in another way than by refusing to write.
        """
        self._has_room = self._has_room and keep_folder(
            self._of(step), lambda partial: write_plan(partial, plan), "the plan"
        )
        return self._has_room

    def _of(self, step: int) -> Path:
        return self.folder / f"{step}-{self._rank}"


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


class PlanSource(ABC):
    """The plans of this rank. All ranks have as many steps and ask for the same ones in the same order.

    Nothing here is collective, so that a loader's thread may ask while the model trains.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, equal on all ranks."""

    @abstractmethod
    def plan(self, epoch: int, step: int) -> RankPlan:
        """Return the plan of a step; the same object as before where the plan is the same.

        Raises:
            PeerError: a rank that has to do with it is dead, or did not make its part within the time-out.
        """

    @abstractmethod
    def share(self, epoch: int, step: int) -> StepShare:
        """Return how many seeds this rank and all ranks have in a step; for steps that were planned."""

    @property
    def row_files(self) -> RowFiles | None:
        """Where the columns of the plans' rows are kept on disk; None: nowhere, or the loader holds them."""
        return None

    def close(self) -> None:
        """End what is under way; nothing is asked for afterwards. May be called twice."""
        return


@final
class OnePlan(PlanSource):
    """One step an epoch, always the same.

    Args:
        plan: The plan.
        share: How many seeds this rank and all ranks have.
    """

    def __init__(self, plan: RankPlan, share: StepShare) -> None:
        self._plan, self._share = plan, share

    def __len__(self) -> int:
        """See :meth:`PlanSource.__len__`: 1."""
        return 1

    def plan(self, epoch: int, step: int) -> RankPlan:
        """See :meth:`PlanSource.plan`."""
        return self._plan

    def share(self, epoch: int, step: int) -> StepShare:
        """See :meth:`PlanSource.share`."""
        return self._share


@final
class RowIndex:
    """Where each of some rows stands.

    Takes 4 bytes for each of ``num_ids`` ids, or 24 to 48 per row where that is less.

    Args:
        ids: (n,) int64 distinct ids in [0, ``num_ids``), any order; the row of ``ids[p]`` has the place p.
        num_ids: How many ids there are at all.
    """

    def __init__(self, ids: Array, num_ids: int) -> None:
        num_slots, num_keys = table_sizes(len(ids), num_ids, direct_limit=0)
        self._table = SlotTable(np.empty(num_slots, np.int32), np.empty(num_keys, np.int64))
        fill_table(self._table, ids)

    def places(self, ids: Array) -> Array:
        """Return the (K,) int64 places of the (K,) int64 ``ids``, -1 where one is no row."""
        places = np.empty(len(ids), np.int64)
        _places(self._table, ids, places)
        return places


@njit(cache=True, nogil=True)
def _places(table: SlotTable, ids: Array, places: Array) -> None:
    for k in range(len(ids)):
        places[k] = slot_of(table, ids[k])
