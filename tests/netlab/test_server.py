"""What a command sees that runs on an emulated server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import LabError
from scripts.netlab.labs import NamespaceLab
from scripts.netlab.servers import CARD, NamespaceServer, Process, cgroup_name
from tests.helpers.cgroups import quota_of
from tests.netlab.servers import lab_of, output, python

pytestmark = pytest.mark.usefixtures("needs_lab")


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
    said = [python(server, code) for server in pair.servers]
    assert said[0] == "server-0 server-0 10.77.0.1 10.77.0.2 server-0 127.0.0.1"
    assert said[1] == "server-1 server-1 10.77.0.2 10.77.0.2 server-0 127.0.0.1"
    assert socket.gethostname() == ours
    assert "server-0" not in Path("/etc/hosts").read_text()


def test_a_command_starts_in_the_folder_of_its_caller(pair: NamespaceLab, tmp_path: Path) -> None:
    assert output(pair.servers[0], "pwd", cwd=tmp_path) == str(tmp_path)
    assert output(pair.servers[0], "echo", "a b", "$HOME; 'c'", "") == "a b $HOME; 'c'"


def test_the_exit_code_of_a_command_comes_back(pair: NamespaceLab) -> None:
    assert subprocess.run(pair.servers[0].inside(["sh", "-c", "exit 7"]), check=False).returncode == 7


def test_processes_are_held_to_their_cores_and_quota() -> None:
    """A quarter of one core for each of two servers: 2.5 ms in every 10."""
    with lab_of(2, cpus=0.25) as lab:
        for server in lab.servers:
            inside = python(server, "import os; print(*sorted(os.sched_getaffinity(0)))")
            assert [int(core) for core in inside.split()] == list(server.cores)
            assert len(server.cores) == 1
            if server.facts.cgroup is None:
                assert server.cpu_held_by == "nothing"
                continue
            assert server.cpu_held_by == "affinity and quota"
            assert quota_of(Path(server.facts.cgroup)) == pytest.approx(0.25)
            assert cgroup_name(lab.name, server.number) in output(server, "cat", "/proc/self/cgroup")


def test_a_rank_reads_its_own_card(pair: NamespaceLab) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}\n"
    code += f"from scripts.netlab.servers import read_card; print(read_card('{CARD}').sent)"
    sent = int(python(pair.servers[0], code))
    assert sent <= pair.cards()[0].sent < sent + 10_000


def test_a_server_that_is_gone_is_not_taken_for_who_got_its_number(pair: NamespaceLab) -> None:
    """Its first process has ended, and this one has the number now: its card is this machine's."""
    facts = replace(pair.servers[0].facts, init=Process(pid=os.getpid(), started=1))
    gone = NamespaceServer(facts)
    with pytest.raises(LabError, match="server 0 is down; the lab was taken down meanwhile"):
        gone.card()
    with pytest.raises(LabError, match="server 0 is down"):
        gone.inside(["true"])


def test_orphans_leave_no_zombies(pair: NamespaceLab) -> None:
    """A process whose parent has ended goes to the first one of its server, which must not collect it."""
    output(pair.servers[0], "sh", "-c", "(sleep 0.01 &) ; sleep 0.2")
    assert pair.servers[0].alive()
    states = [
        Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
        for name in _children(pair.servers[0].facts.init.pid)
    ]
    assert "Z" not in states


def _children(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("this kernel does not list children")
    return children.read_text().split()
