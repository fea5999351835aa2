"""Which bucket an id belongs to: the same for the same id, and about as many ids in each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dglx_dist.records import Array

_BYTES_AT_ONCE = 1 << 13
"""A word of each byte then lies in memory that is used again and again, and needs no new one."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bucket_of(ids: Any, num_buckets: int) -> Array:
    """Return (K,) int64 in [0, num_buckets) for ``ids``: K pyarrow int64, or large_string and none empty."""
    if pa.types.is_integer(ids.type):
        words = mixed(ids.to_numpy(zero_copy_only=False).astype(np.uint64))
    else:
        offsets, _ = text_buffers(ids)
        place_words = mixed(np.arange(np.diff(offsets).max(initial=0), dtype=np.uint64))
        firsts = np.flatnonzero(np.diff(offsets[:-1] // _BYTES_AT_ONCE, prepend=-1)).tolist()
        pieces = [
            _text_words(ids.slice(first, last - first), place_words)
            for first, last in zip(firsts, [*firsts[1:], len(ids)], strict=True)
        ]
        words = np.concatenate(pieces or [np.empty(0, np.uint64)])
    return (words % np.uint64(num_buckets)).astype(np.int64)


def mixed(words: Array) -> Array:
    """Return splitmix64's output for each of ``words`` ((K,) uint64)."""
    with np.errstate(over="ignore"):
        words = words + _GOLDEN
        words = (words ^ (words >> np.uint64(30))) * _MIX_1
        words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def text_buffers(ids: Any) -> tuple[Array, Array]:
    """Return (K + 1,) int64 offsets from 0 and the (offsets[-1],) bytes of a large_string array."""
    _, offsets, data = ids.buffers()
    ends = np.frombuffer(offsets, np.int64)[ids.offset : ids.offset + len(ids) + 1]
    first, last = int(ends[0]), int(ends[-1])
    values = np.frombuffer(data, np.uint8)[first:last] if data is not None else np.empty(0, np.uint8)
    return ends - first, values


def _text_words(ids: Any, place_words: Array) -> Array:
    """Return (K,) words: the sum over a text's bytes of byte times the word of its place, mixed."""
    offsets, data = text_buffers(ids)
    lengths = np.diff(offsets)
    places = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    with np.errstate(over="ignore"):
        products = place_words[places] * (data.astype(np.uint64) + np.uint64(1))
        sums = np.add.reduceat(products, offsets[:-1])
    return mixed(sums + lengths.astype(np.uint64))
