"""The loss at the end of the last stage: cross entropy of the rows that have a label."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.stages.linear import first_of_second_half
from dglx_dist.records import Array


class LossResult(NamedTuple):
    """Loss of n rows."""

    loss_sum: float
    """Sum over the rows with a label, not scaled."""
    correct: int
    """Rows with a label whose largest output is at it, the first of equals."""
    gradient: Array
    """(n, C) of the outputs, scaled; zeros in rows without a label."""


def loss_in_halves(outputs: Array, labels: Array, scale: float) -> LossResult:
    """Return :func:`cross_entropy` of both halves of the rows: to the bit what a worker adds up."""
    middle = first_of_second_half(len(labels))
    first = cross_entropy(outputs[:middle], labels[:middle], scale)
    second = cross_entropy(outputs[middle:], labels[middle:], scale)
    gradient = np.concatenate([first.gradient, second.gradient])
    return LossResult(first.loss_sum + second.loss_sum, first.correct + second.correct, gradient)


def cross_entropy(outputs: Array, labels: Array, scale: float) -> LossResult:
    """Compute softmax cross entropy of the rows with a label, and its gradient times ``scale``.

    Args:
        outputs: (n, C) float32 or float64.
        labels: (n,) of any integer dtype in [0, C), -1 where the row has none (is no training node).
        scale: 1 / M, with M training nodes on all graph servers.

    Raises:
        ConfigError: a label is outside [-1, C).
    """
    rows = np.nonzero(labels >= 0)[0]
    classes = outputs.shape[1]
    if len(labels) and not -1 <= labels.min() <= labels.max() < classes:
        raise ConfigError(
            f"labels from {labels.min()} to {labels.max()} are not all in [-1, {classes}); give classes from "
            "0, and -1 to rows without one"
        )
    gradient = np.zeros_like(outputs)
    if not len(rows):
        return LossResult(0.0, 0, gradient)
    picked, at = outputs[rows], labels[rows]
    index = np.arange(len(rows))
    correct = int(np.count_nonzero(picked.argmax(axis=1) == at))
    picked -= picked.max(axis=1, keepdims=True)
    own = picked[index, at]
    np.exp(picked, out=picked)
    sums = picked.sum(axis=1, keepdims=True)
    loss_sum = float(np.sum(np.log(sums[:, 0]) - own, dtype=np.float64))
    picked /= sums
    picked[index, at] -= 1
    picked *= scale
    gradient[rows] = picked
    return LossResult(loss_sum, correct, gradient)
