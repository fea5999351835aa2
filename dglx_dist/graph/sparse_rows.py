"""The rows of one embedding that this rank owns, with their optimiser state: where updates are applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.dtypes import numpy_view
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.sparse_gradient import Parcel, RowSum
from dglx_dist.graph.sparse_kernels import NEVER, Gradient, count_rows, forget_rows, split_rows
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
        self.lock = embedding.kvstore.owner_lock(embedding.weight.kvstore_key)
        """Held while rows are updated; also other optimisers of these rows hold it, and pushes that add."""
        start = embedding.weight.local_range[0]
        mine = slice(self.first - start, self.last - start)
        self._rows = embedding.weight.local_rows()[mine]
        self._state_rows = tuple(numpy_view(state.local_rows()[mine]) for state in states)
        self._sums = _Sums(self.first, self.last, embedding)
        self.nothing = RowSum(
            ids=_NO_ROWS, rows=np.empty((0, embedding.embedding_dim), dtype=self._sums.dtype)
        )
        """The gradient of a rank that touched no row."""

    def check(self, parcel: Parcel) -> None:
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

    def apply(self, parcels: Sequence[Parcel]) -> None:
        """Sum ``parcels`` in their order and update the rows they touch, once each.

        Any thread; one at a time goes on.
        """
        with self.lock:
            self.steps += 1
            for rows, gradient in self._sums.of([parcel for parcel in parcels if len(parcel.ids)]):
                self._update(rows, gradient)

    def _update(self, touched: Array, gradient: Gradient) -> None:
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
class _Sums:
    """Sums of rows by id; rows that only one parcel has are left where they are."""

    def __init__(self, first: int, last: int, embedding: DistEmbedding) -> None:
        self._first, self._count = first, last - first
        self._slot_of = np.full(0, NEVER, dtype=np.int32)
        self._dim = embedding.embedding_dim
        self.dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))

    def of(self, parcels: Sequence[Parcel]) -> list[tuple[Array, Gradient]]:
        """Return ((k,) int64 rows counted from the first, their gradient), no row twice."""
        first = self._first
        gradients = [Gradient(parcel.rows, parcel.places, parcel.weight) for parcel in parcels]
        if len(parcels) < 2:
            return [(parcel.ids - first, own) for parcel, own in zip(parcels, gradients, strict=True)]
        if len(self._slot_of) < self._count:
            self._slot_of = np.full(self._count, NEVER, dtype=np.int32)
        slot_of, ids = self._slot_of, [parcel.ids for parcel in parcels]
        repeated = sum(count_rows(some, first, slot_of) for some in ids)
        touched = np.empty(repeated, dtype=np.int64)
        sums = np.empty((repeated, self._dim), dtype=self.dtype)
        found, count = [], 0
        for some, own in zip(ids, gradients, strict=True):
            alone, places, count = split_rows(some, first, own, slot_of, touched, sums, count)
            found.append((alone, Gradient(own.rows, places, own.weight)))
        for some in ids:
            forget_rows(some, first, slot_of)
        return [*found, (touched, Gradient(sums, np.arange(count), 1.0))]
