"""Models cut by input columns: the first layer, the modules before it, their inputs, and the joined state.

A part repeats for other owners' nodes what the model did with the rows of its own batch.
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
from dglx_dist.layers.base import SplittableConv, StageInput, cut_in_place
from dglx_dist.layers.convolutions import Sync, make_stages
from dglx_dist.layers.dropout import (
    EDGE_DROPOUTS,
    LATER_MODULES,
    MODULES,
    ColumnRange,
    DropDraws,
    NodeDropouts,
    deal_out_concatenated,
    drop_entries,
)
from dglx_dist.layers.nn import BatchNorm
from dglx_dist.layers.tracer import find_convolutions
from dglx_dist.strategies.push_pull.exchange import Group, GroupBatch, PartInput
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore

_OWN_FORWARD = "_dglx_forward"
"""Marks a module whose ``forward`` is replaced."""


InputStep: TypeAlias = "Converted | Dropped | ColumnLayerNorm"
"""What happens to a part's rows on the way to the first layer; equal to another that does the same.

``apply(rows, owner, runs)`` returns the (L0, F_p) result for one owner's rows, columns ``runs`` of the input.
"""


@final
@dataclass(frozen=True)
class Converted:
    """Another dtype."""

    dtype: torch.dtype

    def apply(self, rows: Tensor, owner: PartInput, runs: Sequence[ColumnRange]) -> Tensor:
        return rows.to(self.dtype)


@final
@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Entries dropped by (seed, batch, node, column)."""

    probability: float
    seed: int
    stream: int
    """Of the draws; one for each dropout module."""

    def apply(self, rows: Tensor, owner: PartInput, runs: Sequence[ColumnRange]) -> Tensor:
        draws = DropDraws(seed=self.seed, number=owner.number, nodes=owner.nodes, runs=tuple(runs))
        return drop_entries(rows, self.probability, draws, self.stream)


@final
@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a part computes its input rows of any owner; equal to another if that does the same."""

    runs: tuple[ColumnRange, ...]
    """The part's columns of the uncut input, in order; keys of dropout."""
    names: tuple[str, ...] = ()
    """Features of the loader, concatenated."""
    embedding: ColumnEmbedding | None = None
    """In place of features."""
    steps: tuple[InputStep, ...] = ()
    """Applied to those rows, in order."""

    @property
    def is_raw(self) -> bool:
        """Whether the rows are features, but for their dtype."""
        return self.embedding is None and all(isinstance(step, Converted) for step in self.steps)

    def source(self, owner: PartInput) -> Tensor:
        """Return (L0, F_p) before the steps: features, or the present rows of an embedding, a leaf."""
        if self.embedding is not None:
            weight = self.embedding.weight
            return weight.detach()[owner.nodes].requires_grad_(weight.requires_grad)
        found = [owner.columns[name] for name in self.names]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def rows(self, source: Tensor, owner: PartInput) -> Tensor:
        """Return (L0, F_p), the first layer's input made of ``source``, with the history of trained steps."""
        for step in self.steps:
            source = step.apply(source, owner, self.runs)
        return source

    def then(self, step: InputStep) -> Origin:
        return replace(self, steps=(*self.steps, step))


@final
class InputProvenance(Shared):
    """The origins of tensors of the batch that the model is computing.

    A tensor is recognised by its storage, so that a view of the loader's own is known and anything computed
    from it is not.
    """

    def __init__(self, seed: int) -> None:
        self.own: PartInput | None = None
        """The own part of the batch that the model computes; None outside of a batch."""
        self.dropouts = NodeDropouts(seed, LATER_MODULES)
        """Draws of dropouts of anything but the input."""
        self._known: list[tuple[Tensor, Origin]] = []

    def begin(self, group_batch: GroupBatch | None, part: int) -> None:
        """Forget the last batch; ``group_batch`` is the one that the model computes now, if any."""
        self.own, self._known = None if group_batch is None else group_batch.inputs[part], []
        if self.own is not None and self.dropouts.in_use:
            self.dropouts.begin(self.own.number, self.own.nodes)
        elif self.dropouts.in_use:
            self.dropouts.end()

    def add(self, rows: Tensor, origin: Origin) -> None:
        """Record that ``rows`` of the own batch came from ``origin``; keeps them until the next batch."""
        self._known.append((rows, origin))

    def find(self, rows: Tensor) -> Origin | None:
        """Return the origin of ``rows``, a change of dtype included; None if it is unknown."""
        for known, origin in self._known:
            if known is rows or _same(known, rows):
                return origin
        for known, origin in reversed(self._known):
            if not rows.requires_grad and _copied(known, rows, origin):
                return origin if known.dtype == rows.dtype else origin.then(Converted(rows.dtype))
        return None

    def holds(self, rows: Tensor) -> bool:
        """Whether ``rows`` share memory with known ones."""
        storage = rows.untyped_storage()._cdata
        return any(known.untyped_storage()._cdata == storage for known, _ in self._known)


def _same(known: Tensor, rows: Tensor) -> bool:
    return (
        known.shape == rows.shape
        and known.dtype == rows.dtype
        and known.stride() == rows.stride()
        and known.storage_offset() == rows.storage_offset()
        and known.untyped_storage()._cdata == rows.untyped_storage()._cdata
    )


def _copied(known: Tensor, rows: Tensor, origin: Origin) -> bool:
    may_be = known.dtype != rows.dtype or (len(origin.names) > 1 and not origin.steps)
    return may_be and known.shape == rows.shape and torch.equal(known.to(rows.dtype), rows)


InputModule: TypeAlias = "ColumnDropout | ColumnEmbedding | ColumnLayerNorm"
"""What replaces ``forward`` of a module before the first layer: it works on each column of the own batch by
itself, and records the origin of the result. ``cut`` is parameter name to the dimension over the columns."""


@final
class ColumnDropout:
    """``nn.Dropout`` with keyed draws.

    ``number`` is that of the module in the model, and ``edges`` tells whether it is applied to edge values.
    """

    cut: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, dropout: nn.Dropout, provenance: InputProvenance, seed: int, *, number: int, edges: bool
    ) -> None:
        self._dropout, self._provenance, self._seed = dropout, provenance, seed
        self._number, self._edges = number, edges

    def forward(self, x: Tensor) -> Tensor:
        dropout, own = self._dropout, self._provenance.own
        if own is None or not dropout.training or dropout.p == 0:
            return functional.dropout(x, dropout.p, dropout.training, dropout.inplace)
        origin = self._provenance.find(x)
        if origin is None:
            draw = self._provenance.dropouts.drop
            dropped = draw(x, dropout.p, module=self._number, edges=self._edges)
            return functional.dropout(x, dropout.p) if dropped is None else dropped
        if dropout.inplace:
            raise ConfigError(
                "nn.Dropout(inplace=True) would change the loader's features in place, of which batches in "
                "flight have their own; use inplace=False"
            )
        step = Dropped(probability=dropout.p, seed=self._seed, stream=MODULES + self._number)
        dropped = step.apply(x, own, origin.runs)
        self._provenance.add(dropped, origin.then(step))
        return dropped


@final
class ColumnEmbedding:
    """``nn.Embedding`` of all nodes as the input.

    Any torch optimizer trains it; with ``sparse=True`` the gradient is sparse too. Its gradients come by
    rows, so batches in flight have no leaves of the weight.

    Raises:
        ConfigError: an option of the embedding needs whole rows.
    """

    def __init__(
        self, embedding: nn.Embedding, provenance: InputProvenance, runs: tuple[ColumnRange, ...]
    ) -> None:
        self.cut = {"weight": 1}
        self._embedding, self._provenance, self._runs = embedding, provenance, runs
        for option in ("max_norm", "scale_grad_by_freq"):
            if value := getattr(embedding, option):
                raise ConfigError(
                    f"nn.Embedding({option}={value}) needs whole rows, or counts of one owner's batch alone, "
                    f"and push_pull cuts it by columns; leave {option} out, or use strategy='data_parallel'"
                )

    @property
    def weight(self) -> Tensor:
        """(V, D_p), the part's columns."""
        return self._embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        own = self._provenance.own
        # The loader's own tensor is known without reading it, for which the host would wait for a device.
        if own is None or not (
            _same(x, own.nodes) or (x.shape == own.nodes.shape and torch.equal(x.long(), own.nodes))
        ):
            raise ConfigError(
                f"nn.Embedding of {len(self.weight)} nodes was cut by columns, so it can only be asked "
                f"for the rows of a batch's input nodes; it was given ids of shape {tuple(x.shape)} that "
                "are not these. Call it with input_nodes, or with blocks[0].srcdata[dgl.NID]"
            )
        # The origin computes the rows that the first layer sees, so that a batch keeps those it began with.
        rows = self.weight.detach()[own.nodes]
        self._provenance.add(rows, Origin(runs=self._runs, embedding=self))
        return rows

    def add_gradients(self, found: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Add to ``weight.grad`` at nodes, (K,) int64 with repeats, the gradients of their rows, (K, D_p)."""
        trained = [(nodes, gradient) for nodes, gradient in found if gradient is not None]
        if not trained:
            return
        weight, padding = self.weight, self._embedding.padding_idx
        nodes = torch.cat([nodes for nodes, _ in trained])
        gradients = torch.cat([gradient for _, gradient in trained]).to(weight).detach()
        if padding is not None and not self._embedding.sparse:
            gradients = gradients.masked_fill((nodes == padding).unsqueeze(1), 0)
        if self._embedding.sparse:
            # The number of distinct rows is read from the device.
            kept = slice(None) if padding is None else nodes != padding
            nodes, gradients = nodes[kept], gradients[kept]
            total = torch.sparse_coo_tensor(
                nodes.unsqueeze(0), gradients, weight.shape, check_invariants=True
            ).coalesce()
        else:
            total = torch.zeros_like(weight).index_add_(0, nodes, gradients)
        weight.grad = total if weight.grad is None else weight.grad + total


@final
class ColumnLayerNorm:
    """``nn.LayerNorm`` of the uncut input rows.

    A node's row has the same mean and variance in every batch, so they are computed once, over all parts:
    ``moments`` are mean and biased variance, (V,) float64 each, of every node's uncut row.
    """

    def __init__(
        self,
        norm: nn.LayerNorm,
        provenance: InputProvenance,
        runs: tuple[ColumnRange, ...],
        moments: tuple[Tensor, Tensor],
    ) -> None:
        self.cut = {name: 0 for name, _ in norm.named_parameters(recurse=False)}
        self._norm, self._provenance, self._runs, self._moments = norm, provenance, runs, moments

    def forward(self, x: Tensor) -> Tensor:
        origin, own, width = self._provenance.find(x), self._provenance.own, self._runs[0].width
        if origin is None or own is None:
            raise ConfigError(
                f"LayerNorm({width}) was cut by input columns, as it is as wide as the features, and "
                f"was given rows of shape {tuple(x.shape)} that are not the features of the batch. If it "
                "normalizes a later layer of that width, register it after the first layer; to normalize "
                "anything but the features as they came, use strategy='data_parallel'"
            )
        if not origin.is_raw or origin.runs != self._runs:
            raise ConfigError(
                f"LayerNorm({width}) was given features that something has changed before: mean and "
                "variance of the changed rows need all columns in every batch; apply the norm first, or use "
                "strategy='data_parallel'"
            )
        with torch.no_grad():
            rows = self.apply(x, own, self._runs)
        self._provenance.add(rows, origin.then(self))
        return rows

    def apply(self, rows: Tensor, owner: PartInput, runs: Sequence[ColumnRange]) -> Tensor:
        """Return the normalized features, with the module's current weights."""
        if self._moments[0].device != rows.device:
            self._moments = self._moments[0].to(rows.device), self._moments[1].to(rows.device)
        norm, ids, (means, variances) = self._norm, owner.nodes, self._moments
        mean, scale = means[ids], (variances[ids] + norm.eps).rsqrt()
        rows = (rows - mean.to(rows).unsqueeze(1)) * scale.to(rows).unsqueeze(1)
        rows = rows if norm.weight is None else rows * norm.weight
        return rows if norm.bias is None else rows + norm.bias


@final
@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The sources of the first layer's arguments."""

    origin: Origin
    """Of the input rows."""
    keys: Mapping[str, str | None]
    """Edge argument to the name of the block's edge data; None: computed by the model."""

    def edges(self, layer: SplittableConv, block: DGLBlock) -> dict[str, Tensor]:
        """Return the per-edge values of a block before the model is called on it."""
        if layer.edges_after_sync:
            return {}
        for name, key in self.keys.items():
            if key is None:
                raise ConfigError(
                    f"the model computes {name!r} of its first layer itself, so no batch can begin before "
                    "the model is called; use depth=1, or store the values as edge data and let the sampler "
                    "prefetch them (prefetch_edge_feats), or give the layer own_edges()"
                )
        found = {name: block.edata[key] for name, key in self.keys.items()}
        return {**layer.own_edges(block), **found}


def read_input_spec(layer: SplittableConv, given: StageInput, provenance: InputProvenance) -> InputSpec:
    """Return the sources of ``given``.

    Raises:
        ConfigError: parts cannot compute such input rows for other owners, or an edge argument is trained.
    """
    origin = provenance.find(given.x)
    if origin is None:
        raise ConfigError(
            f"the first layer ({type(layer).__name__}) was given rows of shape {tuple(given.x.shape)} that "
            "are not the loader's features as they came, so the other ranks cannot do the same with their "
            "columns. Between the features and the first layer may stand torch.nn.LayerNorm, "
            "torch.nn.Dropout, or torch.nn.Embedding of the node ids in their place; anything else trains "
            "under strategy='data_parallel'"
        )
    own = layer.own_edges(given.block).keys()
    for name, values in given.edges.items():
        if values.requires_grad:
            raise ConfigError(
                f"the first layer's {name!r} is trained, and its gradient would need every part's rows; "
                "use strategy='data_parallel'"
            )
    keys = {name: _key_of(values, given.block) for name, values in given.edges.items() if name not in own}
    return InputSpec(origin=origin, keys=keys)


def _key_of(values: Tensor, block: DGLBlock) -> str | None:
    return next((str(key) for key, stored in block.edata.items() if _same(stored, values)), None)


_Module = TypeVar("_Module", bound=nn.Module)


def find_input_modules(
    model: nn.Module,
    first: nn.Module,
    provenance: InputProvenance,
    runs: tuple[ColumnRange, ...],
    moments: Callable[[], tuple[Tensor, Tensor]],
    *,
    num_nodes: int,
    seed: int,
) -> dict[nn.Module, InputModule]:
    """Return the modules that may work on the input, and what replaces their ``forward``; collective.

    Dropout is replaced everywhere, as one ``nn.Dropout`` usually serves all layers. A norm over the layer's
    width, and an embedding of all nodes of that width, are cut; a norm is taken for one of the input if it is
    registered before the first layer, or if no other parameter of the model is that wide.

    ``runs`` are this part's columns. ``moments`` returns mean and variance of each node's concatenated
    features, (V,) float64; it is collective, and called only if there is a norm.

    Raises:
        ConfigError: something before the first layer cannot work on columns; the message has the reason.
    """
    width = runs[0].width
    for name, batch_norm in (*_of_kind(model, nn.BatchNorm1d), *_of_kind(model, BatchNorm)):
        if batch_norm.num_features == width and _is_before(model, batch_norm, first, width):
            raise ConfigError(
                f"{name!r} is a {type(batch_norm).__name__} of the {width} input columns: its mean and "
                "variance are over the sources of each owner's batch, so one batch's rows would depend on "
                "who owns it, and its running averages on the order of the batches. Use torch.nn.LayerNorm, "
                "or normalize the features once before training, or use strategy='data_parallel'"
            )
    embeddings = {
        name: one for name, one in embeddings_of_all_nodes(model, num_nodes) if one.embedding_dim == width
    }
    norms = {
        name: norm
        for name, norm in _of_kind(model, nn.LayerNorm)
        if tuple(norm.normalized_shape) == (width,) and _is_before(model, norm, first, width)
    }
    if embeddings and norms:
        raise ConfigError(
            f"{next(iter(norms))!r} normalizes the rows of the trained embedding {next(iter(embeddings))!r}: "
            "their mean and variance change with every step and need all columns; leave the norm out, or use "
            "strategy='data_parallel'"
        )
    found: dict[nn.Module, InputModule] = {}
    found |= {one: ColumnEmbedding(one, provenance, runs) for one in embeddings.values()}
    if norms:
        of_rows = moments()
        found |= {norm: ColumnLayerNorm(norm, provenance, runs, of_rows) for norm in norms.values()}
    dropouts = list(_of_kind(model, nn.Dropout))
    provenance.dropouts.is_installed = True
    for number, (name, dropout) in enumerate(dropouts):
        edges = name.rpartition(".")[2] in EDGE_DROPOUTS
        found[dropout] = ColumnDropout(dropout, provenance, seed, number=number, edges=edges)
    if any(dropout.p > 0 for _, dropout in dropouts):
        provenance.dropouts.track(model)
    # The stages of the first layer apply its own dropout.
    inside = set(first.modules())
    return {module: found[module] for module in model.modules() if module in found and module not in inside}


def _of_kind(model: nn.Module, kind: type[_Module]) -> Iterator[tuple[str, _Module]]:
    # Of exactly this class: a subclass may do something else.
    for name, module in model.named_modules():
        if type(module) is kind:
            yield name, module


def embeddings_of_all_nodes(model: nn.Module, num_nodes: int) -> Iterator[tuple[str, nn.Embedding]]:
    """Yield the embeddings that have a row for every node, with their names."""
    for name, embedding in _of_kind(model, nn.Embedding):
        if embedding.num_embeddings == num_nodes:
            yield name, embedding


def _is_before(model: nn.Module, module: nn.Module, first: nn.Module, width: int) -> bool:
    modules, inside = list(model.modules()), set(first.modules())
    if module in inside or modules.index(module) < modules.index(first):
        return module not in inside
    norms = (nn.LayerNorm, nn.BatchNorm1d, BatchNorm)
    return not any(
        width in parameter.shape
        for other in modules
        if other not in inside and not isinstance(other, norms)
        for parameter in other.parameters(recurse=False)
    )


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    """The distribution of one parameter over the parts."""

    shape: tuple[int, ...]
    """Of the uncut parameter."""
    dimension: int
    """Its dimension over the input columns."""
    runs: tuple[tuple[ColumnRange, ...], ...]
    """(N_f,) by part: its columns, in the order in which its piece has them."""

    def piece_shape(self, part: int) -> tuple[int, ...]:
        """Return the shape of the piece of ``part``, which may be empty."""
        shape = list(self.shape)
        shape[self.dimension] = sum(len(run) for run in self.runs[part])
        return tuple(shape)


def compute_by(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Replace ``forward`` of a user's module, but not of its :func:`uncut_copy`."""
    module.__dict__.update({"forward": forward, _OWN_FORWARD: True})


def uncut_copy(module: nn.Module, uncut: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the user's module with ``uncut`` tensors in place of pieces of parameters, by name.

    Raises:
        ConfigError: the module holds something that cannot be copied.
    """
    # torch does not copy results with a history, which modules may hold.
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for inner in module.modules()
        for value in vars(inner).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    # Not part of the uncut module: they hold the last batch and the moments of all rows.
    memo |= {id(inner.forward): False for inner in module.modules() if _OWN_FORWARD in vars(inner)}
    for name, parameter in uncut.items():
        piece = module.get_parameter(name)
        memo[id(piece)] = nn.Parameter(parameter, piece.requires_grad)
    try:
        found = copy.deepcopy(module, memo)
    except (TypeError, ConfigError) as error:
        raise ConfigError(
            f"{type(module).__name__} holds something that cannot be copied ({error}), and its uncut "
            "form is a copy; keep such things out of the model, or give their class a __deepcopy__"
        ) from error
    for inner in found.modules():
        if inner.__dict__.pop(_OWN_FORWARD, False):
            del inner.__dict__["forward"]
        inner.__dict__.pop("run_parts", None)
    return found


@final
@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model of which this rank has one part."""

    layer: SplittableConv
    """The first layer, of this part."""
    runs: tuple[tuple[ColumnRange, ...], ...]
    """(N_f,) by part: its columns of the input."""
    features: list[Origin]
    """The input rows that the loader provides: each feature, and the concatenation of all."""
    provenance: InputProvenance
    cuts: Mapping[str, Cut]
    """By name of the parameter; under all its names."""
    stashed: tuple[str, ...]
    """Parameters before the sum of which every batch in flight has its own leaves."""
    shared: tuple[str, ...]
    """The stashed ones that every part holds uncut."""


def split_model(
    model: nn.Module, store: ColumnStore, group: Group, *, num_nodes: int, seed: int, sync: Sync
) -> SplitModel:
    """Cut the first layer of ``model``, and the modules before it, to this rank's part; collective.

    The user's modules stay: their cut parameters become pieces, and their ``forward`` computes by stages.

    Raises:
        ConfigError: no layer takes the input's columns and can be split, or a module before it cannot.
    """
    names, widths, (name, layer) = _find_input(model, store, num_nodes, sync)
    first, provenance = model.get_submodule(name), InputProvenance(seed)
    runs = deal_out_concatenated(widths, group.size)
    own = runs[group.part]
    inputs = find_input_modules(model, first, provenance, own, store.moments, num_nodes=num_nodes, seed=seed)
    dimensions: dict[nn.Module, Mapping[str, int]] = {first: layer.cut}
    dimensions |= {module: one.cut for module, one in inputs.items() if one.cut}
    cuts = _cuts(model, dimensions, runs)
    prefixes = {module: f"{place}." if place else "" for place, module in model.named_modules()}
    prefix = prefixes[first]
    stashed = [prefix + inner for inner in (*layer.cut, *layer.shared)]
    for module, one in inputs.items():
        stashed += [prefixes[module] + inner for inner in one.cut if not isinstance(one, ColumnEmbedding)]
        compute_by(module, one.forward)
    for module, cut in dimensions.items():
        cut_in_place(module, cut, own)
    if layer is not first:
        compute_by(first, partial(_by_stages, first, layer))
    features = [Origin(names=(name,), runs=(run,)) for name, run in zip(names, own, strict=bool(names))]
    return SplitModel(
        layer=layer,
        runs=runs,
        features=[*features, Origin(names=names, runs=own)] if len(names) > 1 else features,
        provenance=provenance,
        cuts=cuts,
        stashed=tuple(stashed),
        shared=tuple(prefix + inner for inner in layer.shared),
    )


def _cuts(
    model: nn.Module,
    dimensions: Mapping[nn.Module, Mapping[str, int]],
    runs: tuple[tuple[ColumnRange, ...], ...],
) -> dict[str, Cut]:
    known: dict[nn.Parameter, tuple[tuple[nn.Module, str], int]] = {}
    for module, cut in dimensions.items():
        for inner, dimension in cut.items():
            owner, _, last = inner.rpartition(".")
            known.setdefault(module.get_parameter(inner), ((module.get_submodule(owner), last), dimension))
    cuts, others = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        place, dimension = known.get(parameter, (None, 0))
        if place == (model.get_submodule(owner), last):
            cuts[name] = Cut(shape=tuple(parameter.shape), dimension=dimension, runs=runs)
        elif place is not None:
            others[name] = parameter
    for other, parameter in others.items():
        name = next(name for name in cuts if model.get_parameter(name) is parameter)
        raise ConfigError(
            f"{name!r} and {other!r} are one parameter, and push_pull cuts the first by columns; give each "
            "its own, or use strategy='data_parallel'"
        )
    return cuts


def _by_stages(conv: nn.Module, stages: SplittableConv, *args: Any, **kwargs: Any) -> Tensor:
    # Bound by a partial and no closure, so that a copy computes with its own weights.
    stages.training = conv.training
    return stages.forward(*args, **kwargs)


def find_first_layer(model: nn.Module, width: int, sync: Sync) -> tuple[str, SplittableConv]:
    """Return the name and the stages of the first convolution that takes ``width`` input columns.

    Raises:
        ConfigError: there is none, or it cannot be split; the message has the reason.
    """
    reasons = []
    for name, module in find_convolutions(model):
        try:
            found = make_stages(module, sync)
            computed = found.cut.keys() - dict(found.named_parameters(remove_duplicate=False)).keys()
            if computed:
                raise ConfigError(
                    f"{min(computed)!r} is no parameter, but computed of others, as by a weight norm, which "
                    "takes all columns; remove that, or use strategy='data_parallel'"
                )
        except ConfigError as error:
            reasons.append(f"{name or 'the model'}: {error}")
            continue
        if found.width == width:
            return name, found
    raise ConfigError(
        f"push_pull found no layer that takes the {width} columns of the input and can be split"
        + "".join(f"; {reason}" for reason in reasons)
    )


def _find_input(
    model: nn.Module, store: ColumnStore, num_nodes: int, sync: Sync
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, SplittableConv]]:
    """Return names and widths of the features, and the layer that takes them.

    Without names: of the model's embedding of all nodes, where there are no features that a layer takes.
    """
    inputs = {store.names: tuple(store.widths.values())} if store.names else {}
    for _, embedding in embeddings_of_all_nodes(model, num_nodes):
        inputs.setdefault((), (embedding.embedding_dim,))
    problems = []
    for names, widths in inputs.items():
        try:
            layer = find_first_layer(model, sum(widths), sync)
        except ConfigError as error:
            problems.append(error)
            continue
        for name in names:
            if not store.dtype(name).is_floating_point:
                raise ConfigError(
                    f"the feature {name!r} is {store.dtype(name)}, and the first layer computes with "
                    "floating-point numbers; store it as float32 or float16, or name others with option "
                    "features="
                )
        return names, widths, layer
    if problems:
        raise problems[0]
    raise ConfigError(
        f"the nodes have none of the features that the strategy was configured with, and the model has no "
        f"torch.nn.Embedding({num_nodes}, ...) in their place; name the features with the option features="
    )
