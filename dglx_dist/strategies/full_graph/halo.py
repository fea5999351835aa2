"""The halo exchange for any PyTorch model, without DGL and without a dataset."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import check_equal, gather_int64, run_on_all_ranks
from dglx_dist.comm.exchange import Incoming, Outgoing, row_exchanges
from dglx_dist.comm.session import Session, current_session
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.options import is_integer
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PLAN_PHASE = "halo_plan"
"""Ledger phase for the requests that a new edge list sends."""


@final
class Halo:
    """Exchange of rows along edges between ranks, as a differentiable function.

    Every rank owns some nodes and the edges that end in them. ``halo(x)`` appends the rows for source nodes
    that other ranks own, so that a layer can send messages along all edges on this rank::

        halo = dx.Halo(num_owned, edge_index)
        source, target = halo.edge_index
        for layer in layers:
            messages = layer(halo(x)[source], x[target])
            x = messages.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages)

    Backward sends the gradients for these rows back to their owners, which add them. So the gradients of
    ``x`` are the same as in a single process, also on directed graphs. Weight gradients come from this rank's
    messages and rows alone. Add them over the ranks (sum, not mean) if the loss is a sum over all nodes.

    Call :func:`dglx_dist.init` first. The constructor, :meth:`rebuild`, calls and their backward are
    collective.

    Args:
        owners: Number of nodes on this rank, or the (N,) integer ranks of all nodes, equal on all ranks. With
            numbers, rank 0 owns the first ids, then rank 1, and so on. The rows in ``x`` are this rank's
            nodes, ordered by id.
        edge_index: (2, E) int64 global source and target ids for this rank's edges, in any order. Every
            target must be owned by this rank. E may be 0.
        target_owners: Owners of the targets, in the same form as ``owners``, if targets and sources are
            different nodes (a bipartite graph). By default both are the same nodes.

    Attributes:
        edge_index: (2, E) int64 positions. Sources are positions in ``halo(x)``, targets are positions among
            this rank's targets. The edge order is kept.
        halo_nodes: (H,) int64 global ids for the appended rows.
        num_owned: Number of source nodes on this rank.

    Raises:
        ConfigError: on all ranks, if ids are out of range, a target is owned by another rank, or the ranks
            pass different owners.
        PeerError: a rank did not take part.
    """

    edge_index: Tensor
    halo_nodes: Tensor
    num_owned: int

    def __init__(
        self, owners: int | Tensor, edge_index: Tensor, *, target_owners: int | Tensor | None = None
    ) -> None:
        self._session = current_session()
        self._number = self._session.next_number("halo") + 1
        self._check_call(f"Halo {self._number}, {target_owners is not None}")
        self._sources = _read_owners(owners, self._session, "owners")
        self._targets = self._sources
        if target_owners is not None:
            self._targets = _read_owners(target_owners, self._session, "target_owners")
        self.num_owned = self._sources.num_owned
        self._set_edges(edge_index)

    def rebuild(self, edge_index: Tensor) -> None:
        """Replace this rank's edges. Node owners stay the same. Every rank must call this.

        Read :attr:`edge_index` and :attr:`halo_nodes` again afterwards. This sends 8 bytes for each row in
        the new halo. Raises ConfigError like the constructor. The former edges then stay.
        """
        self._check_call(f"edges of Halo {self._number}")
        self._set_edges(edge_index)

    def _set_edges(self, edge_index: Tensor) -> None:
        session = self._session
        rank = session.topology.rank
        read_edges = partial(self._read_edges, edge_index)
        source_ids, target_rows = run_on_all_ranks(session, read_edges, ConfigError)
        source_owners, source_rows = self._sources.find(source_ids)

        # Each halo row arrives once, by owner and then by id.
        is_foreign = source_owners != rank
        halo_ids, positions = np.unique(source_ids[is_foreign], return_inverse=True)
        halo_owners, _ = self._sources.find(halo_ids)
        order = np.argsort(halo_owners, kind="stable")
        place_of_id = np.empty_like(order)
        place_of_id[order] = np.arange(len(order))
        source_rows[is_foreign] = self.num_owned + place_of_id[positions]
        halo_nodes = halo_ids[order]

        num_received = np.bincount(halo_owners, minlength=session.topology.world_size)
        received = tuple((peer, int(count)) for peer, count in enumerate(num_received) if count)
        sent = self._request(halo_nodes, num_received)
        layer = HaloLayer.from_rows(self.num_owned, halo_nodes, received, sent)
        self._exchange = HaloExchange(session, layer, self._number, uses_late_rows=False)
        self.halo_nodes = torch.from_numpy(halo_nodes)
        rows = torch.from_numpy(np.stack([source_rows, target_rows]))
        self.edge_index = rows.to(edge_index.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return own rows and halo rows (num_owned + H, ...) for the (num_owned, ...) own rows ``x``.

        The result is a new tensor.

        Raises:
            ConfigError: ``x`` has another number of rows.
            PeerError: a peer is dead, did not call within the session's time-out, or passes another dtype or
                width.
        """
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != self.num_owned:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ConfigError(
                f"a Halo got {given}, but this rank owns {self.num_owned} nodes. Pass their rows."
            )
        rows = self._exchange.exchange(x)
        return x.clone() if rows is x else rows

    def _check_call(self, name: str) -> None:
        """Raise ConfigError on all ranks if they make different calls. Every rank must call this."""
        check_equal(self._session, "the calls of dx.Halo", name, "make the same calls in the same order")

    def _read_edges(self, edge_index: Any) -> tuple[Array, Array]:
        """Return (E,) source ids and (E,) target rows. This calls no other rank."""
        if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or len(edge_index) != 2:
            shape = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
            raise ConfigError(f"edge_index is {shape}. Pass a (2, E) tensor of sources and targets.")
        if edge_index.dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"edge_index has dtype {edge_index.dtype}. Pass int64 or int32.")

        source_ids, target_ids = edge_index.detach().cpu().numpy().astype(np.int64)
        for ids, rows, role in ((source_ids, self._sources, "source"), (target_ids, self._targets, "target")):
            if not rows.has_all(ids):
                edge = int(np.argmax((ids < 0) | (ids >= rows.num_nodes)))
                raise ConfigError(
                    f"edge {edge} has the {role} {ids[edge]}, but there are {rows.num_nodes} nodes on all "
                    "ranks. Pass global ids."
                )

        rank = self._session.topology.rank
        target_owners, target_rows = self._targets.find(target_ids)
        is_elsewhere = target_owners != rank
        if is_elsewhere.any():
            edge = int(np.argmax(is_elsewhere))
            raise ConfigError(
                f"edge {edge} ends in node {target_ids[edge]}, which rank {target_owners[edge]} owns and not "
                f"rank {rank}. Pass each rank the edges that end in its own nodes."
            )
        return source_ids, target_rows

    def _request(self, halo_nodes: Array, num_received: Array) -> tuple[tuple[int, Array], ...]:
        """Send ``halo_nodes`` to their owners. Return the own rows that each peer requests."""
        session = self._session
        num_requested = gather_int64(num_received, session)[:, session.topology.rank]
        outgoing = []
        first = 0
        for peer, count in enumerate(num_received.tolist()):
            if count:
                ids = torch.from_numpy(halo_nodes[first : first + count])
                outgoing.append(Outgoing(rank=peer, rows=ids))
            first += count
        incoming = [
            Incoming(rank=peer, rows=torch.empty(count, dtype=torch.int64))
            for peer, count in enumerate(num_requested.tolist())
            if count
        ]
        exchange = row_exchanges(session).streams
        wait = exchange.post(outgoing, incoming, f"halo {self._number}", phase=PLAN_PHASE, layer=0)
        wait()

        sent_rows = []
        for message in incoming:
            # The ids come from a socket.
            requested_ids = message.rows.numpy()
            if not self._sources.are_all_on(session.topology.rank, requested_ids):
                raise PeerError(f"rank {message.rank} requests rows that this rank does not own.")
            sent_rows.append((message.rank, self._sources.find(requested_ids)[1]))
        return tuple(sent_rows)


@final
class _RowOwners:
    """Finds who owns a node, and its row there. Both arrays are None if ranks own consecutive ids."""

    def __init__(self, starts: Array, rank: int, owners: Array | None) -> None:
        self._starts = starts
        self._owners = owners
        self.num_nodes = int(starts[-1])
        self.num_owned = int(starts[rank + 1] - starts[rank])
        self._rows: Array | None = None
        if owners is not None:
            # Number each rank's nodes in id order.
            order = np.argsort(owners, kind="stable")
            self._rows = np.empty(len(owners), np.int64)
            self._rows[order] = np.arange(len(owners)) - starts[owners[order]]

    def has_all(self, ids: Array) -> bool:
        return not len(ids) or bool(ids.min() >= 0 and ids.max() < self.num_nodes)

    def are_all_on(self, rank: int, ids: Array) -> bool:
        return self.has_all(ids) and bool((self.find(ids)[0] == rank).all())

    def find(self, ids: Array) -> tuple[Array, Array]:
        """Return owners and rows for the (n,) ``ids``, which must exist."""
        if self._owners is None or self._rows is None:
            owners = np.searchsorted(self._starts, ids, side="right") - 1
            return owners, ids - self._starts[owners]
        return self._owners[ids], self._rows[ids]


def _read_owners(owners: Any, session: Session, option: str) -> _RowOwners:
    """Read :class:`Halo`'s ``owners`` or ``target_owners``. Every rank must call this."""
    num_ranks = session.topology.world_size

    def read() -> Array | None:
        if is_integer(owners):
            if owners < 0:
                raise ConfigError(f"{option}={owners} must be a number of nodes of at least 0.")
            return None
        if not isinstance(owners, Tensor) or owners.dim() != 1 or owners.dtype not in _INTEGERS:
            raise ConfigError(
                f"{option} is {owners!r}. Pass the number of nodes of this rank, or a 1-D integer tensor "
                "with the rank of each node."
            )
        ranks: Array = owners.cpu().numpy().astype(np.int32)
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < num_ranks:
            raise ConfigError(
                f"{option} has ranks from {ranks.min()} to {ranks.max()}, but there are {num_ranks}."
            )
        return ranks

    ranks = run_on_all_ranks(session, read, ConfigError)
    # Ranks that pass different owners would wait for rows that nobody sends.
    digest = "numbers" if ranks is None else str(zlib.crc32(ranks.data))
    check_equal(session, option, digest)
    if ranks is None:
        counts = gather_int64([int(owners)], session)[:, 0]
    else:
        counts = np.bincount(ranks, minlength=num_ranks)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return _RowOwners(starts, session.topology.rank, ranks)
