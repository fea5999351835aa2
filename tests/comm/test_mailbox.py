"""The mailbox: complete rounds, cancelled rounds, and errors that name the silent ranks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.exchange import CallExchange, _check_bytes
from dglx_dist.comm.mailbox import MAX_AHEAD, Mailbox, OneSidedExchange, RoundEnded
from dglx_dist.comm.session import start_session
from dglx_dist.errors import PeerError, RemoteError

OTHERS = (1, 2)


class Quiet:
    """A session of three ranks, of which none is dead and two never send."""

    store = None
    timeout_s = 0.05
    hosts = ("here", "there", "yonder")

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def raise_for_dead(self, missing: list[int], what: str) -> None:
        self.asked.append(missing)

    def describe_failure(self, doing: str) -> str:
        return "all answer"


@pytest.fixture
def mailbox() -> Any:
    with start_session() as session:
        yield Mailbox[str](session, "all ranks must send")


def test_collect_waits_for_all_senders_and_returns_messages_once(mailbox: Mailbox[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mailbox.take, 0, 1, OTHERS, "rows")
        mailbox.put(0, 0, 2, "of another step")
        mailbox.put(0, 1, 2, "b")
        assert not waiting.done()
        mailbox.put(0, 1, 1, "a")
        assert waiting.result(10) == {1: "a", 2: "b"}
    assert len(mailbox._arrived) == 1
    assert mailbox.take(0, 9, (), "nothing") == {}


ROWS = np.zeros(4, np.uint8)


@pytest.mark.parametrize("op", ["box", "exchange-0"])
@pytest.mark.parametrize(
    ("name", "arrays", "problem"),
    [
        ("0 1 rows", [ROWS], "sender 1 is not one of the 1 ranks"),
        ("0 -1 rows", [ROWS], "sender -1 is not one of the 1 ranks"),
        ("-1 0 rows", [ROWS], "'rows' of round -1 is not kept: rank is at 0"),
        (f"{MAX_AHEAD} 0 rows", [ROWS], f"round {MAX_AHEAD} is not kept"),
        ("0 0", [ROWS], "not enough values"),
        ("0 0 rows", [], "one array of bytes, not none"),
        ("0 0 rows", [ROWS, ROWS], "not uint8 of shape .4,., uint8"),
        ("0 0 rows", [ROWS.astype(np.float32)], "not float32"),
        ("0 0 rows", [ROWS[None]], "not uint8 of shape .1, 4."),
    ],
)
def test_refuses_messages_of_no_rank(op: str, name: str, arrays: list[np.ndarray], problem: str) -> None:
    with start_session() as session:
        exchange = OneSidedExchange(session, "box", "all ranks must send", _check_bytes)
        calls = CallExchange(session, "pull")
        with pytest.raises(RemoteError, match=problem):
            session.rpc.call(0, op, name, arrays, phase="other")
        assert not exchange.mailbox._arrived
        assert not len(calls._inbox)


def test_cancelled_round_ends_the_wait_and_drops_messages(mailbox: Mailbox[str]) -> None:
    mailbox.put(0, 3, 1, "a")
    mailbox.put(1, 0, 1, "b")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mailbox.take, 0, 3, OTHERS, "rows")
        mailbox.begin(1)
        with pytest.raises(RoundEnded):
            waiting.result(10)
    mailbox.put(0, 4, 2, "too late")
    assert len(mailbox._arrived) == 1


def test_the_first_reason_counts_even_before_the_round_begins(mailbox: Mailbox[str]) -> None:
    mailbox.begin(2, ValueError("first"))
    mailbox.begin(2)
    mailbox.begin(1)
    with pytest.raises(ValueError, match="first"):
        mailbox.take(1, 0, OTHERS, "rows")


def test_failed_round_returns_complete_steps_and_the_reason_for_others(mailbox: Mailbox[str]) -> None:
    mailbox.put(1, 0, 1, "a")
    mailbox.fail(1, lambda: ValueError("rank 2 failed"))
    mailbox.begin(1)
    assert mailbox.take(1, 0, (1,), "rows") == {1: "a"}
    with pytest.raises(ValueError, match="rank 2 failed"):
        mailbox.take(1, 1, OTHERS, "rows")
    mailbox.begin(2)
    mailbox.put(2, 0, 1, "b")
    assert mailbox.take(2, 0, (1,), "rows") == {1: "b"}


def test_silent_ranks_are_named_and_busy_ones_get_more_time() -> None:
    session = Quiet()
    mailbox: Mailbox[str] = Mailbox(session, "all ranks must send")  # type: ignore[arg-type]
    mailbox.put(0, 5, 1, "a")
    answers = iter([True, True, False])
    with pytest.raises(PeerError, match=r"rank 2 on yonder did not send the rows within .*must send"):
        mailbox.take(0, 5, OTHERS, "the rows", lambda _rank: next(answers))
    assert session.asked[0] == [2]
    assert list(answers) == []
