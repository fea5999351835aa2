"""Finding the rate of a wanted phi, on networks whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab.calibrate import LEAST_RATE, Measured, find_rate

COMPUTE_S, BYTES = 2.0, 50e6
PHIS = [0.2, 0.5, 0.65, 0.8, 0.94]

Network = Callable[[Rate | None], Measured]


def wire_s(rate: Rate | None) -> float:
    return 0.0 if rate is None else BYTES * 8 / rate.bits_per_s


def network(seconds: Callable[[float], float]) -> Network:
    """Seconds of computing and of the wire to seconds of the work."""
    return lambda rate: Measured(seconds=seconds(wire_s(rate)), bytes_per_server=BYTES)


added = network(lambda wire: COMPUTE_S + wire)
overlapped = network(lambda wire: max(COMPUTE_S, wire))
half_overlapped = network(lambda wire: max(COMPUTE_S, wire) + 0.3 * min(COMPUTE_S, wire))
with_headers_and_waits = network(lambda wire: COMPUTE_S + 1.3 * wire)


def at_most(limit: Rate) -> Network:
    """A network that is itself no faster than ``limit``, so that no limit is a limit too."""
    return network(lambda wire: COMPUTE_S + max(wire, wire_s(limit)))


@pytest.mark.parametrize("phi", PHIS)
def test_where_wire_and_computing_are_added_the_first_guess_is_right(phi: float) -> None:
    found = find_rate(added, phi)
    assert len(found.tries) == 1
    assert found.phi == pytest.approx(phi, abs=0.002)  # the rate has three digits
    # 6.1 of the specification: b = bytes x 8 / (phi / (1 - phi) x compute).
    expected = BYTES * 8 / (phi / (1 - phi) * COMPUTE_S)
    assert found.rate.bits_per_s == pytest.approx(expected, rel=0.005)
    assert found.seconds_at_rate == pytest.approx(COMPUTE_S / (1 - phi), rel=0.01)


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(
    "measure",
    [overlapped, half_overlapped, with_headers_and_waits, at_most(Rate.parse("1gbit"))],
    ids=["overlapped", "half overlapped", "headers and waits", "slow at best"],
)
def test_the_rate_is_found_on_other_networks(measure: Network, phi: float) -> None:
    found = find_rate(measure, phi)
    assert found.within_tolerance
    assert abs(found.phi - phi) <= 0.03
    again, free = measure(found.rate), measure(None)
    assert found.phi == pytest.approx(1 - free.seconds / again.seconds)
    assert (found.seconds_free, found.seconds_at_rate) == (free.seconds, again.seconds)
    assert len(found.tries) <= 6
    assert found.tries[-1].rate == found.rate


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_five_percent_is_borne(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def measure(rate: Rate | None) -> Measured:
        noise = 1 + 0.05 * float(np.clip(draw.standard_normal(), -2, 2))
        return Measured(seconds=(COMPUTE_S + wire_s(rate)) * noise, bytes_per_server=BYTES)

    found = find_rate(measure, 0.65)
    # Seconds are off by 10 % at most, so 1 - phi = 0.35 by 20 %.
    assert 1 - COMPUTE_S / (COMPUTE_S + wire_s(found.rate)) == pytest.approx(0.65, abs=0.1)


def test_the_first_measurement_has_no_limit() -> None:
    asked: list[Rate | None] = []

    def measure(rate: Rate | None) -> Measured:
        asked.append(rate)
        return overlapped(rate)

    found = find_rate(measure, 0.8)
    assert asked == [None, *(one.rate for one in found.tries)]


def test_what_is_not_reached_is_said() -> None:
    """Where the wire costs nothing at any rate, the least rate is tried last."""
    found = find_rate(network(lambda _wire: COMPUTE_S), 0.5, max_tries=40)
    assert not found.within_tolerance
    assert found.wanted == 0.5
    assert found.phi == 0.0
    assert min(one.rate for one in found.tries) == LEAST_RATE


def test_the_nearest_try_is_returned_when_they_run_out() -> None:
    found = find_rate(half_overlapped, 0.3, max_tries=2, tolerance=0.001)
    assert len(found.tries) == 2
    assert not found.within_tolerance
    assert abs(found.phi - 0.3) == min(abs(one.phi - 0.3) for one in found.tries)


@pytest.mark.parametrize("phi", [0.0, 1.0, -0.2, 1.5, math.nan])
def test_a_share_lies_between_0_and_1(phi: float) -> None:
    with pytest.raises(ConfigError, match=f"phi={phi} must lie between 0 and 1"):
        find_rate(added, phi)


def test_other_arguments_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="tolerance=0"):
        find_rate(added, 0.5, tolerance=0)
    with pytest.raises(ConfigError, match="max_tries=0 must be at least 1"):
        find_rate(added, 0.5, max_tries=0)


def test_a_command_that_sends_nothing_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"does not communicate.*more than one server"):
        find_rate(lambda _rate: Measured(seconds=1.0, bytes_per_server=0), 0.5)


def test_a_command_that_takes_no_time_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no time to measure"):
        find_rate(lambda _rate: Measured(seconds=0.0, bytes_per_server=BYTES), 0.5)
