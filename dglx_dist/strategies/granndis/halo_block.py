"""A block whose sources lie on several ranks, for models written against DGL (algorithms 3.1, 3.2b)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from dgl.base import ALL, is_all
from dgl.core import invoke_node_udf
from dgl.function import BuiltinFunction
from dgl.heterograph import DGLBlock
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, Array, EdgeType
from dglx_dist.sampling.blocks import BlockBuilder
from dglx_dist.strategies.granndis.empty_share import reduce_nothing
from dglx_dist.strategies.granndis.halo_frame import HaloFrame, OwnRows
from dglx_dist.strategies.granndis.one_way import OneWay
from dglx_dist.strategies.granndis.plan import HaloLayer


class Exchange(Protocol):
    """What a block asks for the halo; ``HaloExchange``, or a stand-in for it."""

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return (own rows and halo, ...) of the (own rows, ...) ``h``; see ``HaloExchange.exchange``."""


@final
class Halo:
    """How a block's sources come together. Copies of the block share it.

    Args:
        layer: The plan.
        exchange: Of that layer.
        nodes: (num_sources,) int64 global ids of all sources of the block.
        out_degrees: Asks for the whole graph's (num_sources,) out-degrees of ``nodes``; None: the block's.
    """

    def __init__(
        self,
        layer: HaloLayer,
        exchange: Exchange,
        nodes: Tensor,
        out_degrees: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.own_rows, self.halo_rows = layer.own_rows, len(layer.halo_nodes)
        self.repeats = needs_repeated_row(layer)
        self.exchange = exchange
        self._nodes, self._ask = nodes, out_degrees
        # In a list that blocks of other layers on the same structure share, for asking reads every edge.
        self._degrees: list[Tensor] = []

    def out_degrees(self) -> Tensor | None:
        """Return (num_sources,) out-degrees in the whole graph; None: nobody said how to know them."""
        if not self._degrees and self._ask is not None:
            self._degrees.append(self._ask(self._nodes))
        return self._degrees[0] if self._degrees else None


@final
class HaloBlock(DGLBlock):
    """A block that completes what it is given: (own rows, ...) become the rows of all its sources.

    A model's rows of a layer are those that this rank computed: ``block.own_rows`` of them, the first
    ``block.num_dst_nodes()`` of which are the block's destinations. The sources are these and the halo. A
    column of own rows that is set on the sources (``srcdata[name] = h``, ``srcdata.update``) is exchanged
    with the other ranks there and then; one with a row for each source is taken as it is. So modules of
    ``dgl.nn``, and message passing written by hand, compute what they compute on the whole graph, gradients
    included. Every rank must run the same layers in the same order: an exchange waits for its peers.

    A rank that sends rows and receives none has, behind its own rows, its first one once more, as a source
    without edges: were there none, the number of rows would not tell whether they were exchanged.

    ``out_degrees()`` are those of the whole graph where the block knows them; in-degrees are complete, for
    all in-edges of every destination are here.

    What is refused: functions of the reversed block (sums over the out-edges of a source, as
    ``edge_softmax(norm_by="src")`` and ``EdgeWeightNorm("both")`` form), for a source's out-edges lie on
    several ranks; several node or edge types; and what DGL runs on no block (``hooks.NO_BLOCKS``: for these
    there is :func:`dglx_dist.local_graph`).

    Make one by :func:`halo_block`.
    """

    _graph = OneWay()

    def __init__(self, index: Any, ntypes: Any, etypes: Any, nodes: Any, edges: Any, *, halo: Halo) -> None:
        super().__init__(index, ntypes, etypes, nodes, edges)
        self._halo = halo

    @property
    def own_rows(self) -> int:
        """Rows that the user's tensors have in front of this block."""
        return self._halo.own_rows

    def fresh(self) -> HaloBlock:
        """Return a block of the same structure and columns, to which other columns can be added."""
        block: HaloBlock = self.local_var()
        return block

    def through(self, exchange: Exchange) -> HaloBlock:
        """Return a :meth:`fresh` block whose halo comes by ``exchange``, of a layer that is alike."""
        block = self.fresh()
        block._halo = copy.copy(self._halo)
        block._halo.exchange = exchange
        return block

    def all_rows(self, h: Tensor, *, kept: Tensor | None = None) -> Tensor:
        """Return the rows of all sources; collective for the ranks that share halo rows at this layer.

        Args:
            h: (own_rows, ...), which is exchanged, or (num_src_nodes, ...), which is returned.
            kept: (num_src_nodes - own_rows, ...) what an earlier call for the same rows returned behind the
                own ones: nothing moves then, but the gradients do.

        Returns:
            (num_src_nodes, ...).

        Raises:
            ConfigError: ``h`` has neither number of rows.
            PeerError: a rank is dead, silent, or at another layer.
        """
        count, sources = (len(h) if h.dim() else 0), self.num_src_nodes()
        if count == sources:
            return h
        if count != self.own_rows:
            raise ConfigError(
                f"source rows of shape {tuple(h.shape)} for a block of {self.own_rows} own rows, {sources} "
                f"sources and {self.num_dst_nodes()} destinations; give a layer what the layer before "
                "returned, uncut (h[:block.num_dst_nodes()] is for the destinations' side)"
            )
        whole = self._halo.exchange.exchange(h, None if kept is None else kept[: self._halo.halo_rows])
        # Its gradient is zero: the repeated source has no edge.
        return torch.cat([whole, h[:1].detach()]) if self._halo.repeats else whole

    def set_own(self, name: str, rows: Tensor) -> None:
        """Set the (own_rows, ...) column ``name`` of the sources without exchanging it.

        ``srcdata[name]`` returns it as it is; it is exchanged by what it is given to.

        Raises:
            ConfigError: ``rows`` are not as many.
        """
        if len(rows) != self.own_rows:
            raise ConfigError(f"{len(rows)} rows of {name!r} for a block of {self.own_rows} own rows")
        self._node_frames[0][name] = OwnRows(rows)

    def set_all(self, name: str, rows: Tensor) -> None:
        """Set the column ``name`` of the sources to (own_rows + halo rows, ...), without exchanging.

        Raises:
            ConfigError: ``rows`` are not as many.
        """
        wanted = self.own_rows + self._halo.halo_rows
        if len(rows) != wanted:
            raise ConfigError(f"{len(rows)} rows of {name!r} for a block of {wanted} own and halo rows")
        if self._halo.repeats:
            rows = torch.cat([rows, rows[:1]])
        super()._set_n_repr(0, ALL, {name: rows})

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Return the sources' out-degrees in the whole graph, as DGL does those of a block."""
        degrees = self._halo.out_degrees()
        if degrees is None:
            return super().out_degrees(u, etype)
        degrees = degrees.to(device=self.device, dtype=self.idtype)
        if is_all(u):
            return degrees
        return int(degrees[u]) if isinstance(u, int) else degrees[torch.as_tensor(u).long()]

    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """Send messages along all edges and reduce them, as DGL does; also where there are no edges."""
        block = self._completing()
        # DGL's own functions reduce nothing to zeros that autograd still sees the sources behind.
        if self.num_edges() or isinstance(reduce_func, BuiltinFunction):
            DGLBlock.update_all(block, message_func, reduce_func, apply_node_func, etype)
            return
        columns = reduce_nothing(block, message_func, reduce_func)
        if apply_node_func is not None:
            seen = {**self.dstdata, **columns}
            columns = invoke_node_udf(self, ALL, self.dsttypes[0], apply_node_func, ndata=seen)
        self._set_n_repr(1, ALL, columns)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Compute columns of the edges from their ends, as DGL does."""
        DGLBlock.apply_edges(self._completing(), func, edges, etype)

    def __getitem__(self, key: Any) -> Any:
        # There is one edge type, and DGL would make a slice that lacks the halo.
        keys = key if isinstance(key, tuple) else (slice(None), key, slice(None))
        if len(keys) != 3 or not self._find_etypes(keys):
            raise ConfigError(f"edge type {key!r} is not {self.canonical_etypes[0]}, the block's only one")
        return self

    def _completing(self) -> HaloBlock:
        """Return this block, whose columns of own rows are exchanged when messages read them."""
        own = self._node_frames[0]
        if not any(isinstance(column, OwnRows) for column in own._columns.values()):
            return self
        block: HaloBlock = self.__copy__()
        sources = HaloFrame(own, lambda _, rows: self.all_rows(rows), self.num_src_nodes())
        block._node_frames = [sources, self._node_frames[1]]
        return block

    def _set_n_repr(self, ntid: int, u: Any, data: Any) -> None:
        if ntid == 0 and is_all(u):
            data = {name: self.all_rows(rows) for name, rows in data.items()}
        super()._set_n_repr(ntid, u, data)


def halo_block(
    layer: HaloLayer,
    nodes: Tensor,
    exchange: Exchange,
    *,
    etype: EdgeType = EDGE_TYPE,
    out_degrees: Callable[[Tensor], Tensor] | None = None,
) -> HaloBlock:
    """Build the block of ``layer``; sends nothing. Structure is shared, so keep it: see ``HaloBlock.fresh``.

    Args:
        layer: The plan of the layer on this rank.
        nodes: (n,) int64 global ids, the first ``layer.own_rows`` of which are the own rows'.
        exchange: Of the layer.
        etype: Canonical edge type of the graph.
        out_degrees: (K,) int64 ids to (K,) out-degrees in the whole graph, called when a convolution asks;
            not collective. None: the block's own.

    Returns:
        The block on the CPU, with ``dgl.NID`` on both sides (of all sources) and ``dgl.EID`` on the edges.
    """
    sources = _all_sources(layer, nodes)
    edges = _tensor(layer.indices), sources, _tensor(layer.edge_ids)
    plain = BlockBuilder(etype).block(_tensor(layer.indptr), *edges)
    types = [etype[0]], [etype[2]]
    halo = Halo(layer, exchange, sources, out_degrees)
    return HaloBlock(plain._graph, types, [etype[1]], plain._node_frames, plain._edge_frames, halo=halo)


def needs_repeated_row(layer: HaloLayer) -> bool:
    """Whether the block of ``layer`` has its first row again behind the own ones; see :class:`HaloBlock`."""
    return bool(layer.send) and not len(layer.halo_nodes)


def _all_sources(layer: HaloLayer, nodes: Tensor) -> Tensor:
    own = nodes[: layer.own_rows]
    pieces: Sequence[Tensor] = [own, _tensor(layer.halo_nodes)]
    return torch.cat([*pieces, own[:1]] if needs_repeated_row(layer) else [*pieces])


def _tensor(array: Array) -> Tensor:
    # Torch warns of arrays that it could write but must not, as those of mapped files are.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
