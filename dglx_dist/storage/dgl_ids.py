"""DGL's global ids: one number line for all types, part by part and, inside a part, type by type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class IdLine:
    """Where the ids of each (type, part) lie on the line; T types, P parts."""

    starts: Array
    """(T, P) int64: first id of the type's nodes (or edges) in the part."""
    counts: Array
    """(T, P) int64."""

    @staticmethod
    def of_offsets(offsets: Sequence[Array]) -> IdLine:
        """Return the line for T arrays (P + 1,) of per-type offsets."""
        counts = np.stack([np.diff(one) for one in offsets]).astype(np.int64)
        flat = np.concatenate([[0], np.cumsum(counts.T.ravel())])[:-1]
        return IdLine(starts=np.ascontiguousarray(flat.reshape(counts.T.shape).T), counts=counts)

    @property
    def offsets(self) -> Array:
        """(T, P + 1): per-type ids of part p are ``offsets[t, p] .. offsets[t, p + 1] - 1``."""
        return np.pad(np.cumsum(self.counts, axis=1), ((0, 0), (1, 0)))

    def part_range(self, part: int) -> tuple[int, int]:
        """Return the first id of one part and the first one after it."""
        first = int(self.starts[0, part])
        return first, first + int(self.counts[:, part].sum())

    def from_typed(self, kind: int, ids: Array) -> Array:
        """Return the ids on the line of per-type ids (K,) of type number ``kind``."""
        offsets = self.offsets[kind]
        part = np.searchsorted(offsets[1:], ids, side="right")
        return self.starts[kind][part] + (ids - offsets[part])

    def place(self, ids: Array) -> tuple[Array, Array]:
        """Return the type number and the part of ids (K,) on the line."""
        ends = (self.starts + self.counts).T.ravel()
        slot = np.searchsorted(ends, ids, side="right")
        return slot % len(self.starts), slot // len(self.starts)

    def to_typed(self, ids: Array) -> tuple[Array, Array]:
        """Return the type number and the per-type id of ids (K,) on the line."""
        kind, part = self.place(ids)
        return kind, ids - self.starts[kind, part] + self.offsets[kind, part]
