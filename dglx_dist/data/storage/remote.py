"""Local copies of tables and datasets in an object store, and uploads of finished datasets.

Copies are in the folder ``DGLX_DATASET_CACHE``. A file under its own name is complete. During the download it
is in another folder, see :func:`parts_folder`. A lock on it keeps other processes of the machine from
downloading it, too. Locks hold for one machine.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from threading import Event
from typing import final

from dglx_dist.data.storage.columns import CACHE, MANIFEST, FileInfo, checksum, safe_name
from dglx_dist.data.storage.files import (
    lock_exclusive,
    name_write_failures,
    read_small_file,
    replace_atomically,
)
from dglx_dist.data.storage.object_store import (
    DamagedObjectError,
    MissingObjectError,
    ObjectInfo,
    ObjectStore,
    find_store,
    open_store,
)
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.internals.cache_folder import find_dataset_cache
from dglx_dist.options import find_address, hide_query
from dglx_dist.progress import progress

_NUM_THREADS = 8
_LOCK_LIMIT_S = 900.0
"""Longest wait for another process that downloads nothing. A request and its repeats take 5 minutes."""
_POLL_S = 0.2
_PROGRESS_BYTES = 1 << 28
_PROBE = "part0/probe"
_WRITTEN_NAME = re.compile(
    r"part\d+/(nodes|edges)/[^/]+/(data/[^/]+|indptr|indices|original_ids|user_ids)\.arrow"
)
"""Names of the arrays that :mod:`dglx_dist.data.storage.writer` writes."""
log = logging.getLogger(__name__)


def cache_folder(store: ObjectStore) -> Path:
    """Return the folder for local copies of the objects of ``store``. It may not exist yet."""
    address = store.locate().rstrip("/")
    name = safe_name(address.rpartition("/")[2])
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    return find_dataset_cache() / f"{name}-{digest}"


def fetch_files(store: ObjectStore, folder: Path, files: Mapping[str, FileInfo]) -> None:
    """Download those of ``files`` that are not in ``folder`` yet. An interrupted download is continued.

    Args:
        files: Size and checksum by name. An empty checksum is not compared.

    Raises:
        StorageError: an object is missing, differs from its size or checksum, or cannot be read, or the
            folder cannot be written. The other downloads stop at their next chunk.
    """
    missing = [name for name in files if not (folder / name).exists()]
    num_bytes = sum(files[name].num_bytes for name in missing)
    is_large = num_bytes > _PROGRESS_BYTES
    download = _Download(store, folder)
    with (
        name_write_failures(folder),
        progress(f"Fetching {store.locate()}", num_bytes, enabled=is_large) as advance,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
    ):
        names = {pool.submit(download.fetch, name, files[name]): name for name in missing}
        try:
            for task in as_completed(names):
                task.result()
                advance(files[names[task]].num_bytes)
        finally:
            download.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


@final
class _Download:
    """Download of several objects on threads. They end at their next chunk after ``stop`` is set."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._waits = Event()
        self.stop = Event()

    def fetch(self, name: str, expected: FileInfo) -> None:
        target = self._folder / name
        part = parts_folder(self._folder) / name
        with os.fdopen(self.lock(part, part, self._store.locate(name)), "r+b", buffering=0) as file:
            if target.exists():  # Another process has downloaded it meanwhile.
                part.unlink()
                return
            try:
                self._complete(file, name, expected)
            except DamagedObjectError:
                part.unlink()
                raise
            os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)

    def lock(self, path: Path, growing: Path, location: str) -> int:
        """Lock ``path``. Raise StorageError if another process has the lock and ``growing`` does not grow."""
        num_bytes, deadline = -1, 0.0
        while True:
            try:
                return lock_exclusive(path, limit_s=0.0)
            except StorageError as error:
                if not self._waits.is_set():
                    self._waits.set()
                    log.warning("waiting for another process that downloads %s", location)
                current = _count_bytes(growing)
                if current != num_bytes:
                    num_bytes, deadline = current, time.monotonic() + _LOCK_LIMIT_S
                if time.monotonic() > deadline or self.stop.is_set():
                    raise StorageError(f"another process has not finished {location}: {error}") from error
                time.sleep(_POLL_S)

    def _complete(self, file: FileIO, name: str, expected: FileInfo) -> None:
        """Download the bytes that ``file`` lacks. Raise DamagedObjectError if it is not ``expected`` then."""
        size = file.seek(0, os.SEEK_END)
        # The first bytes may be those of another version, and a server may ignore where the range starts.
        starts = [size, 0] if 0 < size <= expected.num_bytes else [0]
        for start in starts:
            file.truncate(start)
            try:
                self._append(file, name, file.seek(start), expected.num_bytes)
            except DamagedObjectError:
                if start == 0:
                    raise
            else:
                if _is_intact(file, expected):
                    return
        actual = checksum(_find_path(file))
        raise DamagedObjectError(
            f"{self._store.locate(name)} is damaged: its checksum is {actual.checksum} instead of "
            f"{expected.checksum or 'any'}, with {actual.num_bytes} of {expected.num_bytes} bytes. Upload "
            "the dataset again. If it was replaced meanwhile, start again."
        )

    def _append(self, file: FileIO, name: str, first_byte: int, end: int) -> None:
        for chunk in self._store.read(name, first_byte, end - first_byte):
            if self.stop.is_set():
                raise StorageError(f"the download of {self._store.locate(name)} was stopped")
            data = memoryview(chunk)
            while data:
                data = data[file.write(data) or 0 :]


def parts_folder(folder: Path) -> Path:
    """Return the folder for unfinished files of ``folder``. There, no name is that of an object."""
    return folder.with_name(f"{folder.name}.parts")


def _count_bytes(path: Path) -> int:
    paths = [path, *(Path(parent, name) for parent, _, names in os.walk(path) for name in names)]
    num_bytes = 0
    for file in paths:
        with suppress(OSError):  # It was removed or renamed meanwhile.
            num_bytes += file.stat().st_size
    return num_bytes


def _find_path(file: FileIO) -> Path:
    """Return a path of an open file that stays valid if the file is renamed."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def _is_intact(file: FileIO, expected: FileInfo) -> bool:
    if os.fstat(file.fileno()).st_size != expected.num_bytes:
        return False
    return not expected.checksum or checksum(_find_path(file)) == expected


@final
class DatasetMirror:
    """Local copy of a dataset in an object store. It begins with the manifest, and files are added on demand.

    Another content of the address has another folder. Raises StorageError if there is no dataset.
    """

    def __init__(self, address: str) -> None:
        if hide_query(address) != address:
            raise ConfigError("a dataset has many objects, so its address cannot be a signed URL; use s3://")
        self._store = open_store(address)
        try:
            content = self._store.read_small(MANIFEST)
        except MissingObjectError:
            raise StorageError(
                f"{self._store.locate()} is not a partitioned dataset: it has no {MANIFEST}; write one with "
                f"`dglx partition DATA --out {self._store.locate()}`"
            ) from None
        self.location = self._store.locate()
        self.folder = cache_folder(self._store) / f"{zlib.crc32(content):08x}"
        target = self.folder / MANIFEST
        with name_write_failures(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not target.exists() or read_small_file(target) != content:
                with replace_atomically(target) as partial:
                    partial.write_bytes(content)

    def fetch(self, files: Mapping[str, FileInfo]) -> None:
        """Download files of the manifest that are missing. Raises the errors of :func:`fetch_files`."""
        fetch_files(self._store, self.folder, files)


def is_dataset(location: str | os.PathLike[str]) -> bool:
    """Return whether a folder or an address has a manifest. Raise StorageError if a store cannot be read."""
    store = find_store(location)
    return (Path(location).expanduser() / MANIFEST).is_file() if store is None else _has_manifest(store)


def _has_manifest(store: ObjectStore) -> bool:
    if store.locate() != store.address:  # A signed URL is that of one object.
        return False
    try:
        store.read_small(MANIFEST)
    except MissingObjectError:
        return False
    return True


def fetch_objects(location: str, is_wanted: Callable[[str], bool] | None = None) -> str:
    """Return the path of a local copy of the object, or of all objects, at an address.

    Other locations are returned unchanged. Objects without the approval of ``is_wanted`` are left out.
    Without it, addresses of datasets are returned unchanged, too. Raises MissingObjectError if there is no
    object, and StorageError if one changes meanwhile.
    """
    store = find_store(location)
    if store is None:
        return location
    if is_wanted is None and _has_manifest(store):
        return location
    objects = {name: info for name, info in store.list().items() if is_wanted is None or is_wanted(name)}
    if "" in objects:
        objects = {"": objects[""]}
    if not objects:
        raise MissingObjectError(f"there is no object at or below {store.locate()}; check the address")
    _check_names(store, objects)
    versions = {name: [info.num_bytes, info.version] for name, info in sorted(objects.items())}
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]
    cache = cache_folder(store)
    copy = cache / f"copy-{digest}"
    if not copy.exists():
        with name_write_failures(copy):
            lock = _Download(store, copy).lock(cache / "copy.lock", cache, store.locate())
        try:
            if not copy.exists():
                _copy_objects(store, copy, objects)
        finally:
            os.close(lock)
    return str(copy / _base_name(store))


def _check_names(store: ObjectStore, names: Collection[str]) -> None:
    """Raise StorageError if a name is no path for a local copy."""
    for name in names:
        if name and (os.path.normpath(name) != name or name.split("/")[0] in ("", ".", "..")):
            raise StorageError(f"{store.locate(name)} has a name that is no path; rename it")
        parents = {str(parent) for parent in PurePosixPath(name).parents}
        if not parents.isdisjoint(names):
            parent = max(parents & set(names), key=len)
            raise StorageError(
                f"{store.locate(parent)} is an object and the folder of {store.locate(name)}; rename it"
            )


def _copy_objects(store: ObjectStore, copy: Path, objects: Mapping[str, ObjectInfo]) -> None:
    """Download ``objects`` to a folder beside ``copy``, and rename it if no object has changed meanwhile."""
    work = copy.with_name(f"{copy.name}.new")
    target = work / _base_name(store)
    files = {name: FileInfo(num_bytes=info.num_bytes, checksum="") for name, info in objects.items()}
    fetch_files(store, target, files)

    current = store.list()
    for name, info in objects.items():
        if current.get(name) != info:
            shutil.rmtree(work, ignore_errors=True)
            raise StorageError(f"{store.locate(name)} was changed while it was read; repeat the command")
    with name_write_failures(copy):
        shutil.rmtree(parts_folder(target), ignore_errors=True)
        work.rename(copy)


@contextmanager
def open_output(target: Path) -> Iterator[Path]:
    """Yield the path of a new file, which then replaces the file or the object ``target`` atomically."""
    address = find_address(target)
    if address is None:
        with name_write_failures(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(target.absolute()) as partial:
                yield partial
        return
    with tempfile.TemporaryDirectory(prefix="dglx-output-") as folder:
        path = Path(folder, target.name)
        yield path
        open_store(address).put("", path)


@contextmanager
def stage_dataset(
    location: str | os.PathLike[str], overwrite: bool, *, format: str = "dglx", is_first: bool = True
) -> Iterator[Path]:
    """Yield the folder in which to write a dataset for ``location``, and upload it if that is an address.

    A folder is yielded unchanged. Readers see no new dataset before all of its objects are there, because the
    manifest is uploaded last. With ``overwrite``, the old manifest is deleted first.

    Args:
        is_first: Whether this process checks and uploads. Others of the machine only get the folder.

    Raises:
        ConfigError: an address cannot take the ``format``.
        StorageError: the address holds objects that must not be replaced, a command of this machine writes to
            it, or the store cannot be written. The last case is checked before the folder is yielded, too.
            Commands on other machines are not noticed, so two of them must not write to one address.
    """
    store = find_store(location)
    if store is None:
        yield Path(location)
        return
    if format != "dglx":
        raise ConfigError(
            f"format={format!r} is written to a folder, but {store.locate()} is an address; name a folder"
        )

    upload = cache_folder(store) / "upload"
    target = upload / _base_name(store)
    if not is_first:
        yield target
        return

    existing = _list_replaceable(store, overwrite)
    lock = lock_exclusive(upload / "lock", limit_s=0.0)
    try:
        shutil.rmtree(target, ignore_errors=True)
        _check_writable(store, upload / "probe")
        yield target
        try:
            _upload(store, target, existing)
        except StorageError as error:
            raise StorageError(
                f"{error} The finished dataset is in {target}: copy it to {store.locate()}, "
                f"{MANIFEST} last, before you repeat the command."
            ) from error
        shutil.rmtree(target)
    finally:
        os.close(lock)


def _base_name(store: ObjectStore) -> str:
    return store.locate().rstrip("/").rpartition("/")[2]


def _list_replaceable(store: ObjectStore, overwrite: bool) -> Set[str]:
    """Return the names of the objects that a dataset replaces. Raise StorageError if it must not."""
    existing = store.list().keys() - {_PROBE}  # A killed command may have left it.
    if existing and not overwrite:
        raise StorageError(f"{store.locate()} exists already; choose another address, or give --overwrite")
    written = _list_written(store, existing)
    foreign = min(existing - written, default=None)
    if foreign is not None:
        raise StorageError(
            f"{store.locate(foreign)} is not part of a dataset, so {store.locate()} is not overwritten; "
            "choose another address, or delete the objects yourself"
        )
    return existing


def _list_written(store: ObjectStore, existing: Set[str]) -> Set[str]:
    """Return the names of a dataset: those in its manifest, or else those that a killed command can leave."""
    if MANIFEST not in existing:
        return {name for name in existing if _WRITTEN_NAME.fullmatch(name)}
    try:
        return {MANIFEST, *json.loads(store.read_small(MANIFEST))["files"]}
    except (ValueError, LookupError, TypeError):  # It is another kind of manifest.
        return set()


def _check_writable(store: ObjectStore, probe: Path) -> None:
    """Write and delete an object. Partitioning may take hours, so a missing permission is found before."""
    with name_write_failures(probe.parent):
        probe.touch()
    store.put(_PROBE, probe)
    store.delete(_PROBE)


def _upload(store: ObjectStore, folder: Path, existing: Set[str]) -> None:
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    # The cache can be made again, and belongs to one machine.
    names = [name for name in paths if not name.startswith((f"{CACHE}/", MANIFEST))]
    if MANIFEST in existing:
        store.delete(MANIFEST)
    num_bytes = sum(paths[name].stat().st_size for name in names)
    is_large = num_bytes > _PROGRESS_BYTES
    with (
        progress(f"Uploading {store.locate()}", num_bytes, enabled=is_large) as advance,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
    ):

        def put(name: str) -> None:
            store.put(name, paths[name])
            advance(paths[name].stat().st_size)

        list(pool.map(put, names))  # The list raises the errors of the threads.

    # A kill before the manifest leaves only names that the next command may replace.
    for name in existing - paths.keys():
        store.delete(name)
    store.put(MANIFEST, paths[MANIFEST])
