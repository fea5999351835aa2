"""The options of strategy ``lambda``, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, final, get_args

from dglx_dist.errors import ConfigError
from dglx_dist.offload.parameters.initialise import Scheme, check_scheme
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.bounded.pace import Mode, Pace

_MOST_INTERVALS, _MOST_STALENESS = 10_000, 1000


@final
@dataclass(frozen=True, kw_only=True)
class LambdaOptions:
    """What the user said.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    mode: Mode = "pipe"
    """no_pipe: one phase at a time; pipe: exact, intervals overlap in a phase; async: layers do not wait."""
    staleness: int = 0
    """S of async: an interval may be so many epochs ahead of the slowest one."""
    switch_at: float = 0.0
    """Training accuracy of an epoch after which async trains synchronously; 0: never."""
    intervals: int = 8
    """Per graph server; its pipeline needs several."""
    threads: int = 0
    """Threads of a graph server; 0: its cores."""
    parameter_servers: int = 1
    """How many ranks hold weights; the first ones do."""
    executor: str = "local"
    """Where tensor work is done: local, inline, aws or http."""
    workers: int = 0
    """Tasks under way at most, per graph server; 0: tuned while it runs."""
    batch: int = 1
    """Tasks that a graph server hands to the executor together; fewer when one has waited 5 ms."""
    retries: int = 4
    """How often a task is launched again before the run gives up."""
    fusion: bool = True
    """Whether the last step goes forward and backward in one task."""
    rematerialise: bool = True
    """Whether backward computes again what forward would otherwise send."""
    streaming: bool = True
    """Whether a worker computes the first half while the second one comes."""
    initialise: Scheme | Literal[""] = ""
    """How the trained weights are drawn when the model is wrapped, by the session's seed: xavier_uniform,
    xavier_normal, he_uniform or he_normal; biases are 0, other vectors stay. "": all stay as the model has
    them."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"option mode={self.mode!r} must be {' or '.join(map(repr, get_args(Mode)))}; 'async' with "
                "staleness"
            )
        bounds = {
            "staleness": (0, _MOST_STALENESS),
            "intervals": (1, _MOST_INTERVALS),
            "threads": (0, 1024),
            "parameter_servers": (1, 1024),
            "workers": (0, 10_000),
            "batch": (1, 1000),
            "retries": (0, 1000),
        }
        for name, (least, most) in bounds.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"option {name}={getattr(self, name)} must be from {least} to {most}")
        if self.initialise:
            check_scheme(self.initialise)
        if self.staleness and self.mode != "async":
            raise ConfigError(
                f"option staleness={self.staleness} has no meaning with mode={self.mode!r}, which waits for "
                "all at every Scatter; add mode='async', or leave it out"
            )
        if not 0 <= self.switch_at <= 1:
            raise ConfigError(f"option switch_at={self.switch_at} must be an accuracy from 0 to 1")
        if self.switch_at and self.mode != "async":
            raise ConfigError(
                f"option switch_at={self.switch_at} ends mode='async', but mode is {self.mode!r}; leave one "
                "out"
            )

    def pace(self, first_epoch: int, num_train: int) -> Pace:
        """Return how epochs may overlap in a run that begins with ``first_epoch``, on M training nodes."""
        return Pace(
            mode=self.mode,
            staleness=self.staleness,
            first_epoch=first_epoch,
            target=_least_count(self.switch_at, num_train) if self.switch_at else None,
        )


def _least_count(accuracy: float, num_train: int) -> int:
    """Return the least c with c / M at least ``accuracy``, as divided here: 0.55 * 100 is above 55."""
    above = math.ceil(accuracy * num_train)
    return above - 1 if above and (above - 1) / num_train >= accuracy else above


def read_lambda_options(options: Mapping[str, object]) -> LambdaOptions:
    """Return the options of the session.

    Raises:
        ConfigError: one is unknown, of another type, or has a value that cannot be honoured.
    """
    switch_at = options.get("switch_at")
    if isinstance(switch_at, int) and not isinstance(switch_at, bool):
        # The command line reads switch_at=1 as a whole number.
        options = {**options, "switch_at": float(switch_at)}
    check_options("lambda", options, {one.name: type(one.default) for one in fields(LambdaOptions)})
    return LambdaOptions(**options)  # type: ignore[arg-type]  # checked one line up
