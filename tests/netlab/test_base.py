"""Labels of labs, cores dealt out to servers, and plain loopback."""

from __future__ import annotations

import json
import math

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab.base import LabSpec, LoopbackLab, deal_out, label
from tests.netlab.helpers import PaperLab


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"external": "100mbit"}, "namespaces, 100mbit between servers"),
        ({"external": "1gbit", "internal": "40gbit"}, "namespaces, 1gbit between servers, 40gbit within"),
        ({}, "namespaces, links not limited"),
    ],
)
def test_the_rates_that_are_held_are_named(rates: dict[str, str], says: str) -> None:
    spec = LabSpec(servers=2, **{name: Rate.parse(rate) for name, rate in rates.items()})
    assert label(PaperLab(spec)) == says


TWO, FOUR, EIGHT = (0, 1), (0, 2, 4, 6), tuple(range(8))


def cores(dealt: tuple[object, ...]) -> list[tuple[int, ...]]:
    return [share.cores for share in dealt]  # type: ignore[attr-defined]


def test_whole_cores_are_owned() -> None:
    """8 cores for 3 servers: two each, two stay idle, and no quota is needed."""
    dealt = deal_out(EIGHT, 3, None)
    assert cores(dealt) == [(0, 1), (2, 3), (4, 5)]
    assert {share.share for share in dealt} == {2.0}
    assert not any(share.needs_quota for share in dealt)


def test_cores_are_those_that_there_are() -> None:
    assert cores(deal_out(FOUR, 2, None)) == [(0, 2), (4, 6)]


def test_more_servers_than_cores_share_one() -> None:
    dealt = deal_out(TWO, 4, None)
    assert cores(dealt) == [(0,), (1,), (0,), (1,)]
    assert {share.share for share in dealt} == {0.5}
    assert all(share.needs_quota for share in dealt)


def test_three_on_two_cores_share_both() -> None:
    """Two thirds each: two of them fit on no core."""
    dealt = deal_out(TWO, 3, None)
    assert cores(dealt) == [TWO, TWO, TWO]
    assert all(math.isclose(share.share, 2 / 3) and share.needs_quota for share in dealt)


def test_a_fraction_has_cores_of_its_own_where_there_are_enough() -> None:
    dealt = deal_out(FOUR, 2, 1.5)
    assert cores(dealt) == [(0, 2), (4, 6)]
    assert all(share.share == 1.5 and share.needs_quota for share in dealt)
    assert cores(deal_out(TWO, 2, 0.25)) == [(0,), (1,)]


@pytest.mark.parametrize(("servers", "cpus"), [(4, 0.1), (4, 0.3), (7, 2 / 7), (3, 0.5)])
def test_no_core_is_dealt_out_twice(servers: int, cpus: float) -> None:
    dealt = deal_out(TWO, servers, cpus)
    load = {
        core: sum(share.share / len(share.cores) for share in dealt if core in share.cores) for core in TWO
    }
    assert all(share <= 1 + 1e-9 for share in load.values())


def test_refuses_more_than_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"4 servers of 1 cores need 4, and there are 2; give each at most 0\.5"
    ):
        deal_out(TWO, 4, 1.0)


def test_says_what_holds_it() -> None:
    (fraction,) = deal_out(TWO, 1, 0.5)
    (whole,) = deal_out(TWO, 1, None)
    assert fraction.held_by(quota=True) == "affinity and quota"
    assert whole.held_by(quota=False) == "affinity"
    # Half a core on a core of which nobody keeps the other half from it.
    assert fraction.held_by(quota=False) == "nothing"


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
