"""What one rank sends an owner in one step: its gradients of the rows that the owner has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_gradient import Parcel
from dglx_dist.records import Array

MAX_PARAMETERS = 100
"""Of one optimiser: each takes two of the arrays that a message can have."""
_MAX_PROBLEM = 2000


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMessage:
    """One rank's share of a step."""

    sender: int
    step: int
    """1, 2, ..."""
    used: tuple[bool, ...]
    """Of each parameter, whether the sender's backward passes came by it, with any rows or none."""
    parcels: tuple[Parcel, ...]
    """Of each parameter; empty when there was a problem. What is sent has one row for each id, in order,
    and weight 1; what a rank keeps for itself may lie anywhere."""
    problem: str = ""
    """Why the sender cannot take this step, for all ranks to hear."""

    def name(self) -> str:
        """Return what is sent as the name of the call: it is no payload."""
        used = "".join("1" if used else "0" for used in self.used)
        return f"{self.sender} {self.step} {used} {self.problem[:_MAX_PROBLEM]}"

    def arrays(self) -> list[Array]:
        """Return what is sent as payload: 8 bytes and one row for each distinct row, of each parameter."""
        return [array for parcel in self.parcels for array in (parcel.ids, parcel.rows)]


def read_message(name: str, arrays: Sequence[Array], num_parameters: int) -> StepMessage:
    """Read what :meth:`StepMessage.name` and :meth:`StepMessage.arrays` gave.

    Raises:
        ConfigError: it is not of an optimiser of ``num_parameters`` parameters.
    """
    sender, step, used, problem = name.split(" ", 3)
    expected = 0 if problem else 2 * num_parameters
    if len(used) != num_parameters or len(arrays) != expected:
        raise ConfigError(
            f"rank {sender} sent gradients of {len(used)} embeddings in {len(arrays)} arrays to an optimiser "
            f"of {num_parameters}; build the optimisers alike on all ranks"
        )
    parcels = tuple(
        Parcel(ids=ids, rows=rows, places=np.arange(len(ids)))
        for ids, rows in zip(arrays[::2], arrays[1::2], strict=True)
    )
    return StepMessage(
        sender=int(sender),
        step=int(step),
        used=tuple(mark == "1" for mark in used),
        parcels=parcels,
        problem=problem,
    )
