"""The uncut model behind its parts: what its state, its gradients' norm and a copy of it are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_int64, gather_json, peers_named
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import SplittableConv, cut_out, join_parts, part_of, stages_of
from dglx_dist.layers.dropout import Columns, deal_out_concatenated
from dglx_dist.strategies.push_pull.feature_columns import ColumnStore
from dglx_dist.strategies.push_pull.input_layers import (
    InputLayout,
    InputProvenance,
    all_names,
    embeddings_of_all_nodes,
    find_input_modules,
)
from dglx_dist.strategies.push_pull.options import Group, Sync

PHASE = "weights"
"""The ledger's name of these bytes: pieces of weights and of optimizer state, when the whole is asked for."""


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one parameter lies over the parts."""

    shape: tuple[int, ...]
    """Of the uncut parameter."""
    dimension: int
    """The one that runs over the input columns."""
    runs: tuple[tuple[Columns, ...], ...]
    """(N_f,) by part: its columns, in the order in which its piece has them."""

    def piece_shape(self, part: int) -> tuple[int, ...]:
        """Return the shape of what ``part`` holds; its columns may be none."""
        shape = list(self.shape)
        shape[self.dimension] = sum(len(run) for run in self.runs[part])
        return tuple(shape)


@final
class CutState:
    """Joins and cuts what belongs to the cut parameters of a model.

    Args:
        session: The run.
        group: The ranks that hold all columns together.
        cuts: Name of the cut parameter, as in the user's module, to how it lies.
        originals: Name of each replaced submodule ("" is the model itself) to the user's, as
            :func:`without_weights` leaves it. Its parameters have the same names as those of its part.
    """

    def __init__(
        self, session: Session, group: Group, cuts: Mapping[str, Cut], originals: Mapping[str, nn.Module]
    ) -> None:
        self._session, self._group = session, group
        self._cuts, self._originals = dict(cuts), dict(originals)

    def join(self, name: str, mine: Tensor) -> Tensor:
        """Return the uncut tensor of the pieces of a group; every rank must call it.

        Args:
            name: Of a parameter.
            mine: This rank's piece; anything of another shape, as a count of steps, comes back as it is.

        Raises:
            PeerError: a rank is dead or did not take part within the time-out.
        """
        cut = self._cuts.get(name)
        if cut is None:
            return mine
        is_piece = tuple(mine.shape) == cut.piece_shape(self._group.part)
        # One value per parameter may look like a piece of one column; not on all parts.
        if not gather_int64([is_piece], self._session).all():
            return mine
        return join_parts(self._gathered(mine, cut), cut.runs, cut.dimension)

    def cut(self, name: str, uncut: Tensor) -> Tensor:
        """Return a copy of this rank's piece; what has not the shape of the uncut parameter, as it is."""
        cut = self._cuts.get(name)
        if cut is None or tuple(uncut.shape) != cut.shape:
            return uncut
        return cut_out(uncut, cut.runs[self._group.part], cut.dimension)

    def join_all(self, state: MutableMapping[str, Any], prefix: str = "") -> None:
        """Put the uncut parameters in place of the pieces in a ``state_dict``; every rank must call it."""
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
        """Return a copy of the user's module as it was before it was split, with the weights of now.

        Every rank must call it.

        Args:
            module: With parts in place of what was replaced.

        Raises:
            ConfigError: the module holds something that cannot be copied.
            PeerError: a rank is dead or did not take part within the time-out.
        """
        state = module.state_dict()
        self.join_all(state)
        memo = _memories(module)
        for name, original in self._originals.items():
            part = module.get_submodule(name)
            room = _room_for(original, state, f"{name}." if name else "")
            memo[id(part)] = _with_room(original, part, room, memo)
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

        Pieces count once for each part, not for its replicas; what is replicated counts once.

        Args:
            named: The model's parameters.
            max_norm: Bound of the norm.
            norm_type: p of the p-norm, above 0; ``math.inf`` for the largest absolute value.

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
        # Those of the first group, on every rank, so that all get the same bits.
        rows: list[Any] = gather_json([local, shared], self._session)[: self._group.size]
        powers = [row[0] for row in rows] + [rows[0][1]]
        # Of torch, where nan stays nan.
        joined = torch.tensor(powers, dtype=torch.float64)
        norm = joined.max() if math.isinf(norm_type) else joined.sum().pow(1 / norm_type)
        factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        with torch.no_grad():
            for _, grad in found:
                grad.mul_(factor)
        dtype = found[0][1].dtype if found else torch.get_default_dtype()
        return norm.to(dtype)

    def _gathered(self, mine: Tensor, cut: Cut) -> list[Tensor]:
        """Return the pieces of the own group, by part."""
        device, mine = mine.device, mine.detach().contiguous().cpu()
        pieces = [mine.new_empty(cut.piece_shape(part)) for part in range(self._group.size)]
        pieces[self._group.part] = mine
        others = self._group.others
        work = [dist.irecv(pieces[part], rank) for part, rank in others if pieces[part].numel()]
        work += [dist.isend(mine, rank) for _, rank in others if mine.numel()]
        with peers_named(self._session, "the uncut weights"):
            for one in work:
                assert one is not None
                one.wait()
        for _, rank in others:
            self._session.ledger.add(PHASE, 1, self._group.rank, rank, mine.numel() * mine.element_size())
        return [piece.to(device) for piece in pieces]


def without_weights(original: nn.Module, cut: Iterable[str]) -> nn.Module:
    """Return a copy of a module of the user's whose parameters ``cut`` take no memory.

    What a wrapped model keeps, so that :meth:`CutState.whole` can put one of the user's class back.
    """
    memo: dict[int, Any] = _memories(original)
    for name in cut:
        parameter = original.get_parameter(name)
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(original, memo)


def _room_for(original: nn.Module, state: Mapping[str, Tensor], prefix: str) -> dict[int, nn.Parameter]:
    """Return memory for the parameters that :func:`without_weights` left without, by their ids."""
    return {
        id(parameter): nn.Parameter(torch.empty_like(state[prefix + name]), parameter.requires_grad)
        for name, parameter in original.named_parameters()
        if parameter.is_meta
    }


def _with_room(
    original: nn.Module, part: nn.Module, room: Mapping[int, nn.Parameter], copies: dict[int, Any]
) -> nn.Module:
    """Return a copy of what :func:`without_weights` left, with memory for all of it, in ``part``'s mode.

    Args:
        original: The user's module, without its weights.
        part: What stands in its place.
        room: Parameters in place of those without memory.
        copies: What is copied of the model, by id; other layers may have the part's uncut parameters, too.
    """
    memo: dict[int, Any] = dict(room)
    for name, parameter in original.named_parameters():
        if not parameter.is_meta:
            live = part.get_parameter(name)
            memo[id(parameter)] = copies.setdefault(id(live), copy.deepcopy(live))
    found = copy.deepcopy(original, memo)
    modes = {inner: module.training for inner, module in part.named_modules()}
    for inner, module in found.named_modules():
        module.training = modes.get(inner, part.training)
    return found


def _memories(module: nn.Module) -> dict[int, Any]:
    """Return a memo for ``deepcopy`` of results that modules remember: torch copies none with a history."""
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
    together = torch.stack(found)
    return float(together.max() if math.isinf(norm_type) else together.sum())


@final
@dataclass(frozen=True, kw_only=True)
class SplitContext:
    """Of the run, as far as they decide how a model is split."""

    num_nodes: int
    """V."""
    seed: int
    sync: Sync
    """What is summed: the first layer's results, or its projected inputs."""
    provenance: InputProvenance
    """Of the model's inputs."""


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
    """Uncut name of each cut parameter to how it lies."""
    stashed: tuple[str, ...]
    """Parameters before the sum of which every batch in flight has its own leaves."""
    shared: tuple[str, ...]
    """Those of them that every part holds whole."""
    originals: Mapping[str, nn.Module]
    """Name of each replaced submodule to the user's, without its weights."""


def split_model(
    model: nn.Module, widths: Sequence[int], store: ColumnStore, group: Group, facts: SplitContext
) -> SplitModel:
    """Replace the first layer of ``model``, and what stands before it, by the group's part of this rank.

    Args:
        model: The user's, with its first weights; taken over.
        widths: Columns of each feature that the model puts side by side, or of its input embedding.
        store: The features.
        group: Who holds which columns.
        facts: What else of the run matters; every rank must call with the same.

    Raises:
        ConfigError: no layer takes that many columns and can be split, or something before it cannot.
    """
    width = sum(widths)
    name, whole = find_first_layer(model, width, facts.sync)
    runs = deal_out_concatenated(widths, group.size)
    layout = InputLayout(
        features=store.names, runs=runs[group.part], num_nodes=facts.num_nodes, seed=facts.seed
    )
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
        module.provenance = facts.provenance
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
    """Return the name and the stages of the convolution that takes the features, the first of that width.

    Raises:
        ConfigError: there is none, or it cannot be split; the message has the reason.
    """
    reasons = []
    for name, module in model.named_modules():
        if not isinstance(module, SplittableConv) and not type(module).__module__.startswith("dgl."):
            continue
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


def input_widths(model: nn.Module, store: ColumnStore, num_nodes: int) -> tuple[int, ...]:
    """Return the columns of what goes into the model: of the features, or of its embedding of all nodes.

    Raises:
        ConfigError: there is neither.
    """
    if store.names:
        return tuple(store.widths[name] for name in store.names)
    for _, embedding in embeddings_of_all_nodes(model, num_nodes):
        return (embedding.embedding_dim,)
    raise ConfigError(
        f"the nodes have none of the features that the strategy was told of, and the model has no "
        f"torch.nn.Embedding({num_nodes}, ...) in their place; name the features with the option features="
    )


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _tied(part: SplittableConv, whole: SplittableConv) -> SplittableConv:
    """Return ``part`` with the uncut parameters of ``whole`` itself: other layers may have them, too."""
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if name not in whole.cut:
            owner, _, last = name.rpartition(".")
            part.get_submodule(owner).register_parameter(last, parameter)
    return part


def _refuse_ties(before_split: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut]) -> None:
    """Raise ConfigError if something that is not cut has a parameter that is."""
    cut = {id(before_split[name]): name for name in cuts}
    for name, parameter in before_split.items():
        if id(parameter) in cut and name not in cuts:
            raise ConfigError(
                f"{cut[id(parameter)]!r} and {name!r} are one parameter, and push_pull cuts the first by "
                "columns; give each its own, or use strategy='data_parallel'"
            )
