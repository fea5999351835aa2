"""Steps of an epoch: schedule, look-ahead, items, options, and ranks of unequal shares."""

import json
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import pytest

from dglx_dist.comm.session import Session, start_session
from dglx_dist.dataloading.step_loader import (
    Items,
    LoaderOptions,
    Maker,
    StepLoader,
    read_items,
    read_loader_options,
    run_ahead,
)
from dglx_dist.errors import ConfigError
from dglx_dist.records import StepShare
from tests.helpers.ranks import run_ranks


def test_no_more_than_depth_are_begun_ahead() -> None:
    begun, first_three = [], threading.Event()

    def make(step: int) -> int:
        begun.append(step)
        if len(begun) == 3:
            first_three.set()
        return step

    results = run_ahead(make, range(100), depth=2, num_threads=4)
    next(results)
    # One was taken and two may be ahead of it.
    assert first_three.wait(10)
    results.close()
    assert sorted(begun) == [0, 1, 2]


def test_an_error_comes_in_its_turn_with_its_cause() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("bad row 2") from KeyError("feat")
        return step

    results = run_ahead(make, range(9), depth=3, num_threads=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="bad row 2") as caught:
        next(results)
    assert isinstance(caught.value.__cause__, KeyError)
    assert any(frame.name == "make" for frame in caught.traceback)


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    for step in run_ahead(lambda step: step, range(1000), depth=2, num_threads=3):
        if step == 5:
            break
    assert threading.active_count() == before


NONE = np.empty(0, np.int64)


def test_order_is_a_permutation_keyed_by_epoch_and_ids() -> None:
    ids = np.arange(100, 200)

    def order(ids: np.ndarray, epoch: int) -> list[int]:
        items = Items(ids={"a": ids})
        return items.take(items.order(shuffle=True, seed=1, epoch=epoch))["a"].tolist()

    first = order(ids, 0)
    assert sorted(first) == ids.tolist() != first
    assert order(ids, 1) != first
    assert order(ids[::-1], 0) == first
    assert Items(ids={"a": ids}).take(NONE)["a"].tolist() == []


def test_equal_ids_of_two_types_do_not_stand_together() -> None:
    ids = np.arange(200)
    order = Items(ids={"a": ids, "b": ids}).order(shuffle=True, seed=1, epoch=0)
    place = np.argsort(order)
    assert sorted(order.tolist()) == list(range(400))
    assert abs(np.corrcoef(place[:200], place[200:])[0, 1]) < 0.25


COUNTS = {("u", "buys", "i"): 4, ("i", "likes", "u"): 3}


def test_ids_and_masks_by_type_are_read_and_copied() -> None:
    ids = np.array([2, 0])
    items = read_items({"buys": ids, "likes": np.array([False, True, True])}, COUNTS, "edge")
    ids[0] = 3
    assert [ids.tolist() for ids in items.ids.values()] == [[2, 0], [1, 2]]
    assert list(items.ids) == list(COUNTS)
    assert (
        read_items({("i", "likes", "u"): []}, COUNTS, "edge").order(shuffle=True, seed=0, epoch=0).size == 0
    )


@pytest.mark.parametrize("name", ["use_uva", "use_ddp", "num_workers", "pin_memory", "persistent_workers"])
def test_needless_options_of_dgl_are_warned_about_once_they_ask_for_something(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=True has no effect"):
        read_loader_options({name: True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_loader_options({name: False})


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None, "3", 1 << 63])
def test_sizes_must_be_integers(value: object) -> None:
    for name in ("batch_size", "depth"):
        with pytest.raises(ConfigError, match=f"{name}={value!r} must be"):
            read_loader_options({name: value})
    assert read_loader_options({"batch_size": np.int64(3), "seed": np.int32(5)}).batch_size == 3


@dataclass(frozen=True)
class Echo:
    rows: list[int]
    epoch: int
    sample_s: float = 0.25
    fetch_s: float = 0.5


class EchoMaker(Maker[str, Echo]):
    def __init__(self, session: Session) -> None:
        self.session = session

    def sample_items(self, items: Mapping[str, Any], epoch: int, *, step: int) -> Echo:
        return Echo([int(row) for ids in items.values() for row in ids], epoch)

    def deliver(self, batch: Echo, share: StepShare) -> tuple[list[int], int, StepShare]:
        assert self.session.step_share is share
        return batch.rows, batch.epoch, share

    def offline(self) -> Self:
        return self


Echoes: TypeAlias = StepLoader[str, Echo, tuple[list[int], int, StepShare]]


def echoes(session: Session, ids: list[int], size: int = 2, **pace: Any) -> Echoes:
    items = Items(ids={"a": np.array(ids[:3], np.int64), "b": np.array(ids[3:], np.int64)})
    return StepLoader(session, items, LoaderOptions(seed=7, batch_size=size, **pace), EchoMaker(session))


def test_steps_follow_the_given_order() -> None:
    with start_session() as session:
        loader = echoes(session, [5, 6, 7, 1, 2])
        assert [rows for rows, _, _ in loader] == [[5, 6], [7, 1], [2]]
        assert [epoch for _, epoch, _ in loader] == [1, 1, 1]
        assert session.step_share is None
        times = loader.times(reset=True)
        assert (times.sample_s, times.fetch_s) == (6 * 0.25, 6 * 0.5)
        assert loader.times().sample_s == 0
        full = echoes(session, [5, 6, 7, 1, 2], drop_last=True)
        assert [rows for rows, _, _ in full] == [[5, 6], [7, 1]]
        assert full.num_epoch_targets == (4, 4)


def test_waiting_time_excludes_the_use_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a batch takes 3 seconds and using it 10: without threads the loop waits 3 for each."""
    now = 0.0

    def sample_items(self: EchoMaker, items: dict[str, Any], epoch: int, *, step: int) -> Echo:
        nonlocal now
        now += 3
        return Echo([], epoch)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(EchoMaker, "sample_items", sample_items)
    with start_session() as session:
        items = Items(ids={"a": np.arange(5)})
        maker = EchoMaker(session)
        loader: Echoes = StepLoader(session, items, LoaderOptions(batch_size=2, num_threads=0), maker)
        for _ in loader:
            now += 10
        assert loader.times().wait_s == 3 * 3


def pace_in_rank() -> None:
    with start_session(timeout_s=60) as session:
        rank = session.topology.rank
        with pytest.raises(ConfigError, match="batch_size: rank 0 has 2, rank 1 has 3; pass the same"):
            echoes(session, [rank], size=2 + rank)
        with pytest.raises(ConfigError, match="drop_last: rank 0 has 0, rank 1 has 1"):
            echoes(session, [rank], drop_last=rank == 1)
        assert len(echoes(session, [rank])) == 1


def test_ranks_must_agree_on_the_pace() -> None:
    run_ranks(pace_in_rank, 2)


def test_complete_passes_are_noted_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
