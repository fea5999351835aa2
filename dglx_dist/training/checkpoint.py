"""Checkpoints of a run: model, optimizer, loader position and random state. Loading executes no saved code.

A checkpoint is a folder ``<folder>/epoch-<e>-step-<s>``. It is written under another name and renamed when it
is complete, so an interrupted save does not affect earlier checkpoints. It has ``tensors-<rank>.bin`` (the
bytes of one tensor after another) and ``state.json``. That file has the state, the position, dtype, shape and
CRC-32 of each tensor, a CRC-32 of the index of each folder of rows, and a CRC-32 of all these values.
"""

import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import (
    broadcast_json,
    check_equal,
    check_replicas,
    gather_int64,
    gather_json,
    run_on_all_ranks,
)
from dglx_dist.comm.exchange import view_bytes
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session, SessionField, current_session, warn_user
from dglx_dist.data.storage.files import (
    discard,
    lock_exclusive,
    name_write_failures,
    publish_or_replace,
    read_small_file,
)
from dglx_dist.data.storage.row_files import INDEX
from dglx_dist.errors import CheckpointError, ConfigError, DglxError, Stopped, StorageError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.shared_memory import WriteOwn, index_shares, open_partial_folder, write_share
from dglx_dist.memory import machine_memory
from dglx_dist.options import check_integer
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.training.checkpoint_folder import (
    FOLDER_NAME,
    NEWEST,
    REMEDY,
    VERSION,
    Which,
    choose,
    find_newest,
    list_complete,
    parse_key,
    read_count,
    read_state,
)
from dglx_dist.training.checkpoint_folder import STATE_NAME as STATE_NAME
from dglx_dist.training.checkpoint_folder import find_latest as find_latest
from dglx_dist.training.checkpoint_folder import folder_name as folder_name
from dglx_dist.training.checkpoint_folder import write_json as write_json
from dglx_dist.training.config import EVERY, Every, count_steps_between
from dglx_dist.training.object_state import (
    Stateful,
    build_optimizer_state,
    check_optimizer,
    cut_optimizer,
    decode,
    describe_objects,
    find_prefix,
    format_dtype,
    join_optimizer,
    load_optimizer,
    parse_dtype,
    select_values,
    split_objects,
    split_optimizer,
)

log = logging.getLogger(__name__)


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Convert a StorageError inside the block to a CheckpointError."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Position, type and checksum of a tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    first_byte: int
    crc32: int

    def read(self, name: str) -> Tensor:
        """Read the tensor. Raise CheckpointError if its file is too short or its bytes have changed."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        raw = view_bytes(tensor)
        with self.path.open("rb") as file:
            file.seek(self.first_byte)
            if file.readinto(raw) != len(raw) or zlib.crc32(raw) != self.crc32:
                raise CheckpointError(
                    f"{self.path} is damaged in {name!r} (byte {self.first_byte}); {REMEDY}"
                )
        return tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, dict[str, Any]]:
    """Write ``tensors`` to a new file and flush it to disk. Return their entries of ``state.json``."""
    entries = {}
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            raw = view_bytes(tensor.detach().cpu().contiguous())
            entries[name] = {
                "dtype": format_dtype(tensor),
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


def _read_entry(folder: Path, name: str, entry: Mapping[str, Any]) -> SavedTensor:
    """Check an entry of ``state.json``. Nothing is allocated, as an untrusted entry may have any size."""
    file_name = entry["file"]
    dtype = parse_dtype(entry["dtype"])
    shape = tuple(read_count(size) for size in entry["shape"])
    path = folder / file_name
    start = read_count(entry["first_byte"])
    num_bytes = read_count(entry["num_bytes"])
    if path.name != file_name:
        raise CheckpointError(f"{folder} refers to {file_name!r} outside of it. Load another checkpoint.")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {REMEDY}")
    if path.stat().st_size < start + num_bytes:
        raise CheckpointError(f"{path} is damaged: it is shorter than {start + num_bytes} bytes; {REMEDY}")
    if num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has the shape {list(shape)} of {dtype} and {num_bytes} bytes")
    crc32 = read_count(entry["crc32"])
    return SavedTensor(dtype=dtype, shape=shape, path=path, first_byte=start, crc32=crc32)


def _select_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_model(path: Path, saved_tensors: Mapping[str, SavedTensor], model: Mapping[str, Tensor]) -> None:
    saved_entries = _select_prefix("model/", saved_tensors)
    for name in dict.fromkeys([*model, *saved_entries]):
        tensor = model.get(name)
        saved = saved_entries.get(name)
        if tensor is None or saved is None:
            owner, other_side = (path, "this model") if tensor is None else ("this model", path)
            remedy = "Build the model as in the saved run."
            if tensor is None and name.endswith("target_scale"):
                remedy = "For a regression, first call model.standardise(torch.zeros(K), torch.ones(K))."
            raise CheckpointError(f"{owner} has {name!r}, but {other_side} does not. {remedy}")
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            raise CheckpointError(
                f"{name!r} is {saved.shape} {saved.dtype} in {path} but "
                f"{tuple(tensor.shape)} {tensor.dtype} in this model. Build the model as in the saved run."
            )


def _check_run(
    path: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, SavedTensor],
    dataset: Mapping[str, object],
    *,
    loader: object,
    random_state: bool,
) -> None:
    """Raise CheckpointError unless the checkpoint fits this dataset, number of ranks and torch."""
    topology = current_session().topology
    for name, value in dataset.items():
        if state["dataset"].get(name, value) != value:
            raise CheckpointError(
                f"{path} was trained on a dataset with {name}={state['dataset'][name]!r}, but this one has "
                f"{value!r}. Use the same dataset."
            )
    if loader is not None and state["world_size"] != topology.world_size and state["step"] != 0:
        raise CheckpointError(
            f"{path} is inside epoch {state['epoch']} of a run on {state['world_size']} ranks. Load it on "
            "the same number of ranks, or load a checkpoint that was saved at the end of an epoch."
        )
    if loader is not None and state["loader"][0] is None:
        raise CheckpointError(f"{path} has no loader position. Load it without ``loader``.")
    saved = tensors.get(f"random/{topology.rank}/cpu")
    current = torch.get_rng_state()
    if random_state and saved is not None and (saved.shape, saved.dtype) != (current.shape, current.dtype):
        raise CheckpointError(f"{path} has a random state of another torch. Load with random_state=False.")


Sparse: TypeAlias = SparseOptimizer | Sequence[SparseOptimizer] | None
"""An optimizer of embeddings, several in a fixed order, or none."""


def list_optimizers(sparse: Sparse) -> Sequence[SparseOptimizer]:
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def _check_sparse(checkpoint: Path, checksums: Sequence[int], sparse: Sparse) -> None:
    optimizers = list_optimizers(sparse)
    saved = len(checksums)
    if len(optimizers) != saved:
        raise CheckpointError(
            f"{checkpoint} has {saved} optimizers of embeddings, but sparse= has {len(optimizers)}. Pass the "
            "optimizers of the saved run in the same order."
        )
    for index, (optimizer, checksum) in enumerate(zip(optimizers, checksums, strict=True)):
        folder = _sparse_folder(checkpoint, index)
        if _checksum_index(folder) != checksum:
            raise CheckpointError(f"{folder} is damaged or belongs to another checkpoint; {REMEDY}")
        optimizer.check_saved(folder)


def _checksum_index(folder: Path) -> int:
    """Return the CRC-32 of the index of saved rows. The index has the checksums of their files."""
    try:
        return zlib.crc32(read_small_file(folder / INDEX))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / INDEX}: {error}; {REMEDY}") from error


def _sparse_folder(checkpoint: Path, index: int) -> Path:
    return checkpoint / "sparse" / str(index)


class ResumableLoader(Protocol):
    """Interface of a loader with a number of steps per epoch.

    Its state has ``epoch``, ``step`` (completed steps of that epoch) and more JSON values.
    """

    def __len__(self) -> int: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def _find_next_position(loader: ResumableLoader) -> Any:
    """Return the position of a loader. After the last step of an epoch, that is the start of the next one."""
    position = loader.state_dict()
    is_over = position["step"] == len(loader)
    return position | {"epoch": position["epoch"] + 1, "step": 0} if is_over else position


_POSITION = ("epoch", "step", "world_size", "extra")


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Position of a loaded checkpoint."""

    path: Path
    epoch: int
    step: int
    world_size: int
    """Number of ranks of the run that saved it."""
    extra: Mapping[str, Any] = field(default_factory=dict)


def save(  # noqa: PLR0913 - one for each object that can be saved
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: ResumableLoader | None = None,
    sparse: Sparse = None,
    epoch: int | None = None,
    step: int | None = None,
    extra: Mapping[str, object] | None = None,
    dataset: Mapping[str, object] | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> Path:
    """Write a checkpoint and return its folder. Every rank must call this.

    Names and shapes are those of the user's module, whatever the strategy.

    Args:
        folder: Folder of the run's checkpoints, on a disk that all ranks share.
        model: Wrapped or plain model.
        optimizer: Any optimizer of torch, over the model's parameters.
        loader: Loader whose position is saved. The position also names the checkpoint. After the last step of
            an epoch, it is the start of the next one.
        sparse: Optimizer of embeddings, or several. The embeddings are saved with its state.
        epoch: Next epoch to run if ``step`` is 0, otherwise the current one. None: that of ``loader``, or 0.
        step: Completed steps of that epoch. None: those of ``loader``, or 0.
        extra: JSON values of your own.
        dataset: JSON values that must be equal when the checkpoint is loaded.
        state: More objects with ``state_dict`` and ``load_state_dict``, by name: schedulers, further
            optimizers, a GradScaler, averaged weights. Their states may differ between ranks.

    Raises:
        ConfigError: on all ranks, if ``epoch`` or ``step`` differs from ``loader`` or from another rank.
        CheckpointError: on all ranks, if model, optimizer, ``extra``, ``dataset`` or ``state`` has a value
            that cannot be saved, or writing failed on one rank.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    position = run_on_all_ranks(session, lambda: _position_to_save(loader, epoch, step), ConfigError)
    check_equal(session, "epoch and step of a checkpoint", position)
    final = Path(folder) / folder_name(**position)
    if loader is None and epoch is None and (final / STATE_NAME).is_file():
        warn_user(f"{final} is replaced: saves without epoch= share one name. Pass epoch= to keep both.")
    saved = RunState(
        model=model, optimizer=optimizer, loader=loader, sparse=sparse, dataset=dataset or {}, state=state
    )
    return CheckpointWriter(folder, saved).save(**position, extra=extra or {}, wait=True)


def _position_to_save(loader: ResumableLoader | None, epoch: int | None, step: int | None) -> dict[str, int]:
    """Return the epoch and step of a checkpoint. Raise ConfigError if they differ from the loader's."""
    values = {"epoch": epoch, "step": step}
    explicit = {key: check_integer(key, value, least=0) for key, value in values.items() if value is not None}
    if loader is None:
        return {"epoch": 0, "step": 0, **explicit}
    state = loader.state_dict()
    if not isinstance(state, Mapping) or not values.keys() <= state.keys():
        raise ConfigError(f"the position {state!r} of the loader needs epoch and step from its state_dict().")
    position = _find_next_position(loader)
    if not (explicit.items() <= position.items() or explicit.items() <= state.items()):
        raise ConfigError(
            f"{' and '.join(f'{name}={value}' for name, value in explicit.items())} would name the "
            f"checkpoint, but its loader is at step {position['step']} of epoch {position['epoch']}. Remove "
            "these arguments."
        )
    return {name: position[name] for name in values}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Objects that the checkpoints of a run save, see :func:`save`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    loader: ResumableLoader | None = None
    sparse: Sparse = None
    dataset: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, Stateful] | None = None


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """Share of one rank in a checkpoint, and ``state.json`` without the entries of its tensors."""

    own_tensors: Mapping[str, Tensor]
    rows: Sequence[tuple[WriteOwn, Mapping[str, object]]]
    state: Mapping[str, object]


_WRITTEN = "written"


class CheckpointWriter:
    """Saves the checkpoints of a run from a copy, on a thread, while training continues.

    All ranks must create it with the same arguments. The thread calls no collective. Each rank reports its
    share to rank 0, which then publishes the checkpoint.

    Args:
        keep: Number of newest checkpoints to keep. Older ones are removed after a new one is complete. None:
            all.
    """

    def __init__(self, folder: str | Path, run: RunState, keep: int | None = None) -> None:
        self._session = current_session()
        self._folder = Path(folder)
        self._run = run
        self._keep = keep
        op = f"checkpoints-{self._session.next_number('checkpoints')}"
        self._reports = OneSidedExchange(self._session, op, "start again from the previous checkpoint")
        self._buffers: dict[str, Tensor] = {}
        """Buffers that the next copy reuses, because new memory is slow to fill."""
        self._thread: Thread | None = None
        self._num_saves, self._failure = 0, ""
        self.protected: Path | None = None
        """Checkpoint that is kept, however many newer ones there are."""

    @_storage_errors()
    def save(self, *, epoch: int, step: int, extra: Mapping[str, object], wait: bool = False) -> Path:
        """Save like :func:`save`. Without ``wait``, return when everything is copied. All ranks call this.

        The call first waits for the previous checkpoint and raises the error of that save. If memory for a
        copy is short on a rank, all ranks write without a copy before they return.
        """
        self.wait()
        stack = ExitStack()
        final = self._folder / folder_name(epoch, step)
        facts = {"version": VERSION, "epoch": epoch, "step": step, "extra": dict(extra)}
        snapshot, copied = self._snapshot(facts, wait=wait)
        folder = stack.enter_context(open_partial_folder(self._session, final))
        self._num_saves += 1
        self._thread = Thread(
            target=self._write, args=(snapshot, folder, final, stack), name="dglx-checkpoint", daemon=True
        )
        if copied:
            self._thread.start()
        else:
            self._thread.run()
            self.wait()
        return final

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Every rank must call this.

        Raises CheckpointError if a rank could not write. All ranks raise the same message. Earlier
        checkpoints are unchanged.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if thread.ident is not None:
            thread.join()
        problems = [text for text in gather_json(self._failure, self._session) if text]
        if problems:
            self._failure = ""
            raise CheckpointError(problems[0])

    def abandon(self) -> None:
        """Give up a checkpoint that is being written, after a failure. Waits for nobody."""
        self._reports.mailbox.begin(self._num_saves + 1)

    def _snapshot(self, facts: Mapping[str, object], *, wait: bool) -> tuple[_Snapshot, bool]:
        """Return this rank's share, and whether its tensors are copies. Every rank must call this."""
        session = self._session
        model = self._run.model
        optimizer = self._run.optimizer
        module = _plain_module(model)
        loader = self._run.loader
        dataset = self._run.dataset
        # state_dict() comes first, because it completes the steps that a pipeline has in flight. These steps
        # also change the optimizer.
        weights = model.state_dict()
        check_replicas({n: weights[n] for n, _ in module.named_parameters() if n in weights}, session)

        def prepare() -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, Tensor], dict[str, Any]]:
            _check_values({"extra": facts["extra"], "dataset": dataset}, weights)
            split = split_optimizer(optimizer, module) if optimizer is not None else ({}, None)
            return *split, *split_objects(self._run.state or {})

        moments, plain_state, object_tensors, values = run_on_all_ranks(session, prepare, CheckpointError)
        objects = describe_objects(values, object_tensors, session)
        if plain_state is not None:
            moments, plain_state = join_optimizer(model, moments, plain_state, session)
        tensors = {f"model/{name}": value for name, value in weights.items()}
        tensors |= {f"optimizer/{name}": value for name, value in moments.items()}
        prefix = find_prefix(objects, session.topology.rank)
        tensors |= {f"{prefix}{name}": value for name, value in object_tensors.items()}
        own_tensors = _select_own_tensors(tensors, session)
        own_tensors[f"random/{session.topology.rank}/cpu"] = torch.get_rng_state()
        if isinstance(model, WrappedModel):
            prefix = f"rank/{session.topology.rank}/"
            own_tensors |= {prefix + name: rows for name, rows in model.rank_state().items()}
        if session.device.type == "cuda":
            own_tensors[f"random/{session.topology.rank}/cuda"] = torch.cuda.get_rng_state(session.device)
        sparse = list_optimizers(self._run.sparse)
        all_rows = chain.from_iterable(optimizer.own_rows for optimizer in sparse)
        is_copy = not wait and self._has_memory([*own_tensors.values(), *all_rows])
        keep_tensor = self._copy_to_buffer if is_copy else lambda _folder, _name, tensor: tensor
        rows = [
            optimizer.rows_to_save(partial(keep_tensor, f"sparse/{index}"))
            for index, optimizer in enumerate(sparse)
        ]
        snapshot = _Snapshot(
            own_tensors={name: keep_tensor("", name, tensor) for name, tensor in own_tensors.items()},
            rows=rows,
            state={
                **facts,
                "world_size": session.topology.world_size,
                "optimizer": plain_state,
                "loader": gather_json(None if loader is None else _find_next_position(loader), session),
                "dataset": dict(dataset),
                "objects": objects,
            },
        )
        return snapshot, is_copy

    def _has_memory(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every rank can hold a copy of its ``tensors``. Every rank must call this."""
        session = self._session
        buffer_bytes = sum(buffer.nbytes for buffer in self._buffers.values())
        needed = max(0, sum(tensor.nbytes for tensor in tensors) - buffer_bytes)
        ranks_on_host = session.hosts.count(session.hosts[session.topology.rank])
        is_enough = needed * ranks_on_host < machine_memory()[1]
        return bool(gather_int64([is_enough], session).all())

    def _copy_to_buffer(self, folder: str, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name := f"{folder}/{name}")
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor.detach())

    def _write(self, snapshot: _Snapshot, folder: Path, final: Path, stack: ExitStack) -> None:
        """Write and report this rank's share. Rank 0 publishes all shares. Calls no collective."""
        session, rank = self._session, self._session.topology.rank
        try:
            with stack:
                report = self._write_own_files(snapshot, folder, final)
                if rank > 0:
                    raw = np.frombuffer(json.dumps(report).encode(), np.uint8)
                    self._reports.post(self._num_saves, _WRITTEN, {0: [raw]}, phase=None)
                    return
                sources = range(1, session.topology.world_size)
                request = f"its share of {final.name}"
                received = self._reports.mailbox.take(self._num_saves, _WRITTEN, sources, request)
                reports = [report, *(json.loads(received[source][0].tobytes()) for source in sources)]
                self._publish(reports, snapshot, folder, final)
        except Exception as error:  # noqa: BLE001 - the training loop raises it on all ranks
            self._failure = str(error) if isinstance(error, DglxError) else f"{type(error).__name__}: {error}"

    def _write_own_files(self, snapshot: _Snapshot, folder: Path, final: Path) -> dict[str, Any]:
        """Write this rank's files into ``folder``, and return their index entries as JSON values.

        A failure is returned as ``problem``, because all ranks must learn about it.
        """
        rank = self._session.topology.rank
        try:
            with name_write_failures(final):
                entries = write_tensors(snapshot.own_tensors, folder / f"tensors-{rank}.bin")
                row_entries = [
                    write_share(_sparse_folder(folder, index), write_own)
                    for index, (write_own, _) in enumerate(snapshot.rows)
                ]
        except StorageError as error:
            return {"problem": f"rank {rank} on {self._session.hosts[rank]}: {error}"}
        return {"problem": "", "tensors": entries, "rows": row_entries}

    def _publish(
        self, reports: Sequence[dict[str, Any]], snapshot: _Snapshot, folder: Path, final: Path
    ) -> None:
        """Complete and rename the checkpoint. At every moment, the old or the new one is complete."""
        for report in reports:
            if report["problem"]:
                raise CheckpointError(report["problem"])
        for index, (_, metadata) in enumerate(snapshot.rows):
            row_entries = [report["rows"][index] for report in reports]
            index_shares(_sparse_folder(folder, index), row_entries, metadata)
        tensors = dict(chain.from_iterable(report["tensors"].items() for report in reports))
        indices = [_checksum_index(_sparse_folder(folder, index)) for index in range(len(snapshot.rows))]
        with name_write_failures(final):
            state = {**snapshot.state, "sparse": indices, "tensors": tensors}
            write_json(folder / STATE_NAME, state)
            publish_or_replace(folder, final)
        if self._keep is not None:
            _remove_older(final, self._keep, self.protected)


class Checkpoints:
    """Checkpoints for your own training loop. Resumes from the newest one in ``folder`` and saves during
    training.

    All ranks must create it with the same arguments, after model, optimizer and loader. The end of the
    session waits for the last checkpoint::

        saved = dx.checkpoints("run", model, optimizer, loader, every="200steps", keep=2)
        for epoch in range(saved.epoch, 10):
            for input_nodes, output_nodes, blocks in loader:
                ...
                saved.step()

    Args:
        folder: Folder on a disk that all ranks share.
        model: Model, see :func:`save`. The same holds for ``optimizer`` and ``sparse``.
        loader: Loader whose position is saved. A resumed loader first yields the remaining batches of its
            epoch.
        every: Epochs between checkpoints, or steps: ``"200steps"``.
        keep: Number of newest checkpoints to keep. None: all.
        state: Schedulers and other objects by name, see :func:`save`.

    Raises:
        ConfigError: ``every`` is neither a number of epochs nor of steps.
        CheckpointError: see :func:`load`.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: ResumableLoader,
        *,
        every: Every = 1,
        keep: int | None = None,
        sparse: Sparse = None,
        state: Mapping[str, Stateful] | None = None,
    ) -> None:
        if not EVERY.holds(every):
            raise ConfigError(f"every={every!r} must be {EVERY.allowed}")
        self._loader = loader
        run = RunState(model=model, optimizer=optimizer, loader=loader, sparse=sparse, state=state or {})
        self._writer = CheckpointWriter(folder, run, keep)
        self._steps_of_epoch = len(loader)
        self._steps_between = max(1, count_steps_between(every, len(loader)))
        lock_folder(folder)
        self.epoch = 0
        """First epoch of the loop. It is the epoch of the checkpoint if one was loaded."""
        self.extra: dict[str, Any] = {}
        """JSON values of your own, saved with each checkpoint and loaded."""
        if read_extra(folder) is not None:
            resumed = load(folder, **vars(run), which=NEWEST)
            self.epoch = resumed.epoch
            self.extra = dict(resumed.extra)
        self._folder = folder
        self._open = ExitStack()
        self._stop_point = self._open.enter_context(current_session().stoppable())
        current_session().before_close.append(self.close)

    def close(self) -> None:
        """Wait for the last checkpoint. Signals then end ranks at once. Every session calls it at its end."""
        self._open.close()
        self._writer.wait()

    def step(self) -> None:
        """Save if a checkpoint is due. Call it after each step, on all ranks.

        Raises:
            CheckpointError: see :func:`save`. The error may be that of the previous checkpoint, which is
                written meanwhile.
            Stopped: a rank received SIGTERM, SIGUSR1 or Ctrl-C. A checkpoint of this step is saved.
        """
        position = _find_next_position(self._loader)
        epoch = int(position["epoch"])
        step = int(position["step"])
        stops = self._stop_point.should_stop()
        if stops or (epoch * self._steps_of_epoch + step) % self._steps_between == 0:
            self._writer.save(epoch=epoch, step=step, extra=self.extra, wait=stops)
        if stops:
            self.close()
            raise Stopped(epoch, step, self._folder)


checkpoints = Checkpoints


def _remove_older(newest: Path, keep: int, protected: Path | None) -> None:
    newest_key = parse_key(newest.name), newest
    older = sorted(entry for entry in list_complete(newest.parent) if entry < newest_key)
    # The newest checkpoint counts as one of the ``keep``.
    for _, path in older[: max(0, len(older) + 1 - keep)]:
        try:
            if path != protected:
                discard(path)
        except OSError as error:
            log.warning("failed to remove an old checkpoint: %s", error)


def _select_own_tensors(tensors: Mapping[str, Tensor], session: Session) -> dict[str, Tensor]:
    """Return the tensors that this rank writes. Ranks with the same tensor take turns. All ranks call it."""
    names = gather_json(list(tensors), session)
    # A rank may lack the optimizer's state of a parameter that had no gradient there.
    holders: dict[str, list[int]] = {}
    for rank, rank_names in enumerate(names):
        for name in rank_names:
            holders.setdefault(name, []).append(rank)
    return {
        name: tensors[name]
        for index, (name, ranks) in enumerate(holders.items())
        if ranks[index % len(ranks)] == session.topology.rank
    }


@_storage_errors()
def load(  # noqa: PLR0913 - one for each object that can be loaded
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: ResumableLoader | None = None,
    sparse: Sparse = None,
    dataset: Mapping[str, object] | None = None,
    random_state: bool = True,
    state: Mapping[str, Stateful] | None = None,
    which: Which | None = None,
) -> LoadedCheckpoint:
    """Resume from a checkpoint. Every rank must call this.

    Any number of ranks may load it. With the number of ranks that saved it, the resumed run is bit-equal to
    one that was never interrupted. Otherwise the ranks' random state is not restored, and a position inside
    an epoch is rejected, because its steps have other seeds.

    Args:
        folder: A checkpoint, a folder of checkpoints, or a run folder of ``dglx train``. Rank 0 logs which
            checkpoint is loaded.
        model: Wrapped or plain model, loaded in place.
        optimizer: Optimizer of the same kind and over the same parameters as the saved one.
        loader: Loader that is set to the saved position.
        sparse: Optimizers of the same kind and over the same embeddings as the saved ones, in the same order.
        dataset: Values to compare with the saved ones. A name that only one side has is ignored.
        random_state: Whether to restore torch's generators.
        state: Objects under the names that they were saved with. It may be None only if no optimizer
            is loaded, as for predictions.
        which: Checkpoint to load: ``best`` by validation, as ``dx.fit`` and ``dglx train`` record it, or
            ``newest``. None: the newest with ``optimizer`` or ``loader``, otherwise the best if there is one.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, it is damaged, or its model, optimizer,
            dataset or ``state`` differs. The message names the first difference. No object
            is changed in this case.
        PeerError: a rank is dead or silent.
    """
    kind = NEWEST if which is None and not (optimizer is None and loader is None) else which
    session, module = current_session(), _plain_module(model)
    weights = model.state_dict()
    rank = session.topology.rank
    choice = run_on_all_ranks(session, lambda: choose(folder, kind) if rank == 0 else None, CheckpointError)
    path = Path(broadcast_json(choice and str(choice[0]), session))
    if choice is not None and choice[1] and which != NEWEST:
        log.warning("loading %s, %s", path, choice[1])

    def read() -> tuple[dict[str, Any], dict[str, Tensor], Mapping[str, Any], dict[str, Any]]:
        with read_state(path) as contents:
            tensors = {name: _read_entry(path, name, entry) for name, entry in contents["tensors"].items()}
            _check_model(path, tensors, weights)
            _check_run(path, contents, tensors, dataset or {}, loader=loader, random_state=random_state)
            saved_tensors = _select_prefix("optimizer/", tensors)
            check_optimizer(path, contents["optimizer"], optimizer, module, saved_tensors)
            _check_sparse(path, contents["sparse"], sparse)
            is_same_size = contents["world_size"] == session.topology.world_size
            needs = {
                "model/": True,
                "optimizer/": optimizer is not None,
                f"rank/{rank}/": is_same_size,
                f"random/{rank}/": is_same_size and random_state,
            }
            prefixes = tuple(filter(needs.get, needs))
            values = {name: entry.read(name) for name, entry in tensors.items() if name.startswith(prefixes)}
            needs_state = state is not None or optimizer is not None
            objects = _read_objects(path, contents, tensors, state or {}) if needs_state else {}
            moments = cut_optimizer(model, _select_prefix("optimizer/", values))
            if optimizer is not None:
                moments = build_optimizer_state(optimizer, module, moments, contents["optimizer"])
            return contents, values, moments, objects

    # Everything that may fail on one rank comes before the first change.
    contents, values, moments, objects = run_on_all_ranks(session, read, CheckpointError)
    if loader is not None:
        position = contents["loader"][rank if contents["world_size"] == session.topology.world_size else 0]
        run_on_all_ranks(session, lambda: loader.load_state_dict(position), CheckpointError)
    model.load_state_dict(_select_prefix("model/", values))
    if optimizer is not None:
        load_optimizer(optimizer, dict(moments))
    for name, object_state in objects.items():
        (state or {})[name].load_state_dict(object_state)
    for index, rows in enumerate(list_optimizers(sparse)):
        rows.flush()
        rows.read_saved(_sparse_folder(path, index))
    _load_rank_state(model, values, session)
    return LoadedCheckpoint(path=path, **{name: contents[name] for name in _POSITION})


def _read_objects(
    path: Path,
    contents: dict[str, Any],
    tensors: Mapping[str, SavedTensor],
    objects: Mapping[str, Stateful],
) -> dict[str, Any]:
    """Return the saved states of ``objects`` by name. Earlier versions saved none."""
    session = current_session()
    entries = contents.get("objects", {})
    values = select_values(path, entries, objects, session)
    prefix = find_prefix(entries, session.topology.rank)
    selected = _select_prefix(prefix, tensors) if objects else {}
    saved = {name: tensor.read(name) for name, tensor in selected.items()}
    return {name: decode(value["value"], saved) for name, value in values.items()}


def _load_rank_state(model: nn.Module, tensors: Mapping[str, Tensor], session: Session) -> None:
    rank, device = session.topology.rank, session.device
    if isinstance(model, WrappedModel):
        model.load_rank_state(_select_prefix(f"rank/{rank}/", tensors))
    random = _select_prefix(f"random/{rank}/", tensors)
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    # A checkpoint of GPUs may be resumed on CPUs, and vice versa.
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)


def read_extra(
    folder: str | Path, check: Callable[[dict[str, Any]], object] | None = None
) -> Mapping[str, Any] | None:
    """Return ``extra`` of the newest checkpoint on rank 0's disk, or None. Every rank must call this.

    Raises CheckpointError if the checkpoint is damaged, or ``check`` raised a ValueError or a similar error.
    """
    session = current_session()

    def read() -> dict[str, Any] | None:
        path = find_newest(Path(folder)) if session.topology.rank == 0 else None
        if path is None:
            return None
        with read_state(path) as state:
            if check is not None:
                check(state["extra"])
            return dict(state["extra"])

    return broadcast_json(run_on_all_ranks(session, read, CheckpointError), session)


_LOCKS: SessionField[set[Path]] = SessionField(lambda _session: set())


def lock_folder(folder: str | Path) -> None:
    """Keep other jobs from saving to ``folder`` until the session ends. Every rank must call this.

    Raises StorageError if another job still saves to it after half of the session's time-out.
    """
    session, target = current_session(), Path(folder).absolute()
    lock_file = target.with_name(f".{target.name}.lock")
    held_locks = _LOCKS.get(session)

    def take_lock() -> None:
        if session.topology.rank != 0 or lock_file in held_locks:
            return
        # If the folder cannot be written, saving a checkpoint will report the reason.
        with suppress(OSError):
            descriptor = lock_exclusive(lock_file, session.timeout_s / 2)
            session.on_close.append(partial(os.close, descriptor))
            held_locks.add(lock_file)

    run_on_all_ranks(session, take_lock)


def remove_all(folder: str | Path) -> None:
    """Remove the checkpoints in ``folder``. Every rank must call this."""
    session = current_session()

    def remove() -> None:
        paths = Path(folder).glob("epoch-*") if session.topology.rank == 0 else ()
        try:
            for path in paths:
                if FOLDER_NAME.fullmatch(path.name):
                    shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove the checkpoints in {folder}: {error}") from error

    run_on_all_ranks(session, remove, CheckpointError)


def _check_values(json_values: Mapping[str, object], weights: Mapping[str, object]) -> None:
    for name, value in json_values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be saved ({error}). Use JSON values only.") from error
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} of the model is a {type(value).__name__}, not a tensor, and cannot be saved "
                "without running code on load. Save it yourself through ``extra``."
            )


def _plain_module(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, WrappedModel) else model
