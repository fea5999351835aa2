import numpy as np
import pytest

from dglx_dist.dataloading.step_loader import Schedule
from dglx_dist.records import StepShare

COUNTS = (5, 2, 0)


def on_rank(rank: int, *, drop_last: bool = False) -> Schedule:
    return Schedule(batch_size=2, drop_last=drop_last, counts=COUNTS, rank=rank)


@pytest.mark.parametrize("rank", range(3))
def test_every_rank_has_the_steps_of_the_longest(rank: int) -> None:
    assert on_rank(rank).num_steps == 3
    assert on_rank(rank, drop_last=True).num_steps == 2


def test_shares_by_hand() -> None:
    assert [on_rank(0).share(step) for step in range(3)] == [
        StepShare(num_local=2, num_global=4),
        StepShare(num_local=2, num_global=2),
        StepShare(num_local=1, num_global=1),
    ]
    assert on_rank(2).share(0) == StepShare(num_local=0, num_global=4)
    assert on_rank(0, drop_last=True).share(1) == StepShare(num_local=2, num_global=2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_slices_cover_the_targets_once(rank: int, drop_last: bool) -> None:
    schedule = on_rank(rank, drop_last=drop_last)
    ids = np.arange(COUNTS[rank])
    seen = np.concatenate([ids[schedule.slice_of(step)] for step in range(schedule.num_steps)])
    used = COUNTS[rank] // 2 * 2 if drop_last else COUNTS[rank]
    assert seen.tolist() == list(range(used))
    assert schedule.targets() == (used, 6 if drop_last else 7)


def test_no_seeds_anywhere_no_steps() -> None:
    assert Schedule(batch_size=2, drop_last=False, counts=(0, 0), rank=0).num_steps == 0
