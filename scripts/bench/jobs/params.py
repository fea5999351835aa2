"""Parameters of training jobs. They are checked before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from dglx_dist.errors import ConfigError
from dglx_dist.options import ABOVE_ZERO, Check, at_least, between, check_ranges, option
from dglx_dist.registry import suggest_name
from dglx_dist.training.model_kinds import check_kind
from scripts.bench.simulate import ComputeCost
from scripts.json_records import read_record


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
    epochs: int = option(1, "Measured ones.", check=at_least(1))
    warmup: int = option(1, "Epochs before them.", check=at_least(0))
    seed: int = 0
    accuracy: bool = False
    """Evaluate after every epoch or, in intervals, on the test nodes at the end; outside all seconds."""

    def __post_init__(self) -> None:
        check_kind(self.model)
        check_ranges(self, f"{{name}}={{value}} of a {self.what} job")


@dataclass(frozen=True, kw_only=True)
class TrainParams(ModelParams):
    """A run under any strategy; accuracy cannot be asked of simulated compute."""

    what: ClassVar[str] = "training"

    strategy: str = "data_parallel"
    model: str = "sage"
    hidden: int = option(256, "Width of the layers.", check=at_least(1))
    lr: float = option(0.003, "Of Adam.", check=ABOVE_ZERO)
    heads: int = 4
    norm: Literal["graph", "block"] = "graph"
    """Whether ``gcn`` weighs edges by the degrees of the whole graph, or takes the mean over a block's."""
    dropout: float = 0.0
    fanouts: tuple[int, ...] = option(
        (15, 10, 5),
        "Input-most first; -1: all.",
        check=Check(bool, "one number for each layer, at least one"),
    )
    batch_size: int = option(1000, "Seeds per rank and step.", check=at_least(1))
    seeds: Literal["even", "own"] = "even"
    """Whether ranks train on even shares of the training nodes, or each server on those that it owns."""
    max_steps: int | None = option(
        None, "Most of an epoch, by leaving out what a rank has more of seeds.", check=at_least(1)
    )
    structure: Literal["auto", "replicated", "partitioned"] = "partitioned"
    cache: str = ""
    """Policy of the cache of remote features; empty: none."""
    alpha: float = option(
        0.1, "Of the cache.", check=Check(lambda value: 0 < value <= 1, "above 0, at most 1")
    )
    loader: Mapping[str, Any] = field(default_factory=dict)
    """More for the loader, such as ``depth`` and ``num_threads``."""
    accuracy_every: int = option(
        1, "Where accuracy: after so many epochs only, and after the last.", check=at_least(1)
    )
    simulated: ComputeCost | None = None
    """Sleep so long in place of computing; None: compute."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accuracy and self.simulated is not None:
            raise ConfigError("accuracy cannot be asked of simulated compute, which learns nothing")

    @property
    def max_seeds(self) -> int | None:
        """Most seeds of a rank; None: all."""
        return None if self.max_steps is None else self.max_steps * self.batch_size


@dataclass(frozen=True, kw_only=True)
class IntervalParams(ModelParams):
    """A run in whole epochs, under strategy ``lambda``."""

    what: ClassVar[str] = "bounded"

    strategy: str = "lambda"
    model: str = "gcn"
    hidden: int = option(16, "Width of the layers.", check=at_least(1))
    lr: float = option(0.01, "Of Adam.", check=ABOVE_ZERO)
    layers: int = option(2, "Of the model.", check=at_least(1))
    target: float | None = option(
        None,
        "Training accuracy to which epochs are counted.",
        check=Check(lambda value: 0 < value <= 1, "a fraction, or left out"),
    )
    latency_s: float = option(0.0, "Median pause of a task; 0: none.", check=between(0, 60))
    latency_sigma: float = option(0.5, "Spread of its logarithm.", check=between(0, 3))


Params = TypeVar("Params", bound=ModelParams)


def read_params(kind: type[Params], params: Mapping[str, Any]) -> Params:
    """Read JSON values as the fields of ``kind``.

    Raises:
        ConfigError: a name is unknown, ``data`` is missing or a value out of range.
    """
    known = [field_.name for field_ in fields(kind)]
    for name in params:
        if name not in known:
            hint = suggest_name(name, known)
            raise ConfigError(
                f"a {kind.what} job has no parameter {name!r}{hint} (known: {', '.join(known)})"
            )
    if "data" not in params:
        raise ConfigError(f"a {kind.what} job needs the parameter data, the folder of a partitioned dataset")
    try:
        record: Params = read_record(kind, params)
    except TypeError as error:
        raise ConfigError(f"parameters of a {kind.what} job: {error}") from None
    return record
