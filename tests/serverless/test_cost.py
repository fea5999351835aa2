"""Dollars: the paper's example, rounding up to steps, value, and the label of simulated figures."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.cost import (
    Servers,
    Usage,
    bill,
    billed_gb_seconds,
    compare,
    dollars,
    prices,
    usage,
    value,
)

PAPER, NOW = prices("dorylus"), prices("aws")


def test_a_million_invocations_of_100_ms_at_192_mb() -> None:
    one = usage([(0.1, 192)], PAPER)
    million = Usage(invocations=10**6, gb_seconds=one.gb_seconds * 10**6)
    cost = bill(million, [], PAPER, simulated=True)
    assert cost.requests == pytest.approx(0.20, rel=1e-12)
    assert cost.total == pytest.approx(0.20 + 1e6 * 0.1 / 3600 * 0.01125, rel=1e-12)
    assert cost.total == pytest.approx(0.5125, rel=1e-12)


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0, 0), (1e-9, 1), (0.1, 1), (0.1 + 1e-9, 2), (0.3, 3), (0.7, 7), (0.70001, 8)]
)
def test_durations_are_rounded_up_to_whole_steps(seconds: float, steps: int) -> None:
    assert billed_gb_seconds(seconds, 1024, PAPER) == pytest.approx(steps / 10, abs=1e-15)


def test_steps_are_those_of_the_table() -> None:
    assert billed_gb_seconds(0.0123, 512, NOW) == pytest.approx(0.013 / 2)
    assert usage([(0.0123, 512), (0.1, 192)], NOW) == usage([(0.0123, 512)], NOW) + usage([(0.1, 192)], NOW)


def test_servers_are_paid_by_the_second_and_functions_by_use() -> None:
    servers = [
        Servers(kind="c5n.2xlarge", number=8, seconds=900),
        Servers(kind="c5.large", number=1, seconds=900),
    ]
    cost = bill(Usage(), servers, NOW, simulated=False)
    assert cost.servers == pytest.approx(8 * 0.25 * 0.432 + 0.25 * 0.085)
    assert (cost.functions, cost.total) == (0, cost.servers)


def test_value_is_one_over_time_and_cost() -> None:
    """Twice as fast at half the cost is four times the value."""
    alone = bill(Usage(), [Servers(kind="c5.large", number=2, seconds=3600)], NOW, simulated=False)
    ours = bill(Usage(), [Servers(kind="c5.large", number=2, seconds=1800)], NOW, simulated=True)
    found = compare(1800, ours, 3600, alone)
    assert (found.speed, found.saving, found.value) == pytest.approx((2, 2, 4))
    assert value(1800, ours.total) / value(3600, alone.total) == pytest.approx(found.value)


def test_simulated_dollars_say_so_wherever_they_are_shown() -> None:
    ours, alone = (bill(usage([(1, 192)], NOW), [], NOW, simulated=simulated) for simulated in (True, False))
    assert "simulated" in str(ours)
    assert "aws of 2025-01-01" in str(ours)
    assert "simulated" not in str(alone)
    assert "simulated" in str(compare(1, ours, 1, alone))
    assert "simulated" not in str(compare(1, alone, 1, alone))


def test_what_is_not_known_is_not_hidden() -> None:
    known = usage([(1, 192)], NOW)
    cost = bill(known + Usage(invocations=2, unknown=2), [], NOW, simulated=False)
    assert "at least, for 2 durations are not known" in str(cost)
    assert "at least" not in str(bill(known, [], NOW, simulated=False))


def test_nonsense_is_refused() -> None:
    for seconds, memory in ((-1, 192), (float("nan"), 192), (float("inf"), 192), (1, 0)):
        with pytest.raises(ConfigError):
            billed_gb_seconds(seconds, memory, NOW)
    for seconds, cost in ((0, 1), (1, 0), (1, float("nan"))):
        with pytest.raises(ConfigError, match="above 0"):
            value(seconds, cost)


def test_amounts_are_readable() -> None:
    assert [dollars(amount) for amount in (0, 0.000123, 0.5125, 12.3)] == [
        "$0.00",
        "$0.000123",
        "$0.512",
        "$12.30",
    ]
