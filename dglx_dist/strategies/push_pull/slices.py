"""This rank's columns of a node feature, for all nodes (P3, section 3.2: features are split by column)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from dglx_dist.cluster.collectives import barrier
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import tensor_view
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.rows import rows_per_message
from dglx_dist.layers.columns import Columns
from dglx_dist.records import Array
from dglx_dist.storage.columns import numpy_dtype

PHASE = "columns"
"""The ledger's name of these bytes; they move once, when a dataset is opened for training."""


def load_columns(store: KVStore, key: str, columns: Columns, session: Session) -> Tensor:
    """Return (V, F_p): ``columns`` of every row of the tensor ``key``, by id; every rank must call it.

    Rows of the own server are copied from its memory, those of others arrive in pieces of a message each,
    so that no more than the result and a message is in memory at a time.

    Raises:
        ConfigError: the tensor is no matrix.
        PeerError: a rank is dead or did not take part within the time-out.
    """
    column = store.column(key)
    if len(column.info.row_shape) != 1:
        raise ConfigError(
            f"{key!r} has rows of shape {tuple(column.info.row_shape)}; push_pull splits matrices by column: "
            "store it as one row of numbers per node"
        )
    op = f"{store.label}.columns"
    serving = _Server(store)
    session.rpc.register(op, serving)
    barrier(session, f"columns of {key!r}")
    out = np.empty((int(column.bounds[-1]), len(columns)), numpy_dtype(column.info.dtype))
    step = rows_per_message(max(out.strides[0], 1))
    for server, (first, last) in enumerate(pairwise(column.bounds.tolist())):
        for begin in range(first, last, step):
            end = min(begin + step, last)
            asked = np.array([begin, end, columns.first, columns.last], np.int64)
            rank = store.placement.serving_rank(server)
            (out[begin:end],) = session.rpc.call(rank, op, key, [asked], phase=PHASE)
    barrier(session, f"columns of {key!r} are there")
    session.rpc.unregister(op)
    return tensor_view(out, column.info)


class _Server:
    """Answers with the columns of a run of this server's rows."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def __call__(self, key: str, arrays: Sequence[Array]) -> Sequence[Array]:
        begin, end, left, right = arrays[0].tolist()
        pieces = [
            rows[max(begin - first, 0) : max(end - first, 0), left:right]
            for first, rows in self._store.shards(key)
            if first < end and begin < first + len(rows)
        ]
        return [np.concatenate(pieces)]
