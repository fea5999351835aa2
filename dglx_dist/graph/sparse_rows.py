"""The rows of one embedding that this rank owns, with their optimiser state: where updates are applied."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.dtypes import numpy_view
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.sparse_gradient import RowSum
from dglx_dist.graph.sparse_kernels import free_slots, gather_sum
from dglx_dist.graph.sparse_rules import Touched, UpdateRule
from dglx_dist.records import Array

_NO_ROWS = np.empty(0, dtype=np.int64)


@final
class OwnedRows:
    """One embedding at this rank, its owner for some rows.

    Args:
        embedding: Whose rows.
        states: The tensors of ``rule``, laid out like the rows.
        rule: How rows are updated.
    """

    def __init__(self, embedding: DistEmbedding, states: Sequence[DistTensor], rule: UpdateRule) -> None:
        policy, topology = embedding.part_policy, embedding.kvstore.session.topology
        self.embedding, self.states, self.rule = embedding, tuple(states), rule
        self.owners = RowOwners(policy.bounds, topology)
        self.first, self.last = self.owners.range_of(topology.rank)
        self.steps = 0
        """Updates of the parameter so far, counted also where no row of this rank was touched."""
        self.lock = threading.Lock()
        """Held while rows are updated."""
        start = embedding.weight.local_range[0]
        mine = slice(self.first - start, self.last - start)
        self._rows = embedding.weight.local_rows()[mine]
        self._state_rows = tuple(numpy_view(state.local_rows()[mine]) for state in states)
        self._sums = _RowSums(self.first, self.last, embedding)
        self.nothing = RowSum(
            ids=_NO_ROWS, rows=np.empty((0, embedding.embedding_dim), dtype=self._sums.dtype)
        )
        """The gradient of a rank that touched no row."""

    def check(self, parcel: RowSum) -> None:
        """Raise ConfigError unless ``parcel``, which came from another rank, is for rows of this one."""
        ids, rows = parcel.ids, parcel.rows
        dtype = self._sums.dtype
        if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != dtype:
            raise ConfigError(f"gradients must be int64 ids and {dtype} rows, not {ids.dtype}, {rows.dtype}")
        if rows.shape != (len(ids), self.embedding.embedding_dim):
            raise ConfigError(f"gradients of {len(ids)} ids cannot have shape {rows.shape}")
        if len(ids) and (ids.min() < self.first or ids.max() >= self.last):
            raise ConfigError(
                f"this rank owns the rows {self.first} to {self.last - 1} of {self.embedding.name!r}, not "
                f"{ids.min()} to {ids.max()}; build the optimisers alike on all ranks"
            )

    def apply(self, parcels: Sequence[RowSum]) -> None:
        """Sum ``parcels`` in their order and update the rows they touch, once each.

        Any thread; one at a time goes on.
        """
        with self.lock:
            self.steps += 1
            parcels = [parcel for parcel in parcels if len(parcel.ids)]
            if len(parcels) == 1:
                self._update(parcels[0].ids - self.first, parcels[0].rows)
            elif parcels:
                self._update(*self._sums.of(parcels))

    def _update(self, touched: Array, gradient: Array) -> None:
        rows, wide = self._rows, self.embedding.compute_dtype
        if rows.dtype == wide:
            at, weight = touched, numpy_view(rows)
        else:
            index = torch.from_numpy(touched)
            at, weight = np.arange(len(touched)), rows[index].to(wide).numpy()
        self.rule.update(
            Touched(weight=weight, at=at, states=self._state_rows, touched=touched, gradient=gradient),
            self.steps,
        )
        if rows.dtype != wide:
            rows[index] = torch.from_numpy(weight).to(rows.dtype)


@final
class _RowSums:
    """Sums of rows by id, in memory that is used again."""

    def __init__(self, first: int, last: int, embedding: DistEmbedding) -> None:
        self._first = first
        self._slot_of = np.full(0, -1, dtype=np.int32)
        self._count = last - first
        self._touched = _NO_ROWS
        self.dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))
        self._sums = np.empty((0, embedding.embedding_dim), dtype=self.dtype)

    def of(self, parcels: Sequence[RowSum]) -> tuple[Array, Array]:
        """Return ((k,) int64 rows counted from the first, (k, d) their sums), valid until the next call."""
        need = min(sum(len(parcel.ids) for parcel in parcels), self._count)
        if len(self._touched) < need:
            self._touched = np.empty(need + need // 4, dtype=np.int64)
            self._sums = np.empty((len(self._touched), self._sums.shape[1]), dtype=self.dtype)
        if len(self._slot_of) < self._count:
            self._slot_of = np.full(self._count, -1, dtype=np.int32)
        count = 0
        for parcel in parcels:
            count = gather_sum(
                parcel.ids, parcel.rows, self._first, self._slot_of, self._touched, self._sums, count
            )
        free_slots(self._slot_of, self._touched[:count])
        return self._touched[:count], self._sums[:count]
