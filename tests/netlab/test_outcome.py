"""What is put together of a command that has ended, from a lab and traces made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.netlab.base import Card, LabSpec, LoopbackLab
from scripts.netlab.launch import LabRun
from scripts.netlab.traces import OUTCOME_FILE, Trace, find_outcome, write_outcome
from tests.netlab.traces import epoch, rank_trace


def ended(folder: Path | None, cards: tuple[Card, ...] = (), after: tuple[Card, ...] = ()) -> LabRun:
    return LabRun(
        exit_code=3,
        seconds=1.5,
        cards_before=cards,
        cards_after=after,
        trace_folder=folder,
        failure="server 1",
    )


@pytest.fixture
def lab() -> LoopbackLab:
    return LoopbackLab(LabSpec(servers=2), "no root")


def test_cards_without_a_session_are_told_and_nothing_is_compared(lab: LoopbackLab, tmp_path: Path) -> None:
    before = (Card(sent=1, received=2), Card(sent=3, received=4))
    after = (Card(sent=11, received=22), Card(sent=33, received=44))
    outcome = find_outcome(lab, ["a.py"], 1, ended(tmp_path, before, after))
    said = json.loads(json.dumps(outcome.to_json()))
    assert said["cards_after"] == [{"sent": 11, "received": 22}, {"sent": 33, "received": 44}]
    assert [one["card"] for one in said["servers"]] == [
        {"sent": 10, "received": 20},
        {"sent": 30, "received": 40},
    ]
    assert said["sum"]["card"] == {"sent": 40, "received": 60}
    assert said["sum"]["ratio"] is None
    assert outcome.epoch_seconds is None


def test_what_was_run_where_and_how_it_ended_is_in_the_file(lab: LoopbackLab, tmp_path: Path) -> None:
    outcome = find_outcome(lab, ["dglx", "train", "x"], 2, ended(None))
    target = write_outcome(outcome, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [OUTCOME_FILE]
    said = json.loads(target.read_text())
    assert said["label"] == "loopback, links not limited: no root"
    assert said["lab"]["kind"] == "loopback"
    assert (said["command"], said["ranks_per_server"]) == (["dglx", "train", "x"], 2)
    assert (said["exit_code"], said["failure"], said["seconds"]) == (3, "server 1", 1.5)
    assert (said["servers"], said["sum"], said["ledger_outside"]) == ([], None, {})


@pytest.mark.parametrize(("seconds", "shown"), [((), None), ((9.0,), 9.0), ((9.0, 1.0, 3.0), 2.0)])
def test_the_first_epoch_compiles_and_does_not_count(
    lab: LoopbackLab, seconds: tuple[float, ...], shown: float | None
) -> None:
    epochs = [epoch(number, one) for number, one in enumerate(seconds)]
    outcome = replace(
        find_outcome(lab, ["a.py"], 1, ended(None)),
        trace=Trace(sessions=((rank_trace(0, [0], epochs=epochs),),)),
    )
    assert outcome.epoch_seconds == shown
    assert outcome.to_json()["epoch_seconds"] == list(seconds)


def test_a_trace_that_is_not_whole_is_told_and_not_raised(lab: LoopbackLab, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text("{")
    outcome = find_outcome(lab, ["a.py"], 1, ended(tmp_path))
    assert outcome.trace.sessions == ()
    assert outcome.trace_missing is not None
    assert "rank-0.json" in outcome.trace_missing
