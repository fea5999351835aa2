"""Dropout with masks keyed by node and edge ids, and column ranges of split inputs.

Ranks that compute the same node's row drop the same entries of it, so any number of ranks trains the same
model as one process.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
from dglx_dist.keyed_random import full_word, item_key, shift_right, stream_key, words_on_device
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class ColumnRange:
    """The columns ``first:last``, possibly none, of a matrix with ``width`` columns."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def cut(self) -> slice:
        """The columns as an index."""
        return slice(self.first, self.last)


def deal_out_columns(width: int, parts: int) -> tuple[ColumnRange, ...]:
    """Cut ``width`` columns into ``parts`` runs; the first ``width % parts`` are one longer (P3).

    More parts than columns leave the last parts without any.
    """
    least, longer = divmod(width, parts)
    ends = [(part + 1) * least + min(part + 1, longer) for part in range(parts)]
    return tuple(
        ColumnRange(first=first, last=last, width=width)
        for first, last in zip([0, *ends], ends, strict=False)
    )


def deal_out_concatenated(widths: Sequence[int], parts: int) -> tuple[tuple[ColumnRange, ...], ...]:
    """Cut each of several concatenated matrices of ``widths`` columns, as :func:`deal_out_columns`.

    Returns for each part its runs, one per matrix and possibly empty, as columns of the whole.
    """
    total, starts = sum(widths), accumulate(widths, initial=0)
    cuts = [
        [
            ColumnRange(first=start + one.first, last=start + one.last, width=total)
            for one in deal_out_columns(width, parts)
        ]
        for start, width in zip(starts, widths, strict=False)
    ]
    return tuple(zip(*cuts, strict=True))


INPUTS, ATTENTION, MODULES, LATER_MODULES = 1 << 32, (1 << 32) + 1, 1 << 33, 1 << 34
"""Streams of draws: of a layer's inputs, of its attention, and the first one of modules before and behind it.

They are above every hop of a sampler, whose draws use the same seed.
"""


@dataclass(frozen=True, kw_only=True)
class DropDraws:
    """Keys of the dropout masks of one owner's batch."""

    seed: int
    """The run's seed, at least 0."""
    number: int
    """Number of the batch, equal on all ranks."""
    nodes: Tensor
    """(L0,) int64 global ids of the sources, the destinations first."""
    runs: tuple[ColumnRange, ...]
    """The columns of the uncut input that the part has, in order."""


def drop_entries(x: Tensor, probability: float, draws: DropDraws, stream: int = INPUTS) -> Tensor:
    """Return ``x`` ((L0, F_p)) with entries set to 0 and the others divided by 1 - ``probability``.

    The runs of ``draws`` have F_p columns together; streams draw independently of each other.
    """
    kept = draw_kept_entries(draws.seed, draws.number, stream, draws.nodes, draws.runs, probability)
    return x * _scaled(kept, probability, x)


def drop_attention(block: DGLBlock, attention: Tensor, probability: float, draws: DropDraws) -> Tensor:
    """Return ``attention`` with whole (edge, head) entries dropped, the same ones on every part.

    An edge is keyed by its destination and its position among the destination's in-edges, which parts get
    from the owner; the parts' edge numbers differ. ``attention`` is (E1, K, 1); ``draws`` are the owner's.
    """
    indptr, _, edge_ids = block.adj_tensors("csc")
    stream, threshold = stream_key(draws.seed, draws.number, ATTENTION), _threshold(probability)
    first, nodes, heads = indptr.long(), draws.nodes[: block.num_dst_nodes()], attention.shape[1]
    if is_on_host(first):
        kept = torch.from_numpy(_kept_edges(stream, nodes.numpy(), first.numpy(), heads, threshold))
    else:
        count = len(attention)
        targets = torch.arange(len(nodes), device=first.device)
        targets = targets.repeat_interleave(first.diff(), output_size=count)
        places = torch.arange(count, device=first.device) - first[targets]
        numbers = (places * heads).unsqueeze(1) + torch.arange(heads, device=first.device)
        kept = _kept_on_device(stream, nodes[targets], numbers, threshold)
    scaled = _scaled(kept, probability, attention)
    if len(edge_ids):
        # From the order of the CSC matrix to the block's edge numbers.
        scaled = torch.empty_like(scaled).index_copy_(0, edge_ids.long(), scaled)
    return attention * scaled.unsqueeze(-1)


def draw_kept_entries(
    seed: int, number: int, stream: int, nodes: Tensor, runs: Sequence[ColumnRange], probability: float
) -> Tensor:
    """Return the (L0, F_p) bool mask of kept entries for the columns ``runs`` of ``nodes`` ((L0,) int64).

    It is on the device of ``nodes``, and has the same bits on every device.
    """
    key, threshold = stream_key(seed, number, stream), _threshold(probability)
    if is_on_host(nodes):
        columns = np.concatenate([np.arange(run.first, run.last) for run in runs]).astype(np.int64)
        return torch.from_numpy(_kept(key, np.ascontiguousarray(nodes.numpy()), columns, threshold))
    numbers = torch.cat([torch.arange(run.first, run.last, device=nodes.device) for run in runs])
    # In pieces: the words take 8 bytes for each entry.
    pieces = torch.split(nodes, max(_WORDS_AT_ONCE // max(len(numbers), 1), 1))
    return torch.cat([_kept_on_device(key, piece, numbers, threshold) for piece in pieces])


_WORDS_AT_ONCE = 1 << 22


def _kept_on_device(stream: np.uint64, nodes: Tensor, numbers: Tensor, threshold: np.uint64) -> Tensor:
    return shift_right(words_on_device(stream, nodes, numbers), 32) >= int(threshold)


def _threshold(probability: float) -> np.uint64:
    # The number of dropped values among those of 32 random bits.
    return np.uint64(round(probability * (1 << 32)))


def _scaled(kept: Tensor, probability: float, like: Tensor) -> Tensor:
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    return kept.to(like.device, like.dtype).mul_(scale)


@njit(cache=True, nogil=True)
def _kept(stream: np.uint64, nodes: Array, columns: Array, threshold: np.uint64) -> Array:
    out = np.empty((len(nodes), len(columns)), np.bool_)
    for row in range(len(nodes)):
        key = item_key(stream, nodes[row])
        for place in range(len(columns)):
            out[row, place] = _bits(key, columns[place]) >= threshold
    return out


@njit(cache=True, nogil=True)
def _kept_edges(stream: np.uint64, nodes: Array, first: Array, heads: int, threshold: np.uint64) -> Array:
    out = np.empty((first[-1], heads), np.bool_)
    for target in range(len(nodes)):
        key = item_key(stream, nodes[target])
        for edge in range(first[target], first[target + 1]):
            for head in range(heads):
                out[edge, head] = _bits(key, (edge - first[target]) * heads + head) >= threshold
    return out


@njit(cache=True, nogil=True)
def _bits(key: np.uint64, number: int) -> np.uint64:
    return full_word(key, number) >> np.uint64(32)


_MAX_PASSES = 4
"""Forward passes kept for a later backward."""
EDGE_DROPOUTS = ("attn_drop", "edge_drop")
"""Names in ``dgl.nn`` of dropouts that are applied to edge values."""


def install_node_dropouts(model: nn.Module, seed: int) -> NodeDropouts:
    """Make every ``nn.Dropout`` in ``model`` a :class:`NodeDropout`; not collective.

    Earlier :class:`NodeDropout` modules lose their state. Names of parameters and
    buffers do not change. Subclasses, ``nn.AlphaDropout`` and the like, and calls of
    ``torch.nn.functional.dropout`` remain torch's, with masks that depend on the rank.

    ``model`` is changed in place, and is no dropout itself. The caller announces every forward pass by
    :meth:`NodeDropouts.begin` of what is returned. A model without dropout stays as it is.
    """
    shared = NodeDropouts(seed)
    shared.is_installed = True
    dropouts: list[NodeDropout] = []
    for name, module in model.named_modules():
        if isinstance(module, NodeDropout):
            module.shared.remove_hooks()
        # Exact types: a subclass does something else.
        if type(module) in (nn.Dropout, NodeDropout):
            # The same object, with the user's hooks, and known to schedules of its probability.
            module.__class__ = NodeDropout
            dropout = cast("NodeDropout", module)
            dropout.connect(shared, number=len(dropouts), edges=name.rpartition(".")[2] in EDGE_DROPOUTS)
            dropouts.append(dropout)
    # Many layers of DGL have a dropout of probability 0.
    if any(dropout.p > 0 for dropout in dropouts):
        shared.track(model)
    return shared


class RankGraph:
    """Base of graphs of all nodes of a rank, along which layers pass messages as along blocks."""


def has_rows(graph: Any) -> bool:
    """Whether layers pass messages along ``graph``: it is a block, or all of a rank's nodes."""
    return bool(graph.is_block) or isinstance(graph, RankGraph)


def find_pass_ids(graph: Any) -> Tensor | None:
    """Return the nodes that :meth:`NodeDropouts.begin` takes, for a pass that begins with ``graph``."""
    return graph.srcdata.get(dgl.NID) if len(graph.srctypes) == 1 else None


@dataclass(frozen=True, eq=False)
class _DropoutCall:
    step: int
    number: int
    nodes: Tensor | None
    """Those of the pass."""
    graph: weakref.ref[Any] | None
    """The graph of its module, if any; a weak reference, because it holds features."""

    def live_graph(self) -> Any:
        graph = None if self.graph is None else self.graph()
        if graph is None and self.graph is not None:
            raise ConfigError(
                "a dropout runs again during backward, but the block of its layer has been freed, so the "
                "nodes of its rows are unknown; keep the blocks until backward is done"
            )
        return graph


@final
class NodeDropouts:
    """Shared state of the dropouts of one model: the current pass, and the nodes or edges of their rows.

    Rows outside of a convolution belong to the first nodes of the pass, since a block's destinations come
    first among its sources, from layer to layer (not in a pass over several node types). Within a module that
    is called with a graph or a block, rows belong to its sources or edges.

    A layer that ``torch.utils.checkpoint`` recomputes gets the same masks. Its call is identified by the
    state of torch's generator, which checkpointing restores, unlike a call counter. So is its graph, since
    the module that was called with it may not be called again.
    """

    def __init__(self, seed: int, first_stream: int = MODULES) -> None:
        self._seed, self._first_stream = seed, first_stream
        self._current: tuple[int, Tensor | None] | None = None
        """Step of the pass, and its nodes."""
        self._counts: set[int] = set()
        self._num_calls: dict[int, Counter[int]] = {}
        """Of dropouts by step, the latest last; by module in passes over several node types."""
        self._calls: dict[int, _DropoutCall] = {}
        """State of torch's generator, as a draw from it, to the call in that state."""
        self._entries: list[tuple[nn.Module, Any, tuple[Any, ...]]] = []
        """Modules being called, outermost first, each with its graph and its pair of rows, if any."""
        self._hooks: list[RemovableHandle] = []
        self.in_use = self.is_installed = False
        """Whether a module asks for the nodes of its rows, and whether the model is wrapped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeDropouts:
        # A copied model begins passes of its own; until then its dropouts are torch's.
        memo[id(self)] = copied = NodeDropouts(self._seed, self._first_stream)
        copied._hooks, copied.in_use = copy.deepcopy(self._hooks, memo), self.in_use
        return copied

    def __reduce__(self) -> tuple[type[NodeDropouts], tuple[int, int]]:
        # The hooks of pickled modules bring their own handles.
        return NodeDropouts, (self._seed, self._first_stream)

    def end(self) -> None:
        """Let the dropouts be torch's until the next pass begins."""
        self._current = None

    def limit(self, arguments: Iterable[Any]) -> None:
        """Take only rows for nodes of which a block among ``arguments`` has as many, in this pass."""
        leaves = [leaf for leaf in tree_leaves(list(arguments)) if isinstance(leaf, dgl.DGLGraph)]
        blocks = [leaf for leaf in leaves if has_rows(leaf)]
        self._counts = {n for one in blocks for n in (one.num_src_nodes(), one.num_dst_nodes())}

    def begin(self, number: int, nodes: Tensor | None) -> None:
        """Start a forward pass of step ``number`` of the run.

        ``nodes`` are (n,) int64 distinct global ids; None for a pass over several node types, in which
        only modules that are called with a graph, and :func:`drop_rows`, know the nodes of their rows.

        Passes of one number continue its call count, so two passes over one batch drop different entries.
        """
        self._num_calls[number] = self._num_calls.pop(number, Counter())
        self._current = number, nodes
        self._counts = set()
        self._entries.clear()
        while len(self._num_calls) > _MAX_PASSES:
            del self._num_calls[next(iter(self._num_calls))]
            self._calls = {key: one for key, one in self._calls.items() if one.step in self._num_calls}

    def track(self, model: nn.Module) -> None:
        """Record the graphs of the modules of ``model`` during their calls, if that is not done yet."""
        self.in_use = True
        for module in model.modules() if not self._hooks else ():
            # Scripted modules do not support these hooks.
            if not isinstance(module, nn.Dropout | torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
                hook = module.register_forward_hook(self._left, with_kwargs=True, always_call=True)
                self._hooks.append(hook)

    def remove_hooks(self) -> None:
        """Stop tracking all modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.compiler.disable
    def drop(
        self, x: Tensor, probability: float, *, module: int, edges: bool, nodes: Tensor | None = None
    ) -> Tensor | None:
        """Return ``x`` with entries dropped; None if the nodes or edges of its rows are unknown.

        ``x`` has a row for each source, for each of the first sources, or for each edge: ``edges`` tells
        whether rows belong to edges if there are as many of them as edges. ``nodes`` are the keys of the rows
        where the caller knows them, and ``module`` is the number of the dropout in the model.

        Raises:
            ConfigError: a layer is recomputed by a checkpoint that does not restore torch's generator, or
                every probability was 0 when the model was wrapped.
        """
        if self.is_installed and not self.in_use:
            raise ConfigError(
                f"a dropout has the probability {probability}, but it was 0 when the model was wrapped; set "
                "it before dx.wrap"
            )
        if self._current is None or x.dim() == 0:
            return None
        call, graph = self._call(*self._current, module)
        keys = _edge_ids(graph, len(x)) if edges else nodes
        if keys is None and (keys := self._row_ids(graph, x, call.nodes)) is None:
            return None
        # Without rows, -1 would be ambiguous.
        flat = x.reshape(len(x), math.prod(x.shape[1:]))
        runs = (ColumnRange(first=0, last=flat.shape[1], width=flat.shape[1]),)
        draws = DropDraws(seed=self._seed, number=call.step, nodes=keys, runs=runs)
        return drop_entries(flat, probability, draws, self._first_stream + call.number).reshape(x.shape)

    def ids_of_rows(self, x: Tensor) -> Tensor | None:
        """Return the keys of the nodes of the rows of ``x`` in this pass, (n,) int64; None if unknown."""
        return None if self._current is None else self._row_ids(self._graph(), x, self._current[1])

    def _row_ids(self, graph: Any, x: Tensor, nodes: Tensor | None) -> Tensor | None:
        count = len(x)
        if graph is not None:
            if (keys := self._ids_of_pair(x)) is not None:
                return keys
            # The nodes of a graph made by the user are unknown.
            nodes = _ids_of_rows(graph, count)
        elif self._counts and count not in self._counts:
            return None
        return nodes[:count] if nodes is not None and count <= len(nodes) else None

    def _call(self, step: int, nodes: Tensor | None, module: int) -> tuple[_DropoutCall, Any]:
        state, graph = int(torch.randint(1 << 62, ()).item()), self._graph()
        if current_backward() == NO_BACKWARD:  # in forward
            reference = None if graph is None else weakref.ref(graph)
            # A rank may skip the module of a relation without edges, so calls are counted by module there.
            kind = 0 if nodes is not None else module + 1
            number = (kind << 20) + self._num_calls[step][kind]
            call = _DropoutCall(step=step, number=number, nodes=nodes, graph=reference)
            self._calls[state] = call
            self._num_calls[step][kind] += 1
            return call, graph
        if state in self._calls:
            call = self._calls[state]
            return call, call.live_graph() if graph is None else graph
        raise ConfigError(
            "a dropout runs again during backward, and torch's generator is in another state than in "
            "forward, so its mask would differ; use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False) with preserve_rng_state=True, its default"
        )

    def _graph(self) -> Any:
        # That of the innermost module with one.
        return next((graph for _, graph, _ in reversed(self._entries) if graph is not None), None)

    def _ids_of_pair(self, x: Tensor) -> Tensor | None:
        # Rows that a module was called with. As many sources as destinations may be others.
        for _, graph, pair in reversed(self._entries):
            if graph is not None and len(pair) == 2 and len(graph.srctypes) == len(graph.dsttypes) == 1:
                data = (graph.srcdata, graph.dstdata)
                return next(
                    (side.get(dgl.NID) for side, rows in zip(data, pair, strict=True) if rows is x), None
                )
        return None

    @torch.compiler.disable
    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        graphs = [leaf for leaf in tree_leaves(values) if isinstance(leaf, dgl.DGLGraph)]
        # Beside blocks, a graph of pairs has other rows than those of the layers.
        needs_rows = any(map(has_rows, graphs))
        own = [one for one in values if isinstance(one, dgl.DGLGraph) and has_rows(one) >= needs_rows]
        graph = next(iter(own), None)
        self._entries.append((module, graph, next((one for one in values if isinstance(one, tuple)), ())))

    @torch.compiler.disable
    def _left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        # An error may have left entries above it.
        while self._entries and self._entries.pop()[0] is not module:
            pass


@final
class NodeDropout(nn.Dropout):
    """Replacement for ``nn.Dropout``: keyed during a pass of the strategy, torch's own at any other time.

    ``number`` is its number in the model, and ``edges`` tells whether it is applied to edge values.
    """

    shared: NodeDropouts

    def connect(self, shared: NodeDropouts, *, number: int, edges: bool) -> None:
        """Take the draws of ``shared``."""
        self.shared, self._number, self._edges = shared, number, edges

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ((n, ...)) with entries dropped while training.

        Raises:
            ConfigError: see :meth:`NodeDropouts.drop`.
        """
        return self.drop_rows(x, None)

    def drop_rows(self, x: Tensor, nodes: Tensor | None) -> Tensor:
        """Return :meth:`forward` of ``x``; ``nodes`` are the (n,) int64 keys of its rows where known."""
        if not self.training or self.p == 0:
            return x
        dropped = self.shared.drop(x, self.p, module=self._number, edges=self._edges, nodes=nodes)
        if dropped is None:
            return super().forward(x)
        return x.copy_(dropped) if self.inplace else dropped


def drop_rows(dropout: nn.Dropout, x: Tensor, nodes: Tensor | None) -> Tensor:
    """Return ``dropout(x)``, keyed by ``nodes`` ((n,) int64 keys of the rows) during a pass of a strategy."""
    return dropout.drop_rows(x, nodes) if isinstance(dropout, NodeDropout) else dropout(x)


def make_type_keys(nodes: Any, ntypes: Sequence[str]) -> Tensor | None:
    """Return the keys of ``nodes``, a block's view of nodes, type by type; None if it has no ids.

    Nodes of different types have different keys.
    """
    ids = [nodes[ntype].data.get(dgl.NID) for ntype in ntypes]
    if any(one is None for one in ids):
        return None
    return torch.cat([one * len(ids) + number for number, one in enumerate(ids)])


def _ids_of_rows(graph: Any, count: int) -> Tensor | None:
    if len(graph.srctypes) > 1 or len(graph.dsttypes) > 1:
        return None
    if not has_rows(graph) and count != graph.num_nodes():
        return None
    ids: Tensor | None = graph.srcdata.get(dgl.NID)
    # Blocks that ready-made models merge know the ids of their destinations alone. Destinations of the
    # sources' type are the first sources.
    is_of_others = graph.srctypes != graph.dsttypes and count == graph.num_dst_nodes()
    return graph.dstdata.get(dgl.NID) if ids is None or is_of_others else ids


def _edge_ids(graph: Any, count: int) -> Tensor | None:
    if graph is None or graph.num_edges() != count:
        return None
    ids: Tensor | None = graph.edata.get(dgl.EID)
    return ids
