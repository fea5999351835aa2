"""What ranks want of each other's rows at every layer, told once: halo lists become send lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dglx_dist.records import Array
from dglx_dist.strategies.granndis.mail import Mail
from dglx_dist.strategies.granndis.own_rows import OwnRows
from dglx_dist.strategies.granndis.plan import HaloLayer, Sent
from dglx_dist.strategies.granndis.row_index import RowIndex

_AS_BEFORE = -1


def finish_layers(own: OwnRows, layers: Sequence[HaloLayer], mail: Mail, world_size: int) -> list[HaloLayer]:
    """Tell every rank what is wanted of it, and return the layers with what others want of this one.

    All ranks must call it, in a job of ``mail``. Sends 8 bytes per layer and rank, and per row of a halo
    that differs from the layer's before.

    Raises:
        PeerError: a rank is dead or silent.
        RemoteError: another rank failed.
    """
    ranks = range(world_size)
    told = mail.exchange("wanted rows", {rank: wishes_of(layers, rank) for rank in ranks}, ranks)
    sent = {rank: wanted_rows(own, message) for rank, message in told.items()}
    finished: list[HaloLayer] = []
    for number, layer in enumerate(layers):
        same = number > 0 and layer is layers[number - 1] and _all_as_before(sent, number)
        finished.append(finished[-1] if same else _finish(layer, number, sent))
    return finished


def wishes_of(layers: Sequence[HaloLayer], rank: int) -> list[Array]:
    """Return [(L,) int64 rows wanted, -1 for the same as one layer before; their ids] for ``rank``."""
    counts = np.full(len(layers), _AS_BEFORE, dtype=np.int64)
    wanted = [np.empty(0, np.int64)]
    for number, layer in enumerate(layers):
        if number == 0 or layer is not layers[number - 1]:
            wanted.append(layer.halo_of(rank))
            counts[number] = len(wanted[-1])
    return [counts, np.concatenate(wanted)]


def wanted_rows(own: OwnRows, message: Sequence[Array]) -> list[Array]:
    """Return L arrays (n,) int64 of own rows that :func:`wishes_of` named; the same ones are one object."""
    counts, ids = message
    if not len(ids):
        return [np.empty(0, np.int64)] * len(counts)
    highest = int(max(own.nodes.max(initial=-1), ids.max())) + 1
    rows = RowIndex(own.nodes, highest).places(ids)
    assert not (rows < 0).any(), "another rank wants rows that this one does not hold"
    wanted: list[Array] = []
    first = 0
    for number, count in enumerate(counts.tolist()):
        if count == _AS_BEFORE:
            wanted.append(wanted[-1])
            continue
        wanted.append(rows[first : first + count])
        assert not count or wanted[-1].max() < own.counts[number], "wanted rows of too low a level"
        first += count
    return wanted


def _all_as_before(sent: Mapping[int, list[Array]], number: int) -> bool:
    return all(
        rows[number] is rows[number - 1] or not len(rows[number]) + len(rows[number - 1])
        for rows in sent.values()
    )


def _finish(layer: HaloLayer, number: int, sent: Mapping[int, list[Array]]) -> HaloLayer:
    send: Sent = tuple((rank, rows[number]) for rank, rows in sorted(sent.items()) if len(rows[number]))
    return replace(layer, send=send)
