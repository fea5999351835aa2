"""One-sided calls: any thread of a rank asks another rank, which answers from a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import zmq

from dglx_dist.cluster.auth import Credentials
from dglx_dist.cluster.client import Call, Client, PeerAddress
from dglx_dist.cluster.ledger import Ledger
from dglx_dist.cluster.serve import Handler, ServeConfig, Server, run_handler
from dglx_dist.cluster.wire import payload_bytes
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.records import Array

PING = "cluster.ping"
MAX_DOING_BYTES = 400


@final
class Pending:
    """A call under way. ``result`` must be called on the thread that submitted it."""

    def __init__(self, rpc: Rpc, rank: int, answer: Call | list[Array], phase: str, layer: int) -> None:
        self._rpc, self._rank, self._answer = rpc, rank, answer
        self._phase, self._layer = phase, layer

    def ready(self) -> bool:
        """Whether :meth:`result` would return, or raise, without waiting; on the thread that submitted.

        Raises:
            PeerError: this rank closed its session.
        """
        return self._answer.arrived() if isinstance(self._answer, Call) else True

    def result(self, timeout_s: float | None = None) -> list[Array]:
        """Wait for the answer; the arrays are the caller's own.

        Args:
            timeout_s: Seconds since the call was submitted; None: the session's.

        Raises:
            PeerError: the rank is dead or silent; it is named.
            RemoteError: the handler there raised.
        """
        if isinstance(self._answer, Call):
            arrays = self._answer.wait(self._rpc.timeout_s if timeout_s is None else timeout_s)
            self._rpc.count(self._phase, self._layer, self._rank, None, payload_bytes(arrays))
            self._answer = arrays
        return self._answer


@final
class Rpc:
    """Serves and makes one-sided calls.

    Args:
        rank: This rank.
        ledger: Where calls are counted.
        timeout_s: How long an answer may take.
        config: Chunk size, workers, heartbeat.
    """

    def __init__(
        self, rank: int, ledger: Ledger, timeout_s: float, config: ServeConfig | None = None
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._ledger, self._config = ledger, config or ServeConfig()
        self.doing = ""
        """What this rank waits for together with the others, told to whoever asks; "" when for nothing."""
        self._handlers: dict[str, Handler] = {PING: self._tell}
        self._handlers_for_visitors: dict[str, Handler] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._server: Server | None = None
        self._door_of_visitors: tuple[zmq.Context[zmq.Socket[bytes]], Server] | None = None
        self._client: Client | None = None
        self.credentials: Credentials | None = None
        """What this rank shows and accepts; None: it does not listen."""
        self.addresses: Mapping[int, PeerAddress] = {}
        """Where ranks answer, this one included; none where this session runs alone."""
        self.address = ""
        """Numeric address this rank listens on, for other sockets of the job; "" before :meth:`listen`."""

    def listen(self, address: str, credentials: Credentials) -> str:
        """Serve on ``address`` from now on; return the endpoint to publish."""
        self._context = zmq.Context()
        self.address = address
        self._server = Server(self._context, address, credentials, self._handlers, self._config)
        self.credentials = credentials
        return self._server.endpoint

    def connect(self, peers: Mapping[int, PeerAddress]) -> None:
        """Make the ranks of ``peers`` callable; connections open when first needed."""
        if self._context is None or self.credentials is None:
            raise ConfigError("listen() must come before connect()")
        self.addresses = dict(peers)
        self._client = Client(self._context, peers, self.credentials, self._config)

    def listen_to_visitors(self, address: str, credentials: Credentials) -> str:
        """Serve those who are no ranks on ``address``, at a port of their own; return the endpoint.

        What was registered for visitors is answered there, and nothing else.
        """
        # A context of its own: ZeroMQ asks one door for all sockets of a context.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server = Server(context, address, credentials, self._handlers_for_visitors, self._config)
        self._door_of_visitors = context, server
        return server.endpoint

    def register(self, op: str, handler: Handler, *, for_visitors: bool = False) -> None:
        """Answer calls of ``op`` with ``handler`` from now on.

        ``handler`` is called from any thread, several at a time. The arrays it returns are sent without
        a copy and must not be changed afterwards.

        Args:
            op: Name of the operation.
            handler: What answers it.
            for_visitors: Whether those may call it, too, who are no ranks and are trusted with no more.

        Raises:
            ConfigError: ``op`` is taken.
        """
        if op in self._handlers:
            raise ConfigError(f"the operation {op!r} is registered already; choose another name")
        self._handlers[op] = handler
        if for_visitors:
            self._handlers_for_visitors[op] = handler

    def unregister(self, op: str) -> None:
        """Answer calls of ``op`` with an error from now on; unknown names are ignored."""
        self._handlers.pop(op, None)
        self._handlers_for_visitors.pop(op, None)

    def submit(
        self, rank: int, op: str, name: str, arrays: Sequence[Array], *, phase: str, layer: int = 0
    ) -> Pending:
        """Ask ``rank`` and return at once; any thread. ``arrays`` must not change until the result is there.

        A call to one's own rank runs the handler here and now: no socket, no bytes.

        Raises:
            RemoteError: the call was to one's own rank and the handler raised.
            PeerError: there is no such rank, or the session is closed.
        """
        if rank == self.rank:
            return Pending(self, rank, self._call_myself(op, name, arrays), phase, layer)
        if self._client is None:
            raise PeerError(f"there is no rank {rank}: this session runs alone")
        call = self._client.send(rank, op, name, arrays)
        self.count(phase, layer, None, rank, payload_bytes(arrays))
        return Pending(self, rank, call, phase, layer)

    def call(
        self, rank: int, op: str, name: str, arrays: Sequence[Array], *, phase: str, layer: int = 0
    ) -> list[Array]:
        """Ask ``rank`` and wait for the answer; see :meth:`submit` and :meth:`Pending.result`."""
        return self.submit(rank, op, name, arrays, phase=phase, layer=layer).result()

    def alive(self, rank: int, timeout_s: float) -> bool:
        """Whether ``rank`` answers within ``timeout_s``; nothing is counted."""
        return not self.silent([rank], timeout_s)

    def silent(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Return those of ``ranks`` that do not answer within ``timeout_s``; all are asked at once."""
        return [rank for rank, doing in self.what_they_do(ranks, timeout_s).items() if doing is None]

    def what_they_do(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str | None]:
        """Return what each of ``ranks`` waits for ("" for nothing), None where one does not answer.

        All are asked at once; a rank counts as silent after ``timeout_s``.
        """
        asked: dict[int, Pending] = {}
        found: dict[int, str | None] = dict.fromkeys(sorted(ranks))
        for rank in found:
            with contextlib.suppress(PeerError):
                asked[rank] = self.submit(rank, PING, "", [], phase="control")
        for rank, pending in asked.items():
            with contextlib.suppress(PeerError):
                (told,) = pending.result(timeout_s)
                found[rank] = told.tobytes().decode(errors="replace")
        return found

    def count(self, phase: str, layer: int, source: int | None, destination: int | None, size: int) -> None:
        """Count ``size`` bytes in the ledger; None stands for this rank."""
        self._ledger.add(
            phase,
            layer,
            self.rank if source is None else source,
            self.rank if destination is None else destination,
            size,
        )

    def close(self) -> None:
        """Stop serving and calling; may be called twice. Waits for nobody."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
        if self._context is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._context.destroy(linger=0)
        self._context = self._server = None
        if self._door_of_visitors is not None:
            context, server = self._door_of_visitors
            server.close()
            with contextlib.suppress(zmq.ZMQError):
                context.destroy(linger=0)
            self._door_of_visitors = None

    def forget(self) -> None:
        """In a forked process: leave sockets and threads to the parent and call nobody any more."""
        if self._client is not None:
            self._client.forget()

    def _tell(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        return [np.frombuffer(self.doing.encode()[:MAX_DOING_BYTES], dtype=np.uint8)]

    def _call_myself(self, op: str, name: str, arrays: Sequence[Array]) -> list[Array]:
        try:
            return run_handler(self._handlers, op, name, arrays)
        except Exception as error:
            text = f"rank {self.rank} failed at {op} {name!r}: {type(error).__name__}: {error}"
            raise RemoteError(text) from error
