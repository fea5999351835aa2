"""DGL blocks with sources on several ranks, for unmodified DGL models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import dgl
import torch
from dgl.function import BuiltinFunction
from dgl.function.message import BinaryMessageFunction, CopyMessageFunction
from dgl.heterograph import DGLBlock
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dglx_dist.errors import ConfigError
from dglx_dist.internals.cpu_kernels import note_edge_order
from dglx_dist.internals.graphs import (
    ALL,
    InEdgesOnlyGraph,
    OwnRowsColumn,
    build_block,
    get_block_parts,
    get_own_rows,
    invoke_node_udf,
    is_all,
    make_fetched_frame,
    pass_messages,
    set_frame,
)
from dglx_dist.internals.message_passing import place
from dglx_dist.internals.pytorch import current_function_mode, plain_tensors, replace_floats
from dglx_dist.records import EDGE_TYPE, EdgeType
from dglx_dist.strategies.full_graph.halo_exchange import CoverExchange
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer


@final
class EmptyPartition(TorchFunctionMode):
    """Mode in which ``view`` and ``reshape`` resolve -1 for tensors without rows.

    If ``h`` is empty, torch cannot resolve -1 in ``h.view(len(h), -1, width)``, which DGL's attention layers
    call. In this mode -1 has the value that it has for a tensor with rows.

    ``owner`` is the caller of :meth:`turn_on`. It is None in a ``with`` statement.
    """

    def __init__(self, owner: object = None) -> None:
        super().__init__()
        self._owner = owner

    def turn_on(self) -> None:
        """Turn on the mode, unless an outer module or model has already turned on such a mode."""
        if not isinstance(current_function_mode(), EmptyPartition):
            self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __exit__(self, *error: Any) -> None:
        # An interrupt may have left nested modes on, because torch calls no hooks then.
        mode = current_function_mode()
        while mode is not self and isinstance(mode, EmptyPartition):
            mode.__exit__()
            mode = current_function_mode()
        super().__exit__(*(error or (None, None, None)))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RESHAPING_FUNCTIONS and not kwargs and not args[0].numel():
            sizes = args[1] if isinstance(args[1], Sequence) else args[1:]
            if all(isinstance(size, int) for size in sizes):
                return func(args[0], _resolve_sizes(args[0].shape, sizes))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def turn_off(owner: object) -> None:
        """Turn off this thread's innermost mode if ``owner`` turned it on."""
        mode = current_function_mode()
        if isinstance(mode, EmptyPartition) and mode._owner is owner:
            mode.__exit__()


_RESHAPING_FUNCTIONS: tuple[Callable[..., Any], ...] = (Tensor.view, Tensor.reshape, torch.reshape)


def _resolve_sizes(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the ``sizes`` for a tensor with ``shape``. If both have no rows, -1 is replaced."""
    known_size = math.prod(size for size in sizes[1:] if size != -1)
    has_rows = len(shape) < 2 or shape[0] > 0
    if has_rows or not sizes or sizes[0] or -1 not in sizes or not known_size:
        return tuple(sizes)
    row_size = math.prod(shape[1:])
    return tuple(row_size // known_size if size == -1 else size for size in sizes)


def tie_gradient(output: Any, rows: Tensor) -> Any:
    """Connect the (nested) tensors in ``output`` to ``rows`` in autograd, with a zero gradient."""
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return output
    return replace_floats(output, lambda *floats: _TieGradient.apply(rows, *floats))  # type: ignore[no-untyped-call]  # torch leaves it bare


def reduce_without_edges(block: Any, message: Any, reduce: Any) -> dict[str, Tensor]:
    """Return the zeros, (targets, ...) by column, that a user-defined reduction yields without messages.

    DGL skips user-defined reductions on a graph without edges, so code that reads the result would fail on
    such a rank only. The column names and shapes come from a block with one artificial edge. Its message
    function reads the same source columns as on other ranks, so the same columns are exchanged. The result is
    connected in autograd to the columns that were read.
    """
    read_columns: dict[str, Tensor] = {}

    def fetch(name: str, rows: Tensor) -> Tensor:
        read_columns[name] = rows
        return _make_zero_row(rows)

    one_edge_block = _make_one_edge_block(block)
    set_frame(one_edge_block, make_fetched_frame(block.node_frames[0], fetch, 1))
    old_columns = dict(one_edge_block.dstdata.items())
    one_edge_block.update_all(message, reduce)
    columns = {}
    for name, rows in one_edge_block.dstdata.items():
        if old_columns.get(name) is not rows:
            columns[name] = rows.new_zeros((block.num_dst_nodes(), *rows.shape[1:]))
    for rows in read_columns.values():
        columns = tie_gradient(columns, rows)
    return columns


def _make_one_edge_block(block: Any) -> Any:
    """Return a block with the same type but one edge, and zeros in destination and edge columns."""
    source, relation, destination = block.canonical_etypes[0]
    ends = torch.zeros(1, dtype=block.idtype)
    edges = {(source, relation, destination): (ends, ends)}
    one_edge_block = place(dgl.create_block(edges, {source: 1}, {destination: 1}), block.device)
    for name, rows in block.dstdata.items():
        one_edge_block.dstdata[name] = _make_zero_row(rows)
    for name, rows in block.edata.items():
        one_edge_block.edata[name] = _make_zero_row(rows)
    return one_edge_block


def _make_zero_row(rows: Tensor) -> Tensor:
    return torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)


class _TieGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape = rows.shape
        ctx.options = {"dtype": rows.dtype, "device": rows.device}
        # The outputs are cloned, because autograd forbids in-place changes if several outputs are views.
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch.zeros(ctx.shape, **ctx.options), *gradients


class RowExchange(Protocol):
    """The part of ``HaloExchange``'s interface that blocks use."""

    cover: CoverExchange | None

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Append the halo rows to the (own_rows, ...) ``h``. See ``HaloExchange.exchange``."""


@final
class OwnEdgeCount(int):
    """This rank's edge count for an edge type that some rank has. It counts as positive, even if it is 0.

    Models skip edge types without edges. They must skip the same types on all ranks, because a type's layer
    may exchange rows, or add a bias to destination rows without edges. Only comparisons with 0 are changed.
    DGL computes ``max(num_edges, 1)``, for example.
    """

    def __bool__(self) -> bool:
        return True

    def __eq__(self, number: object) -> bool:
        return number != 0 and int(self) == number

    def __ne__(self, number: object) -> bool:
        return not self == number

    def __gt__(self, number: float) -> bool:
        return number == 0 or int(self) > number

    def __le__(self, number: float) -> bool:
        return not self > number

    __hash__ = int.__hash__


@final
class HaloBlock(InEdgesOnlyGraph, DGLBlock):
    """A block that appends halo rows from other ranks to (own_rows, ...) tensors. See :func:`halo_block`.

    The sources are the ``block.own_rows`` rows that this rank computed, followed by the halo. The first
    ``block.num_dst_nodes()`` own rows are the block's destinations.

    If a column with own rows is set on the sources (``srcdata[name] = h``, ``srcdata.update``), the halo is
    exchanged immediately. A column with a row for each source is stored without an exchange. So ``dgl.nn``
    modules and hand-written message passing compute the same results and gradients as on the uncut graph.
    Every rank must run the same layers in the same order, because an exchange waits for its peers.

    A rank that sends rows and receives none repeats its first row as an extra source without edges. Otherwise
    the row count would not show whether rows were exchanged.

    In-degrees are complete. ``out_degrees()`` returns out-degrees in the uncut graph if they are known.

    Functions that need the reversed block are not supported, because they sum over a source's out-edges
    (``edge_softmax(norm_by="src")`` and ``EdgeWeightNorm("both")``). Neither are layers that DGL cannot run
    on blocks. For those use :func:`dglx_dist.local_graph`. For several types see ``TypedHaloBlock``.
    """

    def __init__(
        self,
        plain: DGLBlock,
        layer: HaloLayer,
        exchange: RowExchange,
        out_degrees: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__(*get_block_parts(plain))
        # DGL copies these attributes to the graphs that it derives.
        self._layer = layer
        self.own_rows = layer.own_rows
        """Number of rows that a model passes to this block."""
        self.halo_rows = len(layer.halo_nodes)
        """Number of halo rows that follow the own rows."""
        self.has_cover = exchange.cover is not None
        """Whether sums over the in-edges have their own exchange."""
        self.pair_rows: Any = None
        """Exchange for the rows that this batch's pairs need, if it is an edge batch."""
        self.has_edges_elsewhere = False
        """Whether other ranks have edges of this type, so that a model must not skip it on this rank."""
        self._exchange = exchange
        self._fetch_out_degrees = out_degrees
        self._is_of_own_rows = False
        self._sources = self.srcdata[dgl.NID]
        self.degrees: list[Tensor] = []
        """Out-degrees for the sources, once they are known.

        Blocks with the same structure share the list, because the lookup reads every edge.
        """

    def with_exchanges(self, exchanges: Mapping[Any, RowExchange]) -> HaloBlock:
        """Return a :meth:`local_var` with the exchange for another layer that has the same structure.

        ``exchanges`` are by edge type.
        """
        block: HaloBlock = self.local_var()
        block._exchange = exchanges[self.canonical_etypes[0]]
        return block

    def of_own_rows(self) -> HaloBlock:
        """Return a copy for a layer that sums rows, with source columns and out-degrees for own rows only."""
        block: HaloBlock = self.local_var()
        block._is_of_own_rows = True
        # A dropout that is recomputed only has a weak reference to the copy.
        self._copy_of_own_rows = block
        return block

    def sums(self, message: Any, reduce: Any, own_rows: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
        """Return the (targets, ...) sum or mean if it has its own exchange, else {}.

        ``own_rows`` maps a name to its (own_rows, ...) column, or to None if its halo is already there.
        """
        cover = self._exchange.cover
        if cover is None or getattr(reduce, "name", "") not in ("sum", "mean"):
            return {}

        weights = None
        if isinstance(message, CopyMessageFunction) and message.name == "copy_u":
            name = message.in_field
        elif isinstance(message, BinaryMessageFunction) and message.name == "u_mul_e":
            name = message.lhs_field
            weights = (message.rhs_field, self.edata[message.rhs_field])
        else:
            return {}
        rows = own_rows(name) if message.out_field == reduce.msg_field else None
        if rows is None or not rows.is_floating_point():
            return {}

        sums = cover.sums(rows, weights)
        if sums is None:
            return {}
        if reduce.name == "mean":
            # The view gives the degrees as many dimensions as the sums have.
            degrees = self.in_degrees().clamp(min=1).to(sums)
            sums = sums / degrees.view(-1, *[1] * (sums.dim() - 1))
        return {reduce.out_field: sums}

    def all_rows(self, h: Tensor, *, kept: Tensor | None = None) -> Tensor:
        """Return (num_src_nodes, ...) rows for all sources. Collective for ranks that share halo rows.

        Args:
            h: If it is (own_rows, ...), it is exchanged. If it is (num_src_nodes, ...), it is returned.
            kept: (num_src_nodes - own_rows, ...) halo rows that an earlier call returned for the same ``h``.
                With them, only gradients are sent.

        Raises:
            ConfigError: ``h`` has neither number of rows.
            PeerError: a rank is dead, silent, or at another layer.
        """
        return complete_rows(h, self._layer, self._exchange, kept)

    def set_own(self, name: str, rows: Tensor) -> None:
        """Set the (own_rows, ...) source column ``name`` without an exchange.

        ``srcdata[name]`` returns it unchanged. The layer that receives it runs the exchange.
        """
        if len(rows) != self.own_rows:
            raise ConfigError(f"{len(rows)} rows of {name!r} for a block of {self.own_rows} own rows")
        self.node_frames[0][name] = OwnRowsColumn(rows)

    def set_all(self, name: str, rows: Tensor) -> None:
        """Set the source column ``name`` to (own_rows + halo rows, ...) without an exchange."""
        num_rows = self.own_rows + self.halo_rows
        if len(rows) != num_rows:
            raise ConfigError(f"{len(rows)} rows of {name!r} for a block of {num_rows} own and halo rows")
        super().set_columns(0, ALL, {name: repeat_first_row(rows, self._layer)})

    def num_edges(self, etype: Any = None) -> int:
        count = int(super().num_edges(etype))
        return OwnEdgeCount(count) if self.has_edges_elsewhere else count

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        if self._fetch_out_degrees is None:
            return super().out_degrees(u, etype)
        if not self.degrees:
            self.degrees.append(self._fetch_out_degrees(self._sources))

        degrees = self.degrees[0].to(device=self.device, dtype=self.idtype)
        self.degrees[0] = degrees
        if is_all(u):
            return degrees[: self.own_rows] if self._is_of_own_rows else degrees
        if isinstance(u, int):
            return int(degrees[u])
        return degrees[torch.as_tensor(u).long()]

    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        columns = self.sums(message_func, reduce_func, self._own_column)
        if not columns:
            block = self._make_block_with_halo()
            # DGL's built-in reductions return zeros that stay connected to the sources in autograd.
            if int(self.num_edges()) or isinstance(reduce_func, BuiltinFunction):
                DGLBlock.update_all(block, message_func, reduce_func, apply_node_func, etype)
                return
            columns = reduce_without_edges(block, message_func, reduce_func)

        if apply_node_func is not None:
            columns = self.apply_to_targets(apply_node_func, columns)
        self.set_columns(1, ALL, columns)

    def reduce_messages(self, message: Any, reduce: Any, apply: Any = None) -> dict[str, Tensor]:
        """Compute the columns that :meth:`update_all` sets, and return them instead.

        Args:
            message: Message function, built into DGL or written by the user.
            reduce: Reduce function, built into DGL or written by the user.
            apply: User function that is applied to the destinations afterwards, or None.

        Returns:
            Columns with one row per destination, by name. Destinations without in-edges have an infinite
            maximum or minimum, as in DGL's ``multi_update_all``.
        """
        block = self._make_block_with_halo()
        # DGL does not call a user's reduce function on a block without edges.
        has_edges = int(self.num_edges()) > 0
        if has_edges or isinstance(reduce, BuiltinFunction):
            columns = pass_messages(block, message, reduce)
        else:
            columns = reduce_without_edges(block, message, reduce)
        if apply is None:
            return columns
        return self.apply_to_targets(apply, columns)

    def apply_to_targets(self, apply: Any, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns that a node function computes from destination columns and ``columns``."""
        available = {**self.dstdata, **columns}
        result: dict[str, Tensor] = invoke_node_udf(self, ALL, self.dsttypes[0], apply, ndata=available)
        return result

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        DGLBlock.apply_edges(self._make_block_with_halo(), func, edges, etype)

    def __getitem__(self, key: Any) -> Any:
        # A slice made by DGL would lack the halo.
        if not self.find_etypes(key):
            raise ConfigError(f"edge type {key!r} is not {self.canonical_etypes[0]}, the block's only one")
        return self

    def _own_column(self, name: str) -> Tensor | None:
        return get_own_rows(self.node_frames[0], name)

    def _make_block_with_halo(self) -> HaloBlock:
        """Return a block that exchanges own-row columns when they are read."""
        frame = self.node_frames[0]
        if all(get_own_rows(frame, name) is None for name in frame):
            return self
        block: HaloBlock = self.__copy__()
        sources = make_fetched_frame(frame, lambda _, rows: self.all_rows(rows), self.num_src_nodes())
        block.node_frames = [sources, self.node_frames[1]]
        return block

    def set_columns(self, side: int, rows: Any, data: Any) -> None:
        # Side 0 means the sources.
        if side == 0 and is_all(rows):
            if self._is_of_own_rows:
                for name, column in data.items():
                    self.set_own(name, column)
                return
            data = {name: self.all_rows(column) for name, column in data.items()}
        super().set_columns(side, rows, data)


def halo_block(
    layer: HaloLayer,
    nodes: Tensor,
    exchange: RowExchange,
    *,
    etype: EdgeType = EDGE_TYPE,
    out_degrees: Callable[[Tensor], Tensor] | None = None,
    edge_order: Callable[..., Tensor] | None = None,
) -> HaloBlock:
    """Build the block for ``layer`` on the CPU. Sends nothing.

    The block has ``dgl.NID`` on both sides and ``dgl.EID`` on the edges.

    Args:
        nodes: (n,) int64 global ids. The first ``layer.own_rows`` belong to the own rows.
        out_degrees: Maps (K,) int64 ids to (K,) out-degrees in the uncut graph. It is called on demand and is
            not collective. By default out-degrees are counted within the block.
        edge_order: See :func:`~dglx_dist.internals.message_passing.note_edge_order`.
    """
    sources = list_sources(layer, nodes)
    plain = build_block(torch.from_numpy(layer.indptr), torch.from_numpy(layer.indices), len(sources), etype)
    plain.srcdata[dgl.NID] = sources
    plain.dstdata[dgl.NID] = sources[: plain.num_dst_nodes()]
    plain.edata[dgl.EID] = torch.from_numpy(layer.edge_ids)
    if edge_order is not None:
        note_edge_order(plain, edge_order)
    return HaloBlock(plain, layer, exchange, out_degrees)


def needs_repeated_row(layer: HaloLayer) -> bool:
    """Return whether the block for ``layer`` repeats its first own row. See :class:`HaloBlock`."""
    return bool(layer.send) and not len(layer.halo_nodes)


def list_sources(layer: HaloLayer, nodes: Tensor) -> Tensor:
    """Return the source ids in the block for ``layer``. They start with the own rows in ``nodes``."""
    own_nodes = nodes[: layer.own_rows]
    return repeat_first_row(torch.cat([own_nodes, torch.from_numpy(layer.halo_nodes)]), layer)


def repeat_first_row(rows: Tensor, layer: HaloLayer) -> Tensor:
    """Append the first row in ``rows`` if the block for ``layer`` repeats it."""
    return torch.cat([rows, rows[:1]]) if needs_repeated_row(layer) else rows


def complete_rows(h: Tensor, layer: HaloLayer, exchange: RowExchange, kept: Tensor | None = None) -> Tensor:
    """Return rows for all sources in the block for ``layer``. See :meth:`HaloBlock.all_rows`."""
    num_rows = len(h) if h.dim() else 0
    repeats_row = needs_repeated_row(layer)
    num_sources = layer.num_sources + repeats_row
    if num_rows == num_sources:
        return h
    if num_rows != layer.own_rows:
        raise ConfigError(
            f"source rows of shape {tuple(h.shape)} for a block of {layer.own_rows} own rows, {num_sources} "
            f"sources and {layer.targets} destinations; pass a layer the uncut output of the "
            "previous layer (h[:block.num_dst_nodes()] is for the destinations)"
        )

    if kept is not None:
        kept = kept[: len(layer.halo_nodes)]
    rows = exchange.exchange(h, kept)
    # The repeated source has no edge, so its gradient is zero.
    return torch.cat([rows, h[:1].detach()]) if repeats_row else rows


@final
class OwnCount(Tensor):
    """Node count that ``batch_num_nodes`` returns for a local graph, (1,) int64. It only allows repetition.

    DGL uses it to repeat a graph's row for each node (``broadcast_nodes``), which is right on every rank. DGL
    also uses it to reduce over all nodes, but here only this rank's nodes would be reduced.
    """

    @classmethod
    def from_count(cls, count: int, device: torch.device) -> OwnCount:
        return torch.tensor([count], device=device).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise ConfigError for every function but repetition."""
        if func is not torch.repeat_interleave:
            raise ConfigError(
                "a function of all nodes or edges of a local graph would see only those of this rank; reduce "
                "the rows of ndata, and sum over the ranks with torch.distributed.all_reduce"
            )
        arguments = [value.as_subclass(Tensor) if isinstance(value, OwnCount) else value for value in args]
        with plain_tensors():
            return func(*arguments, **(kwargs or {}))
