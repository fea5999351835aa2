import json

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import LabSpec, LoopbackLab, label, usable_cores

RATE = Rate.parse("100mbit")


def test_servers_are_numbered_and_share_one_address_and_no_card() -> None:
    with LoopbackLab(LabSpec(servers=3), "no root") as lab:
        assert [server.number for server in lab.servers] == [0, 1, 2]
        assert {(server.address, server.device) for server in lab.servers} == {("127.0.0.1", None)}
        assert all(set(server.cores) <= set(usable_cores()) for server in lab.servers)
        assert lab.cards() == ()
        assert (lab.kind, lab.missing) == ("loopback", "no root")


def test_commands_keep_to_the_cores_of_their_server() -> None:
    server = LoopbackLab(LabSpec(servers=2)).servers[1]
    assert server.inside(["a", "b"])[-2:] == ["a", "b"]
    cores = ",".join(map(str, server.cores))
    assert server.inside(["a"]) == ["taskset", "-c", cores, "a"]


def test_half_a_core_is_kept_to_and_not_said_to_be_held() -> None:
    server = LoopbackLab(LabSpec(servers=1, cpus=0.5)).servers[0]
    assert (server.cpu_held_by, server.inside(["a"])[0]) == ("nothing", "taskset")


def test_without_taskset_nothing_is_said_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    server = LoopbackLab(LabSpec(servers=1)).servers[0]
    assert (server.cpu_held_by, server.inside(["a"])) == ("nothing", ["a"])


def test_a_rate_that_was_asked_for_is_reported_as_not_held() -> None:
    lab = LoopbackLab(LabSpec(servers=2, external=RATE), "tc: not installed, apt-get install iproute2")
    said = json.loads(json.dumps(lab.describe()))
    assert said["rates_not_held"] == {"external": "100mbit"}
    assert (said["external"], said["internal"], said["servers"]) == (None, None, 2)
    assert said["missing"] == "tc: not installed, apt-get install iproute2"
    assert said["label"] == label(lab) == f"loopback, links not limited: {lab.missing}"


def test_a_rate_that_is_set_is_refused() -> None:
    lab = LoopbackLab(LabSpec(servers=2), "no root")
    lab.set_rates(None, None)
    for rates in ((RATE, None), (None, RATE)):
        with pytest.raises(ConfigError, match=r"rate 100mbit: plain loopback limits no link \(no root\)"):
            lab.set_rates(*rates)


def test_more_cores_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 servers of"):
        LoopbackLab(LabSpec(servers=2, cpus=float(len(usable_cores()))))
