"""Twelve rows with ties, cut over the ranks; figures by hand and by counting all pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.training import metrics
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

LABEL = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
SAID = [0, 0, 1, 3, 1, 1, 2, 2, 2, 2, 0, 1]
SCORE = [0.5, 0.1, 0.5, 0.9, 0.5, 0.7, 0.2, 0.7, -1e300, 1 / 3, 1 / 3, 0.1]
POSITIVE = [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1]
CUTS = {1: (0, 12), 2: (0, 12, 12), 3: (0, 7, 7, 12)}


def _figures(cut: tuple[int, ...]) -> dict[str, Any]:
    session = start_session()
    rank = session.topology.rank
    rows = slice(cut[rank], cut[rank + 1])
    label, said = torch.tensor(LABEL)[rows], torch.tensor(SAID)[rows]
    score = torch.tensor(SCORE, dtype=torch.float64)[rows]
    positive = torch.tensor(POSITIVE)[rows]
    none = torch.zeros(0, dtype=torch.int64)
    return {
        "accuracy": metrics.accuracy(said, label, session),
        "scores": metrics.accuracy(torch.nn.functional.one_hot(said, 5).float(), label, session),
        "macro": metrics.f1(said, label, 5, session),
        "micro": metrics.f1(said, label, 5, session, average="micro"),
        "auc": metrics.roc_auc(score, positive, session),
        "auc of a loop that trains": metrics.roc_auc(score.clone().requires_grad_(), positive, session),
        "rmse": metrics.rmse(said.float(), label.float(), session),
        "mae": metrics.mae(said[:, None].float(), label[:, None].float(), session),
        "no rows rmse": metrics.rmse(none.float(), none.float(), session),
        "no rows": metrics.accuracy(none, none, session),
        "no rows f1": metrics.f1(none, none, 5, session),
        "one class": metrics.roc_auc(score, torch.ones_like(positive), session),
        "all tied": metrics.roc_auc(torch.zeros_like(score), positive, session),
    }


def brute_force_auc() -> float:
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, p_is in zip(SCORE, POSITIVE, strict=True)
        for n, n_is in zip(SCORE, POSITIVE, strict=True)
        if p_is and not n_is
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("ranks", [1, 3, *wide(2)])
def test_figures(ranks: int) -> None:
    # Hits 2, 2, 3 of classes 0, 1, 2; said 3, 4, 4 times and class 3 once; true 4, 3, 5 times.
    macro = (2 * 2 / (3 + 4) + 2 * 2 / (4 + 3) + 2 * 3 / (4 + 5) + 0.0) / 4
    for result in run_ranks(_figures, ranks, args=(CUTS[ranks],)):
        assert result["accuracy"] == result["scores"] == 7 / 12
        assert result["micro"] == pytest.approx(7 / 12, abs=1e-15)
        assert result["macro"] == pytest.approx(macro, abs=1e-15)
        assert result["auc"] == pytest.approx(brute_force_auc(), abs=1e-15)
        assert result["auc of a loop that trains"] == result["auc"]
        assert result["all tied"] == 0.5
        # Off by 1, 3, 1, 2 and 1.
        assert result["rmse"] == pytest.approx(math.sqrt((1 + 9 + 1 + 4 + 1) / 12), abs=1e-15)
        assert result["mae"] == pytest.approx((1 + 3 + 1 + 2 + 1) / 12, abs=1e-15)
        assert all(
            math.isnan(result[name]) for name in ("no rows", "no rows rmse", "no rows f1", "one class")
        )


def test_the_mean_of_the_ranks_figures_is_another_number() -> None:
    parts = [np.mean(np.equal(SAID[a:b], LABEL[a:b])) for a, b in ((0, 9), (9, 12))]
    assert abs(np.mean(parts) - 7 / 12) > 0.05


def test_bad_arguments() -> None:
    with start_session() as session:
        with pytest.raises(ConfigError, match=r"score\[1\] is nan"):
            metrics.roc_auc(torch.tensor([0.0, math.nan]), torch.tensor([0, 1]), session)
        with pytest.raises(ConfigError, match=r"\(2, 3\) predictions do not match \(3,\) labels"):
            metrics.accuracy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), session)
        with pytest.raises(ConfigError, match=r"\(2, 1\) predictions do not match \(2,\) targets"):
            metrics.rmse(torch.zeros(2, 1), torch.zeros(2), session)
        with pytest.raises(ConfigError, match="'weighted'"):
            metrics.f1(torch.zeros(1).long(), torch.zeros(1).long(), 1, session, average="weighted")  # type: ignore[arg-type]
