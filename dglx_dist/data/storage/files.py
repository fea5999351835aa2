"""Atomic files and folders, and locks."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dglx_dist.errors import DglxError, StorageError
from dglx_dist.memory import format_bytes

PARTIAL_SUFFIX = ".partial"
"""Suffix of files and folders that are being written."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_ABANDONED_AFTER_S = 86400.0
"""Age at which every partial folder counts as abandoned."""
_MAKER = re.compile(rf"\.(?P<host>[^./]+)-(?P<process>\d+)-[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}$")


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` for the caller to fill and rename.

    If the caller does not rename the folder, it is removed. Abandoned partial folders of the same target are
    removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_of(target)
    folder = partial_name(target)
    folder.mkdir()

    try:
        yield folder
    finally:
        # Other ranks may still write to the folder, so it gets a new name before it is removed.
        removed_folder = partial_name(target)
        with suppress(OSError):  # The caller has renamed it.
            folder.rename(removed_folder)
        shutil.rmtree(removed_folder, ignore_errors=True)


@contextmanager
def replace_atomically(target: Path) -> Iterator[Path]:
    """Yield the path of a new file beside ``target``, and then replace ``target`` by it.

    The new file is synchronised to disk first. If an error occurs, ``target`` stays unchanged.
    """
    partial = partial_name(target)
    try:
        yield partial
        synchronise(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_small_file(path: Path, max_bytes: int = 1 << 28) -> bytes:
    """Return the content of a small file, such as JSON.

    Devices and pipes may never end, and parsed values take many times the memory of their text. Raises
    OSError if ``path`` is not a regular file, or has more than ``max_bytes`` bytes.
    """
    # Opening a pipe would wait for a writer without O_NONBLOCK.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {format_bytes(max_bytes)}", str(path))
        # read(max_bytes) would allocate a buffer of that size first.
        return file.read(status.st_size)


def remove_abandoned_of(target: Path) -> None:
    """Remove the files that killed processes left while they wrote or discarded ``target``."""
    for path in target.parent.iterdir():
        is_of_target = path.name.startswith(target.name) and _MAKER.match(path.name, len(target.name))
        if is_of_target and _is_abandoned(path):
            _remove(path)


def remove_abandoned(folder: Path, *, below: bool = True) -> None:
    """Remove the partial files and folders of killed processes. With ``below``, also those in subfolders.

    A partial file of this machine is abandoned if its process has ended. A partial file of another machine is
    abandoned if it is a day old. Files that cannot be removed are kept.
    """
    # os.walk tolerates other ranks and runs that make and remove folders here at the same time.
    for parent, folder_names, file_names in os.walk(folder):
        partial_names = [name for name in (*folder_names, *file_names) if name.endswith(PARTIAL_SUFFIX)]
        for name in partial_names:
            if name in folder_names:
                folder_names.remove(name)  # os.walk does not enter the folder.
            if _is_abandoned(Path(parent, name)):
                _remove(Path(parent, name))
        if not below:
            return


def partial_name(target: Path) -> Path:
    """Return a name beside ``target`` for a partial file or folder of this process."""
    maker = f"{_get_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f"{target.name}.{maker}{PARTIAL_SUFFIX}")


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        with suppress(OSError):
            partial.unlink()


def _is_abandoned(partial: Path) -> bool:
    maker = _MAKER.search(partial.name)
    if maker is None:
        return False
    try:
        age_s = time.time() - partial.stat().st_mtime
    except OSError:
        return False  # Another rank has just removed it.

    if age_s > _ABANDONED_AFTER_S:
        return True
    is_of_this_machine = maker["host"] == _get_host()
    return is_of_this_machine and not psutil.pid_exists(int(maker["process"]))


def _get_host() -> str:
    # A dot separates the host from the folder's name, so the host has none. Containers may share a host name
    # but have their own process ids, so the id of the pid namespace is included.
    host = os.uname().nodename.replace(".", "_")
    return f"{host}-{Path('/proc/self/ns/pid').stat().st_ino}"


@contextmanager
def name_write_failures(folder: Path) -> Iterator[None]:
    """Raise StorageError with the name of ``folder`` for any OSError inside, such as a full disk."""
    try:
        yield
    except DglxError:  # Some errors of this package are an OSError, too.
        raise
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error}; choose another place") from error


def publish(folder: Path, target: Path) -> bool:
    """Synchronise ``folder`` to disk and rename it to ``target``. Return False if ``target`` is not empty."""
    _sync_tree(folder)
    try:
        folder.rename(target)
    except OSError:
        if not target.exists():
            raise
        return False

    synchronise(target.parent)
    return True


def publish_or_replace(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``, and remove the old content of ``target``."""
    if not publish(folder, target):
        replace_folder(folder, target)


def check_replaceable(
    folder: Path, overwrite: bool | None, content: str, is_same: Callable[[Path], bool]
) -> None:
    """Raise StorageError unless ``folder`` is absent or empty, or holds ``content`` to overwrite.

    ``content`` is a phrase for messages, and ``is_same`` returns whether a folder holds this content.
    ``overwrite`` is None if the user has no such option.
    """
    if folder.is_symlink():  # The finished folder would replace the link.
        raise StorageError(f"{folder} is a symbolic link; give the folder itself, {folder.resolve()}")
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; choose another folder")
    if not folder.exists() or not any(folder.iterdir()):
        return

    if not overwrite:
        remedy = "remove it yourself" if overwrite is None else "give --overwrite (in Python overwrite=True)"
        raise StorageError(f"{folder} exists already; choose another folder, or {remedy}")
    if not is_same(folder):
        raise StorageError(
            f"{folder} does not hold {content}, so it is not overwritten; choose another "
            "folder, or remove it yourself"
        )


def place_folder(
    partial: Path, folder: Path, overwrite: bool | None, content: str, is_same: Callable[[Path], bool]
) -> None:
    """Rename ``partial`` to ``folder``, and remove the old content if :func:`check_replaceable` allows it."""
    if not publish(partial, folder):
        check_replaceable(folder, overwrite, content, is_same)
        replace_folder(partial, folder)


def replace_folder(folder: Path, target: Path) -> None:
    """Replace ``target`` by ``folder``, then remove the old content.

    The replacement is atomic if the system can exchange two names (Linux). Otherwise the old folder is
    renamed to ``*.partial`` first, and removed at the end.
    """
    _sync_tree(folder)
    if _exchange(folder, target):
        old = folder
    else:
        old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        target.rename(old)
        folder.rename(target)

    synchronise(target.parent)
    shutil.rmtree(old)


def discard(folder: Path) -> None:
    """Remove ``folder``. If the removal is interrupted, the remaining files count as abandoned."""
    partial = partial_name(folder)
    folder.rename(partial)
    shutil.rmtree(partial)


def lock_shared(path: Path, mode: int = 0o777) -> int:
    """Take a shared lock on ``path``, and return a descriptor. Closing it releases the lock.

    The file and its folder are created if they are missing, with the permissions ``mode``. They may only be
    removed under :func:`try_lock`.
    """
    while True:
        path.parent.mkdir(mode, parents=True, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode & 0o666)
        except FileNotFoundError:
            continue  # Another process has just removed the folder.
        except OSError:
            # The file belongs to another user, or the disk is read-only.
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError:
            os.close(lock)
            raise

        # Another process may have removed the file before it was locked.
        if _is_at(lock, path):
            return lock
        os.close(lock)


def lock_exclusive(path: Path, limit_s: float) -> int:
    """Take an exclusive lock on ``path``, and return a descriptor. Closing it releases the lock.

    On a file system without locks, the descriptor has no lock. Raises StorageError if another process holds
    the lock for ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if time.monotonic() > deadline:
                raise StorageError(
                    f"another job uses {path.parent} (it holds {path.name}); wait for it, or "
                    "choose another folder"
                ) from None
            time.sleep(0.2)
        except OSError:
            return lock
        else:
            # Another process may have removed or renamed the file before it was locked.
            if _is_at(lock, path):
                return lock
            os.close(lock)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to lock the existing file ``path`` exclusively, and yield whether it succeeded."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        is_free = False
        with suppress(OSError):  # Another process holds it, or the file system has no locks.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = _is_at(lock, path)
        yield is_free
    finally:
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names, and return whether it succeeded. Python has no function for this system call."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(rename(*names, ctypes.c_uint(_RENAME_EXCHANGE)) == 0)


_MANY_FILES = 100


def _sync_tree(folder: Path) -> None:
    # The empty name stands for the folder itself.
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in (*names, "")]
    # Few files use no threads, because a thread takes 8 MB of address space.
    if len(paths) <= _MANY_FILES:
        for path in paths:
            synchronise(path)
        return

    # A file system commits concurrent requests together, while 3,000 files one by one took a minute.
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(synchronise, paths))  # The list raises the errors of the threads.


def synchronise(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
