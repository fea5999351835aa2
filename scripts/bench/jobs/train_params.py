"""What the job ``train`` is told, checked before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean
from dglx_dist.training.models import MODEL_KINDS, check_kind
from scripts.bench.simulate import ComputeCost


@dataclass(frozen=True, kw_only=True)
class TrainParams:
    """One training run of a ready-made model under any strategy.

    Raises:
        UnknownNameError: there is no such model.
        ConfigError: a value is out of range, or accuracy is asked of simulated compute.
    """

    data: str
    """Folder of the partitioned dataset."""
    strategy: str = "data_parallel"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own."""
    model: str = "sage"
    hidden: int = 256
    heads: int = 4
    norm: Literal["graph", "block"] = "graph"
    """Whether ``gcn`` weighs edges by the degrees of the whole graph, or takes the mean over a block's."""
    dropout: float = 0.0
    fanouts: Sequence[int] = (15, 10, 5)
    """One for each layer, input-most first; -1: all."""
    batch_size: int = 1000
    """Seeds per rank and step."""
    lr: float = 0.003
    epochs: int = 1
    """Measured ones."""
    warmup: int = 1
    """Epochs before them."""
    seed: int = 0
    seeds: Literal["even", "own"] = "even"
    """Whether ranks train on even shares of the training nodes, or each server on those that it owns."""
    max_steps: int | None = None
    """Most steps of an epoch, by leaving out what a rank has more of seeds; None: all."""
    structure: Literal["auto", "replicated", "partitioned"] = "partitioned"
    loader: Mapping[str, Any] = field(default_factory=dict)
    """More for the loader, such as ``depth`` and ``num_threads``."""
    accuracy: bool = False
    """Evaluate after every epoch, outside its seconds."""
    accuracy_every: int = 1
    """Where ``accuracy``: after so many epochs only, and after the last."""
    simulated: Mapping[str, Any] | None = None
    """``ComputeCost.to_json()``: sleep so long in place of computing; None: compute."""

    def __post_init__(self) -> None:
        check_kind(self.model, MODEL_KINDS)
        for name, wrong, allowed in (
            ("fanouts", not self.fanouts, "one number for each layer, at least one"),
            ("hidden", self.hidden < 1, "at least 1"),
            ("batch_size", self.batch_size < 1, "at least 1"),
            ("epochs", self.epochs < 1, "at least 1"),
            ("warmup", self.warmup < 0, "at least 0"),
            ("accuracy_every", self.accuracy_every < 1, "at least 1"),
            ("max_steps", self.max_steps is not None and self.max_steps < 1, "at least 1, or left out"),
            ("lr", not 0 < self.lr < math.inf, "above 0"),
            ("norm", self.norm not in ("graph", "block"), "graph or block"),
            ("seeds", self.seeds not in ("even", "own"), "even or own"),
            (
                "accuracy",
                self.accuracy and self.simulated is not None,
                "left out with simulated compute, which learns nothing",
            ),
        ):
            if wrong:
                raise ConfigError(f"{name}={getattr(self, name)!r} of a training job must be {allowed}")

    @property
    def max_seeds(self) -> int | None:
        """Most seeds of a rank; None: all."""
        return None if self.max_steps is None else self.max_steps * self.batch_size

    @property
    def cost(self) -> ComputeCost | None:
        """What is slept; None: nothing.

        Raises:
            ConfigError: ``simulated`` is no cost.
        """
        return None if self.simulated is None else ComputeCost.from_json(self.simulated)


def read_params(params: Mapping[str, Any]) -> TrainParams:
    """Read JSON values.

    Raises:
        ConfigError: a name is unknown, ``data`` is missing or a value out of range.
    """
    known = [one.name for one in fields(TrainParams)]
    for name in params:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"a training job has no parameter {name!r}{hint} (known: {', '.join(known)})")
    if "data" not in params:
        raise ConfigError("a training job needs the parameter data, the folder of a partitioned dataset")
    return TrainParams(**params)


def graphsage(
    data: str, *, hidden: int, batch_size: int, epochs: int, seed: int, **more: Any
) -> dict[str, Any]:
    """Return the params that DistDGL's experiments share: GraphSAGE of 3 layers, fan-out 15,10,5."""
    return {
        "data": data,
        "hidden": hidden,
        "fanouts": [15, 10, 5],
        "batch_size": batch_size,
        "epochs": epochs,
        "seed": seed,
        **more,
    }
