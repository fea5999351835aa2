"""Plain TCP streams between the servers of a lab have the rates that were set, within 8 %."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from dglx_dist.planner.records import Rate
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.labs import open_lab

TOLERANCE = 0.08
SEGMENT, HEADERS = 1448, 66
"""Payload of a full frame, and what it has beside: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12."""
RECEIVE = textwrap.dedent("""
    import socket, sys, time
    with socket.create_server((sys.argv[1], 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    sys.stdin.readline()
    skip_s, seconds = map(float, sys.argv[2:])
    begin = time.monotonic() + skip_s
    counted, now = 0, 0.0
    while now < begin + seconds:
        received = len(connection.recv(1 << 18))
        now = time.monotonic()
        counted += received if now >= begin else 0
    print(counted / (now - begin), flush=True)
    sys.stdin.read()
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


def streams(
    lab: Lab, pairs: list[tuple[int, int]], *, skip_s: float = 0.5, seconds: float = 1.0
) -> list[float]:
    """Return Mbit/s on the wire of streams (source, destination) that run at once, after the first burst."""
    senders, receivers, found = [], [], []
    for source, destination in pairs:
        address = lab.servers[destination].address
        receivers.append(on(lab, destination, RECEIVE, address, "0.5", str(seconds)))
        senders.append(on(lab, source, SEND, address, receivers[-1].stdout.readline().strip()))
    for receiver in receivers:
        receiver.stdin.write("go\n")
        receiver.stdin.flush()
    for receiver in receivers:
        found.append(float(receiver.stdout.readline()) * 8e-6 * (SEGMENT + HEADERS) / SEGMENT)
    for process in (*receivers, *senders):
        # A sender ends when its receiver is gone.
        process.communicate(timeout=20.0)
    return found


@pytest.fixture(scope="module")
def lab(needs_lab: None) -> Iterator[Lab]:
    with open_lab(LabSpec(servers=3)) as made:
        yield made


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
def test_streams_between_servers_have_the_rate(
    lab: Lab, rate: int, pairs: list[tuple[int, int]], total: int
) -> None:
    lab.set_rates(Rate.parse(f"{rate}mbit"), None)
    wanted = pytest.approx(total, rel=TOLERANCE)
    each = [pytest.approx(rate, rel=TOLERANCE)] * len(pairs) if total == rate * len(pairs) else None
    for _ in range(4):
        # Again when other processes kept them from the cores: no limit that fails to hold would hold then.
        found = streams(lab, pairs)
        if sum(found) == wanted and each in (None, found):
            return
    pytest.fail(f"{found} Mbit/s in place of {total}")


def test_inside_a_server_another_rate_holds_also_for_packets_above_the_smallest_bucket(lab: Lab) -> None:
    lab.set_rates(Rate.parse("40mbit"), Rate.parse("160mbit"))
    # Packets of the loopback have 64 KiB, so that there are hardly headers.
    (found,) = streams(lab, [(0, 0)])
    assert found * SEGMENT / (SEGMENT + HEADERS) == pytest.approx(160, rel=TOLERANCE)
    lab.set_rates(None, Rate.parse("4mbit"))
    assert streams(lab, [(0, 0)], seconds=0.5)[0] > 0


def test_without_a_limit_it_is_far_above(lab: Lab) -> None:
    lab.set_rates(None, None)
    assert streams(lab, [(0, 1)], seconds=0.5)[0] > 500
