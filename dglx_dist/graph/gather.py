"""Compiled copying of rows between arrays of any dtype, without the interpreter lock.

Rows are moved as machine words: an array of N rows is seen as (N, words) unsigned integers of the
widest size that divides a row and suits the alignment of both sides, so one kernel serves all dtypes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from dglx_dist.graph.read_ahead import read_ahead
from dglx_dist.records import Array

_WORDS: tuple[np.dtype[Any], ...] = tuple(np.dtype(name) for name in ("u8", "u4", "u2", "u1"))

_AHEAD = 8
"""So many rows before a row is copied the processor is asked for it: rows lie anywhere in memory."""


def as_words(*arrays: Array) -> tuple[Array, ...]:
    """See C-contiguous arrays with rows of equal size as (rows, words) arrays of one unsigned dtype, no copy.

    Args:
        arrays: (n, *row) each, with the same bytes per row.
    """
    row_bytes = row_size(arrays[0])
    word = next(
        word
        for word in _WORDS
        if row_bytes % word.itemsize == 0 and all(a.ctypes.data % word.itemsize == 0 for a in arrays)
    )
    words = row_bytes // word.itemsize
    return tuple(_flat_bytes(array).view(word).reshape(len(array), words) for array in arrays)


def row_size(array: Array) -> int:
    """Return the bytes of one row of a (n, *row) array."""
    return math.prod(array.shape[1:]) * array.itemsize


def gather_rows(source: Array, first: int, ids: Array, out: Array) -> None:
    """Copy ``source[ids[k] - first]`` to ``out[k]`` for every k whose row ``source`` has; leave the others.

    Args:
        source: (n, *row), C-contiguous: the rows with ids ``first`` to ``first + n - 1``.
        first: Id of the first row of ``source``.
        ids: (K,) int64; ids of other shards are passed over.
        out: (K, *row), same dtype, C-contiguous and writable.
    """
    if len(ids) == 0 or len(source) == 0 or row_size(source) == 0:
        return
    source_words, out_words = as_words(source, out)
    _gather(source_words, first, ids, out_words)


def take_rows(source: Array, places: Array, out: Array | None = None) -> Array:
    """Copy the rows of a C-contiguous ``source`` at ``places`` ((K,) int64); faster than indexing.

    Args:
        source: (n, *row).
        places: In [0, n).
        out: (K, *row), same dtype, C-contiguous and writable; None: fresh memory.

    Returns:
        ``out``, or what took its place.
    """
    if out is None:
        out = np.empty((len(places), *source.shape[1:]), source.dtype)
    gather_rows(source, 0, places, out)
    return out


def scatter_rows(rows: Array, target: Array, first: int, ids: Array) -> None:
    """Copy ``rows[k]`` to ``target[ids[k] - first]`` for every k whose row ``target`` has.

    The last of several values for one row stays.

    Args:
        rows: (K, *row), C-contiguous.
        target: (n, *row), same dtype, C-contiguous and writable: the ids ``first`` to ``first + n - 1``.
        first: Id of the first row of ``target``.
        ids: (K,) int64.
    """
    if len(ids) == 0 or len(target) == 0 or row_size(target) == 0:
        return
    row_words, target_words = as_words(rows, target)
    _scatter(row_words, target_words, first, ids)


def move_rows(source: Array, rows: Array, out: Array, places: Array) -> None:
    """Copy ``source[rows[k]]`` to ``out[places[k]]`` for every k.

    Args:
        source: (n, *row), C-contiguous.
        rows: (k,) int64 in [0, n).
        out: (K, *row), same dtype, C-contiguous and writable.
        places: (k,) int64 in [0, K).
    """
    if len(rows) == 0 or row_size(source) == 0:
        return
    source_words, out_words = as_words(source, out)
    _move(source_words, rows, out_words, places)


def spread_rows(rows: Array, out: Array, starts: Array, positions: Array, first_slot: int) -> None:
    """Copy row k of ``rows`` to each of its places in ``out``.

    Args:
        rows: (k, *row) the rows of the slots ``first_slot`` to ``first_slot + k - 1``; need not be aligned.
        out: (K, *row), C-contiguous and writable.
        starts: (slots + 1,) int64; the places of slot s are ``positions[starts[s]:starts[s + 1]]``.
        positions: (places,) int64 in [0, K).
        first_slot: Slot of ``rows[0]``.
    """
    if len(rows) == 0 or row_size(rows) == 0:
        return
    row_words, out_words = as_words(rows, out)
    _spread(row_words, out_words, starts, positions, first_slot)


def first_outside(ids: Array, count: int) -> int:
    """Return the position of the first of the (K,) int64 ``ids`` outside [0, ``count``), or -1."""
    return int(_first_outside(ids, count))


def _flat_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


@njit(cache=True, nogil=True)
def _gather(source: Array, first: int, ids: Array, out: Array) -> None:
    count, words = source.shape
    last = ids.shape[0] - 1
    for k in range(ids.shape[0]):
        # Unsigned, so that an id below `first` is a huge one: one comparison for both ends.
        coming = np.uint64(ids[min(k + _AHEAD, last)] - first)
        if coming < np.uint64(count):
            read_ahead(source, coming)
        row = np.uint64(ids[k] - first)
        if row < np.uint64(count):
            for word in range(words):
                out[np.uint64(k), np.uint64(word)] = source[row, np.uint64(word)]


@njit(cache=True, nogil=True)
def _scatter(rows: Array, target: Array, first: int, ids: Array) -> None:
    count, words = target.shape
    for k in range(ids.shape[0]):
        row = np.uint64(ids[k] - first)
        if row < np.uint64(count):
            for word in range(words):
                target[row, np.uint64(word)] = rows[np.uint64(k), np.uint64(word)]


@njit(cache=True, nogil=True)
def _move(source: Array, rows: Array, out: Array, places: Array) -> None:
    words = source.shape[1]
    last = rows.shape[0] - 1
    for k in range(rows.shape[0]):
        read_ahead(source, rows[min(k + _AHEAD, last)])
        row, place = np.uint64(rows[k]), np.uint64(places[k])
        for word in range(words):
            out[place, np.uint64(word)] = source[row, np.uint64(word)]


@njit(cache=True, nogil=True)
def _spread(rows: Array, out: Array, starts: Array, positions: Array, first_slot: int) -> None:
    count, words = rows.shape
    for k in range(count):
        for place in range(starts[first_slot + k], starts[first_slot + k + 1]):
            row = np.uint64(positions[place])
            for word in range(words):
                out[row, np.uint64(word)] = rows[np.uint64(k), np.uint64(word)]


@njit(cache=True, nogil=True)
def _first_outside(ids: Array, count: int) -> int:
    num_bad = 0
    # No early exit in the first loop: it then runs on vector registers.
    for k in range(ids.shape[0]):
        if np.uint64(ids[k]) >= np.uint64(count):
            num_bad += 1
    if num_bad:
        for k in range(ids.shape[0]):
            if np.uint64(ids[k]) >= np.uint64(count):
                return k
    return -1
