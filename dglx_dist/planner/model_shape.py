"""Size and work of a model: widths, products, parameters and exchanged rows of each layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit
from torch import nn

from dglx_dist.comm.ledger import ring_bytes
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.reader import StoredDataset, open_structure
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import Placement, RowOwners
from dglx_dist.layers.base import stages_of
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array
from dglx_dist.strategies.cost import FirstLayer, LayerShape, ModelShape, Widths
from dglx_dist.strategies.full_graph.cost import exchanged_bytes
from dglx_dist.strategies.full_graph.plan_counts import HaloPairs


def first_layer(model: nn.Module, convolution: nn.Module, heads: int) -> FirstLayer:
    """Return the sizes of ``model`` split at ``convolution``.

    Args:
        model: All of it.
        convolution: The layer that takes the features.
        heads: Of its attention.

    Raises:
        ConfigError: the layer cannot be split; the message has the reason.
    """
    stages = stages_of(convolution)
    cut = [stages.get_parameter(name) for name in stages.cut]
    name, dimension = next(iter(stages.cut.items()))
    weight = stages.get_parameter(name)
    split = {id(parameter) for parameter in cut}
    others = [parameter for parameter in model.parameters() if id(parameter) not in split]
    # Parameters used before the sum have a gradient on every rank, and need no flag.
    unflagged = {id(stages.get_parameter(name)) for name in stages.shared}
    attends = any("attn" in shared for shared in stages.shared)
    return FirstLayer(
        sum_width=weight.numel() // weight.shape[dimension],
        logit_width=heads if attends else 0,
        itemsize=weight.element_size(),
        cut_bytes=sum(parameter.numel() * parameter.element_size() for parameter in cut),
        replicated_bytes=sum(
            (other.numel() + (id(other) not in unflagged)) * other.element_size() for other in others
        ),
    )


_MAX_RANKS = 64  # Bits of a word.


def topology_of(servers: int, ranks_per_server: int) -> Topology:
    return Topology(
        0, servers * ranks_per_server, tuple(np.repeat(range(servers), ranks_per_server).tolist())
    )


def count_pairs(dataset: StoredDataset, topology: Topology, layers: int) -> HaloPairs:
    """Count the rows that ``full_graph`` exchanges: only rows that training nodes depend on are computed.

    Args:
        dataset: With all its parts, of one node and edge type, and a ``train_mask``.
        topology: Of the run.
        layers: L, at least 1.

    Raises:
        ConfigError: there are more than 64 ranks, or no training mask.
    """
    if topology.world_size > _MAX_RANKS:
        raise ConfigError(f"halos of {topology.world_size} ranks cannot be counted; use at most {_MAX_RANKS}")
    manifest = dataset.manifest
    offsets = manifest.node_offsets[NODE_TYPE]
    bounds = Placement(manifest.num_parts, topology).server_offsets(offsets)
    rank_of = RowOwners(bounds, topology).rank_of(np.arange(int(offsets[-1])))
    needed = np.concatenate(
        [dataset.part(part).node_data(NODE_TYPE, "train_mask") for part in range(manifest.num_parts)]
    ).astype(np.bool_)
    csc = open_structure(dataset, EDGE_TYPE)
    server_of_rank = np.array(topology.server_of_rank)
    found = []
    for _ in range(layers):
        readers = np.zeros(len(needed), np.uint64)
        _mark_readers(csc.indptr, csc.indices, needed, rank_of, readers)
        found.append(_count_pairs(readers, rank_of, server_of_rank))
        needed = needed | (readers != 0)
    outside, inside = zip(*reversed(found), strict=True)
    return HaloPairs(outside=outside, inside=inside)


def gradient_bytes(widths: Widths, topology: Topology) -> int:
    """Return the bytes between servers of a step's ring all-reduce of gradients."""
    servers, ranks = topology.server_of_rank, topology.world_size
    return sum(
        ring_bytes(widths.gradient_bytes, ranks, rank)
        for rank in range(ranks)
        if servers[rank] != servers[(rank + 1) % ranks]
    )


def outside_bytes(
    pairs: HaloPairs, widths: Widths, topology: Topology, *, preloaded: bool, use_pp: bool
) -> Mapping[str, int]:
    """Return the bytes between servers in an epoch of one step, by ledger phase.

    Args:
        pairs: Of the graph.
        widths: Of the model.
        topology: Of the run.
        preloaded: Whether servers hold their whole neighbourhood, so that only gradients are sent.
        use_pp: See :func:`exchanged_bytes`.
    """
    halo = {} if preloaded else exchanged_bytes(pairs.outside, widths, use_pp=use_pp)
    gradients = gradient_bytes(widths, topology)
    return {**halo, **({"gradients": gradients} if gradients else {})}


@njit(cache=True, nogil=True)
def _mark_readers(indptr: Array, indices: Array, needed: Array, rank_of: Array, readers: Array) -> None:
    """Set the bit of each needed node's rank at all its in-neighbours, and at itself."""
    for node in range(len(needed)):
        if needed[node]:
            bit = np.uint64(1) << np.uint64(rank_of[node])
            readers[node] |= bit
            for edge in range(indptr[node], indptr[node + 1]):
                readers[indices[edge]] |= bit


@njit(cache=True, nogil=True)
def _count_pairs(readers: Array, rank_of: Array, server_of_rank: Array) -> tuple[int, int]:
    outside, inside = 0, 0
    for node in range(len(readers)):
        bits = readers[node]
        rank = 0
        while bits != np.uint64(0):
            if bits & np.uint64(1) and rank != rank_of[node]:
                if server_of_rank[rank] == server_of_rank[rank_of[node]]:
                    inside += 1
                else:
                    outside += 1
            bits >>= np.uint64(1)
            rank += 1
    return outside, inside


def layers_of_kind(
    kind: str, features: int, hidden: int, classes: int, num_layers: int, heads: int = 4
) -> tuple[LayerShape, ...]:
    """Return the layers of a ready-made model (``training.models.build_model``) without building it."""
    if kind == "resgcn":
        return _residual(features, hidden, classes, num_layers)
    if kind == "sgc":
        pairs = [(features, classes), *[(classes, classes)] * (num_layers - 1)]
        return tuple(
            LayerShape(
                inputs=a,
                outputs=b,
                summed=min(a, b),
                per_source=a * b if place == 0 and a > b else 0,
                per_target=a * b if place == 0 and a <= b else 0,
                exchanged=a,
            )
            for place, (a, b) in enumerate(pairs)
        )
    pairs = list(pairwise([features, *[hidden] * (num_layers - 1), classes]))
    return tuple(
        _layer(kind, a, b, heads, last=place == num_layers - 1) for place, (a, b) in enumerate(pairs)
    )


def _layer(kind: str, a: int, b: int, heads: int, *, last: bool) -> LayerShape:
    if kind == "gat":
        wide = b * heads if last else b
        # Logits, softmax and the weighted sum each process every edge.
        return LayerShape(
            inputs=a, outputs=wide, summed=wide + 6 * heads, per_source=a * wide, per_target=0, exchanged=a
        )
    if kind == "mlp":
        return LayerShape(inputs=a, outputs=b, summed=0, per_source=0, per_target=a * b, exchanged=a)
    # dgl.nn multiplies first if that makes rows narrower; SAGE has one more product, of the own row.
    own = a * b if kind == "sage" else 0
    first = a > b
    return LayerShape(
        inputs=a,
        outputs=b,
        summed=min(a, b),
        per_source=a * b if first else 0,
        per_target=own + (0 if first else a * b),
        exchanged=a,
    )


def _residual(features: int, hidden: int, classes: int, num_layers: int) -> tuple[LayerShape, ...]:
    def layer(place: int) -> LayerShape:
        encode = features * hidden if place == 0 else 0
        decode = hidden * classes if place == num_layers - 1 else 0
        return LayerShape(
            inputs=features if place == 0 else hidden,
            outputs=hidden,
            summed=hidden,
            per_source=encode,
            per_target=2 * hidden * hidden + decode,
            exchanged=hidden,
        )

    return tuple(layer(place) for place in range(num_layers))


def shape_of_module(
    module: nn.Module,
    kind: str,
    features: int,
    hidden: int,
    classes: int,
    num_layers: int,
    heads: int = 4,
    *,
    guessed: bool = False,
) -> ModelShape:
    """Return the shape of a model: parameters and first layer from the module, layers by kind.

    Args:
        module: A ready-made model, or the user's.
        kind: Of the ready-made model, or of the most similar one.
        features: F.
        hidden: Width between layers.
        classes: C.
        num_layers: L.
        heads: Of attention.
        guessed: Whether ``kind`` is that of another model.
    """
    # Imported here because they import DGL.
    from dglx_dist.strategies.full_graph.model import check_rows_stay_apart
    from dglx_dist.strategies.serverless.model_to_program import chain_of

    found, why = _first_layer_of(module, features, heads)
    parameters = [one for one in module.parameters() if one.requires_grad]
    return ModelShape(
        kind=kind,
        layers=layers_of_kind(kind, features, hidden, classes, num_layers, heads),
        features=features,
        hidden=hidden,
        classes=classes,
        parameters=sum(one.numel() for one in parameters),
        tensors=len(parameters),
        first=found,
        why_not_split=why,
        first_learns=kind == "resgcn",
        itemsize=parameters[0].element_size() if parameters else 4,
        why_not_whole=_refusal(check_rows_stay_apart, module),
        why_not_chained=_refusal(chain_of, module),
        guessed=guessed,
    )


def shape_of_kind(
    kind: str, features: int, hidden: int, classes: int, num_layers: int, heads: int = 4
) -> ModelShape:
    """Return the shape of a ready-made model that is not built; parameters without some biases."""
    layers = layers_of_kind(kind, features, hidden, classes, num_layers, heads)
    weights = [layer.per_source + layer.per_target for layer in layers]
    # Attention has two vectors besides the bias.
    each = {"mlp": 0, "gat": 3}.get(kind, 1)
    biases = [each * layer.outputs for layer in layers]
    tensors = {"sage": 3, "gat": 4, "resgcn": 5}.get(kind, 2) * num_layers
    first = layers[0]
    cut = (first.per_source + first.per_target) * 4
    split = kind in ("sage", "gcn", "gat", "sgc")
    total = sum(weights) + sum(biases)
    return ModelShape(
        kind=kind,
        layers=layers,
        features=features,
        hidden=hidden,
        classes=classes,
        parameters=total,
        tensors=tensors,
        first=FirstLayer(
            sum_width=first.outputs,
            logit_width=heads if kind == "gat" else 0,
            itemsize=4,
            cut_bytes=cut,
            replicated_bytes=(total + tensors) * 4 - cut,
        )
        if split
        else None,
        why_not_split="" if split else f"the first layer of {kind} does not take the features",
        first_learns=kind == "resgcn",
        why_not_chained="it is no chain of convolutions" if kind == "resgcn" else "",
    )


def _first_layer_of(module: nn.Module, features: int, heads: int) -> tuple[FirstLayer | None, str]:
    # Imported here because it imports DGL.
    from dglx_dist.strategies.push_pull.split_model import find_first_layer

    try:
        name, _ = find_first_layer(module, features, "columns")
        return first_layer(module, module.get_submodule(name), heads), ""
    except ConfigError as refused:
        return None, _first_clause(refused)


def _refusal(check: Callable[[nn.Module], object], module: nn.Module) -> str:
    try:
        check(module)
    except ConfigError as refused:
        return _first_clause(refused)
    return ""


def _first_clause(refused: ConfigError) -> str:
    # Without the reasons and the remedy that follow.
    return re.split(r"[;:] ", str(refused), maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True)
class FoundLayers:
    """Kind and sizes of a module's convolutions."""

    kind: str
    """The most similar ready-made kind."""
    hidden: int
    """Output columns of its first convolution."""
    count: int
    heads: int = 1


def layers_in(module: nn.Module) -> FoundLayers:
    """Return kind and sizes of the convolutions of ``dgl.nn`` in ``module``; defaults if there are none."""
    found = [one for one in module.modules() if type(one).__name__ in _KIND_OF]
    if not found:
        return FoundLayers(kind="sage", hidden=_USUAL_WIDTH, count=0)
    kind = _KIND_OF[type(found[0]).__name__]
    # DGL has no public name for these.
    heads = int(getattr(found[0], "_num_heads", 1))
    width = int(getattr(found[0], "_out_feats", _USUAL_WIDTH)) * heads
    deep = type(module).__name__ == "ResGCN"
    return FoundLayers(kind="resgcn" if deep else kind, hidden=width, count=len(found), heads=heads)


_USUAL_WIDTH = 64
_KIND_OF = {
    "SAGEConv": "sage",
    "GraphConv": "gcn",
    "SymmetricConv": "gcn",
    "GATConv": "gat",
    "GATv2Conv": "gat",
    "SGConv": "sgc",
    "OwnRows": "mlp",
}
