import pytest

from dglx_dist.cli.train_command import check_launched
from dglx_dist.errors import ConfigError


@pytest.fixture(autouse=True)
def four_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGLX_RANKS_PER_SERVER", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_ranks_and_servers_that_torchrun_did_not_start_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ranks 2, but torchrun has started 4"):
        check_launched(2, None)
    with pytest.raises(ConfigError, match=r"--servers 2, .* DGLX_RANKS_PER_SERVER"):
        check_launched(None, 2)


def test_what_torchrun_started_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launched(None, None)
    check_launched(4, 1)
    monkeypatch.setenv("DGLX_RANKS_PER_SERVER", "2")
    check_launched(4, 2)
