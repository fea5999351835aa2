"""What a session of strategy ``lambda`` was told, for everybody who needs a part of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import final

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.offload.executors.registry import EXECUTORS
from dglx_dist.offload.prices import DEFAULT_PRICES, PriceTable, prices
from dglx_dist.registry import did_you_mean
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.bounded.options import LambdaOptions, read_lambda_options

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
