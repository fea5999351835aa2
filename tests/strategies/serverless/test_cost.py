"""Dollars: the paper's example, published prices, rounding up, and the label of simulated figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.cost import Counts, bill, billed_gb_seconds, dollars, prices

PAPER, NOW = prices("dorylus"), prices("aws")


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0, 0), (1e-9, 1), (0.1, 1), (0.1 + 1e-9, 2), (0.3, 3), (0.7, 7), (0.70001, 8)]
)
def test_durations_are_rounded_up_to_whole_steps(seconds: float, steps: int) -> None:
    assert billed_gb_seconds(seconds, 1024, PAPER) == pytest.approx(steps / 10, abs=1e-15)


def test_servers_are_paid_by_the_second_and_functions_by_use() -> None:
    assert billed_gb_seconds(0.0123, 512, NOW) == pytest.approx(0.013 / 2)  # by the step of the table
    servers = {"c5n.2xlarge": 8 * 900, "c5.large": 900}
    cost = bill(Counts(), servers, NOW, simulated=False)
    assert cost.servers == pytest.approx(8 * 0.25 * 0.432 + 0.25 * 0.085)
    assert (cost.functions, cost.total) == (0, cost.servers)


def test_simulated_and_unknown_dollars_say_so_wherever_they_are_shown() -> None:
    used = Counts(invocations=1, warm=1, gb_s=0.1875)
    ours, paid = (str(bill(used, {}, NOW, simulated=simulated)) for simulated in (True, False))
    assert "simulated" in ours
    assert "aws of 2025-01-01" in ours
    assert "simulated" not in paid
    assert "at least" not in paid
    cost = bill(used + Counts(invocations=2), {}, NOW, simulated=False)
    assert "at least, for 2 durations are not known" in str(cost)


def test_nonsense_is_refused() -> None:
    for seconds, memory in ((-1, 192), (float("nan"), 192), (float("inf"), 192), (1, 0)):
        with pytest.raises(ConfigError):
            billed_gb_seconds(seconds, memory, NOW)


def test_dollars_are_formatted_readably() -> None:
    shown = {0: "$0.00", 0.000123: "$0.000123", 0.5125: "$0.512", 12.3: "$12.30"}
    assert {amount: dollars(amount) for amount in shown} == shown


@pytest.mark.parametrize("name", ["aws", "dorylus"])
def test_a_table_says_when_and_where_and_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    table = prices(name)
    assert table.date >= "2020"
    assert len(table.source) > 20
    file = tmp_path / "prices.json"
    file.write_text(table.to_json())
    assert prices(str(file)) == table


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"date": "yesterday"}, "a date like"),
        ({"per_request": -1}, "per_request"),
        ({"per_gb_second": "free"}, "per_gb_second"),
        ({"per_server_hour": {}}, "object of 1 to 10000"),
        ({"per_server_hour": [1]}, "expected an object"),
        ({"per_server_hour": {"mine": True}}, "mine"),
        ({"per_hour": 1}, "did you mean 'per_server_hour'"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, object], told: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({**json.loads(prices().to_json()), **change}))
    with pytest.raises(ConfigError, match=told):
        prices(str(file))


def test_an_unknown_table_and_an_unknown_server_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dorylus'"):
        prices("dorilus")
    with pytest.raises(ConfigError, match=r"did you mean 'c5n.2xlarge'"):
        prices("aws").server("c5n.2xlage")
