"""The user's parameters and optimizer as what the parameter servers begin with, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dglx_dist.offload.parameters.initialise import Scheme, initialise
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.chain import Chain
from dglx_dist.strategies.bounded.torch_update import give_back


def weights_of(model: nn.Module, names: Sequence[str]) -> list[Array]:
    """Return copies of the parameters ``names``."""
    found = dict(model.named_parameters())
    return [found[name].detach().cpu().numpy().copy() for name in names]


def draw_weights(model: nn.Module, chain: Chain, scheme: Scheme, seed: int) -> None:
    """Draw the trained weights anew, equal on all ranks, and let biases be 0.

    What is frozen stays as it is, and so do vectors that are no bias, as a scale.

    Args:
        model: The user's module.
        chain: Which of them have their inputs first.
        scheme: Of :func:`~dglx_dist.offload.parameters.initialise.initialise`.
        seed: Equal on all ranks.
    """
    trained = {
        name: one
        for name, one in model.named_parameters()
        if one.requires_grad and (one.dim() > 1 or name.rpartition(".")[2] == "bias")
    }
    shapes = {name: tuple(one.shape) for name, one in trained.items()}
    drawn = initialise(shapes, scheme, seed, np.dtype(chain.dtype), inputs_first=chain.inputs_first)
    with torch.no_grad():
        for name, weight in drawn.items():
            trained[name].copy_(torch.from_numpy(weight))


def bring_back(
    model: nn.Module, optimizer: Optimizer, weights: Mapping[str, Array], state: Mapping[str, Array]
) -> None:
    """Put trained weights and the state of their update into the user's model and optimizer."""
    found = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            found[name].copy_(torch.tensor(weight))
    give_back(optimizer, model, state)


def fingerprint(model: nn.Module, optimizer: Optimizer) -> str:
    """Return a digest of what training goes on from: parameters, which are frozen, optimizer, its state."""
    digest = hashlib.sha256(type(optimizer).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.requires_grad}".encode())
        _add(digest, parameter)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        settings = {key: repr(value) for key, value in group.items() if key != "params"}
        settings["params"] = " ".join(names.get(id(parameter), "?") for parameter in group["params"])
        digest.update(json.dumps(settings, sort_keys=True).encode())
    for trained, entries in optimizer.state.items():
        for key, value in sorted(entries.items()):
            digest.update(f"{names.get(id(trained), '?')} {key}".encode())
            if isinstance(value, Tensor):
                _add(digest, value)
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, tensor: Tensor) -> None:
    values = tensor.detach().cpu().contiguous()
    digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
    digest.update(values.numpy().tobytes())
