"""Save and load a run's model, optimizer, loader position and random state. Loading executes no saved code.

A checkpoint is a folder ``<folder>/epoch-<e>-step-<s>``. It is written under another name and renamed when it
is complete, so an interrupted save does not affect earlier checkpoints. Each rank writes its tensors one
after another into ``tensors-<rank>.bin``. ``state.json`` holds all other state and describes each tensor by
position, dtype, shape and CRC-32. It also has a CRC-32 for the index in each folder with embedding rows, and
a CRC-32 over its own values.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
from dglx_dist.comm.mailbox import OneSidedExchange
from dglx_dist.comm.session import Session, SessionField, current_session, warn_user
from dglx_dist.data.storage.files import (
    lock_exclusive,
    name_write_failures,
    partial_folder,
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
    read_state,
    remove_older,
)
from dglx_dist.training.checkpoint_folder import STATE_NAME as STATE_NAME
from dglx_dist.training.checkpoint_folder import find_latest as find_latest
from dglx_dist.training.checkpoint_folder import folder_name as folder_name
from dglx_dist.training.checkpoint_folder import write_json as write_json
from dglx_dist.training.checkpoint_store import (
    fetch_checkpoint,
    fetch_states,
    find_checkpoint_store,
    find_local_folder,
)
from dglx_dist.training.config import EVERY, Every, count_steps_between
from dglx_dist.training.object_state import (
    Stateful,
    build_optimizer_state,
    check_optimizer,
    cut_optimizer,
    decode,
    describe_objects,
    find_prefix,
    join_optimizer,
    load_optimizer,
    select_values,
    split_objects,
    split_optimizer,
)
from dglx_dist.training.tensor_file import (
    SavedTensor,
    add_prefix,
    check_model,
    read_entry,
    select_prefix,
    write_tensors,
)

log = logging.getLogger(__name__)


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Convert a StorageError inside the block to a CheckpointError."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _check_run(
    path: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, SavedTensor],
    dataset: Mapping[str, object],
    *,
    loader: object,
    random_state: bool,
) -> None:
    """Raise CheckpointError if the checkpoint does not fit the dataset, the number of ranks or this torch."""
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
"""An optimizer for embeddings, several in a fixed order, or none."""


def list_optimizers(sparse: Sparse) -> Sequence[SparseOptimizer]:
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def _check_sparse(checkpoint: Path, checksums: Sequence[int], sparse: Sparse) -> None:
    """Raise CheckpointError if saved embedding rows are damaged or do not fit the ``sparse`` optimizers."""
    optimizers = list_optimizers(sparse)
    if len(optimizers) != len(checksums):
        raise CheckpointError(
            f"{checkpoint} has {len(checksums)} optimizers of embeddings, but sparse= has "
            f"{len(optimizers)}. Pass the optimizers of the saved run in the same order."
        )
    for index, optimizer in enumerate(optimizers):
        folder = _sparse_folder(checkpoint, index)
        if _checksum_index(folder) != checksums[index]:
            raise CheckpointError(f"{folder} is damaged or belongs to another checkpoint; {REMEDY}")
        optimizer.check_saved(folder)


def _checksum_index(folder: Path) -> int:
    """Return a CRC-32 for the row index in ``folder``, which itself has checksums for all row files."""
    try:
        return zlib.crc32(read_small_file(folder / INDEX))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / INDEX}: {error}; {REMEDY}") from error


def _sparse_folder(checkpoint: Path, index: int) -> Path:
    return checkpoint / "sparse" / str(index)


class ResumableLoader(Protocol):
    """Interface for a loader that knows its steps per epoch.

    Its state has ``epoch``, ``step`` (steps completed in that epoch) and more JSON values.
    """

    def __len__(self) -> int: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def _find_next_position(loader: ResumableLoader) -> Any:
    """Return the loader's position. After an epoch's last step, that is the start of the next epoch."""
    position = loader.state_dict()
    if position["step"] < len(loader):
        return position
    return position | {"epoch": position["epoch"] + 1, "step": 0}


_POSITION = ("epoch", "step", "world_size", "extra")


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The position and your own values from a loaded checkpoint."""

    path: Path
    epoch: int
    step: int
    world_size: int
    """Number of ranks that saved it."""
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

    Tensors have the names and shapes that they have in your own module, whatever the strategy.

    Args:
        folder: Folder for the run's checkpoints, on a disk that all ranks share, or an address in an object
            store.
        model: Wrapped or plain model.
        optimizer: Any torch optimizer over the model's parameters.
        loader: Loader whose position is saved. The position also names the checkpoint. After an epoch's last
            step, the position is the start of the next epoch.
        sparse: Optimizer for embeddings, or several. The embeddings are saved with its state.
        epoch: Next epoch to run if ``step`` is 0, otherwise the current one. None: the loader's epoch, or 0.
        step: Steps completed in that epoch. None: the loader's step, or 0.
        extra: Your own JSON values.
        dataset: JSON values that must be equal when the checkpoint is loaded.
        state: More objects with ``state_dict`` and ``load_state_dict``, by name: schedulers, further
            optimizers, a GradScaler, averaged weights. Their states may differ between ranks.

    Raises:
        ConfigError: on all ranks, if ``epoch`` or ``step`` differs from ``loader`` or from another rank.
        CheckpointError: on all ranks, if a value in model, optimizer, ``extra``, ``dataset`` or ``state``
            cannot be saved, or writing failed on one rank.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    position = run_on_all_ranks(session, lambda: _position_to_save(loader, epoch, step), ConfigError)
    check_equal(session, "epoch and step of a checkpoint", position)
    path = Path(folder) / folder_name(**position)
    if loader is None and epoch is None and (path / STATE_NAME).is_file():
        warn_user(f"{path} is replaced: saves without epoch= share one name. Pass epoch= to keep both.")
    run = RunState(
        model=model, optimizer=optimizer, loader=loader, sparse=sparse, dataset=dataset or {}, state=state
    )
    return CheckpointWriter(folder, run).save(**position, extra=extra or {}, wait=True)


def _position_to_save(loader: ResumableLoader | None, epoch: int | None, step: int | None) -> dict[str, int]:
    """Return the epoch and step to save. Raise ConfigError if the arguments contradict the loader."""
    arguments = {}
    if epoch is not None:
        arguments["epoch"] = check_integer("epoch", epoch, least=0)
    if step is not None:
        arguments["step"] = check_integer("step", step, least=0)
    if loader is None:
        return {"epoch": 0, "step": 0, **arguments}

    state = loader.state_dict()
    if not isinstance(state, Mapping) or not {"epoch", "step"} <= state.keys():
        raise ConfigError(f"the position {state!r} of the loader needs epoch and step from its state_dict().")

    # After an epoch's last step, the caller may pass the end of this epoch or the start of the next one.
    position = _find_next_position(loader)
    if not (arguments.items() <= position.items() or arguments.items() <= state.items()):
        raise ConfigError(
            f"{' and '.join(f'{name}={value}' for name, value in arguments.items())} would name the "
            f"checkpoint, but its loader is at step {position['step']} of epoch {position['epoch']}. Remove "
            "these arguments."
        )
    return {"epoch": position["epoch"], "step": position["step"]}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Objects that a run's checkpoints save, see :func:`save`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    loader: ResumableLoader | None = None
    sparse: Sparse = None
    dataset: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, Stateful] | None = None


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """One rank's share in a checkpoint, and ``state.json`` without the tensor entries."""

    own_tensors: Mapping[str, Tensor]
    rows: Sequence[tuple[WriteOwn, Mapping[str, object]]]
    state: Mapping[str, object]


_WRITTEN = "written"


class CheckpointWriter:
    """Saves a run's checkpoints in a background thread, from a copy of the state, while training continues.

    All ranks must create it with the same arguments. The thread calls no collective. Instead, each rank
    reports its share to rank 0, which then publishes the checkpoint.

    Args:
        keep: Number of checkpoints to keep. When a new one is complete, the oldest ones beyond this number
            are removed. None: keep all.
    """

    def __init__(self, folder: str | Path, run: RunState, keep: int | None = None) -> None:
        self._session = current_session()
        self._store = find_checkpoint_store(folder)
        self._folder = find_local_folder(folder)
        self._run = run
        self._keep = keep
        op = f"checkpoints-{self._session.next_number('checkpoints')}"
        self._reports = OneSidedExchange(self._session, op, "start again from the previous checkpoint")
        self._buffers: dict[str, Tensor] = {}
        """Buffers that the next copy reuses, because new memory is slow to fill."""
        self._thread: Thread | None = None
        self._num_saves, self._failure = 0, ""
        self.protected: Path | None = None
        """Checkpoint that is never removed, however many newer ones there are."""

    @_storage_errors()
    def save(self, *, epoch: int, step: int, extra: Mapping[str, object], wait: bool = False) -> Path:
        """Save like :func:`save`. Without ``wait``, return when everything is copied. All ranks call this.

        The call first waits for the previous checkpoint and raises its error if it could not be saved. If a
        rank lacks memory for a copy, all ranks write without a copy before they return.
        """
        self.wait()
        final = self._folder / folder_name(epoch, step)
        facts = {"version": VERSION, "epoch": epoch, "step": step, "extra": dict(extra)}
        snapshot, is_copy = self._take_snapshot(facts, wait=wait)

        # _write closes this stack, which removes the partial folder if it was not renamed.
        stack = ExitStack()
        folder = stack.enter_context(self._open_partial_folder(final))
        self._num_saves += 1
        self._thread = Thread(
            target=self._write, args=(snapshot, folder, final, stack), name="dglx-checkpoint", daemon=True
        )
        if is_copy:
            self._thread.start()
        else:
            # Write in the calling thread, because training would change the tensors.
            self._thread.run()
            self.wait()
        return final

    def _open_partial_folder(self, final: Path) -> AbstractContextManager[Path]:
        """Open a folder that all ranks share, or one per rank if they upload their files."""
        store = self._store
        if store is None:
            return open_partial_folder(self._session, final)
        is_first = self._session.topology.rank == 0
        has_rows = self._run.sparse is not None
        run_on_all_ranks(self._session, lambda: store.begin(final.name, has_rows) if is_first else None)
        return partial_folder(final)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Every rank must call this.

        Raises CheckpointError if a rank could not write. All ranks raise the same message. Earlier
        checkpoints are unchanged.
        """
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        # A thread without an identity never started, because ``save`` wrote in the calling thread.
        if thread.ident is not None:
            thread.join()
        failures = [message for message in gather_json(self._failure, self._session) if message]
        if failures:
            self._failure = ""
            raise CheckpointError(failures[0])

    def abandon(self) -> None:
        """Give up a checkpoint that is being written, after a failure. Waits for nobody."""
        self._reports.mailbox.begin(self._num_saves + 1)

    def _take_snapshot(self, facts: Mapping[str, object], *, wait: bool) -> tuple[_Snapshot, bool]:
        """Return this rank's share, and whether its tensors are copies. Every rank must call this."""
        own_tensors, state = self._collect_state(facts)
        sparse = list_optimizers(self._run.sparse)
        all_rows = chain.from_iterable(optimizer.own_rows for optimizer in sparse)
        is_copy = not wait and self._has_memory([*own_tensors.values(), *all_rows])
        keep_tensor = self._copy_to_buffer if is_copy else lambda _folder, _name, tensor: tensor
        rows = []
        for index, optimizer in enumerate(sparse):
            rows.append(optimizer.rows_to_save(partial(keep_tensor, f"sparse/{index}")))
        kept_tensors = {name: keep_tensor("", name, tensor) for name, tensor in own_tensors.items()}
        return _Snapshot(own_tensors=kept_tensors, rows=rows, state=state), is_copy

    def _collect_state(self, facts: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return the tensors that this rank writes, and the JSON values. Every rank must call this."""
        session = self._session
        model, optimizer, loader = self._run.model, self._run.optimizer, self._run.loader
        module = _plain_module(model)
        # state_dict() comes first, because it completes the steps that a pipeline has in flight. These steps
        # also change the optimizer.
        weights = model.state_dict()
        check_replicas({n: weights[n] for n, _ in module.named_parameters() if n in weights}, session)

        # Everything that may fail on one rank runs here.
        def split_state() -> tuple[Any, Any]:
            _check_values({"extra": facts["extra"], "dataset": self._run.dataset}, weights)
            split = split_optimizer(optimizer, module) if optimizer is not None else ({}, None)
            return split, split_objects(self._run.state or {})

        split, (object_tensors, values) = run_on_all_ranks(session, split_state, CheckpointError)
        moments, plain_state = split
        objects = describe_objects(values, object_tensors, session)
        if plain_state is not None:
            moments, plain_state = join_optimizer(model, moments, plain_state, session)

        rank = session.topology.rank
        tensors = add_prefix("model/", weights) | add_prefix("optimizer/", moments)
        tensors |= add_prefix(find_prefix(objects, rank), object_tensors)
        own_tensors = _select_own_tensors(tensors, session)
        own_tensors[f"random/{rank}/cpu"] = torch.get_rng_state()
        if isinstance(model, WrappedModel):
            own_tensors |= add_prefix(f"rank/{rank}/", model.rank_state())
        if session.device.type == "cuda":
            own_tensors[f"random/{rank}/cuda"] = torch.cuda.get_rng_state(session.device)

        state = {
            **facts,
            "world_size": session.topology.world_size,
            "optimizer": plain_state,
            "loader": gather_json(None if loader is None else _find_next_position(loader), session),
            "dataset": dict(self._run.dataset),
            "objects": objects,
        }
        return own_tensors, state

    def _has_memory(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether every rank has memory to copy its ``tensors``. Every rank must call this."""
        session = self._session
        buffer_bytes = sum(buffer.nbytes for buffer in self._buffers.values())
        new_bytes = max(0, sum(tensor.nbytes for tensor in tensors) - buffer_bytes)
        # All ranks on a machine copy at once.
        ranks_on_host = session.hosts.count(session.hosts[session.topology.rank])
        _, free_bytes = machine_memory()
        has_memory = new_bytes * ranks_on_host < free_bytes
        return bool(gather_int64([has_memory], session).all())

    def _copy_to_buffer(self, folder: str, name: str, tensor: Tensor) -> Tensor:
        key = f"{folder}/{name}"
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor.detach())

    def _write(self, snapshot: _Snapshot, folder: Path, final: Path, stack: ExitStack) -> None:
        """Write and report this rank's share. Rank 0 publishes all shares. Calls no collective."""
        topology = self._session.topology
        try:
            with stack:
                report = self._write_own_files(snapshot, folder, final)
                if topology.rank > 0:
                    encoded_report = np.frombuffer(json.dumps(report).encode(), np.uint8)
                    self._reports.post(self._num_saves, _WRITTEN, {0: [encoded_report]}, phase=None)
                    return

                sources = range(1, topology.world_size)
                request = f"its share of {final.name}"
                messages = self._reports.mailbox.take(self._num_saves, _WRITTEN, sources, request)
                reports = [report, *(json.loads(messages[source][0].tobytes()) for source in sources)]
                self._publish(reports, snapshot, folder, final)
        except DglxError as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001 - the training loop raises it on all ranks
            self._failure = f"{type(error).__name__}: {error}"

    def _write_own_files(self, snapshot: _Snapshot, folder: Path, final: Path) -> dict[str, Any]:
        """Write this rank's files into ``folder``, and return their index entries as JSON values.

        A failure is returned as ``problem``, because all ranks must learn about it.
        """
        rank = self._session.topology.rank
        try:
            with name_write_failures(final):
                file_name = f"tensors-{rank}.bin" if self._store is None else self._store.name_tensors(rank)
                entries = write_tensors(snapshot.own_tensors, folder / file_name)
                row_entries = []
                for index, (write_own, _) in enumerate(snapshot.rows):
                    row_entries.append(write_share(_sparse_folder(folder, index), write_own))
                if self._store is not None:
                    self._store.put_share(folder, final.name)
        except StorageError as error:
            return {"problem": f"rank {rank} on {self._session.hosts[rank]}: {error}"}
        return {"problem": "", "tensors": entries, "rows": row_entries}

    def _publish(
        self, reports: Sequence[dict[str, Any]], snapshot: _Snapshot, folder: Path, final: Path
    ) -> None:
        """Complete and rename the checkpoint. If it replaces one, the old one stays complete until then."""
        for report in reports:
            if report["problem"]:
                raise CheckpointError(report["problem"])
        checksums = []
        for index, (_, metadata) in enumerate(snapshot.rows):
            row_entries = [report["rows"][index] for report in reports]
            index_shares(_sparse_folder(folder, index), row_entries, metadata)
            checksums.append(_checksum_index(_sparse_folder(folder, index)))
        tensors = dict(chain.from_iterable(report["tensors"].items() for report in reports))
        with name_write_failures(final):
            write_json(folder / STATE_NAME, {**snapshot.state, "sparse": checksums, "tensors": tensors})
            if self._store is not None:
                self._store.publish(folder, final.name, {entry["file"] for entry in tensors.values()})
            else:
                publish_or_replace(folder, final)
        if self._keep is not None:
            remove = remove_older if self._store is None else self._store.remove_older
            remove(final, self._keep, self.protected)


class Checkpoints:
    """Saves checkpoints in your own training loop, after resuming from the newest one in ``folder``.

    All ranks must create it with the same arguments, after model, optimizer and loader. The session waits for
    the last checkpoint before it ends::

        saved = dx.checkpoints("run", model, optimizer, loader, every="200steps", keep=2)
        for epoch in range(saved.epoch, 10):
            for input_nodes, output_nodes, blocks in loader:
                ...
                saved.step()

    Args:
        folder: Folder on a disk that all ranks share, or an address in an object store.
        model: Model, see :func:`save`. The same holds for ``optimizer`` and ``sparse``.
        loader: Loader whose position is saved. A resumed loader first yields the batches that remain in its
            epoch.
        every: Epochs between checkpoints, or steps: ``"200steps"``.
        keep: Number of newest checkpoints to keep. None: all.
        state: Schedulers and other objects by name, see :func:`save`.

    Raises:
        ConfigError: ``every`` is neither a number of epochs nor a text like ``"200steps"``.
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
        # An epoch without steps gives 0 steps between checkpoints.
        self._steps_between = max(1, count_steps_between(every, len(loader)))

        lock_folder(folder)
        self.epoch = 0
        """First epoch for your loop: 0, or the epoch in which a loaded checkpoint continues."""
        self.extra: dict[str, Any] = {}
        """Your own JSON values. Each checkpoint saves them, and resuming restores them."""
        if read_extra(folder) is not None:
            resumed = load(folder, **vars(run), which=NEWEST)
            self.epoch = resumed.epoch
            self.extra = dict(resumed.extra)

        self._folder = folder
        self._open = ExitStack()
        self._stop_point = self._open.enter_context(current_session().stoppable())
        current_session().before_close.append(self.close)

    def close(self) -> None:
        """Wait for the last checkpoint, and let signals end ranks at once again. The session calls this."""
        self._open.close()
        self._writer.wait()

    def step(self) -> None:
        """Save if a checkpoint is due. Call this after each step, on all ranks.

        Raises:
            CheckpointError: see :func:`save`. The failed checkpoint may be the previous one, because it is
                written while training continues.
            Stopped: a rank received SIGTERM, SIGUSR1 or Ctrl-C. A checkpoint after this step is saved.
        """
        position = _find_next_position(self._loader)
        epoch = int(position["epoch"])
        step = int(position["step"])
        is_due = (epoch * self._steps_of_epoch + step) % self._steps_between == 0
        stops = self._stop_point.should_stop()
        if stops or is_due:
            self._writer.save(epoch=epoch, step=step, extra=self.extra, wait=stops)
        if stops:
            self.close()
            raise Stopped(epoch, step, self._folder)


checkpoints = Checkpoints


def _select_own_tensors(tensors: Mapping[str, Tensor], session: Session) -> dict[str, Tensor]:
    """Return the tensors that this rank writes. Ranks with the same tensors share the work. Collective."""
    # A rank may lack the optimizer's state for a parameter that had no gradient there.
    holders: dict[str, list[int]] = {}
    for rank, rank_names in enumerate(gather_json(list(tensors), session)):
        for name in rank_names:
            holders.setdefault(name, []).append(rank)
    own_tensors = {}
    for index, (name, ranks) in enumerate(holders.items()):
        writer = ranks[index % len(ranks)]
        if writer == session.topology.rank:
            own_tensors[name] = tensors[name]
    return own_tensors


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

    Any number of ranks may load it. If as many ranks saved it, the resumed run is bit-equal to one that was
    never interrupted. Otherwise the ranks' random state is not restored, and a position inside an epoch is
    rejected, because that epoch's steps would have other seeds.

    Args:
        folder: A checkpoint, a folder of checkpoints, or a run folder of ``dglx train``. Rank 0 logs which
            checkpoint is loaded.
        model: Wrapped or plain model, loaded in place.
        optimizer: Optimizer with the same class and over the same parameters as the saved one.
        loader: Loader that is set to the saved position.
        sparse: Optimizers with the same classes, embeddings and order as the saved ones.
        dataset: Values to compare with the saved ones. A name that only one side has is ignored.
        random_state: Whether to restore torch's generators.
        state: Objects under the names that they were saved with. You may only leave them out if you load no
            optimizer, as for predictions.
        which: Checkpoint to load: ``best`` by validation, as ``dx.fit`` and ``dglx train`` record it, or
            ``newest``. None: the newest if ``optimizer`` or ``loader`` is given, otherwise the best if any.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, it is damaged, or its model, optimizer,
            dataset or ``state`` differs. The message names the first difference. No object
            is changed in this case.
        PeerError: a rank is dead or silent.
    """
    session = current_session()
    module = _plain_module(model)
    weights = model.state_dict()
    selection = which
    if which is None and (optimizer is not None or loader is not None):
        selection = NEWEST
    path = _choose_on_rank_0(folder, selection, logs_reason=which != NEWEST)

    # Returns ``state.json``, the tensors, the optimizer's state, and the objects' states.
    def read() -> tuple[dict[str, Any], dict[str, Tensor], Mapping[str, Any], dict[str, Any]]:
        with read_state(path) as contents:
            tensors = {name: read_entry(path, name, entry) for name, entry in contents["tensors"].items()}
            check_model(path, tensors, weights)
            _check_run(path, contents, tensors, dataset or {}, loader=loader, random_state=random_state)
            check_optimizer(
                path, contents["optimizer"], optimizer, module, select_prefix("optimizer/", tensors)
            )
            _check_sparse(path, contents["sparse"], sparse)

            needs_optimizer = optimizer is not None
            values = _read_tensors(contents, tensors, optimizer=needs_optimizer, random_state=random_state)
            objects = {}
            if state is not None or optimizer is not None:
                objects = _read_objects(path, contents, tensors, state or {})
            moments = cut_optimizer(model, select_prefix("optimizer/", values))
            if optimizer is not None:
                moments = build_optimizer_state(optimizer, module, moments, contents["optimizer"])
            return contents, values, moments, objects

    # Everything that may fail on one rank comes before the first change.
    contents, values, moments, objects = run_on_all_ranks(session, read, CheckpointError)
    if loader is not None:
        _set_position(loader, contents["loader"], session)
    model.load_state_dict(select_prefix("model/", values))
    if optimizer is not None:
        load_optimizer(optimizer, dict(moments))
    for name, object_state in objects.items():
        (state or {})[name].load_state_dict(object_state)
    _load_sparse(path, sparse)
    _load_rank_state(model, values, session)
    return LoadedCheckpoint(path=path, **{name: contents[name] for name in _POSITION})


def _read_tensors(
    contents: Mapping[str, Any],
    tensors: Mapping[str, SavedTensor],
    *,
    optimizer: bool,
    random_state: bool,
) -> dict[str, Tensor]:
    """Read the tensors for the model, the optimizer and this rank.

    A rank's own tensors are only read if as many ranks saved the checkpoint.
    """
    topology = current_session().topology
    prefixes = ["model/"]
    if optimizer:
        prefixes.append("optimizer/")
    if contents["world_size"] == topology.world_size:
        prefixes.append(f"rank/{topology.rank}/")
        if random_state:
            prefixes.append(f"random/{topology.rank}/")
    names = [name for name in tensors if name.startswith(tuple(prefixes))]
    return {name: tensors[name].read(name) for name in names}


def _set_position(loader: ResumableLoader, positions: Sequence[Any], session: Session) -> None:
    """Set the loader to this rank's saved position, or to rank 0's if the number of ranks has changed."""
    has_same_size = len(positions) == session.topology.world_size
    position = positions[session.topology.rank] if has_same_size else positions[0]
    run_on_all_ranks(session, lambda: loader.load_state_dict(position), CheckpointError)


def _choose_on_rank_0(folder: str | Path, which: Which | None, *, logs_reason: bool) -> Path:
    """Return the checkpoint that rank 0 chooses. Every rank must call this."""
    session = current_session()

    def choose_path() -> str | None:
        if session.topology.rank > 0:
            return None
        states = fetch_states(folder)
        path, reason = choose(states, which)
        if reason and logs_reason:
            log.warning("loading %s, %s", path, reason)
        return os.path.relpath(path, states)

    name = broadcast_json(run_on_all_ranks(session, choose_path, CheckpointError), session)
    # The first rank on each machine fetches the files, and the others find them on disk.
    run_on_all_ranks(session, lambda: fetch_checkpoint(folder, name) if session.is_first_on_machine else None)
    return run_on_all_ranks(session, lambda: fetch_checkpoint(folder, name))


def _read_objects(
    path: Path,
    contents: dict[str, Any],
    tensors: Mapping[str, SavedTensor],
    objects: Mapping[str, Stateful],
) -> dict[str, Any]:
    """Return the saved states for ``objects`` by name. Checkpoints from earlier versions have none."""
    session = current_session()
    entries = contents.get("objects", {})
    values = select_values(path, entries, objects, session)
    prefix = find_prefix(entries, session.topology.rank)
    selected = select_prefix(prefix, tensors) if objects else {}
    saved = {name: tensor.read(name) for name, tensor in selected.items()}
    return {name: decode(value["value"], saved) for name, value in values.items()}


def _load_sparse(path: Path, sparse: Sparse) -> None:
    for index, optimizer in enumerate(list_optimizers(sparse)):
        # Updates that are still queued would change the loaded rows.
        optimizer.flush()
        optimizer.read_saved(_sparse_folder(path, index))


def _load_rank_state(model: nn.Module, tensors: Mapping[str, Tensor], session: Session) -> None:
    """Restore what the strategy keeps per rank, and torch's random generators. Both may be missing."""
    rank = session.topology.rank
    if isinstance(model, WrappedModel):
        model.load_rank_state(select_prefix(f"rank/{rank}/", tensors))
    random_states = select_prefix(f"random/{rank}/", tensors)
    if "cpu" in random_states:
        torch.set_rng_state(random_states["cpu"])
    # A run on GPUs may be resumed on CPUs, and vice versa.
    if "cuda" in random_states and session.device.type == "cuda":
        torch.cuda.set_rng_state(random_states["cuda"], session.device)


def read_extra(
    folder: str | Path, check: Callable[[dict[str, Any]], object] | None = None
) -> Mapping[str, Any] | None:
    """Return ``extra`` from the newest checkpoint that rank 0 finds, or None. Every rank must call this.

    Raises CheckpointError if the checkpoint is damaged, or ``check`` raised a ValueError or a similar error.
    """
    session = current_session()

    def read() -> dict[str, Any] | None:
        path = find_newest(fetch_states(folder)) if session.topology.rank == 0 else None
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
    session = current_session()
    target = find_local_folder(folder).absolute()
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
        if session.topology.rank != 0:
            return
        store = find_checkpoint_store(folder)
        if store is not None:
            store.remove_all()
            return
        paths = Path(folder).glob("epoch-*")
        try:
            for path in paths:
                if FOLDER_NAME.fullmatch(path.name):
                    shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove the checkpoints in {folder}: {error}") from error

    run_on_all_ranks(session, remove, CheckpointError)


def _check_values(json_values: Mapping[str, object], weights: Mapping[str, object]) -> None:
    """Raise CheckpointError if a value is not JSON, or an entry in the model's state is not a tensor."""
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
