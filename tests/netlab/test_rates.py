"""Rates as users write them and as tc gets them."""

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


@pytest.mark.parametrize(
    ("rate", "burst"),
    [
        ("10gbit", 2_500_000),  # 2 ms
        ("1gbit", 262_144),
        ("60mbit", 150_000),  # 20 ms
        ("49mbit", 30_625),  # 5 ms, bundles are torn
        ("1mbit", 16_384),
    ],
)
def test_a_bucket_lasts_20_milliseconds_and_less_where_bundles_are_torn(rate: str, burst: int) -> None:
    words = ["tbf", "rate", f"{Rate.parse(rate).bits_per_s}bit", "burst", str(burst), "latency", "50ms"]
    assert Rate.parse(rate).tbf(may_tear=True) == words


def test_a_packet_of_64_kib_fits_where_it_cannot_be_torn() -> None:
    assert "73728" in Rate.parse("1mbit").tbf(may_tear=False)
