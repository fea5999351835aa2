"""Keyed dropout masks: which entries are kept, determined by row ids and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dglx_dist.keyed_random import full_word, item_key, shift_right, stream_key, words_on_device
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class ColumnRange:
    """The columns ``first:last`` in a matrix with ``width`` columns. There may be none."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def cut(self) -> slice:
        return slice(self.first, self.last)


def draw_kept_entries(
    seed: int, number: int, stream: int, nodes: Tensor, runs: Sequence[ColumnRange], probability: float
) -> Tensor:
    """Draw which entries are kept, as an (L0, F_p) bool mask for (L0,) int64 ``nodes`` and columns ``runs``.

    The mask is on the same device as ``nodes``. Every device gives the same bits.
    """
    key = stream_key(seed, number, stream)
    threshold = count_dropped(probability)
    if nodes.device.type == "cpu":
        host_columns = np.concatenate([np.arange(run.first, run.last) for run in runs]).astype(np.int64)
        host_nodes = np.ascontiguousarray(nodes.numpy())
        return torch.from_numpy(_draw_kept(key, host_nodes, host_columns, threshold))

    columns = torch.cat([torch.arange(run.first, run.last, device=nodes.device) for run in runs])
    # The nodes are split, because the words take 8 bytes for each entry.
    nodes_at_once = max(_WORDS_AT_ONCE // max(len(columns), 1), 1)
    node_groups = torch.split(nodes, nodes_at_once)
    return torch.cat([draw_on_device(key, group, columns, threshold) for group in node_groups])


_WORDS_AT_ONCE = 1 << 22


def draw_on_device(stream: np.uint64, nodes: Tensor, numbers: Tensor, threshold: np.uint64) -> Tensor:
    """Return which draws are kept: a mask with one row per node and one column per number.

    Args:
        numbers: The entries' columns, or other draw numbers.
        threshold: Draws are kept if their 32 bits are at least this value.
    """
    high_bits = shift_right(words_on_device(stream, nodes, numbers), 32)
    return high_bits >= int(threshold)


def count_dropped(probability: float) -> np.uint64:
    """Return how many values of a 32-bit draw mean that the entry is dropped."""
    return np.uint64(round(probability * (1 << 32)))


@njit(cache=True, nogil=True)
def _draw_kept(stream: np.uint64, nodes: Array, columns: Array, threshold: np.uint64) -> Array:
    is_kept = np.empty((len(nodes), len(columns)), np.bool_)
    for row in range(len(nodes)):
        key = item_key(stream, nodes[row])
        for i in range(len(columns)):
            is_kept[row, i] = draw_bits(key, columns[i]) >= threshold
    return is_kept


@njit(cache=True, nogil=True)
def draw_bits(key: np.uint64, number: int) -> np.uint64:
    # Take the word's high 32 bits.
    return full_word(key, number) >> np.uint64(32)
