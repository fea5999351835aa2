"""Local copies of tables and datasets in an object store, and uploads of finished datasets.

Copies are in the folder ``DGLX_DATASET_CACHE``. A file under its own name is complete. During the download it
is ``NAME.part``. A lock on it keeps other processes of the machine from downloading it, too.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
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
    ObjectStore,
    open_store,
)
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.internals.cache_folder import find_dataset_cache
from dglx_dist.options import find_address
from dglx_dist.progress import progress

PART_SUFFIX = ".part"
_NUM_THREADS = 8
_LOCK_LIMIT_S = 3600.0
_PROGRESS_BYTES = 1 << 28
_DATASET_NAME = re.compile(r"manifest\.json|part\d+/.+")


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
        StorageError: an object is missing, differs from its checksum, or cannot be read, or the folder
            cannot be written.
    """
    missing = [name for name in files if not (folder / name).exists()]
    num_bytes = sum(files[name].num_bytes for name in missing)
    is_large = num_bytes > _PROGRESS_BYTES
    with (
        name_write_failures(folder),
        progress(f"Fetching {store.locate()}", num_bytes, enabled=is_large) as advance,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
    ):
        tasks = [pool.submit(_fetch_file, store, name, folder / name, files[name]) for name in missing]
        try:
            for name, task in zip(missing, tasks, strict=True):
                task.result()
                advance(files[name].num_bytes)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _fetch_file(store: ObjectStore, name: str, target: Path, expected: FileInfo) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + PART_SUFFIX)
    try:
        lock = lock_exclusive(part, _LOCK_LIMIT_S)
    except StorageError as error:
        raise StorageError(f"another process has not finished {store.locate(name)}: {error}") from error

    with os.fdopen(lock, "r+b", buffering=0) as file:
        if target.exists():  # Another process has downloaded it meanwhile.
            part.unlink(missing_ok=True)
            return
        size = file.seek(0, os.SEEK_END)
        if size > expected.num_bytes:
            size = file.truncate(0)
        try:
            _append(store, name, file.write, file.seek(size), expected)
        except DamagedObjectError:
            part.unlink()
            raise
        if size and not _is_intact(part, expected):
            # The first bytes may be those of another version of the object.
            file.truncate(0)
            _append(store, name, file.write, file.seek(0), expected)
        if not _is_intact(part, expected):
            actual = checksum(part).checksum
            part.unlink()
            raise StorageError(
                f"{store.locate(name)} is damaged: its checksum is {actual} instead of {expected.checksum}; "
                "upload the dataset again. If it was replaced meanwhile, start again."
            )
        os.fsync(file.fileno())
        part.replace(target)


def _append(
    store: ObjectStore,
    name: str,
    write: Callable[[memoryview], int | None],
    first_byte: int,
    expected: FileInfo,
) -> None:
    for chunk in store.read(name, first_byte, expected.num_bytes - first_byte):
        data = memoryview(chunk)
        while data:
            data = data[write(data) or 0 :]


def _is_intact(part: Path, expected: FileInfo) -> bool:
    return not expected.checksum or checksum(part) == expected


@final
class DatasetMirror:
    """Local copy of a dataset in an object store. It begins with the manifest, and files are added on demand.

    Another content of the address has another folder. Raises StorageError if there is no dataset.
    """

    def __init__(self, address: str) -> None:
        if "?" in address and address.startswith("http"):
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
    address = find_address(location)
    if address is None:
        return (Path(location).expanduser() / MANIFEST).is_file()
    return _has_manifest(open_store(address))


def _has_manifest(store: ObjectStore) -> bool:
    if store.locate() != store.address:  # A signed URL is that of one object.
        return False
    try:
        store.read_small(MANIFEST)
    except MissingObjectError:
        return False
    return True


def fetch_objects(location: str, is_wanted: Callable[[str], bool] = lambda _name: True) -> str:
    """Return the path of a local copy of the object, or of all objects, at an address.

    Other locations, and addresses of datasets, are returned unchanged. Objects without the approval of
    ``is_wanted`` are left out. Raises MissingObjectError if there is no object, and StorageError if one
    changes meanwhile.
    """
    address = find_address(location)
    if address is None:
        return location
    store = open_store(address)
    if _has_manifest(store):
        return location
    objects = {name: info for name, info in store.list().items() if is_wanted(name)}
    if "" in objects:
        objects = {"": objects[""]}
    if not objects:
        raise MissingObjectError(f"there is no object at or below {store.locate()}; check the address")
    for name in objects:
        if name and (os.path.normpath(name) != name or name.startswith(("/", ".."))):
            raise StorageError(f"{store.locate(name)} has a name that is no path; rename it")

    versions = {name: [info.num_bytes, info.version] for name, info in sorted(objects.items())}
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]
    target = cache_folder(store) / digest / _base_name(store)
    fetch_files(
        store, target, {name: FileInfo(num_bytes=objects[name].num_bytes, checksum="") for name in objects}
    )

    current = store.list()
    for name, info in objects.items():
        if current.get(name) != info:
            shutil.rmtree(target.parent, ignore_errors=True)
            raise StorageError(f"{store.locate(name)} was changed while it was read; repeat the command")
    return str(target)


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
        StorageError: the address holds objects that must not be replaced, another command writes to it, or
            the store cannot be written. The last case is checked before the folder is yielded, too.
    """
    address = find_address(location)
    if address is None:
        yield Path(location)
        return
    if format != "dglx":
        raise ConfigError(
            f"format={format!r} is written to a folder, but {address} is an address; name a folder"
        )

    store = open_store(address)
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


def _list_replaceable(store: ObjectStore, overwrite: bool) -> Collection[str]:
    """Return the names of the objects that a dataset replaces. Raise StorageError if it must not."""
    existing = store.list()
    foreign = [name for name in existing if not _DATASET_NAME.fullmatch(name)]
    if existing and not overwrite:
        raise StorageError(f"{store.locate()} exists already; choose another address, or give --overwrite")
    if foreign:
        raise StorageError(
            f"{store.locate(foreign[0])} is not part of a dataset, so {store.locate()} is not overwritten; "
            "choose another address, or delete the objects yourself"
        )
    return existing


def _check_writable(store: ObjectStore, probe: Path) -> None:
    """Write and delete an object. Partitioning may take hours, so a missing permission is found before."""
    with name_write_failures(probe.parent):
        probe.touch()
    store.put("part0/probe", probe)
    store.delete("part0/probe")


def _upload(store: ObjectStore, folder: Path, existing: Collection[str]) -> None:
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

    store.put(MANIFEST, paths[MANIFEST])
    for name in set(existing) - paths.keys():
        store.delete(name)
