"""Emulated servers: what they see of each other and of this machine, what holds them, and what stays."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab import cgroups, labs, servers, state
from scripts.netlab.base import LabError, LabSpec
from scripts.netlab.labs import NamespaceLab, attach, open_lab
from scripts.netlab.servers import CARD, Process, cgroup_name, wait_until_ended
from tests.helpers.cgroups import quota_of
from tests.netlab.helpers import LIMIT_S, lab_of, output, python, reaches


def test_shared_memory_and_processes_are_private(pair: NamespaceLab) -> None:
    first, second = pair.servers
    mark = f"dglx-test-{pair.name}"
    output(first, "touch", f"/dev/shm/{mark}")
    assert output(first, "ls", "/dev/shm") == mark
    assert output(second, "ls", "/dev/shm") == ""
    assert not Path("/dev/shm", mark).exists()
    numbers = [int(name) for name in output(first, "ls", "/proc").split() if name.isdigit()]
    assert 1 in numbers
    assert len(numbers) <= 3


def test_servers_have_names_that_all_of_them_know(pair: NamespaceLab) -> None:
    ours = socket.gethostname()
    code = (
        "import socket; own = socket.gethostname(); print(own, socket.getfqdn(), socket.gethostbyname(own), "
        "socket.gethostbyname('server-1'), socket.gethostbyaddr('10.77.0.1')[0], "
        "socket.gethostbyname('localhost'))"
    )
    message = [python(server, code) for server in pair.servers]
    assert message[0] == "server-0 server-0 10.77.0.1 10.77.0.2 server-0 127.0.0.1"
    assert message[1] == "server-1 server-1 10.77.0.2 10.77.0.2 server-0 127.0.0.1"
    assert socket.gethostname() == ours
    assert "server-0" not in Path("/etc/hosts").read_text()


def test_processes_are_held_to_their_cores_and_quota() -> None:
    """A quarter of one core for each of two servers: 2.5 ms in every 10."""
    with lab_of(2, cpus=0.25) as lab:
        for server in lab.servers:
            inside = python(server, "import os; print(*sorted(os.sched_getaffinity(0)))")
            assert [int(core) for core in inside.split()] == list(server.cores)
            assert len(server.cores) == 1
            if server.cgroup is None:
                assert server.cpu_held_by == "nothing"
                continue
            assert server.cpu_held_by == "affinity and quota"
            assert quota_of(Path(server.cgroup)) == pytest.approx(0.25)
            assert cgroup_name(lab.name, server.number) in output(server, "cat", "/proc/self/cgroup")


def test_a_server_that_is_gone_is_not_taken_for_who_got_its_number(pair: NamespaceLab) -> None:
    """Its first process has ended, and this one has the number now: its card is this machine's."""
    gone = replace(pair.servers[0], init=Process(pid=os.getpid(), started=1))
    with pytest.raises(LabError, match="server 0 is down; the lab was taken down meanwhile"):
        gone.card()
    with pytest.raises(LabError, match="server 0 is down"):
        gone.inside(["true"])


SLOW, FAST = Rate.parse("20mbit"), Rate.parse("300mbit")

pytestmark = pytest.mark.usefixtures("needs_lab")


def rate_of(pid: int, device: str) -> int | None:
    answer = servers.run_inside(pid, [["tc", "-j", "qdisc", "show", "dev", device]])
    (root,) = [load for load in json.loads(answer) if load.get("root")]
    return int(root["options"]["rate"]) * 8 if root["kind"] == "tbf" else None


def switch_of(lab: NamespaceLab) -> int:
    return state.read_notes(lab.name).switch[0].pid


def test_servers_reach_each_other_and_nobody_else(pair: NamespaceLab) -> None:
    first, second = pair.servers
    assert (first.address, second.address) == ("10.77.0.1", "10.77.0.2")
    assert reaches(first, second.address)
    assert reaches(second, first.address)
    assert not reaches(first, "10.77.0.3")
    assert output(first, "ip", "route", "show", "default") == ""


def test_rates_change_at_once_and_can_be_lifted() -> None:
    with lab_of(2, external=SLOW, internal=FAST) as lab:
        first = lab.servers[0].init.pid
        devices = [(first, CARD), (switch_of(lab), "server1"), (first, "lo")]
        assert [rate_of(*device) for device in devices] == [SLOW.bits_per_s, SLOW.bits_per_s, FAST.bits_per_s]
        lab.set_rates(FAST, None)
        assert [rate_of(*device) for device in devices] == [FAST.bits_per_s, FAST.bits_per_s, None]
        assert (lab.spec.external, lab.spec.internal) == (FAST, None)
        assert state.read_notes(lab.name).spec == lab.spec
        lab.set_rates(None, SLOW)
        assert [rate_of(*device) for device in devices] == [None, None, SLOW.bits_per_s]
        assert lab.describe()["external"] is None
        assert lab.describe()["label"] == "namespaces, links not limited, 20mbit within"
        assert lab.describe()["internal"] == "20mbit"


def test_a_card_counts_what_was_sent(pair: NamespaceLab) -> None:
    """15 datagrams of 1000 bytes fit in the smallest bucket, each with 42 bytes of headers."""
    first, second = pair.servers
    assert reaches(first, second.address)
    before = pair.cards()
    python(
        first,
        "import socket\nwire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"for _ in range(15): wire.sendto(bytes(1000), ('{second.address}', 9))",
    )
    after = pair.cards()
    assert 15_630 <= after[0].sent - before[0].sent < 15_630 + 4000
    assert 15_630 <= after[1].received - before[1].received < 15_630 + 4000
    assert after[1].sent - before[1].sent < 10_000


def _traces_of(name: str) -> list[str]:
    left = [str(folder) for number in range(3) for folder in cgroups.find(cgroup_name(name, number))]
    left += [str(path) for path in state.notes_folder().glob(f"*{name}*")]
    left += [device for device in os.listdir("/sys/class/net") if device.startswith(("server", "bridge"))]
    return left


def test_nothing_stays_after_closing() -> None:
    with lab_of(2, cpus=0.3, external=SLOW) as lab:
        holders = state.read_notes(lab.name).processes
        child = subprocess.Popen(lab.servers[0].inside(["sleep", "600"]))
        assert all(process.alive() for process in holders)
    assert child.wait(timeout=LIMIT_S) != 0
    wait_until_ended(holders)
    assert _traces_of(lab.name) == []
    lab.close()
    with pytest.raises(LabError, match="taken down"):
        lab.cards()
    with pytest.raises(LabError, match="taken down"):
        lab.set_rates(SLOW, None)


def test_nothing_stays_after_a_failure_half_way(lab_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cable of the last server cannot be laid; then the first one cannot be set up."""
    made: list[Any] = []
    port_of = servers.port_of

    def bad_port(number: int) -> str:
        made.extend(state.read_notes(lab_name).processes)
        return "a/name/that/is/refused" if number == 1 else port_of(number)

    monkeypatch.setattr(servers, "port_of", bad_port)
    with pytest.raises(LabError, match="a/name/that/is/refused"):
        open_lab(LabSpec(servers=2, cpus=0.3), name=lab_name)
    assert made
    assert not any(process.alive() for process in made)
    assert _traces_of(lab_name) == []
    monkeypatch.setattr(labs, "SETUP", [["ip", "link", "set", "nonesuch", "up"]])
    with pytest.raises(LabError, match=r"server 0 could not be made: .*nonesuch"):
        open_lab(LabSpec(servers=2, cpus=0.3), name=lab_name)
    assert _traces_of(lab_name) == []


ROOT = Path(__file__).parents[2]
_OWNER = """
import sys
from multiprocessing import get_context
from time import sleep
from scripts.netlab.base import LabSpec
from scripts.netlab.labs import open_lab
if __name__ == "__main__":
    lab = open_lab(LabSpec(servers=2, cpus=0.3), name=sys.argv[1])
    # A forked child that outlives its parent must not keep the lab up.
    child = get_context("fork").Process(target=sleep, args=(20,))
    child.start()
    sys.stdout.write(f"{child.pid}\\n")
    sys.stdout.flush()
    sleep(600)
"""


def test_all_ends_with_a_killed_owner_and_the_next_lab_sweeps_up(lab_name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, lab_name], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        timer = threading.Timer(LIMIT_S, owner.kill)
        timer.start()
        forked = int(owner.stdout.readline())
        timer.cancel()
        noted = state.read_notes(lab_name)
        inside = subprocess.Popen(noted.servers[0].inside(["sleep", "600"]))
        owner.send_signal(signal.SIGKILL)
    try:
        wait_until_ended(noted.processes)
        assert inside.wait(timeout=LIMIT_S) != 0
        assert Path(f"/proc/{forked}").exists()
    finally:
        os.kill(forked, signal.SIGKILL)
    assert _traces_of(lab_name) != []
    with open_lab(LabSpec(servers=1)):
        assert _traces_of(lab_name) == []


def test_a_lab_stays_up_for_other_processes_until_it_is_taken_down(lab_name: str) -> None:
    code = (
        "import sys\nfrom scripts.netlab.base import LabSpec\nfrom scripts.netlab.labs import open_detached\n"
        "open_detached(LabSpec(servers=2, cpus=0.3), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, lab_name], cwd=ROOT, check=True, timeout=LIMIT_S)
    with attach(lab_name) as lab:
        assert reaches(lab.servers[0], lab.servers[1].address)
        lab.set_rates(SLOW, None)
    again = attach(lab_name)
    assert again.spec.external == SLOW
    assert state.clean_stale() == [] or lab_name in state.lab_names()
    assert len(again.cards()) == 2
    holders = state.read_notes(lab_name).processes
    state.take_down(lab_name)
    assert not any(process.alive() for process in holders)
    assert _traces_of(lab_name) == []
    with pytest.raises(ConfigError, match="no lab called"):
        attach(lab_name)
