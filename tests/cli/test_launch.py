import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglx_dist.cli.train import start_ranks
from dglx_dist.errors import ConfigError


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_killed_launcher_is_told_and_ends_as_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    assert start_ranks(["train"], ranks=1, servers=None) == 128 + signal.SIGKILL
    assert "SIGKILL" in capsys.readouterr().err


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ranks 3 cannot be divided among --servers 2"):
        start_ranks(["train"], ranks=3, servers=2)
