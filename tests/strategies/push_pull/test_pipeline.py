"""Batches in flight: the weights are those of delayed SGD with the logged versions, in one process.

Every depth and both variants of the weights, with uneven and empty shares; random delays between ranks change
no bit.
"""

import functools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dglx_dist.comm.mailbox import Mailbox
from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.push_pull.pipeline import Version
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies.push_pull import runs
from tests.strategies.push_pull.runs import EPOCHS, SIDES, Notes, Run
from tests.strategies.test_equality import difference

WHOLE, SPLIT = {"weights": "whole"}, {"weights": "split"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"depth": 1},
    {"depth": 2, **WHOLE},
    {"depth": 2, **SPLIT},
    {"depth": 3, **WHOLE},
    {"depth": 3, **SPLIT},
)
RUNS = {
    **{f"sage {o}": Run("sage", o) for o in OPTIONS},
    **{f"gat {o}": Run("gat", o) for o in (OPTIONS[0], OPTIONS[3], OPTIONS[4])},
    "empty": Run("sage", {"depth": 3}, share="empty"),
    "empty gat": Run("gat", {"depth": 3, **SPLIT}, share="empty"),
    "called twice": Run("gat", {"depth": 1}, calls=2),
    "momentum": Run("sage", {"depth": 3}, optimizer="momentum"),
    "adam": Run("sage", {"depth": 3, **SPLIT}, optimizer="adam"),
    "adam, kept gradients": Run("sage", {"depth": 3}, optimizer="adam", set_to_none=False),
    "drained": Run("sage", {"depth": 3}, drains=(1, 2, 6)),
    "drained split": Run("gat", {"depth": 3, **SPLIT}, drains=(2,)),
    "looked at": Run("sage", {"depth": 3}, peeks=(1, 5), optimizer="momentum"),
    "looked at, split": Run("sage", {"depth": 3, **SPLIT}, peeks=(0, 2, 7)),
    "drained at depth 2": Run("sage", {"depth": 2}, drains=(0, 5), optimizer="momentum"),
}


def on_rank(folder: str, names: list[str]) -> dict[str, Notes]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        results = {name: runs.train(g, RUNS[name]) for name in names}
        g.barrier()
        return results


@functools.cache
def exact(kind: str, optimizer: str, targets: tuple[tuple[int, ...], ...]) -> list[Any]:
    log = [Version(batch=b, side=s, read=b, written=b) for b in range(len(targets)) for s in SIDES]
    return runs.simulate(
        Run(kind, {}, optimizer), log, runs.first_model(kind), runs.plain_loss([list(t) for t in targets])
    )


ALONE = [name for name in RUNS if not name.startswith("empty")]
ON_THREE = [name for name in RUNS if "depth': 1" not in name]


@pytest.mark.parametrize(
    ("ranks", "ranks_per_server", "names"), [(2, 1, list(RUNS)), *wide((1, 1, ALONE), (3, 2, ON_THREE))]
)
def test_weights_equal_delayed_sgd(folder: Path, ranks: int, ranks_per_server: int, names: list[str]) -> None:
    if ranks == 1:
        results = [on_rank(str(folder), names)]
    else:
        results = run_ranks(on_rank, ranks, args=(str(folder), names), ranks_per_server=ranks_per_server)
    for name in names:
        run, notes = RUNS[name], [result[name] for result in results]
        targets = runs.of_all_ranks(notes)
        assert all(note.log == notes[0].log for note in notes), name
        check_log(run, notes[0], len(targets))
        assert all(not any(note.left.values()) for note in notes), (name, notes[0].left)
        plain = runs.simulate(run, notes[0].log, runs.first_model(run.kind), runs.plain_loss(targets))
        for note in notes:
            assert difference(note.weights, plain) <= 1e-12, name
        undelayed = exact(run.kind, run.optimizer, tuple(map(tuple, targets)))
        if run.depth == 1:
            assert difference(plain, undelayed) <= 1e-12, name
        else:
            assert difference(plain, undelayed) > 1e-4, f"{name}: a delay that nobody would see"


def check_log(run: Run, notes: Notes, num_batches: int) -> None:
    """Check that each side makes as many steps as there are batches, with the lags of 2.5."""
    assert num_batches == EPOCHS * runs.STEPS
    per_epoch, split = runs.STEPS, run.options.get("weights") == "split"
    for side in ("M", "D"):
        steps = sorted((entry.batch, entry.written, entry.read) for entry in notes.log if entry.side == side)
        assert sorted(written for _, written, _ in steps) == list(range(num_batches))
        if run.drains or run.peeks:
            continue
        most = 0 if split and side == "D" else run.depth - 1
        assert steps == [(b, b, b - min(b % per_epoch, most)) for b in range(num_batches)]


LONGEST_S = 0.05
JITTERED = {
    "exact": Run("gat", {}),
    "three in flight": Run("gat", {"depth": 3, "structure": "push"}),
    "one side late": Run("sage", {"depth": 3, "weights": "split"}, share="empty"),
}


@contextmanager
def delays(seed: int) -> Iterator[list[float]]:
    """Delay the receipt of every message of the block by 0 to 50 ms; they may overtake each other."""
    drawn, generator, put = [0.0], random.Random(seed), Mailbox.put

    def late(*message: Any) -> None:
        drawn.append(generator.uniform(0, LONGEST_S))
        time.sleep(drawn[-1])
        put(*message)

    with mock.patch.object(Mailbox, "put", late):
        yield drawn


def with_delays(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        results: dict[str, Any] = {}
        for name, run in JITTERED.items():
            results[name] = runs.train(g, run)
            with delays(seed=session.topology.rank) as drawn:
                results[f"{name} late"] = runs.train(g, run)
            results[f"{name} drawn"] = drawn
        g.barrier()
        return results


@pytest.mark.wide
def test_random_delays_change_no_bit(folder: Path) -> None:
    for result in run_ranks(with_delays, 3, args=(str(folder),)):
        for name in JITTERED:
            prompt: Notes = result[name]
            late: Notes = result[f"{name} late"]
            for a, b in zip(prompt.weights, late.weights, strict=True):
                assert np.array_equal(a, b), name
            assert prompt.log == late.log
            assert not any(late.left.values())
            # At least one message forward and one back for each batch and peer, and they were late.
            assert len(result[f"{name} drawn"]) > 2 * runs.EPOCHS * runs.STEPS
            assert max(result[f"{name} drawn"]) > LONGEST_S / 2
