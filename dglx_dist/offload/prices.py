"""What functions and servers cost: dated tables with their source, which a file can replace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields, read_json
from dglx_dist.registry import did_you_mean

DEFAULT_PRICES = "aws"
MAX_FILE_BYTES = 1 << 20
_MOST_DOLLARS = 1e6


@final
@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """Dollars for functions and servers at one date.

    Raises:
        ConfigError: a price is negative or no number, the date is none, or there is no server.
    """

    name: str
    source: str
    """Where the prices stand."""
    date: str
    """From when they are, YYYY-MM-DD."""
    per_request: float
    """Dollars of one invocation."""
    per_gb_second: float
    """Dollars of a function with 1 GB (1024 MB) of memory in one second."""
    step_s: float
    """Durations are rounded up to whole steps of it."""
    per_server_hour: Mapping[str, float]
    """Dollars of one server in one hour, by kind."""

    def __post_init__(self) -> None:
        fields = Fields(vars(self), f"the price table {self.name!r}")
        fields.number("per_request", 0, _MOST_DOLLARS)
        fields.number("per_gb_second", 0, _MOST_DOLLARS)
        fields.number("step_s", 1e-6, 3600)
        servers = Fields(self.per_server_hour, f"the price table {self.name!r}, 'per_server_hour',")
        for kind in self.per_server_hour:
            servers.number(kind, 0, _MOST_DOLLARS)
        if not self.per_server_hour:
            fields.refuse("per_server_hour", "at least one kind of server and its dollars per hour")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            fields.refuse("date", "a date like 2025-01-31")
        object.__setattr__(self, "per_server_hour", MappingProxyType(dict(self.per_server_hour)))

    def server(self, kind: str) -> float:
        """Return the dollars of one hour of ``kind``.

        Raises:
            ConfigError: it is not in the table.
        """
        if kind not in self.per_server_hour:
            known = ", ".join(sorted(self.per_server_hour))
            hint = did_you_mean(kind, self.per_server_hour)
            raise ConfigError(f"the price table {self.name!r} has no server {kind!r}{hint} (known: {known})")
        return self.per_server_hour[kind]

    def to_json(self) -> str:
        """Return the table as the text of a file that :func:`prices` reads."""
        return json.dumps({**vars(self), "per_server_hour": dict(self.per_server_hour)}, indent=2) + "\n"


def prices(name: str = DEFAULT_PRICES) -> PriceTable:
    """Return the table ``name``: one of :func:`price_names`, or the path of a JSON file with the same fields.

    Raises:
        ConfigError: there is no such table or file, or it is damaged.
    """
    known = {table.name: table for table in _tables()}
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"there is no price table {name!r}{did_you_mean(name, known)} (known: {', '.join(known)}); "
            "a JSON file with the fields of one is taken as well, see `dglx lambda prices`"
        )
    return _read(path)


def price_names() -> tuple[str, ...]:
    """Return the names of the tables that need no file."""
    return tuple(table.name for table in _tables())


def _read(path: Path) -> PriceTable:
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    where = f"the price table {path}"
    fields = Fields(read_json(text, MAX_FILE_BYTES, where), where)
    servers = fields.any("per_server_hour")
    if not isinstance(servers, Mapping):
        fields.refuse("per_server_hour", "an object with dollars by kind of server")
    table = PriceTable(
        name=fields.text("name", 80),
        source=fields.text("source", 400),
        date=fields.text("date", 10),
        per_request=fields.number("per_request", 0, _MOST_DOLLARS),
        per_gb_second=fields.number("per_gb_second", 0, _MOST_DOLLARS),
        step_s=fields.number("step_s", 1e-6, 3600),
        per_server_hour=servers,
    )
    fields.end()
    return table


def _tables() -> tuple[PriceTable, ...]:
    return (
        PriceTable(
            name="aws",
            source="aws.amazon.com/lambda/pricing and /ec2/pricing/on-demand: us-east-1, x86, Linux",
            date="2025-01-01",
            per_request=0.20 / 1e6,
            per_gb_second=0.0000166667,
            step_s=0.001,
            per_server_hour=_servers(),
        ),
        PriceTable(
            name="dorylus",
            source="Thorpe et al., Dorylus, OSDI 2021: functions of 192 MB at 0.01125 $ an hour, by 100 ms",
            date="2020-11-01",
            per_request=0.20 / 1e6,
            per_gb_second=0.01125 / 3600 / (192 / 1024),
            step_s=0.1,
            per_server_hour=_servers(),
        ),
    )


def _servers() -> dict[str, float]:
    """Return dollars per hour; within a family they go with the number of cores."""
    sizes = {"large": 1, "xlarge": 2, "2xlarge": 4, "4xlarge": 8, "9xlarge": 18}
    families = {"c5": 0.085, "c5n": 0.108}
    found = {f"{name}.{size}": dollars * n for name, dollars in families.items() for size, n in sizes.items()}
    return {**found, "p3.2xlarge": 3.06}
