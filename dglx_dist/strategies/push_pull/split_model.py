"""Models cut by input columns: the first layer, the modules before it, and their inputs.

A part repeats on other owners' nodes what the model computes on the part's own batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.comm.session import Shared
from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import SplittableConv, StageInput, cut_in_place, is_same_view
from dglx_dist.layers.convolutions import make_stages
from dglx_dist.layers.dropout import (
    DROP_ROWS,
    EDGE_DROPOUTS,
    LATER_MODULES,
    MODULES,
    DropDraws,
    NodeDropouts,
    deal_out_concatenated,
    drop_entries,
)
from dglx_dist.layers.masks import ColumnRange
from dglx_dist.layers.nn import BatchNorm
from dglx_dist.layers.several_types import make_typed_stages
from dglx_dist.layers.tracer import find_convolutions
from dglx_dist.records import EdgeType
from dglx_dist.strategies.push_pull.exchange import Group, GroupBatch, PartInput
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore

_OWN_FORWARD = "_dglx_forward"
"""Attribute in which a module stores the name of its replaced method."""


InputStep: TypeAlias = "Converted | Dropped | ColumnLayerNorm"
"""Operation on a part's rows before the first layer. Operations that do the same compare equal.

``apply(rows, owner, origin)`` returns the (L0, F_p) result for one owner's rows that have this origin.
"""


@final
@dataclass(frozen=True)
class Converted:
    """Converts rows to another dtype."""

    dtype: torch.dtype

    def apply(self, rows: Tensor, owner: PartInput, origin: Origin) -> Tensor:
        return rows.to(self.dtype)


@final
@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Drops entries at random, keyed by (seed, batch, node, column)."""

    probability: float
    seed: int
    stream: int
    """The dropout module's random stream."""

    def apply(self, rows: Tensor, owner: PartInput, origin: Origin) -> Tensor:
        nodes = owner.keys(origin.ntype)
        runs = origin.runs
        draws = DropDraws(seed=self.seed, number=owner.number, nodes=nodes, runs=runs)
        return drop_entries(rows, self.probability, draws, self.stream)


@final
@dataclass(frozen=True, kw_only=True)
class Origin:
    """Describes how a part computes its input rows for any owner. Equal descriptions compare equal."""

    ntype: str
    """Node type that the rows belong to."""
    runs: tuple[ColumnRange, ...]
    """The part's columns within the uncut input, in order. Dropout uses them as keys."""
    names: tuple[str, ...] = ()
    """Names of the loader's features that are concatenated."""
    embedding: ColumnEmbedding | None = None
    """Embedding that provides the rows instead of features."""
    steps: tuple[InputStep, ...] = ()
    """Operations on the rows, in order."""

    @property
    def is_raw(self) -> bool:
        """Whether the rows are unchanged features, except for their dtype."""
        return self.embedding is None and all(isinstance(step, Converted) for step in self.steps)

    def read_source(self, owner: PartInput) -> Tensor:
        """Return the (L0, F_p) rows before the steps: features, or a leaf with embedding rows."""
        if self.embedding is not None:
            weight = self.embedding.weight
            return weight.detach()[owner.nodes[self.ntype]].requires_grad_(weight.requires_grad)
        columns = [owner.columns[self.ntype][name] for name in self.names]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def compute_rows(self, source: Tensor, owner: PartInput) -> Tensor:
        """Apply the steps to ``source``, and return the first layer's (L0, F_p) input."""
        for step in self.steps:
            source = step.apply(source, owner, self)
        return source

    def with_step(self, step: InputStep) -> Origin:
        return replace(self, steps=(*self.steps, step))


@final
class InputProvenance(Shared):
    """Remembers where the tensors in the model's current batch come from.

    A tensor is recognised by its storage. So a view into the loader's tensor is recognised, but a result that
    is computed from it is not.
    """

    def __init__(self, seed: int) -> None:
        self.own_input: PartInput | None = None
        """This rank's input of the model's current batch, or None outside of a batch."""
        self.dropouts = NodeDropouts(seed, LATER_MODULES)
        """Random numbers for dropouts after the input."""
        self._known: list[tuple[Tensor, Origin]] = []

    def begin(self, group_batch: GroupBatch | None, part: int) -> None:
        """Forget the last batch, and begin with ``group_batch``, if there is one."""
        self._known = []
        self.own_input = None if group_batch is None else group_batch.inputs[part]
        if not self.dropouts.in_use:
            return
        if self.own_input is None:
            self.dropouts.end()
            return

        # Rows between layers have no keys if they may belong to several types.
        nodes = None
        if len(self.own_input.nodes) == 1:
            (nodes,) = self.own_input.nodes.values()
        self.dropouts.begin(self.own_input.number, nodes)

    def add(self, rows: Tensor, origin: Origin) -> None:
        """Record where ``rows`` in the own batch come from. They are kept until the next batch."""
        self._known.append((rows, origin))

    def find(self, rows: Tensor, ntype: str = "") -> Origin | None:
        """Return where ``rows`` come from, including a dtype change, or None if it is unknown.

        ``ntype`` is the rows' node type, if the caller knows it.
        """
        known = self._known
        if ntype:
            known = [(tensor, origin) for tensor, origin in known if origin.ntype == ntype]
        for tensor, origin in known:
            if tensor is rows or is_same_view(tensor, rows):
                return origin

        # Trained rows are never copies of the loader's tensors.
        if rows.requires_grad:
            return None
        for tensor, origin in reversed(known):
            if not _is_copy(tensor, rows, origin):
                continue
            if tensor.dtype == rows.dtype:
                return origin
            return origin.with_step(Converted(rows.dtype))
        return None

    def shares_memory(self, rows: Tensor) -> bool:
        """Return whether ``rows`` share memory with known rows."""
        storage = rows.untyped_storage()._cdata
        return any(tensor.untyped_storage()._cdata == storage for tensor, _ in self._known)


def _has_same_ids(ids: Tensor, nodes: Tensor) -> bool:
    # The loader's own tensor is recognised without reading it, so the host does not wait for the device.
    if is_same_view(ids, nodes):
        return True
    return ids.shape == nodes.shape and torch.equal(ids.long(), nodes)


def _is_copy(tensor: Tensor, rows: Tensor, origin: Origin) -> bool:
    """Return whether ``rows`` copy ``tensor``, in another dtype or concatenated by the model."""
    is_converted = tensor.dtype != rows.dtype
    is_concatenation = len(origin.names) > 1 and not origin.steps
    if not (is_converted or is_concatenation) or tensor.shape != rows.shape:
        return False
    return torch.equal(tensor.to(rows.dtype), rows)


InputModule: TypeAlias = "ColumnDropout | ColumnEmbedding | ColumnLayerNorm"
"""Replacement for a module before the first layer. Its ``forward`` works on the own batch's columns.

``forward`` also records where the result comes from. ``cut`` maps parameter names to the columns' dimension.
"""


@final
class ColumnDropout:
    """``nn.Dropout`` with keyed random numbers.

    ``number`` is the module's number in the model. ``edges`` says whether it is applied to edge values.
    """

    cut: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, dropout: nn.Dropout, provenance: InputProvenance, seed: int, *, number: int, edges: bool
    ) -> None:
        self._dropout = dropout
        self._provenance = provenance
        self._seed = seed
        self._number = number
        self._edges = edges

    def forward(self, x: Tensor, nodes: Tensor | None = None) -> Tensor:
        """Drop entries of ``x``. ``nodes`` are the (n,) int64 ids of the rows, if they are known.

        Rows from the cut input remember this step, and every part repeats it on its columns. Other rows are
        dropped by the ids of their nodes or edges, or at random if the ids are unknown.
        """
        dropout = self._dropout
        own_input = self._provenance.own_input
        if own_input is None or not dropout.training or dropout.p == 0:
            return functional.dropout(x, dropout.p, dropout.training, dropout.inplace)
        origin = self._provenance.find(x)
        if origin is None:
            drop_by_ids = self._provenance.dropouts.drop
            dropped = drop_by_ids(x, dropout.p, module=self._number, edges=self._edges, nodes=nodes)
            return functional.dropout(x, dropout.p) if dropped is None else dropped

        if dropout.inplace:
            raise ConfigError(
                "nn.Dropout(inplace=True) would overwrite features of the loader that later batches use. Use "
                "inplace=False."
            )

        step = Dropped(probability=dropout.p, seed=self._seed, stream=MODULES + self._number)
        result = step.apply(x, own_input, origin)
        self._provenance.add(result, origin.with_step(step))
        return result


@final
class ColumnEmbedding:
    """``nn.Embedding`` for all nodes, used as the input.

    Any torch optimizer can train it. With ``sparse=True`` its gradient is sparse. Gradients are computed for
    rows, so batches in flight have no leaves for the weight. Raises ConfigError if an embedding option needs
    uncut rows.
    """

    def __init__(
        self, embedding: nn.Embedding, provenance: InputProvenance, ntype: str, runs: tuple[ColumnRange, ...]
    ) -> None:
        self.cut = {"weight": 1}
        self._embedding = embedding
        self._provenance = provenance
        self._origin = Origin(ntype=ntype, runs=runs, embedding=self)

        for option in ("max_norm", "scale_grad_by_freq"):
            if value := getattr(embedding, option):
                raise ConfigError(
                    f"nn.Embedding({option}={value}) needs uncut rows or counts of one owner's batch, but "
                    f"push_pull cuts it by columns; leave {option} out, or use strategy='data_parallel'"
                )

    @property
    def weight(self) -> Tensor:
        """(V, D_p) columns on this part."""
        return self._embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return this part's columns from the rows at the input nodes ``x``, without a gradient.

        Raises ConfigError if ``x`` are not the batch's input nodes.
        """
        own_input = self._provenance.own_input
        nodes = None if own_input is None else own_input.nodes[self._origin.ntype]
        if nodes is None or not _has_same_ids(x, nodes):
            raise ConfigError(
                f"nn.Embedding of {len(self.weight)} nodes was cut by columns, so it only has the rows of a "
                f"batch's input nodes, but it was given other ids of shape {tuple(x.shape)}; call it with "
                "input_nodes, or with blocks[0].srcdata[dgl.NID]"
            )

        # The first layer gets rows that the origin computes, so that a batch keeps the rows it began with.
        rows = self.weight.detach()[nodes]
        self._provenance.add(rows, self._origin)
        return rows

    def add_gradients(self, row_gradients: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Add (K, D_p) row gradients to ``weight.grad``, at their (K,) int64 nodes, which may repeat."""
        pairs = [(nodes, gradient) for nodes, gradient in row_gradients if gradient is not None]
        if not pairs:
            return

        weight = self.weight
        nodes = torch.cat([ids for ids, _ in pairs])
        gradients = torch.cat([gradient for _, gradient in pairs]).to(weight).detach()
        # The row at the padding index is never trained.
        padding = self._embedding.padding_idx
        if self._embedding.sparse:
            if padding is not None:
                is_trained = nodes != padding
                nodes = nodes[is_trained]
                gradients = gradients[is_trained]
            # coalesce() makes the host wait, because it reads from the device how many rows are distinct.
            indices = nodes.unsqueeze(0)
            total = torch.sparse_coo_tensor(
                indices, gradients, weight.shape, check_invariants=True
            ).coalesce()
        else:
            if padding is not None:
                gradients = gradients.masked_fill((nodes == padding).unsqueeze(1), 0)
            total = torch.zeros_like(weight).index_add_(0, nodes, gradients)

        weight.grad = total if weight.grad is None else weight.grad + total


@final
class ColumnLayerNorm:
    """``nn.LayerNorm`` over the uncut input rows.

    A node's row has the same mean and variance in every batch, so they are computed once. ``moments`` are
    mean and biased variance over every node's uncut row, (V,) float64 each.
    """

    def __init__(
        self,
        norm: nn.LayerNorm,
        provenance: InputProvenance,
        runs: tuple[ColumnRange, ...],
        moments: tuple[Tensor, Tensor],
    ) -> None:
        self.cut = {name: 0 for name, _ in norm.named_parameters(recurse=False)}
        self._norm = norm
        self._provenance = provenance
        self._runs = runs
        self._moments = moments

    def forward(self, x: Tensor) -> Tensor:
        """Return this part's columns from the normalized features, without a gradient.

        Raises ConfigError if ``x`` are not the batch's unchanged features.
        """
        origin = self._provenance.find(x)
        own_input = self._provenance.own_input
        width = self._runs[0].width
        if origin is None or own_input is None:
            raise ConfigError(
                f"LayerNorm({width}) was cut by input columns, because it is as wide as the features, but it "
                f"was given rows of shape {tuple(x.shape)} that are not the features of the batch. If it "
                "normalizes a later layer of that width, register it after the first layer; to normalize "
                "anything but unchanged features, use strategy='data_parallel'"
            )

        if not origin.is_raw or origin.runs != self._runs:
            raise ConfigError(
                f"LayerNorm({width}) was given features that were changed before, so their mean and variance "
                "would need all columns in every batch; apply the norm first, or use strategy='data_parallel'"
            )

        with torch.no_grad():
            rows = self.apply(x, own_input, origin)
        self._provenance.add(rows, origin.with_step(self))
        return rows

    def apply(self, rows: Tensor, owner: PartInput, origin: Origin) -> Tensor:
        """Return the normalized features, with the module's current weights."""
        means, variances = self._moments
        if means.device != rows.device:
            means = means.to(rows.device)
            variances = variances.to(rows.device)
            self._moments = means, variances

        ids = owner.nodes[origin.ntype]
        mean = means[ids].to(rows).unsqueeze(1)
        # The scale is computed in float64, and rounded once.
        scale = (variances[ids] + self._norm.eps).rsqrt().to(rows).unsqueeze(1)
        rows = (rows - mean) * scale
        rows = rows if self._norm.weight is None else rows * self._norm.weight
        return rows if self._norm.bias is None else rows + self._norm.bias


@final
@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The origins of the first layer's arguments."""

    origins: Mapping[str, Origin]
    """Origins by node type for the input rows."""
    keys: Mapping[str, str | None]
    """Key in the block's edge data for each edge argument. None if the model computes the argument."""

    def edges(self, layer: SplittableConv, block: DGLBlock) -> dict[str, Tensor]:
        """Return a block's per-edge values before the model is called on it."""
        for name, key in self.keys.items():
            if key is None:
                raise ConfigError(
                    f"the model computes {name!r} of its first layer itself, so no batch can begin before "
                    "the model is called; use depth=1, or store the values as edge data and let the sampler "
                    "prefetch them (prefetch_edge_feats), or give the layer own_edges()"
                )
        stored = {name: block.edata[key] for name, key in self.keys.items()}
        return {**layer.own_edges(block), **stored}


def read_input_spec(layer: SplittableConv, arguments: StageInput, provenance: InputProvenance) -> InputSpec:
    """Find out where ``arguments`` come from.

    Raises ConfigError if parts cannot compute such rows for other owners, or an edge argument is trained.
    """
    origins = {}
    for ntype, inputs in (arguments.by_type or {"": arguments}).items():
        if ntype in layer.own_types:
            continue
        origin = provenance.find(inputs.x, ntype)
        if origin is None:
            raise ConfigError(
                f"the first layer ({type(layer).__name__}) was given rows of shape {tuple(inputs.x.shape)} "
                "that are not the loader's unchanged features, so the other ranks cannot compute them from "
                "their columns. Only torch.nn.LayerNorm and torch.nn.Dropout may come before the first "
                "layer, and torch.nn.Embedding of the node ids may replace the features; for anything else "
                "use strategy='data_parallel'"
            )
        origins[origin.ntype] = origin

    own_edges = layer.own_edges(arguments.block)
    keys = {}
    for name, values in arguments.edges.items():
        if values.requires_grad:
            raise ConfigError(
                f"the first layer's {name!r} is trained, and its gradient would need every part's rows; "
                "use strategy='data_parallel'"
            )
        if name not in own_edges:
            keys[name] = _find_edge_key(values, arguments.block)
    return InputSpec(origins=origins, keys=keys)


def _find_edge_key(values: Tensor, block: DGLBlock) -> str | None:
    """Return the key under which the block's edge data has ``values``, or None if it does not have them."""
    for key, stored in block.edata.items():
        if is_same_view(stored, values):
            return str(key)
    return None


_Module = TypeVar("_Module", bound=nn.Module)


def find_input_modules(
    model: nn.Module,
    first: nn.Module,
    provenance: InputProvenance,
    ntype: str,
    runs: tuple[ColumnRange, ...],
    moments: Callable[[], tuple[Tensor, Tensor]],
    *,
    num_nodes: int,
) -> dict[nn.Module, InputModule]:
    """Find the norms and embeddings that work on one node type's input. Every rank must call this.

    Norms, and embeddings for all nodes, are cut if they are as wide as the input. A norm must also be
    registered before the first layer, or no other parameter in the model may be that wide. Raises ConfigError
    if a module before the first layer cannot work on columns.

    Args:
        runs: This part's columns.
        moments: Returns mean and variance over each node's concatenated features, (V,) float64. It is
            collective, and called only if there is a norm.
    """
    width = runs[0].width
    for name, batch_norm in (*_find_modules(model, nn.BatchNorm1d), *_find_modules(model, BatchNorm)):
        if batch_norm.num_features == width and _is_before(model, batch_norm, first, width):
            raise ConfigError(
                f"{name!r} is a {type(batch_norm).__name__} of the {width} input columns, but its mean and "
                "variance would depend on the owner of a batch and on the order of batches; use "
                "torch.nn.LayerNorm, normalize the features before training, or use strategy='data_parallel'"
            )

    embeddings = {}
    for name, embedding in embeddings_of_all_nodes(model, num_nodes):
        if embedding.embedding_dim == width:
            embeddings[name] = embedding
    norms = {}
    for name, norm in _find_modules(model, nn.LayerNorm):
        if tuple(norm.normalized_shape) == (width,) and _is_before(model, norm, first, width):
            norms[name] = norm
    if embeddings and norms:
        raise ConfigError(
            f"{next(iter(norms))!r} normalizes the rows of the trained embedding {next(iter(embeddings))!r}, "
            "but their mean and variance change with every step and need all columns; leave the norm out, or "
            "use strategy='data_parallel'"
        )

    replacements: dict[nn.Module, InputModule] = {}
    for embedding in embeddings.values():
        replacements[embedding] = ColumnEmbedding(embedding, provenance, ntype, runs)
    if norms:
        moments_of_rows = moments()
        for norm in norms.values():
            replacements[norm] = ColumnLayerNorm(norm, provenance, runs, moments_of_rows)
    return replacements


def find_dropouts(
    model: nn.Module, provenance: InputProvenance, seed: int
) -> Iterator[tuple[nn.Module, ColumnDropout]]:
    """Yield every dropout, because models often use one ``nn.Dropout`` for all layers."""
    dropouts = list(_find_modules(model, nn.Dropout))
    provenance.dropouts.is_installed = True
    for number, (name, dropout) in enumerate(dropouts):
        edges = name.rpartition(".")[2] in EDGE_DROPOUTS
        yield dropout, ColumnDropout(dropout, provenance, seed, number=number, edges=edges)
    if any(dropout.p > 0 for _, dropout in dropouts):
        provenance.dropouts.track(model)


def _find_modules(model: nn.Module, module_type: type[_Module]) -> Iterator[tuple[str, _Module]]:
    # Subclasses are left out, because they may compute something else.
    for name, module in model.named_modules():
        if type(module) is module_type:
            yield name, module


def embeddings_of_all_nodes(model: nn.Module, num_nodes: int) -> Iterator[tuple[str, nn.Embedding]]:
    """Yield embeddings that have a row for every node, with their names."""
    for name, embedding in _find_modules(model, nn.Embedding):
        if embedding.num_embeddings == num_nodes:
            yield name, embedding


def _is_before(model: nn.Module, module: nn.Module, first: nn.Module, width: int) -> bool:
    """Guess whether ``module`` is applied to the inputs of the layer ``first``.

    As a rule, modules are registered in the order in which they are used. A norm that is registered later
    counts as an input norm if no other weight outside ``first`` is as wide as the input.
    """
    modules = list(model.modules())
    inner_modules = set(first.modules())
    if module in inner_modules:
        return False
    if modules.index(module) < modules.index(first):
        return True

    norms = (nn.LayerNorm, nn.BatchNorm1d, BatchNorm)
    for candidate in modules:
        if candidate in inner_modules or isinstance(candidate, norms):
            continue
        if any(width in parameter.shape for parameter in candidate.parameters(recurse=False)):
            return False
    return True


Runs: TypeAlias = tuple[tuple[ColumnRange, ...], ...]
"""Each part's columns, in part order."""


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    """The distribution of one parameter over the parts."""

    shape: tuple[int, ...]
    """Shape before the cut."""
    dimension: int
    """Dimension that the input columns are in."""
    runs: Runs
    """Each part's columns, in the same order as in its piece."""

    def piece_shape(self, part: int) -> tuple[int, ...]:
        """Return the shape of the piece on ``part``, which may be empty."""
        shape = list(self.shape)
        shape[self.dimension] = sum(len(run) for run in self.runs[part])
        return tuple(shape)


def compute_by(module: nn.Module, forward: Callable[..., Any], name: str = "forward") -> None:
    """Replace the method ``name`` in a user's module. Its :func:`uncut_copy` keeps the old method."""
    vars(module)[name] = forward
    vars(module)[_OWN_FORWARD] = name


def uncut_copy(module: nn.Module, uncut: Mapping[str, Tensor]) -> nn.Module:
    """Copy the user's module, with ``uncut`` tensors by parameter name in place of pieces.

    Raises ConfigError if the module holds something that cannot be copied.
    """
    # deepcopy() looks up objects by id in the memo, and takes the copies that it finds there.
    memo: dict[int, Any] = {}
    for inner in module.modules():
        attributes = vars(inner)
        for value in attributes.values():
            # Modules may hold results with an autograd history, which torch does not copy.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        if _OWN_FORWARD in attributes:
            # The replaced methods hold the last batch and the moments over all rows, so they are not copied.
            method = attributes[attributes[_OWN_FORWARD]]
            memo[id(method)] = False
    for name, parameter in uncut.items():
        piece = module.get_parameter(name)
        memo[id(piece)] = nn.Parameter(parameter, piece.requires_grad)

    try:
        result = copy.deepcopy(module, memo)
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"{type(module).__name__} holds an object that cannot be copied ({error}), but its uncut form is "
            "a copy; keep such objects out of the model, or give their class a __deepcopy__"
        ) from error

    for inner in result.modules():
        attributes = vars(inner)
        if _OWN_FORWARD in attributes:
            del attributes[attributes.pop(_OWN_FORWARD)]
        attributes.pop("run_parts", None)
    return result


@final
@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """This rank's part of a model."""

    layer: SplittableConv
    """First layer on this part."""
    runs: Mapping[str, Runs]
    """Input columns by node type."""
    features: list[Origin]
    """Origins for the loader's rows: one for each feature, and one for all of them concatenated."""
    provenance: InputProvenance
    cuts: Mapping[str, Cut]
    """Cuts by parameter name. A shared parameter is listed under all its names."""
    stashed: tuple[str, ...]
    """Parameters that are used before the sum. Every batch in flight has its own leaves for them."""
    shared: tuple[str, ...]
    """Those of the stashed parameters that every part holds uncut."""


@final
@dataclass(frozen=True)
class TypeSchema:
    """The node and edge types in a graph."""

    num_nodes: Mapping[str, int]
    """Node counts by node type."""
    etypes: Sequence[EdgeType]

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self.num_nodes) == len(self.etypes) == 1


def split_model(
    model: nn.Module, stores: Mapping[str, ColumnStore], group: Group, schema: TypeSchema, *, seed: int
) -> SplitModel:
    """Cut the first layer in ``model`` and the modules before it to this rank's part. All ranks call this.

    The user's modules are kept. Their parameters become pieces, and their ``forward`` computes by stages.
    Raises ConfigError if no layer that takes the input's columns can be split, or a module before it cannot
    be cut.
    """
    find_input = _find_input if schema.is_homogeneous else _find_typed_input
    widths, (first_name, layer) = find_input(model, stores, schema)
    first = model.get_submodule(first_name)
    provenance = InputProvenance(seed)
    runs = {}
    own_runs = {}
    for ntype, width_of_feature in widths.items():
        runs[ntype] = deal_out_concatenated([*width_of_feature.values()], group.size)
        own_runs[ntype] = runs[ntype][group.part]

    # Only models for a single type have norms and embeddings before the first layer.
    only_type = next(iter(widths))
    modules: dict[nn.Module, InputModule] = {}
    if schema.is_homogeneous:
        moments = stores[only_type].moments
        num_nodes = schema.num_nodes[only_type]
        modules |= find_input_modules(
            model, first, provenance, only_type, own_runs[only_type], moments, num_nodes=num_nodes
        )
    modules |= find_dropouts(model, provenance, seed)
    # The first layer's stages apply its own dropout.
    replaced_modules = modules.keys() - layer.split_modules()
    inputs = {module: modules[module] for module in model.modules() if module in replaced_modules}

    prefixes = {module: f"{path}." if path else "" for path, module in model.named_modules()}
    stashed = [prefixes[first] + inner_name for inner_name in (*layer.cut, *layer.shared)]
    dimensions = {}
    for inner_name, dimension in layer.cut.items():
        dimensions[first, inner_name] = dimension, layer.cut_types.get(inner_name, only_type)
    for module, input_module in inputs.items():
        for inner_name, dimension in input_module.cut.items():
            dimensions[module, inner_name] = dimension, only_type
            if not isinstance(input_module, ColumnEmbedding):
                stashed.append(prefixes[module] + inner_name)
    cuts = _find_cuts(model, dimensions, runs)

    # All checks are above, so a model that cannot be cut keeps its parameters.
    for module, input_module in inputs.items():
        forward = input_module.forward
        compute_by(module, forward)
        if isinstance(input_module, ColumnDropout):
            # vars() is used because setattr() on a module would register a value that is a module.
            vars(module)[DROP_ROWS] = forward
    for (module, inner_name), (dimension, ntype) in dimensions.items():
        cut_in_place(module, {inner_name: dimension}, own_runs[ntype])
    if layer is not first:
        compute_by(first, partial(_forward_by_stages, first, layer), layer.replaced)

    features = [origin for ntype in widths for origin in _list_origins(ntype, widths[ntype], own_runs[ntype])]
    return SplitModel(
        layer=layer,
        runs=runs,
        features=features,
        provenance=provenance,
        cuts=cuts,
        stashed=tuple(stashed),
        shared=tuple(prefixes[first] + inner_name for inner_name in layer.shared),
    )


def _list_origins(ntype: str, widths: Mapping[str, int], runs: tuple[ColumnRange, ...]) -> Iterator[Origin]:
    """Yield where the loader's features for a node type come from, and their concatenation."""
    # An embedding has a width without a name.
    names = tuple(name for name in widths if name)
    for name, run in zip(names, runs, strict=bool(names)):
        yield Origin(ntype=ntype, names=(name,), runs=(run,))
    if len(names) > 1:
        yield Origin(ntype=ntype, names=names, runs=runs)


def _find_cuts(
    model: nn.Module,
    dimensions: Mapping[tuple[nn.Module, str], tuple[int, str]],
    runs: Mapping[str, Runs],
) -> dict[str, Cut]:
    """Return the cuts by full parameter name.

    ``dimensions`` maps (module, name within it) to the dimension to cut and the node type that its columns
    belong to. Raises ConfigError if a parameter to cut is also used elsewhere in the model.
    """
    cut_parameters: dict[nn.Parameter, tuple[tuple[nn.Module, str], int, str]] = {}
    for (module, inner_name), (dimension, ntype) in dimensions.items():
        owner_name, _, attribute = inner_name.rpartition(".")
        place = module.get_submodule(owner_name), attribute
        cut_parameters.setdefault(module.get_parameter(inner_name), (place, dimension, ntype))

    cuts = {}
    tied_parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in cut_parameters:
            continue
        place, dimension, ntype = cut_parameters[parameter]
        owner_name, _, attribute = name.rpartition(".")
        if place == (model.get_submodule(owner_name), attribute):
            cuts[name] = Cut(shape=tuple(parameter.shape), dimension=dimension, runs=runs[ntype])
        else:
            tied_parameters[name] = parameter

    for tied_name, parameter in tied_parameters.items():
        name = next(name for name in cuts if model.get_parameter(name) is parameter)
        raise ConfigError(
            f"{name!r} and {tied_name!r} are the same parameter, but push_pull cuts the first by columns; "
            "use two parameters, or strategy='data_parallel'"
        )
    return cuts


def _forward_by_stages(conv: nn.Module, stages: SplittableConv, *args: Any, **kwargs: Any) -> Any:
    # A partial binds the modules instead of a closure, so that a copy computes with its own weights.
    stages.training = conv.training
    return stages.forward(*args, **kwargs)


def find_first_layer(model: nn.Module, width: int) -> tuple[str, SplittableConv]:
    """Find the first convolution with ``width`` input columns, and return its name and its stages.

    Raises ConfigError if there is none, or it cannot be split.
    """
    reasons = []
    for name, module in find_convolutions(model):
        try:
            stages = make_stages(module)
            parameters = dict(stages.named_parameters(remove_duplicate=False))
            derived_names = stages.cut.keys() - parameters.keys()
            if derived_names:
                raise ConfigError(
                    f"{min(derived_names)!r} is computed from other parameters, for example by a weight "
                    "norm, which needs all columns; remove that, or use strategy='data_parallel'"
                )
        except ConfigError as error:
            reasons.append(f"; {name or 'the model'}: {error}")
            continue
        if stages.width == width:
            return name, stages
    raise ConfigError(
        f"push_pull found no layer that takes the {width} columns of the input and can be split"
        f"{''.join(reasons)}"
    )


def find_typed_layer(
    model: nn.Module, etypes: Sequence[EdgeType], widths: Mapping[str, int]
) -> tuple[str, SplittableConv]:
    """Find the first layer that reads several types with ``widths`` columns. Return its name and stages.

    Raises ConfigError if there is none, or it cannot be split.
    """
    reasons = []
    for name, module in find_convolutions(model):
        try:
            stages = make_typed_stages(module, etypes, widths)
        except ConfigError as error:
            reasons.append(f"; {name or 'the model'}: {error}")
            continue
        if stages is not None:
            return name, stages

    columns = ", ".join(f"{ntype}: {width}" for ntype, width in widths.items()) or "none"
    raise ConfigError(
        "on several types push_pull trains models that begin with dgl.nn.HeteroGraphConv of convolutions "
        f"that can be split, or the ready-made RGCN, but found no such layer for the columns of the features "
        f"({columns}){''.join(reasons)}; use such a layer, or strategy='data_parallel'"
    )


FoundInput: TypeAlias = tuple[dict[str, dict[str, int]], tuple[str, SplittableConv]]
"""Input widths by node type and feature name, and the name and stages of the layer that takes them.

An embedding has a width with an empty name.
"""


def _find_typed_input(model: nn.Module, stores: Mapping[str, ColumnStore], schema: TypeSchema) -> FoundInput:
    """Return the input's widths and the first layer, for a model with several types."""
    widths = {ntype: dict(store.widths) for ntype, store in stores.items() if store.names}
    total_widths = {ntype: sum(width_of_feature.values()) for ntype, width_of_feature in widths.items()}
    name, layer = find_typed_layer(model, schema.etypes, total_widths)
    for ntype in dict.fromkeys(layer.cut_types.values()):
        _check_floats(stores[ntype])
    return widths, (name, layer)


def _find_input(model: nn.Module, stores: Mapping[str, ColumnStore], schema: TypeSchema) -> FoundInput:
    """Return the input's widths by node type and the first layer, for a model with one node type.

    If no layer takes the features, the input is the model's embedding for all nodes. Raises ConfigError if
    there is no such layer.
    """
    ((ntype, store),) = stores.items()
    num_nodes = schema.num_nodes[ntype]
    inputs = [dict(store.widths)] if store.names else []
    embeddings = [embedding for _, embedding in embeddings_of_all_nodes(model, num_nodes)]
    if embeddings:
        inputs.append({"": embeddings[0].embedding_dim})

    errors = []
    for widths in inputs:
        try:
            layer = find_first_layer(model, sum(widths.values()))
        except ConfigError as error:
            errors.append(error)
            continue
        if "" not in widths:
            _check_floats(store)
        return {ntype: widths}, layer

    if errors:
        raise errors[0]
    raise ConfigError(
        "the nodes have none of the configured features, and the model has no "
        f"torch.nn.Embedding({num_nodes}, ...) instead; name the features with the option features="
    )


def _check_floats(store: ColumnStore) -> None:
    for name in store.names:
        if not store.dtype(name).is_floating_point:
            raise ConfigError(
                f"the feature {name!r} is {store.dtype(name)}, but the first layer computes with "
                "floating-point numbers; store it as float32 or float16, or choose other features with "
                "the option features="
            )
