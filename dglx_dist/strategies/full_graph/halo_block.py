"""A block whose sources lie on several ranks, for models written against DGL (algorithms 3.1, 3.2b)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, final

import dgl
import torch
from dgl.base import ALL, is_all
from dgl.core import invoke_node_udf
from dgl.frame import Frame, LazyFeature, Scheme, infer_scheme
from dgl.function import BuiltinFunction
from dgl.heterograph import DGLBlock
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dglx_dist.dataloading.minibatch import BlockBuilder
from dglx_dist.errors import ConfigError
from dglx_dist.records import EDGE_TYPE, Array, EdgeType
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer

FetchSources: TypeAlias = Callable[[str, Tensor], Tensor]
"""(name, rows as they stand in the frame) to (sources, ...): exchanges where the halo is missing."""


@final
class OwnRowsColumn(LazyFeature):
    """A column of fewer rows than its frame has: those of this rank, without the halo.

    DGL checks the length of every column but that of a placeholder, which this is one of.

    Args:
        rows: (own rows, ...).
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    @property
    def data(self) -> Tensor:
        """(own rows, ...)."""
        return self._rows

    @property
    def scheme(self) -> Scheme:
        """Shape of a row and dtype, as DGL prints them."""
        return infer_scheme(self._rows)

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self._rows.dtype

    def to(self, *args: Any, **kwargs: Any) -> OwnRowsColumn:
        """Return the rows on another device."""
        return OwnRowsColumn(self._rows.to(*args, **kwargs))

    def astype(self, dtype: Any) -> OwnRowsColumn:
        """Return the rows in another dtype."""
        return OwnRowsColumn(self._rows.to(dtype))

    def subcolumn(self, rows: Tensor) -> Any:
        """Refuse: some of ``rows`` may lie on another rank.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{len(rows)} rows were asked of a column that has this rank's own {len(self._rows)} rows and no "
            "halo; give the column to a layer, or set it anew (block.srcdata[name] = rows) to exchange it"
        )


@final
class HaloFrame(Frame):
    """The sources' side of a message passing: columns of ``own``, with their halo once they are read.

    Which columns are exchanged, and in which order, follows from what is read, so all ranks must read alike;
    DGL's functions do, also where a rank has no edge.

    Args:
        own: The columns; not changed.
        fetch: Gives the rows of all sources.
        num_sources: How many these are.
    """

    def __init__(self, own: Frame, fetch: FetchSources, num_sources: int) -> None:
        super().__init__(num_rows=num_sources)
        self._own, self._fetch = own, fetch
        self.read: dict[str, Tensor] = {}
        """What was brought, by name: each column once."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.read:
            self.read[name] = self._fetch(name, self._own[name])
        return self.read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def keys(self) -> Any:
        """Names of the columns."""
        return self._own.keys()

    def subframe(self, rows: Tensor) -> Any:
        """Return the columns at ``rows``, (K,) places among the sources, each gathered when it is read."""
        return _Gathered(self, rows)


@final
class _Gathered(Mapping[str, Tensor]):
    """What a user-defined message function sees of the sources of its edges."""

    def __init__(self, frame: HaloFrame, rows: Tensor) -> None:
        self._frame, self._rows = frame, rows

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._frame:
            raise KeyError(name)
        rows: Tensor = self._frame[name].index_select(0, self._rows.long())
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


@final
class EmptyPartition(TorchFunctionMode):
    """While it is on, ``view`` and ``reshape`` complete -1 for a tensor without rows, too.

    ``h.view(len(h), -1, width)``, which the residuals of DGL's attention layers write, has any number there
    for torch; here it has that of a tensor with rows.

    Args:
        owner: Who turns it on by :meth:`turn_on`; None: it is used in a ``with``.
    """

    def __init__(self, owner: object = None) -> None:
        super().__init__()
        self._owner = owner

    def turn_on(self) -> None:
        """Turn it on in this thread, until :meth:`turn_off`."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __exit__(self, *error: Any) -> None:
        """Turn it off, and those inside that an interrupt left on: torch calls no hooks then."""
        while (mode := _current_mode()) is not self and isinstance(mode, EmptyPartition):
            mode.__exit__()
        super().__exit__(*(error or (None, None, None)))  # type: ignore[no-untyped-call]  # torch leaves it bare

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Complete the shape where ``func`` is one of those two."""
        if func in _RESHAPING and not kwargs and not args[0].numel():
            given = args[1] if isinstance(args[1], Sequence) else args[1:]
            if all(isinstance(size, int) for size in given):
                return func(args[0], _complete_shape(args[0].shape, given))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def turn_off(owner: object) -> None:
        """Turn off the one that was turned on last in this thread, if it is on and ``owner`` did it."""
        mode = _current_mode()
        if isinstance(mode, EmptyPartition) and mode._owner is owner:
            mode.__exit__()


def _current_mode() -> object:
    return _get_current_function_mode()  # type: ignore[no-untyped-call]  # torch leaves it bare


_RESHAPING: tuple[Callable[..., Any], ...] = (Tensor.view, Tensor.reshape, torch.reshape)


def _complete_shape(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return ``wanted``, where -1 stands for what makes rows as long as those of ``shape``."""
    known = math.prod(size for size in wanted[1:] if size != -1)
    if len(shape) < 2 or shape[0] or not wanted or wanted[0] or -1 not in wanted or not known:
        return tuple(wanted)
    return tuple(math.prod(shape[1:]) // known if size == -1 else size for size in wanted)


def tie_gradient(output: Any, rows: Tensor) -> Any:
    """Return ``output``, such that backward through any tensor of it reaches ``rows``, with zeros.

    Args:
        output: A tensor, or tuples, lists and dicts that hold some.
        rows: What the exchange returned.
    """
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return output
    leaves, layout = tree_flatten(output)
    places = [n for n, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    tied = _TieGradient.apply(rows, *[leaves[n] for n in places]) if places else ()  # type: ignore[no-untyped-call]  # torch leaves it bare
    for place, tensor in zip(places, tied, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, layout)


def reduce_without_edges(block: Any, message: Any, reduce: Any) -> dict[str, Tensor]:
    """Return what a user-defined reduction leaves where no message arrives: zeros, as DGL fills in.

    DGL calls no user-defined reduction on a graph without edges and sets no column, so code that reads the
    result would fail on such a rank alone. The columns' names and shapes come from one imaginary edge, whose
    message reads the same columns of the sources as on other ranks: what is exchanged then is exchanged.

    Args:
        block: Of one edge type, without edges; not changed.
        message: As of ``update_all``.
        reduce: A function of nodes with a mailbox.

    Returns:
        (targets, ...) per column, tied to the columns that were read.
    """
    read: dict[str, Tensor] = {}

    def fetch(name: str, rows: Tensor) -> Tensor:
        read[name] = rows
        return _one_row(rows)

    imagined = _one_edge_block(block)
    imagined._node_frames[0] = HaloFrame(block._node_frames[0], fetch, 1)
    before = dict(imagined.dstdata.items())
    imagined.update_all(message, reduce)
    columns = {
        name: rows.new_zeros((block.num_dst_nodes(), *rows.shape[1:]))
        for name, rows in imagined.dstdata.items()
        if before.get(name) is not rows
    }
    for rows in read.values():
        columns = tie_gradient(columns, rows)
    return columns


def _one_edge_block(block: Any) -> Any:
    """Return a block of one edge, whose destination and edge have the columns of ``block``, zeros."""
    (source, relation, destination), device = block.canonical_etypes[0], block.device
    ends = torch.zeros(1, dtype=block.idtype, device=device)
    one = dgl.create_block({(source, relation, destination): (ends, ends)}, {source: 1}, {destination: 1})
    for theirs, ours in ((one.dstdata, block.dstdata), (one.edata, block.edata)):
        for name, rows in ours.items():
            theirs[name] = _one_row(rows)
    return one


def _one_row(rows: Tensor) -> Tensor:
    return torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)


class _TieGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.options = rows.shape, {"dtype": rows.dtype, "device": rows.device}
        # Clones, for autograd forbids changing views of several outputs in place, and users do.
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch.zeros(ctx.shape, **ctx.options), *gradients


@final
class InEdgesOnly:
    """The attribute ``_graph`` of a DGL graph, whose value refuses to be reversed in forward.

    DGL reverses a graph to sum over the out-edges of a source, which are not all here: a softmax over the
    edges of each source would be one over those of them that this rank has. In backward DGL does the same to
    fetch gradients to this rank's copies of the sources, which is what the exchange adds up.
    """

    def __get__(self, graph: Any, owner: Any = None) -> Any:
        if graph is None:
            return self
        try:
            return graph.__dict__["_graph"]
        except KeyError:
            raise AttributeError("_graph") from None

    def __set__(self, graph: Any, index: HeteroGraphIndex) -> None:
        # DGL makes a new index where a graph changes its device, its formats or its integers.
        index.__class__ = _InEdgesOnlyIndex
        graph.__dict__["_graph"] = index


class _InEdgesOnlyIndex(HeteroGraphIndex):
    """The index, whose in-edges alone are complete."""

    def reverse(self) -> Any:
        """Return the reversed index, in backward.

        Raises:
            ConfigError: in forward.
        """
        # -1: no backward is running, see torch.autograd.graph.
        if torch._C._current_graph_task_id() == -1:
            refuse_reversed("this")
        return super().reverse()


def refuse_reversed(what: str) -> NoReturn:
    """Raise ConfigError: ``what`` reads the out-edges of a source."""
    raise ConfigError(
        f"{what} sums over the out-edges of each source, which lie on several ranks (dgl.reverse, "
        "edge_softmax(norm_by='src'), and EdgeWeightNorm('both'), which SGConv, TAGConv, APPNPConv and "
        "GCN2Conv call for edge weights); normalise the weights of the whole graph beforehand, load them as "
        "an edge feature and give them to GraphConv(norm='none'), or use EdgeWeightNorm('right')"
    )


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
        self.repeats_first_row = needs_repeated_row(layer)
        self.exchange = exchange
        self._nodes, self._fetch_out_degrees = nodes, out_degrees
        # In a list that blocks of other layers on the same structure share, for asking reads every edge.
        self._degrees: list[Tensor] = []

    def out_degrees(self) -> Tensor | None:
        """Return (num_sources,) out-degrees in the whole graph; None: nobody said how to know them."""
        if not self._degrees and self._fetch_out_degrees is not None:
            self._degrees.append(self._fetch_out_degrees(self._nodes))
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

    _graph = InEdgesOnly()

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
        return torch.cat([whole, h[:1].detach()]) if self._halo.repeats_first_row else whole

    def set_own(self, name: str, rows: Tensor) -> None:
        """Set the (own_rows, ...) column ``name`` of the sources without exchanging it.

        ``srcdata[name]`` returns it as it is; it is exchanged by what it is given to.

        Raises:
            ConfigError: ``rows`` are not as many.
        """
        if len(rows) != self.own_rows:
            raise ConfigError(f"{len(rows)} rows of {name!r} for a block of {self.own_rows} own rows")
        self._node_frames[0][name] = OwnRowsColumn(rows)

    def set_all(self, name: str, rows: Tensor) -> None:
        """Set the column ``name`` of the sources to (own_rows + halo rows, ...), without exchanging.

        Raises:
            ConfigError: ``rows`` are not as many.
        """
        wanted = self.own_rows + self._halo.halo_rows
        if len(rows) != wanted:
            raise ConfigError(f"{len(rows)} rows of {name!r} for a block of {wanted} own and halo rows")
        if self._halo.repeats_first_row:
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
        block = self._with_fetched_sources()
        # DGL's own functions reduce nothing to zeros that autograd still sees the sources behind.
        if self.num_edges() or isinstance(reduce_func, BuiltinFunction):
            DGLBlock.update_all(block, message_func, reduce_func, apply_node_func, etype)
            return
        columns = reduce_without_edges(block, message_func, reduce_func)
        if apply_node_func is not None:
            seen = {**self.dstdata, **columns}
            columns = invoke_node_udf(self, ALL, self.dsttypes[0], apply_node_func, ndata=seen)
        self._set_n_repr(1, ALL, columns)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Compute columns of the edges from their ends, as DGL does."""
        DGLBlock.apply_edges(self._with_fetched_sources(), func, edges, etype)

    def __getitem__(self, key: Any) -> Any:
        # There is one edge type, and DGL would make a slice that lacks the halo.
        keys = key if isinstance(key, tuple) else (slice(None), key, slice(None))
        if len(keys) != 3 or not self._find_etypes(keys):
            raise ConfigError(f"edge type {key!r} is not {self.canonical_etypes[0]}, the block's only one")
        return self

    def _with_fetched_sources(self) -> HaloBlock:
        """Return this block, whose columns of own rows are exchanged when messages read them."""
        own = self._node_frames[0]
        if not any(isinstance(column, OwnRowsColumn) for column in own._columns.values()):
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


@final
class OwnCount(Tensor):
    """(1,) int64 what ``batch_num_nodes`` of a local graph returns.

    DGL repeats_first_row rows of a graph for its nodes by it (``broadcast_nodes``), which is right on every rank; and
    it sums, averages and normalises over all nodes by it, which would be over this rank's alone.
    """

    @classmethod
    def of(cls, count: int, device: torch.device) -> OwnCount:
        """Return the count of this rank."""
        return torch.tensor([count], device=device).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow repetition.

        Raises:
            ConfigError: anything else is done with the count.
        """
        if func is not torch.repeat_interleave:
            raise ConfigError(
                "a function of all nodes or edges of a local graph would be one of this rank's alone; reduce "
                "the rows of ndata, and sum over the ranks with torch.distributed.all_reduce"
            )
        plain = [one.as_subclass(Tensor) if isinstance(one, OwnCount) else one for one in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))
