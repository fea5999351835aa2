"""How the cores of this machine are dealt out to emulated servers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from dglx_dist.errors import ConfigError

HeldBy = Literal["affinity", "quota", "affinity and quota", "nothing"]
_EXACT = 1e-9


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """What one server gets."""

    cores: tuple[int, ...]
    """Its processes run on these only."""
    share: float
    """Cores' worth of time that they get at most."""

    @property
    def needs_quota(self) -> bool:
        """Whether keeping to the cores is not enough to keep to the share."""
        return self.share < len(self.cores) - _EXACT


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def deal_out(cores: tuple[int, ...], servers: int, cpus: float | None) -> tuple[CpuShare, ...]:
    """Give each of (S,) servers its cores and its share of time on them.

    No two servers share a core where there are enough. Where there are more servers than cores, as many as
    fit share one core; where that leaves a server over, all run on all cores and only the share parts them.

    Args:
        cores: What there is, ascending.
        servers: S.
        cpus: Cores' worth for each server; None: whole cores as far as they go, else cores / S.

    Raises:
        ConfigError: all together would get more than there is.
    """
    if cpus is None:
        cpus = float(len(cores) // servers) or len(cores) / servers
    if cpus * servers > len(cores) + _EXACT:
        raise ConfigError(
            f"{servers} servers of {cpus:g} cores need {servers * cpus:g}, and there are {len(cores)}; "
            f"give each at most {len(cores) / servers:g}, or let computation be simulated"
        )
    width = math.ceil(cpus - _EXACT)
    on_one_core = math.floor(1 / cpus + _EXACT)
    if width * servers <= len(cores):
        own = [cores[server * width : (server + 1) * width] for server in range(servers)]
    elif on_one_core * len(cores) >= servers:
        own = [(cores[server % len(cores)],) for server in range(servers)]
    else:
        own = [cores] * servers
    return tuple(CpuShare(cores=these, share=cpus) for these in own)


def held_by(share: CpuShare, *, quota: bool) -> HeldBy:
    """Say what keeps a server to its share: ``quota`` tells whether a control group does.

    Its processes keep to its cores in any case; where that is not enough and there is no quota, nothing does.
    """
    if quota:
        return "affinity and quota"
    return "nothing" if share.needs_quota else "affinity"
