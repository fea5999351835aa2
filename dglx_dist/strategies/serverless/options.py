"""The options of strategy ``lambda``, read and checked."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, final, get_args

from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.registry import did_you_mean
from dglx_dist.serverless.cost import DEFAULT_PRICES, PriceTable, prices
from dglx_dist.serverless.executors.base import EXECUTORS
from dglx_dist.serverless.parameter_server import Scheme, check_scheme
from dglx_dist.strategies.base import check_options

Mode: TypeAlias = Literal["no_pipe", "pipe", "async"]


@final
@dataclass(kw_only=True)
class StalenessPolicy:
    """The one object of a graph server's run that says which epochs are synchronous."""

    mode: Mode = "pipe"
    staleness: int = 0
    """S: an interval may begin epoch e once e - S updates were made. Only where epochs are asynchronous."""
    first_epoch: int = 0
    """Always synchronous: there are no values yet to be stale."""
    target: int | None = None
    """Right answers of an epoch, over all graph servers, that make later ones synchronous; None: none do."""
    synchronous_from: int | None = None
    """The epoch from which on all are synchronous; None: never. Set while no interval can have begun it."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} must be at least 0")

    def is_synchronous(self, epoch: int) -> bool:
        """Whether ``epoch`` has a barrier at every Scatter."""
        late = self.synchronous_from is not None and epoch >= self.synchronous_from
        return self.mode != "async" or epoch <= self.first_epoch or late

    def lead(self, epoch: int) -> int:
        """How many updates may be missing when an interval begins ``epoch``."""
        return 0 if self.is_synchronous(epoch) else self.staleness


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

    def pace(self, first_epoch: int, num_train: int) -> StalenessPolicy:
        """Return how epochs may overlap in a run that begins with ``first_epoch``, on M training nodes."""
        return StalenessPolicy(
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


DEFAULT_SERVER = "c5.2xlarge"
"""On which the paper's graph servers ran."""
_OTHERS = {"prices": str, "server": str, "interface": str}


@final
@dataclass(frozen=True, kw_only=True)
class LambdaSettings:
    """Options by who reads them."""

    options: LambdaOptions
    executor_options: Mapping[str, object]
    """Those that the executor takes."""
    prices: PriceTable
    server: str
    """Which kind of server of ``prices`` a rank stands for."""
    interface: str = ""
    """On which network interface a run of one rank answers workers; "": on this machine only. Several ranks
    answer where they answer each other."""

    @property
    def alone(self) -> bool:
        """Whether graph servers do all work themselves, so that no function is paid for."""
        return EXECUTORS.get(self.options.executor).in_process


def read_settings(options: Mapping[str, object]) -> LambdaSettings:
    """Read all options of the strategy.

    Raises:
        ConfigError: one is of another type, has a value that cannot be honoured, or is neither the
            strategy's nor the executor's.
        UnknownNameError: there is no such executor.
    """
    known = [one.name for one in fields(LambdaOptions)]
    own = {name: value for name, value in options.items() if name in known}
    others = {name: value for name, value in options.items() if name in _OTHERS}
    check_options("lambda", others, _OTHERS)
    rest = {name: value for name, value in options.items() if name not in own and name not in others}
    read = read_lambda_options(own)
    _check_rest(rest, [*known, *_OTHERS], read.executor)
    table = prices(str(others.get("prices", DEFAULT_PRICES)))
    server = str(others.get("server", DEFAULT_SERVER))
    table.server(server)
    return LambdaSettings(
        options=read,
        executor_options=rest,
        prices=table,
        server=server,
        interface=str(others.get("interface", "")),
    )


def _check_rest(rest: Iterable[str], known: Sequence[str], executor: str) -> None:
    own = EXECUTORS.get(executor).option_names
    for name in rest:
        if name not in own:
            hint = did_you_mean(name, [*known, *own])
            raise ConfigError(
                f"strategy 'lambda' has no option {name!r}; its options are: {', '.join(sorted(known))}; "
                f"with executor={executor!r} also {', '.join(own)}{hint}"
            )


def threads_of(session: Session, asked: int) -> int:
    """Return ``asked``, or for 0 this rank's share of the cores of its machine, at least 1."""
    if asked:
        return asked
    on_machine = Counter(session.hosts)[session.hosts[session.topology.rank]]
    return max(1, len(os.sched_getaffinity(0)) // on_machine)
