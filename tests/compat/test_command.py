"""``python -m dglx_dist.run``: what it refuses before anything runs."""

from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.run import main

SCRIPT = str(Path(__file__).parent / "scripts" / "rgcn.py")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--strategy", "auto", "--", SCRIPT], "run `dglx plan` to find a strategy"),
        (["--option", "depth", "--", SCRIPT], "--option 'depth' must be NAME=VALUE"),
        (["--strategy", "p3", "--", "no.py"], "there is no script 'no.py'"),
    ],
)
def test_what_cannot_be_run_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        main(words)


def test_the_strategy_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_STRATEGY", "auto")
    with pytest.raises(ConfigError, match="run `dglx plan`"):
        main([SCRIPT])
    monkeypatch.setenv("DGLX_STRATEGY", "push_pul")
    with pytest.raises(UnknownNameError, match="push_pull"):
        main([SCRIPT])
