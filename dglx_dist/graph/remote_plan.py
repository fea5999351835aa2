"""Which distinct remote rows a pull needs of which server, and where each of them goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """The remote part of K asked ids, without repeats, grouped by server.

    A slot is a distinct remote id. Slots of one server are neighbours.
    """

    ids: Array
    """(slots,) int64 distinct remote ids, grouped by server, inside one in order of appearance."""
    server_starts: Array
    """(S + 1,) int64; the slots of server s are ``[s]:[s + 1]``, none for one's own."""
    starts: Array
    """(slots + 1,) int64; slot s is asked for at ``positions[starts[s]:starts[s + 1]]``."""
    positions: Array
    """(remote places,) int64 positions in the asked ids."""


def plan_remote(ids: Array, bounds: Array, own_server: int) -> RemotePlan:
    """Split off the remote ids of ``ids``, each once.

    Args:
        ids: (K,) int64 in [0, ``bounds[-1]``), any order, repeats allowed.
        bounds: (S + 1,) int64; server s owns the ids ``bounds[s]:bounds[s + 1]``.
        own_server: The server whose rows are not remote.
    """
    return RemotePlan(**dict(zip(_FIELDS, _plan(ids, bounds, own_server), strict=True)))


_FIELDS = ("ids", "server_starts", "starts", "positions")


@njit(cache=True, nogil=True)
def _plan(ids: Array, bounds: Array, own: int) -> Any:
    low, high = bounds[own], bounds[own + 1]
    places = np.empty(_count_outside(ids, low, high), np.int64)
    k = 0
    for position in range(ids.shape[0]):
        if ids[position] < low or ids[position] >= high:
            places[k] = position
            k += 1
    slot_of_place = np.empty(len(places), np.int64)
    distinct = _distinct(ids, places, slot_of_place)

    servers = len(bounds) - 1
    server_of = np.empty(len(distinct), np.int64)
    server_starts = np.zeros(servers + 1, np.int64)
    for slot in range(len(distinct)):
        server = np.searchsorted(bounds, distinct[slot], side="right") - 1
        server_of[slot] = server
        server_starts[server + 1] += 1
    server_starts = np.cumsum(server_starts)

    next_slot = server_starts[:-1].copy()
    new_slot = np.empty(len(distinct), np.int64)
    grouped = np.empty(len(distinct), np.int64)
    for slot in range(len(distinct)):
        to = next_slot[server_of[slot]]
        next_slot[server_of[slot]] += 1
        new_slot[slot] = to
        grouped[to] = distinct[slot]

    starts = np.zeros(len(distinct) + 1, np.int64)
    for place in range(len(places)):
        starts[new_slot[slot_of_place[place]] + 1] += 1
    starts = np.cumsum(starts)
    fill = starts[:-1].copy()
    positions = np.empty(len(places), np.int64)
    for place in range(len(places)):
        slot = new_slot[slot_of_place[place]]
        positions[fill[slot]] = places[place]
        fill[slot] += 1
    return grouped, server_starts, starts, positions


@njit(cache=True, nogil=True)
def _count_outside(ids: Array, low: int, high: int) -> int:
    count = 0
    for k in range(ids.shape[0]):
        count += ids[k] < low or ids[k] >= high
    return count


@njit(cache=True, nogil=True)
def _distinct(ids: Array, places: Array, slot_of_place: Array) -> Any:
    """Number the distinct ids at ``places`` in order of appearance with an open-addressing hash table."""
    bits = 4
    while (1 << bits) < 2 * len(places):
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64(64 - bits)
    slots = np.full(1 << bits, -1, np.int64)
    distinct = np.empty(len(places), np.int64)
    count = 0
    for place in range(len(places)):
        key = ids[places[place]]
        # Fibonacci hashing: consecutive ids, which are common, land far apart.
        at = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> shift
        while slots[at] >= 0 and distinct[slots[at]] != key:
            at = (at + np.uint64(1)) & mask
        if slots[at] < 0:
            slots[at] = count
            distinct[count] = key
            count += 1
        slot_of_place[place] = slots[at]
    return distinct[:count].copy()
