"""Files of a run folder at an address in an object store, and their local copies."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from dglx_dist.data.storage.files import PARTIAL_SUFFIX
from dglx_dist.data.storage.object_store import MissingObjectError, find_store
from dglx_dist.data.storage.remote import cache_folder, fetch_objects
from dglx_dist.options import format_location
from dglx_dist.report.run_folder import SUMMARY


@final
class RunStore:
    """Files of the run folder ``out``, without checkpoints. At an address, one rank uploads the changed ones.

    For a folder, :meth:`pull` and :meth:`push` do nothing.
    """

    def __init__(self, out: str | Path) -> None:
        self._store = find_store(out)
        self.folder = Path(out) if self._store is None else cache_folder(self._store) / "run"
        """The run folder, or a local folder in which its files are written."""
        self._stamps: dict[str, tuple[int, int]] = {}

    def pull(self) -> None:
        """Replace the local files by those of the store. The first rank of each machine calls it."""
        if self._store is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(MissingObjectError):  # The run is new.
            source = fetch_run(self._store.address)
            if os.path.isdir(source):
                shutil.copytree(source, self.folder)
        self._stamps = self._read_stamps()

    def push(self) -> None:
        """Upload the files that have changed, the summary last, and delete those that are gone.

        After a StorageError, the next call repeats what is missing.
        """
        if self._store is None:
            return
        stamps = self._read_stamps()
        changed = [name for name, stamp in stamps.items() if stamp != self._stamps.get(name)]
        for name in sorted(changed, key=lambda name: (name == SUMMARY, name)):
            self._store.put(name, self.folder / name)
            self._stamps[name] = stamps[name]
        for name in self._stamps.keys() - stamps.keys():
            self._store.delete(name)
            del self._stamps[name]

    def _read_stamps(self) -> dict[str, tuple[int, int]]:
        stamps = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.is_file() and not path.name.endswith(PARTIAL_SUFFIX):
                status = path.stat()
                stamps[path.name] = (status.st_mtime_ns, status.st_size)
        return stamps


def fetch_run(run: str | Path) -> str:
    """Return the path of a run folder. Its files, without checkpoints, are copied if it is at an address.

    Raises MissingObjectError if the address has no file, and StorageError if the store cannot be read.
    """
    return fetch_objects(format_location(run), lambda name: "/" not in name)
