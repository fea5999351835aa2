"""From global ids to places among some rows, compiled and bounded by the number of rows."""

from __future__ import annotations

from typing import final

import numpy as np
from numba import njit

from dglx_dist.graph.slot_table import SlotTable, fill_table, slot_of, table_sizes
from dglx_dist.records import Array


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
