"""The ends of a stream, as programs."""

from __future__ import annotations

import subprocess
import sys
from typing import IO

import pytest

from scripts.netlab import stream

END_S = 20.0


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", stream.__file__, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def test_what_it_counts_is_what_it_says() -> None:
    with _start("receive", "127.0.0.1", "0", "0.2") as receiver:
        go, said = _pipes(receiver)
        word, port = said.readline().split()
        assert word == "listening"
        with _start("send", "127.0.0.1", port) as sender:
            assert said.readline() == "connected\n"
            go.write("go\n")
            go.flush()
            word, num_bytes, seconds, segment = said.readline().split()
            assert word == "counted"
            assert int(num_bytes) > 0
            assert 0.2 <= float(seconds) < END_S
            assert 500 < int(segment) <= 65536
            # The sender goes on until its own input closes.
            assert sender.poll() is None
            sender.communicate(timeout=END_S)
            assert sender.returncode == 0
        receiver.communicate(timeout=END_S)
        assert receiver.returncode == 0


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_either_end_may_go_first(first: str) -> None:
    with _start("receive", "127.0.0.1", "0", "10") as receiver:
        _, said = _pipes(receiver)
        with _start("send", "127.0.0.1", said.readline().split()[1]) as sender:
            said.readline()
            ends = [sender, receiver] if first == "sender" else [receiver, sender]
            ends[0].communicate(timeout=END_S)
            # The other one has lost its peer and ends by itself.
            assert ends[1].wait(END_S) == 0


def test_it_needs_the_standard_library_alone() -> None:
    """-S: no site-packages; -I: nothing from the environment. With a wrong role it fails by itself."""
    with _start("receive") as wrong:
        _, error = wrong.communicate(timeout=END_S)
    assert wrong.returncode == 1
    assert "not enough values to unpack" in error
