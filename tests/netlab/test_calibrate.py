"""Finding the rate of a wanted phi, on networks whose answer is known."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab import calibrate, cli, labs
from scripts.netlab.base import LabError
from scripts.netlab.calibrate import MIN_RATE, Measured, find_rate
from scripts.netlab.launch import LabRun
from tests.netlab.helpers import COMPUTE_S, PaperLab, make_run, ranks_that_train

SENT = 50e6
PHIS = [0.2, 0.5, 0.65, 0.8, 0.94]

Network = Callable[[Rate | None], Measured]


def wire_s(rate: Rate | None) -> float:
    return 0.0 if rate is None else SENT * 8 / rate.bits_per_s


def network(seconds: Callable[[float], float]) -> Network:
    """Seconds of computing and of the wire to seconds of the work."""
    return lambda rate: Measured(seconds=seconds(wire_s(rate)), bytes_per_server=SENT)


added = network(lambda wire: COMPUTE_S + wire)
overlapped = network(lambda wire: max(COMPUTE_S, wire))
half_overlapped = network(lambda wire: max(COMPUTE_S, wire) + 0.3 * min(COMPUTE_S, wire))
with_headers_and_waits = network(lambda wire: COMPUTE_S + 1.3 * wire)


def at_most(limit: Rate) -> Network:
    """A network that is itself no faster than ``limit``, so that no limit is a limit too."""
    return network(lambda wire: COMPUTE_S + max(wire, wire_s(limit)))


@pytest.mark.parametrize("phi", PHIS)
def test_where_wire_and_computing_are_added_the_first_guess_is_right(phi: float) -> None:
    rate = find_rate(added, phi)
    assert len(rate.tries) == 1
    assert rate.phi == pytest.approx(phi, abs=0.002)  # the rate has three digits
    # 6.1 of the specification: b = bytes x 8 / (phi / (1 - phi) x compute).
    expected = SENT * 8 / (phi / (1 - phi) * COMPUTE_S)
    assert rate.rate.bits_per_s == pytest.approx(expected, rel=0.005)
    assert rate.seconds_at_rate == pytest.approx(COMPUTE_S / (1 - phi), rel=0.01)


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(
    "measure",
    [overlapped, half_overlapped, with_headers_and_waits, at_most(Rate.parse("1gbit"))],
    ids=["overlapped", "half overlapped", "headers and waits", "slow at best"],
)
def test_the_rate_is_found_on_other_networks(measure: Network, phi: float) -> None:
    rate = find_rate(measure, phi)
    assert rate.within_tolerance
    assert abs(rate.phi - phi) <= 0.03
    again, free = measure(rate.rate), measure(None)
    assert rate.phi == pytest.approx(1 - free.seconds / again.seconds)
    assert (rate.seconds_free, rate.seconds_at_rate) == (free.seconds, again.seconds)
    assert len(rate.tries) <= 6
    assert rate.tries[-1].rate == rate.rate


def test_what_is_not_reached_is_said() -> None:
    """If the wire costs nothing at any rate, the least rate is tried last."""
    rate = find_rate(network(lambda _wire: COMPUTE_S), 0.5, max_tries=40)
    assert not rate.within_tolerance
    assert rate.wanted == 0.5
    assert rate.phi == 0.0
    assert min(attempt.rate for attempt in rate.tries) == MIN_RATE
    rate = find_rate(half_overlapped, 0.3, max_tries=2, tolerance=0.001)
    assert (len(rate.tries), rate.within_tolerance) == (2, False)
    assert abs(rate.phi - 0.3) == min(abs(attempt.phi - 0.3) for attempt in rate.tries)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(labs, "what_is_missing", lambda: None)
    monkeypatch.setattr(cli, "open_lab", PaperLab)
    monkeypatch.setattr(calibrate, "run", ranks_that_train(3))
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def _calibrate(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["calibrate", *arguments], env={"COLUMNS": "150"})


def test_it_shows_the_tries_and_writes_the_rate(script: str, tmp_path: Path) -> None:
    done = _calibrate("--phi", "0.5", "--out", str(tmp_path / "out"), "--", script, "--epochs", "3")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["not", "limited", "2.000"] in lines
    assert ["40mbit", "4.000", "0.500", "use", "this"] in lines
    assert f"use --external 40mbit; written to {tmp_path / 'out' / 'calibration.json'}" in done.output
    written = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert (written["rate"], written["command"]) == ("40mbit", [script, "--epochs", "3"])
    assert (written["phi"], written["wanted"]) == (0.5, 0.5)
    assert written["tries"] == [{"rate": "40mbit", "seconds": 4.0, "phi": 0.5}]


def fails(*_arguments: object, log_folder: Path, **_options: object) -> LabRun:
    (log_folder / "server-1.log").write_text("first\nTypeError: no\n")
    return make_run(3, "server 1: rank 1 ended with exit code 3")


FAILURE = (
    "the command failed without a limit: server 1: rank 1 ended with exit code 3\n"
    "  server-1.log: first\n  server-1.log: TypeError: no"
)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (ranks_that_train(0), "noted 0 epochs and two are needed"),
        (ranks_that_train(1), "noted 1 epochs and two are needed"),
        (fails, FAILURE),
    ],
)
def test_a_command_that_fails_or_trains_too_little_is_told(
    script: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., LabRun], message: str
) -> None:
    monkeypatch.setattr(calibrate, "run", run)
    refused = _calibrate("--", script).exception
    assert isinstance(refused, ConfigError | LabError)
    assert message in str(refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((("--phi", phi), f"phi={phi} must lie between 0 and 1") for phi in ("0.0", "1.0", "-0.2", "nan")),
        (("--tries", "0"), "max_tries=0"),
        (("--tolerance", "2"), "2.0"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_runs(
    script: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], message: str
) -> None:
    monkeypatch.setattr(cli, "open_lab", lambda _spec: pytest.fail("a lab was made"))
    refused = _calibrate(*arguments, "--", script).exception
    assert isinstance(refused, ConfigError)
    assert message in str(refused)


def test_without_emulated_servers_it_says_so(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "open_lab", partial(labs.open_lab, force_loopback=True))
    refused = _calibrate("--", script).exception
    assert isinstance(refused, LabError)
    assert "links can be limited: this is loopback" in str(refused)
