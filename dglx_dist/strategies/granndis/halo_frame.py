"""Rows of sources where a rank has its own ones and asks for the halo's only when messages read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, final

from dgl.frame import Frame, LazyFeature, Scheme, infer_scheme
from torch import Tensor

from dglx_dist.errors import ConfigError

Bring: TypeAlias = Callable[[str, Tensor], Tensor]
"""(name, rows as they stand in the frame) to (sources, ...): exchanges where the halo is missing."""


@final
class OwnRows(LazyFeature):
    """A column of fewer rows than its frame has: those of this rank, without the halo.

    DGL checks the length of every column but that of a placeholder, which this is one of.

    Args:
        rows: (own rows, ...).
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    @property
    def data(self) -> Tensor:
        """(own rows, ...)."""
        return self._rows

    @property
    def scheme(self) -> Scheme:
        """Shape of a row and dtype, as DGL prints them."""
        return infer_scheme(self._rows)

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self._rows.dtype

    def to(self, *args: Any, **kwargs: Any) -> OwnRows:
        """Return the rows on another device."""
        return OwnRows(self._rows.to(*args, **kwargs))

    def astype(self, dtype: Any) -> OwnRows:
        """Return the rows in another dtype."""
        return OwnRows(self._rows.to(dtype))

    def subcolumn(self, rows: Tensor) -> Any:
        """Refuse: some of ``rows`` may lie on another rank.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{len(rows)} rows were asked of a column that has this rank's own {len(self._rows)} rows and no "
            "halo; give the column to a layer, or set it anew (block.srcdata[name] = rows) to exchange it"
        )


@final
class HaloFrame(Frame):
    """The sources' side of a message passing: columns of ``own``, with their halo once they are read.

    Which columns are exchanged, and in which order, follows from what is read, so all ranks must read alike;
    DGL's functions do, also where a rank has no edge.

    Args:
        own: The columns; not changed.
        bring: Gives the rows of all sources.
        num_sources: How many these are.
    """

    def __init__(self, own: Frame, bring: Bring, num_sources: int) -> None:
        super().__init__(num_rows=num_sources)
        self._own, self._bring = own, bring
        self.read: dict[str, Tensor] = {}
        """What was brought, by name: each column once."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.read:
            self.read[name] = self._bring(name, self._own[name])
        return self.read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def keys(self) -> Any:
        """Names of the columns."""
        return self._own.keys()

    def subframe(self, rows: Tensor) -> Any:
        """Return the columns at ``rows``, (K,) places among the sources, each gathered when it is read."""
        return _Gathered(self, rows)


@final
class _Gathered(Mapping[str, Tensor]):
    """What a user-defined message function sees of the sources of its edges."""

    def __init__(self, frame: HaloFrame, rows: Tensor) -> None:
        self._frame, self._rows = frame, rows

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._frame:
            raise KeyError(name)
        rows: Tensor = self._frame[name].index_select(0, self._rows.long())
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)
