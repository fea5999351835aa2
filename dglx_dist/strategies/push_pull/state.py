"""The uncut model behind its parts: what its state, its gradients' norm and a copy of it are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglx_dist.cluster.collectives import gather_int64, gather_json, peers_named
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.columns import Columns
from dglx_dist.layers.parts import cut_out, join_parts
from dglx_dist.strategies.push_pull.group import Group

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
