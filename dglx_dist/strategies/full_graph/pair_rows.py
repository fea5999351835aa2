"""Rows of the nodes of pair graphs, which the ranks of a full-graph step fetch from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.codec import WireDtype
from dglx_dist.comm.collectives import gather_arrays
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.internals.pytorch import replace_floats, tree_leaves
from dglx_dist.records import Array
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.halo_plan import NO_IDS, HaloLayer, RankPlan
from dglx_dist.strategies.full_graph.plan_builder import PlanStep, open_plan_exchange

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


@final
class PairRows:
    """The rows of the nodes of one batch of pairs, of all ranks that computed them.

    Backward adds the gradients of all ranks on the rank that computed a row. Rows and gradients are sent in
    the format ``wire_dtype``.
    """

    def __init__(
        self, exchange: HaloExchange, num_own: int, nodes: Tensor, kept_rows: Tensor, positions: Tensor
    ) -> None:
        self._exchange, self._num_own = exchange, num_own
        self._nodes = nodes
        self._kept_rows = kept_rows
        self._positions = positions
        self.num_calls, self._num_passes = 0, 0
        self._note_nodes: Callable[[Tensor], None] | None = None
        self._weight = 1.0

    def __call__(self, h: Tensor) -> Tensor:
        """Return the (n, ...) rows of the pair graph's nodes. Every rank must call it.

        ``h`` are the (own rows, ...) rows of the last layer. Raises ConfigError if it has other rows.
        """
        if not isinstance(h, Tensor) or h.dim() == 0 or len(h) != self._num_own:
            shape = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
            raise ConfigError(
                f"gather_pair_rows got {shape}, but the last layer of this rank has {self._num_own} rows; "
                "pass what the last layer returned for blocks[-1], and call it once per batch"
            )
        self.num_calls += 1
        kept_rows = self._kept_rows.to(h.device)
        positions = self._positions.to(h.device)
        sources = self._exchange.exchange(h.index_select(0, kept_rows))
        rows = sources.index_select(0, positions)
        if self._note_nodes is None:
            return weigh_gradients(rows, self._weight)
        self._note_nodes(self._nodes.to(h.device))
        return rows

    @contextmanager
    def in_model(self, note_nodes: Callable[[Tensor], None]) -> Iterator[None]:
        """Run a wrapped model, which weighs the gradients at its output if it calls this object.

        ``note_nodes`` is then called with the (n,) int64 nodes of the rows.
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

        Backward through ``output`` raises ConfigError if it is not called before.
        """
        self._weight, num_calls = weight, self.num_calls

        def check_gradient(_: Tensor) -> None:
            self.check_calls(num_calls)

        for leaf in tree_leaves(output):
            if torch.is_tensor(leaf) and leaf.requires_grad:
                leaf.register_hook(check_gradient)  # type: ignore[no-untyped-call]  # torch leaves it bare


@final
class PairPlanner:
    """Finds for each batch of pairs which rows of the last layer the ranks send. Construction is collective.

    A rank knows the holder of every node, 4 bytes each.
    """

    def __init__(self, g: DistGraph, plan: RankPlan, wire: WireDtype) -> None:
        self._session = g.session
        self._wire = wire
        self._number = len(plan.layers) + 1
        self._nodes = plan.rows(len(plan.layers))
        self._holders = np.empty(g.num_nodes(), np.int32)
        for rank, nodes in enumerate(gather_arrays(self._nodes, g.session)):
            self._holders[nodes] = rank
        self._exchange, _ = open_plan_exchange(g.session)

    def plan(self, nodes: Array) -> PairRows:
        """Return the rows of the (n,) int64 distinct ``nodes``. Every rank must call it, with its own nodes.

        The ledger counts the 8 bytes of each requested id under ``plan``.
        """
        topology, holders = self._session.topology, self._holders[nodes]
        order = np.argsort(holders, kind="stable")
        bounds = np.searchsorted(holders[order], np.arange(topology.world_size + 1))
        pieces = np.split(nodes[order], bounds[1:-1])
        own_nodes = pieces[topology.rank]
        pieces[topology.rank] = NO_IDS
        with self._exchange.job():
            outgoing = {rank: [ids] for rank, ids in enumerate(pieces)}
            step = PlanStep(name="rows of pairs", among=range(topology.world_size), outgoing=outgoing)
            received = self._exchange.exchange(step)
        requested = {rank: self._find_rows(rank, ids) for rank, (ids,) in received.items() if len(ids)}
        own_rows = np.searchsorted(self._nodes, own_nodes)
        kept_rows = np.unique(np.concatenate([own_rows, *requested.values()]))
        layer = HaloLayer(
            own_rows=len(kept_rows),
            targets=0,
            indptr=np.zeros(1, np.int64),
            indices=NO_IDS,
            edge_ids=NO_IDS,
            halo_nodes=np.concatenate(pieces),
            receive=tuple((rank, len(ids)) for rank, ids in enumerate(pieces) if len(ids)),
            send=tuple((rank, np.searchsorted(kept_rows, rows)) for rank, rows in requested.items()),
        )
        positions = np.empty(len(nodes), np.int64)
        is_own = holders[order] == topology.rank
        positions[order[is_own]] = np.searchsorted(kept_rows, own_rows)
        positions[order[~is_own]] = len(kept_rows) + np.arange(len(layer.halo_nodes))
        exchange = HaloExchange(self._session, layer, self._number, self._wire)
        return PairRows(exchange, len(self._nodes), *map(torch.from_numpy, (nodes, kept_rows, positions)))

    def _find_rows(self, rank: int, ids: Array) -> Array:
        """Return the (k,) rows of the own nodes ``ids``, which another rank requests."""
        if not np.isin(ids, self._nodes).all():
            raise PeerError(
                f"rank {rank} requests rows of nodes that this rank does not compute; run the same version "
                "on all ranks, on the same files"
            )
        return np.searchsorted(self._nodes, ids)


def weigh_gradients(output: Any, weight: float) -> Any:
    """Return the (nested) tensors of ``output``, whose gradients are multiplied by ``weight``."""

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
