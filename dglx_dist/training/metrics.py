"""Exact quality figures over all ranks: counts are summed first and divided once.

Every function is collective: every rank calls it with its own rows, which may be none.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dglx_dist.cluster.collectives import gather_int64, sum_over_ranks
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together

PHASE = "metrics"


def accuracy(predicted: Tensor, label: Tensor, session: Session) -> float:
    """Share of rows over all ranks where ``predicted`` equals ``label``; nan when there is no row at all.

    Args:
        predicted: (B,) integer classes, or (B, C) scores whose largest is taken.
        label: (B,) integer classes.
        session: The run.
    """
    classes = together(session, lambda: _as_classes(predicted, label), ConfigError)
    counts = torch.stack([(classes == label).sum(), torch.tensor(len(label), device=label.device)])
    correct, total = sum_over_ranks(counts.to(torch.int64), session, phase=PHASE).tolist()
    return correct / total if total else math.nan


def f1(
    predicted: Tensor,
    label: Tensor,
    num_classes: int,
    session: Session,
    *,
    average: Literal["macro", "micro"] = "macro",
) -> float:
    """F1 over all ranks; nan when there is no row at all.

    ``micro`` counts all classes together (with one class per row it equals the accuracy). ``macro`` is the
    plain mean over the classes that occur as label or as prediction.

    Args:
        predicted: (B,) integer classes or (B, C) scores.
        label: (B,) integer classes in [0, num_classes).
        num_classes: C.
        session: The run.
        average: ``macro`` or ``micro``.

    Raises:
        ConfigError: on all ranks: ``average`` is neither, or shapes do not fit.
    """

    def checked() -> Tensor:
        if average not in ("macro", "micro"):
            raise ConfigError(f"average={average!r} must be 'macro' or 'micro'")
        return _as_classes(predicted, label)

    classes = together(session, checked, ConfigError)
    hit = torch.bincount(label[classes == label], minlength=num_classes)
    counts = torch.stack(
        [
            hit,
            torch.bincount(classes, minlength=num_classes),
            torch.bincount(label, minlength=num_classes),
        ]
    )
    hit, said, true = sum_over_ranks(counts, session, phase=PHASE).to(torch.float64)
    if average == "micro":
        hit, said, true = hit.sum()[None], said.sum()[None], true.sum()[None]
    occurs = (said + true) > 0
    if not bool(occurs.any()):
        return math.nan
    return float((2 * hit[occurs] / (said + true)[occurs]).mean())


def roc_auc(score: Tensor, label: Tensor, session: Session) -> float:
    """Exact area under the ROC curve over all ranks: P(score of a positive > of a negative), ties count 1/2.

    Every rank counts its own positives among the negatives of all ranks, so only the scores of the negatives
    travel (W-1 copies), and the result is a quotient of integers. nan when one class has no row.

    Args:
        score: (B,) floating point, finite.
        label: (B,) bool or 0 / 1.
        session: The run.

    Raises:
        ConfigError: on all ranks: a score is nan, or shapes differ.
    """
    together(session, lambda: _check_scores(score, label), ConfigError)
    score, positive = score.detach(), label.to(torch.bool)
    ordered = _gather_rows(score[~positive].double().cpu(), session).sort().values
    mine = score[positive].double().cpu()
    below = torch.searchsorted(ordered, mine, right=False).sum()
    below_or_equal = torch.searchsorted(ordered, mine, right=True).sum()
    counts = torch.stack([below + below_or_equal, torch.tensor(len(mine))])
    twice_wins, num_positive = sum_over_ranks(counts, session, phase=PHASE).tolist()
    pairs = num_positive * len(ordered)
    return twice_wins / (2 * pairs) if pairs else math.nan


def rmse(predicted: Tensor, target: Tensor, session: Session) -> float:
    """Root of the mean squared error over all ranks' values; nan when there is none.

    Args:
        predicted: (B,) or (B, K) real numbers.
        target: Of the same shape.
        session: The run.

    Raises:
        ConfigError: on all ranks: the shapes differ.
    """
    return math.sqrt(_mean_error(predicted, target, 2, session))


def mae(predicted: Tensor, target: Tensor, session: Session) -> float:
    """Mean absolute error over all ranks' values; nan when there is none. See :func:`rmse`."""
    return _mean_error(predicted, target, 1, session)


def _mean_error(predicted: Tensor, target: Tensor, power: int, session: Session) -> float:
    together(session, lambda: _check_pair(predicted, target, "targets"), ConfigError)
    errors = (predicted.detach().double() - target.double()).abs() ** power
    counted = torch.tensor([float(errors.sum()), float(errors.numel())], dtype=torch.float64)
    total, count = sum_over_ranks(counted, session, phase=PHASE).tolist()
    return total / count if count else math.nan


def _check_pair(predicted: Tensor, target: Tensor, what: str) -> None:
    if predicted.shape != target.shape:
        # Broadcasting (B, 1) against (B,) would compare every row with every other.
        raise ConfigError(f"{tuple(predicted.shape)} predictions do not fit {tuple(target.shape)} {what}")


def _check_scores(score: Tensor, label: Tensor) -> None:
    if bool(torch.isnan(score).any()):
        row = int(torch.isnan(score).nonzero()[0, 0])
        raise ConfigError(f"score[{row}] is nan, which has no rank among the others; mask it out first")
    _check_pair(score, label, "labels")


def _gather_rows(values: Tensor, session: Session) -> Tensor:
    """Return the (K,) float64 values of all ranks, one rank's after another's, bit for bit."""
    lengths = gather_int64([len(values)], session)[:, 0]
    padded = np.zeros(int(lengths.max()), dtype=np.float64)
    padded[: len(values)] = values.numpy()
    rows = gather_int64(padded.view(np.int64), session)
    pieces = [row[:length].view(np.float64) for row, length in zip(rows, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(pieces))


def _as_classes(predicted: Tensor, label: Tensor) -> Tensor:
    classes = predicted.argmax(1) if predicted.dim() == 2 else predicted
    if classes.shape != label.shape:
        raise ConfigError(
            f"{tuple(predicted.shape)} predictions do not fit {tuple(label.shape)} labels; pass one row "
            "of each per node"
        )
    return classes
