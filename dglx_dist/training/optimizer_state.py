"""State of torch optimizers by parameter name, joined from and cut into the pieces of split parameters."""

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
    """Join the ranks' results of :func:`split_state` to those of the uncut model. Collective.

    A rank without columns, whose piece never had a gradient, may lack a tensor; zeros take its place. Of
    values that exist once per parameter, such as steps, those of the lowest rank count.
    """
    if not isinstance(model, WrappedModel) or not model.parts.local:
        return dict(tensors), dict(plain)
    local = set(model.parts.local)
    pieces = {name: parameter for name, parameter in model.module.named_parameters() if name in local}
    of_pieces = {path: value for path, value in tensors.items() if _name(path) in pieces}
    scalars = {name: values for name, values in plain["scalars"].items() if name in pieces}
    local_state = {
        "tensors": {path: _described(value, pieces[_name(path)]) for path, value in of_pieces.items()},
        "scalars": scalars,
    }
    described: dict[str, Any] = {}
    for of_rank in reversed(gather_json(local_state, session)):
        assert isinstance(of_rank, dict)
        described |= of_rank["tensors"]
        scalars |= of_rank["scalars"]
    joined = {path: value for path, value in tensors.items() if path not in of_pieces}
    # In the same order on every rank, since each join is collective.
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
    """Return this rank's pieces of the result of :func:`join_optimizer`. Not collective."""
    if not isinstance(model, WrappedModel):
        return dict(tensors)
    return {path: model.cut_state(_name(path), value) for path, value in tensors.items()}


def _name(path: str) -> str:
    return path.rpartition("/")[0]


def _described(value: Tensor, parameter: Tensor) -> dict[str, Any]:
    # The values are only needed if they are not split like the parameter.
    values = None if value.shape == parameter.shape else value.tolist()
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": values}


_SCALARS = (int, float, bool, str, type(None))


def split_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors by ``<parameter>/<key>``, and the rest of its state as JSON values.

    Parameters have their names in ``model``, the user's module (not wrapped). Other values: CheckpointError.
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
    """Load the result of :func:`split_state` into a matching optimizer; see :func:`check_matches`."""
    check_matches(optimizer, model, plain)
    position_of = {name: position for position, name in _names(optimizer, model).items()}
    state: dict[int, dict[str, Any]] = {position_of[name]: dict(v) for name, v in plain["scalars"].items()}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state[position_of[name]][key] = tensor
    groups = []
    for group, own in zip(plain["groups"], optimizer.state_dict()["param_groups"], strict=True):
        values = {key: _from_plain(value) for key, value in group.items() if key != "params"}
        # Strategies may list parameters in another order: saved state goes by name, torch's by position.
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
    current = [
        sorted(names[position] for position in group["params"])
        for group in optimizer.state_dict()["param_groups"]
    ]
    saved = [sorted(group["params"]) for group in plain["groups"]]
    if current != saved:
        wrong = next(
            (number for number, pair in enumerate(zip(current, saved, strict=False)) if pair[0] != pair[1]),
            min(len(current), len(saved)),
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
        f"the optimizer has {name!r} of type {type(value).__name__}, which cannot be saved without running "
        "code on load; save it yourself through ``extra``"
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and "tuple" in value:
        return tuple(value["tuple"])
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value
