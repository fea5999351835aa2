"""Measurements -> the figures of a report: medians with their spread, by variant and by ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import EpochRecord
from scripts.bench.links import Link, link_of
from scripts.bench.records import Measurement, Outcome, Ratio, Variant

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
