"""Dropout anywhere in a model whose masks belong to nodes and edges, not to the rank that computes them.

Two ranks that compute the same node's row then drop the same entries of it, and any number of ranks trains
what one process trains.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from numba import njit
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from dglx_dist.comm.session import Shared
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import full_word, item_key, stream_key
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns ``first:last`` of a matrix with ``width`` of them; there may be none."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def cut(self) -> slice:
        """For indexing."""
        return slice(self.first, self.last)


def deal_out_columns(width: int, parts: int) -> tuple[Columns, ...]:
    """Cut ``width`` columns into ``parts`` runs; the first ``width % parts`` are one longer (P3, 2.1).

    More parts than columns leave the last parts without any.

    Raises:
        ConfigError: there are no columns, or no parts.
    """
    if width < 1 or parts < 1:
        raise ConfigError(f"{width} columns cannot be cut into {parts} parts; both must be at least 1")
    least, longer = divmod(width, parts)
    ends = [(part + 1) * least + min(part + 1, longer) for part in range(parts)]
    return tuple(
        Columns(first=first, last=last, width=width) for first, last in zip([0, *ends], ends, strict=False)
    )


def deal_out_concatenated(widths: Sequence[int], parts: int) -> tuple[tuple[Columns, ...], ...]:
    """Cut matrices that stand side by side, each by itself, into ``parts``.

    Args:
        widths: Columns of each matrix, in their order.
        parts: How many parts.

    Returns:
        For each part its runs, one per matrix, as columns of the whole; there may be none in a run.

    Raises:
        ConfigError: there is no matrix, one has no columns, or there are no parts.
    """
    if not widths:
        raise ConfigError("no matrices to cut; name at least one feature")
    total, cuts, before = sum(widths), [], 0
    for width in widths:
        cuts.append(
            [
                Columns(first=before + one.first, last=before + one.last, width=total)
                for one in deal_out_columns(width, parts)
            ]
        )
        before += width
    return tuple(zip(*cuts, strict=True))


INPUTS, ATTENTION, MODULES = 1 << 32, (1 << 32) + 1, 1 << 33
"""Streams of draws: of a layer's inputs, of its attention, and from where on of modules before it.

Beyond every hop of a sampler, whose draws come from the same seed.
"""


@dataclass(frozen=True, kw_only=True)
class DropDraws:
    """What the masks of one owner's batch are functions of."""

    seed: int
    """Of the run, at least 0."""
    number: int
    """Of the batch, equal on all ranks."""
    nodes: Tensor
    """(L0,) int64 global ids of the sources, the destinations first."""
    runs: tuple[Columns, ...]
    """Which columns of the uncut input the part has, in order."""


def drop_entries(x: Tensor, probability: float, draws: DropDraws, stream: int = INPUTS) -> Tensor:
    """Return ``x`` with entries set to 0 and the others divided by 1 - ``probability``.

    Args:
        x: (L0, F_p) the part's columns.
        probability: In [0, 1]; of each entry, independent of the others.
        draws: Which entries; its runs have F_p columns together.
        stream: What the draws are for; other streams drop other entries.
    """
    if probability == 0:
        return x
    kept = kept_entries(draws.seed, draws.number, stream, draws.nodes, draws.runs, probability)
    return x * _scaled(kept, probability, x)


def drop_attention(block: DGLBlock, attention: Tensor, probability: float, draws: DropDraws) -> Tensor:
    """Return ``attention`` with whole (edge, head) entries dropped; the same ones on every part.

    An edge is told by its destination and its place among the destination's in-edges: parts have these
    from the owner, while they number the edges themselves.

    Args:
        block: (L0) sources, (D1) destinations, (E1) edges.
        attention: (E1, K, 1).
        probability: In [0, 1].
        draws: Of the block's owner.
    """
    if probability == 0:
        return attention
    indptr, _, edge_ids = block.adj_tensors("csc")
    first = indptr.cpu().numpy().astype(np.int64)
    kept = _kept_edges(
        stream_key(draws.seed, draws.number, ATTENTION),
        draws.nodes[: block.num_dst_nodes()].cpu().numpy(),
        first,
        attention.shape[1],
        _threshold(probability),
    )
    scaled = _scaled(torch.from_numpy(kept), probability, attention)
    if len(edge_ids):
        # From the order of the matrix to the block's own numbers of edges.
        scaled = torch.empty_like(scaled).index_copy_(0, edge_ids.long(), scaled)
    return attention * scaled.unsqueeze(-1)


def dropped(x: Tensor, probability: float, training: bool, draws: DropDraws | None) -> Tensor:
    """Return ``x`` dropped by ``draws``; as torch drops where there are none, unchanged when not training."""
    if not training or probability == 0:
        return x
    return functional.dropout(x, probability) if draws is None else drop_entries(x, probability, draws)


def kept_entries(
    seed: int, number: int, stream: int, nodes: Tensor, runs: Sequence[Columns], probability: float
) -> Tensor:
    """Return (L0, F_p) bool, which entries of the columns ``runs`` of ``nodes`` ((L0,) int64) are kept."""
    columns = np.concatenate([np.arange(run.first, run.last) for run in runs]).astype(np.int64)
    kept = _kept(
        stream_key(seed, number, stream),
        np.ascontiguousarray(nodes.cpu().numpy()),
        columns,
        _threshold(probability),
    )
    return torch.from_numpy(kept)


def _threshold(probability: float) -> np.uint64:
    """Of 32 random bits, as many values as are dropped."""
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


_KEPT = 4
"""Forward passes that backward may still come to."""
_OF_EDGES = ("attn_drop", "edge_drop")
"""How ``dgl.nn`` calls the dropouts that it applies to values of edges."""


def install_node_dropouts(model: nn.Module, seed: int) -> NodeDropouts:
    """Put a :class:`NodeDropout` in place of every ``nn.Dropout`` in ``model``; sends nothing.

    A model that has them already gets new ones, which know nothing of earlier passes. Names of parameters and
    buffers stay. Subclasses, ``nn.AlphaDropout`` and the like, and calls of
    ``torch.nn.functional.dropout`` stay torch's: their masks belong to the rank.

    Args:
        model: Of any modules; changed in place. ``model`` itself is no dropout.
        seed: Of the run, at least 0.

    Returns:
        What must be told of every forward pass, see :meth:`NodeDropouts.begin`.
    """
    shared = NodeDropouts(seed)
    made: dict[nn.Module, NodeDropout] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, NodeDropout):
            module.leave()
        # A subclass does something else.
        if type(module) in (nn.Dropout, NodeDropout):
            edges = name.rpartition(".")[2] in _OF_EDGES
            if module not in made:
                made[module] = NodeDropout(module, shared, edges=edges)
            _replace(model, name, made[module])
    for module in model.modules():
        # Scripted modules take no such hooks.
        if not isinstance(module, NodeDropout | torch.jit.ScriptModule):
            shared.watch(module)
    return shared


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a dropout in forward."""

    step: int
    number: int
    nodes: Tensor
    """Of the pass."""
    graph: weakref.ref[Any] | None
    """That its module worked on; not kept, for it holds features. None: none."""

    def known_graph(self) -> Any:
        """Return the graph, or None.

        Raises:
            ConfigError: it is gone.
        """
        graph = None if self.graph is None else self.graph()
        if graph is None and self.graph is not None:
            raise ConfigError(
                "a dropout runs again during backward, and the block that its layer was given is gone, so "
                "nobody knows whose rows these are; keep the blocks until backward is done"
            )
        return graph


@dataclass(eq=False)
class _Pass:
    """One forward pass, or several of one step."""

    number: int
    nodes: Tensor
    num_calls: int = 0
    calls: dict[int, _Call] = field(default_factory=dict)
    """State of torch's generator, as a draw from it, to the call that met it."""


@final
class NodeDropouts(Shared):
    """What the dropouts of one model have in common: the pass under way, and whose rows they see.

    Rows outside of a convolution belong to the first nodes of the pass, for a block's destinations come
    first among its sources, and so on from layer to layer. A module that is called with a graph or a block
    sees that one's sources and edges.

    A layer that ``torch.utils.checkpoint`` computes again gets the masks that it had. Its call is known by
    the state of torch's generator, which checkpointing restores: a number of calls would have moved on. So
    is its graph, for the module that was called with it need not be called again.

    Args:
        seed: Of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._passes: OrderedDict[int, _Pass] = OrderedDict()
        self._entries: list[tuple[nn.Module, Any]] = []
        """Modules being called, outermost first, with the graph that each was given, or None."""
        self._hooks: list[RemovableHandle] = []

    def begin(self, number: int, nodes: Tensor) -> None:
        """Say that a forward pass begins.

        Passes of one number go on counting where the one before stopped, so that two passes over one batch
        drop other entries.

        Args:
            number: Of the step over the whole run, equal on all ranks.
            nodes: (n,) int64 distinct global ids, of the rows that go in.
        """
        before = self._passes.pop(number, None)
        self._passes[number] = before or _Pass(number=number, nodes=nodes)
        self._passes[number].nodes = nodes
        self._entries.clear()
        while len(self._passes) > _KEPT:
            self._passes.popitem(last=False)

    def watch(self, module: nn.Module) -> None:
        """Know from now on which graph ``module`` works on while it is called."""
        self._hooks.append(module.register_forward_pre_hook(self._entered, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(self._left, with_kwargs=True, always_call=True))

    def forget(self) -> None:
        """Watch no module any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def drop(self, x: Tensor, probability: float, *, edges: bool) -> Tensor | None:
        """Return ``x`` with entries dropped; None where nobody knows whose rows they are.

        Args:
            x: (n, ...) a row for each source, for the first of them, or for each edge.
            probability: In (0, 1].
            edges: Whether rows of as many as there are edges are those of the edges.

        Raises:
            ConfigError: a layer is computed again by a checkpoint that does not restore torch's generator.
        """
        if not self._passes or x.dim() == 0:
            return None
        call, graph = self._call()
        keys = _edge_ids(graph, len(x)) if edges else None
        if keys is None:
            keys = _row_ids(graph, len(x), call.nodes)
        if keys is None:
            return None
        # Of no rows -1 would be ambiguous.
        flat = x.reshape(len(x), math.prod(x.shape[1:]))
        runs = (Columns(first=0, last=flat.shape[1], width=flat.shape[1]),)
        draws = DropDraws(seed=self._seed, number=call.step, nodes=keys, runs=runs)
        return drop_entries(flat, probability, draws, MODULES + call.number).reshape(x.shape)

    def _call(self) -> tuple[_Call, Any]:
        """Return the call in forward that this one is, or is again, and its graph, or None."""
        state, graph = int(torch.randint(1 << 62, ()).item()), self._graph()
        if torch._C._current_graph_task_id() == -1:
            begun = next(reversed(self._passes.values()))
            known = None if graph is None else weakref.ref(graph)
            call = _Call(step=begun.number, number=begun.num_calls, nodes=begun.nodes, graph=known)
            begun.calls[state] = call
            begun.num_calls += 1
            return call, graph
        for begun in reversed(self._passes.values()):
            if state in begun.calls:
                call = begun.calls[state]
                return call, call.known_graph() if graph is None else graph
        raise ConfigError(
            "a dropout runs again during backward, and torch's generator is in another state than in "
            "forward, so its mask would be another one; use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False) with preserve_rng_state=True, its default"
        )

    def _graph(self) -> Any:
        """Return the graph that the innermost module with one works on; None: none."""
        return next((graph for _, graph in reversed(self._entries) if graph is not None), None)

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        graphs = (one for one in (*args, *kwargs.values()) if isinstance(one, dgl.DGLGraph))
        self._entries.append((module, next(graphs, None)))

    def _left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        # Those that an error left on top go too.
        while self._entries and self._entries.pop()[0] is not module:
            pass


@final
class NodeDropout(nn.Module):
    """Stands for ``nn.Dropout``: keyed during a pass of the strategy, torch's own at any other time.

    Args:
        dropout: What it stands for.
        shared: Of the model.
        edges: Whether it is applied to values of edges.
    """

    def __init__(self, dropout: nn.Dropout | NodeDropout, shared: NodeDropouts, *, edges: bool) -> None:
        super().__init__()
        self.p: float = dropout.p
        self.inplace: bool = dropout.inplace
        self._shared, self._edges = shared, edges
        self.train(dropout.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ((n, ...)) with entries dropped while training.

        Raises:
            ConfigError: see :meth:`NodeDropouts.drop`.
        """
        if not self.training or self.p == 0:
            return x
        dropped = self._shared.drop(x, self.p, edges=self._edges)
        if dropped is None:
            return functional.dropout(x, self.p, True, self.inplace)
        return dropped

    def leave(self) -> None:
        """Let go of the model's modules, for it gets other dropouts."""
        self._shared.forget()

    def extra_repr(self) -> str:
        """Like that of ``nn.Dropout``."""
        return f"p={self.p}, inplace={self.inplace}"


def _row_ids(graph: Any, count: int, nodes: Tensor) -> Tensor | None:
    if graph is not None:
        # Of a graph that the user made nobody knows the nodes.
        nodes = graph.srcdata.get(dgl.NID, nodes[:0])
    return nodes[:count] if count <= len(nodes) else None


def _edge_ids(graph: Any, count: int) -> Tensor | None:
    if graph is None or graph.num_edges() != count:
        return None
    ids: Tensor | None = graph.edata.get(dgl.EID)
    return ids


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent).register_module(last, module)
