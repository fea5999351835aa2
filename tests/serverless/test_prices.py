"""Price tables: dated, with a source, and replaceable by a file."""

import json
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.cost import prices


def test_the_papers_prices_are_those_of_the_paper() -> None:
    paper = prices("dorylus")
    assert paper.per_request == pytest.approx(0.2e-6)
    assert paper.per_gb_second * 192 / 1024 * 3600 == pytest.approx(0.01125)
    assert (paper.step_s, paper.server("c5n.2xlarge")) == (0.1, pytest.approx(4 * 0.108))


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
        ({"per_server_hour": {}}, "at least one kind"),
        ({"per_server_hour": [1]}, "dollars by kind"),
        ({"per_server_hour": {"mine": True}}, "mine"),
        ({"per_hour": 1}, "unknown field"),
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
