"""Estimates of an evaluation from a sample of the targets, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import barrier, gather_json, sum_over_ranks
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.keyed_random import hash_ids, stream_key
from dglx_dist.records import SPLITS, STANDARD_ERROR, Array
from dglx_dist.training.config import CLASSIFICATION
from dglx_dist.training.needed_nodes import make_marks
from dglx_dist.training.tasks import collect_targets, compute_metric, split_owned_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

_SAMPLE, _GROUPS = 0, 1
"""Streams of the keyed draws. All evaluations take the same targets, so that epochs can be compared."""

_NUM_GROUPS = 20
"""Groups of the jackknife. The standard error is itself known to 16 %, one in the root of twice 19."""


def check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigError(f"sample={fraction} must be above 0 and below 1. Leave it out for all targets.")


def check_sample(
    g: DistGraph, ntype: str, label: str, masks: Sequence[str], task: str, fraction: float
) -> None:
    """Raise ConfigError on all ranks unless each mask with targets has enough sampled ones for an error."""
    check_fraction(fraction)
    if not masks:
        raise ConfigError(f"sample={fraction}, but there are no masks to take targets from. Leave it out.")
    data = g.nodes[ntype].data
    for mask in masks:
        least_units: Array = np.empty(0)
        for rows in split_owned_rows(g, ntype):
            is_target = data[mask][rows].bool()
            if task == CLASSIFICATION:
                is_target &= data[label][rows] >= 0
            units = _draw_units(torch.arange(rows.start, rows.stop)[is_target])
            least_units = np.sort(np.concatenate([least_units, units]))[:_NUM_GROUPS]
        units_of_ranks = gather_json(least_units.tolist(), g.session)
        all_units = sorted(chain(*units_of_ranks))[:_NUM_GROUPS]
        num_sampled = sum(unit < fraction for unit in all_units)
        if not all_units or num_sampled == _NUM_GROUPS:
            continue
        remedy = "Leave it out."
        if len(all_units) == _NUM_GROUPS:
            # Rounding up by one millionth at most leaves the unit below the fraction.
            remedy = f"Use at least {all_units[-1] + 1e-6:.6f}."
        raise ConfigError(
            f"sample={fraction} takes {num_sampled} of the targets in {mask!r}, but their standard error "
            f"needs {_NUM_GROUPS}. {remedy}"
        )


def mark_targets(
    g: DistGraph, ntype: str, masks: Sequence[str], fraction: float | None, stack: ExitStack
) -> DistTensor | None:
    """Return marks of the nodes in one of ``masks``, which the ``stack`` deletes. Every rank must call this.

    With a ``fraction``, a node is marked with this probability. Without one, return None if there are no
    masks or nearly all nodes are marked, because a pass over all nodes needs no marks.
    """
    if not masks:
        return None
    marks = make_marks(g, ntype, stack)
    data = g.nodes[ntype].data
    num_marked = 0
    for rows in split_owned_rows(g, ntype):
        is_marked = torch.stack([data[name][rows].bool() for name in masks]).any(0)
        ids = torch.arange(rows.start, rows.stop)
        if fraction is not None:
            is_marked &= _is_sampled(ids, fraction)
        marks.push(ids[is_marked], is_marked[is_marked])
        num_marked += int(is_marked.sum())
    total = int(sum_over_ranks(torch.tensor([num_marked]), g.session, phase="control"))
    barrier(g.session, "marks of the targets")
    if fraction is None and total > 0.9 * g.num_nodes(ntype):
        return None
    return marks


def _is_sampled(ids: Tensor, fraction: float) -> Tensor:
    """Return for (n,) ids whether they are in the sample. It depends on nothing else."""
    return torch.from_numpy(_draw_units(ids) < fraction)


def _draw_units(ids: Tensor) -> Array:
    """Return for (n,) ids a random number from 0 to 1 each. Those below the fraction are sampled."""
    # A word has 64 random bits. The upper 53 of them fit a float without rounding.
    return (_hash(ids, _SAMPLE) >> 11) * 2.0**-53


def _choose_group(ids: Tensor) -> Tensor:
    """Return for (n,) ids their group of the jackknife. It does not depend on whether they are sampled."""
    return torch.from_numpy((_hash(ids, _GROUPS) % _NUM_GROUPS).astype(np.int64))


def _hash(ids: Tensor, stream: int) -> Array:
    return hash_ids(ids.numpy(), stream_key(0, 0, stream))


def estimate_all(
    scores: DistTensor,
    g: DistGraph,
    ntype: str,
    label: str,
    masks: Sequence[str],
    task: str,
    metrics: Sequence[str],
    fraction: float,
) -> dict[str, float]:
    """Return the accuracy by mask and ``metrics`` by name of the sampled nodes. Every rank must call this.

    Standard errors have names like ``val_accuracy_se``. They come from the jackknife, which leaves out one of
    20 random groups of nodes in turn, and are those of a sample without replacement.
    """

    def is_sampled(ids: Tensor) -> Tensor:
        return _is_sampled(ids, fraction)

    values: dict[str, float] = {}
    for mask in masks:
        names = ["accuracy"] if task == CLASSIFICATION else []
        if mask != SPLITS[0]:
            names = [*dict.fromkeys([*names, *metrics])]
        rows, labels, ids = collect_targets(scores, g, ntype, label, mask, task, is_sampled)
        groups = _choose_group(ids)
        prefix = mask.removesuffix("_mask")
        for name in names:
            compute = partial(compute_metric, name, session=g.session, task=task)
            value = compute(rows, labels)
            if name in metrics and mask != SPLITS[0]:
                values[f"{prefix}_{name}"] = value
            if name == "accuracy" and task == CLASSIFICATION:
                values[mask] = value
            replicates = [compute(rows[groups != k], labels[groups != k]) for k in range(_NUM_GROUPS)]
            values[f"{prefix}_{name}{STANDARD_ERROR}"] = _jackknife(replicates, fraction)
    return values


def _jackknife(replicates: Sequence[float], fraction: float) -> float:
    """Return the standard error from the values without each group, of a sample of a finite population."""
    count = len(replicates)
    mean = math.fsum(replicates) / count
    squares = math.fsum((value - mean) ** 2 for value in replicates)
    return math.sqrt((1 - fraction) * squares * (count - 1) / count)
