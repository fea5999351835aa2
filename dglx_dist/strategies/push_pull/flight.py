"""One mini-batch on its way through the four phases fM, fD, bD, bM (P3, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dglx_dist.layers.staged import Staged, StageInput, Sums
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.options import Side
from dglx_dist.strategies.push_pull.origins import Origin
from dglx_dist.strategies.push_pull.stash import Leaves
from dglx_dist.strategies.push_pull.sums import hand_to_parts, sum_to_owner
from dglx_dist.strategies.push_pull.transfer import BACKWARD, FORWARD, Courier, Transfer, add_in_order
from dglx_dist.strategies.push_pull.visit import OwnersInput


@final
@dataclass(kw_only=True)
class Flight:
    """What a batch carries from its first phase to its last."""

    number: int
    inputs: tuple[OwnersInput, ...]
    """(N_f,) by owner."""
    origin: Origin
    """Of the input rows."""
    leaves: Leaves
    """The part side's weights as they were at fM: the stash."""
    read: Mapping[Side, int]
    """Steps that each side's weights had seen."""
    values: list[Tensor] | None
    """The owner side's weights as they were at fM; None where they need not be the same."""
    rows: list[Tensor] = field(default_factory=list)
    """(N_f,) inputs of the first layer, (L0, F_p) of each owner."""
    shares: list[list[Tensor]] = field(default_factory=list)
    """This part's shares by gathered tensor, then by owner, with their graph."""
    pulls: list[Transfer] = field(default_factory=list)
    """The owner's sums, by gathered tensor."""
    pushes: list[Transfer] = field(default_factory=list)
    """The owners' gradients of those sums."""
    weight: float = 1.0
    """What this rank's gradient counts in the step (algorithms 0.1)."""

    def sums(self) -> Sums:
        """Wait for the parts' shares and return their sums, without a gradient."""
        return tuple(add_in_order(pull.result()) for pull in self.pulls)

    def send_back(self, gradients: Sequence[Tensor], courier: Courier) -> None:
        """Let the gradients of the sums leave to all parts, weighed as this rank counts (bD's end)."""
        for gradient, shares in zip(gradients, self.shares, strict=True):
            # A mean over no targets is nan, which no weight of 0 would undo.
            weighed = gradient * self.weight if self.weight else torch.zeros_like(gradient)
            self.pushes.append(courier.push(weighed, shares, BACKWARD, self.number))

    def go_back(self, wanted: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all owners with respect to ``wanted``, leaves of this batch (bM).

        Collective where the layer scatters.
        """
        outputs, gradients = [], []
        for push, shares in zip(self.pushes, self.shares, strict=True):
            for share, gradient in zip(shares, push.result(), strict=True):
                if share.requires_grad:
                    outputs.append(share)
                    gradients.append(gradient)
        if not outputs or not wanted:
            return [None] * len(wanted)
        return list(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))


def compute_shares(
    layer: Staged, given: Sequence[StageInput], group: Group, courier: Courier
) -> list[list[Tensor]]:
    """Do the stages up to the sum on this part for every owner (fM); collective where the layer scatters.

    Returns:
        By gathered tensor, then by owner.
    """
    transformed = [layer.transform(one) for one in given]
    shares = [layer.scatter(one, rows) for one, rows in zip(given, transformed, strict=True)]
    handed = [
        hand_to_parts(sum_to_owner(of_owners, courier), of_owners, courier)
        for of_owners in zip(*shares, strict=True)
    ]
    scattered: list[Sums] = list(zip(*handed, strict=True)) if handed else [()] * group.size
    gathered = [
        layer.gather(one, rows, sums) for one, rows, sums in zip(given, transformed, scattered, strict=True)
    ]
    return [list(of_owners) for of_owners in zip(*gathered, strict=True)]


def send_shares(shares: Sequence[Sequence[Tensor]], courier: Courier, number: int) -> list[Transfer]:
    """Let the shares leave to their owners."""
    return [courier.pull(of_owners, FORWARD, number) for of_owners in shares]
