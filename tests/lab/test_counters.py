"""Counters of a network card."""

from __future__ import annotations

import os
import socket

import pytest

from dglx_dist.errors import LabError
from dglx_dist.lab.counters import read_card


def test_loopback_receives_what_it_sends() -> None:
    """At least the ten datagrams of 1000 bytes of this test, with 28 bytes of headers each."""
    before = read_card("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind(("127.0.0.1", 0))
        for _ in range(10):
            wire.sendto(bytes(1000), wire.getsockname())
    after = read_card("lo", pid=os.getpid())
    assert after.sent - before.sent >= 10_280
    assert after.received - before.received >= 10_280


def test_an_unknown_device_is_told_with_those_there_are() -> None:
    with pytest.raises(LabError, match=r"no network device 'eth99' here, only .*lo"):
        read_card("eth99")


def test_a_process_that_has_ended_has_no_card() -> None:
    with pytest.raises(LabError, match="process 4194303 is gone"):
        read_card("lo", pid=2**22 - 1)
