"""The order of sends: requests before local work, and one batch's wait beside another's work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dglx_dist.dataloading.feature_fetch import Columns
from dglx_dist.dataloading.minibatch import BatchBlockBuilder, BatchMaker, KernelMaker
from dglx_dist.dataloading.sampler import WholeSource
from dglx_dist.dataloading.step_loader import run_ahead
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, ColumnInfo
from tests.dataloading.graphs import draws_of, random_csc
from tests.dataloading.shop import KNOWS, LIKE, shop_draws, typed_shop

CSC = random_csc(100, 5)
HOMOGENEOUS = Columns(
    inputs={NODE_TYPE: {"feat": "feat"}},
    targets={NODE_TYPE: {"label": "label"}},
    edges={EDGE_TYPE: {"w": "w"}},
)
TYPED = Columns(
    inputs={"user": {"feat": "user feat"}, "item": {"feat": "item feat"}},
    targets={"item": {"label": "item label"}},
    edges={KNOWS: {"w": "knows w"}, LIKE: {"w": "like w"}},
)


class FakeStore:
    """Answers every pull with the ids themselves, and notes when it was asked and waited for."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note

    def column(self, _key):
        return SimpleNamespace(info=ColumnInfo(dtype="int64", row_shape=()))

    def submit_pull(self, key, ids, **_options):
        self._note("ask", key)
        note = self._note

        class Pending:
            def result(self):
                note("wait", key)
                return torch.from_numpy(np.asarray(ids, np.int64))

        return Pending()


def homogeneous(note: Callable[[str, str], None]) -> BatchMaker:
    draws = draws_of(100, (2, 3), seed=1)
    return KernelMaker(WholeSource(draws.schema, [CSC]), draws, FakeStore(note), HOMOGENEOUS)


def typed(note: Callable[[str, str], None]) -> BatchMaker:
    schema, cscs = typed_shop()
    draws = shop_draws(schema, [2, 3])
    return KernelMaker(WholeSource(schema, cscs), draws, FakeStore(note), TYPED)


SEEDS = {homogeneous: {NODE_TYPE: np.array([4, 8])}, typed: {"user": np.array([4, 8]), "item": np.array([2])}}


@pytest.mark.parametrize(("open_one", "num_asked"), [(homogeneous, 4), (typed, 7)])
def test_all_requests_of_a_batch_leave_before_blocks_are_built_and_before_any_wait(
    open_one, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    maker = open_one(lambda what, _key: events.append(what))

    def build(self, batch, blocks=BatchBlockBuilder.blocks):
        events.append("build")
        return blocks(self, batch)

    monkeypatch.setattr(BatchBlockBuilder, "blocks", build)
    maker.make(SEEDS[open_one], 0)
    assert events == ["ask"] * num_asked + ["build"] + ["wait"] * num_asked


@pytest.mark.parametrize("open_one", [homogeneous, typed])
def test_while_one_batch_waits_for_rows_the_next_is_sampled(open_one) -> None:
    # The first batch's rows come only after the second batch was sampled: in turn they would never come.
    second_asks = threading.Event()
    asked: list[str] = []
    lock = threading.Lock()

    def note(what: str, _key: str) -> None:
        with lock:
            asked.append(threading.current_thread().name)
            others = len(set(asked)) > 1
        if what == "ask" and others:
            second_asks.set()
        if what == "wait":
            assert second_asks.wait(30)

    maker = open_one(note)
    batches = run_ahead(lambda step: maker.make(SEEDS[open_one], step), range(2), depth=2, num_threads=2)
    assert len(list(batches)) == 2


def test_the_consumer_computes_while_the_next_batches_are_made() -> None:
    made = [threading.Event() for _ in range(3)]
    maker = homogeneous(lambda _what, _key: None)

    def make(step: int) -> int:
        maker.make(SEEDS[homogeneous], step)
        made[step].set()
        return step

    for step in run_ahead(make, range(3), depth=2, num_threads=1):
        # Here the consumer computes with batch `step`; both that may be ahead of it get done meanwhile.
        assert all(event.wait(30) for event in made[step : step + 3])
