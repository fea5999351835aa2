"""Plain TCP streams between the servers of a lab have the rates that were set, within 8 %."""

import contextlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import IO

import pytest

from dglx_dist.planner.records import Rate
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.labs import open_lab

TOLERANCE = 0.08
SEGMENT, HEADERS = 1448, 66
"""Payload of a full frame, and what it has beside: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12."""
RECEIVE = textwrap.dedent("""
    import os, socket, sys, threading, time
    def end():
        sys.stdin.read()
        os._exit(0)
    with socket.create_server((sys.argv[1], 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    sys.stdin.readline()
    threading.Thread(target=end).start()
    skip_s, seconds = map(float, sys.argv[2:])
    begin = time.monotonic() + skip_s
    counted, now = 0, 0.0
    while now < begin + seconds:
        received = len(connection.recv(1 << 18))
        now = time.monotonic()
        counted += received if now >= begin else 0
    print(counted / (now - begin), flush=True)
""")
SEND = textwrap.dedent("""
    import contextlib, socket, sys
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(bytes(1 << 18))
""")


def on(lab: Lab, server: int, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = lab.servers[server].inside([sys.executable, "-I", "-S", "-c", program, *arguments])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def streams(lab: Lab, pairs: list[tuple[int, int]], *, seconds: float) -> Iterator[list[IO[str]]]:
    """Run streams (source, destination) at once; yield what their receivers say of bytes/s at the end."""
    senders, receivers = [], []
    for source, destination in pairs:
        address = lab.servers[destination].address
        receivers.append(on(lab, destination, RECEIVE, address, "0.5", str(seconds)))
        senders.append(on(lab, source, SEND, address, receivers[-1].stdout.readline().strip()))
    for receiver in receivers:
        receiver.stdin.write("go\n")
        receiver.stdin.flush()
    try:
        yield [receiver.stdout for receiver in receivers]
    finally:
        for process in (*receivers, *senders):
            # A receiver ends with its input, and a sender with its receiver.
            process.communicate(timeout=20.0)


def measure_program(lab: Lab, server: int, *, seconds: float = 1.0) -> float:
    """Return the Mbit/s that a program on ``server`` receives from another there or on the server before."""
    with streams(lab, [(max(server - 1, 0), server)], seconds=seconds) as (message,):
        return float(message.readline()) * 8e-6


def measure_cards(lab: Lab, pairs: list[tuple[int, int]]) -> list[float]:
    """Return the Mbit/s on the wire that each destination's card receives while streams run.

    All cards are read at the same two times. The counters of programs would not do: a program that waits for
    a processor, or for a packet that was lost, receives at once what had come long before.
    """
    cards = [lab.servers[destination] for destination in sorted({destination for _, destination in pairs})]
    with streams(lab, pairs, seconds=60.0):
        time.sleep(0.5)  # the first burst
        begin, before = time.monotonic(), [server.card().received for server in cards]
        time.sleep(1.0)
        after, seconds = [server.card().received for server in cards], time.monotonic() - begin
    # Segments that stay together on a virtual card have one header there.
    scale = 8e-6 / seconds * (SEGMENT + HEADERS) / SEGMENT
    return [(last - first) * scale for first, last in zip(before, after, strict=True)]


@pytest.fixture(scope="module")
def lab(needs_lab: None) -> Iterator[Lab]:
    with open_lab(LabSpec(servers=3)) as made:
        yield made


@pytest.mark.wide
@pytest.mark.parametrize(
    ("rate", "pairs", "total"),
    [
        *((mbit, [(0, 1)], mbit) for mbit in (1, 40, 200)),
        # Both directions have it each; what one receives or sends is shared.
        (100, [(0, 1), (1, 0)], 200),
        (100, [(1, 0), (2, 0)], 100),
        (100, [(0, 1), (0, 2)], 100),
    ],
)
def test_streams_have_the_rate(lab: Lab, rate: int, pairs: list[tuple[int, int]], total: int) -> None:
    lab.set_rates(Rate.parse(f"{rate}mbit"), None)
    expected = pytest.approx(total, rel=TOLERANCE)
    for _ in range(4):
        # Again when other processes kept the streams from the cores: a limit that fails to hold would fail
        # to hold then.
        measured = measure_cards(lab, pairs)
        if sum(measured) == expected and max(measured) <= rate * (1 + TOLERANCE):
            return
    pytest.fail(f"{measured} Mbit/s in place of {total}")


def test_inside_a_server_another_rate_holds_also_for_packets_above_the_smallest_bucket(lab: Lab) -> None:
    lab.set_rates(Rate.parse("40mbit"), Rate.parse("160mbit"))
    # Packets of the loopback have 64 KiB, so that there are hardly headers.
    assert measure_program(lab, 0) == pytest.approx(160, rel=TOLERANCE)
    lab.set_rates(None, Rate.parse("4mbit"))
    assert measure_program(lab, 0, seconds=0.5) > 0
