from types import SimpleNamespace
from typing import Any

from dglx_dist.records import StepShare
from dglx_dist.strategies.base import count_targets, find_share, gradient_weight
from tests.helpers.ranks import run_ranks

SHARE = StepShare(num_local=1, num_global=4)
STALE = StepShare(num_local=9, num_global=9)


def test_stamp_on_the_last_block_wins_over_the_session() -> None:
    session: Any = SimpleNamespace(step_share=STALE)
    blocks = [SimpleNamespace(), SimpleNamespace(step_share=SHARE)]
    assert find_share((blocks, "x"), session) == SHARE
    assert find_share((blocks[1], "x"), session) == SHARE
    assert find_share((blocks[:1], [], 3.0), session) == STALE


def test_weights() -> None:
    assert gradient_weight(SHARE, "mean") == 0.25
    assert gradient_weight(SHARE, "sum") == 1.0
    assert gradient_weight(None, "sum") == 1.0
    for reduction in ("mean", "sum"):
        assert gradient_weight(StepShare(num_local=0, num_global=4), reduction) == 0.0
        assert gradient_weight(StepShare(num_local=0, num_global=0), reduction) == 0.0


def _count() -> list[int]:
    from dglx_dist.comm.session import start_session

    session = start_session()
    share = count_targets(3 * session.topology.rank, session)
    return [share.num_local, share.num_global]


def test_count_targets_over_three_ranks() -> None:
    assert run_ranks(_count, 3) == [[0, 9], [3, 9], [6, 9]]
