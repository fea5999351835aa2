"""Whether a claim is reproduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scripts.bench.figures import RatioFigures, ratio_figures
from scripts.bench.records import Experiment, Outcome, Ratio
from scripts.bench.regret_table import ERROR, Nearness, nearness
from scripts.bench.suites import why_absent

Word = Literal[
    "reproduced", "not reproduced", "partly reproduced", "no bound", "links not limited", "phi not matched",
    "absent", "failed", "not measured yet",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A word that a table can show, and the sentence behind it."""

    word: Word
    why: str
    simulated: bool = False

    def __str__(self) -> str:
        return f"{self.word} (simulated)" if self.simulated else self.word


def judge(figures: RatioFigures) -> Verdict:
    """Judge one ratio by its bounds.

    A value inside the bounds is not enough where they claim a difference (all of them above 1, or all
    below): an interquartile range that holds 1 shows none. Two bounds with 1 between or on them claim none.
    """
    ratio, value, simulated = figures.ratio, figures.value, bool(figures.simulated)
    if value is None:
        of = "a cell" if ratio.cells else f"{ratio.over} over {ratio.under}"
        why = (
            f"{of} could not be formed: one has no measurement or did not come to "
            "the target in every repetition, or the lower is 0"
        )
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    if not figures.limited:
        why = "the servers shared plain loopback, so nothing can be said about a network"
        return Verdict(word="links not limited", why=why, simulated=simulated)
    if figures.missed_phi:
        why = f"no rate was found at which it could be judged: {figures.missed_phi}"
        return Verdict(word="phi not matched", why=why, simulated=simulated)
    if ratio.low is None and ratio.high is None:
        return Verdict(word="no bound", why="no value of it was named as the claim's", simulated=simulated)
    bounds = bounds_in_words(ratio.low, ratio.high)
    if ratio.low is not None and value.median < ratio.low:
        why = f"{value.median:.2f} is below the least that counts as reproduced, {ratio.low:g}"
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    if ratio.high is not None and value.median > ratio.high:
        why = f"{value.median:.2f} is above the most that counts as reproduced, {ratio.high:g}"
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    if _claims_difference(ratio) and value.holds(1.0):
        why = f"its interquartile range, {value.low:.2f} to {value.high:.2f}, holds 1: no difference is shown"
        return Verdict(word="not reproduced", why=why, simulated=simulated)
    return Verdict(word="reproduced", why=f"{value.median:.2f} is {bounds}", simulated=simulated)


def _claims_difference(ratio: Ratio) -> bool:
    low, high = ratio.low, ratio.high
    if low is not None and high is not None and low <= 1 <= high:
        return False
    return (low is not None and low >= 1) or (high is not None and high <= 1)


def bounds_in_words(low: float | None, high: float | None) -> str:
    """Write e.g. "at least 1.5", "at most 1.1", "between 0.9 and 1.1", "without bounds"."""
    if low is not None and high is not None:
        return f"between {low:g} and {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return "without bounds" if high is None else f"at most {high:g}"


def judge_experiment(experiment: Experiment, outcome: Outcome | None) -> Verdict:
    """Judge an experiment by all its ratios; without an outcome, say why there is none."""
    if outcome is None:
        # What is installed where a page is made says nothing about the experiment.
        lacking = why_absent(replace(experiment, needs=()))
        if lacking:
            return Verdict(word="absent", why=lacking)
        return Verdict(word="not measured yet", why="there is no result of it")
    if outcome.status != "measured":
        return Verdict(word=outcome.status, why=outcome.reason)
    verdicts = [(figures.ratio.name, judge(figures)) for figures in ratio_figures(outcome)]
    near = nearness(outcome)
    return _together([*verdicts, *([] if near is None else [("predictions", _of_nearness(near))])])


def _of_nearness(near: Nearness) -> Verdict:
    why = f"{near.in_words}, of at most {100 * ERROR:.0f} % and none"
    return Verdict(word="reproduced" if near.is_near else "not reproduced", why=why)


def _together(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    simulated = any(one.simulated for _, one in verdicts)
    judged = [(name, one) for name, one in verdicts if one.word != "no bound"]
    if not judged:
        return Verdict(word="no bound", why="no ratio of it has bounds", simulated=simulated)
    words = {one.word for _, one in judged}
    same = {one.why for _, one in judged}
    why = same.pop() if len(same) == 1 else "; ".join(f"{name}: {one.why}" for name, one in judged)
    for unfit in ("links not limited", "phi not matched"):
        if unfit in words:
            return Verdict(word=unfit, why=why, simulated=simulated)
    word: Word = judged[0][1].word if len(words) == 1 else "partly reproduced"
    return Verdict(word=word, why=why, simulated=simulated)
