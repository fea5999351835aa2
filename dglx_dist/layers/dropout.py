"""Dropout with masks keyed by node and edge ids, and column ranges for split inputs.

Ranks that compute a row for the same node drop the same entries, so any number of ranks trains the same model
as one process.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from numba import njit
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dglx_dist.comm.devices import is_on_host
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import NO_BACKWARD, current_backward, tree_leaves
from dglx_dist.keyed_random import item_key, stream_key
from dglx_dist.layers.masks import ColumnRange, count_dropped, draw_bits, draw_kept_entries, draw_on_device
from dglx_dist.records import ROW_ID, Array


def deal_out_columns(width: int, parts: int) -> tuple[ColumnRange, ...]:
    """Divide ``width`` columns evenly into (parts,) contiguous ranges, as in the paper on P3.

    The first ``width % parts`` ranges have one column more than the others. If there are more parts than
    columns, the last ranges are empty.
    """
    shortest, num_longer = divmod(width, parts)
    ends = [(part + 1) * shortest + min(part + 1, num_longer) for part in range(parts)]
    bounds = [0, *ends]
    return tuple(ColumnRange(first=first, last=last, width=width) for first, last in pairwise(bounds))


def deal_out_concatenated(widths: Sequence[int], parts: int) -> tuple[tuple[ColumnRange, ...], ...]:
    """Divide the columns of several matrices evenly among the parts in a group, matrix by matrix.

    The matrices are concatenated along their columns, and ranges count columns in the concatenation.

    Args:
        widths: Column count per matrix.
        parts: Number of parts. Each part gets a contiguous range in every matrix.

    Returns:
        One range per part and matrix, with matrices ordered as in ``widths``. A range may be empty.
    """
    total_width = sum(widths)
    ranges_of_parts: list[list[ColumnRange]] = [[] for _ in range(parts)]
    offset = 0
    for width in widths:
        for part, columns in enumerate(deal_out_columns(width, parts)):
            first = offset + columns.first
            last = offset + columns.last
            ranges_of_parts[part].append(ColumnRange(first=first, last=last, width=total_width))
        offset += width

    return tuple(map(tuple, ranges_of_parts))


# Streams for draws. They are above every sampler hop, because a sampler draws with the same seed.
INPUTS = 1 << 32
"""Stream for a layer's inputs."""
ATTENTION = (1 << 32) + 1
"""Stream for a layer's attention."""
MODULES = 1 << 33
"""First stream for modules before the layer."""
LATER_MODULES = 1 << 34
"""First stream for modules behind the layer."""


@dataclass(frozen=True, kw_only=True)
class DropDraws:
    """Keys for the dropout masks in one owner's batch."""

    seed: int
    """Random seed, at least 0."""
    number: int
    """Batch number, equal on all ranks."""
    nodes: Tensor
    """(L0,) int64 global source ids, the destinations first."""
    runs: tuple[ColumnRange, ...]
    """Columns that the part has in the uncut input, in order."""
    relation: int = 0
    """Relation number in a layer with several relations, so that each draws its own masks."""


def drop_entries(x: Tensor, probability: float, draws: DropDraws, stream: int = INPUTS) -> Tensor:
    """Set random entries to 0, and divide the others by 1 - ``probability``.

    Args:
        x: (L0, F_p) source rows with the columns that this part has.
        probability: Probability with which an entry is set to 0.
        draws: Seed, batch, nodes and columns, which determine the entries.
        stream: Number of the random stream. Other streams drop other entries.
    """
    # A relation has two streams, for its inputs and for its attention.
    stream += 2 * draws.relation
    is_kept = draw_kept_entries(draws.seed, draws.number, stream, draws.nodes, draws.runs, probability)
    return x * _scale_mask(is_kept, probability, x)


def drop_attention(block: DGLBlock, attention: Tensor, probability: float, draws: DropDraws) -> Tensor:
    """Return ``attention`` with (edge, head) entries dropped, the same ones on every part.

    Parts number edges differently. Therefore an edge is keyed by its destination and its position among the
    destination's in-edges, which parts get from the owner.

    Args:
        attention: (E1, K, 1) values.
        draws: The owner's keys.
    """
    indptr, _, edge_ids = block.adj_tensors("csc")
    stream = stream_key(draws.seed, draws.number, ATTENTION + 2 * draws.relation)
    threshold = count_dropped(probability)
    starts = indptr.long()
    nodes = draws.nodes[: block.num_dst_nodes()]
    heads = attention.shape[1]
    if is_on_host(starts):
        is_kept = torch.from_numpy(_draw_kept_edges(stream, nodes.numpy(), starts.numpy(), heads, threshold))
    else:
        num_edges = len(attention)
        targets = torch.arange(len(nodes), device=starts.device)
        targets = targets.repeat_interleave(starts.diff(), output_size=num_edges)
        positions = torch.arange(num_edges, device=starts.device) - starts[targets]
        draw_numbers = (positions * heads).unsqueeze(1) + torch.arange(heads, device=starts.device)
        is_kept = draw_on_device(stream, nodes[targets], draw_numbers, threshold)

    scaled = _scale_mask(is_kept, probability, attention)
    if len(edge_ids):
        # Reorder from the CSC matrix to the block's edge numbers.
        scaled = torch.empty_like(scaled).index_copy_(0, edge_ids.long(), scaled)
    return attention * scaled.unsqueeze(-1)


def _scale_mask(is_kept: Tensor, probability: float, like: Tensor) -> Tensor:
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return is_kept.to(like.device, like.dtype).mul_(scale)


@njit(cache=True, nogil=True)
def _draw_kept_edges(stream: np.uint64, nodes: Array, starts: Array, heads: int, limit: np.uint64) -> Array:
    out = np.empty((starts[-1], heads), np.bool_)
    for target in range(len(nodes)):
        key = item_key(stream, nodes[target])
        for edge in range(starts[target], starts[target + 1]):
            for head in range(heads):
                out[edge, head] = draw_bits(key, (edge - starts[target]) * heads + head) >= limit
    return out


_MAX_PASSES = 4
"""Number of forward passes to remember for a later backward."""
EDGE_DROPOUTS = ("attn_drop", "edge_drop")
"""Names of dropouts in ``dgl.nn`` that are applied to edge values."""


def install_node_dropouts(model: nn.Module, seed: int) -> NodeDropouts:
    """Turn every ``nn.Dropout`` in ``model`` into a :class:`NodeDropout`. One rank may call this alone.

    Earlier :class:`NodeDropout` modules lose their state. Parameter names and buffers do not change.
    Subclasses, ``nn.AlphaDropout`` and similar classes, and calls to ``torch.nn.functional.dropout`` stay
    unchanged. Their masks depend on the rank.

    ``model`` is changed in place, and must not be a dropout itself. Before every forward pass, the caller
    must call :meth:`NodeDropouts.begin` on the result. A model without dropout stays as it is.
    """
    shared = NodeDropouts(seed)
    shared.is_installed = True
    dropouts: list[NodeDropout] = []
    for name, module in model.named_modules():
        if isinstance(module, NodeDropout):
            module.shared.remove_hooks()
        # Compare exact types, because a subclass does something else.
        if type(module) in (nn.Dropout, NodeDropout):
            # Change the object's class. A new object would lack the user's hooks, and schedules may refer to
            # this one.
            module.__class__ = NodeDropout
            dropout = cast("NodeDropout", module)
            dropout.connect(shared, number=len(dropouts), edges=name.rpartition(".")[2] in EDGE_DROPOUTS)
            dropouts.append(dropout)

    # Many DGL layers have a dropout with probability 0.
    if any(dropout.p > 0 for dropout in dropouts):
        shared.track(model)
    return shared


def has_rows(graph: Any) -> bool:
    """Return whether layers pass messages along ``graph``.

    Such graphs are blocks, or have the attribute ``has_layer_rows``, like a graph with all nodes on a rank or
    a batch's subgraph.
    """
    return bool(graph.is_block or getattr(graph, "has_layer_rows", False))


def find_pass_ids(graph: Any) -> Tensor | None:
    """Return the node ids to pass to :meth:`NodeDropouts.begin` if a pass begins with ``graph``."""
    return _get_row_ids(graph.srcdata) if len(graph.srctypes) == 1 else None


def _get_row_ids(columns: Any) -> Tensor | None:
    """Return an id per row. With a tree for each seed, a node has several rows."""
    ids: Tensor | None = columns.get(ROW_ID)
    return columns.get(dgl.NID) if ids is None else ids


@dataclass(frozen=True, eq=False)
class _DropoutCall:
    step: int
    number: int
    nodes: Tensor | None
    """The nodes in the pass."""
    graph: weakref.ref[Any] | None
    """The module's graph, if any. The reference is weak, because the graph holds features."""

    def get_graph(self) -> Any:
        graph = None if self.graph is None else self.graph()
        if graph is None and self.graph is not None:
            raise ConfigError(
                "a dropout runs again during backward, but the block of its layer has been freed, so the "
                "nodes of its rows are unknown. Keep the blocks until backward is done."
            )
        return graph


@final
class NodeDropouts:
    """State that all dropouts in a model share: the current pass, and the nodes or edges that rows belong to.

    Outside a convolution, rows belong to the first nodes in the pass, because a block's destinations come
    first among its sources, from layer to layer. This does not hold in a pass over several node types. Within
    a module that is called with a graph or a block, rows belong to its sources or edges.

    A layer that ``torch.utils.checkpoint`` recomputes gets the same masks. The state of torch's generator
    identifies its call, because checkpointing restores it, unlike a call counter. The state also identifies
    its graph, because the module that was called with the graph may not be called again.
    """

    def __init__(self, seed: int, first_stream: int = MODULES) -> None:
        self._seed, self._first_stream = seed, first_stream
        self._current: tuple[int, Tensor | None] | None = None
        """The pass's step, and its nodes."""
        self._counts: set[int] = set()
        self._num_calls: dict[int, Counter[int]] = {}
        """Dropout calls by step, the latest last, and by module in passes over several types."""
        self._calls: dict[int, _DropoutCall] = {}
        """Calls by the state of torch's generator, as a draw from it."""
        self._entries: list[tuple[nn.Module, Any, tuple[Any, ...]]] = []
        """Modules that are being called, outermost first, each with its graph and pair of rows, if any."""
        self._hooks: list[RemovableHandle] = []
        self.in_use = self.is_installed = False
        """Whether a module needs its rows' nodes, and whether the model is wrapped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeDropouts:
        # A copied model begins its own passes. Until then its dropouts work like torch's.
        memo[id(self)] = duplicate = NodeDropouts(self._seed, self._first_stream)
        duplicate._hooks = copy.deepcopy(self._hooks, memo)
        duplicate.in_use = self.in_use
        return duplicate

    def __reduce__(self) -> tuple[type[NodeDropouts], tuple[int, int]]:
        # Hooks on pickled modules have their own handles.
        return NodeDropouts, (self._seed, self._first_stream)

    def end(self) -> None:
        """Let the dropouts work like torch's until the next pass begins."""
        self._current = None

    def set_row_counts(self, arguments: Iterable[Any]) -> None:
        """Accept only rows that are as many as the sources or destinations of a block in ``arguments``."""
        leaves = [leaf for leaf in tree_leaves(list(arguments)) if isinstance(leaf, dgl.DGLGraph)]
        blocks = [leaf for leaf in leaves if has_rows(leaf)]
        self._counts = {count for block in blocks for count in (block.num_src_nodes(), block.num_dst_nodes())}

    def begin(self, number: int, nodes: Tensor | None) -> None:
        """Start a forward pass for step ``number``.

        Passes with the same number continue its call count, so two passes over one batch drop different
        entries. The oldest steps' counts are dropped.

        Args:
            number: Step number.
            nodes: (n,) int64 distinct global ids, one per row. None for a pass over several node types. Then
                only modules that are called with a graph, and :func:`drop_rows`, know their nodes.
        """
        # Removing and adding a step makes it the latest one in the dict.
        self._num_calls[number] = self._num_calls.pop(number, Counter())
        self._current = number, nodes
        self._counts = set()
        self._entries.clear()
        while len(self._num_calls) > _MAX_PASSES:
            oldest_step = next(iter(self._num_calls))
            del self._num_calls[oldest_step]
            self._calls = {key: call for key, call in self._calls.items() if call.step in self._num_calls}

    def continue_with(self, nodes: Tensor) -> None:
        """For the remaining pass, let rows belong to the (n,) int64 ``nodes`` if there are n rows."""
        if self._current is not None:
            self._current = (self._current[0], nodes)
            self._counts = {len(nodes)}
            self._entries.clear()

    def track(self, model: nn.Module) -> None:
        """Record each module's graph while the module is called, unless this is done already."""
        self.in_use = True
        for module in model.modules() if not self._hooks else ():
            # Scripted modules do not support these hooks.
            if not isinstance(module, nn.Dropout | torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                hook = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                self._hooks.append(hook)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.compiler.disable
    def drop(
        self, x: Tensor, probability: float, *, module: int, edges: bool, nodes: Tensor | None = None
    ) -> Tensor | None:
        """Return ``x`` with entries dropped, or None if the rows' nodes or edges are unknown.

        Args:
            x: A row for each source, for each of the first sources, or for each edge.
            module: The dropout's number in the model.
            edges: Whether rows belong to edges if there are as many rows as edges.
            nodes: Row keys, if the caller knows them.

        Raises:
            ConfigError: a layer is recomputed by a checkpoint that does not restore torch's generator, or
                every probability was 0 when the model was wrapped.
        """
        if self.is_installed and not self.in_use:
            raise ConfigError(
                f"a dropout has the probability {probability}, but it was 0 when the model was wrapped. Set "
                "it before dx.wrap."
            )

        if self._current is None or x.dim() == 0:
            return None
        call, graph = self._record_call(*self._current, module)
        keys = _find_edge_ids(graph, len(x)) if edges else nodes
        if keys is None and (keys := self._find_row_ids(graph, x, call.nodes)) is None:
            return None

        # The width is explicit, because -1 would be ambiguous without rows.
        flat = x.reshape(len(x), math.prod(x.shape[1:]))
        runs = (ColumnRange(first=0, last=flat.shape[1], width=flat.shape[1]),)
        draws = DropDraws(seed=self._seed, number=call.step, nodes=keys, runs=runs)
        return drop_entries(flat, probability, draws, self._first_stream + call.number).reshape(x.shape)

    def find_ids(self, x: Tensor) -> Tensor | None:
        """Return the (n,) int64 node keys for the rows in ``x`` in this pass, or None if they are unknown."""
        return None if self._current is None else self._find_row_ids(self._get_graph(), x, self._current[1])

    def _find_row_ids(self, graph: Any, x: Tensor, nodes: Tensor | None) -> Tensor | None:
        count = len(x)
        if graph is not None:
            if (keys := self._find_pair_ids(x)) is not None:
                return keys
            # If the user made the graph, its nodes are unknown.
            nodes = _find_graph_ids(graph, count)
        elif self._counts and count not in self._counts:
            return None
        return nodes[:count] if nodes is not None and count <= len(nodes) else None

    def _record_call(self, step: int, nodes: Tensor | None, module: int) -> tuple[_DropoutCall, Any]:
        """Return this call's record and the module's graph. A recomputed call gets its first record.

        Raises ConfigError if a call during backward has no record, because torch's generator was not
        restored.
        """
        state = int(torch.randint(1 << 62, ()).item())
        graph = self._get_graph()
        if current_backward() == NO_BACKWARD:  # in forward
            reference = None if graph is None else weakref.ref(graph)
            # A rank may skip a relation's module if it has no edges, so calls are counted by module here.
            kind = 0 if nodes is not None else module + 1
            number = (kind << 20) + self._num_calls[step][kind]
            call = _DropoutCall(step=step, number=number, nodes=nodes, graph=reference)
            self._calls[state] = call
            self._num_calls[step][kind] += 1
            return call, graph

        if state in self._calls:
            call = self._calls[state]
            return call, call.get_graph() if graph is None else graph
        raise ConfigError(
            "a dropout runs again during backward, and torch's generator has another state than in forward, "
            "so its mask would differ. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False) "
            "with preserve_rng_state=True, its default."
        )

    def _get_graph(self) -> Any:
        # The innermost module that has a graph decides.
        return next((graph for _, graph, _ in reversed(self._entries) if graph is not None), None)

    def _find_pair_ids(self, x: Tensor) -> Tensor | None:
        # Finds rows with which a module was called. The row count alone does not tell sources from
        # destinations.
        for _, graph, pair in reversed(self._entries):
            if graph is not None and len(pair) == 2 and len(graph.srctypes) == len(graph.dsttypes) == 1:
                if pair[0] is x:
                    return graph.srcdata.get(dgl.NID)
                return graph.dstdata.get(dgl.NID) if pair[1] is x else None
        return None

    @torch.compiler.disable
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        graphs = [leaf for leaf in tree_leaves(values) if isinstance(leaf, dgl.DGLGraph)]

        # Beside blocks, a pair graph has other rows than the layers.
        needs_rows = any(map(has_rows, graphs))
        graph: Any = None
        pair: tuple[Any, ...] = ()
        for value in reversed(values):
            if isinstance(value, dgl.DGLGraph) and has_rows(value) >= needs_rows:
                graph = value
            if isinstance(value, tuple):
                pair = value

        self._entries.append((module, graph, pair))

    @torch.compiler.disable
    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        # An error may have left entries above this one.
        while self._entries and self._entries.pop()[0] is not module:
            pass


@final
class NodeDropout(nn.Dropout):
    """Dropout that is keyed during a strategy's pass, and works like ``nn.Dropout`` at other times.

    ``number`` is its number in the model, and ``edges`` tells whether it is applied to edge values.
    """

    shared: NodeDropouts

    def connect(self, shared: NodeDropouts, *, number: int, edges: bool) -> None:
        self.shared = shared
        self._number = number
        self._edges = edges

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ((n, ...)) with entries dropped while training.

        Raises as :meth:`NodeDropouts.drop`.
        """
        return self.drop_rows(x, None)

    def drop_rows(self, x: Tensor, nodes: Tensor | None) -> Tensor:
        """Return what :meth:`forward` returns for ``x``. Use the given node keys if there are any.

        ``nodes`` are the (n,) int64 keys of the rows, if they are known.
        """
        if not self.training or self.p == 0:
            return x
        dropped = self.shared.drop(x, self.p, module=self._number, edges=self._edges, nodes=nodes)
        if dropped is None:
            return super().forward(x)
        return x.copy_(dropped) if self.inplace else dropped


DROP_ROWS = "_dglx_drop_rows"
"""Attribute in which a strategy stores a function of rows and their keys, which replaces a dropout."""


def drop_rows(dropout: nn.Dropout, x: Tensor, nodes: Tensor | None) -> Tensor:
    """Return ``dropout(x)``, keyed by the (n,) int64 ``nodes`` during a strategy's pass."""
    if isinstance(dropout, NodeDropout):
        return dropout.drop_rows(x, nodes)
    drop = vars(dropout).get(DROP_ROWS)
    return drop(x, nodes) if drop else dropout(x)


def make_type_keys(nodes: Any, ntypes: Sequence[str]) -> Tensor | None:
    """Return keys for ``nodes``, a block's view of its nodes, type by type, or None if it has no ids.

    Nodes with different types have different keys.
    """
    ids = [nodes[ntype].data.get(dgl.NID) for ntype in ntypes]
    if any(values is None for values in ids):
        return None
    return torch.cat([values * len(ids) + number for number, values in enumerate(ids)])


def _find_graph_ids(graph: Any, count: int) -> Tensor | None:
    if len(graph.srctypes) > 1 or len(graph.dsttypes) > 1:
        return None
    if not has_rows(graph) and count != graph.num_nodes():
        return None
    ids = _get_row_ids(graph.srcdata)

    # Blocks that ready-made models merge know only their destinations' ids. If sources and destinations have
    # one type, the destinations are the first sources, so the source ids serve both.
    has_target_rows = graph.srctypes != graph.dsttypes and count == graph.num_dst_nodes()
    return _get_row_ids(graph.dstdata) if ids is None or has_target_rows else ids


def _find_edge_ids(graph: Any, count: int) -> Tensor | None:
    if graph is None or graph.num_edges() != count:
        return None
    ids: Tensor | None = graph.edata.get(dgl.EID)
    return ids
