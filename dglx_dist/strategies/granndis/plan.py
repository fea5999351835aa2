"""What one rank computes and exchanges at every layer: the record between planning and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from dglx_dist.records import Array

Received: TypeAlias = tuple[tuple[int, int], ...]
"""(rank, rows that come from it), ascending by rank; ranks that send nothing are left out."""

Sent: TypeAlias = tuple[tuple[int, Array], ...]
"""(rank, (n,) int64 own rows that go to it), ascending by rank; ranks that get nothing are left out."""


@final
@dataclass(frozen=True, kw_only=True)
class HaloLayer:
    """One layer's block on one rank, l of ``1..L`` (algorithms 3.1, 3.2b).

    Its sources are the rank's own rows of the layer before, then the halo: rows that other ranks hold,
    contiguous by rank in ascending order and ascending by id within a rank. Its targets are the first
    ``targets`` of the own rows. All in-edges of every target are here, each once, and no others.
    """

    own_rows: int
    """Rows of layer l - 1 that this rank holds: at layer 1 rows of the features."""
    targets: int
    """Rows of layer l that this rank computes; at most :attr:`own_rows`."""
    indptr: Array
    """(targets + 1,) int64; the in-edges of target i are at ``indptr[i]:indptr[i + 1]``."""
    indices: Array
    """(E,) int64 sources: below :attr:`own_rows` own rows, then places in the halo."""
    edge_ids: Array
    """(E,) int64 global edge ids."""
    halo_nodes: Array
    """(n_halo,) int64 global ids of the halo's rows, in the order in which they arrive."""
    receive: Received
    """Which ranks the halo comes from; the counts add up to n_halo."""
    send: Sent
    """Which own rows others need; as many as the peer's :attr:`receive` says, in the order of their ids."""

    @property
    def num_sources(self) -> int:
        """Own rows and halo together."""
        return self.own_rows + len(self.halo_nodes)

    def halo_of(self, rank: int) -> Array:
        """Return the (n,) ascending int64 global ids of the halo's rows that ``rank`` holds."""
        first = 0
        for other, count in self.receive:
            if other == rank:
                return self.halo_nodes[first : first + count]
            first += count
        return self.halo_nodes[:0]


@final
@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's share of a full-graph step.

    Rows are ordered by the last layer that needs them, latest first, and by id within: the rows of layer l
    are the first ones of the rows of layer l - 1, and their in-edges the first ones of layer l - 1's.
    """

    nodes: Array
    """(n,) int64 global ids of the rows of the features that this rank holds."""
    layers: tuple[HaloLayer, ...]
    """The L layers, input-most first."""
    hops: int
    """k: how many layers the server computes without others (0: full_graph, L: nothing crosses)."""
    server_nodes: int
    """|R_i^0|: rows of the features that the ranks of this server hold together."""
    inner_nodes: int
    """|I_i|: nodes that the server owns."""
    external_nodes: int
    """|R_i^0 without I_i|: rows of the features that come from other servers, once."""

    @property
    def seeds(self) -> int:
        """Rows of the output that this rank computes."""
        return self.layers[-1].targets

    @property
    def expansion(self) -> float:
        """D_i: how many rows of the features the server holds per node of its own (algorithms 3.1).

        Below 1 where the seeds do not need all of the server's own nodes.
        """
        return self.server_nodes / self.inner_nodes

    def rows(self, level: int) -> Array:
        """Return the (n_l,) int64 global ids of this rank's rows of the output of layer ``level``, 0..L."""
        count = self.layers[0].own_rows if level == 0 else self.layers[level - 1].targets
        return self.nodes[:count]
