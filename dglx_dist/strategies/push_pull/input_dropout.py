"""Dropout of the input columns, the same on every cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.columns import Columns
from dglx_dist.layers.keyed_dropout import MODULES, DropDraws, drop_entries
from dglx_dist.strategies.push_pull.origins import InputModule, Origin, Origins
from dglx_dist.strategies.push_pull.visit import OwnersInput


@final
@dataclass(frozen=True, kw_only=True)
class Dropped(Origin):
    """The rows of another origin, of which entries are dropped by (seed, batch, node, column)."""

    origin: Origin
    probability: float
    seed: int
    stream: int
    """Of the draws; one for each dropout module."""

    @property
    def runs(self) -> tuple[Columns, ...]:
        """See :attr:`Origin.runs`."""
        return self.origin.runs

    def rows(self, owners: OwnersInput) -> Tensor:
        """See :meth:`Origin.rows`."""
        rows = self.origin.rows(owners)
        if rows.is_leaf and rows.requires_grad:
            return self._drop(rows.detach(), owners).requires_grad_()
        return self._drop(rows, owners)

    def learn(self, gradients: Sequence[tuple[OwnersInput, Tensor | None]]) -> None:
        """See :meth:`Origin.learn`."""
        self.origin.learn(
            [
                (owners, None if gradient is None else self._drop(gradient, owners))
                for owners, gradient in gradients
            ]
        )

    def _drop(self, rows: Tensor, owners: OwnersInput) -> Tensor:
        draws = DropDraws(seed=self.seed, number=owners.number, nodes=owners.nodes, runs=self.runs)
        return drop_entries(rows, self.probability, draws, self.stream)


@final
class ColumnDropout(InputModule):
    """Stands for ``nn.Dropout``: keyed on the input, torch's own on anything else.

    Args:
        dropout: What it stands for.
        seed: Of the run.
        place: Among the model's dropouts; equal on all ranks.
    """

    def __init__(self, dropout: nn.Dropout, seed: int, place: int) -> None:
        super().__init__()
        self.p, self.inplace = dropout.p, dropout.inplace
        self.origins = Origins()
        self._seed, self._stream = seed, MODULES + place
        self.train(dropout.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with entries dropped while training.

        Raises:
            ConfigError: the input is to be changed in place.
        """
        own = self.origins.own
        origin = self.origins.find(x) if self.training and own is not None else None
        if origin is None or own is None or self.p == 0:
            return functional.dropout(x, self.p, self.training, self.inplace)
        if self.inplace:
            raise ConfigError(
                "nn.Dropout(inplace=True) would change the loader's features in place, of which batches in "
                "flight have their own; use inplace=False"
            )
        made = Dropped(origin=origin, probability=self.p, seed=self._seed, stream=self._stream)
        draws = DropDraws(seed=self._seed, number=own.number, nodes=own.nodes, runs=made.runs)
        dropped = drop_entries(x, self.p, draws, self._stream)
        self.origins.add(dropped, made)
        return dropped

    def extra_repr(self) -> str:
        """Like that of ``nn.Dropout``."""
        return f"p={self.p}, inplace={self.inplace}"
