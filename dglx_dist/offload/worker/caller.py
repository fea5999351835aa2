"""How a worker asks graph servers and parameter servers: by sockets, or directly where it runs inside one."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final

import zmq

from dglx_dist.cluster.auth import Credentials
from dglx_dist.cluster.client import Call, Client, PeerAddress
from dglx_dist.cluster.serve import Handler, ServeConfig, run_handler
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.offload.tasks import Address, Secrets
from dglx_dist.records import Array

_IDLE_S = 5.0
"""Connections unused for longer are opened anew: a function's container is frozen between invocations, and
the other side has given up a silent one by then."""


class Answer(ABC):
    """What was asked for, or will be."""

    @abstractmethod
    def wait(self, timeout_s: float) -> list[Array]:
        """Return the arrays, on the thread that asked; ``timeout_s`` counts from then.

        Raises:
            PeerError: whom was asked is dead, silent, or refuses this worker.
            RemoteError: the handler there raised.
        """


class Caller(ABC):
    """Asks the servers of a job."""

    @abstractmethod
    def begin(self) -> None:
        """Make ready for a task: nothing is under way, and connections may have died since the last one."""

    @abstractmethod
    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """Ask ``to`` for ``op``; ``arrays`` must not change until the answer is there.

        Raises:
            PeerError: it cannot be asked at all.
            ConfigError: ``secrets`` do not fit ``to``.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections; calls under way end with a PeerError."""


@final
class RemoteCaller(Caller):
    """Asks by sockets; connections stay open for the next task of the same job.

    Args:
        through: Endpoint to the endpoint that stands for it, such as ``Relay.endpoint``; None: itself.
    """

    def __init__(self, through: Callable[[str], str] | None = None) -> None:
        self._through = through
        self._job: _Job | None = None

    def begin(self) -> None:
        """See Caller."""
        if self._job is not None and self._job.idle_s > _IDLE_S:
            self.close()

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """See Caller."""
        if secrets.secret_key is not None and to.public_key is None:
            raise ConfigError(
                f"rank {to.rank} on {to.host} comes without a public key, and this job's connections are "
                "encrypted; set DGLX_CURVE alike on all ranks"
            )
        if self._job is None or self._job.secrets != secrets:
            self.close()
            self._job = _Job(secrets, self._through)
        return self._job.send(to, op, name, arrays)

    def close(self) -> None:
        """See Caller."""
        if self._job is not None:
            self._job.close()
            self._job = None


@final
class DirectCaller(Caller):
    """Asks functions of this process, with no socket and no copy.

    Args:
        handlers: Operation to what answers it, whoever is asked.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._closed = False

    def begin(self) -> None:
        """See Caller."""

    def send(self, to: Address, secrets: Secrets, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        """See Caller. ``secrets`` are not looked at: nobody comes from outside."""
        if self._closed:
            raise PeerError("the executor was closed while a task was under way")
        try:
            return _Given(run_handler(self._handlers, op, name, arrays))
        except Exception as error:
            text = f"rank {to.rank} on {to.host} failed at {op} {name!r}: {type(error).__name__}: {error}"
            raise RemoteError(text) from error

    def close(self) -> None:
        """See Caller."""
        self._closed = True


@final
class _Given(Answer):
    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays

    def wait(self, timeout_s: float) -> list[Array]:
        return self._arrays


@final
class _Asked(Answer):
    def __init__(self, call: Call) -> None:
        self._call = call

    def wait(self, timeout_s: float) -> list[Array]:
        return self._call.wait(timeout_s)


@final
class _Job:
    """The connections of one job."""

    def __init__(self, secrets: Secrets, through: Callable[[str], str] | None) -> None:
        self.secrets, self._through = secrets, through
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # By a number of their own: a rank may come back at another address after a restart.
        self._peers: dict[int, PeerAddress] = {}
        self._numbers: dict[Address, int] = {}
        self._next = itertools.count()
        self._used_at = time.time()
        credentials = Credentials(
            secret=secrets.secret.encode(),
            public_key=_bytes(secrets.public_key),
            secret_key=_bytes(secrets.secret_key),
        )
        self._client = Client(self._context, self._peers, credentials, ServeConfig())

    @property
    def idle_s(self) -> float:
        """Seconds since the last call, by the wall clock: others may stand still in a frozen container."""
        return time.time() - self._used_at

    def send(self, to: Address, op: str, name: str, arrays: Sequence[Array]) -> Answer:
        self._used_at = time.time()
        number = self._numbers.get(to)
        if number is None:
            number = self._numbers[to] = next(self._next)
            endpoint = to.endpoint if self._through is None else self._through(to.endpoint)
            self._peers[number] = PeerAddress(
                rank=to.rank, host=to.host, endpoint=endpoint, public_key=_bytes(to.public_key)
            )
        return _Asked(self._client.send(number, op, name, arrays))

    def close(self) -> None:
        self._client.close()
        self._context.destroy(linger=0)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
