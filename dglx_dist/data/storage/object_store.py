"""Objects below an address such as ``s3://bucket/name``: S3 through boto3, other stores through fsspec.

Nothing here keeps a local copy; see :mod:`dglx_dist.data.storage.remote`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, final
from urllib.parse import urlsplit

from dglx_dist.errors import ConfigError, DglxError, StorageError
from dglx_dist.options import find_address, hide_query

MAX_TRIES = 5
"""Attempts without progress after which an object counts as unreachable."""
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
PAUSE_S = 1.0
"""First wait before another attempt. It doubles with each attempt."""
_CHUNK_BYTES = 1 << 20
_FSSPEC_CHUNK_BYTES = 1 << 23
_MIN_BYTES_PER_S = 100_000
"""Slowest transfer that is still waited for where only the time of a whole call can be limited."""
_MAX_SMALL_BYTES = 1 << 28
_FORBIDDEN = ("AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403")
_EXPIRED = ("ExpiredToken", "InvalidToken", "RequestExpired", "RequestTimeTooSkewed", "401")
_MISSING = ("NoSuchKey", "NotFound", "404")
_BUSY = ("SlowDown", "RequestTimeout", "Throttling")
T = TypeVar("T")
log = logging.getLogger(__name__)


class MissingObjectError(StorageError):
    """An object does not exist."""


class DamagedObjectError(StorageError):
    """The bytes of an object differ from the checksum of its store."""


class _TransientError(Exception):
    """A failure that may end by itself. Its text has no address."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """Size and version of an object. The version changes with the content."""

    num_bytes: int
    version: str


class ObjectStore(ABC):
    """Objects below one address. Names are relative to it, and "" is the object at the address itself.

    All methods raise StorageError. The message names the object, but never credentials or a query.
    """

    _repeats_puts = False
    """Whether :meth:`_put` repeats failed requests itself, up to MAX_TRIES times."""

    def __init__(self, address: str) -> None:
        self.address = address

    def locate(self, name: str = "") -> str:
        """Return the address of an object for messages, without the query of a signed URL."""
        base = hide_query(self.address)
        return f"{base.rstrip('/')}/{name}" if name else base

    def list(self) -> dict[str, ObjectInfo]:
        """Return all objects below the address by name. Empty: there is none."""
        return self._repeat("", self._list)

    def read(self, name: str, first_byte: int, num_bytes: int) -> Generator[bytes, None, None]:
        """Yield ``num_bytes`` bytes from ``first_byte`` on, in chunks. Broken connections are opened again.

        Raises MissingObjectError, DamagedObjectError if the store sends more bytes than that, and
        StorageError if no byte arrives in several attempts, or the object is too short.
        """
        end = first_byte + num_bytes
        num_tries = 0
        while first_byte < end:
            position = first_byte
            try:
                for chunk in self._iterate(name, first_byte, end):
                    first_byte += len(chunk)
                    if first_byte > end:
                        raise DamagedObjectError(
                            f"the store sent more bytes of {self.locate(name)} than were requested; it must "
                            "support range requests"
                        )
                    yield chunk
                if first_byte < end:
                    raise _TransientError(f"the store ended the object at byte {first_byte} of {end}")
            except _TransientError as problem:
                num_tries = 1 if first_byte > position else num_tries + 1
                self._pause(name, num_tries, problem)

    def read_small(self, name: str) -> bytes:
        """Return the content of a small object, such as JSON."""
        return self._repeat(name, lambda: self._read_all(name))

    def put(self, name: str, path: Path) -> None:
        """Upload a file. Readers see the old object or the complete new one."""
        num_tries = MAX_TRIES - 1 if self._repeats_puts else 0
        self._repeat(name, lambda: self._put(name, path), num_tries)

    def delete(self, name: str) -> None:
        """Delete an object. It may be missing."""
        self._repeat(name, lambda: self._delete(name))

    def _read_all(self, name: str) -> bytes:
        content = bytearray()
        for chunk in self._iterate(name, 0, None):
            content += chunk
            if len(content) > _MAX_SMALL_BYTES:
                raise StorageError(f"{self.locate(name)} is too large; check that it is the right object")
        return bytes(content)

    def _iterate(self, name: str, first_byte: int, end: int | None) -> Iterator[bytes]:
        with closing(self._read(name, first_byte, end)) as chunks:
            while chunk := self._call(name, lambda: next(chunks, b"")):
                yield chunk

    def _call(self, name: str, function: Callable[[], T]) -> T:
        """Return the result of ``function``. Errors of the library become StorageError or _TransientError."""
        try:
            return function()
        except (DglxError, _TransientError):
            raise
        except Exception as error:  # noqa: BLE001 - each library has errors of its own
            raise self._explain(name, error) from None

    def _repeat(self, name: str, function: Callable[[], T], num_tries: int = 0) -> T:
        while True:
            try:
                return self._call(name, function)
            except _TransientError as problem:
                num_tries += 1
                self._pause(name, num_tries, problem)

    def _pause(self, name: str, num_tries: int, problem: Exception) -> None:
        """Wait before the next attempt. Raise StorageError if there were too many."""
        if num_tries >= MAX_TRIES:
            raise StorageError(
                f"{self.locate(name)} cannot be reached ({problem}, {num_tries} attempts); check the network "
                "and the endpoint of the store, then repeat the command. It resumes where it stopped."
            ) from None
        log.info("%s: %s; trying again", self.locate(name), problem)
        time.sleep(PAUSE_S * 2 ** (num_tries - 1))

    def _explain_missing(self, name: str) -> MissingObjectError:
        remedy = "check the address, or upload it again"
        return MissingObjectError(f"there is no object {self.locate(name)}; {remedy}")

    def _explain_forbidden(self, name: str, reason: str) -> StorageError:
        remedy = "log in to the store, or ask its owner for access"
        return StorageError(f"no permission for {self.locate(name)} ({reason}); {remedy}")

    @abstractmethod
    def _explain(self, name: str, error: Exception) -> Exception:
        """Return the StorageError or _TransientError to raise in place of ``error`` of the library."""

    @abstractmethod
    def _list(self) -> dict[str, ObjectInfo]: ...

    @abstractmethod
    def _read(self, name: str, first_byte: int, end: int | None) -> Generator[bytes, None, None]:
        """Yield the bytes [``first_byte``, ``end``) of one connection. None: to the end of the object."""

    @abstractmethod
    def _put(self, name: str, path: Path) -> None: ...

    @abstractmethod
    def _delete(self, name: str) -> None: ...


@final
class S3Store(ObjectStore):
    """Objects in a bucket of S3 or of a compatible service.

    boto3 finds credentials, region and endpoint as the AWS command line does (``AWS_PROFILE``,
    ``AWS_ENDPOINT_URL``).
    """

    _repeats_puts = True

    def __init__(self, address: str) -> None:
        super().__init__(address)
        parts = urlsplit(address, allow_fragments=False)
        self._bucket = parts.netloc
        # A question mark is a valid letter of a key.
        self._key = address.removeprefix(f"{parts.scheme}://{self._bucket}").strip("/")
        if not self._bucket:
            raise ConfigError(f"{address} names no bucket; write s3://BUCKET/NAME")

    def _find_key(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key and name else self._key or name

    @cached_property
    def _client(self) -> Any:
        return self._make_client(max_tries=1)

    @cached_property
    def _upload_client(self) -> Any:
        # A large file has many requests, so a failed one must not repeat the others.
        return self._make_client(MAX_TRIES)

    def _make_client(self, max_tries: int) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise ConfigError(
                f"{self.address} needs boto3; install it: pip install 'dglx_dist[cloud]'"
            ) from None
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": max_tries},
            max_pool_connections=32,
        )
        return boto3.Session().client("s3", config=config)

    def _explain(self, name: str, error: Exception) -> Exception:
        from boto3.exceptions import S3UploadFailedError
        from botocore import exceptions as boto

        if isinstance(error, S3UploadFailedError) and isinstance(error.__context__, Exception):
            error = error.__context__  # It has the code of the service.
        kind = type(error).__name__
        if isinstance(error, boto.ClientError):
            code = error.response.get("Error", {}).get("Code", "")
            if code == "NoSuchBucket":
                return StorageError(
                    f"there is no bucket {self._bucket!r} for {self.locate(name)}; create it, or correct the "
                    "address"
                )
            if code in _MISSING:
                return self._explain_missing(name)
            if code in _FORBIDDEN + _EXPIRED:
                return self._explain_forbidden(name, code)
            if code == "InvalidRange":
                return StorageError(f"{self.locate(name)} is too short; upload it again")
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status >= 500 or code in _BUSY:
                return _TransientError(code)
            return StorageError(f"{self.locate(name)} cannot be used ({code}); check the address")
        if isinstance(error, (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError)):
            return _TransientError(f"{kind} at {self._client.meta.endpoint_url}")
        if isinstance(error, boto.FlexibleChecksumError):
            return DamagedObjectError(
                f"{self.locate(name)} differs from the checksum in its store; repeat the command, or upload "
                "it again"
            )
        credentials = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)
        if isinstance(error, (*credentials, boto.CredentialRetrievalError, boto.TokenRetrievalError)):
            return self._explain_forbidden(name, kind)
        return StorageError(
            f"{self.locate(name)} cannot be used ({kind}); check the address and the endpoint"
        )

    def _list(self) -> dict[str, ObjectInfo]:
        infos = {}
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._key):
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self._key)
                # The prefix also matches name-2/, beside name/.
                if entry["Key"].endswith("/") or (self._key and name and not name.startswith("/")):
                    continue
                # An earlier content that comes back has another time, and gets another local copy.
                version = f"{entry['ETag']} {entry['LastModified']}"
                info = ObjectInfo(num_bytes=entry["Size"], version=version)
                infos[name.removeprefix("/")] = info
        return infos

    def _read(self, name: str, first_byte: int, end: int | None) -> Generator[bytes, None, None]:
        span = {} if end is None else {"Range": f"bytes={first_byte}-{end - 1}"}
        response = self._client.get_object(Bucket=self._bucket, Key=self._find_key(name), **span)
        with closing(response["Body"]) as body:
            yield from body.iter_chunks(_CHUNK_BYTES)

    def _put(self, name: str, path: Path) -> None:
        self._upload_client.upload_file(str(path), self._bucket, self._find_key(name))

    def _delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._find_key(name))


@final
class FsspecStore(ObjectStore):
    """Objects of any implementation of fsspec, such as gcsfs for ``gs://``."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        try:
            from fsspec.core import url_to_fs

            self._files, path = url_to_fs(address)
        except ImportError as error:
            protocol = address.partition(":")[0]
            command = f"pip install 'dglx_dist[cloud]', or the package of {protocol}:// for fsspec"
            raise ConfigError(f"{self.locate()} needs a package ({error}); install it: {command}") from None
        except ValueError:  # Its text may have a signed URL.
            raise ConfigError(
                f"{self.locate()} is no address that fsspec knows; write s3://BUCKET/NAME"
            ) from None
        self._path = path if self.locate() != address else path.rstrip("/")

    def _find_path(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _wait(self, function: Callable[..., T], *arguments: object, num_bytes: int = 0) -> T:
        """Call ``function`` on a thread, because fsspec has no time-outs. The thread may be left behind."""
        limit_s = READ_TIMEOUT_S + num_bytes / _MIN_BYTES_PER_S
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                result.set_exception(error)

        Thread(target=run, name="dglx-store", daemon=True).start()
        try:
            return result.result(limit_s)
        except FutureTimeoutError:
            raise _TransientError(f"no answer in {limit_s:.0f} s") from None

    def _explain(self, name: str, error: Exception) -> Exception:
        status = _find_http_status(error)
        if status in (401, 403):
            return self._explain_forbidden(name, f"status {status}. A signed URL may have expired")
        if status is not None and status not in (404, 410):
            return _TransientError(f"status {status}")
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return self._explain_missing(name)
        if isinstance(error, PermissionError):
            return self._explain_forbidden(name, type(error).__name__)
        # The text of the error may have a signed URL.
        return _TransientError(type(error).__name__)

    def _list(self) -> dict[str, ObjectInfo]:
        return self._wait(self._find_objects)

    def _find_objects(self) -> dict[str, ObjectInfo]:
        try:
            info = self._files.info(self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if _find_http_status(error) not in (None, 404, 410):
                raise
            return {}
        if info["type"] == "file":
            return {"": _make_info(info)}
        entries = self._files.find(self._path, detail=True)
        root = self._files._strip_protocol(self._path).rstrip("/") + "/"
        return {path.removeprefix(root): _make_info(entry) for path, entry in entries.items()}

    def _read(self, name: str, first_byte: int, end: int | None) -> Generator[bytes, None, None]:
        path = self._find_path(name)
        while end is None or first_byte < end:
            last = first_byte + _FSSPEC_CHUNK_BYTES
            last = last if end is None else min(last, end)
            size = last - first_byte
            chunk = self._wait(self._files.cat_file, path, first_byte, last, num_bytes=size)
            yield chunk
            if first_byte == 0 and len(chunk) > size:
                return  # The server has ignored the range and sent the complete object.
            first_byte += len(chunk)
            if len(chunk) < size:
                return

    def _put(self, name: str, path: Path) -> None:
        target = self._find_path(name)
        self._wait(partial(self._files.makedirs, target.rpartition("/")[0], exist_ok=True))
        self._wait(self._files.put_file, str(path), target, num_bytes=path.stat().st_size)

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._wait(self._files.rm_file, self._find_path(name))


def _find_http_status(error: BaseException) -> int | None:
    """Return the status of an answer. For fsspec, every refused answer means that there is no file."""
    status = getattr(error, "status", getattr(error.__cause__, "status", None))
    return status if isinstance(status, int) else None


def _make_info(entry: dict[str, Any]) -> ObjectInfo:
    # Each implementation names the time and the checksum differently, so all values are the version.
    text = repr(sorted((name, str(value)) for name, value in entry.items()))
    return ObjectInfo(num_bytes=entry["size"], version=hashlib.sha256(text.encode()).hexdigest())


def open_store(address: str) -> ObjectStore:
    """Return the store of an address. Raise ConfigError if a package is missing or the address is wrong."""
    parts = urlsplit(address)
    is_s3 = parts.scheme in ("s3", "s3a")
    # In abfs://container@account.dfs.core.windows.net/name, the name before @ is no secret.
    if parts.password is not None or ("@" in parts.netloc and (is_s3 or parts.scheme.startswith("http"))):
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if is_s3 else "log in to the store"
        raise ConfigError(
            f"the address {parts.scheme}://...{parts.path} has credentials; leave them out, and {remedy}"
        )
    return S3Store(address) if is_s3 else FsspecStore(address)


def find_store(location: str | os.PathLike[str]) -> ObjectStore | None:
    """Return the store if ``location`` is an address, or None. Raises the errors of :func:`open_store`."""
    address = find_address(location)
    return None if address is None else open_store(address)
