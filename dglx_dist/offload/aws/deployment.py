"""What a function on AWS should be."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.aws.clients import Place

HANDLER = "dglx_dist.offload.worker.function.handler"
TAG = "dglx_dist"
"""Marks what was made here: nothing else is changed or removed."""
MAX_DIRECT_BYTES = 50 * 1024 * 1024
"""A larger package goes by S3."""
MEMORY_MB, MAX_TIMEOUT_S = (128, 10_240), 900
EVENT_AGE_S = 60
"""An event that waits longer for a worker is dropped: by then another was sent in its place."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUNTIME = re.compile(r"python3\.[0-9]{1,2}")
ARCHITECTURES = {"x86_64": "x86_64", "arm64": "aarch64"}
"""AWS's name of a processor to that of compiled files."""


@final
@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One function.

    Raises:
        ConfigError: a field is out of the bounds of AWS, or there is no package.
    """

    name: str
    package: Path
    """The zip that ``dglx lambda package`` wrote."""
    role: str | None = None
    """Name or ARN of the role as which it runs; None: a role NAME-role is made."""
    memory_mb: int = 192
    """AWS gives cores by the memory: one for 1769 MB."""
    timeout_s: int = 60
    subnets: tuple[str, ...] = ()
    """Subnets from which the graph servers can be reached; none: the internet."""
    security_groups: tuple[str, ...] = ()
    bucket: str | None = None
    """S3 bucket for a package above 50 MB."""
    runtime: str | None = None
    """Such as "python3.12"; None: that of the package."""
    architecture: str = "x86_64"
    place: Place = field(default_factory=Place)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.package.is_file():
            raise ConfigError(f"there is no package {self.package}; write it with `dglx lambda package`")
        low, high = MEMORY_MB
        if not low <= self.memory_mb <= high:
            raise ConfigError(f"a function of {self.memory_mb} MB; AWS offers {low} to {high}")
        if not 1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"a time-out of {self.timeout_s} s; AWS offers 1 to {MAX_TIMEOUT_S}")
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError(
                f"subnets {list(self.subnets)} and security groups {list(self.security_groups)}: a function "
                "in a VPC needs both, any other none"
            )
        if self.runtime is not None and _RUNTIME.fullmatch(self.runtime) is None:
            raise ConfigError(f"runtime {self.runtime!r} runs no Python; give one like python3.12")
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture {self.architecture!r}; give one of {', '.join(ARCHITECTURES)}")
        if self.bucket is None and self.package.stat().st_size > MAX_DIRECT_BYTES:
            size = self.package.stat().st_size / 1024**2
            raise ConfigError(
                f"{self.package} has {size:.1f} MB and AWS takes {MAX_DIRECT_BYTES >> 20} directly; give an "
                "S3 bucket with --bucket"
            )


def check_name(name: str) -> None:
    """Raise ConfigError unless a function can be called ``name``."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"no function can be called {name!r}; give 1 to 64 letters, digits, - and _")
