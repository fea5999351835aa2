"""Outcome of an experiment -> its figures and verdict, the JSON of docs/results/ID.json.

Medians with their spread, bytes by phase, the closed form of phi, kappa and beta, regret of choices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from dglx_dist.comm.ledger import CONTROL
from dglx_dist.memory import format_bytes
from dglx_dist.report.tables import format_percent
from scripts.bench.experiments.common import predicted_time
from scripts.bench.records import (
    COUNTED_BYTES,
    KAPPA,
    PREDICTED_BYTES,
    PREDICTED_ONCE,
    Cell,
    Experiment,
    MatchedPhi,
    Measurement,
    Outcome,
    Ratio,
    Variant,
)
from scripts.bench.suites import why_absent

FORMAT, VERSION = "dglx bench figures", 1
PHASES, HIDDEN = ("wait_s", "compute_s", "exchange_s"), ("sample_s", "fetch_s")
"""Of the training loop, one after another; on the loader's threads, beside it."""
_OF_REPORTS = ("epochs_to_target", "dollars", "value")  # quantities that are no field of an epoch
BYTES = ("bytes_inside", "bytes_outside")
_MOST_NAMES = 60
_OF_ONE_LAB = {"name", "external", "phi", "calibration"}
"""Of ``Lab.describe()`` and what the driver adds: not the same for variants that share a shape."""
Row = dict[str, str]  # a line of a table: column -> cell


def figures_of(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return all that is told of a result: medians, quartiles, verdicts, circumstances; JSON values."""
    verdict = judge_experiment(experiment, outcome)
    variants = () if outcome.plan is None else outcome.plan.variants
    shown = {} if outcome.plan is None else outcome.plan.facts
    tables = (PREDICTED_BYTES, PREDICTED_ONCE, COUNTED_BYTES)
    return {
        "format": FORMAT,
        "version": VERSION,
        "experiment": experiment.id,
        "verdict": str(verdict),
        "why": verdict.why,
        "label": outcome.label,
        "simulated": sorted({one.simulated for one in variants if one.simulated}),
        "repetitions": max((len(found) for _, found in _measured(outcome)), default=0),
        "date": outcome.date,
        "command": outcome.command,
        "machine": flat(outcome.machine),
        "circumstances": [*_servers(outcome), *_calibrations(outcome)],
        "ratios": [_ratio_row(one) for one in ratio_figures(outcome)],
        # Every way of every cell is a page of rows that nobody reads.
        "variants": [] if cells_of(outcome) else variant_rows(outcome),
        "cells": cell_rows(outcome),
        "nearness": nearness(outcome)[1],
        "bytes": phase_rows(outcome),
        "closed form": closed_form_rows(outcome),
        "done once": once_rows(outcome),
        "accuracy": accuracy_in_words(outcome),
        "facts": fact_lines({name: fact for name, fact in shown.items() if name not in tables}),
    }


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median and its interquartile range."""

    median: float
    low: float
    high: float

    def rounded(self) -> list[float]:
        """Return the three, to 6 digits."""
        return [_number(value) for value in vars(self).values()]


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles (linear interpolation) of at least one value."""
    low, middle, high = map(float, np.percentile(values, [25, 50, 75]))
    return Spread(median=middle, low=low, high=high)


def mean_of(measurement: Measurement, name: str) -> float:
    """Return the mean over the epochs of a field of their records."""
    return fmean(float(getattr(epoch, name)) for epoch in measurement.epochs)


def _of(name: str, outcome: Outcome) -> list[Measurement]:
    # A curve has no epochs: it is no measurement of time.
    return [one for one in outcome.measurements if one.variant == name and one.epochs]


def _measured(outcome: Outcome) -> Iterator[tuple[Variant, list[Measurement]]]:
    for variant in () if outcome.plan is None else outcome.plan.variants:
        if found := _of(variant.name, outcome):
            yield variant, found


def variant_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return seconds, phases, MB and memory of each variant that has a measurement, in the plan's order.

    Of one epoch; ``seconds`` with their quartiles, the others medians. ``mb_wire`` is what the cards counted
    between servers (None: no card counted), ``wire_by_ledger`` that by ``mb_outside``.
    """
    rows = []
    for variant, found in _measured(outcome):
        middle = {name: median(mean_of(one, name) for one in found) for name in (*PHASES, *HIDDEN, *BYTES)}
        inside, outside = (middle.pop(name) for name in BYTES)
        cards = [one.bytes_outside_wire for one in found if one.bytes_outside_wire is not None]
        wire = median(cards) / len(found[0].epochs) if cards else None
        row = {
            "name": variant.name,
            "servers": variant.shape.servers,
            "ranks_per_server": variant.shape.ranks_per_server,
            "link": link_of(outcome, variant).words,
            "seconds": spread([one.seconds for one in found]).rounded(),
            **{name: _number(value) for name, value in middle.items()},
            "mb_inside": _number(inside / 1e6),
            "mb_outside": _number(outside / 1e6),
            "mb_wire": None if wire is None else _number(wire / 1e6),
            "wire_by_ledger": None if wire is None or not outside else round(wire / outside, 3),
            "peak_mb": round(max(one.peak_bytes for one in found) / 1e6),
        }
        rows.append(row | ({"simulated": True} if variant.simulated else {}))
    return rows


def medians(outcome: Outcome) -> dict[str, float]:
    """Return the median seconds of an epoch of each variant that has a measurement."""
    names = dict.fromkeys(one.variant for one in outcome.measurements if one.epochs)
    return {name: median(one.seconds for one in _of(name, outcome)) for name in names}


def _number(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """How servers were joined; not limited on loopback of several, where no claim of a network is judged."""

    words: str
    """Rate between servers and share of time that the baseline spends on it, e.g. "96mbit, phi 0.65"."""
    limited: bool
    missed_phi: str
    """What phi was wanted where no rate gave it, in words; empty: none was, or it was reached."""


def link_of(outcome: Outcome, variant: Variant) -> Link:
    """Return the link of ``variant`` in ``outcome``."""
    found = outcome.network.get(variant.name) or {}
    kind, phi = found.get("kind", ""), found.get("phi")
    limited = kind == "namespaces" or variant.shape.servers == 1
    fixed = None if isinstance(variant.rate, MatchedPhi) else variant.rate
    words = str(found.get("external", fixed) or "no limit")
    words += "" if phi is None else f", phi {phi:.2f}"
    if not limited:
        words = "not limited (plain loopback)" if kind == "loopback" else "not noted"
    calibration = found.get("calibration") or {}
    missed = not calibration.get("within_tolerance", True)
    told = f"phi is {phi:.2f}, not {calibration['wanted']:g}" if missed and phi is not None else ""
    return Link(words=words, limited=limited, missed_phi=told)


@dataclass(frozen=True, kw_only=True)
class RatioFigures:
    """A ratio as measured."""

    ratio: Ratio
    value: Spread | None
    """None: a variant has no measurement, one of its repetitions did not come to the target, or the lower
    one is 0. Median: quotient of the two medians.
    Quartiles: of the quotients of single repetitions, which ran one after the other, so that a drift of
    the machine cancels. Of cells: the quotient that counts, and the quartiles of all."""
    links: tuple[Link, ...]
    """Of its variants."""
    simulated: bool
    """Whether something of them is."""


def ratio_figures(outcome: Outcome) -> tuple[RatioFigures, ...]:
    """Return each ratio of the plan, in its order."""
    if outcome.plan is None:
        return ()
    variants = {variant.name: variant for variant in outcome.plan.variants}
    return tuple(_ratio(ratio, variants, outcome) for ratio in outcome.plan.ratios)


def _ratio(ratio: Ratio, variants: Mapping[str, Variant], outcome: Outcome) -> RatioFigures:
    names = [name for cell in ratio.cells for name in cell.ways] or [ratio.over, ratio.under]
    if ratio.cells:
        value = _of_cells(ratio, medians(outcome))
    else:
        value = _quotient(*(_by_repetition(ratio.quantity, _of(name, outcome)) for name in names))
    return RatioFigures(
        ratio=ratio,
        value=value,
        links=tuple(link_of(outcome, variants[name]) for name in names),
        simulated=any(variants[name].simulated for name in names),
    )


def _of_cells(ratio: Ratio, took: Mapping[str, float]) -> Spread | None:
    if any(not took.get(name) for cell in ratio.cells for name in cell.ways):
        return None
    regrets = [took[cell.chosen] / min(took[name] for name in cell.ways) for cell in ratio.cells]
    around, worst = spread(regrets), max(regrets)
    return around if ratio.of_cells == "median" else replace(around, median=worst, high=worst)


def _by_repetition(quantity: str, measured: Sequence[Measurement]) -> dict[int, float]:
    if quantity not in _OF_REPORTS:
        return {one.repetition: mean_of(one, quantity) for one in measured}
    told = {one.repetition: one.extra.get(quantity) for one in measured}
    # A target that one seed did not reach has no number of epochs, and the median of the others is too small.
    return {} if None in told.values() else {number: float(value or 0) for number, value in told.items()}


def _quotient(over: Mapping[int, float], under: Mapping[int, float]) -> Spread | None:
    if not over or not under or median(under.values()) <= 0:
        return None
    value = median(over.values()) / median(under.values())
    both = sorted(set(over) & set(under))
    around = spread([over[number] / under[number] for number in both if under[number] > 0] or [value])
    # The quotient of medians is no quotient of one repetition, so few of these may lie to one side of it.
    return Spread(median=value, low=min(around.low, value), high=max(around.high, value))


def _ratio_row(one: RatioFigures) -> dict[str, Any]:
    ratio, verdict = one.ratio, judge(one)
    return {
        "name": ratio.name,
        "of": f"{ratio.quantity}: {ratio.over} / {ratio.under}",
        "predicted": None if ratio.predicted is None else _number(ratio.predicted),
        "measured": None if one.value is None else one.value.rounded(),
        "bound": "" if verdict.word == "no bound" else bounds_in_words(ratio.low, ratio.high),
        "verdict": str(verdict),
    }


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
    """Judge one ratio by its bounds; where these claim a difference, quartiles around 1 show none."""
    word, why = _judged(figures.ratio, figures.value, figures.links)
    return Verdict(word=word, why=why, simulated=figures.simulated)


def _judged(ratio: Ratio, value: Spread | None, links: Sequence[Link]) -> tuple[Word, str]:
    low, high = ratio.low, ratio.high
    if value is None:
        of = "a cell" if ratio.cells else f"{ratio.over} over {ratio.under}"
        why = "one has no measurement or did not come to the target in every repetition, or the lower is 0"
        return "not reproduced", f"{of} could not be formed: {why}"
    if not all(link.limited for link in links):
        why = "the servers shared plain loopback: nothing can be said about a network"
        return "links not limited", why
    missed = "; ".join(dict.fromkeys(link.missed_phi for link in links if link.missed_phi))
    if missed:
        return "phi not matched", f"no rate was found at which it could be judged: {missed}"
    if low is None and high is None:
        return "no bound", "no value of it was named as the claim's"
    if low is not None and value.median < low:
        return "not reproduced", f"{value.median:.2f} is below the least that counts as reproduced, {low:g}"
    if high is not None and value.median > high:
        return "not reproduced", f"{value.median:.2f} is above the most that counts as reproduced, {high:g}"
    claims_none = low is not None and high is not None and low <= 1 <= high
    differs = not claims_none and ((low or 0.0) >= 1 or (high is not None and high <= 1))
    if differs and value.low <= 1.0 <= value.high:
        around = f"{value.low:.2f} to {value.high:.2f}"
        return "not reproduced", f"its interquartile range, {around}, holds 1: no difference is shown"
    return "reproduced", f"{value.median:.2f} is {bounds_in_words(low, high)}"


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
        lacking = why_absent(experiment, installed=False)
        if lacking:
            return Verdict(word="absent", why=lacking)
        return Verdict(word="not measured yet", why="there is no result of it")
    if outcome.status != "measured":
        return Verdict(word=outcome.status, why=outcome.reason)
    verdicts = [(figures.ratio.name, judge(figures)) for figures in ratio_figures(outcome)]
    is_near, words = nearness(outcome)
    if words:
        near: Word = "reproduced" if is_near else "not reproduced"
        why = words
        verdicts.append(("predictions", Verdict(word=near, why=why)))
    return _together(verdicts)


def _together(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    simulated = any(one.simulated for _, one in verdicts)
    judged = [(name, one) for name, one in verdicts if one.word != "no bound"]
    if not judged:
        return Verdict(word="no bound", why="no ratio of it has bounds", simulated=simulated)
    words = {one.word for _, one in judged}
    same = {one.why for _, one in judged}
    why = same.pop() if len(same) == 1 else "; ".join(f"{name}: {one.why}" for name, one in judged)
    word: Word = judged[0][1].word if len(words) == 1 else "partly reproduced"
    for unfit in ("phi not matched", "links not limited"):
        word = unfit if unfit in words else word
    return Verdict(word=word, why=why, simulated=simulated)


_BY_PHASE, _BEFORE, _SECONDS_BEFORE = "bytes_outside_by_phase", "bytes_outside_before", "seconds_before"
_PRELOAD = "preload"


def measured_bytes(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Return payload between servers by variant and phase, per epoch of its first repetition.

    Where workers had tasks launched again, of the one with the fewest: these pull their rows again.
    Without what ranks tell each other to agree (barriers, counts): a few hundred bytes, of any strategy.
    """
    found: dict[str, dict[str, float]] = {}
    for one in sorted(outcome.measurements, key=lambda one: one.extra.get("relaunched", 0)):
        if one.epochs and _BY_PHASE in one.extra:
            counts = one.extra[_BY_PHASE]
            phases = {phase: counts[phase] / len(one.epochs) for phase in counts if phase != CONTROL}
            found.setdefault(one.variant, phases)
    return found


def phase_rows(outcome: Outcome) -> list[Row]:
    """Return the bytes of each variant for which some were predicted and measured, in the plan's order."""
    expected, found = outcome.fact(PREDICTED_BYTES), measured_bytes(outcome)
    names = [name for name in expected if name in found]
    phases = sorted({phase for name in names for phase in (*found[name], *expected[name])})
    rows = []
    for name in names:
        total, predicted = sum(found[name].values()), sum(expected[name].values())
        rows.append(
            {"MB per epoch": name}
            | {phase: f"{found[name].get(phase, 0) / 1e6:.3f}" for phase in phases}
            | {"total": f"{total / 1e6:.3f}", "by the formula": f"{predicted / 1e6:.3f}"}
            | {"difference, bytes": f"{total - predicted:+.0f}" if total != predicted else "0"}
        )
    return rows


def closed_form_rows(outcome: Outcome) -> list[Row]:
    """Return the gain of each variant over the baseline of its rate: by phi, kappa and beta, and measured."""
    kappas, sent, took = outcome.fact(KAPPA), measured_bytes(outcome), medians(outcome)
    variants = {} if outcome.plan is None else {one.name: one for one in outcome.plan.variants}
    rows = []
    for name, kappa in kappas.items():
        rate = variants[name].rate if name in took else None
        if not isinstance(rate, MatchedPhi) or name not in sent or rate.baseline not in sent:
            continue
        phi = float(outcome.network.get(name, {}).get("phi") or rate.phi)
        beta = sum(sent[name].values()) / sum(sent[rate.baseline].values())
        rows.append(
            {
                "by the baseline": name,
                "phi reached": f"{phi:.2f}",
                "kappa": f"{kappa:.2f}",
                "beta": f"{beta:.3f}",
                "gain by the formula": f"{1.0 / predicted_time(phi, kappa, beta):.2f}",
                "gain measured": f"{took[rate.baseline] / took[name]:.2f}",
            }
        )
    return rows


def once_rows(outcome: Outcome) -> list[Row]:
    """Return what variants do once: seconds, and bytes of features beside the formula.

    Seconds are the median of all that a repetition did before its epochs, preparing ranks included.
    """
    predicted, rows = outcome.fact(PREDICTED_ONCE), []
    for variant, measured in _measured(outcome) if predicted else ():
        found = [one.extra for one in measured if _BEFORE in one.extra]
        if not found:
            continue
        sent, expected = found[0][_BEFORE].get(_PRELOAD, 0), predicted.get(variant.name)
        seconds = sorted(extra[_SECONDS_BEFORE] for extra in found)[len(found) // 2]
        rows.append(
            {
                "done once": variant.name,
                "s": f"{seconds:.2f}",
                "MB of features outside": f"{sent / 1e6:.3f}",
                "by the formula": "-" if expected is None else f"{expected / 1e6:.3f}",
                "difference, bytes": "-" if expected is None else str(sent - expected),
            }
        )
    return rows


def cells_of(outcome: Outcome) -> tuple[Cell, ...]:
    """Return the cells of the experiment; none where it has no choice to judge."""
    ratios = () if outcome.plan is None else outcome.plan.ratios
    return next((ratio.cells for ratio in ratios if ratio.cells), ())


def nearness(outcome: Outcome) -> tuple[bool, str]:
    """Return whether ways moved the bytes that were counted, and the figures; "": nothing was counted."""
    counted = outcome.fact(COUNTED_BYTES)
    moved = {
        one.variant: one.epochs[0].bytes_outside + one.epochs[0].bytes_inside
        for one in outcome.measurements
        if one.epochs and one.variant in counted
    }
    if not moved:
        return True, ""
    differ = sum(count != counted[name] for name, count in moved.items())
    return not differ, f"of {len(moved)} ways whose bytes were counted beforehand, {differ} moved others"


def cell_rows(outcome: Outcome) -> list[Row]:
    """Return the choice in each cell beside the fastest of its ways; nothing where there are no cells."""
    took, rows = medians(outcome), []
    for cell in cells_of(outcome):
        known = [name for name in cell.ways if name in took]
        if cell.chosen not in known:
            continue
        best = min(known, key=lambda name: took[name])
        way = {name: name.removeprefix(f"{cell.name}: ") for name in (cell.chosen, best)}
        rows.append(
            {
                "cell": cell.name,
                "chosen": way[cell.chosen],
                "s measured": f"{took[cell.chosen]:.3g}",
                "faster": "" if best == cell.chosen else f"{way[best]} {took[best]:.3g}",
                "regret": f"{took[cell.chosen] / took[best]:.2f}",
            }
        )
    return rows


def time_to_accuracy(outcome: Outcome) -> tuple[float, dict[str, float]] | None:
    """Return the best accuracy that all variants with curves reach, and the seconds of training until then.

    None unless two at least have curves; the median where several were drawn.
    """
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for one in outcome.measurements:
        known = [(at, share) for at, share in one.accuracy if not math.isnan(share)]
        if known:
            curves.setdefault(one.variant, []).append(known)
    if len(curves) < 2:
        return None
    best = min(max(share for _, share in curve) for of in curves.values() for curve in of)
    return best, {
        name: median(min(at for at, share in curve if share >= best) for curve in of)
        for name, of in curves.items()
    }


def accuracy_in_words(outcome: Outcome) -> str:
    """Say when each variant came to the best accuracy that all of them reach; empty without two curves."""
    times = time_to_accuracy(outcome)
    if times is None or outcome.plan is None:
        return ""
    marks = {one.name: " simulated" if one.simulated else "" for one in outcome.plan.variants}
    each = (f"{name} {value:.3g} s{marks[name]}" for name, value in times[1].items())
    reached = format_percent(times[0])
    return f"Time to a validation accuracy of {reached}, which all reach: {', '.join(each)}."


def _servers(outcome: Outcome) -> list[str]:
    found: dict[str, list[str]] = {}
    for name, values in outcome.network.items():
        # Namespaces' rates stand with each variant; plain loopback's label says why there are none.
        left_out = _OF_ONE_LAB | ({"label"} if values.get("kind") == "namespaces" else set())
        told = {key: of for key, of in values.items() if key not in left_out and of not in (None, {}, [], "")}
        words = flat(told)
        found.setdefault(words, []).append(name)
    some = [
        ", ".join(names) if len(names) <= _MOST_NAMES else f"all {len(names)} variants"
        for names in found.values()
    ]
    return [f"Servers ({names}): {words}." for words, names in zip(found, some, strict=True)]


def _calibrations(outcome: Outcome) -> list[str]:
    took, sentences = medians(outcome), []
    for values in outcome.network.values():
        note = values.get("calibration")
        if not note:
            continue
        baseline = note["baseline"]
        text = (
            f"Matched phi: at {note['rate']} the network costs {baseline} {note['phi']:.2f} of its "
            f"time ({note['seconds_at_rate']:.3g} s per epoch, {note['seconds_free']:.3g} s with free links)"
        )
        if outcome.network.get(baseline, {}).get("calibration") == note and baseline in took:
            phi = 1 - note["seconds_free"] / took[baseline]
            text += f"; by the median of the repetitions {phi:.2f}"
        if not note.get("within_tolerance", True):
            text += f"; {note['wanted']:g} was wanted and not reached"
        sentences.append(f"{text}.")
    return list(dict.fromkeys(sentences))


def flat(values: Mapping[str, Any]) -> str:
    """Write JSON values in one line: each name before its value, nested ones in brackets."""
    named = []
    for name, value in values.items():
        is_size = name.endswith("_bytes") and isinstance(value, int)
        words, shown = name.replace("_", " "), format_bytes(value) if is_size else _plain(value)
        named.append(f"{words.removesuffix(' bytes') if is_size else words} {shown}")
    return "; ".join(named)


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """Write JSON values as a list; one of names to values gets a line for each name, indented."""
    lines = []
    for name, value in facts.items():
        if isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values()):
            lines.append(f"- {name}:")
            lines += [f"  - {inner}: {_bare(of)}" for inner, of in value.items()]
        else:
            lines.append(f"- {name}: {_bare(value)}")
    return lines


def _bare(value: object) -> str:
    return _plain(value)[1:-1] if isinstance(value, Mapping) and value else _plain(value)


def _plain(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        within = ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
        return f"({within})"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_plain(inner) for inner in value) + "]"
    return json.dumps(value)
