"""Gradients of pieces of parameters, in which torch's clipping and GradScaler see the uncut gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_rows
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import plain_tensors, retype

_OF_PIECE = frozenset(
    {"detach", "__get__", "coalesce", "_values", "abs", "pow", "square", "float", "double"}
    | {"isfinite", "isinf", "isnan"}
)
"""Functions whose result is of the piece, too."""

_JOINS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "amax": torch.amax,
    "all": torch.all,
    "any": torch.any,
}
"""Reductions of a gradient to one value, and how the values of the parts become that of the uncut one."""


@final
class CutGradient(Tensor):
    """A gradient that is cut over the parts. Its norm and its sum are collective, and those of the uncut one.

    So ranks that clip with torch's functions, or skip a step as GradScaler does, do so alike. Everything else
    computes with the piece and returns a plain tensor.
    """

    _session: Session
    _num_parts: int

    @classmethod
    def over(cls, piece: Tensor, session: Session, num_parts: int) -> CutGradient:
        """Return this rank's ``piece``, in the same memory; the first ``num_parts`` ranks hold all pieces."""
        gradient = retype(piece, cls)
        gradient._session, gradient._num_parts = session, num_parts
        return gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return retype(self, Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return retype(self, Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it bare

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        first: Any = args[0] if args else None
        with plain_tensors():
            if isinstance(first, cls) and (name.endswith("norm") or name in ("max", "amax")):
                args = (_values_of(first, 0.0 if name.endswith("norm") else -torch.inf), *args[1:])
            elif name == "_foreach_norm":
                args = ([_values_of(one, 0.0) if isinstance(one, cls) else one for one in first], *args[1:])
            result = func(*args, **kwargs)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                # An infinity in the piece of one rank makes all ranks skip the step.
                piece = next(one for one in args[0] if isinstance(one, cls))
                args[1].copy_(gather_rows(args[1], piece._session).amax(0))
            elif name == "_foreach_norm":
                pairs = zip(first, result, strict=True)
                order = _order(args, kwargs)
                return [one._join_norms(norm, order) if isinstance(one, cls) else norm for one, norm in pairs]
            elif isinstance(first, cls) and type(result) is Tensor:
                if name in _OF_PIECE:
                    return cls.over(result, first._session, first._num_parts)
                if name.endswith("norm") and result.dim() == 0:
                    return first._join_norms(result, _order(args, kwargs))
                if name in _JOINS and result.dim() == 0:
                    return _JOINS[name](first._gather(result), 0)
        return result

    def _gather(self, value: Tensor) -> Tensor:
        # Every rank uses those of the first group, so that all get the same bits.
        return gather_rows(value, self._session)[: self._num_parts]

    def _join_norms(self, norm: Tensor, order: float) -> Tensor:
        return torch.linalg.vector_norm(self._gather(norm), order)


def mark_pieces(parameters: Iterable[nn.Parameter], session: Session, num_parts: int) -> None:
    """Let the gradients of ``parameters``, which are cut over ``num_parts`` ranks, know the other parts."""
    for parameter in parameters if num_parts > 1 else ():
        if parameter.grad is not None:
            parameter.grad = CutGradient.over(parameter.grad, session, num_parts)


def _values_of(piece: Tensor, fill: float) -> Tensor:
    """Return what torch takes a norm or maximum of: not sparse, and ``fill`` for a part without columns."""
    values = piece.coalesce()._values() if piece.is_sparse else piece
    return values if values.numel() else values.new_full((1,), fill)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    order = 2.0 if order in (None, "fro") else float(order)
    if not order > 0:
        raise ConfigError(f"the order of a gradient's norm is {order}; it must be above 0, or inf")
    return order
