"""Dropout whose mask is a function of batch, node and column, so that parts of a row drop what the row drops.

A mask of torch's generator belongs to the rank that draws it. Here an entry is kept or not by the hash of
(seed, number of the batch, global node id, input column), so any cut into columns gives the uncut mask, and
owners who share a node drop the same entries of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dgl.heterograph import DGLBlock
from numba import njit
from torch import Tensor
from torch.nn import functional

from dglx_dist.draws.rng import full_word, item_key, stream_key
from dglx_dist.layers.columns import Columns
from dglx_dist.records import Array

INPUTS, ATTENTION, MODULES = 1 << 32, (1 << 32) + 1, 1 << 33
"""Streams of draws: of a layer's inputs, of its attention, and from where on of modules before it.

Beyond every hop of a sampler, whose draws come from the same seed.
"""


@dataclass(frozen=True, kw_only=True)
class DropDraws:
    """What the masks of one owner's batch are functions of."""

    seed: int
    """Of the run, at least 0."""
    number: int
    """Of the batch, equal on all ranks."""
    nodes: Tensor
    """(L0,) int64 global ids of the sources, the destinations first."""
    runs: tuple[Columns, ...]
    """Which columns of the uncut input the part has, in order."""


def drop_entries(x: Tensor, probability: float, draws: DropDraws, stream: int = INPUTS) -> Tensor:
    """Return ``x`` with entries set to 0 and the others divided by 1 - ``probability``.

    Args:
        x: (L0, F_p) the part's columns.
        probability: In [0, 1]; of each entry, independent of the others.
        draws: Which entries; its runs have F_p columns together.
        stream: What the draws are for; other streams drop other entries.
    """
    if probability == 0:
        return x
    kept = kept_entries(draws.seed, draws.number, stream, draws.nodes, draws.runs, probability)
    return x * _scaled(kept, probability, x)


def drop_attention(block: DGLBlock, attention: Tensor, probability: float, draws: DropDraws) -> Tensor:
    """Return ``attention`` with whole (edge, head) entries dropped; the same ones on every part.

    An edge is told by its destination and its place among the destination's in-edges: parts have these
    from the owner, while they number the edges themselves.

    Args:
        block: (L0) sources, (D1) destinations, (E1) edges.
        attention: (E1, K, 1).
        probability: In [0, 1].
        draws: Of the block's owner.
    """
    if probability == 0:
        return attention
    indptr, _, edge_ids = block.adj_tensors("csc")
    first = indptr.cpu().numpy().astype(np.int64)
    kept = _kept_edges(
        stream_key(draws.seed, draws.number, ATTENTION),
        draws.nodes[: block.num_dst_nodes()].cpu().numpy(),
        first,
        attention.shape[1],
        _threshold(probability),
    )
    scaled = _scaled(torch.from_numpy(kept), probability, attention)
    if len(edge_ids):
        # From the order of the matrix to the block's own numbers of edges.
        scaled = torch.empty_like(scaled).index_copy_(0, edge_ids.long(), scaled)
    return attention * scaled.unsqueeze(-1)


def dropped(x: Tensor, probability: float, training: bool, draws: DropDraws | None) -> Tensor:
    """Return ``x`` dropped by ``draws``; as torch drops where there are none, unchanged when not training."""
    if not training or probability == 0:
        return x
    return functional.dropout(x, probability) if draws is None else drop_entries(x, probability, draws)


def kept_entries(
    seed: int, number: int, stream: int, nodes: Tensor, runs: Sequence[Columns], probability: float
) -> Tensor:
    """Return (L0, F_p) bool, which entries of the columns ``runs`` of ``nodes`` ((L0,) int64) are kept."""
    columns = np.concatenate([np.arange(run.first, run.last) for run in runs]).astype(np.int64)
    kept = _kept(
        stream_key(seed, number, stream),
        np.ascontiguousarray(nodes.cpu().numpy()),
        columns,
        _threshold(probability),
    )
    return torch.from_numpy(kept)


def _threshold(probability: float) -> np.uint64:
    """Of 32 random bits, as many values as are dropped."""
    return np.uint64(round(probability * (1 << 32)))


def _scaled(kept: Tensor, probability: float, like: Tensor) -> Tensor:
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return kept.to(like.device, like.dtype).mul_(scale)


@njit(cache=True, nogil=True)
def _kept(stream: np.uint64, nodes: Array, columns: Array, threshold: np.uint64) -> Array:
    out = np.empty((len(nodes), len(columns)), np.bool_)
    for row in range(len(nodes)):
        key = item_key(stream, nodes[row])
        for place in range(len(columns)):
            out[row, place] = _bits(key, columns[place]) >= threshold
    return out


@njit(cache=True, nogil=True)
def _kept_edges(stream: np.uint64, nodes: Array, first: Array, heads: int, threshold: np.uint64) -> Array:
    out = np.empty((first[-1], heads), np.bool_)
    for target in range(len(nodes)):
        key = item_key(stream, nodes[target])
        for edge in range(first[target], first[target + 1]):
            for head in range(heads):
                out[edge, head] = _bits(key, (edge - first[target]) * heads + head) >= threshold
    return out


@njit(cache=True, nogil=True)
def _bits(key: np.uint64, number: int) -> np.uint64:
    return full_word(key, number) >> np.uint64(32)
