"""Sessions: what they offer, that there is one at a time, and that they leave nothing behind."""

from __future__ import annotations

import pytest

from dglx_dist.cluster.session import current_session, start_session
from dglx_dist.errors import ConfigError


def test_one_process_needs_no_launcher() -> None:
    with start_session(strategy="x", seed=3) as session:
        assert (session.topology.world_size, session.seed, session.strategy) == (1, 3, "x")
        assert session.rpc.call(0, "cluster.ping", "", [], phase="p") == []
        folder = session.scratch
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(ConfigError, match="init"):
        current_session()


def test_there_is_one_at_a_time() -> None:
    with start_session():
        with pytest.raises(ConfigError, match="open already"):
            start_session()
        assert current_session().topology.world_size == 1
    start_session().close()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_time_limit_must_make_sense(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        start_session(timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="init"):
        current_session()
