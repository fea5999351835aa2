"""Processes told apart for good, links of servers, and what their cards count."""

import subprocess
import time
from pathlib import Path

import pytest

from dglx_dist.planner.records import Rate
from scripts.netlab import servers
from scripts.netlab.base import LabError
from scripts.netlab.servers import find_process


def test_a_process_lives_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    process = find_process(child.pid)
    assert process.alive()
    process.kill()
    child.wait(timeout=30)
    assert not process.alive()
    process.kill()
    with pytest.raises(ProcessLookupError):
        find_process(child.pid)


@pytest.mark.parametrize(("rate", "burst"), [("10gbit", 2_500_000), ("1gbit", 262_144), ("49mbit", 30_625)])
def test_a_bucket_lasts_20_milliseconds_and_less_where_bundles_are_torn(rate: str, burst: int) -> None:
    words = ["tbf", "rate", f"{Rate.parse(rate).bits_per_s}bit", "burst", str(burst), "latency", "50ms"]
    assert servers.limit_command("eth0", Rate.parse(rate))[6:] == words


def test_a_failure_is_told_with_command_and_answer() -> None:
    with pytest.raises(LabError, match=r"sh -c 'echo no such thing >&2; exit 3': no such thing"):
        servers.run_command(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(LabError, match=r"false: exit code 1"):
        servers.run_command(["false"])


def test_what_hangs_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "_COMMAND_TIMEOUT_S", 0.5)
    noted = tmp_path / "pid"
    with pytest.raises(LabError, match=r"no end of this within"):
        servers.run_command(["sh", "-c", f"sleep 600 & echo $! > {noted}; wait"])
    child = int(noted.read_text())
    deadline = time.monotonic() + 20
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return find_process(pid).alive()
    except ProcessLookupError:
        return False
