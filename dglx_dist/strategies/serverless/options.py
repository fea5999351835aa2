"""Options of strategy ``lambda``, parsed and validated."""

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
    """Which epochs are synchronous; one mutable object per run of a graph server."""

    mode: Mode = "pipe"
    staleness: int = 0
    """S: an interval may begin epoch e after e - S updates. Applies to asynchronous epochs only."""
    first_epoch: int = 0
    """Always synchronous: no stale values exist yet."""
    target: int | None = None
    """Correct predictions of an epoch, of all servers, that make later ones synchronous; None: never."""
    synchronous_from: int | None = None
    """The epoch from which all are synchronous; None: never. Set before any interval can have begun it."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(f"staleness={self.staleness} must be at least 0")

    def is_synchronous(self, epoch: int) -> bool:
        """True if ``epoch`` has a barrier at every Scatter."""
        late = self.synchronous_from is not None and epoch >= self.synchronous_from
        return self.mode != "async" or epoch <= self.first_epoch or late

    def lead(self, epoch: int) -> int:
        """Return how many updates may be missing when an interval begins ``epoch``."""
        return 0 if self.is_synchronous(epoch) else self.staleness


@final
@dataclass(frozen=True, kw_only=True)
class LambdaOptions:
    """The user's options; ConfigError if a value is out of range or conflicts with another one."""

    mode: Mode = "pipe"
    """no_pipe: one phase at a time; pipe: exact, intervals overlap in a phase; async: no barriers."""
    staleness: int = 0
    """S of async: how many epochs an interval may be ahead of the slowest one."""
    switch_at: float = 0.0
    """Training accuracy of an epoch after which async trains synchronously; 0: never."""
    intervals: int = 8
    threads: int = 0
    """Threads of a graph server; 0: its cores."""
    parameter_servers: int = 1
    """Number of ranks that hold weights: the first ones."""
    executor: str = "local"
    """Where workers run: local, inline, aws or http."""
    workers: int = 0
    """Maximum number of tasks in flight per graph server; 0: tuned at run time."""
    batch: int = 1
    """Tasks that a graph server hands to the executor together; fewer when one has waited 5 ms."""
    retries: int = 4
    """How often a task is launched again before the run fails."""
    fusion: bool = True
    """Whether the last step runs forward and backward in one task."""
    rematerialise: bool = True
    """Whether backward recomputes what forward would otherwise send."""
    streaming: bool = True
    """Whether a worker computes the first half while it receives the second."""
    initialise: Scheme | Literal[""] = ""
    """Initialisation of the trained weights at ``wrap``, by the session's seed: xavier_uniform,
    xavier_normal, he_uniform or he_normal; biases become 0, other vectors are kept. "": all are kept."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"option mode={self.mode!r} must be {' or '.join(map(repr, get_args(Mode)))}; 'async' takes "
                "staleness"
            )
        bounds = {
            "staleness": (0, 1000),
            "intervals": (1, 10_000),
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
                f"option staleness={self.staleness} has no meaning with mode={self.mode!r}, which has a "
                "barrier at every Scatter; add mode='async', or leave it out"
            )
        if not 0 <= self.switch_at <= 1:
            raise ConfigError(f"option switch_at={self.switch_at} must be an accuracy from 0 to 1")
        if self.switch_at and self.mode != "async":
            raise ConfigError(
                f"option switch_at={self.switch_at} ends mode='async', but mode is {self.mode!r}; leave one "
                "out"
            )

    def staleness_policy(self, first_epoch: int, num_train: int) -> StalenessPolicy:
        """Return the policy of a run that begins with ``first_epoch`` and trains on ``num_train`` nodes."""
        return StalenessPolicy(
            mode=self.mode,
            staleness=self.staleness,
            first_epoch=first_epoch,
            target=_least_count(self.switch_at, num_train) if self.switch_at else None,
        )


def _least_count(accuracy: float, num_train: int) -> int:
    # The least c with c / M >= accuracy in floating point: 0.55 * 100 is above 55.
    above = math.ceil(accuracy * num_train)
    return above - 1 if above and (above - 1) / num_train >= accuracy else above


def read_lambda_options(options: Mapping[str, object]) -> LambdaOptions:
    types = {one.name: type(one.default) for one in fields(LambdaOptions)}
    return LambdaOptions(**check_options("lambda", options, types))


DEFAULT_SERVER = "c5.2xlarge"
"""Server type of the paper's graph servers."""
_SETTING_TYPES = {"prices": str, "server": str, "interface": str}


@final
@dataclass(frozen=True, kw_only=True)
class LambdaSettings:
    """Options grouped by their reader."""

    options: LambdaOptions
    executor_options: Mapping[str, object]
    prices: PriceTable
    server: str
    """Server type of ``prices`` by which a rank is billed."""
    interface: str = ""
    """Network interface on which a run of one rank answers workers; "": loopback only. With several ranks,
    workers use the address at which ranks reach each other."""

    @property
    def servers_only(self) -> bool:
        """True if graph servers do all work themselves, so that no function is paid for."""
        return EXECUTORS.get(self.options.executor).in_process


def read_settings(options: Mapping[str, object]) -> LambdaSettings:
    """Read all options: those of the strategy, those shared by executors, and the executor's own."""
    known = [one.name for one in fields(LambdaOptions)]
    own = {name: value for name, value in options.items() if name in known}
    shared = {name: value for name, value in options.items() if name in _SETTING_TYPES}
    check_options("lambda", shared, _SETTING_TYPES)
    rest = {name: value for name, value in options.items() if name not in own and name not in shared}
    read = read_lambda_options(own)
    _check_executor_options(rest, [*known, *_SETTING_TYPES], read.executor)
    table = prices(str(shared.get("prices", DEFAULT_PRICES)))
    server = str(shared.get("server", DEFAULT_SERVER))
    table.server(server)
    return LambdaSettings(
        options=read,
        executor_options=rest,
        prices=table,
        server=server,
        interface=str(shared.get("interface", "")),
    )


def _check_executor_options(given: Iterable[str], known: Sequence[str], executor: str) -> None:
    own = EXECUTORS.get(executor).option_names
    for name in given:
        if name not in own:
            hint = did_you_mean(name, [*known, *own])
            raise ConfigError(
                f"strategy 'lambda' has no option {name!r}; its options are: {', '.join(sorted(known))}; "
                f"with executor={executor!r} also {', '.join(own)}{hint}"
            )


def num_threads(session: Session, requested: int) -> int:
    """Return ``requested``, or for 0 this rank's share of the cores of its machine, at least 1."""
    if requested:
        return requested
    on_machine = Counter(session.hosts)[session.hosts[session.topology.rank]]
    return max(1, len(os.sched_getaffinity(0)) // on_machine)
