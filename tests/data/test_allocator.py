"""The allocator's settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Counts the pages that the system hands out for 64 MB, when more than that has been used and freed before.
PROGRAM = """
import resource, torch
from dglx_dist.data.allocator import keep_memory
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
from dglx_dist.data.allocator import keep_memory, return_memory

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
