"""Splitting a model by input columns, and joining its parts: state, gradient norm, an uncut copy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_int64, gather_json
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import SplittableConv, cut_in_place, cut_out, join_parts
from dglx_dist.layers.convolutions import Sync, stages_of
from dglx_dist.layers.dropout import Columns, deal_out_concatenated
from dglx_dist.layers.tracer import convolutions_in
from dglx_dist.strategies.push_pull.exchange import AsyncExchange, Group
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore
from dglx_dist.strategies.push_pull.input_layers import (
    InputProvenance,
    embeddings_of_all_nodes,
    find_input_modules,
)

PHASE = "weights"
"""Ledger phase of pieces of weights and of optimizer state that are joined."""

_OWN_FORWARD = "_dglx_forward"
"""Marks a module whose ``forward`` is replaced."""


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    """The distribution of one parameter over the parts."""

    shape: tuple[int, ...]
    """Of the uncut parameter."""
    dimension: int
    """Its dimension over the input columns."""
    runs: tuple[tuple[Columns, ...], ...]
    """(N_f,) by part: its columns, in the order in which its piece has them."""

    def piece_shape(self, part: int) -> tuple[int, ...]:
        """Return the shape of the piece of ``part``, which may be empty."""
        shape = list(self.shape)
        shape[self.dimension] = sum(len(run) for run in self.runs[part])
        return tuple(shape)


@final
class CutState:
    """Joins and cuts the cut parameters of a model, their optimizer state and their gradients.

    ``cuts`` are by name of the parameter in the user's module.
    """

    def __init__(self, session: Session, group: Group, cuts: Mapping[str, Cut]) -> None:
        self._session, self._group, self._cuts = session, group, dict(cuts)
        self._exchange = AsyncExchange(session, group)

    def join(self, name: str, piece: Tensor) -> Tensor:
        """Return the uncut tensor of the pieces of a group; every rank must call it.

        A tensor of another shape than the piece of parameter ``name``, as a count of steps, is returned as it
        is.
        """
        cut = self._cuts.get(name)
        if cut is None:
            return piece
        is_piece = tuple(piece.shape) == cut.piece_shape(self._group.part)
        # One value per parameter may have the shape of a piece of one column, but not on all parts.
        if not gather_int64([is_piece], self._session).all():
            return piece
        like = [piece.new_empty(cut.piece_shape(part)) for part in range(self._group.size)]
        return join_parts(self._exchange.push(piece, like, PHASE)(), cut.runs, cut.dimension)

    def cut(self, name: str, uncut: Tensor) -> Tensor:
        """Return a copy of this rank's piece; a tensor of another shape is returned as it is."""
        cut = self._cuts.get(name)
        if cut is None or tuple(uncut.shape) != cut.shape:
            return uncut
        return cut_out(uncut, cut.runs[self._group.part], cut.dimension)

    def join_all(self, state: MutableMapping[str, Any], prefix: str = "") -> None:
        """Replace the pieces in a ``state_dict`` by the uncut parameters; every rank must call it."""
        for name in self._cuts:
            state[prefix + name] = self.join(name, state[prefix + name].detach())

    def cut_all(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` with this rank's pieces in place of the uncut parameters.

        Raises:
            RuntimeError: a parameter has another shape than the uncut one, as torch raises.
        """
        own = dict(state)
        for name, cut in self._cuts.items():
            given = state.get(name)
            if given is None:
                continue
            if tuple(given.shape) != cut.shape:
                raise RuntimeError(
                    f"size mismatch for {name}: copying a param with shape {tuple(given.shape)}, the uncut "
                    f"shape in the current model is {cut.shape}; load what state_dict() of the wrapped "
                    "model gave"
                )
            own[name] = self.cut(name, given)
        return own

    def whole(self, module: nn.Module) -> nn.Module:
        """Return a copy of the user's uncut module with the current weights; every rank must call it.

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
        for name in self._cuts:
            piece = module.get_parameter(name)
            memo[id(piece)] = nn.Parameter(self.join(name, piece.detach()), piece.requires_grad)
        try:
            found = copy.deepcopy(module, memo)
        except TypeError as error:
            raise ConfigError(
                f"{type(module).__name__} holds something that cannot be copied ({error}), and its uncut "
                "form is a copy; keep such things out of the model, or give their class a __deepcopy__"
            ) from error
        for inner in found.modules():
            if inner.__dict__.pop(_OWN_FORWARD, False):
                del inner.__dict__["forward"]
            inner.__dict__.pop("run_parts", None)
        return found

    def clip_grad_norm_(
        self, named: Iterable[tuple[str, nn.Parameter]], max_norm: float, norm_type: float
    ) -> Tensor:
        """Scale gradients so that their norm over the uncut model is at most ``max_norm``; collective.

        Pieces count once for each part, not for its replicas; replicated parameters count once.

        Returns:
            () the norm before, equal on every rank.

        Raises:
            ConfigError: ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise ConfigError(f"norm_type={norm_type} must be above 0, or inf for the largest gradient")
        found = [(name, p.grad) for name, p in named if p.grad is not None]
        local = _power([grad for name, grad in found if name in self._cuts], norm_type)
        shared = _power([grad for name, grad in found if name not in self._cuts], norm_type)
        # Every rank uses those of the first group, so that all get the same bits.
        rows: list[Any] = gather_json([local, shared], self._session)[: self._group.size]
        powers = [row[0] for row in rows] + [rows[0][1]]
        # In torch, where nan propagates.
        joined = torch.tensor(powers, dtype=torch.float64)
        norm = joined.max() if math.isinf(norm_type) else joined.sum().pow(1 / norm_type)
        factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        with torch.no_grad():
            for _, grad in found:
                grad.mul_(factor)
        dtype = found[0][1].dtype if found else torch.get_default_dtype()
        return norm.to(dtype)


def compute_by(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Replace ``forward`` of a user's module, until :meth:`CutState.whole` copies it."""
    module.__dict__.update({"forward": forward, _OWN_FORWARD: True})


def _power(gradients: Iterable[Tensor], norm_type: float) -> float:
    """Return the sum of the p-th powers of all values, or the largest absolute value; 0 of none."""
    found = [torch.zeros((), dtype=torch.float64)]
    for gradient in gradients:
        values = gradient.detach()
        values = (values.coalesce().values() if values.is_sparse else values).abs().double().cpu()
        if values.numel():
            found.append(values.max() if math.isinf(norm_type) else values.pow(norm_type).sum())
    powers = torch.stack(found)
    return float(powers.max() if math.isinf(norm_type) else powers.sum())


@final
@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model of which this rank has one part."""

    layer: SplittableConv
    """The first layer, of this part."""
    runs: tuple[Columns, ...]
    """This part's columns of the input."""
    cuts: Mapping[str, Cut]
    """By name of the parameter; under all its names."""
    stashed: tuple[str, ...]
    """Parameters before the sum of which every batch in flight has its own leaves."""
    shared: tuple[str, ...]
    """The stashed ones that every part holds whole."""
    takes_columns: frozenset[nn.Module]
    """The modules whose parameters are cut."""


def split_model(
    model: nn.Module,
    store: ColumnStore,
    group: Group,
    *,
    num_nodes: int,
    seed: int,
    sync: Sync,
    provenance: InputProvenance,
) -> SplitModel:
    """Cut the first layer of ``model``, and the modules before it, to this rank's part; collective.

    The user's modules stay: their cut parameters become pieces, and their ``forward`` computes by stages.

    Raises:
        ConfigError: no layer takes the input's columns and can be split, or a module before it cannot.
    """
    widths = _input_widths(model, store, num_nodes)
    name, layer = find_first_layer(model, sum(widths), sync)
    first, runs = model.get_submodule(name), deal_out_concatenated(widths, group.size)
    inputs = find_input_modules(
        model, first, provenance, runs[group.part], store.moments, num_nodes=num_nodes, seed=seed
    )
    dimensions: dict[nn.Module, Mapping[str, int]] = {first: layer.cut}
    dimensions |= {module: one.cut for module, one in inputs.items() if one.cut}
    cuts = _cuts(model, dimensions, runs)
    names = {module: f"{place}." if place else "" for place, module in model.named_modules()}
    prefix = names[first]
    stashed = [prefix + inner for inner in (*layer.cut, *layer.shared)]
    for module, one in inputs.items():
        stashed += [names[module] + inner for inner in one.cut if one.stashed]
        compute_by(module, one.forward)
    for module, cut in dimensions.items():
        cut_in_place(module, cut, runs[group.part])
    if layer is not first:
        compute_by(first, _ByStages(first, layer).forward)
    return SplitModel(
        layer=layer,
        runs=runs[group.part],
        cuts=cuts,
        stashed=tuple(stashed),
        shared=tuple(prefix + inner for inner in layer.shared),
        takes_columns=frozenset(dimensions),
    )


def _cuts(
    model: nn.Module, dimensions: Mapping[nn.Module, Mapping[str, int]], runs: tuple[tuple[Columns, ...], ...]
) -> dict[str, Cut]:
    """Return the cuts under all names; ConfigError if a parameter that is cut has another place, too."""
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


@final
class _ByStages:
    """What replaces a convolution's ``forward``: no closure, so that a copy computes with its own weights."""

    def __init__(self, conv: nn.Module, stages: SplittableConv) -> None:
        self._conv, self._stages = conv, stages

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._stages.training = self._conv.training
        return self._stages.forward(*args, **kwargs)


def find_first_layer(model: nn.Module, width: int, sync: Sync) -> tuple[str, SplittableConv]:
    """Return the name and the stages of the first convolution that takes ``width`` input columns.

    Raises:
        ConfigError: there is none, or it cannot be split; the message has the reason.
    """
    reasons = []
    for name, module in convolutions_in(model):
        try:
            found = stages_of(module, sync)
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


def _input_widths(model: nn.Module, store: ColumnStore, num_nodes: int) -> tuple[int, ...]:
    """Return the columns of the model's input: of the features, or of its embedding of all nodes."""
    if store.names:
        return tuple(store.widths[name] for name in store.names)
    for _, embedding in embeddings_of_all_nodes(model, num_nodes):
        return (embedding.embedding_dim,)
    raise ConfigError(
        f"the nodes have none of the features that the strategy was configured with, and the model has no "
        f"torch.nn.Embedding({num_nodes}, ...) in their place; name the features with the option features="
    )
