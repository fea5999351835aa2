"""The allocator's settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Prints the MB that 128 MB leave behind, then the pages that the system hands out for 64 MB
# after more than that has been used and freed.
PROGRAM = """
import resource, sys, torch
from pathlib import Path
from dglx_dist.data.storage.files import keep_memory, return_memory

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS")) // 1024

assert sys.argv[1] == "default" or keep_memory()
assert sys.argv[1] != "returned" or return_memory()
before = resident()
tensors = [torch.ones(2_000_000) for _ in range(16)]
last = torch.ones(100)
del tensors
print(resident() - before)
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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_memory_is_kept_for_the_next_tensor_or_returned() -> None:
    (left_kept, pages_kept), (left_returned, _) = printed_by("kept"), printed_by("returned")
    _, pages_default = printed_by("default")
    assert pages_kept < 100 < 10_000 < pages_default
    assert left_returned < 20 < 100 < left_kept
