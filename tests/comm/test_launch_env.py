"""What a launcher sets for ranks, and what it leaves alone."""

from __future__ import annotations

import os
import sys

import pytest

from dglx_dist.comm.topology import rank_environment, torchrun_command
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
    mine = {"OMP_NUM_THREADS": "7", "MALLOC_MMAP_MAX_": "5", "KINETO_LOG_LEVEL": "0"}
    found = rank_environment(2, environment=mine)
    assert {name: found[name] for name in mine} == mine
    assert "DGLX_RANKS_PER_SERVER" not in found


@pytest.mark.parametrize(
    ("ranks", "servers", "per_server"), [(4, 2, "2"), (3, 2, "2"), (5, 1, "5"), (3, 3, "1")]
)
def test_ranks_are_cut_into_servers(ranks: int, servers: int, per_server: str) -> None:
    command, environment = torchrun_command(["train.py", "--x"], ranks, servers)
    assert command[0] == sys.executable
    assert command[-4:] == ["--nproc-per-node", str(ranks), "train.py", "--x"]
    assert environment["DGLX_RANKS_PER_SERVER"] == per_server


@pytest.mark.parametrize(("ranks", "servers"), [(2, 3), (4, 3), (0, 1), (2, 0)])
def test_impossible_servers_are_refused(ranks: int, servers: int) -> None:
    with pytest.raises(ConfigError, match="multiple"):
        torchrun_command(["train.py"], ranks, servers)
    with pytest.raises(ConfigError, match="at least 1"):
        rank_environment(0)
