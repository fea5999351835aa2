"""Checkpoints at an address in an object store. Ranks upload their shares, and ``state.json`` comes last."""

import logging
import os
import re
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import final

from dglx_dist.data.storage.object_store import MissingObjectError, open_store
from dglx_dist.data.storage.remote import cache_folder, fetch_objects
from dglx_dist.data.storage.row_files import INDEX
from dglx_dist.errors import StorageError
from dglx_dist.options import find_address
from dglx_dist.training.checkpoint_folder import STATE_NAME, parse_key

_STATE = re.compile(rf"(checkpoints/)?(epoch-\d+-step-\d+/)?{re.escape(STATE_NAME)}")
log = logging.getLogger(__name__)


@final
class CheckpointStore:
    """Checkpoints of one run at ``address``. A checkpoint without ``state.json`` is not complete."""

    def __init__(self, address: str) -> None:
        self._store = open_store(address)
        self.folder = cache_folder(self._store) / "saved"
        """Local folder for shares that are being written."""

    def begin(self, name: str, has_rows: bool) -> None:
        """Prepare for the upload of a checkpoint. Files of rows would replace those of an earlier one."""
        if has_rows:
            self._store.delete(f"{name}/{STATE_NAME}")

    def name_tensors(self, rank: int) -> str:
        """Return a new file name, so that an earlier checkpoint of the same name stays complete."""
        return f"tensors-{rank}-{secrets.token_hex(4)}.bin"

    def put_share(self, folder: Path, name: str) -> None:
        """Upload all files of one rank."""
        for path in folder.rglob("*"):
            if path.is_file():
                self._store.put(f"{name}/{path.relative_to(folder)}", path)

    def publish(self, folder: Path, name: str, tensor_files: Collection[str]) -> None:
        """Complete a checkpoint when all shares are uploaded, and delete tensors of an earlier one."""
        for path in folder.rglob(INDEX):
            self._store.put(f"{name}/{path.relative_to(folder)}", path)
        self._store.put(f"{name}/{STATE_NAME}", folder / STATE_NAME)
        for object_name in self._store.list():
            parent, _, file_name = object_name.rpartition("/")
            if parent == name and file_name.endswith(".bin") and file_name not in tensor_files:
                self._store.delete(object_name)

    def remove_older(self, newest: Path, keep: int, protected: Path | None) -> None:
        """Delete all checkpoints before ``newest`` except ``protected`` and the last ``keep - 1``."""
        protected_name = None if protected is None else protected.name
        try:
            names = self._store.list()
            complete = {name.partition("/")[0] for name in names if name.endswith(f"/{STATE_NAME}")}
            keys = {name: parse_key(name) for name in complete | {newest.name}}
            older = sorted((key, name) for name, key in keys.items() if key is not None)
            older = older[: older.index((keys[newest.name], newest.name))]  # type: ignore[arg-type]  # it has a key
            for _, name in older[: max(0, len(older) + 1 - keep)]:
                if name != protected_name:
                    self._delete(name, names)
        except StorageError as error:
            log.warning("failed to remove an old checkpoint: %s", error)

    def remove_all(self) -> None:
        """Delete all checkpoints."""
        names = self._store.list()
        for name in {name.partition("/")[0] for name in names}:
            if parse_key(name) is not None:
                self._delete(name, names)

    def _delete(self, name: str, object_names: Collection[str]) -> None:
        self._store.delete(f"{name}/{STATE_NAME}")
        for object_name in object_names:
            if object_name.startswith(f"{name}/"):
                self._store.delete(object_name)


def find_checkpoint_store(folder: str | Path) -> CheckpointStore | None:
    """Return the checkpoints at an address, or None for a folder."""
    address = find_address(folder)
    return None if address is None else CheckpointStore(address)


def find_local_folder(folder: str | Path) -> Path:
    """Return ``folder`` itself, or the local folder for files that are uploaded to an address."""
    store = find_checkpoint_store(folder)
    return Path(folder) if store is None else store.folder


def fetch_states(folder: str | Path) -> Path:
    """Return ``folder`` itself, or a folder with ``state.json`` of all complete checkpoints at an address.

    The folder does not exist if there are none.
    """
    address = find_address(folder)
    if address is None:
        return Path(folder)
    try:
        return Path(fetch_objects(address, lambda name: _STATE.fullmatch(name) is not None))
    except MissingObjectError:
        return cache_folder(open_store(address)) / "none"


def fetch_checkpoint(folder: str | Path, name: str) -> Path:
    """Return the folder with all files of the checkpoint ``name`` in a folder or at an address.

    Raises StorageError if an object is missing or cannot be read.
    """
    address = find_address(folder)
    if address is None:
        return Path(folder, name)
    return Path(fetch_objects(address if name == os.curdir else f"{address.rstrip('/')}/{name}"))
