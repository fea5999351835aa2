"""What a job knows about the rank that does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Place:
    """One server of the crew, as its ranks see it."""

    address: str
    """IPv4, reached by all servers."""
    device: str | None
    """Name of its card; None: plain loopback."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Where and as whom a job runs; torchrun's environment is set, and no session is open."""

    rank: int
    world_size: int
    ranks_per_server: int
    places: tuple[Place, ...]
    """(S,) by server; ranks of one server are contiguous."""
    folder: Path
    """Shared by all ranks and jobs of the crew; gone when the crew is."""
    number: int
    """Of the job in this crew, from 0: the same on all ranks."""
    timeout_s: float
    """Seconds after which the crew gives the job up."""

    @property
    def server(self) -> int:
        """Server of this rank."""
        return self.rank // self.ranks_per_server

    @property
    def local_rank(self) -> int:
        """Position of this rank on its server."""
        return self.rank % self.ranks_per_server

    @property
    def device(self) -> str | None:
        """Name of this server's card; None: plain loopback, which has no counters of its own."""
        return self.places[self.server].device

    def card_sent(self) -> int | None:
        """Bytes that this server's card has sent so far, headers included; None on plain loopback."""
        if self.device is None:
            return None
        from scripts.netlab.servers import read_card

        return read_card(self.device).sent

    def peak_bytes(self) -> int:
        """Largest resident memory of this rank since the job began, shared pages included."""
        from dglx_dist.data.storage.files import peak

        return peak()
