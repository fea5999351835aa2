"""From one of torch's optimizers to the update of the parameter servers, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.offload.parameters.updates import Update, make_update
from dglx_dist.records import Array


def update_of(optimizer: torch.optim.Optimizer, model: nn.Module, names: Sequence[str]) -> Update:
    """Return the update that goes on where ``optimizer`` is, bit for bit as on the CPU; it is only read.

    Args:
        optimizer: SGD, Adam or AdamW.
        model: The user's module, which names the parameters.
        names: Of the weights, in the parameter servers' order; those the optimizer lacks stay as they are.

    Raises:
        ConfigError: it is another optimizer, has settings or parameters that the parameter servers do not.
    """
    name_of = _names(optimizer, model)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        # A frozen parameter gets no gradient from torch, which then leaves it as it is, decay included.
        | {"params": [name_of[id(parameter)] for parameter in group["params"] if parameter.requires_grad]}
        for group in optimizer.param_groups
    ]
    state = {
        f"{name_of[id(parameter)]}/{key}": value.detach().cpu().numpy().copy()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }
    return make_update(type(optimizer).__name__, groups, names, state, root=_root)


def give_back(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Array]) -> None:
    """Let ``optimizer`` go on where an update is.

    Args:
        optimizer: The one that :func:`update_of` read, or one like it.
        model: The user's module.
        state: The update's state; the arrays are copied.

    Raises:
        ConfigError: it has other parameters than the optimizer.
    """
    parameter_of = dict(model.named_parameters())
    known = set(_names(optimizer, model).values())
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        if name not in known:
            raise ConfigError(f"the state {path!r} is of no parameter of the optimizer: {sorted(known)}")
        parameter = parameter_of[name]
        # torch keeps step counts on the CPU, and all else where the parameter is.
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = torch.tensor(value, device=device)


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in named:
                raise ConfigError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                    "is none of the model's; make the optimizer from model.parameters()"
                )
    return named


def _root(values: Array) -> Array:
    """torch's own square root, which may differ from NumPy's in the last bit."""
    return torch.from_numpy(np.ascontiguousarray(values)).sqrt().numpy()
