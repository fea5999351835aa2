"""The ends of a stream, as programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.planner.records import Rate
from scripts.netlab import probe, stream
from scripts.netlab.base import Lab, LabSpec, LoopbackLab
from scripts.netlab.labs import open_lab
from scripts.netlab.probe import ProbeResult

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


MBIT = 1e6
TOLERANCE = 0.08


@pytest.fixture(scope="module")
def lab(needs_lab: None) -> Iterator[Lab]:
    """Three idle servers without limits."""
    with open_lab(LabSpec(servers=3)) as made:
        yield made


def _rates(lab: Lab, streams: list[tuple[int, int]], total: float) -> list[float]:
    """Mbit/s of ``streams``, that should have ``total`` together.

    Measured again when they have not: other processes may have kept them from the cores for a moment, and no
    limit that fails to hold would hold at the second try.
    """
    found: list[float] = []
    for _ in range(3):
        results = probe.measure_together(lab, streams, seconds=1.0)
        found = [one.wire_bits_per_s / MBIT for one in results]
        if sum(found) == pytest.approx(total, rel=TOLERANCE):
            break
    return found


@pytest.mark.parametrize("mbit", [1, 40, 200])
def test_one_stream_has_the_rate(lab: Lab, mbit: int) -> None:
    lab.set_rates(Rate.parse(f"{mbit}mbit"), None)
    assert _rates(lab, [(0, 1)], mbit) == [pytest.approx(mbit, rel=TOLERANCE)]


def test_both_directions_at_once_have_it_each(lab: Lab) -> None:
    lab.set_rates(Rate.parse("100mbit"), None)
    assert _rates(lab, [(0, 1), (1, 0)], 200) == [pytest.approx(100, rel=TOLERANCE)] * 2


def test_two_senders_share_what_one_may_receive(lab: Lab) -> None:
    lab.set_rates(Rate.parse("100mbit"), None)
    assert sum(_rates(lab, [(1, 0), (2, 0)], 100)) == pytest.approx(100, rel=TOLERANCE)


def test_two_receivers_share_what_one_may_send(lab: Lab) -> None:
    lab.set_rates(Rate.parse("100mbit"), None)
    assert sum(_rates(lab, [(0, 1), (0, 2)], 100)) == pytest.approx(100, rel=TOLERANCE)


def test_a_loopback_of_large_packets_goes_on_at_a_low_rate(lab: Lab) -> None:
    """One packet of 64 KiB is more than the smallest bucket of a card."""
    lab.set_rates(None, Rate.parse("4mbit"))
    assert probe.measure(lab, 0, 0, seconds=0.5).bytes_per_s > 0


def test_inside_a_server_another_rate_holds(lab: Lab) -> None:
    lab.set_rates(Rate.parse("40mbit"), Rate.parse("160mbit"))
    assert _rates(lab, [(0, 0)], 160) == [pytest.approx(160, rel=TOLERANCE)]


def test_without_a_limit_it_is_far_above(lab: Lab) -> None:
    lab.set_rates(None, None)
    assert probe.measure(lab, 0, 1, seconds=0.5).wire_bits_per_s > 500 * MBIT


def test_the_wire_carries_headers_too() -> None:
    """1448 bytes of payload travel in a frame of 1514."""
    found = ProbeResult(source=0, destination=1, bytes_per_s=1448.0, segment=1448)
    assert found.wire_bits_per_s == 1514 * 8


def test_plain_loopback_can_be_measured() -> None:
    found = probe.measure(LoopbackLab(LabSpec(servers=2)), 0, 1, seconds=0.2, skip_s=0.0)
    assert (found.source, found.destination) == (0, 1)
    assert found.bytes_per_s > 1e6


def test_what_cannot_be_measured_is_refused() -> None:
    lab = LoopbackLab(LabSpec(servers=2))
    with pytest.raises(ConfigError, match="no server 2; the lab has 0 to 1"):
        probe.measure(lab, 0, 2)
    with pytest.raises(ConfigError, match="0 streams"):
        probe.measure_together(lab, [])
    with pytest.raises(ConfigError, match=r"for 0 s"):
        probe.measure(lab, 0, 1, seconds=0)


def test_an_end_that_fails_is_named() -> None:
    lab = LoopbackLab(LabSpec(servers=2))
    lab.servers[1].address = "203.0.113.1"  # nobody's, so that nothing can listen there
    with pytest.raises(PeerError, match="server 1 that should receive ended"):
        probe.measure(lab, 0, 1)
