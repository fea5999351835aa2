"""Output of the commands on several servers, line by line on one screen and in one file each."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import IO, TextIO

_LINE_LIMIT = 1 << 20


class Screen:
    """Where the lines of all servers go; one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._broken = False

    def write(self, stream: TextIO, text: str) -> None:
        """Write ``text`` to ``stream``; nothing once that is closed, as when ``| head`` has seen enough."""
        with self._lock:
            if self._broken:
                return
            try:
                stream.write(text)
                stream.flush()
            except (BrokenPipeError, ValueError):
                self._broken = True


class Relay:
    """Takes the lines of one pipe of one server until it closes, so that no writer ever waits for long.

    Args:
        source: The pipe; closed at the end.
        screen: Shared by all relays; None: nothing is shown.
        stream: Where on the screen.
        prefix: Before each line shown.
        log: Gets the bytes as they are; shared by the relays of a server; None: no file.
    """

    def __init__(
        self, source: IO[bytes], screen: Screen | None, stream: TextIO, prefix: str, log: LogFile | None
    ) -> None:
        self._source, self._screen, self._stream = source, screen, stream
        self._prefix, self._log = prefix, log
        self._thread = threading.Thread(target=self._run, name="lab output", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the pipe has closed and its last line is written."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._source:
            while line := self._source.readline(_LINE_LIMIT):
                if self._log is not None:
                    self._log.write(line)
                if self._screen is not None:
                    text = line.decode(errors="replace").removesuffix("\n")
                    self._screen.write(self._stream, f"{self._prefix}{text}\n")


class LogFile:
    """A file that several threads write to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = path.open("wb", buffering=0)

    def write(self, line: bytes) -> None:
        """Write ``line`` at once; when the disk is full it is lost, so that no rank waits for its output."""
        with self._lock, contextlib.suppress(OSError):
            self._file.write(line)

    def close(self) -> None:
        """Close it; call it after the last line."""
        with self._lock:
            self._file.close()
