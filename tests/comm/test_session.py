"""Sessions: what they offer, that there is one at a time, and that they leave nothing behind."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.session import current_session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, RemoteError
from tests.helpers.ranks import run_ranks


def test_one_process_needs_no_launcher() -> None:
    with start_session(strategy="x", seed=3) as session:
        assert (session.topology.world_size, session.seed, session.strategy) == (1, 3, "x")
        assert session.rpc.peer_status([0], 1.0) == {0: ""}
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


def _three_sessions() -> list[list[int]]:
    rank, found = int(os.environ["RANK"]), []
    for number in range(3):
        if rank == 0 and number:
            threading.Event().wait(0.3)  # the other is far ahead and finds what the last session left
        with start_session(timeout_s=20, seed=number) as session:
            session.rpc.register("number", lambda _name, _arrays, number=number: [np.array([number])])
            barrier(session, "registered")
            answer = session.rpc.call(1 - rank, "number", "", [], phase="p")[0]
            found.append([int(answer[0]), int(gather_int64([number], session).sum())])
    return found


def test_sessions_follow_each_other_in_a_process() -> None:
    assert run_ranks(_three_sessions, 2) == [[[0, 0], [1, 2], [2, 4]]] * 2


def test_name_of_the_folder_tells_nothing_of_the_secret() -> None:
    (shown,) = set(run_ranks(_folder_shows_secret, 2))
    assert not shown


def _folder_shows_secret() -> bool:
    with start_session() as session:
        secret = session.rpc.credentials.secret.decode()
        return any(secret[at : at + 8] in session.scratch.name for at in range(len(secret) - 7))


def test_work_under_way_is_finished_before_the_end_and_its_error_ends_the_session() -> None:
    done: list[str] = []
    alone = Topology(0, 1, (0,))
    with start_session(topology=alone) as session:
        session.before_close.append(lambda: done.append("finished"))
    assert done == ["finished"]

    def fail() -> None:
        raise RemoteError("a push failed")

    session = start_session(topology=alone)
    session.before_close.append(fail)
    with pytest.raises(RemoteError, match="a push failed"):
        session.close()
    session.close()
    with pytest.raises(ConfigError):
        current_session()

    session = start_session(topology=alone)
    session.before_close.append(fail)
    session.close(failed=True)
