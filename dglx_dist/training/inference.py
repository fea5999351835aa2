"""Exact results for every node: layer by layer, or each batch with its whole neighbourhood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.dtypes import torch_dtype
from dglx_dist.graph.opening import together
from dglx_dist.graph.owners import RowOwners
from dglx_dist.records import FEATURE, Array
from dglx_dist.strategies.base import WrappedModel, edge_data_named
from dglx_dist.training.full_blocks import FullBlocks
from dglx_dist.training.layers_of import layers_of
from dglx_dist.training.models import InferenceLayer
from dglx_dist.training.nested import Path, flatten, nest

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

Inputs: TypeAlias = DistTensor | Mapping[str, DistTensor]
"""Rows of all nodes: of the only node type, or by node type."""

_NO_EDGE_DATA = (
    "blocks of an exact evaluation have no columns of edges; evaluate the model yourself, as with "
    "FitConfig(evaluate=...)"
)

_Rows: TypeAlias = dict[Path, DistTensor]
_Compute: TypeAlias = Callable[[str, Array], dict[Path, Tensor]]
"""(node type, (K,) ids) to the results that belong to these nodes, (K, ...) each."""


def layerwise_inference(
    model: nn.Module,
    g: DistGraph,
    *,
    feature: str = FEATURE,
    inputs: Inputs | None = None,
    batch_size: int = 4096,
    layers: Sequence[InferenceLayer] | str | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
    ntypes: Sequence[str] | None = None,
) -> Any:
    """Compute every layer once for every node, over all neighbours; every rank must call it.

    Each rank computes its share of its server's nodes and reads the layer before through the KVStore, so
    memory holds two layers of activations, not more. Convolutions see the degrees of the whole graph.

    A layer may give several results, as a tuple or a dictionary of tensors, each with a row per destination;
    with several node types, dictionaries by node type, whose rows are those of that type. The next layer is
    handed the same structure, with the rows of its sources. Batches hold destinations of one type at a time,
    so a layer that gives rows for a type must do so for every destination of it.

    Args:
        model: Wrapped or plain, equal on all ranks; put into evaluation mode meanwhile.
        g: The graph.
        feature: Node data that goes into the first layer; every node type must have it.
        inputs: What goes in instead: a tensor (features, or ``embedding.weight``) for a graph of one node
            type, else one per node type. The first layer is handed a dictionary if this is one.
        batch_size: Destinations computed at once.
        layers: ``(block, h) -> h`` per layer; the model's ``inference_layers()`` when not given. Take them
            from ``model.whole()``, and pass that as ``model``, where the model is wrapped; or give the name
            of the attribute that holds them, like ``"layers"`` for an ``nn.ModuleList``.
        between: Applied to what each layer but the last gives, like ``F.relu``, where the model does that
            outside its layers. Each result must then be a tensor.
        ntypes: Node types for which the last layer is computed; all when not given.

    Returns:
        (N, C) in the model's dtype, rows by the ids of ``g``; or the structure that the last layer gives, of
        such tensors. ``delete()`` them when done.

    Raises:
        ConfigError: on all ranks: the model does not tell its layers, a type has no input, or a layer
            gives no rows for some destinations, or others than there are.
    """
    module = whole_of(model)
    steps = layers_of(module, layers, between)
    target = float_of(module)
    work = _Work(g=g, blocks=FullBlocks(g, target.device), batch_size=batch_size)
    rows = first_rows(g, feature, inputs)
    with evaluating(module):
        for depth, layer in enumerate(steps):
            dtype = target.dtype if depth == 0 else None
            wanted = ntypes if depth == len(steps) - 1 else None
            computed = _for_all(work, _layer(layer, work, rows, dtype), wanted, f"layer {depth} of all nodes")
            if depth > 0:
                _delete(rows)
            rows = computed
    return nest(rows)


def minibatch_inference(
    model: nn.Module,
    g: DistGraph,
    num_layers: int,
    *,
    feature: str = FEATURE,
    inputs: Inputs | None = None,
    batch_size: int = 1024,
    ntypes: Sequence[str] | None = None,
) -> Any:
    """Compute every node's results from its whole neighbourhood of ``num_layers`` hops; collective.

    Exact for any model that is called as ``model(blocks, h)``, but shared neighbours are computed again in
    each batch: prefer :func:`layerwise_inference` where the model tells its layers.

    Args:
        model: Wrapped or plain, equal on all ranks; put into evaluation mode meanwhile.
        g: The graph.
        num_layers: Blocks the model takes.
        feature: Node data that goes in; every node type must have it.
        inputs: What goes in instead, as in :func:`layerwise_inference`.
        batch_size: Nodes computed at once.
        ntypes: Node types to compute; all when not given.

    Returns:
        As :func:`layerwise_inference`.

    Raises:
        ConfigError: ``num_layers`` is below 1, a type has no input, or the model gives no rows for some
            nodes.
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} must be at least 1")
    module = whole_of(model)
    target = float_of(module)
    work = _Work(g=g, blocks=FullBlocks(g, target.device), batch_size=batch_size)
    rows = first_rows(g, feature, inputs)

    def compute(ntype: str, ids: Array) -> dict[Path, Tensor]:
        blocks, sources = work.blocks.blocks({ntype: ids}, num_layers)
        return work.of_type(ntype, module(blocks, work.read(rows, sources, target.dtype)), len(ids))

    with evaluating(module):
        return nest(_for_all(work, compute, ntypes, "the results of all nodes"))


def in_original_order(rows: DistTensor, g: DistGraph, ntype: str | None = None) -> Tensor:
    """Return all rows of a node tensor in the order of the dataset before partitioning; any rank alone.

    Args:
        rows: With one row per node.
        g: The graph.
        ntype: Needed when there are several node types.

    Returns:
        (N, ...): row v belongs to the node that was v in the raw graph.
    """
    values = rows.to_local()
    ordered = torch.empty_like(values)
    ordered[g.orig_ids(torch.arange(len(rows)), ntype)] = values
    return ordered


def local_share(g: DistGraph, ntype: str) -> tuple[int, int]:
    """Return this rank's first own node and the one after its last; shares of ranks are disjoint."""
    topology = g.session.topology
    return RowOwners(g.get_node_partition_policy(ntype).bounds, topology).range_of(topology.rank)


def batches(share: tuple[int, int], batch_size: int) -> Iterator[tuple[int, int]]:
    """Cut ``first <= id < last`` into pieces of at most ``batch_size``.

    Raises:
        ConfigError: ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    first, last = share
    for start in range(first, last, batch_size):
        yield start, min(start + batch_size, last)


def float_of(model: nn.Module) -> Tensor:
    """Return a tensor of the floating-point dtype and the device of the model's parameters."""
    floats = (p for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.zeros(()))


def whole_of(model: nn.Module) -> nn.Module:
    """Return the user's module with uncut weights, for computing alone; every rank must call it."""
    return model.whole() if isinstance(model, WrappedModel) else model


def first_rows(g: DistGraph, feature: str, inputs: Inputs | None) -> dict[Path, DistTensor]:
    """Return what goes into the first layer by its path.

    Raises:
        ConfigError: a node type has no ``feature``, or ``inputs`` names a type that does not exist or has
            another number of rows.
    """
    if inputs is None and len(g.ntypes) == 1:
        return {(): _feature_of(g, g.ntypes[0], feature)}
    if inputs is None:
        return {(ntype,): _feature_of(g, ntype, feature) for ntype in g.ntypes}
    found: _Rows = flatten(inputs)
    for path, tensor in found.items():
        ntype = type_of(path, g)
        if path and path[0] != ntype:
            raise ConfigError(f"inputs has {path[0]!r}, which is no node type (known: {', '.join(g.ntypes)})")
        if len(tensor) != g.num_nodes(ntype):
            raise ConfigError(
                f"inputs has {len(tensor)} rows for the {g.num_nodes(ntype)} nodes of type {ntype!r}"
            )
    return found


def type_of(path: Path, g: DistGraph) -> str:
    """Return the node type to which the rows at ``path`` belong.

    Raises:
        ConfigError: there are several types and the path names none.
    """
    for key in path:
        if key in g.ntypes:
            return str(key)
    if len(g.ntypes) > 1:
        where = "".join(f"[{key!r}]" for key in path) or "a tensor"
        raise ConfigError(
            f"the rows in {where} belong to no node type; with several types, use dictionaries by node type "
            f"({', '.join(g.ntypes)})"
        )
    return g.ntypes[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside the block; each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), edge_data_named(_NO_EDGE_DATA):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@dataclass(frozen=True, kw_only=True)
class _Work:
    g: DistGraph
    blocks: FullBlocks
    batch_size: int

    def read(self, rows: _Rows, sources: Mapping[str, Array], dtype: torch.dtype | None) -> Any:
        """Return the rows of a block's sources, nested as they were."""
        device = self.blocks.device
        return nest(
            {
                path: tensor[torch.from_numpy(sources[type_of(path, self.g)])].to(device, dtype)
                for path, tensor in rows.items()
            }
        )

    def of_type(self, ntype: str, output: Any, count: int) -> dict[Path, Tensor]:
        """Return the leaves of an output that belong to the ``count`` destinations of one type."""
        leaves = {path: leaf for path, leaf in flatten(output).items() if type_of(path, self.g) == ntype}
        for path, leaf in leaves.items():
            if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != count:
                given = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                where = "".join(f"[{key!r}]" for key in path) or "the output"
                raise ConfigError(
                    f"{where} is {given}, not a tensor of one row for each of {count} {ntype!r}"
                )
        return leaves


def _layer(layer: InferenceLayer, work: _Work, rows: _Rows, dtype: torch.dtype | None) -> _Compute:
    def compute(ntype: str, ids: Array) -> dict[Path, Tensor]:
        block, sources = work.blocks.block({ntype: ids})
        return work.of_type(ntype, layer(block, work.read(rows, sources, dtype)), len(ids))

    return compute


def _for_all(work: _Work, compute: _Compute, ntypes: Sequence[str] | None, what: str) -> _Rows:
    """Compute the results of all nodes of the types, every rank its share. Collective."""
    g = work.g
    shares = {
        ntype: list(batches(local_share(g, ntype), work.batch_size))
        for ntype in (g.ntypes if ntypes is None else ntypes)
    }
    # All ranks must know the shapes of the results before any is kept, also those without nodes.
    started = together(
        g.session,
        lambda: {ntype: compute(ntype, np.arange(*share[0])) for ntype, share in shares.items() if share},
        ConfigError,
    )
    out = _new_rows(g, started)

    def fill() -> None:
        for ntype, share in shares.items():
            expected = {path for path in out if type_of(path, g) == ntype}
            for number, (first, last) in enumerate(share):
                found = started.pop(ntype) if number == 0 else compute(ntype, np.arange(first, last))
                _check_complete(expected, found, ntype, (first, last))
                for path, values in found.items():
                    _put(out[path], first, values)

    together(g.session, fill, ConfigError)
    barrier(g.session, what)
    return out


def _new_rows(g: DistGraph, started: Mapping[str, Mapping[Path, Tensor]]) -> _Rows:
    mine = [
        [list(path), ntype, list(leaf.shape[1:]), str(leaf.dtype).removeprefix("torch.")]
        for ntype, leaves in started.items()
        for path, leaf in leaves.items()
    ]
    found: dict[Path, Any] = {}
    for specs in gather_json(mine, g.session):
        assert isinstance(specs, list)
        for path, *rest in specs:
            if found.setdefault(tuple(path), rest) != rest:
                raise ConfigError(
                    f"a layer gives rows of {rest} at {path} on one rank and {found[tuple(path)]} on another"
                )
    if not found:
        raise ConfigError("a layer gives no rows for any node; it must return those of its destinations")
    # In one order on all ranks, node types as the graph has them.
    ordered = sorted(found.items(), key=lambda item: g.ntypes.index(item[1][0]))
    return {path: _new_tensor(g, *spec) for path, spec in ordered}


def _new_tensor(g: DistGraph, ntype: str, row_shape: list[int], dtype: str) -> DistTensor:
    policy = g.get_node_partition_policy(ntype)
    shape = (g.num_nodes(ntype), *row_shape)
    return DistTensor(shape, torch_dtype(dtype), part_policy=policy, is_gdata=False, graph=g)


def _check_complete(
    expected: set[Path], found: Mapping[Path, Tensor], ntype: str, ids: tuple[int, int]
) -> None:
    if set(found) != expected:
        raise ConfigError(
            f"a layer gave rows for some nodes of type {ntype!r} but not for {ids[0]} to {ids[1] - 1}; it "
            "must give them for every destination, also for those without in-edges"
        )


def _put(out: DistTensor, first: int, values: Tensor) -> None:
    """Write rows of the own server straight into the memory that its ranks share."""
    start = first - out.local_range[0]
    out.local_rows()[start : start + len(values)] = values.cpu()


def _delete(rows: _Rows) -> None:
    for tensor in rows.values():
        tensor.delete()


def _feature_of(g: DistGraph, ntype: str, feature: str) -> DistTensor:
    data = g.nodes[ntype].data
    if feature not in data:
        known = ", ".join(map(repr, data)) or "none"
        raise ConfigError(
            f"nodes of type {ntype!r} have no tensor {feature!r} (known: {known}); pass inputs=, for "
            f"instance {{{ntype!r}: embedding.weight}}"
        )
    return data[feature]
