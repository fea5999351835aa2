"""Limits and use of memory, the allocator's settings, and sizes as text."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dglx_dist.memory import format_bytes, machine_memory, peak_bytes, read_size, resident_bytes

# Prints the MB that 128 MB leave behind, then the pages that the system hands out for 64 MB
# after more than that has been used and freed.
PROGRAM = """
import resource, sys, torch
from pathlib import Path
from dglx_dist.memory import keep_memory, return_memory

def resident_bytes():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS")) // 1024

assert sys.argv[1] == "default" or keep_memory()
assert sys.argv[1] != "returned" or return_memory()
before = resident_bytes()
tensors = [torch.ones(2_000_000) for _ in range(16)]
last = torch.ones(100)
del tensors
print(resident_bytes() - before)
for floats in (20_000_000, 20_000_000, 16_000_000):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(floats)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed_by(setting: str) -> list[int]:
    # A process each: what was kept once serves later allocations, and not all of it goes back. And a fresh
    # environment: what the developer set for the allocator must not decide the test.
    command, environment = [sys.executable, "-c", PROGRAM, setting], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_memory_is_kept_for_the_next_tensor_or_returned() -> None:
    (left_kept, pages_kept), (left_returned, _) = printed_by("kept"), printed_by("returned")
    _, pages_default = printed_by("default")
    assert pages_kept < 100 < 10_000 < pages_default
    assert left_returned < 20 < 100 < left_kept


def test_a_small_process_does_not_inherit_the_peak_of_the_one_that_starts_it() -> None:
    held = bytearray(b"x" * (300 << 20))
    code = "from dglx_dist.memory import peak_bytes; print(peak_bytes())"
    assert 1 << 20 < int(subprocess.check_output([sys.executable, "-c", code], timeout=60)) < len(held)
    assert len(held) < resident_bytes() <= peak_bytes()


def test_bytes() -> None:
    shown = [format_bytes(number) for number in (0, 999, 1000, 1536, 999_600, 12_345_678_901)]
    assert shown == ["0 B", "999 B", "1 KB", "1.54 KB", "1 MB", "12.3 GB"]
    assert [read_size(format_bytes(10**digits)) for digits in range(18)] == [
        10**digits for digits in range(18)
    ]


@pytest.mark.parametrize(
    ("own", "written"),
    [
        # Its own group, or one around it, or that of a container, whose path is not below what it sees.
        ("0::/pod/job\n", {"pod/memory.max": "1000", "pod/memory.current": "600"}),
        ("0::/far/away\n", {"memory.max": "1000", "memory.current": "600"}),
        (
            "3:cpu:/x\n4:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "1000",
                "memory/job/memory.usage_in_bytes": "600",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/x/memory.limit_in_bytes": "1",
            },
        ),
    ],
)
def test_the_memory_of_a_control_group_counts(tmp_path: Path, own: str, written: dict[str, str]) -> None:
    for name, value in written.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
        (path.parent / "memory.stat").write_text("inactive_file 100\ntotal_inactive_file 100\n")
    (tmp_path / "own").write_text(own)
    assert machine_memory(tmp_path / "groups", tmp_path / "own") == (1000, 500)
    total, free = machine_memory(tmp_path / "none", tmp_path / "own")
    assert 1000 < free <= total


@pytest.mark.parametrize(("kind", "name"), [(resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data")])
def test_the_limits_of_the_process_count(kind: int, name: str) -> None:
    before, limit = resource.getrlimit(kind), getattr(psutil.Process().memory_info(), name) + (200 << 20)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        total, free = machine_memory()
    finally:
        resource.setrlimit(kind, before)
    assert total <= limit
    assert 150 << 20 < free < 210 << 20
