"""Waiting for other owners' structure ends by arrival, cancellation, or an error that names ranks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError
from dglx_dist.strategies.push_pull.block_exchange import BatchPosition, IterationLeft, StructureInbox
from dglx_dist.strategies.push_pull.options import Group

BLOCK = [np.zeros(1, np.int32)] * 3


class Quiet:
    """A session in which the other ranks live and say nothing."""

    timeout_s = 0.1
    store = None
    hosts = ("here", "there", "yonder")

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def raise_for_dead(self, missing: list[int], what: str) -> None:
        self.asked.append(missing)

    def describe_failure(self, doing: str) -> str:
        return "all answer"


def inbox_of(session: Any) -> StructureInbox:
    return StructureInbox(session, Group(rank=0, members=(0, 1, 2), replicas=(0,)))


def at(iteration: int, step: int) -> BatchPosition:
    return BatchPosition(iteration=iteration, epoch=4, step=step)


@pytest.fixture
def inbox() -> Any:
    with start_session() as session:
        yield inbox_of(session)


def test_it_waits_for_all_others(inbox: StructureInbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.take, at(0, 1))
        inbox.put(0, 0, 2, BLOCK)
        inbox.put(0, 1, 2, BLOCK)
        assert not waiting.done()
        inbox.put(0, 1, 1, BLOCK)
        assert sorted(waiting.result(10)) == [1, 2]
    assert len(inbox._arrived) == 1


def test_leaving_ends_who_waits_and_drops_what_came(inbox: StructureInbox) -> None:
    inbox.put(0, 3, 1, BLOCK)
    inbox.put(1, 0, 1, BLOCK)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.take, at(0, 3))
        inbox.cancel(0)
        with pytest.raises(IterationLeft):
            waiting.result(10)
    inbox.put(0, 4, 2, BLOCK)
    assert len(inbox._arrived) == 1


def test_an_error_of_another_thread_is_the_reason(inbox: StructureInbox) -> None:
    inbox.cancel(0, ValueError("first"))
    inbox.cancel(0)
    with pytest.raises(ValueError, match="first"):
        inbox.take(at(0, 0))


def test_a_new_iteration_drops_what_is_old(inbox: StructureInbox) -> None:
    inbox.put(0, 0, 1, BLOCK)
    inbox.put(1, 0, 1, BLOCK)
    inbox.begin(1)
    assert len(inbox._arrived) == 1
    inbox.put(1, 0, 2, BLOCK)
    assert sorted(inbox.take(at(1, 0))) == [1, 2]
    assert len(inbox._arrived) == 0


def test_who_is_missing_is_named() -> None:
    session = Quiet()
    inbox = inbox_of(session)
    inbox.put(0, 5, 1, BLOCK)
    with pytest.raises(PeerError, match=r"rank 2 on yonder did not send the structure of step 5 of epoch 4"):
        inbox.take(at(0, 5))
    assert session.asked == [[2]]


def test_alone_there_is_nothing_to_wait_for() -> None:
    inbox = StructureInbox(Quiet(), Group(rank=0, members=(0,), replicas=(0,)))  # type: ignore[arg-type]
    assert inbox.take(at(0, 0)) == {}
