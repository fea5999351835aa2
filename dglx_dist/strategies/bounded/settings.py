"""What a session of strategy ``lambda`` was told, for everybody who needs a part of it."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import final

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.offload.executors.registry import EXECUTORS
from dglx_dist.offload.prices import DEFAULT_PRICES, PriceTable, prices
from dglx_dist.strategies.base import check_options
from dglx_dist.strategies.bounded.options import LambdaOptions, read_lambda_options

DEFAULT_SERVER = "c5.2xlarge"
"""On which the paper's graph servers ran."""
_OTHERS = {"prices": str, "server": str, "interface": str}
_SURELY_MEANT = 0.85
"""How alike two names are that differ by a slip; an executor's own options may be rather alike to ours."""


@final
@dataclass(frozen=True, kw_only=True)
class LambdaSettings:
    """Options by who reads them."""

    options: LambdaOptions
    executor_options: Mapping[str, object]
    """Those that no one else knows; the executor refuses what it does not know either."""
    prices: PriceTable
    server: str
    """Which kind of server of ``prices`` a rank stands for."""
    interface: str = ""
    """On which network interface a run of one rank answers workers; "": on this machine only. Several ranks
    answer where they answer each other."""


def read_settings(options: Mapping[str, object]) -> LambdaSettings:
    """Read all options of the strategy.

    Raises:
        ConfigError: one is of another type, has a value that cannot be honoured, or is close to a known name.
        UnknownNameError: there is no such executor.
    """
    known = [one.name for one in fields(LambdaOptions)]
    own = {name: value for name, value in options.items() if name in known}
    others = {name: value for name, value in options.items() if name in _OTHERS}
    check_options("lambda", others, _OTHERS)
    rest = {name: value for name, value in options.items() if name not in own and name not in others}
    for name in rest:
        if near := difflib.get_close_matches(name, [*known, *_OTHERS], n=1, cutoff=_SURELY_MEANT):
            raise ConfigError(f"strategy 'lambda' has no option {name!r}; did you mean {near[0]!r}?")
    read = read_lambda_options(own)
    EXECUTORS.resolve(read.executor)
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


def threads_of(session: Session, asked: int) -> int:
    """Return ``asked``, or for 0 this rank's share of the cores of its machine, at least 1."""
    if asked:
        return asked
    on_machine = Counter(session.hosts)[session.hosts[session.topology.rank]]
    return max(1, len(os.sched_getaffinity(0)) // on_machine)
