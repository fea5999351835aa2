"""Which server holds which parts, and which rank answers for a server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array


@dataclass(frozen=True)
class Placement:
    """The parts of a dataset laid onto servers in contiguous blocks, as even as they go.

    Raises:
        ConfigError: there are fewer parts than servers; the message has the command that repartitions.
    """

    num_parts: int
    topology: Topology

    def __post_init__(self) -> None:
        servers = self.topology.num_servers
        if self.num_parts < servers:
            raise ConfigError(
                f"the dataset has {self.num_parts} part(s) but the run has {servers} servers; partition it "
                f"again with `dglx partition DATA --parts {servers} --out DIR`, or start "
                f"{self.num_parts} server(s)"
            )

    @cached_property
    def server_of_part(self) -> Array:
        """(P,) int64: server of part p is p * S // P."""
        return np.arange(self.num_parts, dtype=np.int64) * self.topology.num_servers // self.num_parts

    def parts_of_server(self, server: int) -> range:
        """Return the parts of ``server``: consecutive, and at least one."""
        first, last = np.searchsorted(self.server_of_part, [server, server + 1], side="left")
        return range(int(first), int(last))

    @property
    def local_parts(self) -> range:
        """The parts of this rank's own server."""
        return self.parts_of_server(self.topology.server)

    def server_offsets(self, offsets: Array) -> Array:
        """Merge the id offsets of parts into those of servers.

        Args:
            offsets: (P + 1,) int64; part p owns the ids ``offsets[p]:offsets[p + 1]``.

        Returns:
            (S + 1,) int64; server s owns the ids ``[s]:[s + 1]``.
        """
        servers = np.arange(self.topology.num_servers + 1)
        return np.asarray(offsets, dtype=np.int64)[np.searchsorted(self.server_of_part, servers, side="left")]

    def node_range(self, server: int, offsets: Array) -> tuple[int, int]:
        """Return the first id of ``server`` and the one after its last, from the parts' ``offsets``."""
        bounds = self.server_offsets(offsets)
        return int(bounds[server]), int(bounds[server + 1])

    def serving_rank(self, server: int) -> int:
        """Return the rank that this rank asks for rows of ``server``; itself when that is its own server.

        The ranks of one server spread over those of another: local rank i asks local rank i modulo their
        number.
        """
        if server == self.topology.server:
            return self.topology.rank
        ranks = self.topology.ranks_of_server(server)
        return int(ranks[self.topology.local_rank % len(ranks)])
