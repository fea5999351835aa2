"""How what goes into the first layer came about, so that a part can do the same for other owners' nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn

from dglx_dist.layers.columns import Columns
from dglx_dist.strategies.push_pull.visit import OwnersInput, Visit


class Origin(ABC):
    """A way to make a part's input rows of any owner; equal to another if it does the same."""

    @property
    @abstractmethod
    def runs(self) -> tuple[Columns, ...]:
        """Which columns of the uncut tensor the part's rows are, in order; what keyed dropout goes by."""

    @property
    def plain(self) -> bool:
        """Whether the rows are those of the store, but for their dtype; False when not overridden."""
        return False

    @abstractmethod
    def rows(self, owners: OwnersInput) -> Tensor:
        """Return (L0, F_p) for one owner's batch, with a gradient where something trained made it.

        Rows that are a leaf with a gradient are trained themselves: their gradients go to :meth:`learn`.
        """

    def learn(self, gradients: Sequence[tuple[OwnersInput, Tensor | None]]) -> None:
        """Add what all owners' rows came to, (L0, F_p) each, to the ``.grad`` of what they were taken from.

        Only for rows that are leaves, as those of an embedding are; nothing to do for others.
        """
        return


@final
@dataclass(frozen=True, kw_only=True)
class Features(Origin):
    """The loader's columns of one feature, or of several side by side."""

    names: tuple[str, ...]
    pieces: tuple[Columns, ...]
    """(number of names,) the part's run of each, as columns of all of them side by side."""

    @property
    def runs(self) -> tuple[Columns, ...]:
        """See :attr:`Origin.runs`."""
        return self.pieces

    @property
    def plain(self) -> bool:
        """See :attr:`Origin.plain`."""
        return True

    def rows(self, owners: OwnersInput) -> Tensor:
        """See :meth:`Origin.rows`."""
        found = [owners.columns[name] for name in self.names]
        return found[0] if len(found) == 1 else torch.cat(found, 1)


@final
@dataclass(frozen=True, kw_only=True)
class Converted(Origin):
    """The rows of another origin in another dtype."""

    origin: Origin
    dtype: torch.dtype

    @property
    def runs(self) -> tuple[Columns, ...]:
        """See :attr:`Origin.runs`."""
        return self.origin.runs

    @property
    def plain(self) -> bool:
        """See :attr:`Origin.plain`."""
        return self.origin.plain

    def rows(self, owners: OwnersInput) -> Tensor:
        """See :meth:`Origin.rows`."""
        rows = self.origin.rows(owners)
        trained = rows.is_leaf and rows.requires_grad
        return rows.detach().to(self.dtype).requires_grad_() if trained else rows.to(self.dtype)

    def learn(self, gradients: Sequence[tuple[OwnersInput, Tensor | None]]) -> None:
        """See :meth:`Origin.learn`."""
        self.origin.learn(gradients)


@final
class Origins:
    """What is known about tensors of the batch that the model is computing.

    A tensor is recognised by where its memory lies, so that a view of the loader's own is known and anything
    computed from it is not.
    """

    def __init__(self) -> None:
        self._visit: Visit | None = None
        self._part = 0
        self._known: list[tuple[Tensor, Origin]] = []

    def begin(self, visit: Visit | None, part: int) -> None:
        """Forget the last batch; ``visit`` is what the model computes now, None outside of one."""
        self._visit, self._part, self._known = visit, part, []

    @property
    def own(self) -> OwnersInput | None:
        """The own part of the batch that the model computes; None outside of one."""
        return None if self._visit is None else self._visit.inputs[self._part]

    def add(self, rows: Tensor, origin: Origin) -> None:
        """Remember that ``rows`` of the own batch came from ``origin``; keeps them until the next batch."""
        self._known.append((rows, origin))

    def find(self, rows: Tensor) -> Origin | None:
        """Return where ``rows`` came from, a change of dtype included; None if from nothing known."""
        for known, origin in self._known:
            if known is rows:
                return origin
        # The latest first: all rows of an empty batch lie at one place.
        for known, origin in reversed(self._known):
            if _same(known, rows):
                return origin
        for known, origin in reversed(self._known):
            if not rows.requires_grad and _copied(known, rows, origin):
                same_dtype = known.dtype == rows.dtype
                return origin if same_dtype else Converted(origin=origin, dtype=rows.dtype)
        return None

    def holds(self, rows: Tensor) -> bool:
        """Whether ``rows`` lie in the memory of known ones, all of them or some."""
        place = rows.untyped_storage().data_ptr()
        return place != 0 and any(known.untyped_storage().data_ptr() == place for known, _ in self._known)


class InputModule(nn.Module):
    """What may stand between the features and the first layer: works on each column by itself.

    Called by the user's model on the own batch, and by the pipeline on those of other owners. A module that
    stood there before is replaced by one of these under its name (:func:`find_input_modules` decides).
    Its parameters, if any, have one entry per input column, and the names of those it stands for.
    """

    origins: Origins
    """Of the model it belongs to; set when it is put there."""
    cut: Mapping[str, int] = MappingProxyType({})
    """Parameter name to the dimension that runs over the input columns."""
    by_rows: tuple[str, ...] = ()
    """Names of the parameters whose gradients come by :meth:`Origin.learn`; the others are stashed."""


def _copied(known: Tensor, rows: Tensor, origin: Origin) -> bool:
    """Whether ``rows`` are ``known`` in another dtype, or put side by side by the user."""
    may_be = known.dtype != rows.dtype or (isinstance(origin, Features) and len(origin.names) > 1)
    return may_be and known.shape == rows.shape and torch.equal(known.to(rows.dtype), rows)


def _same(known: Tensor, rows: Tensor) -> bool:
    return (
        known.shape == rows.shape
        and known.dtype == rows.dtype
        and known.stride() == rows.stride()
        and known.data_ptr() == rows.data_ptr()
        and (known.numel() > 0 or torch.equal(known, rows))
    )
