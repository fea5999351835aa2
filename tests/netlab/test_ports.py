import socket

import pytest

from dglx_dist.errors import LabError
from scripts.netlab import launch
from scripts.netlab.launch import claim_port, nobody_listens


def test_a_claimed_port_is_nobody_elses_until_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_FIRST", 20_000)
    monkeypatch.setattr(launch, "_LAST", 20_002)
    monkeypatch.setattr(launch, "_TRIES", 2)
    first = claim_port("a test", is_free=lambda number: True)
    second = claim_port("a test", is_free=lambda number: True)
    assert {first.number, second.number} == {20_000, 20_001}
    with pytest.raises(LabError, match="no free port between 20000 and 20002"):
        claim_port("a test", is_free=lambda number: True)
    elsewhere = claim_port("another test", is_free=lambda number: True)
    second.close()
    again = claim_port("a test", is_free=lambda number: True)
    assert again.number == second.number
    for port in (first, elsewhere, again):
        port.close()


def test_a_port_that_somebody_listens_at_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        assert not nobody_listens(number)
        monkeypatch.setattr(launch, "_FIRST", number)
        monkeypatch.setattr(launch, "_LAST", number + 1)
        monkeypatch.setattr(launch, "_TRIES", 1)
        with pytest.raises(LabError):
            claim_port("a test", is_free=nobody_listens)
