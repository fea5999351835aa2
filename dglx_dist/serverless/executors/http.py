"""Executor ``http``: workers behind a URL; each task is one POST request."""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, final
from urllib.parse import SplitResult, urlsplit

from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.serverless.executors.base import (
    ExecutorContext,
    PoolExecutor,
    WorkerHandle,
    read_memory_mb,
)
from dglx_dist.serverless.json_fields import Fields, Within, printable
from dglx_dist.serverless.worker import MAX_ANSWER_BYTES, WorkerAnswer
from dglx_dist.serverless.worker_process import Fault

_TIMEOUT_S, _MAX_TIMEOUT_S = 60.0, 3600.0
_SHOWN = 500
_MAX_HEADERS, _LONGEST = 32, 4096
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")


@final
class HttpExecutor(PoolExecutor):
    """Posts events to one URL over persistent connections, one per worker.

    The service answers 200 with a ``WorkerAnswer``, or 202 or 204 if it only accepts the event; then nothing
    is billed here. Any other answer is a lost attempt. Certificates are verified. An event contains the
    workers' secret, so plain http is limited to this machine. Workers that the service has started continue
    after :meth:`close` until they are rejected.

    Options:
        url: ``https://HOST[:PORT]/PATH``.
        headers: Additional headers by name, such as an API key.
        memory_mb: For the bill; 192 by default.
        timeout_s: How long an answer may take; 60 by default.
        insecure: Whether plain http to other machines is allowed.
        certificates: PEM file of trusted certificates; default: the system's.
    """

    option_names = ("url", "headers", "memory_mb", "timeout_s", "insecure", "certificates")

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        fields = Fields(options, "executor 'http'", hidden=True)
        memory_mb = read_memory_mb(fields)
        target = _read_target(fields)
        fields.end()
        super().__init__(lambda: _Connection(target), context.notice, memory_mb=memory_mb)


@final
@dataclass(frozen=True, kw_only=True)
class _Target:
    url: SplitResult
    headers: Mapping[str, str]
    timeout_s: float
    trust: ssl.SSLContext | None
    """None: plain http."""

    def connect(self) -> http.client.HTTPConnection:
        host = self.url.hostname or ""
        if self.trust is None:
            return http.client.HTTPConnection(host, self.url.port, timeout=self.timeout_s)
        return http.client.HTTPSConnection(host, self.url.port, timeout=self.timeout_s, context=self.trust)

    @property
    def path(self) -> str:
        return (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")


@final
class _Connection(WorkerHandle):
    def __init__(self, target: _Target) -> None:
        self._target = target
        self._connection = target.connect()
        self._used = False
        self._stopped = threading.Event()

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer | None:
        try:
            status, body = self._post(event)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            # Without the query, which may contain a key.
            raise PeerError(
                f"POST to {self._target.url.netloc}{self._target.url.path} failed: "
                f"{type(error).__name__}: {error}; check the service and the option 'url'"
            ) from error
        if status in (202, 204):
            return None
        if status != 200:
            shown = printable(body.decode(errors="replace"), _SHOWN)
            raise RemoteError(f"{self._target.url.netloc} answered {status}: {shown}")
        return WorkerAnswer.from_json(body)

    def stop(self) -> None:
        self._stopped.set()
        waiting = self._connection.sock
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)  # unblocks a pending read, which close() would not

    def end(self) -> None:
        self._connection.close()

    def _post(self, event: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **self._target.headers}
        try:
            return self._exchange(event, headers)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            # The server may have closed a persistent connection meanwhile. Running a task twice is harmless.
            if not self._used or self._stopped.is_set():
                raise
            self._connection.close()
            return self._exchange(event, headers)

    def _exchange(self, event: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        self._connection.request("POST", self._target.path, event, dict(headers))
        response = self._connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES + 1)
        self._used = True
        if len(body) > MAX_ANSWER_BYTES:
            self._connection.close()
        return response.status, body


def _read_target(fields: Fields) -> _Target:
    url = _read_url(fields)
    insecure = fields.maybe("insecure", fields.flag, False)
    if url.scheme == "http" and not insecure and not _is_local(url.hostname or ""):
        raise ConfigError(
            f"executor 'http' would send the workers' secret to {url.hostname} unencrypted; use "
            "https://, or insecure=true on a trusted network"
        )
    certificates = fields.maybe("certificates", lambda name: fields.text(name, _LONGEST), None)
    return _Target(
        url=url,
        headers=fields.maybe("headers", functools.partial(_read_headers, fields), {}),
        timeout_s=fields.maybe(
            "timeout_s", lambda name: fields.number(name, 0.01, _MAX_TIMEOUT_S), _TIMEOUT_S
        ),
        trust=None if url.scheme == "http" else _trust(certificates),
    )


def _read_url(fields: Fields) -> SplitResult:
    text = fields.text("url", _LONGEST)
    try:
        url = urlsplit(text)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # unbalanced brackets, or a port above 65535
        is_valid = False
    if not is_valid or not text.isascii() or " " in text:
        raise ConfigError("executor 'http' has an invalid 'url'; write https://HOST/PATH in ASCII")
    if url.username is not None:
        raise ConfigError(
            "executor 'http' does not send the user in its 'url'; give the header Authorization"
        )
    return url


def _read_headers(fields: Fields, name: str) -> dict[str, str]:
    read: dict[str, str] = fields.mapping(name, _MAX_HEADERS, Annotated[str, Within(1, _LONGEST)])
    for name, value in read.items():
        if not _HEADER.fullmatch(name) or not value.isascii():
            raise ConfigError(
                f"executor 'http' cannot send the header {name[:80]!r}; names are of A-Z a-z 0-9 and "
                "!#$%&'*+.^_`|~-, values of ASCII"
            )
    return read


def _trust(certificates: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"executor 'http' cannot read certificates={certificates!r}: {error}; give a PEM file"
        ) from None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
