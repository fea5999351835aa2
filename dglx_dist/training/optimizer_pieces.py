"""An optimizer's state for parameters of which each rank has a piece: joined to save it, cut to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.strategies.base import WrappedModel


def join_optimizer(
    model: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], session: Session
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what :func:`split_state` gave as it is of the uncut model, equal on every rank; collective.

    A rank that lacks something that others keep, for it has no columns and its piece never had a gradient,
    counts with zeros; of what is kept once for a parameter, such as steps, the lowest rank's holds.

    Args:
        model: Wrapped or plain.
        tensors: By ``<parameter>/<key>``, this rank's.
        plain: All else.
        session: The run.

    Raises:
        PeerError: a rank is dead or did not take part within the time-out.
    """
    if not isinstance(model, WrappedModel) or not model.parts.local:
        return dict(tensors), dict(plain)
    local = set(model.parts.local)
    pieces = {name: parameter for name, parameter in model.module.named_parameters() if name in local}
    of_pieces = {path: value for path, value in tensors.items() if _name(path) in pieces}
    scalars = {name: values for name, values in plain["scalars"].items() if name in pieces}
    mine = {
        "tensors": {path: _described(value, pieces[_name(path)]) for path, value in of_pieces.items()},
        "scalars": scalars,
    }
    described: dict[str, Any] = {}
    for one in reversed(gather_json(mine, session)):
        assert isinstance(one, dict)
        described |= one["tensors"]
        scalars |= one["scalars"]
    joined = {path: value for path, value in tensors.items() if path not in of_pieces}
    # In one order on every rank, for each join is collective.
    for path in sorted(described):
        dtype, values = getattr(torch, described[path]["dtype"]), described[path]["values"]
        if values is not None:
            joined[path] = torch.tensor(values, dtype=dtype)
            continue
        piece = of_pieces.get(path)
        if piece is None:
            piece = torch.zeros_like(pieces[_name(path)], dtype=dtype, requires_grad=False)
        joined[path] = model.join_state(_name(path), piece)
    return joined, {**plain, "scalars": {**plain["scalars"], **scalars}}


def cut_optimizer(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's pieces of what :func:`join_optimizer` joined; any rank alone."""
    if not isinstance(model, WrappedModel):
        return dict(tensors)
    return {path: model.cut_state(_name(path), value) for path, value in tensors.items()}


def _name(path: str) -> str:
    return path.rpartition("/")[0]


def _described(value: Tensor, parameter: Tensor) -> dict[str, Any]:
    """Return the dtype, and the values of what is kept once for a parameter, None of what is cut like it."""
    once = value.shape != parameter.shape
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "values": value.tolist() if once else None,
    }
