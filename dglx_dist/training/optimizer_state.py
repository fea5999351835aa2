"""The state of any torch optimizer, by the uncut names of the parameters instead of their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.session import Session
from dglx_dist.errors import CheckpointError
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


_SCALARS = (int, float, bool, str, type(None))


def split_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors by ``<parameter>/<key>``, and all else as JSON values.

    Args:
        optimizer: Any of torch's.
        model: The user's module (not wrapped), which names the parameters.

    Raises:
        CheckpointError: it keeps something that is neither a tensor nor a plain value.
    """
    names = _names(optimizer, model)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for position, entries in state["state"].items():
        scalars[names[position]] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{names[position]}/{key}"] = value
            else:
                scalars[names[position]][key] = _plain(f"{names[position]}/{key}", value)
    groups = [
        {key: _plain(key, value) for key, value in group.items() if key != "params"}
        | {"params": [names[position] for position in group["params"]]}
        for group in state["param_groups"]
    ]
    return tensors, {"groups": groups, "scalars": scalars, "kind": type(optimizer).__name__}


def restore_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Give the optimizer the state that :func:`split_state` took.

    Raises:
        CheckpointError: it is of another kind or has other parameters.
    """
    check_matches(optimizer, model, plain)
    position_of = {name: position for position, name in _names(optimizer, model).items()}
    state: dict[int, dict[str, Any]] = {position_of[name]: dict(v) for name, v in plain["scalars"].items()}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state[position_of[name]][key] = tensor
    groups = []
    for group, own in zip(plain["groups"], optimizer.state_dict()["param_groups"], strict=True):
        values = {key: _from_plain(value) for key, value in group.items() if key != "params"}
        # Strategies may list a model's parameters in another order; state goes by name, torch by place.
        groups.append(values | {"params": own["params"]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_matches(optimizer: torch.optim.Optimizer, model: nn.Module, plain: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the optimizer is of the saved kind and has the saved parameter groups."""
    kind = type(optimizer).__name__
    if kind != plain["kind"]:
        raise CheckpointError(
            f"the checkpoint's optimizer is {plain['kind']}, not {kind}; use the same, or load without one"
        )
    names = _names(optimizer, model)
    mine = [
        sorted(names[position] for position in group["params"])
        for group in optimizer.state_dict()["param_groups"]
    ]
    saved = [sorted(group["params"]) for group in plain["groups"]]
    if mine != saved:
        wrong = next(
            (number for number, pair in enumerate(zip(mine, saved, strict=False)) if pair[0] != pair[1]),
            min(len(mine), len(saved)),
        )
        raise CheckpointError(
            f"parameter group {wrong} of the optimizer has other parameters than in the checkpoint; build it "
            "from the same parameters"
        )


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names[len(names)] = named.get(id(parameter), f"#{len(names)}")
    return names


def _plain(name: str, value: object) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list) and all(isinstance(entry, _SCALARS) for entry in value):
        return {"tuple": list(value)} if isinstance(value, tuple) else list(value)
    if isinstance(value, _SCALARS):
        return value
    raise CheckpointError(
        f"the optimizer keeps {name!r} as {type(value).__name__}, which cannot be saved without running "
        "code on load; save it yourself through ``extra``"
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and "tuple" in value:
        return tuple(value["tuple"])
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value
