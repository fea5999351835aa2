"""Random numbers keyed by what they are for, so that any rank, thread or order draws the same ones.

A draw is splitmix64 of (seed, epoch, hop, global node or edge id, number of the draw). There is no state
to share and none to restore after a resume.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dglx_dist.records import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_32 = np.uint64(0xFFFFFFFF)
_TO_UNIT = 2.0**-53


@njit(cache=True, nogil=True)
def mix(state: np.uint64) -> np.uint64:
    """Return splitmix64's output for ``state``: a bijection of 64-bit words that scatters all bits."""
    word = np.uint64(state) + _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@njit(cache=True, nogil=True)
def splitmix64(values: Array) -> Array:
    """Return (N,) uint64, :func:`mix` of each of ``values`` ((N,) uint64)."""
    out = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        out[i] = mix(values[i])
    return out


def stream_key(seed: int, epoch: int, hop: int) -> np.uint64:
    """Return the key of all draws of one hop (0 is the one at the seeds) of one epoch."""
    # Compiled code hands 64-bit words back as Python integers, which it would not take again.
    return np.uint64(_stream_key(seed, epoch, hop))


@njit(cache=True, nogil=True)
def _stream_key(seed: int, epoch: int, hop: int) -> np.uint64:
    return mix(mix(mix(np.uint64(seed)) ^ np.uint64(epoch)) ^ np.uint64(hop))


@njit(cache=True, nogil=True)
def relation_keys(seed: int, epoch: int, num_hops: int, num_relations: int) -> Array:
    """Return (L, R) uint64, the keys of all draws of each hop and edge type: type 0 has the hop's own."""
    keys = np.empty((num_hops, num_relations), np.uint64)
    for hop in range(num_hops):
        stream = _stream_key(seed, epoch, hop)
        for relation in range(num_relations):
            keys[hop, relation] = mix(mix(stream) ^ np.uint64(relation)) if relation else stream
    return keys


@njit(cache=True, nogil=True)
def item_key(stream: np.uint64, global_id: int) -> np.uint64:
    """Return the key of all draws made for one node or edge within ``stream``."""
    return mix(stream ^ mix(np.uint64(global_id)))


@njit(cache=True, nogil=True)
def full_word(key: np.uint64, number: int) -> np.uint64:
    """Return 64 random bits, the ``number``-th of ``key``."""
    return mix(key + np.uint64(number) * _GOLDEN)


@njit(cache=True, nogil=True)
def half_word(key: np.uint64, number: int) -> np.uint64:
    """Return 32 random bits, the ``number``-th of ``key``; two neighbours share one hash."""
    word = full_word(key, number >> 1)
    return word >> np.uint64(32) if number & 1 else word & _LOW_32


@njit(cache=True, nogil=True)
def bounded(key: np.uint64, number: int, bound: int) -> tuple[np.int64, int]:
    """Return (a draw uniform in [0, bound), the number of the next draw); ``bound`` is in [1, 2**32).

    Lemire's multiply and shift: the draws that would make some values likelier are thrown away.
    """
    product = half_word(key, number) * np.uint64(bound)
    number += 1
    if (product & _LOW_32) < np.uint64(bound):
        unfair = (np.uint64(1 << 32) - np.uint64(bound)) % np.uint64(bound)
        while (product & _LOW_32) < unfair:
            product = half_word(key, number) * np.uint64(bound)
            number += 1
    return np.int64(product >> np.uint64(32)), number


@njit(cache=True, nogil=True)
def unit(key: np.uint64, number: int) -> float:
    """Return a draw uniform in the open interval (0, 1), the ``number``-th of ``key``."""
    return (np.float64(full_word(key, number) >> np.uint64(11)) + 0.5) * _TO_UNIT


@njit(cache=True, nogil=True)
def hash_ids(ids: Array, stream: np.uint64) -> Array:
    """Return (K,) uint64, the key of each of ``ids`` ((K,) int64): sorting by it shuffles reproducibly."""
    out = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        out[i] = item_key(stream, ids[i])
    return out
