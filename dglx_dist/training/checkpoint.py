"""Saving and resuming a run: model, optimizer, position, random state; loading runs no code from the file.

A checkpoint is a folder ``<folder>/epoch-<e>-step-<s>``, written under another name and renamed when it is
complete, so a save that is killed leaves the earlier ones as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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

from dglx_dist.comm.collectives import broadcast_json, gather_json, peers_named
from dglx_dist.comm.session import current_session
from dglx_dist.errors import CheckpointError, StorageError
from dglx_dist.graph.opening import together
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.sparse_state import check_state as check_state_of_sparse_files
from dglx_dist.graph.sparse_state import read_state, write_state
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


Sparse: TypeAlias = SparseOptimizer | Sequence[SparseOptimizer] | None
"""One optimiser of embeddings, several in an order that stays the same, or none."""

FOLDER = "sparse"


def optimizers_of(sparse: Sparse) -> Sequence[SparseOptimizer]:
    """Return what was given as a sequence."""
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def save_sparse(sparse: Sparse, checkpoint: Path) -> int:
    """Write embeddings and optimiser state below ``checkpoint``, which exists; every rank must call it.

    Returns:
        The number of optimisers.

    Raises:
        CheckpointError: on all ranks, when one cannot write.
    """
    optimizers = optimizers_of(sparse)
    for number, optimizer in enumerate(optimizers):
        _save_one(optimizer, _folder(checkpoint, number))
    return len(optimizers)


def check_sparse(checkpoint: Path, saved: int, sparse: Sparse) -> None:
    """Look whether ``sparse`` can be loaded; one rank alone.

    Args:
        checkpoint: A finished one.
        saved: The number of optimisers it has.
        sparse: What the user wants to load.

    Raises:
        CheckpointError: it has embeddings and nothing to load them into, or the other way round, or they are
            damaged or of another dataset, optimiser or number of optimisers.
    """
    optimizers = optimizers_of(sparse)
    if saved and not optimizers:
        raise CheckpointError(f"{checkpoint} has embeddings, which belong to the model; give sparse=")
    if optimizers and not saved:
        raise CheckpointError(f"{checkpoint} has no embeddings; load it without ``sparse``")
    if len(optimizers) != saved:
        raise CheckpointError(
            f"{checkpoint} has {saved} optimisers of embeddings, sparse= has {len(optimizers)}; give those "
            "that it was saved with, in that order"
        )
    for number, optimizer in enumerate(optimizers):
        try:
            check_state_of_sparse_files(optimizer.saved_state, _folder(checkpoint, number))
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def load_sparse(sparse: Sparse, checkpoint: Path) -> None:
    """Overwrite embeddings and optimiser state by the saved ones; every rank must call it.

    Raises:
        CheckpointError: a file cannot be read any more, after :func:`check_sparse` could.
    """
    for number, optimizer in enumerate(optimizers_of(sparse)):
        optimizer.flush()
        try:
            optimizer.lr = read_state(optimizer.saved_state, _folder(checkpoint, number), optimizer.session)
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def _save_one(optimizer: SparseOptimizer, folder: Path) -> None:
    optimizer.flush()
    session = optimizer.session

    def make() -> None:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {folder}: {error}; free space, or choose another folder"
            ) from error

    together(session, lambda: make() if session.topology.rank == 0 else None, CheckpointError)
    try:
        write_state(optimizer.saved_state, folder, session)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _folder(checkpoint: Path, number: int) -> Path:
    return checkpoint / FOLDER / str(number)


STATE_NAME = "state.json"
_FOLDER = re.compile(r"epoch-(\d+)-step-(\d+)(\.old)?")


class Positioned(Protocol):
    """A loader that knows where it is."""

    def state_dict(self) -> Any:
        """Return its position, JSON values only."""

    def load_state_dict(self, state: Any) -> None:
        """Go on at that position."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a loaded checkpoint stood."""

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
    """Write a checkpoint and return its folder; every rank must call it.

    Names and shapes are those of the user's module, whatever the strategy. ``folder`` must be one that all
    ranks see.

    Args:
        folder: Where checkpoints of the run lie.
        model: Wrapped or plain.
        optimizer: Any of torch's, over the model's parameters.
        loader: Whose position is kept.
        sparse: Optimiser of embeddings, which are saved with its state; or several.
        epoch: Next epoch to run, when ``step`` is 0; else the one under way.
        step: Steps done in it.
        extra: More of the user's, JSON values only.
        dataset: Facts that must be equal on load, JSON values only.

    Raises:
        CheckpointError: on all ranks, when on one the optimizer, ``extra`` or ``dataset`` has something that
            cannot be saved, or writing failed.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    rank = session.topology.rank
    final = Path(folder) / f"epoch-{epoch:06d}-step-{step:09d}"
    temporary = final.with_name(f".{final.name}.writing")
    module = _plain_module(model)
    # First of all: what a pipeline still has under way belongs to this state, and to the optimizer's.
    of_model = model.state_dict()

    def prepare() -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        _check_json({"extra": extra, "dataset": dataset})
        if rank == 0:
            _make_folder(temporary)
        return split_state(optimizer, module) if optimizer is not None else ({}, None)

    of_optimizer, plain = together(session, prepare, CheckpointError)
    if plain is not None:
        of_optimizer, plain = join_optimizer(model, of_optimizer, plain, session)
    tensors = {f"model/{name}": value for name, value in of_model.items()}
    tensors |= {f"optimizer/{name}": value for name, value in of_optimizer.items()}
    tensors |= _random_state(rank)
    try:
        with _alone_on_purpose(), peers_named(session, "saving a checkpoint"):
            save_tensors(
                tensors,
                storage_writer=RawWriter(temporary, rank),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                no_dist=session.topology.world_size == 1,
            )
    except CheckpointException as error:
        if rank == 0:
            # What is half written would keep a full disk full.
            shutil.rmtree(temporary, ignore_errors=True)
        failed, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
        remedy = "; free space, or choose another folder" if isinstance(reason, OSError) else ""
        raise CheckpointError(f"cannot write {final}: rank {failed}: {reason}{remedy}") from error
    try:
        num_sparse = save_sparse(sparse, temporary)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    state = {
        "version": VERSION,
        "epoch": epoch,
        "step": step,
        "world_size": session.topology.world_size,
        "optimizer": plain,
        "sparse": num_sparse,
        "loader": gather_json(loader.state_dict() if loader is not None else None, session),
        "dataset": dict(dataset or {}),
        "extra": dict(extra or {}),
    }
    together(session, lambda: _publish(temporary, final, state) if rank == 0 else None, CheckpointError)
    return final


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
    """Go on from a checkpoint; every rank must call it.

    Any number of ranks may load it. With as many as saved it, the run goes on as if it had never ended, to
    the last bit. With another number, random state of the ranks is left alone, and a position inside an epoch
    is refused, for steps then hold other seeds.

    Args:
        folder: One checkpoint, or the folder of a run, whose newest is taken.
        model: Wrapped or plain; loaded in place.
        optimizer: Of the same kind and over the same parameters as the saved one.
        loader: Put at the saved position.
        sparse: Of the same kind and over the same embeddings as the saved one; as many, in that order.
        dataset: Compared with the saved one, where both name a fact.
        random_state: Whether to restore torch's generators.

    Raises:
        CheckpointError: on all ranks, when on one there is none, it is damaged, or it is of another model,
            optimizer or dataset; the message names the first difference. Nothing was changed then.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    found = together(
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
            saved_tensors = below("optimizer/", metadata.state_dict_metadata)
            check_optimizer(path, state["optimizer"], optimizer, _plain_module(model), saved_tensors)
        if random_state:
            check_random_state(path, metadata, session.topology.rank)
        check_sparse(path, state.get("sparse", 0), sparse)
        return state, metadata

    state, metadata = together(session, read_and_check, CheckpointError)
    same_ranks = state["world_size"] == session.topology.world_size
    wanted = _wanted(metadata, session.topology.rank, optimizer is not None, same_ranks and random_state)
    try:
        with _alone_on_purpose(), peers_named(session, "loading a checkpoint"):
            load_tensors(
                wanted,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=session.topology.world_size == 1,
            )
    except CheckpointException as error:
        failed, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"cannot read {path}: rank {failed}: {reason}") from error
    model.load_state_dict(below("model/", wanted))
    if optimizer is not None:
        of_optimizer = cut_optimizer(model, below("optimizer/", wanted))
        restore_state(optimizer, _plain_module(model), of_optimizer, state["optimizer"])
    load_sparse(sparse, path)
    if loader is not None:
        loader.load_state_dict(state["loader"][session.topology.rank if same_ranks else 0])
    _restore_random_state(below(f"random/{session.topology.rank}/", wanted))
    return Resumed(
        path=path,
        epoch=state["epoch"],
        step=state["step"],
        world_size=state["world_size"],
        extra=state["extra"],
    )


def read_extra(folder: str | Path) -> Mapping[str, Any] | None:
    """Return what the newest checkpoint of a run was saved with as ``extra``; every rank must call it.

    Args:
        folder: Of the run, as rank 0 sees it.

    Returns:
        None: it has no complete checkpoint.

    Raises:
        CheckpointError: on all ranks, when the checkpoint is damaged.
        PeerError: a rank is dead or silent.
    """
    session = current_session()

    def read() -> dict[str, Any] | None:
        path = _newest(Path(folder)) if session.topology.rank == 0 else None
        if path is None:
            return None
        state: dict[str, Any] = read_json(path / STATE_NAME)
        with damage_named(path / STATE_NAME):
            check_state(path, state)
            return dict(state["extra"])

    found = broadcast_json(together(session, read, CheckpointError), session)
    return found if isinstance(found, dict) else None


def exists(folder: str | Path) -> bool:
    """Whether ``folder`` has a complete checkpoint, as rank 0 sees it; every rank must call it."""
    return bool(broadcast_json(_newest(Path(folder)) is not None, current_session()))


def latest(folder: str | Path) -> Path:
    """Return the newest complete checkpoint in ``folder``, or ``folder`` itself if it is one.

    Raises:
        CheckpointError: there is none.
    """
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
        if (match := _FOLDER.fullmatch(path.name)) and (path / STATE_NAME).is_file()
    ]
    return max(complete)[1] if complete else None


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Hide torch's warning that there is no process group: a run of one process has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check_json(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be saved ({error}); give JSON values only") from error


def _make_folder(temporary: Path) -> None:
    with _writing(temporary.parent):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)


def _publish(temporary: Path, final: Path, state: Mapping[str, object]) -> None:
    """Complete a checkpoint and give it its name; at every moment a complete one of that name exists."""
    with _writing(final):
        write_json(temporary / STATE_NAME, state)
        old = final.with_name(final.name + ".old")
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        descriptor = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error}; free space, or choose another folder"
        ) from error


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
