"""A command measured at one rate after another, on a lab and a network made up for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dglx_dist.comm.trace import Pass
from dglx_dist.errors import CommandError, ConfigError, LabError
from dglx_dist.planner.records import Rate
from scripts.netlab import calibrate
from scripts.netlab.base import LabSpec, LoopbackLab
from scripts.netlab.calibrate import (
    CalibrationPlan,
    CommandMeasure,
    find_rate,
    measured_of,
    write_calibration,
)
from scripts.netlab.launch import LabRun
from scripts.netlab.traces import Trace
from tests.netlab.paper import BYTES, COMPUTE_S, PaperLab, ended, ranks_that_train
from tests.netlab.traces import rank_trace, row

PLAN = CalibrationPlan(command=["train.py"])


def test_the_first_epoch_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "run", ranks_that_train(4))
    lab, said = PaperLab(LabSpec(servers=2, internal=Rate.parse("1gbit"))), []
    measure = CommandMeasure(lab, PLAN, tmp_path, said.append)
    free, limited = measure(None), measure(Rate.parse("80mbit"))
    assert (free.seconds, limited.seconds) == (COMPUTE_S, COMPUTE_S + 1.0)
    assert free.bytes_per_server == BYTES
    # The rate inside servers is left as it was.
    assert lab.set == [(None, Rate.parse("1gbit")), (Rate.parse("80mbit"), Rate.parse("1gbit"))]
    assert said[0] == "running the command without a limit"
    assert said[-1] == "3 s per epoch at 80mbit"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-1"]


def test_a_calibration_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "run", ranks_that_train(3))
    lab = PaperLab(LabSpec(servers=2))
    for _ in range(2):  # what a calibration has left is replaced by the next
        found = find_rate(CommandMeasure(lab, PLAN, tmp_path, lambda _line: None), 0.5)
        path = write_calibration(tmp_path, found, lab, PLAN)
    assert found.rate == Rate.parse("40mbit")  # 10 MB in the 2 s of computing
    assert path == tmp_path / "calibration.json"
    values = json.loads(path.read_text())
    assert (values["rate"], values["phi"], values["wanted"]) == ("40mbit", 0.5, 0.5)
    assert values["tries"] == [{"rate": "40mbit", "seconds": 4.0, "phi": 0.5}]
    assert values["command"] == ["train.py"]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("epochs", [0, 1])
def test_too_few_epochs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    monkeypatch.setattr(calibrate, "run", ranks_that_train(epochs))
    measure = CommandMeasure(PaperLab(LabSpec(servers=2)), PLAN, tmp_path, lambda _line: None)
    with pytest.raises(ConfigError, match=rf"noted {epochs} epochs and two are needed.*--epochs"):
        measure(None)


def test_a_command_that_fails_is_told_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object, log_folder: Path, **_options: object) -> LabRun:
        (log_folder / "server-1.log").write_text("first\nTypeError: no\n")
        return ended(3, "server 1: rank 1 ended with exit code 3")

    monkeypatch.setattr(calibrate, "run", fails)
    measure = CommandMeasure(PaperLab(LabSpec(servers=2)), PLAN, tmp_path, lambda _line: None)
    with pytest.raises(CommandError) as caught:
        measure(Rate.parse("1mbit"))
    assert str(caught.value) == (
        "the command failed at 1mbit: server 1: rank 1 ended with exit code 3\n"
        "server-1 | first\nserver-1 | TypeError: no"
    )


def test_a_loop_of_ones_own_is_measured_by_its_passes() -> None:
    """Three passes, 600 bytes sent in all, two servers: 100 bytes per server and pass."""
    passes = [Pass(loader=0, steps=1, seconds=seconds, wait_s=0.0) for seconds in (5.0, 1.0, 2.0)]
    ranks = tuple(rank_trace(rank, (0, 1), ledger=[row(0, 1, 300)], passes=passes) for rank in range(2))
    measured = measured_of(Trace(sessions=(ranks,)))
    assert (measured.seconds, measured.bytes_per_server) == (1.5, 100.0)


def test_plain_loopback_is_refused(tmp_path: Path) -> None:
    lab = LoopbackLab(LabSpec(servers=2), missing="tc: not installed")
    with pytest.raises(LabError, match="links can be limited: tc: not installed"):
        CommandMeasure(lab, PLAN, tmp_path, lambda _line: None)
