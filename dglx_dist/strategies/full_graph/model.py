"""A replicated model that trains on halo blocks: its layers exchange rows, its gradients are summed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, final

import dgl
import torch
from dgl import DGLGraph
from dgl.base import ALL, is_all
from dgl.frame import Frame
from dgl.nn import pytorch as dglnn
from dgl.nn.pytorch import glob
from dgl.nn.pytorch.conv.graphconv import EdgeWeightNorm
from dgl.nn.pytorch.conv.hgtconv import HGTConv
from dgl.view import HeteroNodeView
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import set_checkpoint_early_stop

from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.dropout import install_node_dropouts
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import Parts, Reduction, WrappedModel, find_share, gradient_weight
from dglx_dist.strategies.data_parallel import broadcast_state, check_frozen, check_same_model
from dglx_dist.strategies.full_graph.halo_block import (
    EmptyPartition,
    HaloBlock,
    HaloFrame,
    InEdgesOnly,
    OwnCount,
    refuse_reversed,
    tie,
)
from dglx_dist.strategies.full_graph.halo_exchange import wire_of
from dglx_dist.strategies.gradient_sync import BufferMeans, GradientExchange, mark_output


@final
@dataclass(frozen=True)
class _Brought:
    """A column that was exchanged, and what it was exchanged from."""

    own: Tensor
    version: int
    """:data:`_UNKNOWN` where changes of it are not counted."""
    whole: Tensor

    def is_of(self, rows: Tensor) -> bool:
        """Whether ``rows`` are the same values, seen by autograd in the same way."""
        same = rows.data_ptr() == self.own.data_ptr() and rows.shape == self.own.shape
        with_gradient = rows.requires_grad and torch.is_grad_enabled()
        return (
            same
            and rows.dtype == self.own.dtype
            and rows.stride() == self.own.stride()
            and _version_of(rows) == self.version != _UNKNOWN
            # Two tensors on one memory may still have gradients of their own.
            and (rows is self.own or not with_gradient)
            and with_gradient == self.whole.requires_grad
        )


_UNKNOWN = -1


def _version_of(rows: Tensor) -> int:
    # Of what was made in inference mode torch counts no changes.
    return _UNKNOWN if rows.is_inference() else rows._version


def _refused(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name} of a local graph: {why}")

    return refuse


_FIXED = "its structure is planned with all ranks; change the graph before it is partitioned"
_ENDS = (
    "the sources of its edges lie on several ranks, so they have no rows here; use update_all or "
    "apply_edges, which see both ends"
)
_ALL_EDGES = (
    "messages go along all edges at once, or the ranks would not agree on what to exchange; use update_all"
)


@final
class LocalGraph(DGLGraph):
    """This rank's nodes of a graph, as a homogeneous DGL graph that any ``dgl.nn`` module takes.

    Nodes are the rank's own, and so are the rows of ``ndata`` and of all tensors that models take and return;
    edges are all in-edges of these nodes. ``update_all`` and ``apply_edges`` exchange the columns that
    messages read of the sources, each once per value; so all layers of a model, and several hops in one layer
    (SGConv, TAGConv, ChebConv, APPNPConv), compute what they compute on the whole graph, gradients included.
    Every rank must do the same with it in the same order. In- and out-degrees are those of the whole graph.

    A column whose halo was fetched beforehand (``use_pp``) is not exchanged again, as long as a layer is
    given it as it is.

    What is refused: functions of the reversed graph (``edge_softmax(norm_by="src")``,
    ``EdgeWeightNorm("both")``, and with it edge weights of SGConv, TAGConv, APPNPConv and GCN2Conv), edges by
    their ends, subgraphs, other graphs made of it, readouts over all nodes, and ``dgl.ops`` on it, all of
    which would see this rank alone.

    Args:
        block: Of one layer whose destinations are all of its own rows.
    """

    _graph = InEdgesOnly()

    def __init__(self, block: HaloBlock) -> None:
        rows, own = block.num_dst_nodes(), block.own_rows
        if rows != own:
            raise ConfigError(
                f"a local graph needs the edges of all {own} own rows, and the block has {rows} "
                "destinations; plan one layer with every node as a seed"
            )
        (source, relation, _) = block.canonical_etypes[0]
        frames = [Frame(dict(block.dstdata.items()), num_rows=rows)]
        super().__init__(block._graph, [source], [relation], frames, [*block._edge_frames])
        self._block = block
        self._known: tuple[_Brought, ...] = ()
        self._brought: dict[str, _Brought] = {}
        self.step_share: StepShare | None = None
        """How many of all targets are among this rank's nodes; what a mean over them is weighed by."""
        self.step_number = 0
        """The training step, for dropouts that are the same on any number of ranks."""

    def keep_halo(self, name: str, halo: Tensor) -> None:
        """Let the column ``name`` have the rows ``halo``, (n_halo, ...), whenever it is read as it is now."""
        own = self.ndata[name]
        self._block.set_all(name, torch.cat([own, halo]))
        whole = self._block.srcdata.pop(name)
        self._known = (*self._known, _Brought(own, _version_of(own), whole))

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        """Return the in-degrees of this rank's nodes, as DGL does; all their in-edges are here."""
        return self._block.in_degrees(v)

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Return the out-degrees of this rank's nodes in the whole graph, as DGL does."""
        return self._block.out_degrees(u)[: self.num_nodes()] if is_all(u) else self._block.out_degrees(u)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes this rank has."""
        return int(self._block.own_rows)

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes this rank has: sources on other ranks have no rows here."""
        return self.num_nodes()

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes this rank has."""
        return self.num_nodes()

    @property
    def nodes(self) -> Any:
        """As of DGL graphs."""
        return _OwnNodes(self, self.get_ntype_id)

    srcnodes = dstnodes = nodes

    def update_all(
        self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """Send messages along all edges and reduce them, as DGL does; the sources' columns are exchanged."""
        self._messages().update_all(message_func, reduce_func)
        if apply_node_func is not None:
            self.apply_nodes(apply_node_func)

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Compute columns of all edges from their ends, as DGL does; the sources' columns are exchanged."""
        if not is_all(edges):
            raise ConfigError(f"apply_edges of a local graph on some edges: {_ALL_EDGES}")
        self._messages().apply_edges(func)

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Forget the columns that are set inside, as DGL does, and what was exchanged of them."""
        before = self._brought
        self._brought = dict(before)
        with super().local_scope():
            yield
        self._brought = before

    def to(self, device: Any, **kwargs: Any) -> LocalGraph:
        """Return the graph on another device."""
        moved: LocalGraph = super().to(device, **kwargs)
        if moved is self:
            return self
        moved._block = self._block.to(device, **kwargs)
        moved._brought, names = {}, list(self.ndata.keys())
        moved._known = tuple(
            _Brought(rows, _version_of(rows), one.whole.to(device, **kwargs))
            for one in self._known
            for rows in [moved.ndata[name] for name in names if self.ndata[name] is one.own]
        )
        return moved

    def _messages(self) -> HaloBlock:
        """Return the block whose sources are this graph's nodes, exchanged when they are read."""
        (own,) = self._node_frames
        block: HaloBlock = self._block.__copy__()
        block._node_frames = [HaloFrame(own, self._bring, self._block.num_src_nodes()), own]
        block._edge_frames = self._edge_frames
        return block

    def _bring(self, name: str, rows: Tensor) -> Tensor:
        before = self._brought.get(name)
        for one in self._known if before is None else (*self._known, before):
            if one.is_of(rows):
                return one.whole
        whole = self._block.all_rows(rows)
        self._brought[name] = _Brought(rows, _version_of(rows), whole)
        return whole

    def _set_n_repr(self, ntid: int, u: Any, data: Any) -> None:
        if not is_all(u):
            self._node_frames[0].update_row(torch.as_tensor(u, device=self.device).long(), data)
            return
        for name, rows in data.items():
            if len(rows) != self.num_nodes():
                raise ConfigError(
                    f"{len(rows)} rows of {name!r} for a local graph of {self.num_nodes()} nodes; give it "
                    "the rows of this rank's nodes"
                )
        self._node_frames[0].update(data)

    def _pop_n_repr(self, ntid: int, key: str) -> Any:
        self._brought.pop(key, None)
        return super()._pop_n_repr(ntid, key)

    def __getitem__(self, key: Any) -> Any:
        self._block[key]  # refuses what is not the one edge type
        return self

    @property
    def batch_size(self) -> int:
        """1: this is one graph."""
        return 1

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Return (1,) how many nodes this rank has, for ``dgl.broadcast_nodes``; readouts are refused."""
        return OwnCount.of(self.num_nodes(), self.device)

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        """Return (1,) how many edges this rank has, for ``dgl.broadcast_edges``; readouts are refused."""
        return OwnCount.of(self.num_edges(), self.device)

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        """Return whether this rank has the nodes ``vid``, as DGL does."""
        ids = torch.as_tensor(vid)
        found = (ids >= 0) & (ids < self.num_nodes())
        return found if ids.dim() else bool(found)

    add_nodes = _refused("add_nodes", _FIXED)
    add_edges = _refused("add_edges", _FIXED)
    remove_nodes = _refused("remove_nodes", _FIXED)
    remove_edges = _refused("remove_edges", _FIXED)
    add_self_loop = _refused("add_self_loop", _FIXED)
    remove_self_loop = _refused("remove_self_loop", _FIXED)
    to_simple = _refused("to_simple", _FIXED)
    reorder_graph = _refused("reorder_graph", _FIXED)
    all_edges = _refused("all_edges", _ENDS)
    find_edges = _refused("find_edges", _ENDS)
    in_edges = _refused("in_edges", _ENDS)
    out_edges = _refused("out_edges", _ENDS)
    edge_ids = _refused("edge_ids", _ENDS)
    has_edges_between = _refused("has_edges_between", _ENDS)
    predecessors = _refused("predecessors", _ENDS)
    successors = _refused("successors", _ENDS)
    reverse = _refused("reverse", _ENDS)
    adj = _refused("adj", _ENDS)
    adj_external = _refused("adj_external", _ENDS)
    adj_tensors = _refused("adj_tensors", _ENDS)
    inc = _refused("inc", _ENDS)
    line_graph = _refused("line_graph", _ENDS)
    adjacency_matrix = _refused("adjacency_matrix", _ENDS)
    incidence_matrix = _refused("incidence_matrix", _ENDS)
    to_networkx = _refused("to_networkx", _ENDS)
    to_cugraph = _refused("to_cugraph", _ENDS)
    filter_edges = _refused("filter_edges", _ENDS)
    subgraph = _refused("subgraph", _ENDS)
    edge_subgraph = _refused("edge_subgraph", _ENDS)
    in_subgraph = _refused("in_subgraph", _ENDS)
    out_subgraph = _refused("out_subgraph", _ENDS)
    khop_in_subgraph = _refused("khop_in_subgraph", _ENDS)
    khop_out_subgraph = _refused("khop_out_subgraph", _ENDS)
    node_type_subgraph = _refused("node_type_subgraph", _ENDS)
    edge_type_subgraph = _refused("edge_type_subgraph", _ENDS)
    sample_neighbors = _refused("sample_neighbors", _ENDS)
    global_uniform_negative_sampling = _refused("global_uniform_negative_sampling", _ENDS)
    send_and_recv = _refused("send_and_recv", _ALL_EDGES)
    pull = _refused("pull", _ALL_EDGES)
    push = _refused("push", _ALL_EDGES)
    prop_nodes = _refused("prop_nodes", _ALL_EDGES)
    prop_edges = _refused("prop_edges", _ALL_EDGES)
    multi_update_all = _refused("multi_update_all", _ALL_EDGES)


@final
class _OwnNodes(HeteroNodeView):
    """``g.nodes`` of a local graph."""

    __slots__ = ()

    def __call__(self, ntype: str | None = None) -> Tensor:
        return torch.arange(self._graph.num_nodes(), dtype=self._graph.idtype, device=self._graph.device)


NO_BLOCKS: tuple[type[nn.Module], ...] = (
    dglnn.APPNPConv,
    dglnn.AtomicConv,
    dglnn.ChebConv,
    dglnn.DGNConv,
    dglnn.EGNNConv,
    dglnn.GatedGraphConv,
    dglnn.GCN2Conv,
    dglnn.GroupRevRes,
    dglnn.PNAConv,
    dglnn.SGConv,
    dglnn.TAGConv,
    dglnn.TWIRLSConv,
    dglnn.TWIRLSUnfoldingAndAttention,
)
"""Layers of DGL that run on whole graphs and on no block."""

_OF_EDGES = ("efeat", "efeats", "e", "w")


@final
class Hooks:
    """What :func:`install` put on a model."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take it off again."""
        for handle in self._handles:
            handle.remove()


def install(model: nn.Module) -> Hooks:
    """Make the modules of ``model`` that are called with a ``HaloBlock`` and rows exchange these first.

    The rows are the argument behind the block, or else the one before it: a tensor of two dimensions or more,
    or a pair of sources and destinations. It is exchanged in the outermost module that gets it, thus once,
    and as wide as that module's input (algorithms 3.1); what has a row for each source already stays. Other
    tensors of own rows, also those of one dimension, are exchanged when they are set on the block's sources.
    An argument whose name begins with "edge" or is "efeat", "efeats", "e" or "w" is never taken for rows of
    nodes; nor should another be one of edges, for it would be exchanged where there are as many as own rows.

    Modules that are called without such a block do what they did; copies of the model keep the hooks. Modules
    that have them already get no more.

    Args:
        model: Of the user. Hooks go on all its modules, those inside other modules included.

    Returns:
        To take the hooks off that this call put on.
    """
    handles: list[Any] = []
    for module in model.modules():
        # One argument is no block and rows; scripted modules take no such hooks.
        if isinstance(module, torch.jit.ScriptModule) or not _takes_two(module.forward):
            continue
        if _enter in module._forward_pre_hooks.values():
            continue
        handles.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
        handles.append(module.register_forward_hook(_leave, with_kwargs=True))
        handles.append(module.register_forward_hook(_release, with_kwargs=True, always_call=True))
    return Hooks(handles)


class _Place(NamedTuple):
    """Where a call has its block and its rows."""

    block: HaloBlock
    key: int | str
    """Position or name of the argument with the rows."""
    rows: Any
    """A tensor, or a pair whose first tensor it is."""

    @property
    def sources(self) -> Tensor:
        """Rows of the sources."""
        found: Tensor = self.rows if torch.is_tensor(self.rows) else self.rows[0]
        return found


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Exchange the rows among the arguments; torch's forward pre-hook."""
    if isinstance(module, EdgeWeightNorm):
        _check_norm(module, args, kwargs)
    if not _has_block(args, kwargs):
        return None
    if isinstance(module, NO_BLOCKS):
        raise ConfigError(
            f"{type(module).__name__} got a block, and DGL runs it on whole graphs alone (it writes rows "
            "where it reads them, as layers of several hops do); call the model as model(g, x) with "
            "g = dx.local_graph(...)"
        )
    place = _find(module, args, kwargs)
    if place is not None and len(place.sources) == place.block.own_rows:
        whole = place.block.all_rows(place.sources)
        given = whole if torch.is_tensor(place.rows) else (whole, place.rows[1])
        args, kwargs = _with(args, kwargs, place.key, given)
        for key, name, value in _named(module.forward, args, kwargs):
            if name == "ntype" and isinstance(module, HGTConv) and len(value) == place.block.own_rows:
                args, kwargs = _with(args, kwargs, key, place.block.all_rows(value))
    if _has_no_targets(args, kwargs):
        EmptyPartition(module).turn_on()
    return args, kwargs


def _with(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def _release(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Turn off what ``_enter`` turned on, also where forward raised; torch's forward hook."""
    if _has_no_targets(args, kwargs):
        # Where the exchange raised, it was not turned on, and one that is on belongs to an outer module.
        EmptyPartition.turn_off(module)


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Tie the output of a rank without edges to what it exchanged; torch's forward hook."""
    place = _find(module, args, kwargs) if _has_block(args, kwargs) else None
    if place is None or place.block.num_edges():
        return None
    return tie(output, place.sources)


def _find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Place | None:
    """Find a block and its rows, by what does not depend on how many rows this rank has."""
    named = _named(module.forward, args, kwargs)
    at = next(n for n, (_, _, value) in enumerate(named) if isinstance(value, HaloBlock))
    block = named[at][2]
    for key, name, value in (*named[at + 1 : at + 2], *(named[at - 1 : at] if at else ())):
        if isinstance(value, dict):
            raise ConfigError(
                f"{type(module).__name__} got a dict of rows for a block of one node type; full-graph "
                "strategies train on graphs of one node and one edge type: use strategy='data_parallel'"
            )
        if not name.startswith("edge") and name not in _OF_EDGES and _is_rows(value):
            return _Place(block, key, value)
    return None


def _named(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[int | str, str, Any]]:
    """Return (position or name, name, value) of the arguments, in the order of the function's parameters."""
    names = list(inspect.signature(forward).parameters)
    found: list[tuple[int | str, str, Any]] = [
        (n, names[n] if n < len(names) else "", value) for n, value in enumerate(args)
    ]
    order = {name: n for n, name in enumerate(names)}
    for name in sorted(kwargs, key=lambda name: order.get(name, len(order))):
        found.append((name, name, kwargs[name]))
    return found


def _has_no_targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    blocks = (one for one in (*args, *kwargs.values()) if isinstance(one, HaloBlock))
    return any(not block.num_dst_nodes() for block in blocks)


def _has_block(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, HaloBlock) for value in (*args, *kwargs.values()))


def _is_rows(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.dim() > 1
    # DGL's convolutions take a pair as a tuple, and so do not mistake a list for one.
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(torch.is_tensor(one) and one.dim() for one in value)


def _check_norm(module: EdgeWeightNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    several = any(isinstance(value, HaloBlock | LocalGraph) for value in (*args, *kwargs.values()))
    if module._norm == "both" and several:
        refuse_reversed("EdgeWeightNorm('both')")


def _takes_two(forward: Callable[..., Any]) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    many = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return len(kinds) > 1 or any(kind in many for kind in kinds)


def check_rows_stay_apart(model: nn.Module) -> None:
    """Raise ConfigError if a module of ``model`` mixes rows of nodes that are no neighbours."""
    for name, module in model.named_modules():
        where = (
            f"{name!r} is a {type(module).__name__}" if name else f"the model is a {type(module).__name__}"
        )
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"{where}: its statistics would be those of this rank's rows, and rows that several ranks "
                "hold would count twice; use torch.nn.LayerNorm, or strategy='data_parallel'"
            )
        # Compared by where it is defined: the module has no common base class.
        if type(module).__module__ == glob.__name__:
            raise ConfigError(
                f"{where}, which reads all nodes of a graph at once, while a rank has some of them; layers "
                "must compute a node's row from its in-neighbours' alone: leave it out of the wrapped model, "
                "and apply it to the rows of all nodes, as dx.layerwise_inference gives them"
            )


def check_rows_out(output: Any, blocks: list[HaloBlock]) -> None:
    """Raise ConfigError if a model returned the rows of an earlier level than that of the seeds.

    Args:
        output: What the model returned; only a tensor of rows is looked at.
        blocks: Those it was given, input-most first.
    """
    if not torch.is_tensor(output) or output.dim() < 2:
        return
    targets = blocks[-1].num_dst_nodes()
    earlier = {block.own_rows for block in blocks} - {targets}
    if len(output) != targets and len(output) in earlier:
        raise ConfigError(
            f"the model returned {len(output)} rows for {targets} seeds, as if it had fewer layers than the "
            f"{len(blocks)} blocks it was given; it must take one block after the other, and the sampler "
            "must have as many layers as the model has convolutions"
        )


@final
class HaloModel(WrappedModel):
    """The user's model on halo blocks, or on a local graph, with the gradients of one process on every rank.

    Forward and backward are collective on these: every rank must run both in every step, also without
    targets, and call its layers in the same order. On other blocks forward never communicates.

    The loss is the mean over (or the sum of) this rank's own targets. Its weight n_local / n_global is
    applied where the gradient enters the model, at its output: layers hand gradients of halo rows to the
    ranks that computed these, where they must count as what they are of the whole. ``nn.Dropout`` anywhere
    in the model drops by (seed, step, node, column), so that results do not depend on the number of ranks.

    Args:
        model: The user's model; changed in place: hooks and dropouts that act on halo blocks only.
        session: The run.
        reduction: What the user's loss is over its own targets.
        bucket_bytes: Gradients that are sent together.

    Raises:
        ConfigError: the model has a module that mixes rows of nodes that are no neighbours, as a batch norm
            does, whose statistics would count rows of several ranks twice; or as for data parallel models.
    """

    def __init__(
        self, model: nn.Module, session: Session, *, reduction: Reduction, bucket_bytes: int
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction={reduction!r} must be 'mean' or 'sum'")
        check_same_model(model, session, f"reduction={reduction}, bucket_bytes={bucket_bytes}")
        check_rows_stay_apart(model)
        self.module = model
        self._session, self._reduction = session, reduction
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained = {id(parameter) for _, parameter in trained}
        broadcast_state(model, session)
        install(model)
        self._dropouts = install_node_dropouts(model, session.seed)
        self._exchange = GradientExchange(trained, session, bucket_bytes)
        self._buffer_means = BufferMeans(model, session, reduction)
        if self._buffer_means.needed:
            self._exchange.after_backward(self._buffer_means.average)
        self._wire = wire_of(session)

    @property
    def parts(self) -> Parts:
        """All parameters are replicated."""
        return Parts(replicated=tuple(name for name, _ in self.module.named_parameters()), local=())

    def exchange_seconds(self, *, reset: bool = False) -> float:
        """Seconds that this rank stood waiting for halo rows, their gradients and those of parameters."""
        return self._exchange.seconds(reset=reset) + self._wire.seconds(reset=reset)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module; what is special about a step is read from the blocks among the arguments.

        Raises:
            ConfigError: in training, the blocks are not those of the strategy's loader, a parameter was
                unfrozen after wrapping, the model has fewer layers than there are blocks, or it is given
                what another wrapped model returned for the targets.
        """
        graphs = list(_exchanging((*args, *kwargs.values())))
        if not graphs:
            return self._on_other_blocks(args, kwargs)
        _check_not_weighed((args, kwargs))
        if self.training:
            self._dropouts.begin(graphs[0].step_number, graphs[0].srcdata[dgl.NID])
            if isinstance(graphs[0], LocalGraph):
                # One and the same for all steps, while a loader numbers its blocks.
                graphs[0].step_number += 1
        has_targets = all(one.num_dst_nodes() for one in graphs)
        # What backward computes again goes to its end: else torch stops where a rank has all it needs, which
        # may lie before an exchange on one and behind it on another.
        with set_checkpoint_early_stop(False), nullcontext() if has_targets else EmptyPartition():
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() or not self._trained:
            return output
        blocks = [one for one in graphs if isinstance(one, HaloBlock)]
        if blocks:
            check_rows_out(output, blocks)
        check_frozen(self.module, self._trained)
        world_size = self._session.topology.world_size
        if self._reduction == "sum":
            return mark_output(output, (self._exchange, 1.0))
        share = find_share((graphs,), self._session)
        weight = gradient_weight(share, self._reduction)
        # Of a block that is not the last one nothing is weighed: its rows go on to another model.
        is_even = share == StepShare(num_local=1, num_global=world_size)
        weighed = output if is_even else weigh_gradients(output, world_size * weight)
        # 1 / W of what was multiplied by W: a penalty on the weights, which goes past the model's output,
        # counts once in all, not once per rank.
        return mark_output(weighed, (self._exchange, 1.0 / world_size))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :meth:`WrappedModel.load_state_dict`."""
        result = super().load_state_dict(state_dict, strict, assign)
        self._buffer_means.note()
        return result

    def _on_other_blocks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.training and torch.is_grad_enabled() and self._trained:
            raise ConfigError(
                "the wrapped model was given neither blocks of the strategy's loader nor dx.local_graph(g), "
                "which know what the other ranks need; feed it from dx.DataLoader, or evaluate model.whole() "
                "under torch.no_grad()"
            )
        return self.module(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # What .to(), .double() and the like call: the buffers to compare with must come along.
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it bare
        self._buffer_means.note()
        return result


def weigh_gradients(output: Any, weight: float) -> Any:
    """Return what a model returned, such that gradients of its tensors arrive ``weight`` times.

    Args:
        output: A tensor, or tuples, lists and dicts that hold some.
        weight: A gradient that is not finite stays so, also with weight 0.
    """

    def weighed(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or not leaf.is_floating_point():
            return leaf
        return _Weighed.apply(leaf, weight)  # type: ignore[no-untyped-call]  # torch leaves it bare

    return tree_map(weighed, output)


class _Weighed(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight, None


def _check_not_weighed(arguments: Any) -> None:
    """Raise ConfigError if a tensor was computed from what a wrapped model returned for its targets."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "_forward_cls", None) is _Weighed:
            raise ConfigError(
                "a wrapped model was given what a wrapped model returned, so gradients would be weighed by "
                "this rank's share of the targets twice; put both into one nn.Module and wrap that, or wrap "
                "both with reduction='sum'"
            )
        waiting += [following for following, _ in node.next_functions]


def _exchanging(arguments: tuple[Any, ...]) -> Iterator[HaloBlock | LocalGraph]:
    """Yield the graphs among a model's arguments whose rows lie on several ranks."""
    for argument in arguments:
        for one in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(one, HaloBlock | LocalGraph):
                yield one
