"""Labels of labs, cores dealt out to servers, and plain loopback."""

import json

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import LabSpec, LoopbackLab, deal_out, label

TWO, FOUR, EIGHT = (0, 1), (0, 2, 4, 6), tuple(range(8))


@pytest.mark.parametrize(
    ("available", "servers", "cpus", "cores", "share"),
    [
        # Two whole ones each: the last two stay idle, and no quota is needed.
        (EIGHT, 3, None, [(0, 1), (2, 3), (4, 5)], 2.0),
        (FOUR, 2, None, [(0, 2), (4, 6)], 2.0),
        (TWO, 4, None, [(0,), (1,), (0,), (1,)], 0.5),
        # Two thirds each: two of them fit on no core.
        (TWO, 3, None, [TWO, TWO, TWO], 2 / 3),
        (FOUR, 2, 1.5, [(0, 2), (4, 6)], 1.5),
        (TWO, 2, 0.25, [(0,), (1,)], 0.25),
    ],
)
def test_servers_have_whole_cores_or_share_what_there_is(
    available: tuple[int, ...], servers: int, cpus: float | None, cores: list[tuple[int, ...]], share: float
) -> None:
    dealt = deal_out(available, servers, cpus)
    assert [item.cores for item in dealt] == cores
    assert [item.share for item in dealt] == pytest.approx([share] * servers)
    assert {item.needs_quota for item in dealt} == {share != 2.0}


RATE = Rate.parse("100mbit")


def test_commands_keep_to_the_cores_of_their_server() -> None:
    server = LoopbackLab(LabSpec(servers=2)).servers[1]
    assert server.inside(["a", "b"])[-2:] == ["a", "b"]
    cores = ",".join(map(str, server.cores))
    assert server.inside(["a"]) == ["taskset", "-c", cores, "a"]


def test_without_taskset_nothing_is_said_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    server = LoopbackLab(LabSpec(servers=1)).servers[0]
    assert (server.cpu_held_by, server.inside(["a"])) == ("nothing", ["a"])


def test_a_rate_that_was_asked_for_is_reported_as_not_held() -> None:
    lab = LoopbackLab(LabSpec(servers=2, external=RATE), "tc: not installed, apt-get install iproute2")
    record = json.loads(json.dumps(lab.describe()))
    assert record["rates_not_held"] == {"external": "100mbit"}
    assert (record["external"], record["internal"], record["servers"]) == (None, None, 2)
    assert record["missing"] == "tc: not installed, apt-get install iproute2"
    assert record["label"] == label(lab) == f"loopback, links not limited: {lab.missing}"


def test_a_rate_that_is_set_is_refused() -> None:
    lab = LoopbackLab(LabSpec(servers=2), "no root")
    lab.set_rates(None, None)
    for rates in ((RATE, None), (None, RATE)):
        with pytest.raises(ConfigError, match=r"rate 100mbit: plain loopback limits no link \(no root\)"):
            lab.set_rates(*rates)
