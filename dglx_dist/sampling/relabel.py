"""Global ids to block-local ones: each distinct node gets the next number, in the order of first sight.

A table serves batch after batch without being cleared: an entry counts only if it is at least the table's
``base``, and the base moves past all numbers that a batch gave out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from dglx_dist.records import Array


class Table(NamedTuple):
    """Where the number of a node is noted."""

    slots: Array
    """Direct: (N,) uint32, one per node. Hashed: (C,) uint32, C a power of two, one per slot."""
    keys: Array
    """Direct: length 0. Hashed: (C,) int64, the node in each slot."""
    base: int
    """Entries below it are of earlier batches."""


@njit(cache=True, nogil=True)
def _slot_of(table: Table, node: int) -> np.uint64:
    """Return the slot of ``node``, or the free slot where it belongs (hashed tables only)."""
    last = np.uint64(len(table.keys) - 1)
    word = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15)
    slot = (word >> np.uint64(20)) & last
    while table.slots[slot] >= table.base and table.keys[slot] != node:
        slot = (slot + np.uint64(1)) & last
    return slot


@njit(cache=True, nogil=True)
def number_direct(table: Table, sources: Array, nodes: Array, count: int, local: Array) -> np.int64:
    """Number ``sources``; see :func:`number`."""
    slots = table.slots
    base = np.uint32(table.base)
    # Unsigned positions, because for signed ones every access would first ask whether they are negative.
    end = np.uint64(count)
    for i in range(len(sources)):
        node = np.uint64(sources[i])
        seen = slots[node]
        # Always storing costs less than a branch that the processor cannot foresee.
        fresh = seen < base
        value = np.uint32(base + np.uint32(end)) if fresh else seen
        slots[node] = value
        nodes[end] = node
        end += np.uint64(fresh)
        local[i] = value - base
    return np.int64(end)


@njit(cache=True, nogil=True)
def number_hashed(table: Table, sources: Array, nodes: Array, count: int, local: Array) -> int:
    """Number ``sources``; see :func:`number`."""
    base = np.uint32(table.base)
    for i in range(len(sources)):
        node = np.int64(sources[i])
        slot = _slot_of(table, node)
        if table.slots[slot] < base:
            table.slots[slot] = base + np.uint32(count)
            table.keys[slot] = node
            nodes[count] = node
            count += 1
        local[i] = table.slots[slot] - base
    return count


@njit(cache=True, nogil=True)
def number(table: Table, sources: Array, nodes: Array, count: int, local: Array) -> int:
    """Write the number of each of ``sources`` to ``local``, giving new nodes the next ones.

    Args:
        table: With room: hashed ones need at least twice as many slots as distinct nodes.
        sources: (K,) global ids.
        nodes: (count + K + 1,) global ids by number; the first ``count`` are set.
        count: How many nodes have a number.
        local: (K,) output.

    Returns:
        The new count.
    """
    if len(table.keys) == 0:
        return int(number_direct(table, sources, nodes, count, local))
    return number_hashed(table, sources, nodes, count, local)


@njit(cache=True, nogil=True)
def with_room(table: Table, nodes: Array, count: int, more: int) -> Table:
    """Return a table that can take ``more`` nodes, holding the numbers of ``nodes[:count]``."""
    if len(table.keys) == 0 or len(table.keys) >= 2 * (count + more):
        return table
    table = enlarged(table, 2 * (count + more))
    insert(table, nodes, count)
    return table


@njit(cache=True, nogil=True)
def enlarged(table: Table, slots: int) -> Table:
    """Return an empty hashed table with at least ``slots`` slots and the base of ``table``."""
    capacity = np.int64(len(table.keys))
    while capacity < slots:
        capacity *= 2
    return Table(np.zeros(capacity, np.uint32), np.empty(capacity, np.int64), table.base)


@njit(cache=True, nogil=True)
def insert(table: Table, nodes: Array, count: int) -> None:
    """Give ``nodes[:count]``, not in the hashed ``table`` yet, the numbers 0 ... count - 1."""
    for i in range(count):
        slot = _slot_of(table, nodes[i])
        table.slots[slot] = np.uint32(table.base) + np.uint32(i)
        table.keys[slot] = nodes[i]
