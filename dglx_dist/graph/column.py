"""The rows of one named tensor that lie on this server, and where the others are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.graph.dtypes import numpy_view, tensor_view, torch_dtype
from dglx_dist.graph.gather import gather_rows, scatter_rows
from dglx_dist.graph.ids import check_ids
from dglx_dist.records import Array, ColumnInfo
from dglx_dist.storage.columns import numpy_dtype

PullHandler: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(rows of the own server (n, *row), (k,) int64 places in them) to values (k, *row)."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows with consecutive ids that lie in this server's memory."""

    first: int
    """Id of the first row."""
    rows: Array
    """(n, *row), C-contiguous; bfloat16 as uint16."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One named tensor as this rank sees it."""

    name: str
    info: ColumnInfo
    bounds: Array
    """(S + 1,) int64; server s owns the ids ``bounds[s]:bounds[s + 1]``."""
    shards: tuple[Shard, ...]
    """The rows of the own server, in order of their ids."""
    writable: bool
    on_read: PullHandler | None = None
    """Computes what is read, in place of copying; of a tensor in memory only."""

    def __post_init__(self) -> None:
        dtype = numpy_dtype(self.info.dtype)
        for shard in self.shards:
            rows = shard.rows
            if rows.dtype != dtype or rows.shape[1:] != self.info.row_shape or not rows.flags.c_contiguous:
                raise ConfigError(
                    f"the rows of {self.name!r} are {rows.dtype} of shape {rows.shape}; they must be {dtype} "
                    f"with rows of shape {self.info.row_shape} in C order"
                )

    @property
    def num_rows(self) -> int:
        """Rows of all servers."""
        return int(self.bounds[-1])

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return int(np.prod(self.info.row_shape, dtype=np.int64)) * numpy_dtype(self.info.dtype).itemsize

    def read(self, ids: Array, out: Array) -> None:
        """Copy the rows of those (K,) int64 ``ids`` that lie here to their places in ``out`` (K, *row).

        Raises:
            ConfigError: the pull handler returned something that does not fit.
        """
        if self.on_read is not None:
            self._compute(self.on_read, ids, out)
            return
        for shard in self.shards:
            gather_rows(shard.rows, shard.first, ids, out)

    def _compute(self, handler: PullHandler, ids: Array, out: Array) -> None:
        (shard,) = self.shards  # of a tensor in memory there is one
        here = np.flatnonzero((ids >= shard.first) & (ids < shard.first + len(shard.rows)))
        if not len(here):
            return
        values = handler(tensor_view(shard.rows, self.info), torch.from_numpy(ids[here] - shard.first))
        shape, dtype = (len(here), *self.info.row_shape), torch_dtype(self.info.dtype)
        if tuple(values.shape) != shape or values.dtype != dtype:
            raise ConfigError(
                f"the pull handler of {self.name!r} returned {values.dtype} of shape {tuple(values.shape)}; "
                f"it must be {dtype} of shape {shape}"
            )
        out[here] = numpy_view(values.detach().contiguous())

    def write(self, ids: Array, rows: Array) -> None:
        """Copy those of the (K, *row) ``rows`` here whose ids lie here; the last of repeated ids stays."""
        for shard in self.shards:
            scatter_rows(rows, shard.rows, shard.first, ids)

    def check(self, ids: Array) -> None:
        """Raise IndexError unless each of the (K,) int64 ``ids`` is a row of the whole tensor."""
        check_ids(ids, self.num_rows, repr(self.name))

    def check_writable(self) -> None:
        """Raise ConfigError when the tensor belongs to a dataset on disk."""
        if not self.writable:
            raise ConfigError(
                f"{self.name!r} belongs to the dataset on disk, which is read-only; create a tensor to "
                "write to with g.new_tensor(shape, dtype, name)"
            )


def shards_of(offsets: Array, parts: Mapping[int, Array]) -> tuple[Shard, ...]:
    """Return the shards of ``parts`` (part -> its rows) whose ids start at ``offsets[part]``.

    Raises:
        ConfigError: a part has another number of rows than its ids.
    """
    shards = []
    for part in sorted(parts):
        count = int(offsets[part + 1] - offsets[part])
        if len(parts[part]) != count:
            raise ConfigError(f"part {part} has {len(parts[part])} rows for {count} ids")
        shards.append(Shard(first=int(offsets[part]), rows=parts[part]))
    return tuple(shards)
