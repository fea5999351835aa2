"""The order of sends: requests before local work, and one batch's wait beside another's work."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dglx_dist.dataloading.feature_fetch import Columns
from dglx_dist.dataloading.minibatch import BatchBlockBuilder, KernelMaker, MiniBatch, NodeMaker
from dglx_dist.dataloading.sampler import LocalSource
from dglx_dist.dataloading.step_loader import run_ahead
from dglx_dist.records import ColumnInfo
from tests.dataloading.graphs import plan_draws
from tests.dataloading.shop import KNOWS, LIKE, typed_shop

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

        def finish():
            note("wait", key)
            return torch.from_numpy(np.asarray(ids, np.int64))

        return finish


def make_typed(note: Callable[[str, str], None]) -> NodeMaker:
    schema, cscs = typed_shop()
    draws = plan_draws(schema, [2, 3])
    return KernelMaker(LocalSource(schema, cscs), draws, SimpleNamespace(kvstore=FakeStore(note)), TYPED)


def make(maker: NodeMaker, epoch: int = 0) -> MiniBatch:
    return maker.complete(maker.sample_items(SEEDS, epoch, step=0))


SEEDS = {"user": np.array([4, 8]), "item": np.array([2])}


def test_all_requests_of_a_batch_leave_before_blocks_are_built_and_before_any_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    maker = make_typed(lambda event, _key: events.append(event))

    def build(self, batch, node_columns, blocks=BatchBlockBuilder.blocks):
        events.append("build")
        return blocks(self, batch, node_columns)

    monkeypatch.setattr(BatchBlockBuilder, "blocks", build)
    make(maker)
    assert events == ["ask"] * 7 + ["build"] + ["wait"] * 7


def test_while_one_batch_waits_for_rows_the_next_is_sampled() -> None:
    # The first batch's rows come only after the second batch was sampled: in turn they would never come.
    second_asks = threading.Event()
    threads: list[str] = []
    lock = threading.Lock()

    def note(event: str, _key: str) -> None:
        with lock:
            threads.append(threading.current_thread().name)
            is_shared = len(set(threads)) > 1
        if event == "ask" and is_shared:
            second_asks.set()
        if event == "wait":
            assert second_asks.wait(30)

    maker = make_typed(note)
    batches = run_ahead(lambda step: make(maker, step), range(2), depth=2, num_threads=2)
    assert len(list(batches)) == 2
