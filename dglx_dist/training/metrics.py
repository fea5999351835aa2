"""Compute exact metrics over all ranks. Counts are summed over the ranks first and divided once.

Functions with a ``session`` are collective. Every rank calls them with its own rows, possibly none.
"""

import math
from collections.abc import Callable, Sized
from typing import Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import gather_arrays, run_on_all_ranks, sum_over_ranks
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError

PHASE = "metrics"


def accuracy(predicted: Tensor, label: Tensor, session: Session) -> float:
    """Return the share of correct predictions over all ranks. NaN without rows.

    Args:
        predicted: (B,) integer classes, or (B, C) scores. The largest score predicts the class.
        label: (B,) integer classes.
    """
    classes = run_on_all_ranks(session, lambda: _as_classes(predicted, label), ConfigError)
    return _mean((classes == label).to(torch.float64), session)


def f1(
    predicted: Tensor,
    label: Tensor,
    num_classes: int,
    session: Session,
    *,
    average: Literal["macro", "micro"] = "macro",
) -> float:
    """Return the F1 score over all ranks. NaN without rows.

    ``micro`` counts all classes together, so it equals the accuracy if each row has one class. ``macro``
    averages the score over the classes that occur as label or as prediction.

    Args:
        predicted: (B,) integer classes or (B, C) scores. (B, C) bool if a row may have several classes.
        label: (B,) integer classes in [0, num_classes), or (B, C) zeros and ones for bool predictions.

    Raises:
        ConfigError: on all ranks, if ``average`` is invalid or shapes do not match.
    """

    def count_classes() -> Tensor:
        """Return three rows of counts per class: correct predictions, predictions and labels."""
        if average not in ("macro", "micro"):
            raise ConfigError(f"average={average!r} must be 'macro' or 'micro'")
        if predicted.dtype == torch.bool:
            _check_pair(predicted, label, "labels")
            truth = label.to(torch.bool)
            return torch.stack([(predicted & truth).sum(0), predicted.sum(0), truth.sum(0)])
        classes = _as_classes(predicted, label)
        class_rows = (label[classes == label], classes, label)
        class_counts = [torch.bincount(rows, minlength=num_classes) for rows in class_rows]
        # ``bincount`` returns more than ``minlength`` counts for a larger class.
        if max(map(len, class_counts)) > num_classes:
            raise ConfigError(f"a class is not below num_classes={num_classes}. Pass the number of classes.")
        return torch.stack(class_counts)

    counts = run_on_all_ranks(session, count_classes, ConfigError)
    counts = sum_over_ranks(counts, session, phase=PHASE).to(torch.float64)
    if average == "micro":
        counts = counts.sum(1, keepdim=True)

    num_correct, num_predicted, num_labels = counts
    total = num_predicted + num_labels
    occurs = total > 0
    if not bool(occurs.any()):
        return math.nan
    return float((2 * num_correct[occurs] / total[occurs]).mean())


def roc_auc(score: Tensor, label: Tensor, session: Session) -> float:
    """Return the exact area under the ROC curve over all ranks. Ties count 1/2.

    Each rank compares its positives with all ranks' negatives. So only negative scores are sent (W-1 copies),
    and the result is a quotient of integers. It is NaN if one class has no row. For (B, C) scores, it is the
    mean over the columns that have both classes.

    Args:
        score: (B,) or (B, C) floating-point scores, finite.
        label: Labels in the same shape, bool or 0 / 1.

    Raises:
        ConfigError: on all ranks, if a score is NaN or shapes differ.
    """
    run_on_all_ranks(session, lambda: _check_scores(score, label), ConfigError)
    return _average_columns(_roc_auc, score.detach(), label.to(torch.bool), session)


def average_precision(score: Tensor, label: Tensor, session: Session) -> float:
    """Return the exact average precision over all ranks, i.e. the mean precision at the positives' scores.

    All scores are sent (W-1 copies). The result is NaN without positives. For (B, C) scores, it is the mean
    over the columns that have positives. See :func:`roc_auc` for the arguments and errors.
    """
    run_on_all_ranks(session, lambda: _check_scores(score, label), ConfigError)
    return _average_columns(_average_precision, score.detach(), label.to(torch.bool), session)


def _average_columns(
    metric: Callable[[Tensor, Tensor, Session], float], score: Tensor, label: Tensor, session: Session
) -> float:
    """Average ``metric`` over the columns where it is a number. Return NaN if there are none."""
    if score.dim() == 1:
        return metric(score, label, session)
    values = []
    for column_scores, column_labels in zip(score.T, label.T, strict=True):
        value = metric(column_scores, column_labels, session)
        if not math.isnan(value):
            values.append(value)
    return math.fsum(values) / len(values) if values else math.nan


def _average_precision(score: Tensor, is_positive: Tensor, session: Session) -> float:
    """Average over all positives the precision among the rows that score at least as high."""
    positive_scores = _gather_sorted(score[is_positive], session)
    negative_scores = _gather_sorted(score[~is_positive], session)
    if not len(positive_scores):
        return math.nan

    # For each positive, count the rows with a score that is at least as high.
    num_positives = len(positive_scores) - torch.searchsorted(positive_scores, positive_scores)
    num_negatives = len(negative_scores) - torch.searchsorted(negative_scores, positive_scores)
    return float((num_positives.double() / (num_positives + num_negatives)).mean())


def _roc_auc(score: Tensor, is_positive: Tensor, session: Session) -> float:
    """Return how often a positive scores higher than a negative, over all pairs from all ranks.

    A tie counts half. The result is NaN without a pair.
    """
    negative_scores = _gather_sorted(score[~is_positive], session)
    positive_scores = score[is_positive].double().cpu()

    # The sum counts a lower negative twice and a tie once, so it is an integer.
    num_lower = torch.searchsorted(negative_scores, positive_scores, right=False).sum()
    num_lower_or_equal = torch.searchsorted(negative_scores, positive_scores, right=True).sum()
    counts = torch.stack([num_lower + num_lower_or_equal, torch.tensor(len(positive_scores))])
    twice_wins, num_positives = sum_over_ranks(counts, session, phase=PHASE).tolist()
    num_pairs = num_positives * len(negative_scores)
    return twice_wins / (2 * num_pairs) if num_pairs else math.nan


def rmse(predicted: Tensor, target: Tensor, session: Session) -> float:
    """Return the root mean squared error over all ranks. NaN without values.

    ``predicted`` and ``target`` are (B,) or (B, K) real numbers. ConfigError on all ranks if shapes differ.
    """
    return math.sqrt(_mean_error(predicted, target, 2, session))


def mae(predicted: Tensor, target: Tensor, session: Session) -> float:
    """Return the mean absolute error over all ranks. NaN without values. See :func:`rmse`."""
    return _mean_error(predicted, target, 1, session)


def _mean_error(predicted: Tensor, target: Tensor, power: int, session: Session) -> float:
    run_on_all_ranks(session, lambda: _check_pair(predicted, target, "targets"), ConfigError)
    errors = (predicted.detach().double() - target.double()).abs()
    return _mean(errors**power, session)


def _mean(values: Tensor, session: Session) -> float:
    sums = torch.tensor([float(values.sum()), float(values.numel())], dtype=torch.float64)
    total, count = sum_over_ranks(sums, session, phase=PHASE).tolist()
    return total / count if count else math.nan


def _check_pair(predicted: Tensor, target: Tensor, noun: str) -> None:
    # Without this check, (B, 1) predictions and (B,) targets would be broadcast to (B, B).
    if predicted.shape != target.shape:
        raise ConfigError(f"{tuple(predicted.shape)} predictions do not match {tuple(target.shape)} {noun}")


def _check_scores(score: Tensor, label: Tensor) -> None:
    _refuse_nan(score)
    _check_pair(score, label, "labels")


def _gather_sorted(values: Tensor, session: Session) -> Tensor:
    """Gather all ranks' values and sort them in ascending order, as float64."""
    rank_values = gather_arrays(values.double().cpu().numpy(), session)
    return torch.from_numpy(np.sort(np.concatenate(rank_values)))


def _as_classes(predicted: Tensor, label: Tensor) -> Tensor:
    classes = predicted.argmax(1) if predicted.dim() == 2 else predicted
    _check_pair(classes, label, "labels")
    return classes


MAX_SCORES = 2**24
"""Default number of scores to hold at once: 64 MiB in float32."""

ScoreAll: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps (b,) int64 subjects and (b,) int64 relations to (b, C) scores for all candidate answers."""

AfterRanking: TypeAlias = Callable[[Tensor, Tensor], None]
"""Called with the answers' (b,) scores and the other candidates' (b, C) scores, NaN for removed ones."""


@final
class KnownEdges:
    """The true answers to every (subject, relation). Filtered ranking removes them from the candidates.

    Args:
        subject: (E,) integers, at least 0. Heads if tails are ranked, tails if heads are ranked.
        relation: (E,) integers, at least 0.
        answer: (E,) integers, at least 0.

    Raises:
        ConfigError: lengths differ, or an id is negative or so large that pairs do not fit 63 bits.
    """

    def __init__(self, subject: Tensor, relation: Tensor, answer: Tensor) -> None:
        subjects = _read_ids(subject, "subject")
        relations = _read_ids(relation, "relation")
        answers = _read_ids(answer, "answer")
        _check_lengths(subjects, relations, answers, "edges")

        # A key combines relation and subject into one number.
        self._num_subjects = 1 + int(subjects.max(initial=-1))
        num_relations = 1 + int(relations.max(initial=-1))
        if self._num_subjects * num_relations >= 2**63:
            raise ConfigError("pairs of subject and relation exceed 63 bits. Renumber them from 0.")
        keys = relations * self._num_subjects + subjects

        # Sort the edges by key, and drop duplicates.
        order = np.lexsort((answers, keys))
        keys = keys[order]
        answers = answers[order]
        is_new = np.ones(len(keys), dtype=bool)
        is_new[1:] = (keys[1:] != keys[:-1]) | (answers[1:] != answers[:-1])
        self._keys = keys[is_new]
        self._answers = answers[is_new]

    def __len__(self) -> int:
        """Number of distinct edges."""
        return len(self._keys)

    def find_answers(self, subject: Tensor, relation: Tensor) -> tuple[Tensor, Tensor]:
        """Return all known answers to (b,) ``subject`` and ``relation`` as (row, answer), each (M,) int64."""
        subjects = _read_ids(subject, "subject")
        relations = _read_ids(relation, "relation")
        keys = relations * self._num_subjects + subjects

        # A subject above all known ones has no answers. Its key would belong to the next relation.
        keys[subjects >= self._num_subjects] = -1
        starts = np.searchsorted(self._keys, keys, side="left")
        num_answers = np.searchsorted(self._keys, keys, side="right") - starts
        rows = np.repeat(np.arange(len(keys)), num_answers)

        # A row's answers are contiguous, from ``starts`` on.
        first_results = np.cumsum(num_answers) - num_answers
        positions = np.arange(len(rows)) + np.repeat(starts - first_results, num_answers)
        return torch.from_numpy(rows), torch.from_numpy(self._answers[positions])


def rank_of_positive(positive: Tensor, negatives: Tensor) -> Tensor:
    """Rank each positive among its own negatives. Return (B,) float64 ranks, where ties count half.

    Args:
        positive: (B,) scores.
        negatives: (B, K) scores for each positive's negatives. K may be 0.

    Raises:
        ConfigError: shapes do not match, or a score is nan.
    """
    if positive.dim() != 1 or negatives.dim() != 2 or len(positive) != len(negatives):
        raise ConfigError(
            f"{tuple(positive.shape)} positives do not match {tuple(negatives.shape)} negatives: (B,), (B, K)"
        )
    _refuse_nan(positive, negatives)
    return _compute_ranks(positive, negatives)


def rank_of_answer(
    score_all: ScoreAll,
    subject: Tensor,
    relation: Tensor,
    answer: Tensor,
    *,
    known: KnownEdges | None = None,
    max_scores: int = MAX_SCORES,
    after: AfterRanking | None = None,
) -> Tensor:
    """Rank each query's answer among all candidates. Not collective.

    There are Q queries, and each is a subject, a relation and an answer. Q may be 0.

    Args:
        score_all: Function that scores all candidates. Column ``a`` belongs to candidate ``a``. The returned
            tensor is overwritten.
        subject: (Q,) int64 subjects.
        relation: (Q,) int64 relations.
        answer: (Q,) int64 answers, each a column number in the scores.
        known: True answers to remove from the candidates (filtered ranking). None: remove none (raw).
        max_scores: Maximum number of scores in memory. At least one query is scored at a time.
        after: Function that is called with the scores after each group of b queries, see ``AfterRanking``.

    Returns:
        (Q,) float64 ranks on the CPU. The best rank is 1, and ties count half.

    Raises:
        ConfigError: ``max_scores`` is below 1, lengths differ, a score is NaN, or an answer has no column.
    """
    if max_scores < 1:
        raise ConfigError(f"max_scores={max_scores} must be at least 1")
    _check_lengths(subject, relation, answer, "queries")
    if len(answer) and int(answer.min()) < 0:
        raise ConfigError(f"answer {int(answer.min())} is negative. An answer is the index of a score.")

    ranks = torch.empty(len(answer), dtype=torch.float64)
    start = 0
    # The first query is scored alone, because the number of candidates is unknown before.
    batch_size = 1
    while start < len(answer):
        queries = slice(start, start + batch_size)
        with torch.no_grad():
            scores = score_all(subject[queries], relation[queries])

        known_answers = None
        if known is not None:
            known_answers = known.find_answers(subject[queries], relation[queries])
        positive, negatives = _remove_known(scores.detach(), answer[queries], known_answers)
        ranks[queries] = _compute_ranks(positive, negatives).cpu()
        if after is not None:
            after(positive, negatives)

        start += batch_size
        batch_size = max(1, max_scores // max(1, scores.shape[1]))

    return ranks


def mrr(ranks: Tensor, session: Session) -> float:
    """Return the mean reciprocal rank over all processes' queries, NaN without any. All must call this.

    ``ranks`` are the (Q,) results that :func:`rank_of_answer` returned for this process's queries.
    """
    return _mean(1.0 / ranks.to(torch.float64), session)


def hits_at(k: int, ranks: Tensor, session: Session) -> float:
    """Return the share of queries on all processes with ``ranks`` up to ``k``, see :func:`mrr`.

    Raises ConfigError on all processes, if ``k`` is below 1.
    """

    def find_hits() -> Tensor:
        if k < 1:
            raise ConfigError(f"k={k} must be at least 1")
        return (ranks <= k).to(torch.float64)

    hits = run_on_all_ranks(session, find_hits, ConfigError)
    return _mean(hits, session)


def _remove_known(
    scores: Tensor, answer: Tensor, known_answers: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the answers' (b,) scores, and ``scores`` with NaN in place of the answers and known answers.

    ``scores`` are overwritten. Raises ConfigError if a score is NaN or an answer has no column.
    """
    _refuse_nan(scores)
    known_rows = known_columns = torch.empty(0, dtype=torch.int64)
    if known_answers is not None:
        known_rows, known_columns = known_answers
    all_columns = torch.cat([answer.cpu(), known_columns])
    largest = int(all_columns.max()) if len(all_columns) else -1
    if largest >= scores.shape[1]:
        raise ConfigError(f"answer {largest} is beyond the {scores.shape[1]} candidates. Score all of them.")
    rows = torch.arange(len(scores), device=scores.device)
    columns = answer.to(scores.device)
    positive = scores[rows, columns]

    # NaN is neither above nor equal to any score, so these columns do not count.
    scores[known_rows.to(scores.device), known_columns.to(scores.device)] = math.nan
    scores[rows, columns] = math.nan
    return positive, scores


def _compute_ranks(positive: Tensor, negatives: Tensor) -> Tensor:
    num_above = (negatives > positive[:, None]).sum(1)
    num_equal = (negatives == positive[:, None]).sum(1)
    # The best rank is 1. An equal score counts half, as if ties were ordered at random.
    return 1.0 + num_above.to(torch.float64) + 0.5 * num_equal.to(torch.float64)


def _check_lengths(subject: Sized, relation: Sized, answer: Sized, noun: str) -> None:
    if not len(subject) == len(relation) == len(answer):
        raise ConfigError(
            f"{len(subject)} subjects, {len(relation)} relations and {len(answer)} answers do not form one "
            f"list of {noun}. Pass columns of one length."
        )


def _refuse_nan(*scores: Tensor) -> None:
    for tensor in scores:
        if bool(torch.isnan(tensor).any()):
            raise ConfigError("a score is NaN and cannot be ranked. Check the model for its source.")


def _read_ids(ids: Tensor, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    array = torch.as_tensor(ids).cpu().numpy().astype(np.int64).reshape(-1)
    if len(array) and array.min() < 0:
        raise ConfigError(f"{name} {array.min()} is negative, but ids count from 0")
    return array
