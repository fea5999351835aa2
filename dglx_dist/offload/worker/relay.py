"""A slow network card for one worker: its connections pass through here, at so many bytes a second.

Real bytes wait in real connections, so a worker that computes one half while the other comes gains by it
what it would gain in a small function.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import final

from dglx_dist.cluster.network import endpoint_of

_PIECE_S, _BURST_S, _CONNECT_S = 0.002, 0.002, 10.0
_LEAST_PIECE, _MOST_PIECE = 1024, 64 * 1024


@final
class Relay:
    """Passes connections on. Its threads end with the process, or with their connections.

    Args:
        bytes_per_s: Most that all connections together carry, in each direction.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._up, self._down = _Pace(bytes_per_s), _Pace(bytes_per_s)
        self._endpoints: dict[str, str] = {}

    def endpoint(self, remote: str) -> str:
        """Return the endpoint of this machine that stands for ``remote`` (``tcp://HOST:PORT``)."""
        if remote not in self._endpoints:
            door = socket.create_server(("127.0.0.1", 0))
            self._endpoints[remote] = endpoint_of("127.0.0.1", door.getsockname()[1])
            _start(self._accept, door, remote)
        return self._endpoints[remote]

    def _accept(self, door: socket.socket, remote: str) -> None:
        host, _, port = remote.removeprefix("tcp://").rpartition(":")
        while True:
            near, _ = door.accept()
            try:
                far = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
            except OSError:
                near.close()  # the worker sees it as it would see a server that is gone
                continue
            far.settimeout(None)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(_pass_on, near, far, self._up)
            _start(_pass_on, far, near, self._down)


@final
class _Pace:
    """When the next bytes are due."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.piece_bytes = int(min(max(bytes_per_s * _PIECE_S, _LEAST_PIECE), _MOST_PIECE))
        """Passed on at a time: as few as go without jerks, for each costs the processor that others need."""
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """Wait as long as ``num_bytes`` take after those before; only a short pause before is made up for."""
        with self._lock:
            start = max(self._free_at, time.monotonic() - _BURST_S)
            self._free_at = start + num_bytes / self._bytes_per_s
            due = self._free_at
        time.sleep(max(due - time.monotonic(), 0.0))


def _pass_on(source: socket.socket, target: socket.socket, pace: _Pace) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(pace.piece_bytes):
            pace.wait(len(piece))
            target.sendall(piece)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, name="dglx-relay", daemon=True).start()  # type: ignore[arg-type]
