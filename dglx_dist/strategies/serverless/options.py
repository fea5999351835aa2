"""Options of strategy ``lambda``, parsed and validated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, TypeAlias, final

from dglx_dist.errors import ConfigError
from dglx_dist.options import Check, between, check_names, check_ranges, option, read_options
from dglx_dist.strategies.serverless.cost import DEFAULT_PRICES, PriceTable, prices
from dglx_dist.strategies.serverless.executors.base import EXECUTORS

Mode: TypeAlias = Literal["no_pipe", "pipe", "async"]
Scheme: TypeAlias = Literal["keep", "xavier_uniform", "xavier_normal", "he_uniform", "he_normal"]

DEFAULT_SERVER = "c5.2xlarge"
"""Server type of the paper's graph servers."""


@final
@dataclass(frozen=True, kw_only=True)
class LambdaOptions:
    """The user's options. Raises ConfigError if a value is out of range, or conflicts with another one."""

    mode: Mode = option("pipe", "no_pipe: one phase at a time; pipe: exact; async: no barriers.")
    staleness: int = option(0, "S of async: lead over the slowest interval.", check=between(0, 1000))
    switch_at: float = option(
        0.0,
        "Training accuracy of an epoch after which async trains synchronously; 0: never.",
        check=Check(lambda value: 0 <= value <= 1, "an accuracy from 0 to 1"),
    )
    intervals: int = option(8, "Per graph server.", check=between(1, 10_000))
    threads: int = option(0, "Threads of a graph server; 0: its cores.", check=between(0, 1024))
    parameter_servers: int = option(1, "Ranks that hold weights: the first ones.", check=between(1, 1024))
    executor: str = option("local", "Where workers run: local, inline, aws or http.")
    workers: int = option(0, "Tasks in flight per graph server; 0: tuned.", check=between(0, 10_000))
    retries: int = option(4, "Further attempts at a task before the run fails.", check=between(0, 1000))
    initialise: Scheme = option("keep", "How ``wrap`` draws trained weights, by the seed; biases are 0.")
    prices: str = field(default=DEFAULT_PRICES, repr=False)
    """Name or file of a price table."""
    server: str = field(default=DEFAULT_SERVER, repr=False)
    """Server type of the table by which a rank is billed."""
    edge_tasks: Literal["auto", "workers", "servers"] = option(
        "auto", "Where steps on edges run; auto: on graph servers unless they compute much for each byte."
    )
    interface: str = field(default="", repr=False)
    """Network interface on which a run of one rank answers workers, or "" for loopback only.

    With several ranks, workers use the addresses of the ranks among each other."""
    executor_options: Mapping[str, object] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, "option {name}={value!r}")
        for name, value in (("staleness", self.staleness), ("switch_at", self.switch_at)):
            if value and self.mode != "async":
                raise ConfigError(
                    f"option {name}={value} has no meaning with mode={self.mode!r}, which has "
                    "a barrier at every Scatter; add mode='async', or leave it out"
                )

    @cached_property
    def price_table(self) -> PriceTable:
        # The table is read once, so that the bill at the end of a long run does not need the user's file.
        return prices(self.prices)

    @property
    def in_process(self) -> bool:
        """Whether graph servers do all work themselves, so that no function is paid for."""
        return EXECUTORS.get(self.executor).in_process


def read_lambda_options(options: Mapping[str, object]) -> LambdaOptions:
    """Read the options of the strategy and those of its executor. Raises ConfigError if one is invalid."""
    names = [declared.name for declared in fields(LambdaOptions) if declared.name != "executor_options"]
    # Options with other names belong to the executor.
    strategy_options = {}
    executor_options = {}
    for name, value in options.items():
        if name in names:
            strategy_options[name] = value
        else:
            executor_options[name] = value

    parsed = read_options("strategy 'lambda'", LambdaOptions, strategy_options, names)
    parsed = replace(parsed, executor_options=executor_options)
    # An unknown server type raises here, and not when the bill is written.
    parsed.price_table.server(parsed.server)
    known_names = [*names, *EXECUTORS.get(parsed.executor).option_names]
    check_names(f"strategy 'lambda' with executor={parsed.executor!r}", executor_options, known_names)
    return parsed
