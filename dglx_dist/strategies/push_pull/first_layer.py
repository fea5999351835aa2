"""The split first layer: its stages on every part for every owner, with sums between (P3, figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.staged import Staged, StageInput, Sums
from dglx_dist.strategies.push_pull.exchange import hand_to_parts, sum_to_owner
from dglx_dist.strategies.push_pull.first_block import share_edges
from dglx_dist.strategies.push_pull.visit import OwnersInput, Visit


class FirstLayer:
    """Runs a :class:`Staged` layer of which this rank has one part, in lock-step with the other ranks.

    Args:
        session: The run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.weight = 1.0
        """What this rank's gradient counts in the step; set before each forward call."""

    def __call__(self, layer: Staged, given: StageInput) -> Sums:
        """Return the sums of all parts for this rank's block; forward and backward are collective.

        Raises:
            ConfigError: the block does not come from the strategy's loader.
        """
        visit: Visit | None = getattr(given.block, "push_pull", None)
        if visit is None:
            raise ConfigError(
                "the first layer was given a block that does not come from the strategy's loader, so the "
                "other ranks do not know it; feed the model from dglx_dist.DataLoader"
            )
        edges = self._edges(given, visit.inputs)
        everyone = [
            StageInput(block=one.block, x=torch.cat([*one.columns.values()], 1), edges=named)
            for one, named in zip(visit.inputs, edges, strict=True)
        ]
        everyone[self._session.topology.rank] = given
        transformed = [layer.transform(one) for one in everyone]
        scattered = self._to_all_parts(
            [layer.scatter(one, rows) for one, rows in zip(everyone, transformed, strict=True)]
        )
        gathered = [
            layer.gather(one, rows, sums)
            for one, rows, sums in zip(everyone, transformed, scattered, strict=True)
        ]
        return tuple(
            _weighed(sum_to_owner(shares, self._session), self.weight)
            for shares in zip(*gathered, strict=True)
        )

    def _edges(self, given: StageInput, inputs: Sequence[OwnersInput]) -> list[dict[str, Tensor]]:
        blocks = [one.block for one in inputs]
        shared = {name: share_edges(values, blocks, self._session) for name, values in given.edges.items()}
        return [{name: values[owner] for name, values in shared.items()} for owner in range(len(inputs))]

    def _to_all_parts(self, shares: Sequence[Sums]) -> list[Sums]:
        """From each owner's shares on this part to each owner's sums over the parts."""
        handed = [
            hand_to_parts(sum_to_owner(of_owners, self._session), of_owners, self._session)
            for of_owners in zip(*shares, strict=True)
        ]
        return list(zip(*handed, strict=True)) if handed else [()] * len(shares)


def _weighed(tensor: Tensor, weight: float) -> Tensor:
    """Return ``tensor``, whose gradient is multiplied by ``weight`` on its way to the parts."""
    return cast("Tensor", _Weighed.apply(tensor, weight))  # type: ignore[no-untyped-call]  # torch leaves it bare


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.weight, None
