"""Rates of links as users write them."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate


@pytest.mark.parametrize(
    ("text", "bits", "written"),
    [
        ("1gbit", 10**9, "1gbit"),
        ("2.5Gbit", 2_500_000_000, "2.5gbit"),
        (" 100 mbit ", 10**8, "100mbit"),
        ("800kbit", 800_000, "800kbit"),
        ("8000bit", 8000, "8kbit"),
    ],
)
def test_reads_and_writes_what_tc_reads(text: str, bits: int, written: str) -> None:
    assert Rate.parse(text).bits_per_s == bits
    assert str(Rate.parse(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        *("", "fast", "100", "100mb", "-1gbit", "1kbit", "0mbit", "1gbit 2gbit", "nan gbit", "1001gbit"),
        "9" * 400 + "gbit",
    ],
)
def test_refuses_others_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="100mbit"):
        Rate.parse(text)
