"""Modules before the first layer, cut by input columns, and the provenance of that layer's input.

A part repeats for other owners' nodes what the model did with the rows of its own batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, final

import torch
from dgl.heterograph import DGLBlock
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import SplittableConv, StageInput, cut_out
from dglx_dist.layers.dropout import MODULES, Columns, DropDraws, drop_entries
from dglx_dist.strategies.push_pull.exchange import GroupBatch, PartInput


class Origin(ABC):
    """Computes a part's input rows of any owner; equal to another if it does the same."""

    origin: Origin
    """What the rows are made from, if it is another one."""

    @property
    def runs(self) -> tuple[Columns, ...]:
        """The part's columns of the uncut tensor, in order; keys of dropout."""
        return self.origin.runs

    @property
    def is_raw(self) -> bool:
        """Whether the rows are those of the store, but for their dtype."""
        return False

    @abstractmethod
    def rows(self, owners: PartInput) -> Tensor:
        """Return (L0, F_p) for one owner's batch, with a gradient where trained parameters produced it.

        Rows that are a leaf with a gradient are trained themselves: their gradients go to :meth:`accumulate`.
        """

    def accumulate(self, gradients: Sequence[tuple[PartInput, Tensor | None]]) -> None:
        """Add the gradients of all owners' rows, (L0, F_p) each, to ``.grad`` of their table.

        Only for rows that are leaves, as those of an embedding; does nothing for others.
        """
        return


@final
@dataclass(frozen=True, kw_only=True)
class Features(Origin):
    """The loader's columns of one feature, or of several concatenated."""

    names: tuple[str, ...]
    pieces: tuple[Columns, ...]
    """(number of names,) the part's run of each, as columns of their concatenation."""

    @property
    def runs(self) -> tuple[Columns, ...]:
        return self.pieces

    @property
    def is_raw(self) -> bool:
        return True

    def rows(self, owners: PartInput) -> Tensor:
        found = [owners.columns[name] for name in self.names]
        return found[0] if len(found) == 1 else torch.cat(found, 1)


@final
@dataclass(frozen=True, kw_only=True)
class Converted(Origin):
    """The rows of another origin in another dtype."""

    origin: Origin
    dtype: torch.dtype

    @property
    def is_raw(self) -> bool:
        return self.origin.is_raw

    def rows(self, owners: PartInput) -> Tensor:
        return _map_rows(self.origin.rows(owners), lambda rows: rows.to(self.dtype))

    def accumulate(self, gradients: Sequence[tuple[PartInput, Tensor | None]]) -> None:
        self.origin.accumulate(gradients)


def _map_rows(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    # Rows that are trained themselves stay a leaf.
    trained = rows.is_leaf and rows.requires_grad
    return function(rows.detach()).requires_grad_() if trained else function(rows)


@final
class InputProvenance:
    """The origins of tensors of the batch that the model is computing.

    A tensor is recognised by its memory address, so that a view of the loader's own is known and anything
    computed from it is not.
    """

    def __init__(self) -> None:
        self.own: PartInput | None = None
        """The own part of the batch that the model computes; None outside of a batch."""
        self._known: list[tuple[Tensor, Origin]] = []

    def begin(self, group_batch: GroupBatch | None, part: int) -> None:
        """Forget the last batch; ``group_batch`` is the one that the model computes now, if any."""
        self.own, self._known = None if group_batch is None else group_batch.inputs[part], []

    def add(self, rows: Tensor, origin: Origin) -> None:
        """Record that ``rows`` of the own batch came from ``origin``; keeps them until the next batch."""
        self._known.append((rows, origin))

    def find(self, rows: Tensor) -> Origin | None:
        """Return the origin of ``rows``, a change of dtype included; None if it is unknown."""
        for known, origin in self._known:
            if known is rows:
                return origin
        # The latest first: all rows of an empty batch have the same address.
        for known, origin in reversed(self._known):
            if _same(known, rows):
                return origin
        for known, origin in reversed(self._known):
            if not rows.requires_grad and _copied(known, rows, origin):
                same_dtype = known.dtype == rows.dtype
                return origin if same_dtype else Converted(origin=origin, dtype=rows.dtype)
        return None

    def holds(self, rows: Tensor) -> bool:
        """Whether ``rows`` share memory with known ones."""
        address = rows.untyped_storage().data_ptr()
        return address != 0 and any(known.untyped_storage().data_ptr() == address for known, _ in self._known)


class InputModule(nn.Module):
    """A module between the features and the first layer that works on each column by itself.

    The user's model calls it on the own batch, and the pipeline on those of other owners. It replaces the
    user's module under its name (:func:`find_input_modules` decides). Its parameters, if any, have one entry
    per input column, and the names of those they replace.
    """

    provenance: InputProvenance
    """Of the model; set when the module is put there."""
    cut: Mapping[str, int] = MappingProxyType({})
    """Parameter name to the dimension that runs over the input columns."""
    by_rows: tuple[str, ...] = ()
    """Names of the parameters whose gradients come by :meth:`Origin.accumulate`; the others are stashed."""


def _copied(known: Tensor, rows: Tensor, origin: Origin) -> bool:
    """Whether ``rows`` are ``known`` in another dtype, or concatenated by the user."""
    may_be = known.dtype != rows.dtype or (isinstance(origin, Features) and len(origin.names) > 1)
    return may_be and known.shape == rows.shape and torch.equal(known.to(rows.dtype), rows)


def _same(known: Tensor, rows: Tensor) -> bool:
    return (
        known.shape == rows.shape
        and known.dtype == rows.dtype
        and known.stride() == rows.stride()
        and known.data_ptr() == rows.data_ptr()
        and (known.numel() > 0 or torch.equal(known, rows))
    )


@final
@dataclass(frozen=True, kw_only=True)
class Dropped(Origin):
    """The rows of another origin, with entries dropped by (seed, batch, node, column)."""

    origin: Origin
    probability: float
    seed: int
    stream: int
    """Of the draws; one for each dropout module."""

    def rows(self, owners: PartInput) -> Tensor:
        return _map_rows(self.origin.rows(owners), lambda rows: self.drop(rows, owners))

    def accumulate(self, gradients: Sequence[tuple[PartInput, Tensor | None]]) -> None:
        self.origin.accumulate(
            [
                (owners, None if gradient is None else self.drop(gradient, owners))
                for owners, gradient in gradients
            ]
        )

    def drop(self, rows: Tensor, owners: PartInput) -> Tensor:
        draws = DropDraws(seed=self.seed, number=owners.number, nodes=owners.nodes, runs=self.runs)
        return drop_entries(rows, self.probability, draws, self.stream)


@final
class ColumnDropout(InputModule):
    """Replaces ``nn.Dropout``, the ``index``-th of the model: keyed draws on the input, else torch's own."""

    def __init__(self, dropout: nn.Dropout, seed: int, index: int) -> None:
        super().__init__()
        self.p, self.inplace = dropout.p, dropout.inplace
        self.provenance = InputProvenance()
        self._seed, self._stream = seed, MODULES + index
        self.train(dropout.training)

    def forward(self, x: Tensor) -> Tensor:
        own = self.provenance.own
        origin = self.provenance.find(x) if self.training and own is not None else None
        if origin is None or own is None or self.p == 0:
            return functional.dropout(x, self.p, self.training, self.inplace)
        if self.inplace:
            raise ConfigError(
                "nn.Dropout(inplace=True) would change the loader's features in place, of which batches in "
                "flight have their own; use inplace=False"
            )
        made = Dropped(origin=origin, probability=self.p, seed=self._seed, stream=self._stream)
        dropped = made.drop(x, own)
        self.provenance.add(dropped, made)
        return dropped

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"


@final
class ColumnEmbedding(InputModule):
    """Replaces ``nn.Embedding`` of all nodes as the input: (V, D_p), the part's columns.

    Any torch optimizer trains it; with ``sparse=True`` the gradient is sparse too.

    Raises:
        ConfigError: an option of the embedding needs whole rows.
    """

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, runs: Sequence[Columns]) -> None:
        super().__init__()
        self.cut, self.by_rows = {"weight": 1}, ("weight",)
        self.runs, self.provenance = tuple(runs), InputProvenance()
        for option, value in (
            ("max_norm", embedding.max_norm),
            ("scale_grad_by_freq", embedding.scale_grad_by_freq),
        ):
            if value:
                raise ConfigError(
                    f"nn.Embedding({option}={value}) needs whole rows, or counts of one owner's batch alone, "
                    f"and push_pull cuts it by columns; leave {option} out, or use strategy='data_parallel'"
                )
        own = cut_out(embedding.weight.detach(), self.runs, 1)
        self.weight = nn.Parameter(own, embedding.weight.requires_grad)
        self.sparse, self.padding_idx = embedding.sparse, embedding.padding_idx
        self.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        own = self.provenance.own
        if own is None or ids.shape != own.nodes.shape or not torch.equal(ids.long(), own.nodes):
            raise ConfigError(
                f"nn.Embedding of {self.weight.shape[0]} nodes was cut by columns, so it can only be asked "
                f"for the rows of a batch's input nodes; it was given ids of shape {tuple(ids.shape)} that "
                "are not these. Call it with input_nodes, or with blocks[0].srcdata[dgl.NID]"
            )
        # The origin computes the rows that the first layer sees, so that a batch keeps those it began with.
        rows = self.weight.detach()[own.nodes]
        self.provenance.add(rows, Embedded(embedding=self))
        return rows

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.runs[0].width}, sparse={self.sparse}"

    def add_gradients(self, nodes: Tensor, gradients: Tensor) -> None:
        """Add ``gradients`` (K, D_p) to ``weight.grad`` at ``nodes`` ((K,) int64, repeats allowed)."""
        if self.padding_idx is not None:
            trained = nodes != self.padding_idx
            nodes, gradients = nodes[trained], gradients[trained]
        if self.sparse:
            found = torch.sparse_coo_tensor(
                nodes.unsqueeze(0), gradients, self.weight.shape, check_invariants=True
            ).coalesce()
        else:
            found = torch.zeros_like(self.weight).index_add_(0, nodes, gradients)
        self.weight.grad = found if self.weight.grad is None else self.weight.grad + found


@final
@dataclass(frozen=True, kw_only=True)
class Embedded(Origin):
    """Rows of a trained embedding."""

    embedding: ColumnEmbedding

    @property
    def runs(self) -> tuple[Columns, ...]:
        return self.embedding.runs

    def rows(self, owners: PartInput) -> Tensor:
        """Return a copy of the rows as they are now; a leaf."""
        weight = self.embedding.weight
        return weight.detach()[owners.nodes].requires_grad_(weight.requires_grad)

    def accumulate(self, gradients: Sequence[tuple[PartInput, Tensor | None]]) -> None:
        found = [(owners.nodes, gradient) for owners, gradient in gradients if gradient is not None]
        if not found:
            return
        nodes = torch.cat([nodes for nodes, _ in found])
        values = torch.cat([gradient for _, gradient in found]).to(self.embedding.weight)
        self.embedding.add_gradients(nodes, values.detach())


@final
class ColumnLayerNorm(InputModule):
    """Replaces ``nn.LayerNorm`` of the uncut input rows: has the part's entries of weight and bias.

    A node's row has the same mean and variance in every batch, so they are computed once, over all parts:
    ``mean`` and ``variance`` (biased) are (V,) float64 of every node's uncut row.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: nn.LayerNorm, runs: Sequence[Columns], mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        named = dict(norm.named_parameters(recurse=False))
        self.cut, self.runs, self.provenance = dict.fromkeys(named, 0), tuple(runs), InputProvenance()
        for name in ("weight", "bias"):
            whole = named.get(name)
            part = None if whole is None else cut_out(whole.detach(), self.runs, 0)
            own = None if whole is None or part is None else nn.Parameter(part, whole.requires_grad)
            self.register_parameter(name, own)
        self.eps = norm.eps
        self._mean, self._variance = mean, variance
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        origin, own = self.provenance.find(x), self.provenance.own
        if origin is None or own is None:
            raise ConfigError(
                f"LayerNorm({self.width}) was cut by input columns, as it is as wide as the features, and "
                f"was given rows of shape {tuple(x.shape)} that are not the features of the batch. If it "
                "normalizes a later layer of that width, register it after the first layer; to normalize "
                "anything but the features as they came, use strategy='data_parallel'"
            )
        if not origin.is_raw or origin.runs != self.runs:
            raise ConfigError(
                f"LayerNorm({self.width}) was given features that something has changed before: mean and "
                "variance of the changed rows need all columns in every batch; apply the norm first, or use "
                "strategy='data_parallel'"
            )
        with torch.no_grad():
            rows = self.normalized(x, own.nodes)
        self.provenance.add(rows, Normalized(origin=origin, norm=self))
        return rows

    @property
    def width(self) -> int:
        return self.runs[0].width

    def normalized(self, x: Tensor, nodes: Tensor) -> Tensor:
        """Return the normalized (L0, F_p) of the features ``x`` of ``nodes`` ((L0,) int64)."""
        # Mean and variance stay on their device; the nodes may be on another one.
        ids = nodes.to(self._mean.device)
        mean, scale = self._mean[ids], (self._variance[ids] + self.eps).rsqrt()
        rows = (x - mean.to(x).unsqueeze(1)) * scale.to(x).unsqueeze(1)
        rows = rows if self.weight is None else rows * self.weight
        return rows if self.bias is None else rows + self.bias

    def extra_repr(self) -> str:
        return f"({self.width},), eps={self.eps}"


@final
@dataclass(frozen=True, kw_only=True)
class Normalized(Origin):
    """The rows of another origin, normalized with the module's current weights."""

    origin: Origin
    norm: ColumnLayerNorm

    def rows(self, owners: PartInput) -> Tensor:
        return self.norm.normalized(self.origin.rows(owners), owners.nodes)


def possible_inputs(names: tuple[str, ...], runs: tuple[Columns, ...]) -> list[Features]:
    """Return each feature by itself, and the concatenation of all."""
    single = [Features(names=(name,), pieces=(run,)) for name, run in zip(names, runs, strict=bool(names))]
    return single if len(names) < 2 else [*single, Features(names=names, pieces=runs)]


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
    for key, stored in block.edata.items():
        same = stored.shape == values.shape and stored.dtype == values.dtype
        if same and stored.data_ptr() == values.data_ptr():
            return str(key)
    return None


_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class InputLayout:
    """The input of the first layer, and this part's columns of it."""

    features: tuple[str, ...]
    """Names, in the order in which the model concatenates them."""
    runs: tuple[Columns, ...]
    """This part's columns of the input."""
    num_nodes: int
    """V, rows of a trained embedding of all nodes."""
    seed: int
    """Of the run."""

    @property
    def width(self) -> int:
        return self.runs[0].width


def find_input_modules(
    model: nn.Module,
    first_name: str,
    layout: InputLayout,
    moments: Callable[[Sequence[str]], tuple[Tensor, Tensor]],
) -> dict[str, InputModule]:
    """Return replacements of the modules that may work on the input, by all their names; collective.

    Dropout is replaced everywhere, as one ``nn.Dropout`` usually serves all layers; on anything but the input
    it works as before. A norm over the layer's width, and an embedding of all nodes of that width, are cut; a
    norm is taken for one of the input if it is registered before the first layer, or if no other parameter of
    the model is that wide. ``moments`` maps feature names to (mean, variance) of each node's concatenated
    row, (V,) float64; it is collective and called only if there is a norm.

    Raises:
        ConfigError: something before the first layer cannot work on columns; the message has the reason.
    """
    _refuse_batch_norms(model, first_name, layout.width)
    embeddings = [
        (name, embedding)
        for name, embedding in embeddings_of_all_nodes(model, layout.num_nodes)
        if embedding.embedding_dim == layout.width
    ]
    norms = list(_norms(model, first_name, layout.width))
    if embeddings and norms:
        raise ConfigError(
            f"{norms[0][0]!r} normalizes the rows of the trained embedding {embeddings[0][0]!r}: their mean "
            "and variance change with every step and need all columns; leave the norm out, or use "
            "strategy='data_parallel'"
        )
    made: dict[nn.Module, InputModule] = {}
    for _, embedding in embeddings:
        made[embedding] = ColumnEmbedding(embedding, layout.runs)
    if norms:
        mean, variance = moments(layout.features)
        made |= {norm: ColumnLayerNorm(norm, layout.runs, mean, variance) for _, norm in norms}
    for index, (_, dropout) in enumerate(_of_kind(model, nn.Dropout)):
        made[dropout] = ColumnDropout(dropout, layout.seed, index)
    # The stages of the first layer apply its own dropout.
    firsts = all_names(model, first_name)
    return {
        name: made[module]
        for name, module in model.named_modules(remove_duplicate=False)
        if module in made and not any(_is_inside(name, place) for place in firsts)
    }


def all_names(model: nn.Module, name: str) -> list[str]:
    """Return every name under which ``model`` has the module that it has under ``name``."""
    module = model.get_submodule(name)
    return [other for other, one in model.named_modules(remove_duplicate=False) if one is module]


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


def _norms(model: nn.Module, first_name: str, width: int) -> Iterator[tuple[str, nn.LayerNorm]]:
    for name, norm in _of_kind(model, nn.LayerNorm):
        if tuple(norm.normalized_shape) == (width,) and _is_before(model, name, first_name, width):
            yield name, norm


def _refuse_batch_norms(model: nn.Module, first_name: str, width: int) -> None:
    for name, norm in _of_kind(model, nn.BatchNorm1d):
        if norm.num_features == width and _is_before(model, name, first_name, width):
            raise ConfigError(
                f"{name!r} is a BatchNorm1d of the {width} input columns: its mean and variance are over the "
                "sources of each owner's batch, so one batch's rows would depend on who owns it, and its "
                "running averages on the order of the batches. Use torch.nn.LayerNorm, or normalize the "
                "features once before training, or use strategy='data_parallel'"
            )


def _is_before(model: nn.Module, name: str, first_name: str, width: int) -> bool:
    if _is_inside(name, first_name):
        return False
    names = [other for other, _ in model.named_modules()]
    if first_name in names and names.index(name) < names.index(first_name):
        return True
    norms = (nn.LayerNorm, nn.BatchNorm1d)
    return not any(
        width in parameter.shape
        for other, module in model.named_modules()
        if other != first_name and not _is_inside(other, first_name) and not isinstance(module, norms)
        for parameter in module.parameters(recurse=False)
    )


def _is_inside(name: str, first_name: str) -> bool:
    return first_name == "" or name.startswith(f"{first_name}.")
