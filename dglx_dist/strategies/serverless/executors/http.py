"""Executor ``http``: workers behind a URL; each task is one POST request."""

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias, final
from urllib.parse import SplitResult, urlsplit

from dglx_dist.data.json_fields import Within, printable, read_record
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.strategies.serverless.executors.base import (
    DEFAULT_MEMORY_MB,
    Executor,
    ExecutorContext,
    MemoryMb,
    WorkerHandle,
    names_of,
)
from dglx_dist.strategies.serverless.tasks import Task
from dglx_dist.strategies.serverless.worker import MAX_ANSWER_BYTES, WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import Fault

_LONGEST_ANSWER = 500
"""Maximum length up to which a message shows an unexpected answer."""
_Text: TypeAlias = Annotated[str, Within(1, 4096)]
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")


@final
@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of executor ``http``."""

    url: _Text
    """``https://HOST[:PORT]/PATH``."""
    headers: Annotated[Mapping[str, _Text], Within(0, 32)] | None = None
    """Additional headers by name, such as an API key."""
    memory_mb: MemoryMb = DEFAULT_MEMORY_MB
    """For the bill."""
    timeout_s: Annotated[float, Within(0.01, 3600)] = 60.0
    """How long an answer may take."""
    insecure: bool = False
    """Whether plain http to other machines is allowed."""


@final
class HttpExecutor(Executor):
    """Posts events to one URL over persistent connections, one per worker. Options: :class:`HttpOptions`.

    The service answers 200 with a ``WorkerAnswer``. If it only accepts the event, it answers 202 or 204, and
    nothing is billed here. Any other answer is a lost attempt. Certificates are verified by the system's, or
    by ``SSL_CERT_FILE``. An event contains the workers' secret, so plain http is limited to this machine.
    Workers that the service has started continue after :meth:`close` until they are rejected.
    """

    option_names = names_of(HttpOptions)

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        settings = read_record(HttpOptions, options, "executor 'http'", hidden=True, defaults=True)
        url = _parse_url(settings)
        headers = {} if settings.headers is None else settings.headers
        for name, value in headers.items():
            if not _HEADER.fullmatch(name) or not value.isascii():
                raise ConfigError(
                    f"executor 'http' cannot send the header {name[:80]!r}; names are of A-Z "
                    "a-z 0-9 and !#$%&'*+.^_`|~-, values of ASCII"
                )

        # Certificates are read once, and not for each worker.
        ssl_context = None if url.scheme == "http" else ssl.create_default_context()

        def connect() -> WorkerHandle:
            return _Connection(url, headers, settings.timeout_s, ssl_context)

        super().__init__(connect, context.notice, memory_mb=settings.memory_mb)


@final
class _Connection(WorkerHandle):
    def __init__(
        self,
        url: SplitResult,
        headers: Mapping[str, str],
        timeout_s: float,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self._url = url
        self._path = url.path or "/"
        if url.query:
            self._path += f"?{url.query}"
        self._headers = {"Content-Type": "application/json", **headers}

        assert url.hostname is not None
        self._connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout_s)
        if ssl_context is not None:
            self._connection = http.client.HTTPSConnection(
                url.hostname, url.port, timeout=timeout_s, context=ssl_context
            )
        self._has_answered = False
        self._stopped = threading.Event()

    def invoke(self, task: Task, fault: Fault | None) -> WorkerAnswer | None:
        try:
            status, body = self._post(task.to_event())
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            # The message leaves out the query, because it may contain a key.
            raise PeerError(
                f"POST to {self._url.netloc}{self._url.path} failed: "
                f"{type(error).__name__}: {error}; check the service and the option 'url'"
            ) from error

        if status in (202, 204):
            return None
        if status != 200:
            answer = printable(body.decode(errors="replace"), _LONGEST_ANSWER)
            raise RemoteError(f"{self._url.netloc} answered {status}: {answer}")
        return WorkerAnswer.from_json(body)

    def stop(self) -> None:
        self._stopped.set()
        connected_socket = self._connection.sock
        if connected_socket is not None:
            # A shutdown ends a pending read. Closing the socket would not.
            with contextlib.suppress(OSError):
                connected_socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._connection.close()

    def _post(self, event: bytes) -> tuple[int, bytes]:
        """Post ``event``, and post it again if the server closed the connection since the last answer."""
        try:
            return self._post_once(event)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            # Even if the server has run the task, running it twice is harmless.
            if not self._has_answered or self._stopped.is_set():
                raise
            self._connection.close()
            return self._post_once(event)

    def _post_once(self, event: bytes) -> tuple[int, bytes]:
        """Return the answer's status and body, which has at most one byte more than allowed."""
        self._connection.request("POST", self._path, event, self._headers)
        response = self._connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES + 1)
        self._has_answered = True
        if len(body) > MAX_ANSWER_BYTES:
            # The unread part would be taken for the next answer.
            self._connection.close()
        return response.status, body


def _parse_url(options: HttpOptions) -> SplitResult:
    """Split the option ``url`` into its parts. Raises ConfigError if events must not be sent there."""
    text = options.url
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

    if url.scheme == "http" and not options.insecure and not _is_loopback(url.hostname):
        raise ConfigError(
            f"executor 'http' would send the workers' secret to {url.hostname} unencrypted; "
            "use https://, or insecure=true on a trusted network"
        )
    return url


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
