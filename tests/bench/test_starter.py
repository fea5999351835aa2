"""The command that starts the ranks of a micro-benchmark."""

from __future__ import annotations

import sys

import pytest

from dglx_dist.errors import ConfigError
from scripts.bench.micro.starter import torchrun_command


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
