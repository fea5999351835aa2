"""One end of a plain TCP stream; a program, run by its path on a server of a lab.

    python -I -S stream.py receive ADDRESS SKIP SECONDS
    python -I -S stream.py send ADDRESS PORT

The receiver writes ``listening PORT``, then ``connected``; after a line on its standard input it lets SKIP
seconds go by, counts for SECONDS, and writes ``counted BYTES SECONDS SEGMENT``: payload, and how much of it a
full frame carries. Both ends go on until their standard input closes, so that streams that are measured
together last equally long, and end when whoever started them does. Standard library alone: it starts in
milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence

_PIECE = 1 << 18
_CONNECT_S = 20.0


def main(arguments: Sequence[str]) -> int:
    """Play the part that ``arguments`` name; return the exit code."""
    role, address, *rest = arguments
    # The other end is gone first, or nobody reads any more: both are an orderly end.
    with contextlib.suppress(ConnectionError):
        if role == "receive":
            _receive(address, float(rest[0]), float(rest[1]))
        else:
            _send(address, int(rest[0]))
    return 0


def _receive(address: str, skip_s: float, seconds: float) -> None:
    with socket.create_server((address, 0)) as server:
        _say(f"listening {server.getsockname()[1]}")
        server.settimeout(_CONNECT_S)
        connection, _ = server.accept()
    with connection, selectors.DefaultSelector() as ready:
        _say("connected")
        ready.register(connection, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        buffer = bytearray(_PIECE)
        counted, begin, end = 0, float("inf"), float("inf")
        while True:
            for key, _ in ready.select():
                if key.fd == 0:
                    if not os.read(0, 4096):
                        return
                    begin = time.monotonic() + skip_s
                    end = begin + seconds
                    continue
                received = connection.recv_into(buffer)
                now = time.monotonic()
                if not received:
                    return
                if now >= end:
                    segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
                    _say(f"counted {counted} {now - begin} {segment}")
                    end = float("inf")
                elif now >= begin:
                    counted += received


def _send(address: str, port: int) -> None:
    with (
        socket.create_connection((address, port), timeout=_CONNECT_S) as connection,
        selectors.DefaultSelector() as ready,
    ):
        connection.setblocking(False)
        ready.register(connection, selectors.EVENT_WRITE)
        ready.register(0, selectors.EVENT_READ)
        piece = bytes(_PIECE)
        while True:
            for key, _ in ready.select():
                if key.fd == 0:
                    return
                connection.send(piece)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
