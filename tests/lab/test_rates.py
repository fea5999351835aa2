"""Rates as users write them and as tc gets them."""

from __future__ import annotations

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.lab.rates import Rate


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
    "text", ["", "fast", "100", "100mb", "-1gbit", "1kbit", "0mbit", "1gbit 2gbit", "nan gbit"]
)
def test_refuses_others_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="100mbit"):
        Rate.parse(text)


def test_bucket_is_256_kib_until_two_milliseconds_are_more() -> None:
    """256 KiB are 2 ms at 1.05 Gbit/s; at 10 Gbit/s 2 ms are 2.5 MB."""
    shape = "tbf rate {}bit burst {} latency 50ms"
    assert " ".join(Rate.parse("100mbit").tbf()) == shape.format(10**8, 262144)
    assert " ".join(Rate.parse("1gbit").tbf()) == shape.format(10**9, 262144)
    assert " ".join(Rate.parse("10gbit").tbf()) == shape.format(10**10, 2_500_000)
