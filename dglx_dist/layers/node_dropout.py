"""Dropout anywhere in a model whose masks belong to nodes and edges, not to the rank that computes them.

Two ranks that compute the same node's row then drop the same entries of it, and any number of ranks trains
what one process trains.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, final

import dgl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from dglx_dist.cluster.shared import Shared
from dglx_dist.errors import ConfigError
from dglx_dist.layers.columns import Columns
from dglx_dist.layers.keyed_dropout import MODULES, DropDraws, drop_entries

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
