"""Where a rank listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import (
    endpoint_of,
    interface_address,
    link_speed,
    listening_address,
    read_rendezvous,
)
from dglx_dist.errors import ConfigError
from tests.helpers.ranks import run_ranks


def rendezvous(**variables: str) -> object:
    common = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return read_rendezvous(common | variables)


def test_interface_is_honoured_and_unknown_ones_listed() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert listening_address(rendezvous(GLOO_SOCKET_IFNAME="lo")) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME='nope0'.*there are: .*lo"):
        listening_address(rendezvous(GLOO_SOCKET_IFNAME="nope0"))


def test_address_towards_the_rendezvous_is_taken() -> None:
    assert listening_address(rendezvous()) == "127.0.0.1"
    assert listening_address(rendezvous(MASTER_ADDR="localhost")) in ("127.0.0.1", "::1")


def test_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='no\.such\.host\.invalid'"):
        listening_address(rendezvous(MASTER_ADDR="no.such.host.invalid"))


def test_endpoints() -> None:
    assert endpoint_of("10.0.0.1", 7) == "tcp://10.0.0.1:7"
    assert endpoint_of("fe80::1", 7) == "tcp://[fe80::1]:7"


def _endpoint() -> str:
    with start_session() as session:
        return str(session.rpc._server.endpoint)


def test_ranks_listen_on_the_rendezvous_interface_only() -> None:
    endpoints = run_ranks(_endpoint, 2)
    assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)
    assert len(set(endpoints)) == 2


def test_the_speed_of_a_card_is_what_the_kernel_says(tmp_path: Path) -> None:
    speeds = {"10000": 1.25e9, "-1": None, "no number": None}
    assert link_speed("127.0.0.1", tmp_path) is None
    (tmp_path / "lo").mkdir()
    for text, speed in speeds.items():
        (tmp_path / "lo" / "speed").write_text(text + "\n")
        assert link_speed("127.0.0.1", tmp_path) == speed
    assert link_speed("192.0.2.1", tmp_path) is None
