"""Processes that hold namespaces open."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dglx_dist.errors import LabError
from scripts.netlab import hold, servers
from scripts.netlab.servers import Holder, find_process, wait_until_ended

pytestmark = pytest.mark.usefixtures("needs_lab")


def test_holds_until_it_is_closed() -> None:
    held = Holder("one", ["--net"], [["ip", "link", "set", "lo", "up"]])
    assert held.init.alive()
    assert os.stat(f"/proc/{held.init.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    held.close()
    assert not held.init.alive()
    assert not held.outer.alive()
    held.close()


def test_ends_when_its_maker_lets_go_of_the_pipe() -> None:
    held = Holder("one", ["--net"], [])
    held.forget()
    wait_until_ended((held.init, held.outer))
    held.close()


def test_stays_when_it_was_told_to() -> None:
    held = Holder("one", ["--net"], [])
    held.stay()
    held.forget()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["tail", f"--pid={held.init.pid}", "-f", "/dev/null"], timeout=0.3, check=False)
    assert held.init.alive()
    held.init.kill()
    wait_until_ended((held.init, held.outer))


def test_one_that_has_ended_cannot_stay() -> None:
    held = Holder("one", ["--net"], [])
    held.init.kill()
    wait_until_ended((held.init, held.outer))
    with pytest.raises(LabError, match="has ended already"):
        held.stay()
    held.close()


def test_a_command_that_fails_is_told_with_its_answer() -> None:
    with pytest.raises(LabError, match=r"server 3 could not be made: .*nonesuch"):
        Holder("server 3", ["--net"], [["ip", "link", "set", "nonesuch", "up"]])


def test_a_command_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_START_S", 0.3)
    monkeypatch.setattr(servers, "_END_S", 0.3)
    with pytest.raises(LabError, match="no answer within 0 s"):
        Holder("one", ["--net"], [["sleep", "600"]])


def test_waiting_names_who_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_END_S", 0.1)
    with pytest.raises(LabError, match=str(os.getpid())):
        wait_until_ended([find_process(os.getpid())])


def test_the_program_ends_with_its_input_and_says_its_number() -> None:
    program = [sys.executable, "-I", "-S", hold.__file__, "17"]
    done = subprocess.run(program, input=b"", capture_output=True, timeout=60, check=True)
    assert done.stdout == b"ready 17\n"
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as staying:
        with pytest.raises(subprocess.TimeoutExpired):
            staying.communicate(hold.STAY, timeout=0.5)
        staying.kill()
