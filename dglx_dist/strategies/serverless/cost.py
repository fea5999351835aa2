"""Price tables, and what a run costs in dollars."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Annotated, TypeAlias, final

from dglx_dist.data.json_fields import Within, read_json, read_record
from dglx_dist.errors import ConfigError
from dglx_dist.registry import suggest_name

DEFAULT_PRICES = "aws"
MAX_FILE_BYTES = 1 << 20
_Dollars: TypeAlias = Annotated[float, Within(0, 1e6)]
_Step: TypeAlias = Annotated[float, Within(1e-6, 3600)]


@final
@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """Dollars for functions and servers on one date."""

    name: Annotated[str, Within(1, 80)]
    source: Annotated[str, Within(1, 400)]
    """Page that the prices were copied from."""
    date: Annotated[str, Within(1, 10)]
    """YYYY-MM-DD."""
    per_request: _Dollars
    per_gb_second: _Dollars
    """Dollars per second for a function with 1 GB (1024 MB) memory."""
    step_s: _Step
    """Billing step in seconds. Durations are rounded up to whole steps."""
    per_server_hour: Annotated[Mapping[str, _Dollars], Within(1, 10_000)]
    """Dollars per hour for one server, by instance type."""

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise ConfigError(f"'date' = {self.date!r}; give a date like 2025-01-31") from None

    def server(self, kind: str) -> float:
        """Return the dollars per hour of instance type ``kind``. Raises ConfigError if there is no price."""
        if kind not in self.per_server_hour:
            known = ", ".join(sorted(self.per_server_hour))
            hint = suggest_name(kind, self.per_server_hour)
            raise ConfigError(f"the price table {self.name!r} has no server {kind!r}{hint} (known: {known})")
        return self.per_server_hour[kind]

    def to_json(self) -> str:
        """Return the text for a file that :func:`prices` can read."""
        return json.dumps(vars(self), indent=2) + "\n"


def prices(name: str = DEFAULT_PRICES) -> PriceTable:
    """Return the price table "aws", "dorylus" (the paper's), or the one in the JSON file ``name``.

    Raises ConfigError if there is no such table or file, or if the file is invalid.
    """
    known = {table.name: table for table in _tables()}
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"there is no price table {name!r}{suggest_name(name, known)} (known: {', '.join(known)}); "
            "or give the path of a JSON file like the output of `dglx lambda prices`"
        )

    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    where = f"the price table {path}"
    return read_record(PriceTable, read_json(text, MAX_FILE_BYTES, where), where)


def _tables() -> tuple[PriceTable, ...]:
    # Within a family the price is proportional to the core count.
    sizes = {"large": 1, "xlarge": 2, "2xlarge": 4, "4xlarge": 8, "9xlarge": 18}
    servers = {}
    for family, price_of_large in (("c5", 0.085), ("c5n", 0.108)):
        for size, factor in sizes.items():
            servers[f"{family}.{size}"] = price_of_large * factor
    servers["p3.2xlarge"] = 3.06
    aws = PriceTable(
        name="aws",
        source="aws.amazon.com/lambda/pricing and /ec2/pricing/on-demand: us-east-1, x86, Linux",
        date="2025-01-01",
        per_request=0.20 / 1e6,
        per_gb_second=0.0000166667,
        step_s=0.001,
        per_server_hour=servers,
    )
    dorylus = replace(
        aws,
        name="dorylus",
        source="Thorpe et al., Dorylus, OSDI 2021: functions of 192 MB at 0.01125 $ an hour, by 100 ms",
        date="2020-11-01",
        per_gb_second=0.01125 / 3600 / (192 / 1024),
        step_s=0.1,
    )
    return aws, dorylus


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counters from a controller, its functions and a graph server. Counts from several runs can be added."""

    invocations: int = 0
    """Number of attempts that were sent."""
    cold: int = 0
    """Finished invocations for which a worker had to start."""
    warm: int = 0
    """Finished invocations on a running worker."""
    relaunched: int = 0
    lost: int = 0
    """Relaunches because a worker died. Late workers are not counted here."""
    refused: int = 0
    """Duplicate results."""
    billed_s: float = 0.0
    """Seconds that the finished invocations took, not rounded."""
    gb_s: float = 0.0
    """GB-seconds (memory x duration) over the finished invocations. Each duration is rounded up to a step."""
    server_seconds: float = 0.0
    """Seconds that graph servers trained, summed over the ranks."""

    @property
    def num_unbilled(self) -> int:
        """Number of invocations without a known duration, because they run, were killed or not reported."""
        return self.invocations - self.cold - self.warm

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@final
@dataclass(frozen=True, kw_only=True)
class Bill:
    """Dollars that one run costs."""

    functions: float
    """Dollars for invoking functions and for their time."""
    servers: float
    simulated: bool
    """Whether the functions ran elsewhere than at the provider, so that their dollars are an estimate."""
    prices: str
    """The price table's name and date."""
    unknown: int = 0
    """Number of invocations with unknown duration. If there are any, ``functions`` is a lower bound."""

    @property
    def total(self) -> float:
        return self.functions + self.servers

    def __str__(self) -> str:
        parts = f"functions {dollars(self.functions)}, servers {dollars(self.servers)}"
        return f"{dollars(self.total)} ({parts}; {self.label})"

    @property
    def label(self) -> str:
        """Caption for the figures wherever they are shown."""
        source = "simulated: no function was paid for" if self.simulated else "functions on AWS"
        label = f"{source}; prices {self.prices}"
        if self.unknown:
            label += f"; at least, for {self.unknown} durations are not known"
        return label


def billed_gb_seconds(duration_s: float, memory_mb: int, prices: PriceTable) -> float:
    """Return one invocation's GB-seconds, its duration rounded up to whole steps as ``prices`` says."""
    if not duration_s >= 0 or math.isinf(duration_s):
        raise ConfigError(f"an invocation took {duration_s} s; give seconds of at least 0")
    if memory_mb < 1:
        raise ConfigError(f"a function has {memory_mb} MB; give at least 1")

    # Fractions are exact, while 0.1 s has no exact binary form. Less than a nanosecond is clock noise.
    step = Fraction(str(prices.step_s))
    duration = Fraction(round(duration_s * 1e9), 10**9)
    num_steps = math.ceil(duration / step)
    return float(num_steps * step) * memory_mb / 1024


def bill(
    functions: Counts, server_seconds: Mapping[str, float], prices: PriceTable, *, simulated: bool
) -> Bill:
    """Return what a run costs in dollars, given the seconds that servers ran by instance type."""
    return Bill(
        functions=functions.invocations * prices.per_request + functions.gb_s * prices.per_gb_second,
        servers=math.fsum(seconds / 3600 * prices.server(kind) for kind, seconds in server_seconds.items()),
        simulated=simulated,
        prices=f"{prices.name} of {prices.date}",
        unknown=functions.num_unbilled,
    )


def dollars(amount: float) -> str:
    """Format dollars: 12.3 becomes "$12.30", and 0.000123 becomes "$0.000123"."""
    if amount >= 1 or amount == 0:
        return f"${amount:.2f}"
    return f"${amount:.3g}"
