"""Gradients of some rows: as ``backward`` leaves them, weighed, and summed before they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_kernels import add_rows, take_weighed
from dglx_dist.records import Array, StepShare

Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGradient:
    """What one backward pass left for the rows of one call."""

    ids: Array
    """(k,) int64, distinct."""
    rows: Array
    """(k, d) float32 or float64. Never changed: autograd may have given the same memory to another tensor."""
    share: StepShare | None
    """Of the step, as it was at the time of the call."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSum:
    """What one rank adds to a parameter's gradient in a step: ``weight * rows``."""

    ids: Array
    """(k,) int64, distinct."""
    rows: Array
    """(k, d) float32 or float64."""
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Parcel:
    """The part of a :class:`RowSum` that one owner gets: ``weight * rows[places]``."""

    ids: Array
    """(k,) int64, distinct."""
    rows: Array
    """(n, d) float32 or float64."""
    places: Array
    """(k,) int64 in [0, n): which row belongs to each id."""
    weight: float = 1.0


def weight_of(share: StepShare | None, reduction: Reduction, world_size: int) -> float:
    """Return what a rank's gradient is multiplied by before the sum over ranks (algorithms 0.1).

    n_local / n_global for a mean, 1 for a sum; 0 on a rank without targets, whatever its loss is.

    Raises:
        ConfigError: the loss is a mean, there are several ranks, and nobody said over how many targets.
    """
    if share is not None and share.num_local == 0:
        return 0.0
    if reduction == "sum":
        return 1.0
    if share is not None:
        return share.num_local / share.num_global
    if world_size == 1:
        return 1.0
    raise ConfigError(
        "an embedding was called outside of a step whose number of targets is known, so this rank's mean "
        "loss cannot be weighed; take its ids from dglx_dist.DataLoader, set session.step_share = dglx_dist."
        "strategies.share.count_targets(len(targets), session) before the call, or use reduction='sum'"
    )


def weighed_sum(gradients: Sequence[RowGradient], reduction: Reduction, world_size: int) -> RowSum | None:
    """Return what this rank adds to the gradient of a step; None where no weight is above 0.

    Args:
        gradients: In the order of the backward passes.
        reduction: What the loss is over this rank's targets.
        world_size: Ranks of the run.

    Raises:
        ConfigError: as :func:`weight_of`.
    """
    weighed = [(gradient, weight_of(gradient.share, reduction, world_size)) for gradient in gradients]
    # Left out, not multiplied: the mean over no targets is not a number.
    return summed([(gradient, weight) for gradient, weight in weighed if weight > 0.0])


def summed(weighed: Sequence[tuple[RowGradient, float]]) -> RowSum | None:
    """Return the sum of weight times gradient, each row once; None for none.

    Args:
        weighed: In the order in which they are added; of a single one, the rows are shared.
    """
    if not weighed:
        return None
    if len(weighed) == 1:
        gradient, weight = weighed[0]
        return RowSum(ids=gradient.ids, rows=gradient.rows, weight=weight)
    ids, places = np.unique(np.concatenate([gradient.ids for gradient, _ in weighed]), return_inverse=True)
    rows = np.zeros((len(ids), weighed[0][0].rows.shape[1]), dtype=weighed[0][0].rows.dtype)
    first = 0
    for gradient, weight in weighed:
        last = first + len(gradient.ids)
        add_rows(gradient.rows, weight, places.reshape(-1)[first:last], rows)
        first = last
    return RowSum(ids=ids, rows=rows)


def weighed_copy(parcel: Parcel) -> Parcel:
    """Return the same with one row for each id, in order, and weight 1: as it can be sent."""
    rows = np.empty((len(parcel.ids), parcel.rows.shape[1]), dtype=parcel.rows.dtype)
    take_weighed(parcel.rows, parcel.weight, parcel.places, rows)
    return Parcel(ids=parcel.ids, rows=rows, places=np.arange(len(rows)))
