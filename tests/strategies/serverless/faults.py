"""Faults of workers, by task and attempt, for every executor with a pool in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dglx_dist.strategies.serverless.executors.base import Executor
from dglx_dist.strategies.serverless.tasks import Task, TaskKey
from dglx_dist.strategies.serverless.worker_process import Fault


def none(_key: TaskKey, _attempt: int) -> Fault | None:
    return None


def strike(
    monkeypatch: pytest.MonkeyPatch,
    fault_of: Callable[[TaskKey, int], Fault | None] = none,
    is_doubled: Callable[[TaskKey, int], bool] = lambda _key, _attempt: True,
) -> None:
    """Let ``fault_of`` an attempt happen, and invoke some attempts twice."""
    invoke = Executor.invoke

    def invoke_with_duplicates(pool: Executor, task: Task) -> None:
        for _ in range(1 + is_doubled(task.key, task.attempt)):
            invoke(pool, task)

    monkeypatch.setattr(Executor, "invoke", invoke_with_duplicates)
    monkeypatch.setattr(Executor, "fault_of", lambda _, task: fault_of(task.key, task.attempt))
