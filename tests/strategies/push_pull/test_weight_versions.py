"""Optimizers on stashed weights; random delays between ranks change no bit."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.push_pull import pipeline
from dglx_dist.strategies.push_pull.pipeline import check_optimizer
from tests.helpers.ranks import run_ranks
from tests.strategies.push_pull import runs
from tests.strategies.push_pull.runs import Notes, Run


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))]


@pytest.mark.parametrize("name", re.findall(r"\b[A-Z]\w+", pipeline._ELEMENTWISE))
def test_what_passes_steps_columns_as_it_steps_the_whole(name: str) -> None:
    """The claim of the message itself: two pieces, stepped apart, are the columns of the whole."""
    kind = getattr(torch.optim, name)
    (whole,) = matrix()
    pieces = [nn.Parameter(whole.detach()[:, :2].clone()), nn.Parameter(whole.detach()[:, 2:].clone())]
    optimizers = [kind([one], lr=0.1) for one in (whole, *pieces)]
    for optimizer in optimizers:
        check_optimizer(optimizer)
    sparse = kind is torch.optim.SparseAdam
    for step in range(3):
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for one, part in zip((whole, *pieces), (gradient, gradient[:, :2], gradient[:, 2:]), strict=True):
            one.grad = part.clone().to_sparse(1) if sparse else part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert whole.abs().sum() > 0
    assert torch.equal(whole, torch.cat([piece.detach() for piece in pieces], dim=1))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> Any:  # type: ignore[override]
        closure()


class MyAdafactor(torch.optim.Adafactor):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.optim.LBFGS(matrix()), "LBFGS looks at whole parameters"),
        (lambda: torch.optim.Adafactor(matrix()), "Adafactor looks at whole parameters"),
        (lambda: torch.optim.Muon(matrix()), "Muon looks at whole parameters"),
        (lambda: MyAdafactor(matrix()), "MyAdafactor looks at whole parameters"),
        (lambda: NeedsClosure(matrix(), lr=0.1), "needs a closure"),
    ],
)
def test_what_does_not_is_refused_and_told_what_works(
    make: Callable[[], torch.optim.Optimizer], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_optimizer(make())
    assert "Adagrad" in str(error.value)
    assert "data_parallel" in str(error.value)


LONGEST_S = 0.05
RUNS = {
    "exact": Run("gat", {}),
    "three in flight": Run("gat", {"depth": 3, "structure": "push"}),
    "one side late": Run("sage", {"depth": 3, "weights": "split"}, share="empty"),
}


class Delayed:
    """A message that leaves a while after it was handed over, by a thread of its own."""

    def __init__(self, send: Any, delay_s: float) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._leave, args=(send, delay_s), daemon=True)
        self._thread.start()

    def _leave(self, send: Any, delay_s: float) -> None:
        time.sleep(delay_s)
        try:
            send().wait()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


@contextmanager
def delays(seed: int) -> Iterator[list[float]]:
    """Delay every message of the block by 0 to 50 ms, those of one receiver and tag in their order.

    What torch keeps in order on the wire must be handed to it in order: by receiver and tag.
    """
    drawn, generator = [0.0], random.Random(seed)
    isend = dist.isend
    last: dict[tuple[int, int], Delayed] = {}

    def late(tensor: Any, dst: int, group: Any = None, tag: int = 0) -> Delayed:
        delay_s = generator.uniform(0, LONGEST_S)
        drawn.append(delay_s)
        before = last.get((dst, tag))

        def send() -> Any:
            if before is not None:
                before.wait()
            return isend(tensor, dst, group=group, tag=tag)

        last[dst, tag] = Delayed(send, delay_s)
        return last[dst, tag]

    with mock.patch.object(dist, "isend", late):
        yield drawn


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        found: dict[str, Any] = {}
        for name, run in RUNS.items():
            found[name] = runs.train(g, run)
            with delays(seed=session.topology.rank) as drawn:
                found[f"{name} late"] = runs.train(g, run)
            found[f"{name} drawn"] = drawn
        g.barrier()
        return found


@pytest.mark.wide
def test_random_delays_change_no_bit(folder: Path) -> None:
    for result in run_ranks(on_rank, 3, args=(str(folder),)):
        for name in RUNS:
            prompt: Notes = result[name]
            late: Notes = result[f"{name} late"]
            for a, b in zip(prompt.weights, late.weights, strict=True):
                assert np.array_equal(a, b), name
            assert prompt.log == late.log
            assert not any(late.left.values())
            # At least one message forward and one back for each batch and peer, and they were late.
            assert len(result[f"{name} drawn"]) > 2 * runs.EPOCHS * runs.STEPS
            assert max(result[f"{name} drawn"]) > LONGEST_S / 2
