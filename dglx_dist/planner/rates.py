"""Seconds for each unit of work: measured on some batches of the real model, or assumed."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import dgl
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dglx_dist.errors import ConfigError
from dglx_dist.planner.model_shape import ModelShape
from dglx_dist.records import Array

_OF_MODELS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    dgl.DGLError,
)
"""What a model raises that does not fit its batches."""
_TERMS = 3
_LAYER_S, _USUAL = 2.5e-3, (0.7e-9, 0.025e-9)
"""Of a layer, to sum a column of an edge, and of a multiply-add, on a core of today."""
_TRUST = 0.1
"""In that the parts of a step are as usual, by the trust in a trial's seconds."""
_REPETITIONS = 3


@dataclass(frozen=True, kw_only=True)
class ByteRates:
    """Seconds for a byte."""

    gather: float
    """Of a feature row, read from the own server's memory."""
    check: float
    """To go over it for its checksum, as rows that are kept on disk are."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one rank; all terms are at least 0."""

    step_s: float
    """Of a step, however small its batch: calls, loss, optimizer."""
    edge_column_s: float
    """To sum one column along one edge, forward or backward."""
    multiply_add_s: float
    sample_edge_s: float
    """To draw an edge and to build its block."""
    gather_byte_s: float
    """To read a byte of a feature row from the own server's memory."""
    fresh_edge_s: float = 0.0
    """What the first step on a block takes longer than later ones, by its edges: formats that message passing
    makes of it. Mini-batches and co-batches pay it in every step, whole graphs once."""
    check_byte_s: float = 0.0
    """To go over a byte for its checksum, as plans and rows do that are read from disk."""
    measured: bool = True

    def compute_s(self, work: tuple[int, int], steps: int) -> float:
        """Return the seconds of ``work`` (of :meth:`ModelShape.work`) in so many steps."""
        summed, multiplied = work
        return steps * self.step_s + summed * self.edge_column_s + multiplied * self.multiply_add_s

    def slowed(self, factor: float) -> Rates:
        """Return the rates of a rank on which everything takes ``factor`` times as long."""
        return Rates(
            step_s=factor * self.step_s,
            edge_column_s=factor * self.edge_column_s,
            multiply_add_s=factor * self.multiply_add_s,
            sample_edge_s=factor * self.sample_edge_s,
            gather_byte_s=factor * self.gather_byte_s,
            fresh_edge_s=factor * self.fresh_edge_s,
            check_byte_s=factor * self.check_byte_s,
            measured=self.measured,
        )


def assumed(*, speed: float = 1.0) -> Rates:
    """Return the rates of one core of a server of today; the figures are those of this package's own tests.

    Args:
        speed: How many such cores a rank is worth; an accelerator some 50.
    """
    one = Rates(
        step_s=2 * _LAYER_S,
        edge_column_s=_USUAL[0],
        multiply_add_s=_USUAL[1],
        sample_edge_s=30e-9,
        gather_byte_s=0.3e-9,
        fresh_edge_s=20e-9,
        check_byte_s=0.25e-9,
        measured=False,
    )
    return one.slowed(1.0 / speed)


def time_batches(
    module: nn.Module,
    shape: ModelShape,
    batches: Sequence[Sequence[Any]],
    *,
    repetitions: int = _REPETITIONS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Array, Array, float]:
    """Time steps of a copy of ``module``.

    Args:
        module: Called as ``module(blocks, features)``; not changed.
        shape: Of it.
        batches: Blocks of at least two sizes; what they hold is not read.
        repetitions: Of each, after one on the block as it is new; the median counts.
        clock: Seconds.

    Returns:
        (k, 3) float64 work and (k,) float64 seconds for :func:`fitted`, and what an edge of a new block takes
        longer.

    Raises:
        ConfigError: there are no batches, or the model fails on them.
    """
    if not batches:
        raise ConfigError("there is no batch to measure the model on; give the graph training nodes")
    if not any(one.requires_grad for one in module.parameters()):
        raise ConfigError(
            f"the {type(module).__name__} has no parameters to train; there is nothing to choose"
        )
    try:
        copied = copy.deepcopy(module).train()
    except _OF_MODELS as problem:
        raise ConfigError(
            f"the model could not be copied to be tried out ({type(problem).__name__}: {problem}); keep what "
            "copy.deepcopy refuses out of it"
        ) from problem
    optimizer = torch.optim.Adam(copied.parameters(), lr=1e-9)
    rows, seconds, fresh = [], [], []
    for number, blocks in enumerate(batches):
        sizes = _sizes(blocks)
        rows.append((1.0, *(float(term) for term in shape.work(*sizes))))
        first, *later = (_step(copied, optimizer, blocks, shape, clock) for _ in range(repetitions + 1))
        seconds.append(statistics.median(later))
        # The very first step warms up more than its blocks.
        if number:
            fresh.append((first - seconds[-1]) / max(sum(sizes[2]), 1))
    return np.array(rows), np.array(seconds), max(statistics.median(fresh or [0.0]), 0.0)


def _sizes(blocks: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    return (
        [int(block.num_src_nodes()) for block in blocks],
        [int(block.num_dst_nodes()) for block in blocks],
        [int(block.num_edges()) for block in blocks],
    )


def _step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: Sequence[Any],
    shape: ModelShape,
    clock: Callable[[], float],
) -> float:
    kind = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    rows = torch.ones(blocks[0].num_src_nodes(), shape.features, dtype=kind)
    labels = torch.zeros(blocks[-1].num_dst_nodes(), dtype=torch.int64)
    begin = clock()
    try:
        loss = cross_entropy(module(blocks, rows), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    except _OF_MODELS as problem:
        raise ConfigError(
            f"the model could not be tried out on a batch ({type(problem).__name__}: {problem}); it "
            f"is called as model(blocks, features) with {len(blocks)} blocks, one for each fan-out, and must "
            "return a row of scores for each target"
        ) from problem
    optimizer.step()
    return clock() - begin


def measured_rates(
    tried: Sequence[tuple[Array, Array, float]], moved: ByteRates, sample_edge_s: float, num_layers: int
) -> Rates:
    """Return the rates that steps of one or several ranks tell.

    Args:
        tried: What :func:`time_batches` gave on each rank.
        moved: Of bytes.
        sample_edge_s: To draw an edge.
        num_layers: L.
    """
    step, edge, product = fitted(
        np.concatenate([work for work, _, _ in tried]),
        np.concatenate([seconds for _, seconds, _ in tried]),
        num_layers,
    )
    return Rates(
        step_s=step,
        edge_column_s=edge,
        multiply_add_s=product,
        sample_edge_s=sample_edge_s,
        gather_byte_s=moved.gather,
        fresh_edge_s=max(fresh for _, _, fresh in tried),
        check_byte_s=moved.check,
    )


def fitted(work: Array, seconds: Array, num_layers: int = 2) -> tuple[float, float, float]:
    """Lay seconds through (k, 3) float64 ``work`` by least squares of relative errors, no factor below 0.

    What trials do not tell apart, as neighbourhoods that are all of the graph, is parted as it usually is.

    Returns:
        (step_s, edge_column_s, multiply_add_s).
    """
    usual = np.array([_LAYER_S * num_layers, *_USUAL])
    # Columns differ by many orders of magnitude: a factor of 1 is the usual rate.
    scaled = work * usual / seconds[:, None]
    scale = 1.0 / max(float(np.median(scaled.sum(axis=1))), 1e-300)
    rows = np.concatenate([scaled, np.eye(_TERMS) * _TRUST / scale])
    aim = np.concatenate([np.ones(len(seconds)), np.full(_TERMS, _TRUST)])
    best, least = np.zeros(_TERMS), np.inf
    for count in range(1, _TERMS + 1):
        for columns in map(list, combinations(range(_TERMS), count)):
            factors, *_ = np.linalg.lstsq(rows[:, columns], aim, rcond=None)
            residual = float(((rows[:, columns] @ factors - aim) ** 2).sum())
            if (factors >= 0).all() and residual < least:
                least, best = residual, np.zeros(_TERMS)
                best[columns] = factors
    step, edge, product = (best * usual).tolist()
    return step, edge, product
