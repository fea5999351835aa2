"""Blocks with several node and edge types, and with sources on several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import dgl
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.internals.cpu_kernels import note_edge_order
from dglx_dist.internals.graphs import (
    ALL,
    BlockTypes,
    InEdgesOnlyGraph,
    get_block_parts,
    get_relation,
    is_all,
    reduce_over_types,
)
from dglx_dist.records import Array, EdgeType
from dglx_dist.strategies.full_graph.graph_types import TypedLayer
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, complete_rows, list_sources
from dglx_dist.strategies.full_graph.halo_exchange import HaloExchange

TypeExchanges: TypeAlias = Mapping[str | EdgeType, HaloExchange]
"""One exchange for each node type's rows, and one for each edge type's sources."""


class _Degrees(Protocol):
    def __call__(self, u: Tensor, etype: EdgeType) -> Tensor: ...


@final
class TypedHaloBlock(InEdgesOnlyGraph, DGLBlock):
    """A block with several types that appends halo rows from other ranks, as :class:`HaloBlock` does.

    All node types are on both sides. ``block[etype]`` is the :class:`HaloBlock` for one edge type, and shares
    columns with this block. Each node type has its own exchange. If a column with own rows is set on a type's
    sources (``block.srcnodes[ntype].data[name] = h``, ``block.srcdata[name] = {ntype: h}``), this type's halo
    is exchanged immediately. A module that is called with the block and a dictionary of rows gets rows for
    all sources, see :meth:`all_rows`.

    Every rank must run the same layers in the same order, even if a type has no nodes or a relation has no
    edges. ``num_edges(etype)`` is not equal to 0 if any rank has edges of this type.
    """

    def __init__(
        self,
        plain: DGLBlock,
        layer: TypedLayer,
        exchanges: TypeExchanges,
        out_degrees: _Degrees | None,
    ) -> None:
        super().__init__(*get_block_parts(plain))
        # DGL copies these attributes to the graphs that it derives.
        self.own_rows = {ntype: rows.own_rows for ntype, rows in layer.rows.items()}
        """Number of rows that a model passes to this block, by node type."""
        self.has_cover = any(exchange.cover is not None for exchange in exchanges.values())
        """Whether sums over in-edges have their own exchange."""
        self._layer = layer
        self._exchanges = exchanges
        self._fetch_out_degrees = out_degrees
        self._degrees = {etype: list[Tensor]() for etype in layer.relations}

    def with_exchanges(self, exchanges: TypeExchanges) -> TypedHaloBlock:
        """Return a :meth:`local_var` with ``exchanges``, which belong to a layer with equal structure."""
        block: TypedHaloBlock = self.local_var()
        block._exchanges = exchanges
        return block

    def __getitem__(self, key: Any) -> HaloBlock:
        etype_ids = self.find_etypes(key)
        if len(etype_ids) != 1:
            raise ConfigError(
                f"{key!r} selects {len(etype_ids)} of the edge types {self.canonical_etypes}, but a block "
                "with rows on several ranks has slices of one type; use block[source, relation, destination]"
            )

        (etype_id,) = etype_ids
        etype = self.canonical_etypes[etype_id]
        fetch_degrees = None
        if self._fetch_out_degrees is not None:
            fetch_degrees = partial(self._fetch_out_degrees, etype=etype)
        plain = get_relation(self, etype_id)
        block = HaloBlock(plain, self._layer.relations[etype], self._exchanges[etype], fetch_degrees)
        block.has_edges_elsewhere = etype not in self._layer.skipped
        block.degrees = self._degrees[etype]
        return block

    def all_rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows for all sources, by node type. Collective for ranks that share halo rows.

        A type's rows are exchanged if they are (own_rows, ...), as by :meth:`HaloBlock.all_rows`. If any type
        has a gradient, backward returns gradients for all types. So a rank reaches its peers' exchanges, even
        if it does not use a type.
        """
        # All ranks exchange the types in the same order.
        return join_gradients({ntype: self._complete(ntype, rows[ntype]) for ntype in sorted(rows)})

    def num_edges(self, etype: Any = None) -> int:
        if etype is None:
            return int(super().num_edges())
        return self[etype].num_edges()

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        return self[etype].out_degrees(u)

    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        self[etype].update_all(message_func, reduce_func, apply_node_func)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        self[etype].apply_edges(func, edges)

    def multi_update_all(self, etype_dict: Any, cross_reducer: Any, apply_node_func: Any = None) -> None:
        # Columns that each edge type yields, by destination type.
        results_by_ntype = defaultdict[str, list[tuple[int, dict[str, Tensor]]]](list)
        for etype, functions in etype_dict.items():
            block = self[etype]
            columns = block.reduce_messages(*functions)
            results_by_ntype[block.dsttypes[0]].append((self.get_etype_id(etype), columns))

        for ntype, results in results_by_ntype.items():
            columns = reduce_over_types(results, cross_reducer, functions[1])
            if apply_node_func is not None:
                first_etype_id, _ = results[0]
                block = self[self.canonical_etypes[first_etype_id]]
                columns = {**columns, **block.apply_to_targets(apply_node_func, columns)}
            self.dstnodes[ntype].data.update(columns)

    def set_columns(self, side: int, rows: Any, data: Any) -> None:
        if side < len(self.own_rows) and is_all(rows):
            ntype = [*self.own_rows][side]
            data = {name: self._complete(ntype, column) for name, column in data.items()}
        super().set_columns(side, rows, data)

    def _complete(self, ntype: str, rows: Tensor) -> Tensor:
        return complete_rows(rows, self._layer.rows[ntype], self._exchanges[ntype])


def join_gradients(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``rows`` by type. If any type gets a gradient in backward, all trained rows get one."""
    trained_rows = {ntype: values for ntype, values in rows.items() if values.requires_grad}
    if not trained_rows or not torch.is_grad_enabled():
        return dict(rows)
    joined_rows = _JoinTypes.apply(*trained_rows.values())  # type: ignore[no-untyped-call]  # torch leaves it bare
    return {**rows, **dict(zip(trained_rows, joined_rows, strict=True))}


@final
class _JoinTypes(torch.autograd.Function):
    """Identity. If one result has a gradient, all arguments have one."""

    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(values.view_as(values) for values in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


AnyHaloBlock: TypeAlias = HaloBlock | TypedHaloBlock


def typed_halo_block(
    layer: TypedLayer,
    nodes: Mapping[str, Array],
    exchanges: TypeExchanges,
    *,
    out_degrees: _Degrees | None = None,
    edge_order: Callable[..., Tensor] | None = None,
) -> TypedHaloBlock:
    """Build the block for ``layer`` on the CPU. Sends nothing. See ``halo_block`` for the arguments.

    ``nodes`` are ids by node type for this rank's feature rows, and ``exchanges`` have all types.
    """
    sources = {}
    for ntype, rows in layer.rows.items():
        sources[ntype] = list_sources(rows, torch.from_numpy(nodes[ntype]))
    edges = []
    for (source_type, _, _), relation in layer.relations.items():
        indptr = torch.from_numpy(relation.indptr)
        indices = torch.from_numpy(relation.indices)
        edge_data = {dgl.EID: torch.from_numpy(relation.edge_ids)}
        edges.append((len(sources[source_type]), relation.targets, indptr, indices, edge_data))

    ntypes = list(layer.rows)
    names = [name for _, name, _ in layer.relations]
    source_types = [ntypes.index(source_type) for source_type, _, _ in layer.relations]
    target_types = [ntypes.index(target_type) for _, _, target_type in layer.relations]
    num_sources = [len(ids) for ids in sources.values()]
    num_targets = [rows.targets for rows in layer.rows.values()]
    node_data = [{dgl.NID: ids} for ids in sources.values()]
    types = BlockTypes(ntypes, names, source_types, target_types)
    plain = types.block(edges, node_data, (num_sources, num_targets))
    if edge_order is not None:
        note_edge_order(plain, edge_order)
    return TypedHaloBlock(plain, layer, exchanges, out_degrees)
