"""Opens this rank's share of a distributed graph as one DGL graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dgl
import numpy as np
import torch
from torch import Tensor

from dglx_dist.dataloading.loader import check_alike
from dglx_dist.dataloading.row_buffers import Precision
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.records import Array
from dglx_dist.strategies.base import STRATEGIES, count_targets
from dglx_dist.strategies.full_graph.halo_block import halo_block
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange
from dglx_dist.strategies.full_graph.loader import PHASE
from dglx_dist.strategies.full_graph.model import LocalGraph
from dglx_dist.strategies.full_graph.plan_builder import check_graph, make_plans

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.graph.dist_tensor import DataView


def local_graph(
    g: DistGraph,
    *,
    columns: Sequence[str] | None = None,
    edge_columns: Sequence[str] = (),
    targets: str | None = "train_mask",
    use_pp: bool = True,
) -> LocalGraph:
    """Return this rank's nodes and their in-edges as one graph for ``model(g, x)``; every rank must call it.

    The model sees own rows only: ``x = lg.ndata["feat"]``, and a loss over ``lg.ndata["train_mask"]``. Wrap
    it with a full-graph strategy (``dx.init(strategy="full_graph")``, ``dx.wrap``), which sums the gradients.

    Each epoch moves, per layer, what messages read of a source, once for each rank that needs it, and the
    gradients back (algorithms 3.1); with ``use_pp`` layer 1 moves nothing where it is given features as they
    are. ``dgl.NID`` and ``dgl.EID`` have the global ids.

    Args:
        g: A graph of one node and one edge type.
        columns: Names in ``g.ndata``; None: all of them.
        edge_columns: Names in ``g.edata``.
        targets: A mask among the columns: what the loss is a mean over. Ignored where the graph has no
            such column; else set ``lg.step_share = count_targets(...)``, or wrap with reduction="sum".
        use_pp: Whether to fetch the halo of floating-point matrices, too, once: their rows take memory.

    Raises:
        ConfigError: on all ranks: the session's strategy trains on mini-batches, the graph has several types,
            a column is unknown, or the ranks differ in what they ask for.
        PeerError: a rank is dead or silent.
    """

    def checked() -> tuple[Mapping[str, str], Mapping[str, str]]:
        _check_strategy(g.session.strategy)
        check_graph(g)
        names = list(g.ndata) if columns is None else columns
        return _keys(g.ndata, names, "ndata"), _keys(g.edata, edge_columns, "edata")

    node_keys, edge_keys = together(g.session, checked, ConfigError)
    told = f"columns={[*node_keys]}, edge_columns={[*edge_keys]}, targets={targets!r}, use_pp={use_pp}"
    check_alike(g.session, "local graphs with", told)
    owners = RowOwners(g.get_node_partition_policy(g.ntypes[0]).bounds, g.session.topology)
    plan = make_plans(g, np.arange(*owners.range_of(g.session.topology.rank)), 1, 0)
    (layer,) = plan.layers
    exchange = HaloExchange(g.session, layer, 1)
    etype = g.canonical_etypes[0]
    block = halo_block(layer, torch.from_numpy(plan.nodes), exchange, etype=etype, out_degrees=g.out_degrees)
    lg = LocalGraph(block)
    lg.edata.update(_rows(g, edge_keys, layer.edge_ids))
    precision = Precision()
    for name, rows in _rows(g, node_keys, plan.nodes).items():
        lg.ndata[name] = precision.converted(rows)
        if use_pp and rows.is_floating_point() and rows.dim() > 1:
            # In the stored type, which may be half as wide as the one to compute in.
            lg.keep_halo(name, precision.converted(exchange.fetch(rows, phase=PHASE)))
    if targets is not None and targets in lg.ndata:
        lg.step_share = count_targets(int(lg.ndata[targets].sum()), g.session)
    return lg


def _check_strategy(name: str) -> None:
    """Raise ConfigError if wrapped models would take gradients of halo rows for those of their own."""
    if STRATEGIES.get(name).traits.unit != "full_graph":
        raise ConfigError(
            f"dx.local_graph has rows of other ranks in its gradients, and strategy {name!r} would weigh "
            "them as this rank's own; use dx.distribute(graph, strategy='full_graph'), or the same in dx.init"
        )


def _keys(view: DataView, names: Sequence[str], where: str) -> dict[str, str]:
    known = list(view)
    for name in names:
        if name not in known or name in (dgl.NID, dgl.EID):
            raise ConfigError(f"g.{where} has no column {name!r} (known: {', '.join(known) or 'none'})")
    return {name: view[name].kvstore_key for name in names}


def _rows(g: DistGraph, keys: Mapping[str, str], ids: Array) -> dict[str, Tensor]:
    pulls = {name: g.kvstore.submit_pull(key, ids, distinct=True, phase=PHASE) for name, key in keys.items()}
    return {name: pull.result() for name, pull in pulls.items()}
