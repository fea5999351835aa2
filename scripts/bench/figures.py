"""Computes the figures and the verdict of an experiment, which are stored as docs/results/ID.json.

The figures are medians with their spread, bytes by phase, the closed form of phi, kappa and beta, and the
regret of choices.
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
"""Phases of the training loop, and phases of the loader's threads that run beside it."""
_REPORTED_QUANTITIES = ("epochs_to_target", "dollars", "value")  # quantities that are no field of an epoch
BYTES = ("bytes_inside", "bytes_outside")
_MAX_NAMES = 60
_VARIANT_FIELDS = {"name", "external", "phi", "calibration"}
"""Keys of the network description that differ between variants of the same shape."""
Row = dict[str, str]  # a line of a table: column -> cell


def figures_of(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return medians, quartiles, verdicts and circumstances of a result as JSON values."""
    verdict = judge_experiment(experiment, outcome)
    variants = () if outcome.plan is None else outcome.plan.variants
    facts = {} if outcome.plan is None else outcome.plan.facts
    tables = (PREDICTED_BYTES, PREDICTED_ONCE, COUNTED_BYTES)
    return {
        "format": FORMAT,
        "version": VERSION,
        "experiment": experiment.id,
        "verdict": str(verdict),
        "why": verdict.why,
        "label": outcome.label,
        "simulated": sorted({variant.simulated for variant in variants if variant.simulated}),
        "repetitions": max((len(measurements) for _, measurements in _measured_variants(outcome)), default=0),
        "date": outcome.date,
        "command": outcome.command,
        "machine": flat(outcome.machine),
        "circumstances": [*_servers(outcome), *_calibrations(outcome)],
        "ratios": [_ratio_row(variant) for variant in ratio_figures(outcome)],
        # A grid has one row per variant of every cell, which is too long to read.
        "variants": [] if cells_of(outcome) else variant_rows(outcome),
        "cells": cell_rows(outcome),
        "nearness": nearness(outcome)[1],
        "bytes": phase_rows(outcome),
        "closed form": closed_form_rows(outcome),
        "done once": once_rows(outcome),
        "accuracy": accuracy_in_words(outcome),
        "facts": fact_lines({name: fact for name, fact in facts.items() if name not in tables}),
    }


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and interquartile range."""

    median: float
    low: float
    high: float

    def to_rounded_list(self) -> list[float]:
        """Return median, low and high with 6 digits."""
        return [_number(value) for value in vars(self).values()]


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles (linear interpolation). ``values`` must not be empty."""
    low, middle, high = map(float, np.percentile(values, [25, 50, 75]))
    return Spread(median=middle, low=low, high=high)


def mean_of(measurement: Measurement, name: str) -> float:
    """Return the mean of the epoch field ``name`` over all epochs."""
    return fmean(float(getattr(epoch, name)) for epoch in measurement.epochs)


def _measurements_of(name: str, outcome: Outcome) -> list[Measurement]:
    # Accuracy curves have no epochs and do not measure time.
    return [
        measurement
        for measurement in outcome.measurements
        if measurement.variant == name and measurement.epochs
    ]


def _measured_variants(outcome: Outcome) -> Iterator[tuple[Variant, list[Measurement]]]:
    for variant in () if outcome.plan is None else outcome.plan.variants:
        if measurements := _measurements_of(variant.name, outcome):
            yield variant, measurements


def variant_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return seconds, phases, MB and memory per epoch of each measured variant, in the plan's order.

    ``seconds`` holds the median and the quartiles, all other values are medians. ``mb_wire`` is the traffic
    that network cards counted between servers, or None. ``wire_by_ledger`` is ``mb_wire / mb_outside``.
    """
    rows = []
    for variant, measurements in _measured_variants(outcome):
        middle = {
            name: median(mean_of(measurement, name) for measurement in measurements)
            for name in (*PHASES, *HIDDEN, *BYTES)
        }
        inside, outside = (middle.pop(name) for name in BYTES)
        cards = [
            measurement.bytes_outside_wire
            for measurement in measurements
            if measurement.bytes_outside_wire is not None
        ]
        wire = median(cards) / len(measurements[0].epochs) if cards else None
        row = {
            "name": variant.name,
            "servers": variant.shape.servers,
            "ranks_per_server": variant.shape.ranks_per_server,
            "link": link_of(outcome, variant).words,
            "seconds": spread([measurement.seconds for measurement in measurements]).to_rounded_list(),
            **{name: _number(value) for name, value in middle.items()},
            "mb_inside": _number(inside / 1e6),
            "mb_outside": _number(outside / 1e6),
            "mb_wire": None if wire is None else _number(wire / 1e6),
            "wire_by_ledger": None if wire is None or not outside else round(wire / outside, 3),
            "peak_mb": round(max(measurement.peak_bytes for measurement in measurements) / 1e6),
        }
        rows.append(row | ({"simulated": True} if variant.simulated else {}))
    return rows


def medians(outcome: Outcome) -> dict[str, float]:
    """Return the median seconds of an epoch of each measured variant."""
    names = dict.fromkeys(measurement.variant for measurement in outcome.measurements if measurement.epochs)
    return {
        name: median(measurement.seconds for measurement in _measurements_of(name, outcome)) for name in names
    }


def _number(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link between the servers of a variant."""

    words: str
    """Rate between servers and phi of the baseline, for example "96mbit, phi 0.65"."""
    limited: bool
    """Whether the rate was limited. Claims about the network are not judged otherwise."""
    missed_phi: str
    """Sentence about a requested phi that no rate reached. Empty if it was reached or not requested."""


def link_of(outcome: Outcome, variant: Variant) -> Link:
    """Return the link of ``variant`` in ``outcome``."""
    network = outcome.network.get(variant.name) or {}
    kind, phi = network.get("kind", ""), network.get("phi")
    limited = kind == "namespaces" or variant.shape.servers == 1
    fixed = None if isinstance(variant.rate, MatchedPhi) else variant.rate
    words = str(network.get("external", fixed) or "no limit")
    words += "" if phi is None else f", phi {phi:.2f}"
    if not limited:
        words = "not limited (plain loopback)" if kind == "loopback" else "not noted"
    calibration = network.get("calibration") or {}
    missed = not calibration.get("within_tolerance", True)
    missed_phi = f"phi is {phi:.2f}, not {calibration['wanted']:g}" if missed and phi is not None else ""
    return Link(words=words, limited=limited, missed_phi=missed_phi)


@dataclass(frozen=True, kw_only=True)
class RatioFigures:
    """A measured ratio."""

    ratio: Ratio
    value: Spread | None
    """Quotient of the two medians, with the quartiles of the quotients of single repetitions.

    Repetitions run next to each other, so a drift of the machine cancels in their quotients. For cells, the
    median is the statistic that counts and the quartiles are over all cells. None if a measurement is
    missing, a repetition missed its target, or the denominator is 0."""
    links: tuple[Link, ...]
    """Links of its variants."""
    simulated: bool
    """Whether any of its variants is simulated."""


def ratio_figures(outcome: Outcome) -> tuple[RatioFigures, ...]:
    """Return each ratio of the plan, in its order."""
    if outcome.plan is None:
        return ()
    variants = {variant.name: variant for variant in outcome.plan.variants}
    return tuple(_ratio(ratio, variants, outcome) for ratio in outcome.plan.ratios)


def _ratio(ratio: Ratio, variants: Mapping[str, Variant], outcome: Outcome) -> RatioFigures:
    names = [name for cell in ratio.cells for name in cell.ways] or [ratio.over, ratio.under]
    if ratio.cells:
        value = _cell_ratio(ratio, medians(outcome))
    else:
        value = _quotient(
            *(_by_repetition(ratio.quantity, _measurements_of(name, outcome)) for name in names)
        )
    return RatioFigures(
        ratio=ratio,
        value=value,
        links=tuple(link_of(outcome, variants[name]) for name in names),
        simulated=any(variants[name].simulated for name in names),
    )


def _cell_ratio(ratio: Ratio, seconds: Mapping[str, float]) -> Spread | None:
    if any(not seconds.get(name) for cell in ratio.cells for name in cell.ways):
        return None
    regrets = [seconds[cell.chosen] / min(seconds[name] for name in cell.ways) for cell in ratio.cells]
    regret_spread, worst = spread(regrets), max(regrets)
    return regret_spread if ratio.of_cells == "median" else replace(regret_spread, median=worst, high=worst)


def _by_repetition(quantity: str, measured: Sequence[Measurement]) -> dict[int, float]:
    if quantity not in _REPORTED_QUANTITIES:
        return {measurement.repetition: mean_of(measurement, quantity) for measurement in measured}
    quantities = {measurement.repetition: measurement.extra.get(quantity) for measurement in measured}
    # If one seed misses the target, the median of the remaining ones would be too small.
    return (
        {}
        if None in quantities.values()
        else {number: float(value or 0) for number, value in quantities.items()}
    )


def _quotient(over: Mapping[int, float], under: Mapping[int, float]) -> Spread | None:
    if not over or not under or median(under.values()) <= 0:
        return None
    value = median(over.values()) / median(under.values())
    both = sorted(set(over) & set(under))
    quotients = spread([over[number] / under[number] for number in both if under[number] > 0] or [value])
    # The quotient of medians can lie outside the quartiles of the quotients.
    return Spread(median=value, low=min(quotients.low, value), high=max(quotients.high, value))


def _ratio_row(figures: RatioFigures) -> dict[str, Any]:
    ratio, verdict = figures.ratio, judge(figures)
    return {
        "name": ratio.name,
        "of": f"{ratio.quantity}: {ratio.over} / {ratio.under}",
        "predicted": None if ratio.predicted is None else _number(ratio.predicted),
        "measured": None if figures.value is None else figures.value.to_rounded_list(),
        "bound": "" if verdict.word == "no bound" else bounds_in_words(ratio.low, ratio.high),
        "verdict": str(verdict),
    }


Word = Literal[
    "reproduced", "not reproduced", "partly reproduced", "no bound", "links not limited", "phi not matched",
    "absent", "failed", "not measured yet",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A verdict as one word for tables, with the sentence that explains it."""

    word: Word
    why: str
    simulated: bool = False

    def __str__(self) -> str:
        return f"{self.word} (simulated)" if self.simulated else self.word


def judge(figures: RatioFigures) -> Verdict:
    """Judge one ratio by its bounds. A claimed difference is not reproduced if the quartiles enclose 1."""
    word, why = _judge_ratio(figures.ratio, figures.value, figures.links)
    return Verdict(word=word, why=why, simulated=figures.simulated)


def _judge_ratio(ratio: Ratio, value: Spread | None, links: Sequence[Link]) -> tuple[Word, str]:
    low, high = ratio.low, ratio.high
    if value is None:
        subject = "a cell" if ratio.cells else f"{ratio.over} over {ratio.under}"
        why = "a measurement is missing, a repetition missed its target, or the denominator is 0"
        return "not reproduced", f"{subject} could not be computed: {why}"
    if not all(link.limited for link in links):
        why = "the servers shared plain loopback, so the network was not limited"
        return "links not limited", why
    missed = "; ".join(dict.fromkeys(link.missed_phi for link in links if link.missed_phi))
    if missed:
        return "phi not matched", f"no rate reached the requested phi: {missed}"
    if low is None and high is None:
        return "no bound", "the claim names no value"
    if low is not None and value.median < low:
        return "not reproduced", f"{value.median:.2f} is below the lower bound {low:g}"
    if high is not None and value.median > high:
        return "not reproduced", f"{value.median:.2f} is above the upper bound {high:g}"
    claims_none = low is not None and high is not None and low <= 1 <= high
    differs = not claims_none and ((low or 0.0) >= 1 or (high is not None and high <= 1))
    if differs and value.low <= 1.0 <= value.high:
        interval = f"{value.low:.2f} to {value.high:.2f}"
        return "not reproduced", f"the interquartile range {interval} contains 1, so no difference is shown"
    return "reproduced", f"{value.median:.2f} is {bounds_in_words(low, high)}"


def bounds_in_words(low: float | None, high: float | None) -> str:
    """Return bounds in words: "at least 1.5", "at most 1.1", "between 0.9 and 1.1" or "without bounds"."""
    if low is not None and high is not None:
        return f"between {low:g} and {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return "without bounds" if high is None else f"at most {high:g}"


def judge_experiment(experiment: Experiment, outcome: Outcome | None) -> Verdict:
    """Judge an experiment by all its ratios. Without an outcome, explain why there is none."""
    if outcome is None:
        # The page may be made on another machine, so packages installed here do not matter.
        lacking = why_absent(experiment, installed=False)
        if lacking:
            return Verdict(word="absent", why=lacking)
        return Verdict(word="not measured yet", why="there is no result yet")
    if outcome.status != "measured":
        return Verdict(word=outcome.status, why=outcome.reason)
    verdicts = [(figures.ratio.name, judge(figures)) for figures in ratio_figures(outcome)]
    is_near, words = nearness(outcome)
    if words:
        near: Word = "reproduced" if is_near else "not reproduced"
        why = words
        verdicts.append(("predictions", Verdict(word=near, why=why)))
    return _combine_verdicts(verdicts)


def _combine_verdicts(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    simulated = any(verdict.simulated for _, verdict in verdicts)
    judged = [(name, verdict) for name, verdict in verdicts if verdict.word != "no bound"]
    if not judged:
        return Verdict(word="no bound", why="none of its ratios has bounds", simulated=simulated)
    words = {verdict.word for _, verdict in judged}
    same = {verdict.why for _, verdict in judged}
    why = same.pop() if len(same) == 1 else "; ".join(f"{name}: {verdict.why}" for name, verdict in judged)
    word: Word = judged[0][1].word if len(words) == 1 else "partly reproduced"
    for unfit in ("phi not matched", "links not limited"):
        word = unfit if unfit in words else word
    return Verdict(word=word, why=why, simulated=simulated)


_BY_PHASE, _BEFORE, _SECONDS_BEFORE = "bytes_outside_by_phase", "bytes_outside_before", "seconds_before"
_PRELOAD = "preload"


def measured_bytes(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Return the payload between servers by variant and phase, per epoch of one repetition.

    The repetition is the one with the fewest relaunched tasks, because relaunched tasks pull their rows
    again. Control messages (barriers, counts) are left out. They are a few hundred bytes in any strategy.
    """
    bytes_by_variant: dict[str, dict[str, float]] = {}
    for measurement in sorted(
        outcome.measurements, key=lambda measurement: measurement.extra.get("relaunched", 0)
    ):
        if measurement.epochs and _BY_PHASE in measurement.extra:
            counts = measurement.extra[_BY_PHASE]
            phases = {phase: counts[phase] / len(measurement.epochs) for phase in counts if phase != CONTROL}
            bytes_by_variant.setdefault(measurement.variant, phases)
    return bytes_by_variant


def phase_rows(outcome: Outcome) -> list[Row]:
    """Return predicted and measured bytes of each variant that has both, in the plan's order."""
    expected, measured = outcome.fact(PREDICTED_BYTES), measured_bytes(outcome)
    names = [name for name in expected if name in measured]
    phases = sorted({phase for name in names for phase in (*measured[name], *expected[name])})
    rows = []
    for name in names:
        total, predicted = sum(measured[name].values()), sum(expected[name].values())
        rows.append(
            {"MB per epoch": name}
            | {phase: f"{measured[name].get(phase, 0) / 1e6:.3f}" for phase in phases}
            | {"total": f"{total / 1e6:.3f}", "by the formula": f"{predicted / 1e6:.3f}"}
            | {"difference, bytes": f"{total - predicted:+.0f}" if total != predicted else "0"}
        )
    return rows


def closed_form_rows(outcome: Outcome) -> list[Row]:
    """Return the predicted gain (by phi, kappa and beta) and the measured gain of each variant."""
    kappas, sent, took = outcome.fact(KAPPA), measured_bytes(outcome), medians(outcome)
    variants = {} if outcome.plan is None else {variant.name: variant for variant in outcome.plan.variants}
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
    """Return the cost of preloading by variant: seconds, and bytes of features beside the formula.

    Seconds are the median over repetitions of everything before the first epoch, including the preparation
    of ranks.
    """
    predicted, rows = outcome.fact(PREDICTED_ONCE), []
    for variant, measured in _measured_variants(outcome) if predicted else ():
        extras = [measurement.extra for measurement in measured if _BEFORE in measurement.extra]
        if not extras:
            continue
        sent, expected = extras[0][_BEFORE].get(_PRELOAD, 0), predicted.get(variant.name)
        seconds = sorted(extra[_SECONDS_BEFORE] for extra in extras)[len(extras) // 2]
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
    """Return the cells of the experiment. The result is empty if it judges no choice."""
    ratios = () if outcome.plan is None else outcome.plan.ratios
    return next((ratio.cells for ratio in ratios if ratio.cells), ())


def nearness(outcome: Outcome) -> tuple[bool, str]:
    """Return whether all variants moved the predicted bytes, and a sentence (empty without predictions)."""
    counted = outcome.fact(COUNTED_BYTES)
    moved = {
        measurement.variant: measurement.epochs[0].bytes_outside + measurement.epochs[0].bytes_inside
        for measurement in outcome.measurements
        if measurement.epochs and measurement.variant in counted
    }
    if not moved:
        return True, ""
    differ = sum(count != counted[name] for name, count in moved.items())
    return not differ, f"{differ} of {len(moved)} variants with predicted bytes moved other bytes"


def cell_rows(outcome: Outcome) -> list[Row]:
    """Return the chosen variant and the fastest variant of each cell."""
    seconds, rows = medians(outcome), []
    for cell in cells_of(outcome):
        known = [name for name in cell.ways if name in seconds]
        if cell.chosen not in known:
            continue
        best = min(known, key=lambda name: seconds[name])
        labels = {name: name.removeprefix(f"{cell.name}: ") for name in (cell.chosen, best)}
        rows.append(
            {
                "cell": cell.name,
                "chosen": labels[cell.chosen],
                "s measured": f"{seconds[cell.chosen]:.3g}",
                "faster": "" if best == cell.chosen else f"{labels[best]} {seconds[best]:.3g}",
                "regret": f"{seconds[cell.chosen] / seconds[best]:.2f}",
            }
        )
    return rows


def time_to_accuracy(outcome: Outcome) -> tuple[float, dict[str, float]] | None:
    """Return the best accuracy that all variants reach, and the median seconds until each reaches it.

    Return None unless at least two variants have curves.
    """
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for measurement in outcome.measurements:
        known = [(at, share) for at, share in measurement.accuracy if not math.isnan(share)]
        if known:
            curves.setdefault(measurement.variant, []).append(known)
    if len(curves) < 2:
        return None
    best = min(max(share for _, share in curve) for of in curves.values() for curve in of)
    return best, {
        name: median(min(at for at, share in curve if share >= best) for curve in of)
        for name, of in curves.items()
    }


def accuracy_in_words(outcome: Outcome) -> str:
    """Return a sentence with the results of :func:`time_to_accuracy`, or "" if it returns None."""
    times = time_to_accuracy(outcome)
    if times is None or outcome.plan is None:
        return ""
    marks = {variant.name: " simulated" if variant.simulated else "" for variant in outcome.plan.variants}
    entries = (f"{name} {value:.3g} s{marks[name]}" for name, value in times[1].items())
    reached = format_percent(times[0])
    return f"Time to a validation accuracy of {reached}, which all reach: {', '.join(entries)}."


def _servers(outcome: Outcome) -> list[str]:
    names_by_words: dict[str, list[str]] = {}
    for name, values in outcome.network.items():
        # Rates of namespaces are shown with each variant.
        left_out = _VARIANT_FIELDS | ({"label"} if values.get("kind") == "namespaces" else set())
        shown = {
            key: of for key, of in values.items() if key not in left_out and of not in (None, {}, [], "")
        }
        words = flat(shown)
        names_by_words.setdefault(words, []).append(name)
    labels = [
        ", ".join(names) if len(names) <= _MAX_NAMES else f"all {len(names)} variants"
        for names in names_by_words.values()
    ]
    return [f"Servers ({names}): {words}." for words, names in zip(names_by_words, labels, strict=True)]


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
            text += f"; the requested phi of {note['wanted']:g} was not reached"
        sentences.append(f"{text}.")
    return list(dict.fromkeys(sentences))


def flat(values: Mapping[str, Any]) -> str:
    """Format JSON values in one line as "name value; name value", with nested values in brackets."""
    named = []
    for name, value in values.items():
        is_size = name.endswith("_bytes") and isinstance(value, int)
        words, shown = name.replace("_", " "), format_bytes(value) if is_size else _plain(value)
        named.append(f"{words.removesuffix(' bytes') if is_size else words} {shown}")
    return "; ".join(named)


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """Format JSON values as a Markdown list. Nested mappings become indented lists."""
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
