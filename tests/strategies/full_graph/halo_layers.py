"""Hand-made halo layers, and the whole exchange as a matrix to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dglx_dist.strategies.full_graph.halo_plan import HaloLayer

Needs = Mapping[tuple[int, int], Sequence[int]]
"""(rank that needs, rank that holds) -> own rows of the latter, in the order in which they arrive."""


def layer_of(rank: int, own_rows: Sequence[int], needs: Needs) -> HaloLayer:
    """The layer of ``rank`` where rank r holds ``own_rows[r]`` rows; without edges, which nobody reads."""
    receive = tuple((peer, len(rows)) for (to, peer), rows in sorted(needs.items()) if to == rank and rows)
    send = tuple(
        (to, np.array(rows, dtype=np.int64))
        for (to, peer), rows in sorted(needs.items())
        if peer == rank and rows
    )
    first = np.concatenate([[0], np.cumsum(own_rows)])
    halo = [first[peer] + row for (to, peer), rows in sorted(needs.items()) if to == rank for row in rows]
    return HaloLayer(
        own_rows=own_rows[rank],
        targets=0,
        indptr=np.zeros(1, dtype=np.int64),
        indices=np.zeros(0, dtype=np.int64),
        edge_ids=np.zeros(0, dtype=np.int64),
        halo_nodes=np.array(halo, dtype=np.int64),
        receive=receive,
        send=send,
    )


def rows_of(rank: int, own_rows: Sequence[int], needs: Needs) -> Tensor:
    """(num_sources,) which row of all ranks' rows, one after the other, each source of ``rank`` is."""
    layer = layer_of(rank, own_rows, needs)
    first = sum(own_rows[:rank])
    return torch.cat([torch.arange(first, first + own_rows[rank]), torch.from_numpy(layer.halo_nodes)])


def random_needs(own_rows: Sequence[int], share: float, seed: int) -> dict[tuple[int, int], list[int]]:
    """Needs of every rank from every other one: a ``share`` of its rows, in no order."""
    generator = np.random.default_rng(seed)
    return {
        (to, peer): generator.permutation(rows)[: round(share * rows)].tolist()
        for peer, rows in enumerate(own_rows)
        for to in range(len(own_rows))
        if to != peer
    }
