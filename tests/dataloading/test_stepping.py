import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from dglx_dist.comm.session import Session, start_session
from dglx_dist.dataloading.step_loader import Items, LoaderOptions, Pace, StepLoader
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from tests.helpers.ranks import run_ranks


@dataclass(frozen=True)
class Echo:
    """A batch that is its items."""

    rows: list[int]
    epoch: int
    sample_s: float = 0.25
    fetch_s: float = 0.5


@final
class Echoes(StepLoader[str, Echo, tuple[list[int], int, StepShare]]):
    """Hands out what it was asked to make."""

    def _make(self, items: dict[str, Any], epoch: int) -> Echo:
        return Echo([int(row) for ids in items.values() for row in ids], epoch)

    def _deliver(self, batch: Echo, share: StepShare) -> tuple[list[int], int, StepShare]:
        assert self._session.step_share is share
        return batch.rows, batch.epoch, share


def echoes(session: Session, ids: list[int], size: int = 2, **pace: Any) -> Echoes:
    items = Items(ids={"a": np.array(ids[:3], np.int64), "b": np.array(ids[3:], np.int64)})
    return Echoes(session, items, Pace(batch_size=size, **pace), LoaderOptions(seed=7))


def test_steps_in_the_order_given() -> None:
    with start_session() as session:
        loader = echoes(session, [5, 6, 7, 1, 2])
        assert [rows for rows, _, _ in loader] == [[5, 6], [7, 1], [2]]
        assert [epoch for _, epoch, _ in loader] == [1, 1, 1]
        assert session.step_share is None
        times = loader.times(reset=True)
        assert (times.sample_s, times.fetch_s) == (6 * 0.25, 6 * 0.5)
        assert loader.times().sample_s == 0
        assert [rows for rows, _, _ in echoes(session, [5, 6, 7, 1, 2], drop_last=True)] == [[5, 6], [7, 1]]


def test_a_loader_left_early_begins_the_next_epoch() -> None:
    with start_session() as session:
        loader = echoes(session, [5, 6, 7, 1, 2], shuffle=True)
        next(iter(loader))
        assert [epoch for _, epoch, _ in loader] == [1, 1, 1]
        assert loader.state_dict() == {"epoch": 2, "step": 0, "seed": 7}


def test_a_batch_size_is_checked() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        Pace(batch_size=0)


def test_waiting_is_what_the_loop_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a batch takes 3 seconds and using it 10: without threads the loop waits 3 for each."""
    now = 0.0

    def make(self: Echoes, items: dict[str, Any], epoch: int) -> Echo:
        nonlocal now
        now += 3
        return Echo([], epoch)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Echoes, "_make", make)
    with start_session() as session:
        items = Items(ids={"a": np.arange(5)})
        loader = Echoes(session, items, Pace(batch_size=2), LoaderOptions(num_threads=0))
        for _ in loader:
            now += 10
        assert loader.times().wait_s == 3 * 3


def pace_in_rank() -> None:
    with start_session(timeout_s=60) as session:
        rank = session.topology.rank
        with pytest.raises(ConfigError, match="the ranks have batch_size 2, 3; give all the same"):
            echoes(session, [rank], size=2 + rank)
        with pytest.raises(ConfigError, match="the ranks have drop_last 0, 1"):
            echoes(session, [rank], drop_last=rank == 1)
        assert len(echoes(session, [rank])) == 1


def test_ranks_must_agree_on_the_pace() -> None:
    run_ranks(pace_in_rank, 2)


def shares_in_rank() -> list[tuple[list[int], int, int]]:
    with start_session(timeout_s=60) as session:
        ids = [[0, 1, 2, 3, 4], [], [8]][session.topology.rank]
        return [(rows, s.num_local, s.num_global) for rows, _, s in echoes(session, ids)]


def test_ranks_without_items_take_part_with_none() -> None:
    assert run_ranks(shares_in_rank, 3) == [
        [([0, 1], 2, 3), ([2, 3], 2, 2), ([4], 1, 1)],
        [([], 0, 3), ([], 0, 2), ([], 0, 1)],
        [([8], 1, 3), ([], 0, 2), ([], 0, 1)],
    ]


def test_whole_passes_are_noted_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of the first loader, one of the second; not the one left early, nor the rest of one."""
    monkeypatch.setenv("DGLX_TRACE", str(tmp_path))
    with start_session() as session:
        first, second = echoes(session, [5, 6, 7, 1, 2]), echoes(session, [1])
        list(first)
        next(iter(first))
        state = first.state_dict()
        for _ in second:
            time.sleep(0.02)
        list(first)
        first.load_state_dict(state)
        list(first)
    passes = json.loads((tmp_path / "rank-0.json").read_text())["passes"]
    assert [(done["loader"], done["steps"]) for done in passes] == [(0, 3), (1, 1), (0, 3)]
    assert all(0 <= done["wait_s"] <= done["seconds"] for done in passes)
    assert passes[1]["seconds"] >= 0.02
    assert passes[1]["wait_s"] <= passes[1]["seconds"] - 0.02
