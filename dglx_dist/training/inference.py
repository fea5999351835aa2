"""Exact inference and evaluation: layer by layer, or with the whole neighbourhood of each batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

import dgl
import numpy as np
import torch
from dgl.heterograph import DGLBlock
from torch import Tensor, nn

from dglx_dist.comm.collectives import barrier, check_replicas, gather_json, run_on_all_ranks, sum_over_ranks
from dglx_dist.dataloading.loader import open_neighborhood_maker
from dglx_dist.dataloading.minibatch import NodeMaker
from dglx_dist.dataloading.sampler_spec import find_edge_columns, read_column_names
from dglx_dist.dataloading.step_loader import run_ahead
from dglx_dist.errors import ConfigError
from dglx_dist.graph.cache import find_halo, hold_halo
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.row_kernels import torch_dtype, view_as_numpy
from dglx_dist.internals.cpu_kernels import correct_kernels, note_edge_order
from dglx_dist.internals.graphs import get_block_parts
from dglx_dist.internals.message_passing import place
from dglx_dist.layers.tracer import preserve_state
from dglx_dist.options import list_names
from dglx_dist.records import FEATURE, LABEL, SPLITS, Array
from dglx_dist.strategies.base import WrappedModel, explain_missing_edge_data, find_float_parameter
from dglx_dist.training.config import CLASSIFICATION, list_metrics
from dglx_dist.training.eval_sample import check_sample, estimate_all, mark_targets
from dglx_dist.training.layer_check import check_layers
from dglx_dist.training.layer_memory import LayerMemory
from dglx_dist.training.models import InferenceLayer
from dglx_dist.training.needed_nodes import Marks, list_needed
from dglx_dist.training.node_batches import FIRST_BATCH, MIN_NODES, BatchLimits, ServerNodes
from dglx_dist.training.tasks import measure, split_owned_rows

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


def _place_with_degrees(block: Any, g: DistGraph, device: torch.device) -> Any:
    """Return ``block`` on ``device``, with the out-degrees of the graph ``g``."""
    full_block = _FullBlock(*get_block_parts(block))
    full_block.graph = g
    full_block.host_block = block
    return place(full_block, device)


class _FullBlock(DGLBlock):
    """A block with the out-degrees of the graph. Its slices by edge type have them too.

    DGL's blocks have the degrees inside the block. With this class, a convolution that divides by the
    sources' degrees (``GraphConv(norm="both")``, ``norm="left"``) has the same result as on the whole graph.
    """

    graph: DistGraph | None = None
    """The graph. Set after construction, because DGL constructs slices and copies with this class."""
    host_block: Any = None
    """The block with the ids of its sources on the CPU, for reading degrees."""

    def __getitem__(self, key: Any) -> Any:
        etype_slice = super().__getitem__(key)
        etype_slice.graph = self.graph
        etype_slice.host_block = self.host_block
        return etype_slice

    def out_degrees(self, u: Any = "__ALL__", etype: Any = None) -> Tensor:
        """Return the degrees of the sources ``u``. The graph is only asked when a convolution calls this."""
        assert self.graph is not None
        # DGL raises an error here if the block has several edge types and ``etype`` is None.
        etype = self.to_canonical_etype(etype)
        ids = self.host_block.srcnodes[etype[0]].data[dgl.NID]

        # DGL passes a text for all sources, and indices otherwise.
        if not isinstance(u, str):
            ids = ids[torch.as_tensor(u).cpu()]
        return self.graph.out_degrees(ids, etype).to(self.device)


def list_layers(
    module: nn.Module,
    layers: Sequence[InferenceLayer] | str | None,
    between: Callable[[Tensor], Tensor] | None,
) -> list[InferenceLayer]:
    """Return ``(block, h) -> h`` for each layer of the user's module, input-most first.

    See :func:`layerwise_inference` for the arguments. Raise ConfigError if the model defines no layers.
    """
    steps = _read_layers(module, layers)
    if not steps:
        raise ConfigError(f"{type(module).__name__} has no layers to compute. Pass one callable per layer.")
    if between is None:
        return steps

    def apply_then_between(layer: InferenceLayer, block: Any, h: Any) -> Any:
        return between(layer(block, h))

    inner_steps = [partial(apply_then_between, layer) for layer in steps[:-1]]
    return [*inner_steps, steps[-1]]


def _read_layers(module: nn.Module, layers: Sequence[InferenceLayer] | str | None) -> list[InferenceLayer]:
    """Return the layers that the module defines (None), that an attribute holds (its name), or ``layers``."""
    class_name = type(module).__name__
    if layers is None:
        get_layers = getattr(module, "inference_layers", None)
        if get_layers is None:
            raise ConfigError(
                f"{class_name} does not define its layers. Add a method inference_layers() that returns one "
                "callable (block, h) -> h per layer (docs/guides/own_model.md), name the list with "
                "layerwise_inference(layers=...), or pass num_layers= to evaluate(). It computes the whole "
                "neighbourhood of each batch."
            )
        return list(get_layers())

    if not isinstance(layers, str):
        return list(layers)

    module_list = getattr(module, layers, None)
    if not isinstance(module_list, (nn.ModuleList, nn.Sequential, list, tuple)):
        raise ConfigError(
            f"layers={layers!r}, but {class_name} has no list of layers of that name. Pass the name of its "
            "nn.ModuleList, or one callable (block, h) -> h per layer."
        )
    return list(module_list)


Path: TypeAlias = tuple[str | int, ...]
"""Keys of dictionaries and positions in tuples, outermost first. () for a bare tensor."""
T = TypeVar("T")


def flatten(value: Any, path: Path = ()) -> dict[Path, Any]:
    """Return the leaves of nested dictionaries (with string keys), tuples and lists by path."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"a layer returned a dictionary with the key {key!r}. Use strings as keys.")
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {path: value}
    leaves: dict[Path, Any] = {}
    for key, item in items:
        leaves |= flatten(item, (*path, key))
    return leaves


def nest(leaves: Mapping[Path, T]) -> Any:
    """Undo :func:`flatten`, except that lists become tuples. Raise ConfigError for missing positions."""
    if list(leaves) == [()]:
        return leaves[()]

    # All leaves below one key form a subtree.
    subtrees: dict[str | int, dict[Path, T]] = {}
    for (key, *subpath), leaf in leaves.items():
        subtrees.setdefault(key, {})[tuple(subpath)] = leaf
    values = {key: nest(subtree) for key, subtree in subtrees.items()}
    is_tuple = len(values) > 0 and all(isinstance(key, int) for key in values)
    if not is_tuple:
        return values
    if set(values) != set(range(len(values))):
        raise ConfigError(
            f"only the positions {sorted(values, key=str)} of a tuple of outputs belong to the "
            "requested node types. Return a dictionary, or request all types."
        )
    return tuple(values[index] for index in range(len(values)))


def _format_path(path: Path, bare: str) -> str:
    """Return ``path`` as in Python, like ``['user'][0]``, or the text ``bare`` for an empty path."""
    if not path:
        return bare
    return "".join(f"[{key!r}]" for key in path)


Inputs: TypeAlias = DistTensor | Mapping[str, DistTensor]
"""Rows of all nodes, of the only node type or by node type."""

EdgeNames: TypeAlias = Sequence[str] | Mapping[Any, Sequence[str]]
"""Columns of edges, of the only edge type or by edge type."""

_NO_EDGE_DATA = (
    "blocks of an exact evaluation only have the edge columns that edge_feats=[{name}] names, as an argument "
    "or in FitConfig. Or evaluate the model yourself with FitConfig(evaluate=...)."
)

_Rows: TypeAlias = dict[Path, DistTensor]
_Pass: TypeAlias = Callable[[list[Any], Any], Any]
"""Maps (blocks, rows of their sources) to results of their destinations."""
_ReadSources: TypeAlias = Callable[[Any], dict[Path, Tensor]]
"""Maps a block to the rows of its sources, by path."""


def layerwise_inference(  # noqa: PLR0913 - all but two have defaults
    model: nn.Module,
    g: DistGraph,
    *,
    feature: str = FEATURE,
    inputs: Inputs | None = None,
    batch_size: int | None = None,
    layers: Sequence[InferenceLayer] | str | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
    ntypes: Sequence[str] | None = None,
    nodes: Marks | None = None,
    mask: str | None = None,
    edge_feats: EdgeNames = (),
    hidden_dtype: torch.dtype | None = None,
) -> Any:
    """Compute every layer once for every node, over all neighbours. Every rank must call this.

    Each rank computes its share of its server's nodes and reads the previous layer through the KVStore, so
    memory holds two layers of activations. Convolutions see the degrees of the whole graph.

    A layer may return several results, as a tuple or a dictionary of tensors, each with a row per
    destination. With several node types, it returns dictionaries by node type. The next layer gets the same
    structure, with the rows of its sources. The destinations of a batch have one type, so a layer that
    returns rows for a type must do so for every destination of it.

    Args:
        model: Wrapped or plain model, equal on all ranks. It is in evaluation mode during the call.
        g: The distributed graph.
        feature: Node data of the first layer. Every node type must have it.
        inputs: Tensor to read instead of ``feature``, such as ``embedding.weight``. With several node types,
            a dictionary of a tensor per node type. The first layer gets a dictionary if ``inputs`` is one.
        batch_size: Maximum number of destinations computed at once. Destinations with more than 512 in-edges
            on average are computed in smaller batches. None: as many as fit in about 1 GB,
            at most 4096 in float64.
        layers: ``(block, h) -> h`` per layer, by default the model's ``inference_layers()``. Or the name of
            the attribute that holds them, like ``"layers"`` for an ``nn.ModuleList``. For a wrapped model,
            take the layers from ``module = model.whole()`` and pass ``module`` as ``model``.
        between: Function applied to the result of each layer except the last, like ``F.relu``, if the model
            applies it outside its layers. Each result must then be a tensor.
        ntypes: Node types for which the last layer is computed. By default all.
        nodes: (N,) bool tensor of each of these node types that marks the nodes to compute. The rows of the
            others are 0. Earlier layers are computed where the marked nodes need them. If they need no nodes
            of a type, layers get a batch of it without destinations, because it shows the shape of the rows.
        mask: Edge data of every edge type that marks the edges to use. None: all. Degrees count all edges.
        edge_feats: Names of edge data for the blocks, or names by edge type, as a sampler's
            ``prefetch_edge_feats``.
        hidden_dtype: ``torch.float16`` or ``torch.bfloat16`` to keep the rows between layers in half of the
            memory, with rounding. Layers get them in the model's dtype.

    Returns:
        (N, C) in the model's dtype, rows by the ids of ``g``, or such tensors in the structure of the last
        layer's result. Call ``delete()`` on them when done.

    Raises:
        ConfigError: on all ranks, if the model does not define its layers, a type has no input, or a layer
            does not return one row for each destination, or a row does not fit ``hidden_dtype``.
    """
    module = gather_module(model)
    steps = list_layers(module, layers, between)
    rows = read_first_rows(g, feature, inputs)

    # The model's own ``inference_layers()`` is trusted. The check builds batches of one matrix of rows.
    if layers is not None and list(rows) == [()] and len(rows[()].shape) == 2:
        columns = _read_edge_columns(g, edge_feats)
        check_layers(module, list_layers(module, layers, None), steps, rows[()].shape[1], columns)
    passes = [make_pass(step) for step in steps]
    maker = open_neighborhood_maker(g, 1, mask, edge_feats)
    return _infer(module, g, maker, passes, rows, batch_size, ntypes, nodes, hidden_dtype)


def _read_edge_columns(g: DistGraph, edge_feats: EdgeNames) -> dict[str, DistTensor]:
    """Return the columns of ``edge_feats`` by name, for a graph with a single edge type."""
    names: Any = read_column_names(edge_feats, "edge_feats")
    if isinstance(names, Mapping):
        names = chain(*names.values())
    data = g.edges[g.canonical_etypes[0]].data
    return {str(name): data[name] for name in names if name in data}


def make_pass(layer: InferenceLayer) -> _Pass:
    return lambda blocks, h: layer(blocks[0], h)


def minibatch_inference(  # noqa: PLR0913 - all but three have defaults
    model: nn.Module,
    g: DistGraph,
    num_layers: int,
    *,
    feature: str = FEATURE,
    inputs: Inputs | None = None,
    batch_size: int = 1024,
    ntypes: Sequence[str] | None = None,
    nodes: Marks | None = None,
    edge_feats: EdgeNames = (),
) -> Any:
    """Compute every node's results from its whole neighbourhood of ``num_layers`` hops. All ranks call this.

    The results are exact for any model that is called as ``model(blocks, h)`` with ``num_layers`` blocks, but
    each batch recomputes shared neighbours. If the model defines its layers, prefer
    :func:`layerwise_inference`. Its other arguments, its result and its errors are the same.
    """
    _check_num_layers(num_layers)
    module = gather_module(model)
    rows = read_first_rows(g, feature, inputs)
    maker = open_neighborhood_maker(g, num_layers, edge_feats=edge_feats)
    return _infer(module, g, maker, [module], rows, batch_size, ntypes, nodes)


def _infer(  # noqa: PLR0913 - the arguments of two public functions
    module: nn.Module,
    g: DistGraph,
    maker: NodeMaker,
    passes: Sequence[_Pass],
    rows: _Rows,
    batch_size: int | None,
    ntypes: Sequence[str] | None,
    nodes: Marks | None,
    hidden_dtype: torch.dtype | None = None,
) -> Any:
    """Compute the passes in turn on the blocks of ``maker``. Every rank must call this."""
    check_replicas(dict(module.named_parameters()), g.session)
    target = find_float_parameter(module)
    _check_marks(g, nodes, ntypes)
    # The halo is the same in all passes.
    find_ids = cache(partial(find_halo, g))
    with evaluating(module), ExitStack() as marks:
        needed = list_needed(g, nodes, len(passes), marks)
        for depth, run_pass in enumerate(passes):
            # The first pass converts the features. Later passes read results in the dtypes of the model,
            # unless these are kept in another one.
            dtypes = {}
            for path, tensor in rows.items():
                is_converted = depth == 0 or tensor.dtype == hidden_dtype
                dtypes[path] = target.dtype if is_converted else tensor.dtype
            is_last = depth == len(passes) - 1
            stages = PassStages(
                g=g,
                maker=maker,
                run_pass=run_pass,
                rows=rows,
                device=target.device,
                dtypes=dtypes,
                kept_dtype=None if is_last else hidden_dtype,
            )

            out_types: Sequence[str] = g.ntypes
            if ntypes is not None and is_last:
                out_types = list_names(ntypes)
            # A pass over few nodes reads a small share of the halo.
            keys = stages.group_keys() if needed[depth] is None else {}
            with ExitStack() as used_rows, hold_halo(g, keys, find_ids):
                # The rows of the first pass are the caller's and must remain.
                for tensor in rows.values() if depth else ():
                    used_rows.enter_context(tensor)
                rows = _compute_all(stages, batch_size, out_types, needed[depth], f"pass {depth} over nodes")

    return nest(rows)


def _check_marks(g: DistGraph, marks: Marks | None, ntypes: Sequence[str] | None) -> None:
    """Raise ConfigError unless there are ``marks`` of each of ``ntypes``, or none at all."""
    if marks is None:
        return
    requested = g.ntypes if ntypes is None else list_names(ntypes)
    missing = [ntype for ntype in requested if ntype not in marks]
    unknown = [ntype for ntype in marks if ntype not in g.ntypes]
    if missing or unknown:
        raise ConfigError(
            f"nodes has the types {[*marks]}, but results are computed for {[*requested]} of {g.ntypes}. "
            "Pass marks for each of these types."
        )


@final
@dataclass(frozen=True, kw_only=True)
class PassStages:
    """The two stages of a batch of destinations: :meth:`load` reads, and :meth:`run` computes."""

    g: DistGraph
    maker: NodeMaker
    run_pass: _Pass
    rows: _Rows
    """Input of the pass."""
    device: torch.device
    dtypes: Mapping[Path, torch.dtype]
    """Dtypes in which the pass gets the ``rows``."""
    kept_dtype: torch.dtype | None = None
    """Dtype in which floating-point results are kept. None: that of the results."""

    def choose_limits(
        self, batch_size: int | None, memories: Sequence[LayerMemory] | None = None
    ) -> BatchLimits:
        """Return the limits of batches of ``batch_size`` nodes. None: as many as memory allows.

        ``memories`` are those of the first batches. None: for the first batches.
        """
        if batch_size is not None:
            return BatchLimits.from_batch_size(batch_size)
        if self.device.type != "cpu":
            return BatchLimits.from_batch_size(MIN_NODES)
        if memories is None:
            return FIRST_BATCH
        input_bytes = Counter[str]()
        for path, tensor in self.rows.items():
            row_bytes = math.prod(tensor.shape[1:]) * self.dtypes[path].itemsize
            input_bytes[find_type(path, self.g)] += row_bytes
        node_bytes = max(input_bytes.values()) + max((memory.node_bytes for memory in memories), default=0)
        edge_bytes = max((memory.edge_bytes for memory in memories), default=0)
        num_nodes = sum(map(self.g.num_nodes, self.g.ntypes))
        limits = BatchLimits.from_memory(self.g.session, num_nodes, node_bytes, edge_bytes)
        if torch.float64 in self.dtypes.values():
            # DGL's sums in float64 are several times slower on rows outside the cache.
            return replace(limits, nodes=MIN_NODES)
        return limits

    def group_keys(self) -> dict[str, list[str]]:
        """Return the keys of the input rows in the store of the graph, by node type."""
        keys: dict[str, list[str]] = {}
        for path, tensor in self.rows.items():
            # The caller may pass rows of another graph.
            if tensor.kvstore is not self.g.kvstore:
                continue
            keys.setdefault(find_type(path, self.g), []).append(tensor.kvstore_key)
        return keys

    def load(self, ntype: str, ids: Array) -> Batch:
        """Return the batch of the (n,) distinct ``ids``. Any thread may call this."""
        return load_batch(self.maker, ntype, ids, self._read_sources)

    def run(self, batch: Batch) -> dict[Path, Tensor]:
        leaves = run_batch(self.run_pass, self.g, batch, self.device)
        if self.kept_dtype is None:
            return leaves
        kept_leaves = {}
        for path, rows in leaves.items():
            kept_leaves[path] = rows.to(self.kept_dtype) if rows.is_floating_point() else rows
            if not torch.equal(kept_leaves[path].isfinite(), rows.isfinite()):
                raise ConfigError(
                    f"a layer returns values up to {float(rows.abs().max()):.3g}, which do not fit "
                    f"{self.kept_dtype}. Use torch.bfloat16, or leave hidden_dtype out."
                )
        return kept_leaves

    def _read_sources(self, block: Any) -> dict[Path, Tensor]:
        inputs = {}
        for path, tensor in self.rows.items():
            source_ids = block.srcnodes[find_type(path, self.g)].data[dgl.NID]
            inputs[path] = tensor[source_ids].to(self.dtypes[path])
        return inputs


@final
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Destinations of one type, with their blocks and input rows on the CPU."""

    ntype: str
    ids: Array
    """(n,) int64 distinct ids of the destinations."""
    blocks: Sequence[Any]
    inputs: dict[Path, Tensor]
    """Rows of the sources of the first block."""


def load_batch(maker: NodeMaker, ntype: str, ids: Array, read_sources: _ReadSources) -> Batch:
    """Return the batch of the (n,) distinct ``ids``. Any thread may call this."""
    blocks = maker.complete(maker.sample_items({ntype: ids}, 0, step=0)).blocks
    return Batch(ntype=ntype, ids=ids, blocks=blocks, inputs=read_sources(blocks[0]))


def run_batch(run_pass: _Pass, g: DistGraph, batch: Batch, device: torch.device) -> dict[Path, Tensor]:
    """Run a pass on a batch. Return the rows of its destinations by path, on ``device``."""
    inputs = {path: rows.to(device) for path, rows in batch.inputs.items()}
    graph_blocks = [_place_with_degrees(block, g, device) for block in batch.blocks]
    for block in graph_blocks:
        note_edge_order(block, g.orig_edge_ids)
    output = run_pass(graph_blocks, nest(inputs))
    return _select_leaves(batch.ntype, output, g, len(batch.ids))


def split_range(share: tuple[int, int], batch_size: int) -> Iterator[tuple[int, int]]:
    """Cut ``first <= id < last`` into pieces of at most ``batch_size``."""
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    first, last = share
    for start in range(first, last, batch_size):
        yield start, min(start + batch_size, last)


def gather_module(model: nn.Module) -> nn.Module:
    """Return the user's module with uncut weights. Every rank must call this."""
    return model.whole() if isinstance(model, WrappedModel) else model


def read_first_rows(g: DistGraph, feature: str, inputs: Inputs | None) -> dict[Path, DistTensor]:
    """Return the inputs of the first layer by path, see :func:`layerwise_inference`."""
    if inputs is None and len(g.ntypes) == 1:
        return {(): _read_feature(g, g.ntypes[0], feature)}
    if inputs is None:
        return {(ntype,): _read_feature(g, ntype, feature) for ntype in g.ntypes}
    rows: _Rows = flatten(inputs)
    for path, tensor in rows.items():
        ntype = find_type(path, g)
        if path and path[0] != ntype:
            raise ConfigError(f"inputs has the unknown node type {path[0]!r} (known: {', '.join(g.ntypes)})")
        if len(tensor) != g.num_nodes(ntype):
            raise ConfigError(f"inputs has {len(tensor)} rows for {g.num_nodes(ntype)} nodes {ntype!r}")
    return rows


def find_type(path: Path, g: DistGraph) -> str:
    """Return the node type of the rows at ``path``. Raise ConfigError if it is ambiguous."""
    for key in path:
        if key in g.ntypes:
            return str(key)
    if len(g.ntypes) > 1:
        raise ConfigError(
            f"the rows in {_format_path(path, 'a tensor')} belong to no node type. With several types, use "
            f"dictionaries by node type ({', '.join(g.ntypes)})."
        )
    return g.ntypes[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients inside the block. Restore each module's mode afterwards."""
    correct_kernels()
    with preserve_state(model, training=False), torch.no_grad(), explain_missing_edge_data(_NO_EDGE_DATA):
        yield


def _select_leaves(ntype: str, output: Any, g: DistGraph, num_nodes: int) -> dict[Path, Tensor]:
    """Return the rows of a node type by path. Raise ConfigError if one has not ``num_nodes`` rows."""
    leaves = {}
    for path, leaf in flatten(output).items():
        if find_type(path, g) != ntype:
            continue
        description: object = type(leaf).__name__
        if isinstance(leaf, Tensor):
            description = tuple(leaf.shape)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != num_nodes:
            raise ConfigError(
                f"{_format_path(path, 'the output')} is {description}, not a tensor with a row for each of "
                f"{num_nodes} nodes of {ntype!r}"
            )
        leaves[path] = leaf
    return leaves


def _compute_all(
    stages: PassStages, batch_size: int | None, ntypes: Sequence[str], marks: Marks | None, name: str
) -> _Rows:
    """Compute the rows of the marked nodes of ``ntypes`` in batches. Every rank must call it.

    The ranks of a server share its nodes by work. ``name`` describes the barrier at the end. Raises
    ConfigError on all ranks if a layer does not return the same tensors for all batches of a type.
    """
    g = stages.g
    limits = stages.choose_limits(batch_size)
    nodes_of = {}
    share_sizes = []
    for ntype in ntypes:
        nodes_of[ntype] = ServerNodes(g, ntype, None if marks is None else marks[ntype])
        first, end = nodes_of[ntype].get_share()
        share_sizes.append(end - first)
    counts = sum_over_ranks(torch.tensor(share_sizes), g.session, phase="control").tolist()

    # All ranks must know the shapes of the results before allocation, even ranks without nodes. So each rank
    # computes its first batch of each type. An empty batch is enough if no rank computes nodes of the type.
    memories = []

    def compute_first_batches() -> dict[str, tuple[Array, dict[Path, Tensor]]]:
        batches = {}
        for (ntype, nodes), count in zip(nodes_of.items(), counts, strict=True):
            ids = next(nodes.split(nodes.get_share(), limits), np.arange(0) if count == 0 else None)
            if ids is not None:
                batch = stages.load(ntype, ids)
                with LayerMemory(batch.blocks[0]) as memory:
                    batches[ntype] = ids, stages.run(batch)
                memories.append(memory)
        return batches

    first_batches = run_on_all_ranks(g.session, compute_first_batches, ConfigError)
    later_limits = stages.choose_limits(batch_size, memories)

    def fill() -> None:
        shares = {ntype: nodes.get_share() for ntype, nodes in nodes_of.items()}
        while first_batches:
            ntype, (ids, leaves) = first_batches.popitem()
            _write_rows(results, ntype, ids, leaves)
            shares[ntype] = shares[ntype][0] + len(ids), shares[ntype][1]
        # One thread loads the next batch while this thread computes.
        later_batches = (
            (ntype, ids)
            for ntype, nodes in nodes_of.items()
            for ids in nodes.split(shares[ntype], later_limits)
        )
        for batch in run_ahead(lambda item: stages.load(*item), later_batches, depth=1, num_threads=1):
            _write_rows(results, batch.ntype, batch.ids, stages.run(batch))

    with ExitStack() as allocated:
        results = _allocate_rows(g, {ntype: leaves for ntype, (_, leaves) in first_batches.items()})
        for tensor in results.values():
            allocated.enter_context(tensor)
        run_on_all_ranks(g.session, fill, ConfigError)
        barrier(g.session, name)
        allocated.pop_all()
    return results


def _write_rows(results: _Rows, ntype: str, ids: Array, leaves: Mapping[Path, Tensor]) -> None:
    """Write the rows of a batch. Raise ConfigError unless they are the same tensors as of other batches."""
    expected_paths = {path for path, rows in results.items() if rows.part_policy.type_name == ntype}
    if set(leaves) != expected_paths:
        raise ConfigError(
            f"a layer returned rows for some nodes of type {ntype!r} but not for {ids[0]} to {ids[-1]}. It "
            "must return them for every destination, even without in-edges."
        )
    # The rows are written directly to the memory that the ranks of this server share.
    for path, rows in leaves.items():
        target = results[path]
        target.kvstore.write_local(target.kvstore_key, ids, view_as_numpy(rows.cpu().contiguous()))


def _allocate_rows(g: DistGraph, first_batches: Mapping[str, Mapping[Path, Tensor]]) -> _Rows:
    """Create tensors for the results of all nodes, with the shapes of the first batches of any rank.

    Every rank must call it. Raises ConfigError if the ranks' results differ in shape or dtype, or there are
    none.
    """
    rank_layouts = []
    for ntype, leaves in first_batches.items():
        for path, leaf in leaves.items():
            dtype = str(leaf.dtype).removeprefix("torch.")
            rank_layouts.append([list(path), [ntype, list(leaf.shape[1:]), dtype]])

    layouts: dict[Path, Any] = {}
    for path, layout in chain(*gather_json(rank_layouts, g.session)):
        expected_layout = layouts.setdefault(tuple(path), layout)
        if layout != expected_layout:
            raise ConfigError(
                f"a layer returns {layout} at {path} on one rank and {expected_layout} on another"
            )
    if not layouts:
        raise ConfigError("a layer returns no rows for any node. It must return a row for each destination.")

    # All ranks allocate in the order of the node types.
    ordered = sorted(layouts.items(), key=lambda item: g.ntypes.index(item[1][0]))
    tensors = {}
    for path, (ntype, row_shape, dtype) in ordered:
        policy = g.get_node_partition_policy(ntype)
        shape = (g.num_nodes(ntype), *row_shape)
        tensors[path] = DistTensor(shape, torch_dtype(dtype), part_policy=policy, is_gdata=False, graph=g)

    return tensors


def _read_feature(g: DistGraph, ntype: str, feature: str) -> DistTensor:
    data = g.nodes[ntype].data
    if feature not in data:
        columns = ", ".join(map(repr, data)) or "none"
        raise ConfigError(
            f"nodes of type {ntype!r} have no tensor {feature!r} (known: {columns}). Pass inputs=, for "
            f"instance {{{ntype!r}: embedding.weight}}."
        )
    return data[feature]


def evaluate(  # noqa: PLR0913 - all optional
    model: nn.Module,
    g: DistGraph,
    masks: Sequence[str] | None = None,
    *,
    feature: str = FEATURE,
    label: str = LABEL,
    batch_size: int | None = None,
    num_layers: int | None = None,
    ntype: str | None = None,
    inputs: Inputs | None = None,
    output: str | int | None = None,
    task: str = CLASSIFICATION,
    metrics: Sequence[str] = (),
    edge_feats: EdgeNames = (),
    sample: float | None = None,
    hidden_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Return the exact accuracy within each mask, equal on every rank. Every rank must call this.

    With ``metrics``, their values are added as ``val_f1_micro`` for all masks except that of training. Only
    the nodes of the masks and the nodes that they need are computed.

    Args:
        model: Wrapped or plain model, equal on all ranks.
        g: The distributed graph.
        masks: Name or names of boolean node data. By default ``train_mask``, ``val_mask`` and
            ``test_mask``, as far as they exist.
        label: (N,) integer node data. Rows below 0 have no label and do not count.
        num_layers: Number of blocks of a model without ``inference_layers()``. Each batch then computes its
            whole neighbourhood (:func:`minibatch_inference`).
        ntype: Type of the classified nodes. Optional if only one type has ``label``.
        feature: See :func:`layerwise_inference`, also for ``batch_size``, ``inputs``, ``edge_feats`` and
            ``hidden_dtype``, with which the result is not exact.
        output: Key or position of the scores, for a model with several outputs.
        task: ``classification``, ``multilabel`` or ``regression``. The last two have no accuracy by mask.
        metrics: Metrics of the ``task``, like ``f1_macro``.
        sample: Share of the nodes of each mask, above 0 and below 1, for an estimate in less time. The same
            nodes are taken in every call, with all their neighbours.

    Returns:
        The accuracy by mask, NaN for a mask without labelled nodes, and the ``metrics`` by name. With
        ``sample``, also their standard errors, like ``val_accuracy_se``.

    Raises:
        ConfigError: the model does not define its layers and ``num_layers`` is missing, the nodes have no
            such ``label`` or mask, or the node type or output is ambiguous. On all ranks, if a mask has
            targets but fewer than 20 in the ``sample``.
    """
    ntype = find_labelled_type(g, label) if ntype is None else ntype
    names = _resolve_masks(g, masks, label, ntype, task)
    metrics = list_metrics(task, metrics) if metrics else ()
    if sample is not None:
        check_sample(g, ntype, label, names, task, sample)
    options = {"feature": feature, "inputs": inputs, "batch_size": batch_size, "edge_feats": edge_feats}
    with ExitStack() as tensors:
        marks = mark_targets(g, ntype, names, sample, tensors)
        options |= {"ntypes": [ntype], "nodes": None if marks is None else {ntype: marks}}
        leaves = flatten(_compute_outputs(model, g, options, num_layers, hidden_dtype))
        for rows in leaves.values():
            tensors.enter_context(rows)
        scores = _select_output(leaves, output)
        if sample is not None:
            return estimate_all(scores, g, ntype, label, names, task, metrics, sample)
        return _measure_all(scores, g, ntype, label, names, task, metrics)


def _compute_outputs(
    model: nn.Module,
    g: DistGraph,
    options: dict[str, Any],
    num_layers: int | None,
    hidden_dtype: torch.dtype | None,
) -> Any:
    """Return the outputs of the model for an evaluation. Every rank must call this."""
    if num_layers is None:
        return layerwise_inference(model, g, **options, hidden_dtype=hidden_dtype)
    if hidden_dtype is not None:
        raise ConfigError(
            f"hidden_dtype={hidden_dtype} is for rows between layers, but num_layers={num_layers} keeps "
            "none. Leave one of them out."
        )
    if options["batch_size"] is None:
        # Neighbourhoods of several hops grow too fast to choose their size by the in-degrees.
        options = {**options, "batch_size": MIN_NODES}
    return minibatch_inference(model, g, num_layers, **options)


def _measure_all(
    scores: DistTensor,
    g: DistGraph,
    ntype: str,
    label: str,
    masks: Sequence[str],
    task: str,
    metrics: Sequence[str],
) -> dict[str, float]:
    """Return the exact accuracy by mask and the ``metrics`` by name. Every rank must call this."""
    values: dict[str, float] = {}
    if task == CLASSIFICATION:
        values = _measure_accuracy(scores, g, ntype, label, masks)
    for mask in masks:
        if mask == SPLITS[0] or not metrics:
            continue
        # The accuracy is counted already, so only the other metrics are measured.
        mask_values = {"accuracy": values[mask]} if task == CLASSIFICATION else {}
        missing_names = [name for name in metrics if name not in mask_values]
        mask_values |= measure(scores, g, ntype, label, mask, task, missing_names)
        for name in metrics:
            values[f"{mask.removesuffix('_mask')}_{name}"] = mask_values[name]
    return values


def _select_output(leaves: Mapping[Path, DistTensor], output: str | int | None) -> DistTensor:
    """Return the output with the key ``output``, or the only one. Raise ConfigError if it is ambiguous."""
    candidates = [rows for path, rows in leaves.items() if output is None or output in path]
    if len(candidates) != 1:
        paths = ", ".join(_format_path(path, "") for path in leaves)
        raise ConfigError(f"the model returns {paths}. Choose the scores with output=.")
    return candidates[0]


def check_evaluable(model: nn.Module, g: DistGraph, options: Mapping[str, Any]) -> None:
    """Check ``options``, all arguments of :func:`evaluate`, without computing. Every rank must call this."""
    ntype, label, task = (options[name] for name in ("ntype", "label", "task"))
    masks = _resolve_masks(g, None, label, ntype, task)
    list_metrics(task, options["metrics"])
    if options["sample"] is not None:
        check_sample(g, ntype, label, masks, task, options["sample"])
    read_first_rows(g, options["feature"], options["inputs"])
    find_edge_columns(g, read_column_names(options["edge_feats"], "edge_feats"), "edge_feats")
    if options["batch_size"] is not None:
        BatchLimits.from_batch_size(options["batch_size"])
    if options["num_layers"] is None:
        list_layers(gather_module(model), None, None)
    else:
        _check_num_layers(options["num_layers"])


def _check_num_layers(num_layers: int) -> None:
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} must be at least 1")


def _resolve_masks(g: DistGraph, masks: Sequence[str] | None, label: str, ntype: str, task: str) -> list[str]:
    """Return the names of the masks. Raise ConfigError if the labels or a mask have a wrong type."""
    data = g.nodes[ntype].data
    if isinstance(masks, Tensor | DistTensor):
        raise ConfigError("masks is a tensor. Pass names of columns of g.ndata, like ['val_mask'].")
    names = [name for name in SPLITS if name in data]
    if masks is not None:
        names = [*list_names(masks)]
    for name in (label, *names):
        if name not in data:
            columns = ", ".join(map(repr, data)) or "none"
            raise ConfigError(f"the nodes have no tensor {name!r} to evaluate with (known: {columns})")

    for name in names:
        if data[name].dtype not in (torch.bool, torch.uint8) or data[name].ndim != 1:
            raise ConfigError(
                f"{name!r} is {data[name].dtype} of shape {data[name].shape}, but a mask has a bool per "
                "node. Convert it with column.bool() before dx.distribute."
            )

    column = data[label]
    has_classes = column.ndim == 1 and not column.dtype.is_floating_point
    if task == CLASSIFICATION and not has_classes:
        raise ConfigError(
            f"{label!r} is {column.dtype} of shape {column.shape}, but accuracy needs one whole "
            "number per node. Pass such a column as label=."
        )

    return names


def find_labelled_type(g: DistGraph, label: str = LABEL) -> str:
    """Return the only node type, or the only one that has ``label``, or the first one if none has."""
    labelled = [ntype for ntype in g.ntypes if label in g.nodes[ntype].data]
    if len(g.ntypes) == 1 or not labelled:
        return g.ntypes[0]
    if len(labelled) > 1:
        raise ConfigError(f"nodes of the types {', '.join(labelled)} have {label!r}. Choose one with ntype=.")
    return labelled[0]


def _measure_accuracy(
    scores: DistTensor, g: DistGraph, ntype: str, label: str, names: Sequence[str]
) -> dict[str, float]:
    """Return the exact accuracy by mask, NaN for a mask without labelled nodes. All ranks call this."""
    # Each mask has a row: its number of correct nodes, and its number of labelled nodes.
    counts = torch.zeros(len(names), 2, dtype=torch.int64)
    data = g.nodes[ntype].data
    for rows in split_owned_rows(g, ntype):
        labels = data[label][rows]
        is_correct = scores[rows].argmax(1) == labels
        for index, name in enumerate(names):
            is_inside = data[name][rows].bool() & (labels >= 0)
            counts[index] += torch.stack([(is_correct & is_inside).sum(), is_inside.sum()])
    totals = sum_over_ranks(counts, g.session, phase="metrics").tolist()
    accuracy = {}
    for name, (num_correct, num_labelled) in zip(names, totals, strict=True):
        accuracy[name] = num_correct / num_labelled if num_labelled else math.nan
    return accuracy
