"""Plain TCP streams between the servers of a lab: does a link have the rate that was set?"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError, PeerError
from scripts.netlab import stream
from scripts.netlab.base import Lab, Server

_HEADERS = 66
"""Bytes of a frame beside its payload: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12."""
_ANSWER_S = 20.0
_END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """One stream, measured by its receiver."""

    source: int
    destination: int
    bytes_per_s: float
    """Payload."""
    segment: int
    """Payload of a full frame."""

    @property
    def wire_bits_per_s(self) -> float:
        """What the stream took of the link, headers included: what a rate limits."""
        return self.bytes_per_s * 8 * (self.segment + _HEADERS) / self.segment


def measure(
    lab: Lab, source: int, destination: int, *, seconds: float = 2.0, skip_s: float = 0.5
) -> ProbeResult:
    """Measure one stream alone; see :func:`measure_together`."""
    return measure_together(lab, [(source, destination)], seconds=seconds, skip_s=skip_s)[0]


def measure_together(
    lab: Lab, streams: Sequence[tuple[int, int]], *, seconds: float = 2.0, skip_s: float = 0.5
) -> tuple[ProbeResult, ...]:
    """Run plain TCP streams at once, each as fast as it goes, and measure all in the same time.

    Args:
        lab: Its servers should be idle.
        streams: (K,) pairs (source, destination) of servers; of one server to itself: its loopback.
        seconds: Counted.
        skip_s: Left out first: a limit lets a burst pass at once.

    Returns:
        (K,) in the order of ``streams``.

    Raises:
        ConfigError: there is no such server, no stream, or no time.
        PeerError: an end did not answer; its server is named.
    """
    for pair in streams:
        for number in pair:
            if not 0 <= number < len(lab.servers):
                raise ConfigError(f"there is no server {number}; the lab has 0 to {len(lab.servers) - 1}")
    if not streams or seconds <= 0 or skip_s < 0:
        raise ConfigError(f"{len(streams)} streams for {seconds} s after {skip_s} s are nothing to measure")
    with ExitStack() as ends:
        receivers = []
        for source, destination in streams:
            address = lab.servers[destination].address
            receiver = _End(lab.servers[destination], ["receive", address, str(skip_s), str(seconds)])
            ends.callback(receiver.close)
            receivers.append(receiver)
            port = receiver.answer("listening", 1)[0]
            sender = _End(lab.servers[source], ["send", address, port])
            # Closed before its receiver.
            ends.callback(sender.close)
            receiver.answer("connected", 0)
        for receiver in receivers:
            receiver.begin()
        counted = [receiver.answer("counted", 3, skip_s + seconds) for receiver in receivers]
    return tuple(
        ProbeResult(
            source=source,
            destination=destination,
            bytes_per_s=int(num_bytes) / float(took_s),
            segment=int(segment),
        )
        for (source, destination), (num_bytes, took_s, segment) in zip(streams, counted, strict=True)
    )


@final
class _End:
    """One end of a stream, running on ``server``."""

    def __init__(self, server: Server, arguments: Sequence[str]) -> None:
        self._server, self._role = server, arguments[0]
        self._process = subprocess.Popen(
            server.inside([sys.executable, "-I", "-S", stream.__file__, *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._unread = b""

    def begin(self) -> None:
        """Let it count."""
        self._input.write(b"go\n")
        self._input.flush()

    def answer(self, word: str, count: int, after_s: float = 0.0) -> list[str]:
        """Return the ``count`` words that follow ``word`` in its next line.

        Raises:
            PeerError: it ended, or no line came within ``after_s`` and some seconds more.
        """
        deadline = time.monotonic() + after_s + _ANSWER_S
        while b"\n" not in self._unread:
            left_s = max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._output], [], [], left_s)
            piece = os.read(self._output.fileno(), 4096) if ready else b""
            if not piece:
                why = "ended" if ready else f"said nothing for {after_s + _ANSWER_S:g} s"
                raise PeerError(
                    f"the end of a stream on server {self._server.number} that should {self._role} {why}; "
                    "is the lab up, and is any card of it down?"
                )
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        said, *values = line.decode().split()
        assert (said, len(values)) == (word, count), line
        return values

    def close(self) -> None:
        """End it; it ends by itself once its input closes."""
        self._input.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()
