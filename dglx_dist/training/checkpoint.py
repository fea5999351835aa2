"""Checkpoints of a run: model, optimizer, loader position, random state; loading executes no saved code.

A checkpoint is a folder ``<folder>/epoch-<e>-step-<s>``. It is written under another name and renamed when
complete, so an interrupted save does not affect earlier checkpoints. It has ``tensors-<rank>.bin`` (the bytes
of one tensor after another) and ``state.json``: the state, position, dtype, shape and CRC-32 of each tensor,
and a CRC-32 of these values.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import broadcast_json, gather_json, run_on_all_ranks
from dglx_dist.comm.session import Session, current_session
from dglx_dist.data.storage.files import named_failures, publish_over
from dglx_dist.errors import CheckpointError, StorageError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.shared_memory import shared_partial_folder
from dglx_dist.strategies.base import WrappedModel

VERSION = 2
STATE_NAME = "state.json"
_REMEDY = "load an older checkpoint; with --resume, move its folder away and the one before it is taken"


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    first_byte: int
    crc32: int

    def read(self, name: str) -> Tensor:
        """Read the tensor; raise CheckpointError if its file is too short or its bytes have changed."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        raw = _bytes_of(tensor)
        with self.path.open("rb") as file:
            file.seek(self.first_byte)
            if file.readinto(raw) != len(raw) or zlib.crc32(raw) != self.crc32:
                raise CheckpointError(
                    f"{self.path} is damaged in {name!r} (byte {self.first_byte}); {_REMEDY}"
                )
        return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, dict[str, Any]]:
    """Write ``tensors`` into a new file, flushed to disk; return their entries of ``state.json``."""
    entries = {}
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            raw = _bytes_of(tensor.detach().cpu().contiguous())
            entries[name] = {
                "dtype": _dtype_name(tensor),
                "shape": list(tensor.shape),
                "file": path.name,
                "first_byte": file.tell(),
                "num_bytes": len(raw),
                "crc32": zlib.crc32(raw),
            }
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return entries


_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def _dtype(name: object) -> torch.dtype:
    found = _DTYPES.get(f"torch.{name}")
    if found is None:
        raise CheckpointError(f"the checkpoint has the dtype {name!r}, which this torch does not have")
    return found


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _saved(folder: Path, name: str, entry: Mapping[str, Any]) -> SavedTensor:
    """Check an entry of ``state.json``. Nothing is allocated, since an untrusted one may have any size."""
    file, dtype = entry["file"], _dtype(entry["dtype"])
    shape = tuple(whole(size) for size in entry["shape"])
    path, first, num_bytes = folder / file, whole(entry["first_byte"]), whole(entry["num_bytes"])
    if path.name != file:
        raise CheckpointError(f"{folder} refers to {file!r} outside of it; load another checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {_REMEDY}")
    if path.stat().st_size < first + num_bytes:
        raise CheckpointError(f"{path} is damaged: it is shorter than {first + num_bytes} bytes; {_REMEDY}")
    if num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has the shape {list(shape)} of {dtype} and {num_bytes} bytes")
    return SavedTensor(dtype=dtype, shape=shape, path=path, first_byte=first, crc32=whole(entry["crc32"]))


def whole(value: object) -> int:
    """Return ``value`` if it is a whole number of at least 0, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number of at least 0")
    return value


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write JSON values with their CRC-32, since a changed digit is valid JSON, too."""
    plain = json.loads(json.dumps(value))
    path.write_text(json.dumps({**plain, "crc32": _crc_of(plain)}, indent=1), encoding="utf-8")


def _crc_of(values: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps({name: one for name, one in values.items() if name != "crc32"}).encode())


@contextmanager
def _state_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Read and check ``state.json``; errors of values in the block name the file, as CheckpointError."""
    path = folder / STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; {_REMEDY}") from error
    try:
        _check_state(folder, state)
        yield state
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as problem:
        raise CheckpointError(
            f"{path} is damaged ({type(problem).__name__}: {problem}); {_REMEDY}"
        ) from problem


def _check_state(path: Path, state: Any) -> None:
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {state.get('version')}, this package reads {VERSION}; load it with the "
            "package that saved it, or start again without resuming"
        )
    numbers = [whole(state[name]) for name in ("world_size", "epoch", "step")]
    wrong = [name for name in ("dataset", "extra") if not isinstance(state[name], dict)]
    if wrong or len(state["loader"]) != numbers[0]:
        raise ValueError(f"{wrong[0] if wrong else 'loader'!r} has a wrong type or length")
    if state["crc32"] != _crc_of(state):
        raise ValueError("its values have changed since they were written")


def _below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_model(path: Path, saved_tensors: Mapping[str, SavedTensor], model: Mapping[str, Tensor]) -> None:
    saved_model = _below("model/", saved_tensors)
    for name in dict.fromkeys([*model, *saved_model]):
        tensor, saved = model.get(name), saved_model.get(name)
        if tensor is None:
            raise CheckpointError(f"{path} has {name!r}, which this model lacks; build the model as it was")
        if saved is None:
            raise CheckpointError(f"this model has {name!r}, which {path} lacks; build the model as it was")
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            raise CheckpointError(
                f"{name!r} is {saved.shape} {saved.dtype} in {path} but "
                f"{tuple(tensor.shape)} {tensor.dtype} in this model; build the model as it was"
            )


def _check_run(
    path: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, SavedTensor],
    session: Session,
    dataset: Mapping[str, object],
    *,
    loader: object,
    random_state: bool,
) -> None:
    for name, value in dataset.items():
        if state["dataset"].get(name, value) != value:
            raise CheckpointError(
                f"{path} was trained on a dataset with {name}={state['dataset'][name]!r}, but this one has "
                f"{value!r}; use the same dataset"
            )
    if loader is not None and state["world_size"] != session.topology.world_size and state["step"] != 0:
        raise CheckpointError(
            f"{path} is inside epoch {state['epoch']} of a run on {state['world_size']} ranks; load it on as "
            "many, or load one that was saved at the end of an epoch"
        )
    if loader is not None and state["loader"][0] is None:
        raise CheckpointError(f"{path} has no loader position; load it without ``loader``")
    saved, current = tensors.get(f"random/{session.topology.rank}/cpu"), torch.get_rng_state()
    if random_state and saved is not None and (saved.shape, saved.dtype) != (current.shape, current.dtype):
        raise CheckpointError(
            f"{path} has the random state of another torch; load it with random_state=False"
        )


def _check_optimizer(
    path: Path,
    saved: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
    module: nn.Module,
    tensors: Mapping[str, Any],
) -> None:
    if optimizer is None:
        return
    if saved is None:
        raise CheckpointError(f"{path} has no optimizer; load it without one")
    kind = type(optimizer).__name__
    if kind != saved["kind"]:
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['kind']}, not {kind}; use the same, or load without one"
        )
    names = _names(optimizer, module)
    current = [
        sorted(names[position] for position in group["params"])
        for group in optimizer.state_dict()["param_groups"]
    ]
    wanted = [sorted(group["params"]) for group in saved["groups"]]
    if current != wanted:
        pairs = enumerate(zip(current, wanted, strict=False))
        wrong = next((number for number, (a, b) in pairs if a != b), min(len(current), len(wanted)))
        raise CheckpointError(
            f"parameter group {wrong} of the optimizer has other parameters than in the checkpoint; build it "
            "from the same parameters"
        )
    unknown = {_name(tensor) for tensor in tensors}.union(saved["scalars"]) - set(chain.from_iterable(wanted))
    if unknown:
        raise ValueError(f"the optimizer has state of {min(unknown)!r}, which is no parameter")


def _join_optimizer(
    model: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], session: Session
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Join the ranks' results of :func:`_split_optimizer` to those of the uncut model. Collective.

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
        dtype, values = _dtype(described[path]["dtype"]), described[path]["values"]
        if values is not None:
            joined[path] = torch.tensor(values, dtype=dtype)
            continue
        piece = of_pieces.get(path)
        if piece is None:
            piece = torch.zeros_like(pieces[_name(path)], dtype=dtype, requires_grad=False)
        joined[path] = model.join_state(_name(path), piece)
    return joined, {**plain, "scalars": {**plain["scalars"], **scalars}}


def _cut_optimizer(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(model, WrappedModel):
        return dict(tensors)
    return {path: model.cut_state(_name(path), value) for path, value in tensors.items()}


def _name(path: str) -> str:
    return path.rpartition("/")[0]


def _described(value: Tensor, parameter: Tensor) -> dict[str, Any]:
    # The values are only needed if they are not split like the parameter.
    values = None if value.shape == parameter.shape else value.tolist()
    return {"dtype": _dtype_name(value), "values": values}


_SCALARS = (int, float, bool, str, type(None))


def _split_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    # Tensors by <parameter>/<key> and the rest as JSON values; ``model`` is the user's module, not wrapped.
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


def _optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> dict[str, Any]:
    # What the optimizer loads; undoes _split_optimizer.
    position_of = {name: position for position, name in _names(optimizer, model).items()}
    state: dict[int, dict[str, Any]] = {
        position_of[name]: {key: _from_plain(value) for key, value in scalars.items()}
        for name, scalars in plain["scalars"].items()
    }
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state[position_of[name]][key] = tensor
    groups = []
    for group, own in zip(plain["groups"], optimizer.state_dict()["param_groups"], strict=True):
        values = {key: _from_plain(value) for key, value in group.items() if key != "params"}
        for key, value in values.items():
            if isinstance(own.get(key), float) and not isinstance(value, float | int | Tensor):
                raise ValueError(f"{key!r} of the optimizer is {value!r}")
        # Strategies may list parameters in another order: saved state goes by name, torch's by position.
        groups.append(values | {"params": own["params"]})
    return {"state": state, "param_groups": groups}


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names[len(names)] = named.get(id(parameter), f"#{len(names)}")
    return names


def _plain(name: str, value: object) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": _dtype_name(value)}
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
        return torch.tensor(value["tensor"], dtype=_dtype(value["dtype"]))
    return value


Sparse: TypeAlias = SparseOptimizer | Sequence[SparseOptimizer] | None
"""One optimiser of embeddings, several in a fixed order, or none."""


def optimizers_of(sparse: Sparse) -> Sequence[SparseOptimizer]:
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def _check_sparse(checkpoint: Path, saved: int, sparse: Sparse) -> None:
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


def _load_sparse(sparse: Sparse, checkpoint: Path) -> None:
    for number, optimizer in enumerate(optimizers_of(sparse)):
        optimizer.flush()
        try:
            optimizer.read_saved(_sparse_folder(checkpoint, number))
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def _sparse_folder(checkpoint: Path, number: int) -> Path:
    return checkpoint / "sparse" / str(number)


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
        CheckpointError: on all ranks, when model, optimizer, ``extra`` or ``dataset`` has a value that cannot
            be saved, or writing failed on one.
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
        _check_tensors(of_model)
        return _split_optimizer(optimizer, module) if optimizer is not None else ({}, None)

    of_optimizer, plain = run_on_all_ranks(session, prepare, CheckpointError)
    if plain is not None:
        of_optimizer, plain = _join_optimizer(model, of_optimizer, plain, session)
    tensors = {f"model/{name}": value for name, value in of_model.items()}
    tensors |= {f"optimizer/{name}": value for name, value in of_optimizer.items()}
    own = _own_share(tensors, session) | _random_state(session)
    try:
        with shared_partial_folder(session, final) as partial:

            def write() -> dict[str, dict[str, Any]]:
                with named_failures(final):
                    return write_tensors(own, partial / f"tensors-{rank}.bin")

            entries: Any = gather_json(run_on_all_ranks(session, write), session)
            for number, one in enumerate(optimizers_of(sparse)):
                one.write_into(_sparse_folder(partial, number))
            state = {
                "version": VERSION,
                "epoch": epoch,
                "step": step,
                "world_size": session.topology.world_size,
                "optimizer": plain,
                "sparse": len(optimizers_of(sparse)),
                "loader": gather_json(loader.state_dict() if loader is not None else None, session),
                "dataset": dict(dataset or {}),
                "extra": dict(extra or {}),
                "tensors": dict(chain.from_iterable(one.items() for one in entries)),
            }
            run_on_all_ranks(session, lambda: _publish(partial, final, state) if rank == 0 else None)
    except StorageError as error:
        raise CheckpointError(str(error)) from error
    return final


def _own_share(tensors: Mapping[str, Tensor], session: Session) -> dict[str, Tensor]:
    """Return the tensors that this rank writes of those that all ranks have. Collective."""
    names: Any = gather_json(list(tensors), session)
    # A rank may lack the optimizer's state of a parameter that had no gradient there.
    holders: dict[str, list[int]] = {}
    for rank, name in ((rank, name) for rank, own in enumerate(names) for name in own):
        holders.setdefault(name, []).append(rank)
    return {
        name: tensors[name]
        for place, (name, ranks) in enumerate(holders.items())
        if ranks[place % len(ranks)] == session.topology.rank
    }


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
    of_model = model.state_dict()
    rank = session.topology.rank

    def read() -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
        with _state_of(path) as state:
            tensors = {name: _saved(path, name, entry) for name, entry in state["tensors"].items()}
            _check_model(path, tensors, of_model)
            _check_run(path, state, tensors, session, dataset or {}, loader=loader, random_state=random_state)
            module, saved_tensors = _plain_module(model), _below("optimizer/", tensors)
            _check_optimizer(path, state["optimizer"], optimizer, module, saved_tensors)
            _check_sparse(path, state.get("sparse", 0), sparse)
            prefixes = ("model/", *(["optimizer/"] if optimizer is not None else []))
            same_ranks = state["world_size"] == session.topology.world_size
            prefixes += (f"random/{rank}/",) if random_state and same_ranks else ()
            wanted = {name: one.read(name) for name, one in tensors.items() if name.startswith(prefixes)}
            if optimizer is None:
                return state, wanted, {}
            of_optimizer = _cut_optimizer(model, _below("optimizer/", wanted))
            return state, wanted, _optimizer_state(optimizer, module, of_optimizer, state["optimizer"])

    # All that may fail on one rank precedes the first change.
    state, wanted, of_optimizer = run_on_all_ranks(session, read, CheckpointError)
    if loader is not None:
        position = state["loader"][rank if state["world_size"] == session.topology.world_size else 0]
        run_on_all_ranks(session, lambda: loader.load_state_dict(position), CheckpointError)
    model.load_state_dict(_below("model/", wanted))
    if optimizer is not None:
        optimizer.load_state_dict(of_optimizer)
    _load_sparse(sparse, path)
    _restore_random_state(_below(f"random/{rank}/", wanted), session)
    return Resumed(path=path, **{name: state[name] for name in ("epoch", "step", "world_size", "extra")})


def read_extra(folder: str | Path) -> Mapping[str, Any] | None:
    """Return ``extra`` of a run's newest checkpoint on rank 0's disk, None if there is none. Collective."""
    session = current_session()

    def read() -> dict[str, Any] | None:
        path = _newest(Path(folder)) if session.topology.rank == 0 else None
        if path is None:
            return None
        with _state_of(path) as state:
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


def _check_json(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be saved ({error}); give JSON values only") from error


def _check_tensors(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} of the model is of type {type(value).__name__}, not a tensor, and cannot be saved "
                "without running code on load; save it yourself through ``extra``"
            )


def _publish(partial: Path, final: Path, state: Mapping[str, object]) -> None:
    """Complete and rename a checkpoint; a complete one that it replaces exists at every moment."""
    with named_failures(final):
        write_json(partial / STATE_NAME, state)
        publish_over(partial, final)


def _plain_module(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, WrappedModel) else model


def _random_state(session: Session) -> dict[str, Tensor]:
    prefix = f"random/{session.topology.rank}"
    state = {f"{prefix}/cpu": torch.get_rng_state()}
    if session.device.type == "cuda":
        state[f"{prefix}/cuda"] = torch.cuda.get_rng_state(session.device)
    return state


def _restore_random_state(state: Mapping[str, Tensor], session: Session) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    # A checkpoint of GPUs may be resumed on CPUs, and the other way round.
    if "cuda" in state and session.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], session.device)
