"""Checkpoints of a run: model, optimizer, loader position, random state; loading executes no saved code.

A checkpoint is a folder ``<folder>/epoch-<e>-step-<s>``. It is written under another name and renamed when
complete, so an interrupted save does not affect earlier checkpoints.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from dglx_dist.comm.collectives import broadcast_json, gather_json, peers_named, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session
from dglx_dist.data.storage.files import named_failures, publish_over
from dglx_dist.errors import CheckpointError, StorageError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.shared_memory import shared_partial_folder
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.optimizer_state import (
    check_matches,
    cut_optimizer,
    join_optimizer,
    restore_state,
    split_state,
)
from dglx_dist.training.tensor_files import RawReader, RawWriter, damage_named, read_json, whole, write_json

VERSION = 1


def _below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_model(path: Path, metadata: Metadata, model: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the model has the saved names, shapes and dtypes."""
    saved_model = _below("model/", metadata.state_dict_metadata)
    for name in dict.fromkeys([*model, *saved_model]):
        tensor, saved = model.get(name), saved_model.get(name)
        if tensor is None:
            raise CheckpointError(f"{path} has {name!r}, which this model lacks; build the model as it was")
        if saved is None:
            raise CheckpointError(f"this model has {name!r}, which {path} lacks; build the model as it was")
        if tensor.shape != saved.size or tensor.dtype != saved.properties.dtype:
            raise CheckpointError(
                f"{name!r} is {tuple(saved.size)} {saved.properties.dtype} in {path} but "
                f"{tuple(tensor.shape)} {tensor.dtype} in this model; build the model as it was"
            )


def check_state(path: Path, state: Any) -> None:
    """Raise CheckpointError for another version, and what :func:`damage_named` catches for wrong values."""
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {state.get('version')}, this package reads {VERSION}; load it with the "
            "package that saved it"
        )
    numbers = [whole(state[name]) for name in ("world_size", "epoch", "step")]
    wrong = [name for name in ("dataset", "extra") if not isinstance(state[name], dict)]
    if wrong or len(state["loader"]) != numbers[0]:
        raise ValueError(f"{wrong[0] if wrong else 'loader'!r} has a wrong type or length")


def check_random_state(path: Path, metadata: Metadata, rank: int) -> None:
    """Raise CheckpointError when this torch cannot restore the saved state of ``rank``."""
    saved = metadata.state_dict_metadata.get(f"random/{rank}/cpu")
    current = torch.get_rng_state()
    if isinstance(saved, TensorStorageMetadata) and (
        saved.size != current.shape or saved.properties.dtype != current.dtype
    ):
        raise CheckpointError(
            f"{path} has the random state of another torch; load it with random_state=False"
        )


def check_dataset(path: Path, saved: Mapping[str, object], current: Mapping[str, object]) -> None:
    """Raise CheckpointError when a fact that both have differs."""
    for name, value in current.items():
        if name in saved and saved[name] != value:
            raise CheckpointError(
                f"{path} was trained on a dataset with {name}={saved[name]!r}, but this one has {value!r}; "
                "use the same dataset"
            )


def check_optimizer(
    path: Path,
    saved: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
    module: nn.Module,
    tensors: Mapping[str, Any],
) -> None:
    """Raise CheckpointError unless the optimizer is as saved, ValueError for state of unknown parameters."""
    if optimizer is None:
        return
    if saved is None:
        raise CheckpointError(f"{path} has no optimizer; load it without one")
    check_matches(optimizer, module, saved)
    known = set(chain.from_iterable(group["params"] for group in saved["groups"]))
    unknown = {name.rpartition("/")[0] for name in tensors}.union(saved["scalars"]) - known
    if unknown:
        raise ValueError(f"the optimizer has state of {min(unknown)!r}, which is no parameter")


def check_position(path: Path, state: Mapping[str, Any], loader: object, world_size: int) -> None:
    """Raise CheckpointError when the loader cannot resume at the saved position."""
    if loader is not None and state["world_size"] != world_size and state["step"] != 0:
        raise CheckpointError(
            f"{path} is inside epoch {state['epoch']} of a run on {state['world_size']} ranks; load it on as "
            "many, or load one that was saved at the end of an epoch"
        )
    if loader is not None and state["loader"][0] is None:
        raise CheckpointError(f"{path} has no loader position; load it without ``loader``")


Sparse: TypeAlias = SparseOptimizer | Sequence[SparseOptimizer] | None
"""One optimiser of embeddings, several in a fixed order, or none."""

FOLDER = "sparse"


def optimizers_of(sparse: Sparse) -> Sequence[SparseOptimizer]:
    """Return ``sparse`` as a sequence."""
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def save_sparse(sparse: Sparse, checkpoint: Path) -> int:
    """Write embeddings and optimiser state below the existing folder ``checkpoint``. Collective.

    Returns the number of optimisers. Raises StorageError on all ranks when one cannot write.
    """
    optimizers = optimizers_of(sparse)
    for number, optimizer in enumerate(optimizers):
        folder, session = _sparse_folder(checkpoint, number), optimizer.session

        def make(folder: Path = folder) -> None:
            with named_failures(folder):
                folder.mkdir(parents=True)

        run_on_all_ranks(session, lambda: make() if session.topology.rank == 0 else None)  # noqa: B023
        optimizer.write_into(folder)
    return len(optimizers)


def check_sparse(checkpoint: Path, saved: int, sparse: Sparse) -> None:
    """Check that ``sparse`` can load the ``saved`` optimisers of a finished checkpoint. Not collective.

    Raises:
        CheckpointError: only one of both has embeddings, or the saved ones are damaged or of another dataset,
            optimiser or number of optimisers.
    """
    optimizers = optimizers_of(sparse)
    if saved and not optimizers:
        raise CheckpointError(f"{checkpoint} has embeddings, which belong to the model; pass sparse=")
    if optimizers and not saved:
        raise CheckpointError(f"{checkpoint} has no embeddings; load it without ``sparse``")
    if len(optimizers) != saved:
        raise CheckpointError(
            f"{checkpoint} has {saved} optimisers of embeddings, but sparse= has {len(optimizers)}; pass "
            "those that it was saved with, in that order"
        )
    for number, optimizer in enumerate(optimizers):
        try:
            optimizer.check_saved(_sparse_folder(checkpoint, number))
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def load_sparse(sparse: Sparse, checkpoint: Path) -> None:
    """Overwrite embeddings and optimiser state by the saved ones, after :func:`check_sparse`. Collective."""
    for number, optimizer in enumerate(optimizers_of(sparse)):
        optimizer.flush()
        try:
            optimizer.read_saved(_sparse_folder(checkpoint, number))
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def _sparse_folder(checkpoint: Path, number: int) -> Path:
    return checkpoint / FOLDER / str(number)


STATE_NAME = "state.json"
_FOLDER_NAME = re.compile(r"epoch-(\d+)-step-(\d+)(\.old(?:-[0-9a-f]{8}\.partial)?)?")


class Positioned(Protocol):
    """A loader with a position, JSON values only."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The position of a loaded checkpoint."""

    path: Path
    epoch: int
    step: int
    world_size: int
    """Ranks of the run that saved it."""
    extra: Mapping[str, Any] = field(default_factory=dict)


def save(  # noqa: PLR0913 - one for each thing that can be saved
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Positioned | None = None,
    sparse: Sparse = None,
    epoch: int = 0,
    step: int = 0,
    extra: Mapping[str, object] | None = None,
    dataset: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint and return its folder. Collective.

    Names and shapes are those of the user's module, whatever the strategy.

    Args:
        folder: The run's checkpoints, on a disk that all ranks share.
        model: Wrapped or plain.
        optimizer: Any of torch's, over the model's parameters.
        loader: Its position is saved.
        sparse: Optimiser of embeddings, which are saved with its state; or several.
        epoch: Next epoch to run if ``step`` is 0, else the current one.
        step: Completed steps of that epoch.
        extra: The user's own JSON values.
        dataset: Facts that must be equal on load, JSON values only.

    Raises:
        CheckpointError: on all ranks, when the optimizer, ``extra`` or ``dataset`` has a value that cannot be
            saved, or writing failed on one.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    rank = session.topology.rank
    final = Path(folder) / f"epoch-{epoch:06d}-step-{step:09d}"
    module = _plain_module(model)
    # First: this completes the steps that a pipeline has in flight, which also change the optimizer's state.
    of_model = model.state_dict()

    def prepare() -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        _check_json({"extra": extra, "dataset": dataset})
        return split_state(optimizer, module) if optimizer is not None else ({}, None)

    of_optimizer, plain = run_on_all_ranks(session, prepare, CheckpointError)
    if plain is not None:
        of_optimizer, plain = join_optimizer(model, of_optimizer, plain, session)
    tensors = {f"model/{name}": value for name, value in of_model.items()}
    tensors |= {f"optimizer/{name}": value for name, value in of_optimizer.items()}
    tensors |= _random_state(rank)
    try:
        with shared_partial_folder(session, final) as partial:
            _save_tensors(tensors, partial, final, session)
            state = {
                "version": VERSION,
                "epoch": epoch,
                "step": step,
                "world_size": session.topology.world_size,
                "optimizer": plain,
                "sparse": save_sparse(sparse, partial),
                "loader": gather_json(loader.state_dict() if loader is not None else None, session),
                "dataset": dict(dataset or {}),
                "extra": dict(extra or {}),
            }
            run_on_all_ranks(session, lambda: _publish(partial, final, state) if rank == 0 else None)
    except StorageError as error:
        raise CheckpointError(str(error)) from error
    return final


def _save_tensors(tensors: Mapping[str, Tensor], folder: Path, final: Path, session: Session) -> None:
    try:
        with _no_process_group_warning(), peers_named(session, "saving a checkpoint"):
            save_tensors(
                dict(tensors),
                storage_writer=RawWriter(folder, session.topology.rank),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                no_dist=session.topology.world_size == 1,
            )
    except CheckpointException as error:
        failed, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
        remedy = "; free space, or choose another folder" if isinstance(reason, OSError) else ""
        raise CheckpointError(f"cannot write {final}: rank {failed}: {reason}{remedy}") from error


def load(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Positioned | None = None,
    sparse: Sparse = None,
    dataset: Mapping[str, object] | None = None,
    random_state: bool = True,
) -> Resumed:
    """Resume from a checkpoint. Collective.

    Any number of ranks may load it. With as many as saved it, the resumed run is bit-equal to one that was
    never interrupted. With another number, the ranks' random state is not restored, and a position inside an
    epoch is rejected, because its steps have other seeds.

    Args:
        folder: A checkpoint, or the folder of a run, whose newest one is loaded.
        model: Wrapped or plain; loaded in place.
        optimizer: Of the same kind and over the same parameters as the saved one.
        loader: Set to the saved position.
        sparse: Of the same kind and over the same embeddings as the saved ones, in the same order.
        dataset: Facts to compare with the saved ones, where both exist.
        random_state: Whether to restore torch's generators.

    Raises:
        CheckpointError: on all ranks, when there is no checkpoint, it is damaged, or it is of another model,
            optimizer or dataset; the message names the first difference. Nothing has been changed then.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    found = run_on_all_ranks(
        session, lambda: str(latest(folder)) if session.topology.rank == 0 else "", CheckpointError
    )
    path = Path(str(broadcast_json(found, session)))
    reader, of_model = RawReader(path), model.state_dict()

    def read_and_check() -> tuple[dict[str, Any], Metadata]:
        state, metadata = read_json(path / STATE_NAME), reader.read_metadata()
        with damage_named(path / STATE_NAME):
            check_state(path, state)
            check_dataset(path, state["dataset"], dataset or {})
            check_model(path, metadata, of_model)
            check_position(path, state, loader, session.topology.world_size)
            saved_tensors = _below("optimizer/", metadata.state_dict_metadata)
            check_optimizer(path, state["optimizer"], optimizer, _plain_module(model), saved_tensors)
        if random_state:
            check_random_state(path, metadata, session.topology.rank)
        check_sparse(path, state.get("sparse", 0), sparse)
        return state, metadata

    state, metadata = run_on_all_ranks(session, read_and_check, CheckpointError)
    same_ranks = state["world_size"] == session.topology.world_size
    wanted = _wanted(metadata, session.topology.rank, optimizer is not None, same_ranks and random_state)
    try:
        with _no_process_group_warning(), peers_named(session, "loading a checkpoint"):
            load_tensors(
                wanted,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=session.topology.world_size == 1,
            )
    except CheckpointException as error:
        failed, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"cannot read {path}: rank {failed}: {reason}") from error
    model.load_state_dict(_below("model/", wanted))
    if optimizer is not None:
        of_optimizer = cut_optimizer(model, _below("optimizer/", wanted))
        restore_state(optimizer, _plain_module(model), of_optimizer, state["optimizer"])
    load_sparse(sparse, path)
    if loader is not None:
        loader.load_state_dict(state["loader"][session.topology.rank if same_ranks else 0])
    _restore_random_state(_below(f"random/{session.topology.rank}/", wanted))
    return Resumed(
        path=path,
        epoch=state["epoch"],
        step=state["step"],
        world_size=state["world_size"],
        extra=state["extra"],
    )


def read_extra(folder: str | Path) -> Mapping[str, Any] | None:
    """Return ``extra`` of a run's newest checkpoint on rank 0's disk, None if there is none. Collective."""
    session = current_session()

    def read() -> dict[str, Any] | None:
        path = _newest(Path(folder)) if session.topology.rank == 0 else None
        if path is None:
            return None
        state: dict[str, Any] = read_json(path / STATE_NAME)
        with damage_named(path / STATE_NAME):
            check_state(path, state)
            return dict(state["extra"])

    found = broadcast_json(run_on_all_ranks(session, read, CheckpointError), session)
    return found if isinstance(found, dict) else None


def exists(folder: str | Path) -> bool:
    """Whether ``folder`` has a complete checkpoint on rank 0's disk. Collective."""
    return bool(broadcast_json(_newest(Path(folder)) is not None, current_session()))


def latest(folder: str | Path) -> Path:
    """Return the newest complete checkpoint in ``folder``, or ``folder`` itself if it is one."""
    found = _newest(Path(folder))
    if found is None:
        raise CheckpointError(
            f"there is no complete checkpoint in {folder}; save one first, or start without resuming"
        )
    return found


def _newest(folder: Path) -> Path | None:
    if (folder / STATE_NAME).is_file():
        return folder
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    complete = [
        ((int(match[1]), int(match[2]), match[3] is None), path)
        for path in found
        if (match := _FOLDER_NAME.fullmatch(path.name)) and (path / STATE_NAME).is_file()
    ]
    return max(complete)[1] if complete else None


@contextmanager
def _no_process_group_warning() -> Iterator[None]:
    # A run of one process has no process group, and torch warns about that.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check_json(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be saved ({error}); give JSON values only") from error


def _publish(partial: Path, final: Path, state: Mapping[str, object]) -> None:
    """Complete and rename a checkpoint; a complete one that it replaces exists at every moment."""
    with named_failures(final):
        write_json(partial / STATE_NAME, state)
        publish_over(partial, final)


def _plain_module(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, WrappedModel) else model


def _random_state(rank: int) -> dict[str, Tensor]:
    state = {f"random/{rank}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random/{rank}/cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Tensor]) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _wanted(metadata: Metadata, rank: int, with_optimizer: bool, with_random: bool) -> dict[str, Any]:
    prefixes = ["model/"]
    prefixes += ["optimizer/"] if with_optimizer else []
    prefixes += [f"random/{rank}/"] if with_random else []
    return {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata) and name.startswith(tuple(prefixes))
    }
