"""Metrics of rows that are split over the ranks, by hand and by counting all pairs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.training import metrics
from dglx_dist.training.metrics import KnownEdges, hits_at, mrr, rank_of_answer, rank_of_positive
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
    label, message = torch.tensor(LABEL)[rows], torch.tensor(SAID)[rows]
    score = torch.tensor(SCORE, dtype=torch.float64)[rows]
    positive = torch.tensor(POSITIVE)[rows]
    none = torch.zeros(0, dtype=torch.int64)
    return {
        "accuracy": metrics.accuracy(message, label, session),
        "scores": metrics.accuracy(torch.nn.functional.one_hot(message, 5).float(), label, session),
        "macro": metrics.f1(message, label, 5, session),
        "micro": metrics.f1(message, label, 5, session, average="micro"),
        "auc": metrics.roc_auc(score, positive, session),
        "auc of a loop that trains": metrics.roc_auc(score.clone().requires_grad_(), positive, session),
        "rmse": metrics.rmse(message.float(), label.float(), session),
        "mae": metrics.mae(message[:, None].float(), label[:, None].float(), session),
        "no rows rmse": metrics.rmse(none.float(), none.float(), session),
        "no rows": metrics.accuracy(none, none, session),
        "no rows f1": metrics.f1(none, none, 5, session),
        "one class": metrics.roc_auc(score, torch.ones_like(positive), session),
        "all tied": metrics.roc_auc(torch.zeros_like(score), positive, session),
        "mrr": mrr(ranks_of(rows), session),
        "hits": [hits_at(k, ranks_of(rows), session) for k in (1, 3, 10)],
        "no rows mrr": mrr(none.float(), session),
        "no rows hits": hits_at(3, none, session),
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
        full = ranks_of()
        assert result["mrr"] == pytest.approx(float((1 / full).mean()), abs=1e-14)
        assert result["hits"] == [float((full <= k).double().mean()) for k in (1, 3, 10)]
        undefined = {name for name, value in result.items() if isinstance(value, float) and math.isnan(value)}
        assert undefined == {"one class", *(name for name in result if name.startswith("no rows"))}


# (0, 0) is answered by 1 and 3, (0, 1) by 2, (4, 0) by 0; one edge is there twice.
EDGES = torch.tensor([[0, 0, 1], [0, 0, 3], [0, 1, 2], [4, 0, 0], [0, 0, 3]]).T


def random_case(seed: int, queries: int = 40, candidates: int = 17) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(5, (6 * 3, candidates), generator=random).double()
    return scores, torch.stack(
        [torch.randint(high, (queries,), generator=random) for high in (6, 3, candidates)]
    )


def ranks_of(rows: slice = slice(None)) -> Tensor:
    scores, (subject, relation, answer) = random_case(2, len(LABEL))
    known = KnownEdges(subject, relation, answer)
    request = (subject[rows], relation[rows], answer[rows])
    return rank_of_answer(lambda s, r: scores[s * 3 + r].clone(), *request, known=known)


def naive_rank(row: list[float], answer: int, left_out: set[int]) -> float:
    above = sum(row[c] > row[answer] for c in range(len(row)) if c != answer and c not in left_out)
    equal = sum(row[c] == row[answer] for c in range(len(row)) if c != answer and c not in left_out)
    return 1 + above + equal / 2


def test_ranks_by_hand() -> None:
    remaining = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], [9.0, 9.0, 9.0]])
    ranks = rank_of_positive(torch.tensor([4.0, 2.0, 2.0, 1.0]), remaining)
    assert ranks.tolist() == [1.0, 2.5, 2.5, 4.0]
    assert rank_of_positive(torch.tensor([0.5]), torch.empty(1, 0)).tolist() == [1.0]


def test_known_answers_are_found() -> None:
    known = KnownEdges(*EDGES)
    assert len(known) == 4
    rows, answers = known.find_answers(torch.tensor([4, 0, 3, 0, 5, 9]), torch.tensor([0, 0, 0, 1, 0, 0]))
    assert rows.tolist() == [0, 1, 1, 3]
    assert answers.tolist() == [0, 1, 3, 2]
    none = torch.zeros(0, dtype=torch.int64)
    rows, answers = KnownEdges(none, none, none).find_answers(torch.tensor([0]), torch.tensor([0]))
    assert len(rows) == len(answers) == 0


@pytest.mark.parametrize("max_scores", [1, 40, 10**6])
@pytest.mark.parametrize("filtered", [True, False])
def test_ranks_are_those_of_a_naive_loop(max_scores: int, filtered: bool) -> None:
    scores, (subject, relation, answer) = random_case(1)
    known = KnownEdges(subject, relation, answer)
    asked_at_once = []

    def score_all(s: Tensor, r: Tensor) -> Tensor:
        asked_at_once.append(len(s))
        return scores[s * 3 + r].clone()

    ranks = rank_of_answer(
        score_all, subject, relation, answer, known=known if filtered else None, max_scores=max_scores
    )
    triples = list(zip(subject.tolist(), relation.tolist(), answer.tolist(), strict=True))
    expected = [
        naive_rank(
            scores[s * 3 + r].tolist(),
            a,
            {triple for s2, r2, triple in triples if filtered and (s2, r2) == (s, r)},
        )
        for s, r, a in triples
    ]
    assert ranks.tolist() == expected
    assert max(asked_at_once) <= max(1, max_scores // scores.shape[1])


ONE, TWO = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)


def rank_answer(answer: Tensor = ONE, score: float = 0.0, subject: Tensor = ONE, **options: Any) -> Tensor:
    return rank_of_answer(lambda s, r: torch.full((len(s), 2), score), subject, ONE, answer, **options)


def collective(metric: Any, *given: Any, **options: Any) -> None:
    with start_session() as session:
        metric(*given, session, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rank_answer(ONE - 1), "answer -1 is negative"),
        (lambda: rank_answer(ONE + 7), "answer 7 is beyond the 2"),
        (lambda: rank_answer(subject=TWO), "2 subjects, 1 relations and 1 answers"),
        (lambda: rank_answer(score=math.nan), "NaN"),
        (lambda: rank_answer(max_scores=0), "max_scores=0"),
        (
            lambda: rank_of_positive(torch.zeros(2), torch.zeros(3, 1)),
            r"\(2,\) positives do not match \(3, 1\)",
        ),
        (lambda: rank_of_positive(torch.tensor([math.nan]), torch.zeros(1, 1)), "NaN"),
        (lambda: KnownEdges(ONE - 1, ONE, ONE), "subject -1 is negative"),
        (lambda: KnownEdges(TWO, ONE, ONE), "2 subjects, 1 relations and 1 answers"),
        (lambda: KnownEdges(ONE.expand(1, 2), ONE, ONE), "2 subjects, 1 relations and 1 answers"),
        (lambda: KnownEdges(ONE + 2**40, ONE + 2**40, ONE), "63 bits"),
        (lambda: collective(metrics.roc_auc, torch.tensor([0.0, math.nan]), TWO), r"score is NaN"),
        (
            lambda: collective(metrics.accuracy, torch.zeros(2, 3), torch.zeros(3)),
            r"\(2,\) predictions do not match \(3,\) labels",
        ),
        (
            lambda: collective(metrics.roc_auc, torch.zeros(2, 1), TWO),
            r"\(2, 1\) predictions do not match \(2,\) labels",
        ),
        (lambda: collective(metrics.rmse, torch.zeros(2, 1), TWO), r"do not match \(2,\) targets"),
        (lambda: collective(metrics.f1, ONE, ONE, 1, average="weighted"), "'weighted'"),
        (lambda: collective(hits_at, 0, torch.ones(1)), "k=0"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
