"""Rates of links as users write them."""

from __future__ import annotations

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("2.5Gbit", 2_500_000_000),
        (" 100 mbit ", 10**8),
        ("800kbit", 800_000),
        ("8000bit", 8000),
    ],
)
def test_reads_what_tc_reads(text: str, bits: int) -> None:
    assert Rate.parse(text).bits_per_s == bits


@pytest.mark.parametrize("text", ["1gbit", "2.5gbit", "100mbit", "800kbit"])
def test_is_written_as_it_was_read(text: str) -> None:
    assert str(Rate.parse(text)) == text


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
