"""What a run took and cost over all ranks, and the line of live progress."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dglx_dist.serverless.controller import Counts
from dglx_dist.serverless.cost import prices
from dglx_dist.strategies.serverless.engine import (
    Account,
    LiveProgress,
    account_of_ranks,
    as_json,
    progress_line,
)
from dglx_dist.strategies.serverless.options import read_settings
from dglx_dist.strategies.serverless.scheduler import Snapshot

TABLE = prices("dorylus")
# A million functions of 192 MB that took 100 ms each.
MILLION = Counts(invocations=10**6, cold=10, warm=10**6 - 10, billed_s=1e5, gb_s=1e5 * 192 / 1024)
NOW = Snapshot(epochs=(3, 4, 3), steps=("GA1", "AV1", "AV1"), queue=2, tasks=1)


def test_ranks_add_up() -> None:
    halves = [
        Account(counts=Counts(invocations=3, gb_s=0.5), server_seconds=2.0),
        Account(counts=Counts(invocations=4, relaunched=1), server_seconds=5.0),
    ]
    total = account_of_ranks([as_json(one) for one in halves])
    assert total == Account(counts=Counts(invocations=7, gb_s=0.5, relaunched=1), server_seconds=7.0)


def test_dollars_of_functions_and_servers() -> None:
    """0.20 for the requests, 0.3125 for their time; two servers of 0.34 an hour for one hour."""
    told = Account(counts=MILLION, server_seconds=7200.0).describe("c5.2xlarge", TABLE, simulated=True)
    assert told["dollars_functions"] == pytest.approx(0.5125)
    assert told["dollars_servers"] == pytest.approx(0.68)
    assert told["dollars"] == pytest.approx(1.1925)
    assert str(told["label"]).startswith("simulated")
    real = Account(counts=MILLION).describe("c5.2xlarge", TABLE, simulated=False)
    assert "simulated" not in str(real["label"])


def test_the_line_says_stages_workers_queue_relaunches_and_dollars() -> None:
    bill = Account(counts=MILLION).bill("c5.2xlarge", TABLE, simulated=True)
    assert progress_line(NOW, Counts(relaunched=5), 4, bill) == (
        "epoch 3 | AV1 2 GA1 1 | 4 workers | queue 2 | 5 relaunched | $0.512 simulated"
    )
    drained = Snapshot(epochs=(5,), steps=("",), queue=0, tasks=0)
    assert "| drained | 1 worker |" in progress_line(drained, Counts(), 1, bill)


def test_lines_come_while_a_run_goes_on_and_no_longer() -> None:
    pool = SimpleNamespace(counts=MILLION, simulated=True, controller=SimpleNamespace(workers=3))
    running: Any = SimpleNamespace(pool=pool, engine=SimpleNamespace(snapshot=lambda: NOW))
    settings = read_settings({"prices": "dorylus"})
    seen: list[str] = []
    first = threading.Event()

    def show(line: str) -> None:
        seen.append(line)
        first.set()

    with LiveProgress(running, settings, Account(counts=MILLION), show):
        assert first.wait(20)
    assert "3 workers" in seen[0]
    # What was done before is in the bill.
    assert "$1.02" in seen[0] or "$1.03" in seen[0]
    assert not any(thread.name == "lambda-progress" for thread in threading.enumerate())
    with LiveProgress(running, settings, Account(), None):
        assert not any(thread.name == "lambda-progress" for thread in threading.enumerate())
