"""Messages of two ranks: slow ones are waited for while they plan, missing ones are named."""

from __future__ import annotations

import threading
import time
from unittest import mock

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from dglx_dist.strategies.full_graph import plan_builder
from dglx_dist.strategies.full_graph.plan_builder import Mailbox
from tests.helpers.ranks import run_ranks


def talk() -> str:
    session = start_session(timeout_s=2)
    rank, mailbox = session.topology.rank, Mailbox(session, "test")
    barrier(session, "start")
    with mailbox.job():
        if rank == 1:
            # Longer than the time-out, but inside the job.
            time.sleep(5)
        got = mailbox.exchange("numbers", {0: [np.array([rank])], 1: [np.array([rank + 10])]}, (0, 1))
        assert [int(got[other][0][0]) for other in (0, 1)] == [rank * 10, rank * 10 + 1]
        assert mailbox.exchange("nothing", {}, (0, 1)) == {0: [], 1: []}
    message = ""
    if rank == 0:
        with pytest.raises(PeerError) as caught, mailbox.job():
            mailbox.exchange("alone", {}, (0, 1))
        message = str(caught.value)
    else:
        while mailbox._box.failure() is None and not mailbox._box._arrived:
            time.sleep(0.1)
        time.sleep(4)
    assert session.ledger.total(phase="plan") == 8
    return message


def test_slow_ranks_are_waited_for_and_missing_ones_are_named() -> None:
    message, _ = run_ranks(talk, 2, ranks_per_server=1)
    assert "rank 1 on " in message
    assert "did not reach 'alone' of plan 2 within 2 s" in message


def fail_beside_a_rank_that_hangs() -> None:
    session = start_session(timeout_s=60)
    box, done = Mailbox(session, "test"), threading.Event()
    if session.topology.rank == 0:
        box._box.put = lambda *_: done.wait()  # type: ignore[method-assign,assignment,func-returns-value]
    barrier(session, "start")
    if session.topology.rank == 1:
        started = time.monotonic()
        with (
            mock.patch.object(plan_builder, "_NOTIFY_FAILURE_S", 0.5),
            pytest.raises(ValueError, match="a bug"),
            box.job(),
        ):
            raise ValueError("a bug")
        assert time.monotonic() - started < 30
    barrier(session, "failed")
    done.set()


def test_a_rank_that_fails_does_not_wait_for_one_that_hangs() -> None:
    run_ranks(fail_beside_a_rank_that_hangs, 2)


def test_one_rank_sends_itself_what_it_wants() -> None:
    with start_session() as session:
        mailbox = Mailbox(session, "test")
        with mailbox.job():
            array = np.arange(3)
            assert mailbox.exchange("own", {0: [array]}, (0,))[0][0] is array
        session.rpc.register("again", lambda _name, _arrays: [])
