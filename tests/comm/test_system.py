"""Control groups that limit cores and memory, and the allocator's settings."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from dglx_dist.comm import system as cgroups
from dglx_dist.comm.topology import read_settings
from tests.helpers.cgroups import quota_of

# Counts the pages that the system hands out for 64 MB, when more than that has been used and freed before.
PROGRAM = """
import resource, torch
from dglx_dist.comm.system import keep_memory
if {kept}:
    assert keep_memory()
for floats in (20_000_000, 20_000_000, 16_000_000):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(floats)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed_by(program: str) -> int:
    # A process each: what was kept once serves later allocations, and not all of it goes back. And a fresh
    # environment: what the developer set for the allocator must not decide the test.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_large_tensor_is_paged_in_once_when_memory_is_kept() -> None:
    kept, default = (printed_by(PROGRAM.format(kept=kept)) for kept in (True, False))
    assert kept < 100 < 10_000 < default


RETURNED = """
import torch
from pathlib import Path
from dglx_dist.comm.system import keep_memory, return_memory

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS")) // 1024

def left_after():
    before = resident()
    tensors = [torch.ones(2_000_000) for _ in range(16)]
    last = torch.ones(100)
    del tensors
    return resident() - before

assert keep_memory()
if {returned}:
    assert return_memory()
print(left_after())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_what_is_freed_goes_back_where_memory_counts() -> None:
    returned, kept = (printed_by(RETURNED.format(returned=returned)) for returned in (True, False))
    assert returned < 20 < 100 < kept


def test_what_the_user_said_about_the_allocator_is_seen() -> None:
    assert not read_settings({}).allocator_set
    assert not read_settings({"LD_PRELOAD": "", "OMP_NUM_THREADS": "1"}).allocator_set
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        assert read_settings({name: "x"}).allocator_set


@pytest.fixture
def group() -> Path:
    """A group of half a core."""
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    made = cgroups.make(f"dglx-lab-test-{secrets.token_hex(5)}-0", 0.5)
    if made is None:
        pytest.skip("this machine lets no control group be made")
    return made


def test_a_group_holds_processes_to_its_share(group: Path) -> None:
    try:
        assert quota_of(group) == 0.5
        done = subprocess.run(
            ["sh", "-c", f"echo 0 > {group}/cgroup.procs && cat /proc/self/cgroup"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert group.name in done.stdout
        assert group in cgroups.find(group.name)
    finally:
        cgroups.remove(group)
    assert not group.exists()
    assert cgroups.find(group.name) == []
    cgroups.remove(group)


def _as_files(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("0")
    return folder


V1, V2 = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


@pytest.mark.parametrize("names", [V1, V2], ids=["version 1", "version 2"])
@pytest.mark.parametrize(
    ("share", "quota_us", "period_us"), [(0.25, 2_500, 10_000), (1.5, 15_000, 10_000), (0.02, 1_000, 50_000)]
)
def test_periods_are_short_and_no_quota_is_below_a_millisecond(
    names: tuple[str, ...], share: float, quota_us: int, period_us: int, tmp_path: Path
) -> None:
    """Both versions of the kernel's files, as plain files."""
    folder = _as_files(tmp_path / "group", names)
    cgroups.set_quota(folder, share)
    written = " ".join((folder / name).read_text() for name in names)
    assert written == f"{quota_us} {period_us}"
    assert quota_of(folder) == pytest.approx(share)


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("cgroup {root}/cpu cgroup rw,cpu,cpuacct 0 0\n", ["cpu/jobs/one", "cpu"]),
        ("cgroup {root}/memory cgroup rw,memory 0 0\n", []),
        ("cgroup2 {root}/unified cgroup2 rw,nsdelegate 0 0\n", ["unified/session", "unified"]),
        ("tmpfs {root} tmpfs rw 0 0\n", []),
    ],
)
def test_groups_are_made_below_our_own_or_at_the_top(
    mounts: str, expected: list[str], tmp_path: Path
) -> None:
    for folder in ("cpu/jobs/one", "memory", "unified/session"):
        (tmp_path / folder).mkdir(parents=True)
    own = "4:cpu,cpuacct:/jobs/one\n3:memory:/\n0::/session\n"
    found = cgroups.parents(mounts.format(root=tmp_path), own)
    assert found == [tmp_path / folder for folder in expected]


def test_no_group_where_there_is_no_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain folder holds no processes: it has no file for quotas, and must not stay."""
    monkeypatch.setattr(cgroups, "_parents", lambda: [tmp_path, tmp_path / "missing"])
    assert cgroups.make("one", 0.5) is None
    assert list(tmp_path.iterdir()) == []
