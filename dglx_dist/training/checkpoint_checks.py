"""What must hold of a checkpoint before anything of it is taken over; one rank alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dglx_dist.errors import CheckpointError
from dglx_dist.training.optimizer_state import check_matches
from dglx_dist.training.tensor_files import whole

VERSION = 1


def below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_model(path: Path, metadata: Metadata, model: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the model has the saved names, shapes and dtypes."""
    saved = below("model/", metadata.state_dict_metadata)
    for name in dict.fromkeys([*model, *saved]):
        mine, theirs = model.get(name), saved.get(name)
        if mine is None:
            raise CheckpointError(f"{path} has {name!r}, which this model lacks; build the model as it was")
        if theirs is None:
            raise CheckpointError(f"this model has {name!r}, which {path} lacks; build the model as it was")
        if mine.shape != theirs.size or mine.dtype != theirs.properties.dtype:
            raise CheckpointError(
                f"{name!r} is {tuple(theirs.size)} {theirs.properties.dtype} in {path} but "
                f"{tuple(mine.shape)} {mine.dtype} in this model; build the model as it was"
            )


def check_state(path: Path, state: Any) -> None:
    """Raise CheckpointError for another version, and what a wrong type or value raises."""
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {state.get('version')}, this package reads {VERSION}; load it with the "
            "package that saved it"
        )
    numbers = [whole(state[name]) for name in ("world_size", "epoch", "step")]
    wrong = [name for name in ("dataset", "extra") if not isinstance(state[name], dict)]
    if wrong or len(state["loader"]) != numbers[0]:
        raise ValueError(f"{wrong[0] if wrong else 'loader'!r} is not what was saved")


def check_random_state(path: Path, metadata: Metadata, rank: int) -> None:
    """Raise CheckpointError when the saved state of this rank is none that torch can take here."""
    saved = metadata.state_dict_metadata.get(f"random/{rank}/cpu")
    mine = torch.get_rng_state()
    if isinstance(saved, TensorStorageMetadata) and (
        saved.size != mine.shape or saved.properties.dtype != mine.dtype
    ):
        raise CheckpointError(f"{path} has no random state of this torch; load it with random_state=False")


def check_dataset(path: Path, saved: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Raise CheckpointError when a fact that both name is another one."""
    for name, value in mine.items():
        if name in saved and saved[name] != value:
            raise CheckpointError(
                f"{path} was trained on a dataset with {name}={saved[name]!r}, this one has {value!r}; "
                "use the same dataset"
            )


def check_optimizer(
    path: Path,
    saved: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
    module: nn.Module,
    tensors: Mapping[str, Any],
) -> None:
    """Raise CheckpointError unless the optimizer is as it was saved; ValueError for state of nothing."""
    if optimizer is None:
        return
    if saved is None:
        raise CheckpointError(f"{path} has no optimizer; load it without one")
    check_matches(optimizer, module, saved)
    known = set(chain.from_iterable(group["params"] for group in saved["groups"]))
    unknown = {name.rpartition("/")[0] for name in tensors}.union(saved["scalars"]) - known
    if unknown:
        raise ValueError(f"the optimizer keeps something of {min(unknown)!r}, which is no parameter")


def check_position(path: Path, state: Mapping[str, Any], loader: object, world_size: int) -> None:
    """Raise CheckpointError when the loader cannot stand where it stood."""
    if loader is not None and state["world_size"] != world_size and state["step"] != 0:
        raise CheckpointError(
            f"{path} stands inside epoch {state['epoch']} of a run on {state['world_size']} ranks; load it "
            "on as many, or load one that was saved at the end of an epoch"
        )
    if loader is not None and state["loader"][0] is None:
        raise CheckpointError(f"{path} has no loader position; load it without ``loader``")
