"""What training jobs are told, checked before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean
from dglx_dist.training.models import MODEL_KINDS, check_kind
from scripts.bench.simulate import ComputeCost


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    """One training run of a ready-made model; ConfigError for values out of range."""

    what: ClassVar[str]
    """The kind of job, in messages."""

    data: str
    """Folder of the partitioned dataset."""
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own."""
    model: str
    hidden: int
    lr: float
    epochs: int = 1
    """Measured ones."""
    warmup: int = 1
    """Epochs before them."""
    seed: int = 0
    accuracy: bool = False
    """Evaluate after every epoch or, in intervals, on the test nodes at the end; outside all seconds."""

    def __post_init__(self) -> None:
        check_kind(self.model, MODEL_KINDS)
        self._demand("hidden", self.hidden >= 1, "at least 1")
        self._demand("epochs", self.epochs >= 1, "at least 1")
        self._demand("warmup", self.warmup >= 0, "at least 0")
        self._demand("lr", 0 < self.lr < math.inf, "above 0")

    def _demand(self, name: str, right: bool, allowed: str) -> None:
        if not right:
            raise ConfigError(f"{name}={getattr(self, name)!r} of a {self.what} job must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class TrainParams(ModelParams):
    """A run under any strategy; accuracy cannot be asked of simulated compute."""

    what: ClassVar[str] = "training"

    strategy: str = "data_parallel"
    model: str = "sage"
    hidden: int = 256
    lr: float = 0.003
    heads: int = 4
    norm: Literal["graph", "block"] = "graph"
    """Whether ``gcn`` weighs edges by the degrees of the whole graph, or takes the mean over a block's."""
    dropout: float = 0.0
    fanouts: Sequence[int] = (15, 10, 5)
    """One for each layer, input-most first; -1: all."""
    batch_size: int = 1000
    """Seeds per rank and step."""
    seeds: Literal["even", "own"] = "even"
    """Whether ranks train on even shares of the training nodes, or each server on those that it owns."""
    max_steps: int | None = None
    """Most steps of an epoch, by leaving out what a rank has more of seeds; None: all."""
    structure: Literal["auto", "replicated", "partitioned"] = "partitioned"
    loader: Mapping[str, Any] = field(default_factory=dict)
    """More for the loader, such as ``depth`` and ``num_threads``."""
    accuracy_every: int = 1
    """Where ``accuracy``: after so many epochs only, and after the last."""
    simulated: Mapping[str, Any] | None = None
    """``ComputeCost.to_json()``: sleep so long in place of computing; None: compute."""

    def __post_init__(self) -> None:
        super().__post_init__()
        learns_nothing = self.accuracy and self.simulated is not None
        steps = self.max_steps
        self._demand("fanouts", bool(self.fanouts), "one number for each layer, at least one")
        self._demand("batch_size", self.batch_size >= 1, "at least 1")
        self._demand("accuracy_every", self.accuracy_every >= 1, "at least 1")
        self._demand("max_steps", steps is None or steps >= 1, "at least 1, or left out")
        self._demand("norm", self.norm in ("graph", "block"), "graph or block")
        self._demand("seeds", self.seeds in ("even", "own"), "even or own")
        self._demand("accuracy", not learns_nothing, "left out with simulated compute, which learns nothing")

    @property
    def max_seeds(self) -> int | None:
        """Most seeds of a rank; None: all."""
        return None if self.max_steps is None else self.max_steps * self.batch_size

    @property
    def cost(self) -> ComputeCost | None:
        """What is slept; None: nothing. ConfigError if ``simulated`` is no cost."""
        return None if self.simulated is None else ComputeCost.from_json(self.simulated)


@dataclass(frozen=True, kw_only=True)
class IntervalParams(ModelParams):
    """A run in whole epochs, under strategy ``lambda``."""

    what: ClassVar[str] = "bounded"

    strategy: str = "lambda"
    model: str = "gcn"
    hidden: int = 16
    lr: float = 0.01
    layers: int = 2
    target: float | None = None
    """Training accuracy, as a fraction, to which epochs are counted; None: they are not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._demand("layers", self.layers >= 1, "at least 1")
        self._demand("target", self.target is None or 0 < self.target <= 1, "a fraction, or left out")


Params = TypeVar("Params", bound=ModelParams)


def read_params(kind: type[Params], params: Mapping[str, Any]) -> Params:
    """Read JSON values as the fields of ``kind``.

    Raises:
        ConfigError: a name is unknown, ``data`` is missing or a value out of range.
    """
    known = [one.name for one in fields(kind)]
    for name in params:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"a {kind.what} job has no parameter {name!r}{hint} (known: {', '.join(known)})"
            )
    if "data" not in params:
        raise ConfigError(f"a {kind.what} job needs the parameter data, the folder of a partitioned dataset")
    return kind(**params)
