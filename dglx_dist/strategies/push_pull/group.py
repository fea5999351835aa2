"""Which ranks hold all columns together, and which hold the same ones (P3, section 3.5: caching)."""

from __future__ import annotations

from dataclasses import dataclass

from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that push and pull among each other.

    The world is cut into groups of consecutive ranks, each of which holds every column once. Pushing and
    pulling stay inside the own group; what a part learns is summed with its replicas in the other groups.
    """

    rank: int
    """The own rank."""
    members: tuple[int, ...]
    """(N_f,) ranks by part, the own one among them."""
    replicas: tuple[int, ...]
    """(W / N_f,) ranks that hold the own columns, one for each group, in their order."""

    @property
    def part(self) -> int:
        """Which part the own rank is; also its place among the owners of the group."""
        return self.members.index(self.rank)

    @property
    def size(self) -> int:
        """N_f, the number of parts."""
        return len(self.members)

    @property
    def place(self) -> int:
        """The own place among the replicas."""
        return self.replicas.index(self.rank)

    @property
    def next_replica(self) -> int:
        """The replica to which a ring sends, the own rank if there is no other."""
        return self.replicas[(self.place + 1) % len(self.replicas)]

    @property
    def others(self) -> tuple[tuple[int, int], ...]:
        """(part, rank) of the other members."""
        return tuple((part, rank) for part, rank in enumerate(self.members) if rank != self.rank)


def make_group(session: Session, size: int) -> Group:
    """Return the own group when all ranks are cut into groups of ``size``.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """
    rank, world_size = session.topology.rank, session.topology.world_size
    if size < 1 or world_size % size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"group_size={size} does not divide the {world_size} ranks; choose one of {', '.join(divisors)}"
        )
    first = rank // size * size
    return Group(
        rank=rank,
        members=tuple(range(first, first + size)),
        replicas=tuple(range(rank % size, world_size, size)),
    )
