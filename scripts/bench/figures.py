"""Measurements -> the figures of a report: medians with their spread, bytes by phase, closed form, regret."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dglx_dist.comm.collectives import CONTROL
from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord
from dglx_dist.report.tables import markdown_table
from scripts.bench.records import (
    COUNTED_BYTES,
    KAPPA,
    PREDICTED_BYTES,
    PREDICTED_ONCE,
    PREDICTED_SECONDS,
    Cell,
    MatchedPhi,
    Measurement,
    Outcome,
    Ratio,
    Variant,
)
from scripts.bench.speedup_model import predicted_time


@dataclass(frozen=True, kw_only=True)
class Link:
    """How servers were joined."""

    kind: str
    """ "namespaces", "loopback", or "" when nothing was noted."""
    rate: str
    """Between servers, e.g. "96mbit"; empty: not limited."""
    phi: float | None
    """Share of its time that the baseline spends on the network at this rate; None: not calibrated."""
    missed_phi: float | None
    """The share that was wanted where no rate gave it; None: none was wanted, or it was reached."""
    limited: bool
    """False on plain loopback with more than one server: then no claim about a network can be judged."""
    missing: str
    """Why it is plain loopback."""

    @property
    def words(self) -> str:
        """Rate and phi as a reader wants them, e.g. "96mbit, phi 0.65"."""
        if not self.limited:
            return "not limited (plain loopback)" if self.kind == "loopback" else "not noted"
        rate = self.rate or "no limit"
        return rate if self.phi is None else f"{rate}, phi {self.phi:.2f}"


def link_of(outcome: Outcome, variant: Variant) -> Link:
    """Return the link of ``variant`` in ``outcome``."""
    found: Mapping[str, Any] = outcome.network.get(variant.name) or {}
    kind = str(found.get("kind", ""))
    fixed = None if isinstance(variant.rate, MatchedPhi) else variant.rate
    phi = found.get("phi")
    calibration: Mapping[str, Any] = found.get("calibration") or {}
    return Link(
        kind=kind,
        rate=str(found.get("external", fixed) or ""),
        phi=None if phi is None else float(phi),
        missed_phi=None if calibration.get("within_tolerance", True) else float(calibration["wanted"]),
        limited=kind == "namespaces" or variant.shape.servers == 1,
        missing=str(found.get("missing") or ""),
    )


PHASES = ("wait_s", "compute_s", "exchange_s")
"""Of the training loop, one after another."""
HIDDEN = ("sample_s", "fetch_s")
"""On the loader's threads, beside the training loop."""
_OF_REPORTS = ("epochs_to_target", "dollars", "value")
"""Quantities that are no field of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median and its interquartile range."""

    median: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Say whether ``value`` lies in the interquartile range."""
        return self.low <= value <= self.high


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles (linear interpolation) of at least one value."""
    low, median, high = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return Spread(median=median, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class VariantFigures:
    """What a variant's repetitions come to; seconds and bytes are of one epoch."""

    variant: Variant
    link: Link
    repetitions: int
    seconds: Spread
    phases: Mapping[str, Spread]
    """By the names in PHASES and HIDDEN."""
    samples_per_second: Spread
    bytes_inside: float
    bytes_outside: float
    bytes_wire: float | None
    """Outside, by the cards; None where no card counted."""
    peak_bytes: int
    """The largest of all repetitions."""

    @property
    def wire_over_ledger(self) -> float | None:
        """Bytes by the cards over payload by the ledger; None without either."""
        if self.bytes_wire is None or self.bytes_outside <= 0:
            return None
        return self.bytes_wire / self.bytes_outside


@dataclass(frozen=True, kw_only=True)
class RatioFigures:
    """A ratio as measured."""

    ratio: Ratio
    value: Spread | None
    """None: a variant has no measurement, one of its repetitions did not come to the target, or the lower
    one is 0. Median: quotient of the two medians.
    Quartiles: of the quotients of single repetitions, which ran one after the other, so that a drift of
    the machine cancels. Of cells: the quotient that counts, and the quartiles of all."""
    simulated: str
    """What of its two variants is simulated; empty: nothing."""
    limited: bool
    """Whether the links between servers of both variants were limited as asked."""
    missed_phi: str
    """What phi was wanted of its variants' links and not reached, in words; empty: none."""


def variant_figures(outcome: Outcome) -> tuple[VariantFigures, ...]:
    """Return the figures of each variant that has a measurement, in the plan's order."""
    if outcome.plan is None:
        return ()
    measured = [(variant, _of(variant.name, outcome)) for variant in outcome.plan.variants]
    return tuple(_figures(variant, of, link_of(outcome, variant)) for variant, of in measured if of)


def ratio_figures(outcome: Outcome) -> tuple[RatioFigures, ...]:
    """Return each ratio of the plan, in its order.

    Raises:
        ConfigError: a ratio names a variant that the plan lacks.
    """
    if outcome.plan is None:
        return ()
    variants = {variant.name: variant for variant in outcome.plan.variants}
    return tuple(_ratio(ratio, variants, outcome) for ratio in outcome.plan.ratios)


@dataclass(frozen=True, kw_only=True)
class TimeToAccuracy:
    """When variants came to the same accuracy."""

    accuracy: float
    """The best that all of them reach, as a fraction."""
    seconds: Mapping[str, float]
    """Of training until then, by variant; the median where several curves were drawn."""


def medians(outcome: Outcome) -> dict[str, float]:
    """Return the median seconds of an epoch of each variant that has a measurement."""
    took: dict[str, list[float]] = {}
    for one in outcome.measurements:
        if one.epochs:
            took.setdefault(one.variant, []).append(one.seconds)
    return {name: float(np.median(values)) for name, values in took.items()}


def time_to_accuracy(outcome: Outcome) -> TimeToAccuracy | None:
    """Return None unless two variants at least have curves."""
    curves: dict[str, list[tuple[tuple[float, float], ...]]] = {}
    for one in outcome.measurements:
        known = tuple((at, share) for at, share in one.accuracy if not math.isnan(share))
        if known:
            curves.setdefault(one.variant, []).append(known)
    if len(curves) < 2:
        return None
    best = min(max(share for _, share in curve) for of in curves.values() for curve in of)
    seconds = {
        name: float(np.median([min(at for at, share in curve if share >= best) for curve in of]))
        for name, of in curves.items()
    }
    return TimeToAccuracy(accuracy=best, seconds=seconds)


def _of(name: str, outcome: Outcome) -> list[Measurement]:
    return [one for one in outcome.measurements if one.variant == name and one.epochs]


def _figures(variant: Variant, measured: Sequence[Measurement], link: Link) -> VariantFigures:
    phases = {name: spread([_mean(one, name) for one in measured]) for name in (*PHASES, *HIDDEN)}
    wire = [
        one.bytes_outside_wire / len(one.epochs) for one in measured if one.bytes_outside_wire is not None
    ]
    return VariantFigures(
        variant=variant,
        link=link,
        repetitions=len(measured),
        seconds=spread([one.seconds for one in measured]),
        phases=phases,
        samples_per_second=spread([_mean(one, "samples_per_second") for one in measured]),
        bytes_inside=float(np.median([_mean(one, "bytes_inside") for one in measured])),
        bytes_outside=float(np.median([_mean(one, "bytes_outside") for one in measured])),
        bytes_wire=float(np.median(wire)) if wire else None,
        peak_bytes=max(one.peak_bytes for one in measured),
    )


def _mean(measurement: Measurement, name: str) -> float:
    epochs: Sequence[EpochRecord] = measurement.epochs
    return sum(float(getattr(epoch, name)) for epoch in epochs) / len(epochs)


def _ratio(ratio: Ratio, variants: Mapping[str, Variant], outcome: Outcome) -> RatioFigures:
    unknown = {ratio.over, ratio.under} - set(variants)
    if unknown:
        raise ConfigError(
            f"{outcome.experiment}: ratio {ratio.name!r} names {sorted(unknown)}; "
            f"the plan's variants are {list(variants)}"
        )
    if ratio.cells:
        names = [name for cell in ratio.cells for name in cell.ways]
        value = _of_cells(ratio, medians(outcome))
    else:
        names = [ratio.over, ratio.under]
        over, under = ({one.repetition: one for one in _of(name, outcome)} for name in names)
        value = _quotient(_by_repetition(ratio.quantity, over), _by_repetition(ratio.quantity, under))
    words = [variants[name].simulated for name in names]
    links = [link_of(outcome, variants[name]) for name in names]
    missed = [
        f"phi is {link.phi:.2f}, not {link.missed_phi:g}" for link in links if link.missed_phi is not None
    ]
    return RatioFigures(
        ratio=ratio,
        value=value,
        simulated="; ".join(dict.fromkeys(text for text in words if text)),
        limited=all(link.limited for link in links),
        missed_phi="; ".join(dict.fromkeys(missed)),
    )


def _of_cells(ratio: Ratio, took: Mapping[str, float]) -> Spread | None:
    if any(not took.get(name) for cell in ratio.cells for name in cell.ways):
        return None
    regrets = [took[cell.chosen] / min(took[name] for name in cell.ways) for cell in ratio.cells]
    around = spread(regrets)
    if ratio.of_cells == "median":
        return around
    return Spread(median=max(regrets), low=around.low, high=max(regrets))


def _by_repetition(quantity: str, measured: Mapping[int, Measurement]) -> dict[int, float]:
    if quantity not in _OF_REPORTS:
        return {number: _mean(one, quantity) for number, one in measured.items()}
    told = {number: one.extra.get(quantity) for number, one in measured.items()}
    # A target that one seed did not reach has no number of epochs, and the median of the others is too small.
    if None in told.values():
        return {}
    return {number: float(value) for number, value in told.items() if value is not None}


def _quotient(over: Mapping[int, float], under: Mapping[int, float]) -> Spread | None:
    if not over or not under or float(np.median([*under.values()])) <= 0:
        return None
    value = float(np.median([*over.values()])) / float(np.median([*under.values()]))
    both = sorted(set(over) & set(under))
    around = spread([over[number] / under[number] for number in both if under[number] > 0] or [value])
    # The quotient of medians is no quotient of one repetition, so few of these may lie to one side of it.
    return Spread(median=value, low=min(around.low, value), high=max(around.high, value))


_BY_PHASE = "bytes_outside_by_phase"
_DRAWN = ("input_rows", "edges", "input_ids")
"""What of a measurement tells which blocks it was: counts, and the sum of the ids of all input rows."""


def predicted_bytes(outcome: Outcome) -> Mapping[str, Mapping[str, int]]:
    """Return what was predicted, by variant and phase; empty where nothing was."""
    return {} if outcome.plan is None else outcome.plan.facts.get(PREDICTED_BYTES, {})


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


def phase_table(outcome: Outcome) -> str:
    """Return a table in Markdown, in the plan's order; empty where nothing was predicted or measured."""
    expected, found = predicted_bytes(outcome), measured_bytes(outcome)
    names = [name for name in expected if name in found]
    phases = sorted({phase for name in names for phase in (*found[name], *expected[name])})
    rows = []
    for name in names:
        total, predicted = sum(found[name].values()), sum(expected[name].values())
        each = [f"{found[name].get(phase, 0) / 1e6:.3f}" for phase in phases]
        rows.append(
            (name, *each, f"{total / 1e6:.3f}", f"{predicted / 1e6:.3f}", _difference(total, predicted))
        )
    head = ("MB per epoch", *phases, "total", "by the formula", "difference, bytes")
    return markdown_table(head, rows) if rows else ""


def different_blocks(outcome: Outcome) -> list[str]:
    """Return the variants that drew other blocks than the first one of the same data, seeds and fan-outs."""
    if outcome.plan is None:
        return []
    drawn = {one.variant: _drawn(one) for one in reversed(outcome.measurements) if one.epochs}
    first: dict[tuple[str, ...], tuple[int, ...]] = {}
    differ = []
    for variant in outcome.plan.variants:
        params, found = variant.job.params, drawn.get(variant.name)
        if found is None or "fanouts" not in params:
            continue
        names = ("data", "fanouts", "batch_size", "max_steps", "seed", "epochs", "warmup")
        key = tuple(str(params.get(name)) for name in names)
        if first.setdefault(key, found) != found:
            differ.append(variant.name)
    return differ


def crossing(points: Sequence[tuple[float, float, float]]) -> float | None:
    """Return where the second of two measured lines comes to the first.

    Args:
        points: (x, first, second), x rising; the second is below the first in the beginning.

    Returns:
        x, between two points by a straight line; None where they do not cross.
    """
    for (x, first, second), (next_x, next_first, next_second) in pairwise(points):
        before, after = first - second, next_first - next_second
        if before >= 0 > after:
            return x + (next_x - x) * before / (before - after)
    return None


def _drawn(measurement: Measurement) -> tuple[int, ...]:
    return tuple(int(measurement.extra.get(name, -1)) for name in _DRAWN)


def _difference(measured: float, predicted: float) -> str:
    return f"{measured - predicted:+.0f}" if measured != predicted else "0"


_BEFORE, _SECONDS_BEFORE, _PRELOAD = "bytes_outside_before", "seconds_before", "preload"


def closed_form_table(outcome: Outcome) -> str:
    """Return a table in Markdown: phi as reached, kappa, beta, the gain they predict and the one measured.

    Variants at a calibrated rate, in the plan's order; empty where no kappa is known or nothing measured.
    """
    kappas = {} if outcome.plan is None else outcome.plan.facts.get(KAPPA, {})
    figures, sent = {one.variant.name: one for one in variant_figures(outcome)}, measured_bytes(outcome)
    rows = []
    for name, kappa in kappas.items():
        rate = figures[name].variant.rate if name in figures else None
        if not isinstance(rate, MatchedPhi) or name not in sent or rate.baseline not in sent:
            continue
        phi = float(outcome.network.get(name, {}).get("phi") or rate.phi)
        beta = sum(sent[name].values()) / sum(sent[rate.baseline].values())
        gain = figures[rate.baseline].seconds.median / figures[name].seconds.median
        predicted = 1.0 / predicted_time(phi, kappa, beta)
        rows.append((name, f"{phi:.2f}", f"{kappa:.2f}", f"{beta:.3f}", f"{predicted:.2f}", f"{gain:.2f}"))
    head = ("by the baseline", "phi reached", "kappa", "beta", "gain by the formula", "gain measured")
    return markdown_table(head, rows) if rows else ""


def once_table(outcome: Outcome) -> str:
    """Return a table in Markdown of what variants do once: seconds, and bytes of features beside the formula.

    Seconds are the median of all that a repetition did before its epochs, preparing ranks included.
    """
    predicted = {} if outcome.plan is None else outcome.plan.facts.get(PREDICTED_ONCE, {})
    rows = []
    for one in variant_figures(outcome) if predicted else ():
        found = [
            measurement.extra
            for measurement in outcome.measurements
            if measurement.variant == one.variant.name and measurement.epochs and _BEFORE in measurement.extra
        ]
        if not found:
            continue
        sent, expected = found[0][_BEFORE].get(_PRELOAD, 0), predicted.get(one.variant.name)
        seconds = sorted(extra[_SECONDS_BEFORE] for extra in found)[len(found) // 2]
        formula, difference = ("-", "-") if expected is None else (f"{expected / 1e6:.3f}", sent - expected)
        rows.append((one.variant.name, f"{seconds:.2f}", f"{sent / 1e6:.3f}", formula, str(difference)))
    head = ("done once", "s", "MB of features outside", "by the formula", "difference, bytes")
    return markdown_table(head, rows) if rows else ""


ERROR = 0.25
"""The aim: error of predicted seconds in the median."""
_CELL_HEAD = ("cell", "chosen", "s predicted", "s measured", "faster", "regret")


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How near predictions came, over all variants."""

    variants: int
    error: float
    """Of predicted by measured seconds, in the median; 0.1 is 10 %."""
    counted: int
    """Variants whose bytes were predicted to the byte."""
    differ: int
    """Of these, the ones that moved others in the first measured epoch."""

    @property
    def is_near(self) -> bool:
        """Whether it is as near as was aimed at."""
        return self.error <= ERROR and not self.differ

    @property
    def in_words(self) -> str:
        """The figures."""
        return (
            f"predicted seconds of {self.variants} ways are {100 * self.error:.0f} % off in the median; of "
            f"{self.counted} whose bytes were predicted exactly, {self.differ} moved others"
        )


def cells_of(outcome: Outcome) -> tuple[Cell, ...]:
    """Return the cells of the experiment; none where it has no choice to judge."""
    ratios = () if outcome.plan is None else outcome.plan.ratios
    return next((ratio.cells for ratio in ratios if ratio.cells), ())


def nearness(outcome: Outcome) -> Nearness | None:
    """Return None where nothing was measured, or nothing predicted."""
    predicted, took = _fact(outcome, PREDICTED_SECONDS), medians(outcome)
    errors = [abs(predicted[name] / took[name] - 1.0) for name in predicted if took.get(name)]
    if not errors:
        return None
    counted = _fact(outcome, COUNTED_BYTES)
    moved = {
        one.variant: one.epochs[0].bytes_outside + one.epochs[0].bytes_inside
        for one in outcome.measurements
        if one.epochs and one.variant in counted
    }
    return Nearness(
        variants=len(errors),
        error=statistics.median(errors),
        counted=len(moved),
        differ=sum(count != counted[name] for name, count in moved.items()),
    )


def regret_tables(outcome: Outcome) -> list[str]:
    """Return the cells in Markdown, and how near predictions came; nothing where there are no cells."""
    predicted, took, near = _fact(outcome, PREDICTED_SECONDS), medians(outcome), nearness(outcome)
    rows = []
    for cell in cells_of(outcome):
        known = [name for name in cell.ways if name in took]
        if cell.chosen not in known:
            continue
        best = min(known, key=lambda name: took[name])
        rows.append(
            (
                cell.name,
                _way(cell, cell.chosen),
                f"{predicted[cell.chosen]:.3g}",
                f"{took[cell.chosen]:.3g}",
                "" if best == cell.chosen else f"{_way(cell, best)} {took[best]:.3g}",
                f"{took[cell.chosen] / took[best]:.2f}",
            )
        )
    if not rows or near is None:
        return []
    return [
        markdown_table(_CELL_HEAD, rows),
        f"{near.in_words[0].upper()}{near.in_words[1:]} (aim: at most {100 * ERROR:.0f} %, and none).",
    ]


def _fact(outcome: Outcome, name: str) -> Mapping[str, float]:
    return {} if outcome.plan is None else outcome.plan.facts.get(name, {})


def _way(cell: Cell, variant: str) -> str:
    return variant.removeprefix(f"{cell.name}: ")
