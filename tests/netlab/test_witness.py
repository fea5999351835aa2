"""Cards held against the ledger."""

from __future__ import annotations

import pytest

from dglx_dist.errors import ConfigError
from scripts.netlab.base import Card
from scripts.netlab.traces import Trace, compare
from tests.netlab.traces import row, trace_of

MB = 1_000_000
BEFORE = (Card(sent=500, received=700), Card(sent=0, received=90))


def _after(*mb: tuple[float, float]) -> tuple[Card, ...]:
    return tuple(
        Card(sent=before.sent + int(sent * MB), received=before.received + int(received * MB))
        for before, (sent, received) in zip(BEFORE, mb, strict=True)
    )


def _trace(there: int, back: int) -> Trace:
    return trace_of((0, 1), [[row(0, 1, there * MB)], [row(1, 0, back * MB)]])


def test_within_eight_percent_agrees() -> None:
    """10 MB there and 20 MB back, with 5 % of headers: only what came between the readings counts."""
    first, second, total = compare(BEFORE, _after((10.5, 21.0), (21.0, 10.5)), _trace(10, 20))
    assert (first.server, second.server, total.server) == (0, 1, None)
    assert first.card == Card(sent=10_500_000, received=21_000_000)
    assert first.ledger == Card(sent=10 * MB, received=20 * MB)
    assert second.ledger == Card(sent=20 * MB, received=10 * MB)
    assert total.card == Card(sent=31_500_000, received=31_500_000)
    assert first.ratio == second.ratio == total.ratio == pytest.approx(1.05)
    assert {one.verdict for one in (first, second, total)} == {"agrees"}


@pytest.mark.parametrize(("factor", "verdict"), [(1.079, "agrees"), (1.081, "differs"), (0.919, "differs")])
def test_the_limit_is_eight_percent_both_ways(factor: float, verdict: str) -> None:
    found = compare(BEFORE, _after((10 * factor, 10 * factor), (10 * factor, 10 * factor)), _trace(10, 10))
    assert [one.verdict for one in found] == [verdict] * 3


def test_below_four_megabytes_nothing_is_said() -> None:
    first, second, total = compare(BEFORE, _after((9, 1.9), (1.9, 2.0)), _trace(1, 2))
    assert first.verdict == second.verdict == "too little traffic to compare"
    assert total.ledger == Card(sent=3 * MB, received=3 * MB)
    assert total.verdict == "differs"


def test_no_session_is_too_little() -> None:
    found = compare(BEFORE, _after((50, 50), (50, 50)), Trace(sessions=()))
    assert [one.ratio for one in found] == [None] * 3
    assert {one.verdict for one in found} == {"too little traffic to compare"}


def test_without_cards_there_is_no_witness() -> None:
    assert compare((), (), _trace(10, 10)) == ()


def test_more_servers_than_cards_is_an_error() -> None:
    three = trace_of((0, 1, 2), [[], [], []])
    with pytest.raises(ConfigError, match=r"2 and 2 cards .* 3 servers.*DGLX_RANKS_PER_SERVER"):
        compare(BEFORE, BEFORE, three)
