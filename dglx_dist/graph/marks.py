"""Which rows are not zero, and how many: asked of the servers, so that whole masks need not travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.column import Column
from dglx_dist.graph.placement import Placement
from dglx_dist.records import Array

PHASE = "masks"
"""Under which the bytes are counted."""


@final
class Marks:
    """Answers for the own server and asks the others.

    Args:
        session: The run; its ``rpc`` serves two operations named by ``label``.
        placement: Which rank answers for a server.
        column: Name to what is known of the tensor; raises ConfigError for an unknown one.
        label: Tells the stores of one run apart.
    """

    def __init__(
        self, session: Session, placement: Placement, column: Callable[[str], Column], label: str
    ) -> None:
        self._session, self._placement, self._column = session, placement, column
        self._bits, self._count = f"{label}.nonzero", f"{label}.count_nonzero"
        session.rpc.register(self._bits, lambda name, _: [_packed(self._column(name))])
        session.rpc.register(self._count, lambda name, _: [_counted(self._column(name))])

    def nonzero(self, name: str) -> Array:
        """Return the ids of the rows that are not zero; see :meth:`KVStore.nonzero`."""
        column = self._column(name)
        if column.info.row_shape:
            raise ConfigError(
                f"{name!r} has rows of shape {column.info.row_shape}; only one of one dimension is a mask"
            )
        found = []
        for server, packed in enumerate(self._ask(self._bits, name)):
            first, last = int(column.bounds[server]), int(column.bounds[server + 1])
            found.append(np.flatnonzero(np.unpackbits(packed, count=last - first)) + first)
        return np.concatenate(found)

    def count_nonzero(self, name: str) -> int:
        """Return how many values are not zero; see :meth:`KVStore.count_nonzero`."""
        self._column(name)
        return sum(int(counted[0]) for counted in self._ask(self._count, name))

    def close(self) -> None:
        """Answer nobody any more."""
        self._session.rpc.unregister(self._bits)
        self._session.rpc.unregister(self._count)

    def _ask(self, op: str, name: str) -> Sequence[Array]:
        """Return what each server answers; one's own is asked last, so that the others work meanwhile."""
        servers = range(self._placement.topology.num_servers)
        own = self._placement.topology.server
        pending = {
            server: self._session.rpc.submit(self._placement.serving_rank(server), op, name, [], phase=PHASE)
            for server in sorted(servers, key=lambda server: server == own)
        }
        return [pending[server].result()[0] for server in servers]


def _packed(column: Column) -> Array:
    """Return one bit per row of the own server, the first row in the highest bit of the first byte."""
    return np.packbits(np.concatenate([_is_set(column, shard.rows) for shard in column.shards]))


def _counted(column: Column) -> Array:
    counts = [np.count_nonzero(_is_set(column, shard.rows)) for shard in column.shards]
    return np.array([sum(counts)], dtype=np.int64)


def _is_set(column: Column, rows: Array) -> Array:
    # bfloat16 comes as bits, of which the highest is the sign: -0.0 is zero too.
    values = rows & 0x7FFF if column.info.dtype == "bfloat16" else rows
    return values if values.dtype == np.bool_ else values != 0
