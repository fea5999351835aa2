"""Compute that is slept: how long a model takes on a free core, and a model that takes it without a core.

With it more servers than cores can be emulated: sampling, pulls and the exchange of gradients stay real, and
only forward and backward are waited for. Nothing is learned, so accuracy and loss of such a run say nothing,
and every result of it is labelled simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dglx_dist.errors import ConfigError
from dglx_dist.records import FEATURE, LABEL

Sleep = Callable[[float], None]


@dataclass(frozen=True)
class Line:
    """Seconds as ``base_s + per_edge_s * edges``, edges counted over all blocks of a batch."""

    base_s: float
    per_edge_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.base_s < float("inf") and 0 <= self.per_edge_s < float("inf")):
            raise ConfigError(
                f"a batch of {self.base_s} s and {self.per_edge_s} s per edge cannot be slept; both must be "
                "at least 0"
            )

    def seconds(self, edges: int) -> float:
        """Return the seconds of a batch of ``edges``; none without an edge, as a rank without seeds has."""
        return self.base_s + self.per_edge_s * edges if edges else 0.0


@dataclass(frozen=True)
class ComputeCost:
    """Cost of a batch on one idle core."""

    forward: Line
    backward: Line

    def scale(self, factor: float) -> ComputeCost:
        """Return the cost on a core that takes ``factor`` times as long."""
        lines = (self.forward, self.backward)
        return ComputeCost(*(Line(factor * line.base_s, factor * line.per_edge_s) for line in lines))


def calibrate(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    *,
    repetitions: int = 3,
    clock: Callable[[], float] = time.process_time,
) -> ComputeCost:
    """Measure forward and backward of ``model`` on ``batches`` of two sizes at least, in one thread.

    Each is run once to warm up and then ``repetitions`` times; a line is laid through the medians. ``clock``:
    seconds of the process itself, so that what else runs on the machine is not counted.
    """
    edges = [sum(block.num_edges() for block in blocks) for blocks in batches]
    if len(set(edges)) < 2:
        raise ConfigError(f"batches of {edges} edges tell no cost per edge; give at least two sizes")
    runs = [[_time(model, blocks, clock) for _ in range(repetitions + 1)][1:] for blocks in batches]
    forward, backward = ([median(run[phase] for run in of) for of in runs] for phase in (0, 1))
    return ComputeCost(forward=_fit(edges, forward), backward=_fit(edges, backward))


def _time(model: nn.Module, blocks: Sequence[Any], clock: Callable[[], float]) -> tuple[float, float]:
    features, labels = blocks[0].srcdata[FEATURE], blocks[-1].dstdata[LABEL]
    start = clock()
    loss = cross_entropy(model(blocks, features), labels)
    between = clock()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    end = clock()
    model.zero_grad(set_to_none=True)
    return between - start, end - between


def _fit(edges: Sequence[int], seconds: Sequence[float]) -> Line:
    x, y = np.asarray(edges, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    slope, base = np.polyfit(x, y, 1)
    if base < 0 or slope < 0:
        base, slope = 0.0, float((x @ y) / (x @ x))
    return Line(base_s=float(base), per_edge_s=float(slope))


@final
class SleepingModel(nn.Module):
    """A model with the parameters of ``module``, which is never called, that sleeps where it would compute.

    What it returns is zero and depends on every parameter; their gradients are zeros of their sizes, so that
    exchange and optimiser cost what they cost.
    """

    def __init__(
        self, module: nn.Module, cost: ComputeCost, classes: int, *, sleep: Sleep = time.sleep
    ) -> None:
        super().__init__()
        self.module = module
        self._cost, self._classes, self._sleep = cost, classes, sleep

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        """Return (num_dst, C) zeros for the last block's destinations, after forward's seconds."""
        edges = sum(block.num_edges() for block in blocks)
        self._sleep(self._cost.forward.seconds(edges))
        zeros = h.new_zeros(blocks[-1].num_dst_nodes(), self._classes)
        scores: Tensor = _Zeros.apply(  # type: ignore[no-untyped-call]
            zeros, lambda: self._sleep(self._cost.backward.seconds(edges)), *self.module.parameters()
        )
        return scores


class _Zeros(torch.autograd.Function):
    """Scores that depend on the parameters, with no slope."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, before_backward: Callable[[], None], *parameters: Tensor) -> Tensor:
        ctx.before_backward = before_backward
        ctx.save_for_backward(*parameters)
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.before_backward()
        return None, None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
