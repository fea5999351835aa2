from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dglx_dist.errors import ConfigError, UnknownNameError
from scripts.bench import driver, results, suites
from scripts.bench.cli import app, choose
from scripts.bench.records import BenchPlan, Experiment, Outcome


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def ends_with(status: Any, reason: str = "") -> Callable[..., Outcome]:
    """A driver that does nothing and says how it ended."""

    def run(experiment: Experiment, plan: BenchPlan, tell: Callable[[str], None]) -> Outcome:
        tell("playing")
        outcome = Outcome(experiment=experiment.id, status=status, reason=reason)
        results.write(plan.out, outcome)
        return outcome

    return run


@pytest.fixture
def no_push_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an installation without that strategy."""
    remaining = [name for name in suites.STRATEGIES.names() if name != "push_pull"]
    monkeypatch.setattr(suites.STRATEGIES, "names", lambda: remaining)


def test_the_list_has_every_experiment_and_says_which_cannot_run(no_push_pull: None) -> None:
    shown = bench("--list")
    assert shown.exit_code == 0
    for experiment in suites.everything():
        assert f" {experiment.id} " in shown.output
    assert "this release has no strategy push_pull" in " ".join(shown.output.split())


def test_what_is_absent_is_reported_and_is_no_failure(tmp_path: Path, no_push_pull: None) -> None:
    shown = bench("--only", "p1,P2", "--only", "P1", "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "absent" in shown.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["P1.json", "P2.json", "README.md"]


def test_a_failure_ends_with_1_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "run", ends_with("failed", "rank 1 died\n  a log"))
    shown = bench("--only", "D1,D2", "--out", str(tmp_path))
    assert shown.exit_code == 1
    assert shown.stdout.count(": failed: rank 1 died") == 2
    assert {item.experiment for item in results.read(tmp_path)} == {"D1", "D2"}


def test_earlier_results_are_reported_anew(tmp_path: Path) -> None:
    results.write(tmp_path, Outcome(experiment="P1", status="absent", reason="it is a test"))
    shown = bench("--report", str(tmp_path))
    assert shown.exit_code == 0
    assert "**absent**. It is a test." in (tmp_path / "README.md").read_text()


def test_the_plan_is_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def run(experiment: Experiment, plan: BenchPlan, tell: Callable[[str], None]) -> Outcome:
        plans.append(plan)
        return ends_with("absent")(experiment, plan, tell)

    monkeypatch.setattr(driver, "run", run)
    bench("--only", "D1", "--out", str(tmp_path), "--repetitions", "7", "--seed", "3")
    bench("d1", "--out", str(tmp_path), "--work", str(tmp_path / "w"))
    assert (tmp_path / "D1.json").is_file()
    assert [plan.work for plan in plans] == [tmp_path / "work", tmp_path / "w"]
    assert [plan.repetitions for plan in plans] == [7, 5]
    assert [plan.seed for plan in plans] == [3, 0]
    assert [item.id for item in choose("quick", [])] == [item.id for item in suites.suite("quick")]
    assert [item.id for item in choose("quick", ["d2", "D1,D2"])] == ["D2", "D1"]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--only", "D1"], ConfigError, "--out DIR"),
        (["--only", "D11", "--out", "x"], UnknownNameError, "did you mean 'D1'"),
        (["--suite", "pears", "--out", "x"], UnknownNameError, "did you mean 'peers'"),
        (["--only", "D1", "--out", "x", "--repetitions", "0"], ConfigError, "--repetitions 0 must be"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = bench(*arguments)
    assert isinstance(shown.exception, error)
    assert said in str(shown.exception)
    assert list(tmp_path.iterdir()) == []
