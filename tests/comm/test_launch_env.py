"""What a launcher sets for ranks, and what it leaves alone."""

from __future__ import annotations

import os

import pytest

from dglx_dist.comm.topology import rank_environment
from dglx_dist.errors import ConfigError


def test_cores_are_shared_and_memory_is_kept() -> None:
    cores = len(os.sched_getaffinity(0))
    found = rank_environment(1, environment={"HOME": "/h"})
    assert found["OMP_NUM_THREADS"] == str(cores)
    assert found["HOME"] == "/h"
    assert found["MALLOC_MMAP_MAX_"] == "0"
    assert found["KINETO_LOG_LEVEL"] == "99"
    assert rank_environment(10_000, environment={})["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_stays() -> None:
    given = {"OMP_NUM_THREADS": "7", "MALLOC_MMAP_MAX_": "5", "KINETO_LOG_LEVEL": "0"}
    found = rank_environment(2, environment=given)
    assert {name: found[name] for name in given} == given
    assert "DGLX_RANKS_PER_SERVER" not in found


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        rank_environment(0)
