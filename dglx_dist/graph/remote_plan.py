"""Which distinct remote rows a pull needs of which server, and where each of them goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.graph.slot_table import SlotTable, no_slots, slot_of
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


@dataclass(frozen=True, kw_only=True)
class Hits:
    """The asked ids that are another server's, and cached here."""

    places: Array
    """(hits,) int64 positions in the asked ids, ascending."""
    slots: Array
    """(hits,) int64 rows of the cache."""


def plan_remote(ids: Array, bounds: Array, own_server: int) -> RemotePlan:
    """Split off the remote ids of ``ids``, each once.

    Args:
        ids: (K,) int64 in [0, ``bounds[-1]``), any order, repeats allowed.
        bounds: (S + 1,) int64; server s owns the ids ``bounds[s]:bounds[s + 1]``.
        own_server: The server whose rows are not remote.
    """
    return plan_pull(ids, bounds, own_server, no_slots())[0]


def plan_pull(
    ids: Array, bounds: Array, own_server: int, cached: SlotTable, *, distinct: bool = False
) -> tuple[RemotePlan, Hits]:
    """Split ``ids`` into those of the own server, those that are cached, and those to ask for.

    Args:
        ids: (K,) int64 in [0, ``bounds[-1]``), any order, repeats allowed unless ``distinct``.
        bounds: (S + 1,) int64; server s owns the ids ``bounds[s]:bounds[s + 1]``.
        own_server: The server whose rows are not remote.
        cached: Which remote rows are here.
        distinct: Nothing is repeated, so that there is nothing to look for.
    """
    *remote, places, slots = _plan(ids, bounds, own_server, cached, distinct)
    plan = RemotePlan(**dict(zip(_FIELDS, remote, strict=True)))
    return plan, Hits(places=places, slots=slots)


def number_distinct(ids: Array) -> tuple[Array, Array]:
    """Return the distinct of (K,) int64 ``ids`` in order of appearance, and (K,) int64 the place of each."""
    place_of = np.empty(len(ids), np.int64)
    return _distinct(ids, np.arange(len(ids)), place_of), place_of


_FIELDS = ("ids", "server_starts", "starts", "positions")


@njit(cache=True, nogil=True)
def _plan(ids: Array, bounds: Array, own: int, cached: SlotTable, is_distinct: bool) -> Any:
    places, hit_places, hit_slots = _split(ids, bounds[own], bounds[own + 1], cached)
    if is_distinct:
        distinct = np.empty(len(places), np.int64)
        for place in range(len(places)):
            distinct[place] = ids[places[place]]
        grouped, server_starts, new_slot = _grouped(distinct, bounds)
        positions = np.empty(len(places), np.int64)
        for place in range(len(places)):
            positions[new_slot[place]] = places[place]
        return grouped, server_starts, np.arange(len(places) + 1), positions, hit_places, hit_slots

    slot_of_place = np.empty(len(places), np.int64)
    distinct = _distinct(ids, places, slot_of_place)
    grouped, server_starts, new_slot = _grouped(distinct, bounds)
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
    return grouped, server_starts, starts, positions, hit_places, hit_slots


@njit(cache=True, nogil=True)
def _split(ids: Array, low: int, high: int, cached: SlotTable) -> tuple[Array, Array, Array]:
    """Return the places of the ids to ask for, and places and slots of the cached ones."""
    remote = _count_outside(ids, low, high)
    places = np.empty(remote, np.int64)
    # Without a cache there are no hits, and no room is needed for them.
    most_hits = remote if len(cached.slots) else 0
    hit_places = np.empty(most_hits, np.int64)
    hit_slots = np.empty(most_hits, np.int64)
    misses, hits = 0, 0
    for position in range(ids.shape[0]):
        key = ids[position]
        if key < low or key >= high:
            slot = slot_of(cached, key)
            if slot >= 0:
                hit_places[hits] = position
                hit_slots[hits] = slot
                hits += 1
            else:
                places[misses] = position
                misses += 1
    return places[:misses], hit_places[:hits], hit_slots[:hits]


@njit(cache=True, nogil=True)
def _grouped(distinct: Array, bounds: Array) -> tuple[Array, Array, Array]:
    """Return the ids grouped by server, where each server's start, and the new place of each id."""
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
    return grouped, server_starts, new_slot


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
