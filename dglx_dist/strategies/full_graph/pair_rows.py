"""Node rows for pair graphs, which the ranks in a full-graph step fetch from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.codec import WireDtype
from dglx_dist.comm.collectives import gather_arrays
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.internals.pytorch import replace_floats, tree_leaves
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.graph_types import split_nodes
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import NO_IDS, HaloLayer, RankPlan
from dglx_dist.strategies.full_graph.plan_builder import PlanStep, open_plan_exchange
from dglx_dist.strategies.full_graph.typed_block import join_gradients

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
@dataclass(frozen=True, kw_only=True)
class TypePairRows:
    """Nodes of one type in a batch of pairs, and the exchange for their rows."""

    exchange: HaloExchange
    num_own: int
    """Number of last-layer rows on this rank."""
    nodes: Tensor
    """(n,) int64 distinct nodes in the pairs."""
    kept_rows: Tensor
    """(k,) int64 last-layer rows that this rank or another one needs."""
    positions: Tensor
    """(n,) int64 position of each node among the kept rows and the received rows after them."""

    def gather(self, h: Tensor) -> Tensor:
        """Return (n, ...) rows for the nodes. ``h`` are this rank's (num_own, ...) last-layer rows."""
        kept_rows = self.kept_rows.to(h.device)
        positions = self.positions.to(h.device)
        sources = self.exchange.exchange(h.index_select(0, kept_rows))
        return sources.index_select(0, positions)


@final
class PairRows:
    """Node rows for one batch of pairs, from all ranks that computed them.

    Backward adds all ranks' gradients on the rank that computed a row. Rows and gradients are sent in the
    format ``wire_dtype``.
    """

    def __init__(self, types: Mapping[str, TypePairRows]) -> None:
        self._types = types
        self.num_calls = 0
        self._num_passes = 0
        self._note_nodes: Callable[[Tensor], None] | None = None
        self._weight = 1.0

    def __call__(self, h: Any) -> Any:
        """Return (n, ...) rows for the pair graph's nodes. Every rank must call it.

        ``h`` are the last layer's (own rows, ...) rows. With several node types it is a dictionary by type,
        and so is the result. All ranks must pass the same types. Raises ConfigError if ``h`` has other rows.
        """
        own_rows = self._read_own_rows(h)
        self.num_calls += 1

        # All ranks exchange the types in the same order. A rank may score no pairs with some type, but in
        # backward it must reach its peers' exchanges.
        gathered_rows = {ntype: self._types[ntype].gather(own_rows[ntype]) for ntype in sorted(own_rows)}
        rows = join_gradients(gathered_rows)
        if self._note_nodes is None:
            rows = weigh_gradients(rows, self._weight)
        elif len(self._types) == 1:
            # In a pass over several node types, dropouts do not know which nodes the rows belong to.
            for ntype, type_rows in rows.items():
                self._note_nodes(self._types[ntype].nodes.to(type_rows.device))

        if isinstance(h, Mapping):
            return rows
        (single_rows,) = rows.values()
        return single_rows

    def _read_own_rows(self, h: Any) -> Mapping[str, Tensor]:
        """Return the last layer's rows by node type. Raise ConfigError if they have another shape."""
        ntypes = [*self._types]
        if not isinstance(h, Mapping):
            if len(ntypes) > 1:
                raise ConfigError(
                    f"gather_pair_rows got {_describe(h)}, but the graph has the node types "
                    f"{', '.join(ntypes)}; pass a dictionary of rows by node type"
                )
            h = {ntypes[0]: h}

        for ntype, rows in h.items():
            if ntype not in ntypes:
                raise ConfigError(
                    f"gather_pair_rows got rows of {ntype!r}, but the node types are {', '.join(ntypes)}"
                )
            num_own = self._types[ntype].num_own
            if not isinstance(rows, Tensor) or rows.dim() == 0 or len(rows) != num_own:
                raise ConfigError(
                    f"gather_pair_rows got {_describe(rows)} for nodes of type {ntype!r}, but the last layer "
                    f"of this rank has {num_own} rows of them; pass what the last layer returned for "
                    "blocks[-1], and call it once per batch"
                )
        return h

    @contextmanager
    def in_model(self, note_nodes: Callable[[Tensor], None]) -> Iterator[None]:
        """Run a wrapped model, which weighs the gradients at its output if it calls this object.

        ``note_nodes`` is then called with the (n,) int64 nodes that the rows belong to.
        """
        self._num_passes += 1
        self._note_nodes = note_nodes
        try:
            yield
        finally:
            self._note_nodes = None

    def check_calls(self, num_calls: int = 0) -> None:
        """Raise ConfigError if a model has run and this object was not called since ``num_calls`` calls."""
        if self._num_passes and self.num_calls == num_calls:
            raise ConfigError(
                "pairs of nodes were scored by the rows of this rank's own nodes, which are not the nodes of "
                "the pair graph; call h = dx.gather_pair_rows(pair_graph, h) after the last layer"
            )

    def expect(self, output: Any, weight: float) -> None:
        """Weigh gradients by ``weight`` here, since the model returned rows without calling this object.

        Backward through ``output`` raises ConfigError if this object is not called before.
        """
        self._weight = weight
        num_calls = self.num_calls

        def check_gradient(_: Tensor) -> None:
            self.check_calls(num_calls)

        for leaf in tree_leaves(output):
            if torch.is_tensor(leaf) and leaf.requires_grad:
                leaf.register_hook(check_gradient)  # type: ignore[no-untyped-call]  # torch leaves it bare


def _describe(rows: Any) -> str:
    return str(tuple(rows.shape)) if isinstance(rows, Tensor) else type(rows).__name__


@final
class PairPlanner:
    """Finds which last-layer rows the ranks send, for each batch of pairs. Construction is collective.

    A rank knows which rank holds every node, at 4 bytes per node.
    """

    def __init__(self, g: DistGraph, plan: RankPlan, wire: WireDtype) -> None:
        self._session = g.session
        self._wire = wire
        self._number = len(plan.layers) + 1
        self._nodes = split_nodes(g, plan.rows(len(plan.layers)))
        self._holders = {ntype: np.empty(g.num_nodes(ntype), np.int32) for ntype in self._nodes}
        for ntype, own_nodes in self._nodes.items():
            for rank, nodes in enumerate(gather_arrays(own_nodes, g.session)):
                self._holders[ntype][nodes] = rank
        self._exchange, _ = open_plan_exchange(g.session)

    def plan(self, nodes: Mapping[str, Array]) -> PairRows:
        """Return the rows for the (n,) int64 ascending ``nodes`` by type. Every rank must call it.

        The ledger counts 8 bytes for each requested id under ``plan``.
        """
        topology = self._session.topology
        ranks = range(topology.world_size)
        nodes_by_holder = {ntype: self._split_by_holder(ntype, nodes[ntype]) for ntype in self._nodes}
        outgoing = {rank: [by_holder[rank] for by_holder in nodes_by_holder.values()] for rank in ranks}
        # This rank requests nothing from itself.
        outgoing[topology.rank] = [NO_IDS] * len(nodes_by_holder)
        with self._exchange.job():
            step = PlanStep(name="rows of pairs", among=ranks, outgoing=outgoing)
            received = self._exchange.exchange(step)

        types = {}
        for index, (ntype, by_holder) in enumerate(nodes_by_holder.items()):
            requested = {rank: arrays[index] for rank, arrays in received.items()}
            types[ntype] = self._plan_type(ntype, nodes[ntype], by_holder, requested)
        return PairRows(types)

    def _split_by_holder(self, ntype: str, nodes: Array) -> list[Array]:
        """Return the nodes that each rank computes, by rank."""
        holders = self._holders[ntype][nodes]
        order = np.argsort(holders, kind="stable")
        bounds = np.searchsorted(holders[order], np.arange(1, self._session.topology.world_size))
        return np.split(nodes[order], bounds)

    def _plan_type(
        self, ntype: str, nodes: Array, by_holder: Sequence[Array], requested: Mapping[int, Array]
    ) -> TypePairRows:
        """Return the rows for ``nodes`` and their exchange.

        ``by_holder`` has the nodes that each rank computes, and ``requested`` the nodes that peers need.
        """
        rank = self._session.topology.rank
        own_nodes = self._nodes[ntype]
        sent_rows = {}
        for peer, ids in requested.items():
            if len(ids):
                sent_rows[peer] = self._find_rows(ntype, peer, ids)
        own_rows = np.searchsorted(own_nodes, by_holder[rank])
        kept_rows = np.unique(np.concatenate([own_rows, *sent_rows.values()]))
        received = [(peer, ids) for peer, ids in enumerate(by_holder) if peer != rank and len(ids)]
        layer = HaloLayer.from_rows(
            own_rows=len(kept_rows),
            halo_nodes=np.concatenate([NO_IDS, *(ids for _, ids in received)]),
            receive=tuple((peer, len(ids)) for peer, ids in received),
            send=tuple((peer, np.searchsorted(kept_rows, rows)) for peer, rows in sent_rows.items()),
        )

        # This rank's nodes are among the kept rows. Received rows follow.
        positions = np.empty(len(nodes), np.int64)
        positions[np.searchsorted(nodes, by_holder[rank])] = np.searchsorted(kept_rows, own_rows)
        halo_positions = np.searchsorted(nodes, layer.halo_nodes)
        positions[halo_positions] = len(kept_rows) + np.arange(len(layer.halo_nodes))
        return TypePairRows(
            exchange=HaloExchange(self._session, layer, self._number, self._wire),
            num_own=len(own_nodes),
            nodes=torch.from_numpy(nodes),
            kept_rows=torch.from_numpy(kept_rows),
            positions=torch.from_numpy(positions),
        )

    def _find_rows(self, ntype: str, rank: int, ids: Array) -> Array:
        """Return (k,) rows for the own nodes ``ids``, which another rank requests."""
        if not np.isin(ids, self._nodes[ntype]).all():
            raise PeerError(
                f"rank {rank} requests rows of nodes that this rank does not compute; run the same version "
                "on all ranks, on the same files"
            )
        return np.searchsorted(self._nodes[ntype], ids)


def weigh_gradients(output: Any, weight: float) -> Any:
    """Multiply the gradients by ``weight`` at all (nested) tensors in ``output``."""

    def weigh(*floats: Tensor) -> list[Tensor]:
        return [WeighGradients.apply(tensor, weight) for tensor in floats]  # type: ignore[no-untyped-call]  # torch leaves it bare

    return replace_floats(output, weigh)


class WeighGradients(torch.autograd.Function):
    """Identity that multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight, None
