"""From the gradients of a batch's leaves to the ``.grad`` of the parameters before the sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.cluster.collectives import peers_named, sum_over_ranks
from dglx_dist.cluster.ledger import ring_bytes
from dglx_dist.cluster.session import Session
from dglx_dist.strategies.gradients import PHASE
from dglx_dist.strategies.push_pull.flight import Flight
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.stash import PartSide, add_gradient
from dglx_dist.strategies.push_pull.visit import OwnersInput


@final
@dataclass(frozen=True, kw_only=True)
class Computed:
    """The gradients of one batch on this part, of all owners."""

    flight: Flight
    gradients: Sequence[Tensor | None]
    """Of the trained parameters: the cut ones, then the shared ones."""
    of_rows: Mapping[int, Tensor | None]
    """Owner to the gradient of its input rows, where these are trained."""


@final
class PartGradients:
    """Adds to ``.grad`` what a batch came to, over all owners.

    The gradient of a cut parameter is the sum over the owners of the group, which the part computes by
    itself, and over its replicas. That of a parameter which all parts share is summed over all ranks.

    Args:
        session: The run.
        group: Who holds what.
        part: The parameters.
        shared: Names of those that all parts hold whole.
    """

    def __init__(self, session: Session, group: Group, part: PartSide, shared: Collection[str]) -> None:
        self._session, self._group, self._part = session, group, part
        trained = [name for name, parameter in part.parameters.items() if parameter.requires_grad]
        self._cut = [name for name in trained if name not in shared]
        self._shared = [name for name in trained if name in shared]
        self._names = [*self._cut, *self._shared]
        self._replicas = _replicas_group(session, group)

    def compute(self, flight: Flight) -> Computed:
        """Do the backward of a batch through this part (bM); collective where the layer scatters."""
        rows = [number for number, rows in enumerate(flight.rows) if rows.requires_grad]
        # Those that the user has frozen meanwhile have none.
        trained = [name for name in self._names if flight.leaves[name].requires_grad]
        found = flight.go_back(
            [*(flight.leaves[name] for name in trained), *(flight.rows[number] for number in rows)]
        )
        of_rows = dict(zip(rows, found[len(trained) :], strict=True))
        by_name = dict(zip(trained, found, strict=False))
        return Computed(flight=flight, gradients=[by_name.get(name) for name in self._names], of_rows=of_rows)

    def add(self, computed: Computed) -> None:
        """Add to ``.grad``; collective where something is shared or replicated."""
        flight, split = computed.flight, len(self._cut)
        like = [flight.leaves[name] for name in self._names]
        cut = self._over_replicas(computed.gradients[:split], like[:split])
        shared = self._over_all(computed.gradients[split:], like[split:])
        for name, gradient in zip(self._names, [*cut, *shared], strict=True):
            if flight.leaves[name].requires_grad:
                add_gradient(self._part.parameters[name], gradient)
        learnt = [(flight.inputs[number], gradient) for number, gradient in computed.of_rows.items()]
        if learnt:
            flight.origin.learn(self._of_all_replicas(learnt, flight.rows))

    def _over_replicas(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        count = len(self._group.replicas)
        if count == 1 or not like:
            return gradients
        flat = _flat(gradients, like)
        with peers_named(self._session, "the sum of gradients over replicas"):
            dist.all_reduce(flat, group=self._replicas)
        sent = ring_bytes(flat.numel() * flat.element_size(), count, self._group.place)
        self._session.ledger.add(PHASE, 1, self._group.rank, self._group.next_replica, sent)
        return _unflattened(flat, like)

    def _of_all_replicas(
        self, learnt: Sequence[tuple[OwnersInput, Tensor | None]], rows: Sequence[Tensor]
    ) -> Sequence[tuple[OwnersInput, Tensor | None]]:
        """Return the gradients of input rows of all replicas, in their order, so that all add the same."""
        count = len(self._group.replicas)
        if count == 1:
            return learnt
        nodes = torch.cat([owners.nodes for owners, _ in learnt])
        values = torch.cat(
            [
                torch.zeros_like(row) if one is None else one
                for (_, one), row in zip(learnt, rows, strict=True)
            ]
        ).contiguous()
        with peers_named(self._session, "the gradients of input rows of replicas"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
            dist.all_gather(sizes, torch.tensor([len(nodes)]), group=self._replicas)
            most = max(int(size) for size in sizes)
            of_replicas = [_padded_gather(one, most, count, self._replicas) for one in (nodes, values)]
        num_bytes = most * (nodes.element_size() + values.element_size() * values.shape[1])
        self._session.ledger.add(
            PHASE, 1, self._group.rank, self._group.next_replica, (count - 1) * num_bytes
        )
        owners = learnt[0][0]
        return [
            (replace(owners, nodes=ids[: int(size)]), gradient[: int(size)])
            for ids, gradient, size in zip(*of_replicas, sizes, strict=True)
        ]

    def _over_all(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        if not like:
            return gradients
        flat = sum_over_ranks(_flat(gradients, like), self._session, phase=PHASE, layer=1, in_place=True)
        return _unflattened(flat, like)


def _replicas_group(session: Session, group: Group) -> dist.ProcessGroup | None:
    """Return the process group of the replicas; every rank must call it."""
    if len(group.replicas) == 1:
        return None
    with peers_named(session, "groups of replicas"):
        # Every rank must make every group, in the same order.
        made = [
            dist.new_group(list(range(part, session.topology.world_size, group.size)))
            for part in range(group.size)
        ]
    return made[group.part]


def _padded_gather(rows: Tensor, most: int, count: int, replicas: dist.ProcessGroup | None) -> list[Tensor]:
    """Return what every replica has, (most, ...) each, in their order."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(count)]
    if padded.numel():
        dist.all_gather(found, padded, group=replicas)
    return found


def _flat(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(other).reshape(-1) if one is None else one.reshape(-1)
            for one, other in zip(gradients, like, strict=True)
        ]
    )


def _unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [other.numel() for other in like])
    # Of several dtypes the widest was sent.
    return [piece.view_as(other).to(other.dtype) for piece, other in zip(pieces, like, strict=True)]
