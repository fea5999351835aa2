"""Copies of other servers' rows in memory that the ranks of one server share (a static cache)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.cluster.session import Session
from dglx_dist.graph.ids import to_tensor
from dglx_dist.graph.shared_rows import shared_rows
from dglx_dist.graph.slot_table import SlotTable, fill_table, table_sizes
from dglx_dist.records import Array, ColumnInfo

PHASE = "cache"
"""Under which the ledger counts what filling takes."""

_SLOTS = ColumnInfo(dtype="int32", row_shape=())
_IDS = ColumnInfo(dtype="int64", row_shape=())


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCache:
    """Some rows of one column. Nothing in it changes any more."""

    table: SlotTable
    """From the id of a row to its slot."""
    rows: Array
    """(C, *row) as NumPy has the column's dtype; slot s is row s."""

    @property
    def num_bytes(self) -> int:
        """Memory of rows and table, once per server."""
        return int(self.rows.nbytes + self.table.slots.nbytes + self.table.keys.nbytes)


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """What a server caches of one column."""

    policy: str
    rows: int
    """Rows of other servers in this server's cache."""
    bytes: int
    """Memory of the server for it: the rows, and the table that finds them."""
    expected_hit_rate: float | None
    """Hits among remote rows that the policy's model promises; None where it has none."""


def fill_cache(
    session: Session,
    file_name: str,
    info: ColumnInfo,
    num_ids: int,
    ids: Array,
    pull: Callable[[Array], Tensor],
) -> RowCache:
    """Fetch rows and share them in the server. Every rank must call it.

    Args:
        session: The run.
        file_name: Start of names not in use in its ``scratch``; the same on the ranks of a server.
        info: Of the column.
        num_ids: Rows of all servers.
        ids: (C,) int64 distinct ids to keep; those of the first rank of each server count.
        pull: Fetches their (C, *row) rows; called on that rank.

    Raises:
        ConfigError: on all ranks, when there is no room on one of them, or a server did not answer.
    """
    leader = session.topology.ranks_of_server(session.topology.server)[0]
    count = int(gather_int64([len(ids)], session)[leader, 0])
    num_slots, num_keys = table_sizes(count, num_ids) if count else (0, 0)
    rows = shared_rows(session, f"{file_name}.rows", count, info, lambda _shape, _dtype: pull(ids))
    keys = shared_rows(session, f"{file_name}.keys", num_keys, _IDS)
    slots = shared_rows(session, f"{file_name}.slots", num_slots, _SLOTS, _filled(ids, keys))
    return RowCache(table=SlotTable(slots, keys), rows=rows)


def _filled(ids: Array, keys: Array) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    def fill(shape: tuple[int, ...], _dtype: torch.dtype) -> Tensor:
        slots = np.empty(shape, np.int32)
        fill_table(SlotTable(slots, keys), ids)
        return to_tensor(slots)

    return fill
