"""Splitting a model by input columns, and joining its parts: state, gradient norm, an uncut copy."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_int64, gather_json, peers_named
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import SplittableConv, cut_out, join_parts, part_of
from dglx_dist.layers.convolutions import Sync, stages_of
from dglx_dist.layers.dropout import Columns, deal_out_concatenated
from dglx_dist.layers.tracer import convolutions_in
from dglx_dist.strategies.push_pull.exchange import Group
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore
from dglx_dist.strategies.push_pull.input_layers import (
    InputLayout,
    InputProvenance,
    all_names,
    embeddings_of_all_nodes,
    find_input_modules,
)

PHASE = "weights"
"""Ledger phase of pieces of weights and of optimizer state that are joined."""


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

    ``cuts`` are by name of the parameter in the user's module; ``originals`` the user's submodules that were
    replaced, by name ("" is the model itself), as :func:`without_weights` returns them.
    """

    def __init__(
        self, session: Session, group: Group, cuts: Mapping[str, Cut], originals: Mapping[str, nn.Module]
    ) -> None:
        self._session, self._group = session, group
        self._cuts, self._originals = dict(cuts), dict(originals)

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
        return join_parts(self._gathered(piece, cut), cut.runs, cut.dimension)

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
        state = module.state_dict()
        self.join_all(state)
        memo = _non_leaf_copies(module)
        for name, original in self._originals.items():
            part, prefix = module.get_submodule(name), _prefix(name)
            like = {inner: state[prefix + inner] for inner, _ in original.named_parameters()}
            memo[id(part)] = _restored(original, part, like, memo)
        try:
            found = copy.deepcopy(module, memo)
        except TypeError as error:
            raise ConfigError(
                f"{type(module).__name__} holds something that cannot be copied ({error}), and its uncut "
                "form is a copy; keep such things out of the model, or give their class a __deepcopy__"
            ) from error
        found.load_state_dict(state)
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

    def _gathered(self, piece: Tensor, cut: Cut) -> list[Tensor]:
        device, piece = piece.device, piece.detach().contiguous().cpu()
        pieces = [piece.new_empty(cut.piece_shape(part)) for part in range(self._group.size)]
        pieces[self._group.part] = piece
        others = self._group.others
        work = [dist.irecv(pieces[part], rank) for part, rank in others if pieces[part].numel()]
        work += [dist.isend(piece, rank) for _, rank in others if piece.numel()]
        with peers_named(self._session, "the uncut weights"):
            for one in work:
                assert one is not None
                one.wait()
        for _, rank in others:
            self._session.ledger.add(PHASE, 1, self._group.rank, rank, piece.numel() * piece.element_size())
        return [one.to(device) for one in pieces]


def without_weights(original: nn.Module, cut: Iterable[str]) -> nn.Module:
    """Return a copy of a user's module whose parameters ``cut`` take no memory.

    A wrapped model keeps it, so that :meth:`CutState.whole` can restore a module of the user's class.
    """
    memo: dict[int, Any] = _non_leaf_copies(original)
    for name in cut:
        parameter = original.get_parameter(name)
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(original, memo)


def _restored(
    original: nn.Module, part: nn.Module, like: Mapping[str, Tensor], copies: dict[int, Any]
) -> nn.Module:
    """Return a copy of what :func:`without_weights` returned, with all parameters, in ``part``'s mode.

    ``like`` has the uncut parameters. ``copies`` is the memo of the model's copy, as other layers may have
    the part's uncut parameters, too.
    """
    memo: dict[int, Any] = {}
    for name, parameter in original.named_parameters():
        if parameter.is_meta:
            memo[id(parameter)] = nn.Parameter(torch.empty_like(like[name]), parameter.requires_grad)
        else:
            live = part.get_parameter(name)
            memo[id(parameter)] = copies.setdefault(id(live), copy.deepcopy(live))
    found = copy.deepcopy(original, memo)
    modes = {inner: module.training for inner, module in part.named_modules()}
    for inner, module in found.named_modules():
        module.training = modes.get(inner, part.training)
    return found


def _non_leaf_copies(module: nn.Module) -> dict[int, Any]:
    # A memo for deepcopy: torch does not copy results with a history, which modules may hold.
    return {
        id(value): value.detach().clone()
        for inner in module.modules()
        for value in vars(inner).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


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

    module: nn.Module
    layer: SplittableConv
    """The first layer, of this part."""
    runs: tuple[Columns, ...]
    """This part's columns of the input."""
    cuts: Mapping[str, Cut]
    """By uncut name of the parameter."""
    stashed: tuple[str, ...]
    """Parameters before the sum of which every batch in flight has its own leaves."""
    shared: tuple[str, ...]
    """The stashed ones that every part holds whole."""
    originals: Mapping[str, nn.Module]
    """Name of each replaced submodule to the user's, without its weights."""


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
    """Replace the first layer of ``model``, and the modules before it, by this rank's part; collective.

    Raises:
        ConfigError: no layer takes the input's columns and can be split, or a module before it cannot.
    """
    widths = _input_widths(model, store, num_nodes)
    name, whole = find_first_layer(model, sum(widths), sync)
    runs = deal_out_concatenated(widths, group.size)
    layout = InputLayout(features=store.names, runs=runs[group.part], num_nodes=num_nodes, seed=seed)
    inputs = find_input_modules(model, name, layout, store.moments)
    before_split = dict(model.named_parameters(remove_duplicate=False))
    places, prefix = all_names(model, name), _prefix(name)
    cuts = {
        _prefix(place) + inner: Cut(
            shape=tuple(whole.get_parameter(inner).shape), dimension=dimension, runs=runs
        )
        for place in places
        for inner, dimension in whole.cut.items()
    }
    originals = {name: without_weights(model.get_submodule(name), whole.cut)}
    stashed = [prefix + inner for inner in (*whole.cut, *whole.shared)]
    seen: set[nn.Module] = set()
    for place, module in inputs.items():
        module.provenance = provenance
        before = model.get_submodule(place)
        for inner, dimension in module.cut.items():
            shape = tuple(before.get_parameter(inner).shape)
            cuts[f"{place}.{inner}"] = Cut(shape=shape, dimension=dimension, runs=runs)
            if inner not in module.by_rows and module not in seen:
                stashed.append(f"{place}.{inner}")
        seen.add(module)
        originals[place] = without_weights(before, module.cut)
        _put(model, place, module)
    _refuse_ties(before_split, cuts)
    part = _tied(part_of(whole, runs[group.part]), whole)
    for place in places if name else ():
        _put(model, place, part)
    return SplitModel(
        module=model if name else part,
        layer=part,
        runs=runs[group.part],
        cuts=cuts,
        stashed=tuple(stashed),
        shared=tuple(prefix + shared for shared in whole.shared),
        originals=originals,
    )


def find_first_layer(model: nn.Module, width: int, sync: Sync) -> tuple[str, SplittableConv]:
    """Return the name and the stages of the first convolution that takes ``width`` input columns.

    Raises:
        ConfigError: there is none, or it cannot be split; the message has the reason.
    """
    reasons = []
    for name, module in convolutions_in(model):
        try:
            found = stages_of(module, sync)
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


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _tied(part: SplittableConv, whole: SplittableConv) -> SplittableConv:
    """Return ``part`` with the uncut parameters of ``whole`` itself, as other layers may share them."""
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if name not in whole.cut:
            owner, _, last = name.rpartition(".")
            part.get_submodule(owner).register_parameter(last, parameter)
    return part


def _refuse_ties(before_split: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut]) -> None:
    """Raise ConfigError if a module that is not cut shares a cut parameter."""
    cut = {id(before_split[name]): name for name in cuts}
    for name, parameter in before_split.items():
        if id(parameter) in cut and name not in cuts:
            raise ConfigError(
                f"{cut[id(parameter)]!r} and {name!r} are one parameter, and push_pull cuts the first by "
                "columns; give each its own, or use strategy='data_parallel'"
            )
