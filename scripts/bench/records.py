"""Frozen records of experiments, their plans and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.planner.records import Rate
from dglx_dist.records import EpochRecord

Suite = Literal["quick", "papers", "peers", "large"]

# Names of facts that reports show in tables of their own, by variant.
KAPPA = "kappa: work of the server with most, by the baseline's"
"""Computation of each variant, divided by the computation of its baseline."""
PREDICTED_BYTES = "predicted bytes of an epoch"
"""Bytes between servers by phase of the ledger."""
PREDICTED_ONCE = "predicted bytes of preloading"
"""Bytes of features between servers that a variant moves once."""
COUNTED_BYTES = "predicted bytes of the first measured epoch"
"""Exact bytes of a variant, between and inside servers."""


class JobError(DglxError):
    """A benchmark job failed or hung. The message names the rank and ends with its log."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim."""

    paper: str
    """E.g. "DistDGL (2020), section 5.3"."""
    says: str
    setting: str
    """E.g. "ogbn-products, 4 machines, 100 Gbit/s"."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Options of a run of the bench."""

    suite: Suite
    out: Path
    work: Path
    """Folder of generated datasets, which later runs reuse."""
    repetitions: int = 5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The servers that a variant runs on."""

    servers: int
    ranks_per_server: int = 1
    cpus: float | None = None
    """Cores per server. None divides the cores of this machine by the number of servers."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A task that all ranks of a worker pool run together."""

    kind: str
    """A name of ``worker.KINDS``."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    warm: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that replace ``params`` in the warm-up run, for example fewer epochs."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Parameters that replace ``params`` in repetition 0, 1 and so on, in a cycle. An example is the seed."""

    def turn(self, repetition: int) -> Job:
        """Return the job of this repetition."""
        changed = self.turns[repetition % len(self.turns)] if self.turns else {}
        return replace(self, params={**self.params, **changed})


@dataclass(frozen=True, kw_only=True)
class MatchedPhi:
    """A rate at which the variant ``baseline`` spends the share ``phi`` of its time on the network."""

    phi: float
    baseline: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One column of an experiment."""

    name: str
    shape: Shape
    job: Job
    rate: Rate | MatchedPhi | None = None
    """Rate between servers. None means unlimited."""
    simulated: str = ""
    """Description of the simulated components. Empty if nothing is simulated."""
    curve: Job | None = None
    """Additional job that records ``Measurement.accuracy`` on the same servers. None records no curve."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a grid in which the planner chose among variants of the same task."""

    name: str
    chosen: str
    ways: tuple[str, ...]
    """Names of all variants of the cell, including the chosen one. Regret is measured by the fastest."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A quotient of medians that decides about the claim."""

    name: str
    over: str
    under: str
    """Names of the variants in the numerator (``over``) and in the denominator (``under``)."""
    quantity: Literal[
        "seconds", "bytes_outside", "samples_per_second", "epochs_to_target", "dollars", "value"
    ] = "seconds"
    """Quantity of an epoch. Reports hold the last three quantities in ``extra``."""
    predicted: float | None = None
    low: float | None = None
    """Smallest value at which the claim counts as reproduced. None sets no lower bound."""
    high: float | None = None
    cells: tuple[Cell, ...] = ()
    """Cells that replace ``over`` and ``under``. Each divides its chosen variant by its fastest one."""
    of_cells: Literal["median", "worst"] = "median"
    """Statistic over the quotients of all cells."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a plot of bytes and seconds over a parameter of the variants."""

    what: Literal["alpha", "rate"]
    """Parameter on the axis: the cached share of a server's rows, or Mbit/s between servers."""
    name: str
    points: tuple[tuple[float, str], ...]
    """Positions on the axis with the variant at each."""


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """Variants, ratios and lines of an experiment."""

    variants: tuple[Variant, ...]
    ratios: tuple[Ratio, ...] = ()
    lines: tuple[Line, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values behind the prediction, such as the edge cut. The report shows them."""


def check_plan(experiment: str, plan: ExperimentPlan) -> None:
    """Raise ConfigError if names in ``plan`` are duplicated or unknown."""
    names = [variant.name for variant in plan.variants]
    if not names or len(set(names)) != len(names):
        remedy = "Give it at least one variant, each with its own name"
        raise ConfigError(f"{experiment}: the variants are {names}. {remedy}")
    mentioned = {variant.rate.baseline for variant in plan.variants if isinstance(variant.rate, MatchedPhi)}
    mentioned |= {name for ratio in plan.ratios for name in (ratio.over, ratio.under)}
    mentioned |= {name for ratio in plan.ratios for cell in ratio.cells for name in (cell.chosen, *cell.ways)}
    mentioned |= {name for line in plan.lines for _, name in line.points}
    if unknown := ", ".join(sorted(mentioned - set(names))):
        raise ConfigError(
            f"{experiment}: no variant is called {unknown}. The variants are {', '.join(names)}"
        )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment, as described in its section of docs/results/notes.md."""

    id: str
    title: str
    suites: tuple[Suite, ...]
    claim: Claim
    prediction: str
    """Prediction in words and numbers, written before the measurement."""
    strategies: tuple[str, ...] = ("data_parallel",)
    """Strategies that the experiment needs. It is absent if the package lacks one of them."""
    build: Callable[[BenchPlan], ExperimentPlan] | None = None
    """Function that prepares the datasets and returns the plan. None reports the experiment as absent."""
    needs: tuple[str, ...] = ()
    """Additional modules that the experiment imports. "a|b" means either of them."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One repetition of one variant."""

    variant: str
    repetition: int
    epochs: tuple[EpochRecord, ...]
    """Measured epochs, without the warm-up."""
    bytes_outside_wire: int | None = None
    """Bytes of the measured epochs by the counters of the network cards. None on plain loopback."""
    peak_bytes: int = 0
    """Largest resident memory of a rank."""
    accuracy: tuple[tuple[float, float], ...] = ()
    """Pairs of training seconds and validation accuracy after each epoch, if the variant records a curve."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Mean seconds of a measured epoch."""
        return sum(epoch.seconds for epoch in self.epochs) / max(len(self.epochs), 1)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an experiment."""

    experiment: str
    status: Literal["measured", "absent", "failed"]
    reason: str = ""
    network: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``Lab.describe()`` by variant, with the calibrated rate and its phi."""
    plan: ExperimentPlan | None = None
    measurements: tuple[Measurement, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """Caveat that is shown beside every figure, such as too few repetitions. Empty if there is none."""
    command: str = ""
    """Command that repeats the experiment."""
    date: str = ""

    def fact(self, name: str) -> Mapping[str, Any]:
        """Return a fact of the plan by variant, or an empty mapping."""
        values: Mapping[str, Any] = {} if self.plan is None else self.plan.facts.get(name, {})
        return values
