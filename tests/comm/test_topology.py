"""Topologies from torchrun's environment, and the environment that is derived from one."""

import os
import re
from pathlib import Path

import pytest

from dglx_dist.comm.topology import (
    Settings,
    Topology,
    assign_servers,
    bind_to_loopback,
    build_rank_environment,
    is_launched_by_torchrun,
    read_rendezvous,
    read_settings,
    read_topology,
)
from dglx_dist.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def make_variables(rank: int = 0, world_size: int = 4, **more: object) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    variables = {"RANK": rank, "WORLD_SIZE": world_size, **address, **more}
    return {key: str(value) for key, value in variables.items()}


@pytest.mark.parametrize(
    ("world_size", "more", "servers"),
    [
        (4, {}, (0, 0, 0, 0)),
        (4, {"LOCAL_WORLD_SIZE": 2}, (0, 0, 1, 1)),
        (4, {"DGLX_RANKS_PER_SERVER": 2}, (0, 0, 1, 1)),
        (5, {"DGLX_RANKS_PER_SERVER": 2}, (0, 0, 1, 1, 2)),
        (2, {"DGLX_RANKS_PER_SERVER": 5}, (0, 0)),
        # A virtual server never spans machines, which share no memory.
        (6, {"LOCAL_WORLD_SIZE": 3, "DGLX_RANKS_PER_SERVER": 2}, (0, 0, 1, 2, 2, 3)),
    ],
)
def test_servers(world_size: int, more: dict[str, int], servers: tuple[int, ...]) -> None:
    topology = read_topology(make_variables(world_size - 1, world_size, **more))
    assert topology.server_of_rank == servers
    assert topology.num_servers == len(set(servers))
    assert topology.server == servers[-1]
    members = topology.ranks_of_server(topology.server)
    assert members[topology.local_rank] == world_size - 1
    assert all(topology.is_same_server(world_size - 1, rank) for rank in members)


def test_machines_of_different_size_are_put_right_and_without_torchrun_it_is_one_process() -> None:
    assert not is_launched_by_torchrun({})
    assert read_topology({}) == Topology(0, 1, (0,))
    guessed = read_topology(make_variables(0, 3, LOCAL_WORLD_SIZE=2))
    assert assign_servers(guessed, (0, 1, 1), {}).server_of_rank == (0, 1, 1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("RANK", ["4", "-1", "one"]),
        ("WORLD_SIZE", ["0", "4.0"]),
        ("LOCAL_WORLD_SIZE", ["0"]),
        ("DGLX_RANKS_PER_SERVER", ["0", ""]),
        ("DGLX_TIMEOUT", ["soon", "-3", "nan"]),
        ("DGLX_CURVE", ["perhaps"]),
        ("DGLX_OPTIONS", ["depth=2", "[2]"]),
        ("MASTER_PORT", ["0", "70000"]),
        ("GROUP_RANK", ["x"]),
    ],
)
def test_bad_values_are_named(name: str, values: list[str]) -> None:
    for value in values:
        read = read_rendezvous if name in ("MASTER_PORT", "GROUP_RANK") else read_topology
        with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} must be ")):
            read(make_variables() | {name: value})


def test_missing_address_error_contains_the_remedy() -> None:
    variables = make_variables()
    del variables["MASTER_ADDR"]
    with pytest.raises(ConfigError, match=r"MASTER_ADDR .*torchrun"):
        read_rendezvous(variables)


def test_settings_are_read_from_variables() -> None:
    variables = {"DGLX_TIMEOUT": "2.5", "DGLX_STRATEGY": "x", "DGLX_CURVE": "yes"}
    variables |= {"DGLX_OPTIONS": '{"depth": 2}', "DGL_CONF_PATH": "data/g.json"}
    expected = Settings(
        timeout_s=2.5, strategy="x", curve=True, options={"depth": 2}, part_config=Path("data/g.json")
    )
    assert read_settings(variables) == expected
    assert read_settings({"DGL_CONF_PATH": "", "LD_PRELOAD": ""}) == Settings()
    assert read_settings({"OMP_NUM_THREADS": "3,1"}) == Settings(omp_threads=3)
    assert read_settings({"OMP_NUM_THREADS": "many"}) == Settings()
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        assert read_settings({name: "x"}) == Settings(allocator_set=True)
    assert read_rendezvous(make_variables(GLOO_SOCKET_IFNAME="eth0,eth1")).interface == "eth0"
    assert read_rendezvous(make_variables(GROUP_WORLD_SIZE=1)).interface == "lo"
    # Without torchrun's word, other ranks may be on other machines.
    assert read_rendezvous(make_variables()).interface is None


@pytest.mark.parametrize("servers", [(1, 1), (0, 2), (0, 1, 0), (0,)])
def test_impossible_topologies_are_refused(servers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Topology(0, len(servers) if servers != (0,) else 2, servers)


def test_gloo_and_nccl_bind_to_loopback_unless_the_user_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in (GLOO, NCCL):
        monkeypatch.setenv(variable, "")  # restored behind the test
        monkeypatch.delenv(variable)
    bind_to_loopback(read_rendezvous(make_variables()))
    assert GLOO not in os.environ
    bind_to_loopback(read_rendezvous(make_variables(GROUP_WORLD_SIZE=2)))
    assert GLOO not in os.environ
    monkeypatch.setenv(NCCL, "eth7")
    bind_to_loopback(read_rendezvous(make_variables(GROUP_WORLD_SIZE=1)))
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "eth7")


def test_ranks_share_cores_and_keep_memory_and_user_settings() -> None:
    rank_environment = build_rank_environment(1, environment={"HOME": "/h"})
    assert (rank_environment["OMP_NUM_THREADS"], rank_environment["HOME"]) == (
        str(len(os.sched_getaffinity(0))),
        "/h",
    )
    assert rank_environment["MALLOC_MMAP_MAX_"] == "0"
    assert build_rank_environment(10_000, environment={})["OMP_NUM_THREADS"] == "1"
    inputs = {"OMP_NUM_THREADS": "7", "MALLOC_MMAP_MAX_": "5"}
    rank_environment = build_rank_environment(2, environment=inputs)
    assert {name: rank_environment[name] for name in inputs} == inputs
    assert "DGLX_RANKS_PER_SERVER" not in rank_environment
    with pytest.raises(ConfigError, match="at least 1"):
        build_rank_environment(0)
