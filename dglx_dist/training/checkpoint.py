"""Checkpoints of a run: model, optimizer, loader position, random state; loading executes no saved code.

A checkpoint is a folder ``<folder>/epoch-<e>-step-<s>``. It is written under another name and renamed when
complete, so an interrupted save does not affect earlier checkpoints. It has ``tensors-<rank>.bin`` (the bytes
of one tensor after another) and ``state.json``: the state, position, dtype, shape and CRC-32 of each tensor,
a CRC-32 of the index of each folder of rows, and a CRC-32 of these values: one sum over all that it is.
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
    gather_int64,
    gather_json,
    run_on_all_ranks,
)
from dglx_dist.comm.exchange import view_bytes
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session, SessionField, current_session, warn_user
from dglx_dist.data.storage.files import discard, hold_alone, named_failures, publish_over, read_small
from dglx_dist.data.storage.row_files import INDEX
from dglx_dist.errors import CheckpointError, ConfigError, DglxError, Stopped, StorageError
from dglx_dist.graph.optim import SparseOptimizer
from dglx_dist.graph.shared_memory import WriteOwn, index_shares, open_partial_folder, write_share
from dglx_dist.memory import machine_memory
from dglx_dist.options import check_integer
from dglx_dist.strategies.base import WrappedModel
from dglx_dist.strategies.replicated import check_replicas
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
    check_optimizer,
    cut_optimizer,
    decode,
    describe_objects,
    find_prefix,
    format_dtype,
    join_optimizer,
    load_optimizer,
    optimizer_state,
    parse_dtype,
    select_values,
    split_objects,
    split_optimizer,
)

log = logging.getLogger(__name__)


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise a StorageError inside as CheckpointError."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error


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
        raw = view_bytes(tensor)
        with self.path.open("rb") as file:
            file.seek(self.first_byte)
            if file.readinto(raw) != len(raw) or zlib.crc32(raw) != self.crc32:
                raise CheckpointError(
                    f"{self.path} is damaged in {name!r} (byte {self.first_byte}); {REMEDY}"
                )
        return tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, dict[str, Any]]:
    """Write ``tensors`` into a new file, flushed to disk; return their entries of ``state.json``."""
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
    """Check an entry of ``state.json``. Nothing is allocated, since an untrusted one may have any size."""
    file, dtype = entry["file"], parse_dtype(entry["dtype"])
    shape = tuple(read_count(size) for size in entry["shape"])
    path, first, num_bytes = folder / file, read_count(entry["first_byte"]), read_count(entry["num_bytes"])
    if path.name != file:
        raise CheckpointError(f"{folder} refers to {file!r} outside of it; load another checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {REMEDY}")
    if path.stat().st_size < first + num_bytes:
        raise CheckpointError(f"{path} is damaged: it is shorter than {first + num_bytes} bytes; {REMEDY}")
    if num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has the shape {list(shape)} of {dtype} and {num_bytes} bytes")
    return SavedTensor(
        dtype=dtype, shape=shape, path=path, first_byte=first, crc32=read_count(entry["crc32"])
    )


def _select_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_model(path: Path, saved_tensors: Mapping[str, SavedTensor], model: Mapping[str, Tensor]) -> None:
    saved_model = _select_prefix("model/", saved_tensors)
    for name in dict.fromkeys([*model, *saved_model]):
        tensor, saved = model.get(name), saved_model.get(name)
        if tensor is None or saved is None:
            has, lacks = (path, "this model") if tensor is None else ("this model", path)
            remedy = "build the model as it was"
            if tensor is None and name.endswith("target_scale"):
                remedy = "for a regression, call model.standardise(torch.zeros(K), torch.ones(K)) before"
            raise CheckpointError(f"{has} has {name!r}, which {lacks} lacks; {remedy}")
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            raise CheckpointError(
                f"{name!r} is {saved.shape} {saved.dtype} in {path} but "
                f"{tuple(tensor.shape)} {tensor.dtype} in this model; build the model as it was"
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
    topology = current_session().topology
    for name, value in dataset.items():
        if state["dataset"].get(name, value) != value:
            raise CheckpointError(
                f"{path} was trained on a dataset with {name}={state['dataset'][name]!r}, but this one has "
                f"{value!r}; use the same dataset"
            )
    if loader is not None and state["world_size"] != topology.world_size and state["step"] != 0:
        raise CheckpointError(
            f"{path} is inside epoch {state['epoch']} of a run on {state['world_size']} ranks; load it on as "
            "many, or load one that was saved at the end of an epoch"
        )
    if loader is not None and state["loader"][0] is None:
        raise CheckpointError(f"{path} has no loader position; load it without ``loader``")
    saved, current = tensors.get(f"random/{topology.rank}/cpu"), torch.get_rng_state()
    if random_state and saved is not None and (saved.shape, saved.dtype) != (current.shape, current.dtype):
        raise CheckpointError(
            f"{path} has the random state of another torch; load it with random_state=False"
        )


Sparse: TypeAlias = SparseOptimizer | Sequence[SparseOptimizer] | None
"""One optimiser of embeddings, several in a fixed order, or none."""


def list_optimizers(sparse: Sparse) -> Sequence[SparseOptimizer]:
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def _check_sparse(checkpoint: Path, indices: Sequence[int], sparse: Sparse) -> None:
    optimizers, saved = list_optimizers(sparse), len(indices)
    if len(optimizers) != saved:
        raise CheckpointError(
            f"{checkpoint} has {saved} optimisers of embeddings, but sparse= has {len(optimizers)}; pass "
            "those that it was saved with, in that order"
        )
    for number, (optimizer, index) in enumerate(zip(optimizers, indices, strict=True)):
        folder = _sparse_folder(checkpoint, number)
        if _checksum_index(folder) != index:
            raise CheckpointError(f"{folder} is damaged, or of another checkpoint; {REMEDY}")
        optimizer.check_saved(folder)


def _checksum_index(folder: Path) -> int:
    """Return the CRC-32 of the index of saved rows, which has those of their files."""
    try:
        return zlib.crc32(read_small(folder / INDEX))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / INDEX}: {error}; {REMEDY}") from error


def _sparse_folder(checkpoint: Path, number: int) -> Path:
    return checkpoint / "sparse" / str(number)


class ResumableLoader(Protocol):
    """A loader with a number of steps in an epoch.

    Its position has ``epoch`` and ``step``, the completed steps of it, and more JSON values.
    """

    def __len__(self) -> int: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def _find_next_position(loader: ResumableLoader) -> Any:
    """Return a loader's position; after the last step of an epoch it is the begin of the next one."""
    position = loader.state_dict()
    is_over = position["step"] == len(loader)
    return position | {"epoch": position["epoch"] + 1, "step": 0} if is_over else position


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
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
    loader: ResumableLoader | None = None,
    sparse: Sparse = None,
    epoch: int | None = None,
    step: int | None = None,
    extra: Mapping[str, object] | None = None,
    dataset: Mapping[str, object] | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> Path:
    """Write a checkpoint and return its folder. Collective.

    Names and shapes are those of the user's module, whatever the strategy.

    Args:
        folder: The run's checkpoints, on a disk that all ranks share.
        model: Wrapped or plain.
        optimizer: Any of torch's, over the model's parameters.
        loader: Its position is saved, and names the checkpoint. After the last step of an epoch, that is the
            begin of the next one.
        sparse: Optimiser of embeddings, which are saved with its state; or several.
        epoch: Next epoch to run if ``step`` is 0, else the current one. None: that of ``loader``, else 0.
        step: Completed steps of that epoch. None: those of ``loader``, else 0.
        extra: The user's own JSON values.
        dataset: Facts that must be equal on load, JSON values only.
        state: More objects with ``state_dict`` and ``load_state_dict``, by name: schedulers, further
            optimizers, a GradScaler, averaged weights. Their states may differ between ranks.

    Raises:
        ConfigError: on all ranks, when ``epoch`` or ``step`` is not as in ``loader`` or on another rank.
        CheckpointError: on all ranks, when model, optimizer, ``extra``, ``dataset`` or ``state`` has a value
            that cannot be saved, or writing failed on one.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    position = run_on_all_ranks(session, lambda: _position_to_save(loader, epoch, step), ConfigError)
    check_equal(session, "epoch and step of a checkpoint", position)
    final = Path(folder) / folder_name(**position)
    if loader is None and epoch is None and (final / STATE_NAME).is_file():
        warn_user(f"{final} is replaced: saves without epoch= have one name; give epoch= to keep both")
    saved = RunState(
        model=model, optimizer=optimizer, loader=loader, sparse=sparse, dataset=dataset or {}, state=state
    )
    return CheckpointWriter(folder, saved).save(**position, extra=extra or {}, wait=True)


def _position_to_save(loader: ResumableLoader | None, epoch: int | None, step: int | None) -> dict[str, int]:
    """Return the epoch and step of a checkpoint; ConfigError if they are not those of the loader."""
    values = {"epoch": epoch, "step": step}
    given = {name: check_integer(name, value, least=0) for name, value in values.items() if value is not None}
    if loader is None:
        return {"epoch": 0, "step": 0, **given}
    now = loader.state_dict()
    if not isinstance(now, Mapping) or not values.keys() <= now.keys():
        raise ConfigError(
            f"the loader has a position {now!r} without epoch and step; its state_dict() needs both"
        )
    position = _find_next_position(loader)
    if not (given.items() <= position.items() or given.items() <= now.items()):
        raise ConfigError(
            f"{' and '.join(f'{name}={value}' for name, value in given.items())} would name the checkpoint, "
            f"but its loader is at step {position['step']} of epoch {position['epoch']}; leave them out"
        )
    return {name: position[name] for name in values}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What checkpoints of a run save, as of :func:`save`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    loader: ResumableLoader | None = None
    sparse: Sparse = None
    dataset: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, Stateful] | None = None


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """One rank's share of a checkpoint, and ``state.json`` without the entries of its tensors."""

    own: Mapping[str, Tensor]
    rows: Sequence[tuple[WriteOwn, Mapping[str, object]]]
    state: Mapping[str, object]


_WRITTEN = "written"


class CheckpointWriter:
    """Saves the checkpoints of a run, from a copy and on a thread while training goes on.

    All ranks make it alike. The thread calls no collective: each rank reports its share to rank 0, which then
    publishes the whole.

    Args:
        keep: Number of newest checkpoints that stay; older ones are removed after a new one is complete.
            None: all.
    """

    def __init__(self, folder: str | Path, state: RunState, keep: int | None = None) -> None:
        self._session, self._folder, self._run, self._keep = current_session(), Path(folder), state, keep
        op = f"checkpoints-{self._session.next_number('checkpoints')}"
        self._reports = OneSidedExchange(self._session, op, "start again from the checkpoint before")
        self._buffers: dict[str, Tensor] = {}
        """Kept for the next copy, since new memory is slow to fill."""
        self._thread: Thread | None = None
        self._number, self._problem = 0, ""
        self.protected: Path | None = None
        """A checkpoint that stays, however many newer ones there are."""

    @_storage_errors()
    def save(self, *, epoch: int, step: int, extra: Mapping[str, object], wait: bool = False) -> Path:
        """Save as :func:`save`; without ``wait`` it returns when all is copied. Collective.

        It waits first for the checkpoint before, and raises its error. Where memory for a copy is short on a
        rank, all ranks write at once.
        """
        self.wait()
        stack, final = ExitStack(), self._folder / folder_name(epoch, step)
        facts = {"version": VERSION, "epoch": epoch, "step": step, "extra": dict(extra)}
        snapshot, copied = self._snapshot(facts, wait=wait)
        folder = stack.enter_context(open_partial_folder(self._session, final))
        self._number += 1
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
        """Wait until the last checkpoint is complete. Collective.

        CheckpointError: on all ranks, with one message, when one could not write; those before are unchanged.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if thread.ident is not None:
            thread.join()
        problems = [text for text in gather_json(self._problem, self._session) if text]
        if problems:
            self._problem = ""
            raise CheckpointError(problems[0])

    def abandon(self) -> None:
        """Give up a checkpoint that is being written, after a failure; waits for nobody."""
        self._reports.mailbox.begin(self._number + 1)

    def _snapshot(self, facts: Mapping[str, object], *, wait: bool) -> tuple[_Snapshot, bool]:
        """Return this rank's share, and whether it is a copy. Collective."""
        session, model, optimizer = self._session, self._run.model, self._run.optimizer
        module, loader, dataset = _plain_module(model), self._run.loader, self._run.dataset
        # First: this completes the steps that a pipeline has in flight, which change the optimizer, too.
        of_model = model.state_dict()
        check_replicas({n: of_model[n] for n, _ in module.named_parameters() if n in of_model}, session)

        def prepare() -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, Tensor], dict[str, Any]]:
            _check_values({"extra": facts["extra"], "dataset": dataset}, of_model)
            of_optimizer = split_optimizer(optimizer, module) if optimizer is not None else ({}, None)
            return *of_optimizer, *split_objects(self._run.state or {})

        of_optimizer, plain, of_objects, values = run_on_all_ranks(session, prepare, CheckpointError)
        objects = describe_objects(values, of_objects, session)
        if plain is not None:
            of_optimizer, plain = join_optimizer(model, of_optimizer, plain, session)
        tensors = {f"model/{name}": value for name, value in of_model.items()}
        tensors |= {f"optimizer/{name}": value for name, value in of_optimizer.items()}
        of_objects = {
            f"{find_prefix(objects, session.topology.rank)}{name}": value
            for name, value in of_objects.items()
        }
        own = _own_share(tensors | of_objects, session)
        own[f"random/{session.topology.rank}/cpu"] = torch.get_rng_state()
        if isinstance(model, WrappedModel):
            own |= {f"rank/{session.topology.rank}/{name}": rows for name, rows in model.rank_state().items()}
        if session.device.type == "cuda":
            own[f"random/{session.topology.rank}/cuda"] = torch.cuda.get_rng_state(session.device)
        sparse = list_optimizers(self._run.sparse)
        copies = not wait and self._has_memory(
            [*own.values(), *chain.from_iterable(s.own_rows for s in sparse)]
        )
        copied = self._copy_to_buffer if copies else lambda _place, _name, tensor: tensor
        rows = [one.rows_to_save(partial(copied, f"sparse/{place}")) for place, one in enumerate(sparse)]
        snapshot = _Snapshot(
            own={name: copied("", name, tensor) for name, tensor in own.items()},
            rows=rows,
            state={
                **facts,
                "world_size": session.topology.world_size,
                "optimizer": plain,
                "loader": gather_json(None if loader is None else _find_next_position(loader), session),
                "dataset": dict(dataset),
                "objects": objects,
            },
        )
        return snapshot, copies

    def _has_memory(self, tensors: Sequence[Tensor]) -> bool:
        """Whether every rank can hold a copy of its ``tensors``. Collective."""
        session = self._session
        held = sum(one.nbytes for one in self._buffers.values())
        needed = max(0, sum(one.nbytes for one in tensors) - held)
        on_host = session.hosts.count(session.hosts[session.topology.rank])
        enough = needed * on_host < machine_memory()[1]
        return bool(gather_int64([enough], session).all())

    def _copy_to_buffer(self, place: str, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name := f"{place}/{name}")
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor.detach())

    def _write(self, snapshot: _Snapshot, folder: Path, final: Path, stack: ExitStack) -> None:
        """Write and report this rank's share; on rank 0 publish those of all. Calls no collective."""
        session, rank = self._session, self._session.topology.rank
        try:
            with stack:
                report = self._write_own_files(snapshot, folder, final)
                if rank > 0:
                    raw = np.frombuffer(json.dumps(report).encode(), np.uint8)
                    self._reports.post(self._number, _WRITTEN, {0: [raw]}, phase=None)
                    return
                others = range(1, session.topology.world_size)
                what = f"its share of {final.name}"
                sent = self._reports.mailbox.take(self._number, _WRITTEN, others, what)
                reports = [report, *(json.loads(sent[other][0].tobytes()) for other in others)]
                self._publish(reports, snapshot, folder, final)
        except Exception as error:  # noqa: BLE001 - the training loop raises it, on all ranks
            self._problem = str(error) if isinstance(error, DglxError) else f"{type(error).__name__}: {error}"

    def _write_own_files(self, snapshot: _Snapshot, folder: Path, final: Path) -> dict[str, Any]:
        rank = self._session.topology.rank
        try:
            with named_failures(final):
                entries = write_tensors(snapshot.own, folder / f"tensors-{rank}.bin")
                lines = [
                    write_share(_sparse_folder(folder, number), write_own)
                    for number, (write_own, _) in enumerate(snapshot.rows)
                ]
        except StorageError as error:
            return {"problem": f"rank {rank} on {self._session.hosts[rank]}: {error}"}
        return {"problem": "", "tensors": entries, "rows": lines}

    def _publish(
        self, reports: Sequence[dict[str, Any]], snapshot: _Snapshot, folder: Path, final: Path
    ) -> None:
        """Complete and rename the checkpoint; a complete one that it replaces exists at every moment."""
        for report in reports:
            if report["problem"]:
                raise CheckpointError(report["problem"])
        for number, (_, facts) in enumerate(snapshot.rows):
            index_shares(_sparse_folder(folder, number), [one["rows"][number] for one in reports], facts)
        tensors = dict(chain.from_iterable(one["tensors"].items() for one in reports))
        indices = [_checksum_index(_sparse_folder(folder, number)) for number in range(len(snapshot.rows))]
        with named_failures(final):
            state = {**snapshot.state, "sparse": indices, "tensors": tensors}
            write_json(folder / STATE_NAME, state)
            publish_over(folder, final)
        if self._keep is not None:
            _remove_older(final, self._keep, self.protected)


class Checkpoints:
    """Checkpoints of a loop of one's own: resumes from the newest in ``folder``, and saves while it trains.

    All ranks make it alike, after model, optimizer and loader. The session's end waits for the last one::

        saved = dx.checkpoints("run", model, optimizer, loader, every="200steps", keep=2)
        for epoch in range(saved.epoch, 10):
            for input_nodes, output_nodes, blocks in loader:
                ...
                saved.step()

    Args:
        folder: On a disk that all ranks share.
        model: As for :func:`save`, which ``optimizer`` and ``sparse`` are, too.
        loader: Its position is saved, and set when it resumes: the next iteration has the rest of its epoch.
        every: Epochs between checkpoints, or steps: ``"200steps"``.
        keep: Number of newest checkpoints that stay; None: all.
        state: Schedulers and other objects by name, see :func:`save`.

    Raises:
        ConfigError: ``every`` is neither.
        CheckpointError: as of :func:`load`.
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
        saved = RunState(model=model, optimizer=optimizer, loader=loader, sparse=sparse, state=state or {})
        self._writer, self._steps_of_epoch = CheckpointWriter(folder, saved, keep), len(loader)
        self._steps_between = max(1, count_steps_between(every, len(loader)))
        lock_folder(folder)
        self.epoch = 0
        """First epoch of the loop; above 0, or inside of it, if a checkpoint was loaded."""
        self.extra: dict[str, Any] = {}
        """The user's own JSON values: saved with each checkpoint, and loaded."""
        if read_extra(folder) is not None:
            resumed = load(folder, **vars(saved), which=NEWEST)
            self.epoch, self.extra = resumed.epoch, dict(resumed.extra)
        self._folder, self._open = folder, ExitStack()
        self._stop_point = self._open.enter_context(current_session().stoppable())
        current_session().before_close.append(self.close)

    def close(self) -> None:
        """Wait for the last checkpoint; signals end ranks at once from now on. The session's end calls it."""
        self._open.close()
        self._writer.wait()

    def step(self) -> None:
        """Save if it is time; called after each step, on all ranks.

        Raises:
            CheckpointError: as of :func:`save`; also of the checkpoint before, which is written meanwhile.
            Stopped: a rank was told to end by SIGTERM, SIGUSR1 or Ctrl-C; a checkpoint of this step is saved.
        """
        position = _find_next_position(self._loader)
        epoch, step = int(position["epoch"]), int(position["step"])
        stops = self._stop_point.should_stop()
        if stops or (epoch * self._steps_of_epoch + step) % self._steps_between == 0:
            self._writer.save(epoch=epoch, step=step, extra=self.extra, wait=stops)
        if stops:
            self.close()
            raise Stopped(epoch, step, self._folder)


checkpoints = Checkpoints


def _remove_older(newest: Path, keep: int, spared: Path | None) -> None:
    older = sorted(
        found for found in list_complete(newest.parent) if found < (parse_key(newest.name), newest)
    )
    for _, path in older[: max(0, len(older) + 1 - keep)]:
        try:
            if path != spared:
                discard(path)
        except OSError as error:
            log.warning("an old checkpoint cannot be removed: %s", error)


def _own_share(tensors: Mapping[str, Tensor], session: Session) -> dict[str, Tensor]:
    """Return the tensors that this rank writes of those that all ranks have. Collective."""
    names = gather_json(list(tensors), session)
    # A rank may lack the optimizer's state of a parameter that had no gradient there.
    holders: dict[str, list[int]] = {}
    for rank, name in ((rank, name) for rank, own in enumerate(names) for name in own):
        holders.setdefault(name, []).append(rank)
    return {
        name: tensors[name]
        for place, (name, ranks) in enumerate(holders.items())
        if ranks[place % len(ranks)] == session.topology.rank
    }


@_storage_errors()
def load(  # noqa: PLR0913 - one for each thing that can be loaded
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
    """Resume from a checkpoint. Collective.

    Any number of ranks may load it. With as many as saved it, the resumed run is bit-equal to one that was
    never interrupted. With another number, the ranks' random state is not restored, and a position inside an
    epoch is rejected, because its steps have other seeds.

    Args:
        folder: A checkpoint, or a folder of checkpoints or a run folder of ``dglx train``. Rank 0 logs which
            one of these is loaded.
        model: Wrapped or plain; loaded in place.
        optimizer: Of the same kind and over the same parameters as the saved one.
        loader: Set to the saved position.
        sparse: Of the same kind and over the same embeddings as the saved ones, in the same order.
        dataset: Facts to compare with the saved ones, where both exist.
        random_state: Whether to restore torch's generators.
        state: Objects under the names that they were saved with. May be left out only where no optimizer is
            loaded, as for predictions.
        which: The checkpoint to load of several: ``best`` by validation, as ``dx.fit`` and ``dglx train``
            record it, or ``newest``. None: the best where there is one; the newest with ``optimizer`` or
            ``loader``, to go on with training.

    Raises:
        CheckpointError: on all ranks, when there is no checkpoint, it is damaged, or it is of another model,
            optimizer, dataset or ``state``; the message names the first difference. Nothing has been changed
            then.
        PeerError: a rank is dead or silent.
    """
    kind = NEWEST if which is None and not (optimizer is None and loader is None) else which
    session, module, of_model = current_session(), _plain_module(model), model.state_dict()
    rank = session.topology.rank
    first = run_on_all_ranks(session, lambda: choose(folder, kind) if rank == 0 else None, CheckpointError)
    path = Path(broadcast_json(first and str(first[0]), session))
    if first is not None and first[1] and which != NEWEST:
        log.warning("loading %s, %s", path, first[1])

    def read() -> tuple[dict[str, Any], dict[str, Tensor], Mapping[str, Any], dict[str, Any]]:
        with read_state(path) as contents:
            tensors = {name: _read_entry(path, name, entry) for name, entry in contents["tensors"].items()}
            _check_model(path, tensors, of_model)
            _check_run(path, contents, tensors, dataset or {}, loader=loader, random_state=random_state)
            saved_tensors = _select_prefix("optimizer/", tensors)
            check_optimizer(path, contents["optimizer"], optimizer, module, saved_tensors)
            _check_sparse(path, contents["sparse"], sparse)
            is_alike = contents["world_size"] == session.topology.world_size
            needs = {"model/": True, "optimizer/": optimizer is not None, f"rank/{rank}/": is_alike}
            prefixes = tuple(filter(needs.get, needs)) + (f"random/{rank}/",) * (is_alike and random_state)
            wanted = {name: saved.read(name) for name, saved in tensors.items() if name.startswith(prefixes)}
            needs_state = state is not None or optimizer is not None
            objects = _read_objects(path, contents, tensors, state or {}) if needs_state else {}
            of_optimizer = cut_optimizer(model, _select_prefix("optimizer/", wanted))
            if optimizer is not None:
                of_optimizer = optimizer_state(optimizer, module, of_optimizer, contents["optimizer"])
            return contents, wanted, of_optimizer, objects

    # All that may fail on one rank precedes the first change.
    contents, wanted, of_optimizer, objects = run_on_all_ranks(session, read, CheckpointError)
    if loader is not None:
        position = contents["loader"][rank if contents["world_size"] == session.topology.world_size else 0]
        run_on_all_ranks(session, lambda: loader.load_state_dict(position), CheckpointError)
    model.load_state_dict(_select_prefix("model/", wanted))
    if optimizer is not None:
        load_optimizer(optimizer, dict(of_optimizer))
    for name, values in objects.items():
        (state or {})[name].load_state_dict(values)
    for number, rows in enumerate(list_optimizers(sparse)):
        rows.flush()
        rows.read_saved(_sparse_folder(path, number))
    _load_rank_state(model, wanted, session)
    return LoadedCheckpoint(
        path=path, **{name: contents[name] for name in ("epoch", "step", "world_size", "extra")}
    )


def _read_objects(
    path: Path,
    contents: Mapping[str, Any],
    tensors: Mapping[str, SavedTensor],
    objects: Mapping[str, Stateful],
) -> dict[str, Any]:
    """Return the saved states of ``objects`` by name; earlier versions saved none."""
    session, entry = current_session(), contents.get("objects", {})
    values = select_values(path, entry, objects, session)
    prefix = find_prefix(entry, session.topology.rank)
    saved = (
        {name: tensor.read(name) for name, tensor in _select_prefix(prefix, tensors).items()}
        if objects
        else {}
    )
    return {name: decode(value["value"], saved) for name, value in values.items()}


def _load_rank_state(model: nn.Module, tensors: Mapping[str, Tensor], session: Session) -> None:
    rank, device = session.topology.rank, session.device
    if isinstance(model, WrappedModel):
        model.load_rank_state(_select_prefix(f"rank/{rank}/", tensors))
    random = _select_prefix(f"random/{rank}/", tensors)
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    # A checkpoint of GPUs may be resumed on CPUs, and the other way round.
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)


def read_extra(
    folder: str | Path, check: Callable[[dict[str, Any]], object] | None = None
) -> Mapping[str, Any] | None:
    """Return ``extra`` of a run's newest checkpoint on rank 0's disk, None if there is none. Collective.

    CheckpointError: it is damaged, or ``check`` raised a ValueError or the like.
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


_HELD: SessionField[set[Path]] = SessionField(lambda _session: set())


def lock_folder(folder: str | Path) -> None:
    """Keep other jobs from saving to ``folder`` until the session ends. Collective.

    StorageError: another one does, and has not ended within half the time-out.
    """
    session, target = current_session(), Path(folder).absolute()
    lock, held = target.with_name(f".{target.name}.lock"), _HELD.get(session)

    def take() -> None:
        if session.topology.rank == 0 and lock not in held:
            with suppress(OSError):  # what is written later says why it cannot be
                session.on_close.append(partial(os.close, hold_alone(lock, session.timeout_s / 2)))
                held.add(lock)

    run_on_all_ranks(session, take)


def remove_all(folder: str | Path) -> None:
    """Remove the checkpoints in ``folder``. Collective."""
    session = current_session()

    def remove() -> None:
        paths = Path(folder).glob("epoch-*") if session.topology.rank == 0 else ()
        try:
            for path in filter(lambda path: FOLDER_NAME.fullmatch(path.name), paths):
                shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove the checkpoints in {folder}: {error}") from error

    run_on_all_ranks(session, remove, CheckpointError)


def _check_values(plain: Mapping[str, object], of_model: Mapping[str, object]) -> None:
    for name, value in plain.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be saved ({error}); give JSON values only") from error
    for name, value in of_model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} of the model is of type {type(value).__name__}, not a tensor, and cannot be saved "
                "without running code on load; save it yourself through ``extra``"
            )


def _plain_module(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, WrappedModel) else model
