"""Missing ranks are named when ranks come and go during the rendezvous."""

import gc
import socket
from dataclasses import replace

import psutil
import pytest
from torch.distributed import HashStore

from dglx_dist.comm import rendezvous as module
from dglx_dist.comm.rendezvous import JobStore
from dglx_dist.comm.topology import Rendezvous, read_rendezvous
from dglx_dist.errors import ConfigError, PeerError

KEYS = ("barrier/1/0", "barrier/1/1", "barrier/1/2")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> JobStore:
    """Return the store of rank 1 of 3, which looks for the others at once."""
    monkeypatch.setattr(module, "_CHECK_EVERY_S", 0.0)
    return JobStore(HashStore(), 1, 3, timeout_s=30)


def test_a_rank_that_came_and_ended_while_it_was_asked_is_not_missing(store: JobStore) -> None:
    request = []

    def ended_meanwhile(missing: list[int]) -> None:
        request.append(missing)
        for rank in missing:
            store.raw.set(KEYS[rank], "the end")
        raise PeerError(f"rank {missing[0]} does not answer")

    store.barrier("the end", check=ended_meanwhile)
    assert request == [[0, 2]]


def test_error_names_the_rank_that_is_still_missing(store: JobStore) -> None:
    """Rank 0 came and ended while it was asked; rank 2 never comes."""

    def check(missing: list[int]) -> None:
        store.raw.set(KEYS[0], "the end")
        raise PeerError(f"rank {missing[0]} does not answer")

    with pytest.raises(PeerError, match="rank 2 does not answer"):
        store.barrier("the end", check=check)


def test_a_rank_that_failed_after_it_came_has_not_failed_before(store: JobStore) -> None:
    """Its last word is found by the ranks that still wait for others."""

    def failed_meanwhile(missing: list[int]) -> None:
        request.append(missing)
        store.raw.set(KEYS[0], "the end")
        JobStore(store.raw, 0, 3, timeout_s=30).report_failure("no room")
        if len(request) > 1:
            store.raw.set(KEYS[2], "the end")

    request: list[list[int]] = []
    store.barrier("the end", check=failed_meanwhile)
    assert request == [[0, 2], [2]]


def rendezvous_at(port: int, host: str = "127.0.0.1") -> Rendezvous:
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    return read_rendezvous({**variables, "LOCAL_WORLD_SIZE": "1"})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_store_that_rank_0_hosts_listens_on_loopback_only_and_serves_all_its_sessions() -> None:
    port = free_port()
    first = module.open_store(rendezvous_at(port), 0, 1, 30.0)
    first.set("session", "first")
    listening = [
        net_connection.laddr.ip
        for net_connection in psutil.net_connections("tcp")
        if net_connection.status == psutil.CONN_LISTEN and net_connection.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]
    second = module.open_store(rendezvous_at(port), 0, 1, 30.0)
    assert not second.check(["session"])
    del first, second
    gc.collect()
    socket.create_server(("127.0.0.1", port)).close()


def test_a_rank_that_finds_no_store_says_so() -> None:
    port = free_port()
    with pytest.raises(PeerError, match=rf"rank 1 found no rendezvous at .*:{port}") as caught:
        module.open_store(rendezvous_at(port), 1, 2, 2.0)
    assert "something else" not in str(caught.value)


def test_a_launcher_of_this_machine_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOCAL_STORE_TIMEOUT_S", 0.5)
    rendezvous = replace(rendezvous_at(free_port()), hosted_by_agent=True)
    with pytest.raises(PeerError, match=r"no rendezvous .* within 0\.5 s\. The launcher should serve it"):
        module.open_store(rendezvous, 0, 2, 300.0)


def test_another_server_at_the_address_is_no_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
        with pytest.raises(PeerError, match=rf"cannot serve the rendezvous at 127\.0\.0\.1:{port}: .*in use"):
            module.open_store(rendezvous_at(port), 0, 1, 30.0)
        with pytest.raises(PeerError, match=rf"rank 1 found no rendezvous .*:{port}.*something else"):
            module.open_store(rendezvous_at(port), 1, 2, 0.5)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='256\.1\.1\.1' is not a known host"):
        module.open_store(rendezvous_at(1, "256.1.1.1"), 0, 1, 2.0)
