"""The frozen records in which experiments, their runs and their results meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.planner.records import Rate
from dglx_dist.records import EpochRecord

Suite = Literal["quick", "papers", "peers", "large"]

# Facts of an experiment that stand in tables of their own, by variant.
KAPPA = "kappa: work of the server with most, by the baseline's"
"""The computing of each variant by that of the baseline of its rate."""
PREDICTED_BYTES = "predicted bytes of an epoch"
"""Bytes between servers by phase of the ledger."""
PREDICTED_ONCE = "predicted bytes of preloading"
"""Bytes of features between servers that a variant moves once."""
COUNTED_BYTES = "predicted bytes of the first measured epoch"
"""Between servers and inside of them, of variants that were counted to the byte."""


class JobError(DglxError):
    """A benchmark job failed or hung on a rank; the message names the rank and ends with its log."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What was published."""

    paper: str
    """E.g. "DistDGL (2020), section 5.3"."""
    says: str
    setting: str
    """E.g. "ogbn-products, 4 machines, 100 Gbit/s"."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What the user asked of the whole bench."""

    suite: Suite
    out: Path
    work: Path
    """Datasets are made here once and found again."""
    repetitions: int = 5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The servers that a variant runs on."""

    servers: int
    ranks_per_server: int = 1
    cpus: float | None = None
    """Cores per server; None: this machine's cores / servers."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing that all ranks of a worker pool do together."""

    kind: str
    """A name of ``worker.KINDS``."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    warm: Mapping[str, Any] = field(default_factory=dict)
    """What of ``params`` is different in the one run that only warms up, e.g. fewer epochs."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """What of ``params`` is different in repetition 0, 1, ..., as the seed; begins anew after its end."""

    def turn(self, repetition: int) -> Job:
        """Return the job of this repetition."""
        changed = self.turns[repetition % len(self.turns)] if self.turns else {}
        return replace(self, params={**self.params, **changed})


@dataclass(frozen=True, kw_only=True)
class MatchedPhi:
    """The rate at which the variant ``baseline`` spends the share ``phi`` of its time on the network."""

    phi: float
    baseline: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One column of an experiment."""

    name: str
    shape: Shape
    job: Job
    rate: Rate | MatchedPhi | None = None
    """Between servers; None: not limited."""
    simulated: str = ""
    """What of it is simulated, in words; empty: nothing."""
    curve: Job | None = None
    """Run once more, on the same servers at the same rate, for ``Measurement.accuracy``; None: no curve."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One place of a grid in which something was chosen: variants that do the same."""

    name: str
    chosen: str
    ways: tuple[str, ...]
    """Variants, the chosen one among them, of which the one that turns out fastest is the measure."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A quotient of medians that the experiment is about."""

    name: str
    over: str
    under: str
    """Variants above and below the line."""
    quantity: Literal[
        "seconds", "bytes_outside", "samples_per_second", "epochs_to_target", "dollars", "value"
    ] = "seconds"
    """Of an epoch; the last three as reports have them in ``extra``."""
    predicted: float | None = None
    low: float | None = None
    """Least value with which the claim counts as reproduced; None: no such bound."""
    high: float | None = None
    cells: tuple[Cell, ...] = ()
    """In place of ``over`` and ``under``: each cell's chosen variant over the fastest of its ways."""
    of_cells: Literal["median", "worst"] = "median"
    """Which of the cells' quotients counts."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a picture of bytes and seconds over what variants differ by."""

    what: Literal["alpha", "rate"]
    """Cache by the rows of a server; Mbit/s between servers."""
    name: str
    points: tuple[tuple[float, str], ...]
    """Place on the axis, and the variant there."""


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """What an experiment wants done."""

    variants: tuple[Variant, ...]
    ratios: tuple[Ratio, ...] = ()
    lines: tuple[Line, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the prediction rests on, e.g. the edge cut; JSON values, shown in the report."""


def check_plan(experiment: str, plan: ExperimentPlan) -> None:
    """Raise ConfigError where names in ``plan`` are double or belong to nobody."""
    names = [variant.name for variant in plan.variants]
    if not names or len(set(names)) != len(names):
        why = "give it at least one, each with its own name"
        raise ConfigError(f"{experiment}: its variants are {names}; {why}")
    asked = {variant.rate.baseline for variant in plan.variants if isinstance(variant.rate, MatchedPhi)}
    asked |= {name for ratio in plan.ratios for name in (ratio.over, ratio.under)}
    asked |= {name for ratio in plan.ratios for cell in ratio.cells for name in (cell.chosen, *cell.ways)}
    asked |= {name for line in plan.lines for _, name in line.points}
    if unknown := ", ".join(sorted(asked - set(names))):
        raise ConfigError(f"{experiment}: no variant is called {unknown} (there are: {', '.join(names)})")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment, as its section of docs/results/notes.md says, and what builds it."""

    id: str
    title: str
    suites: tuple[Suite, ...]
    claim: Claim
    prediction: str
    """In words and numbers, written before the measurement."""
    strategies: tuple[str, ...] = ("data_parallel",)
    """It is absent while the package lacks one of them."""
    build: Callable[[BenchPlan], ExperimentPlan] | None = None
    """Makes or finds its datasets and says what to run; None: not written yet, reported as absent."""
    needs: tuple[str, ...] = ()
    """Importable modules besides the package's own, "a|b" for either; absent without them."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One repetition of one variant."""

    variant: str
    repetition: int
    epochs: tuple[EpochRecord, ...]
    """The measured ones."""
    bytes_outside_wire: int | None = None
    """By the cards, for the measured epochs; None on plain loopback."""
    peak_bytes: int = 0
    """Largest resident memory of a rank."""
    accuracy: tuple[tuple[float, float], ...] = ()
    """(seconds of training so far, validation accuracy) after each epoch, when asked for."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Mean seconds of a measured epoch."""
        return sum(epoch.seconds for epoch in self.epochs) / max(len(self.epochs), 1)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of an experiment."""

    experiment: str
    status: Literal["measured", "absent", "failed"]
    reason: str = ""
    network: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``Lab.describe()`` by variant, and the rates found by calibration with their phi."""
    plan: ExperimentPlan | None = None
    measurements: tuple[Measurement, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """What a reader must know beside every figure, e.g. that there were few repetitions; empty: nothing."""
    command: str = ""
    """Repeats it."""
    date: str = ""

    def fact(self, name: str) -> Mapping[str, Any]:
        """Return a fact of the plan by variant; empty where it has none."""
        found: Mapping[str, Any] = {} if self.plan is None else self.plan.facts.get(name, {})
        return found
