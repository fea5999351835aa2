"""Processes told apart by number and start time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from scripts.netlab.servers import find_process


def test_a_process_lives_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = find_process(child.pid)
        assert process.alive()
        process.kill()
        child.wait(timeout=30)
    assert not process.alive()
    process.kill()
    with pytest.raises(ProcessLookupError):
        find_process(child.pid)


def test_another_process_of_the_same_number_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        earlier = replace(find_process(child.pid), started=find_process(child.pid).started - 1)
        assert not earlier.alive()
        earlier.kill()
        assert child.poll() is None
        child.communicate(b"\n", timeout=30)
    assert child.returncode == 0


def test_a_zombie_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = find_process(child.pid)
        process.kill()
        # Not waited for yet: it stays as a zombie.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.alive()
