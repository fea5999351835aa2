"""Faults of workers, drawn by task and attempt, for every executor with a pool in this process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest

from dglx_dist.serverless.executors.base import Latency, PoolExecutor
from dglx_dist.serverless.tasks import Task, TaskKey
from dglx_dist.serverless.worker import TaskPhase
from dglx_dist.serverless.worker_process import Fault


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares of the invocations."""

    seed: int = 0
    kill: float = 0.0
    """Share in which the worker dies."""
    delay: float = 0.0
    """Share in which the worker pauses for ``delay_s``."""
    duplicate: float = 0.0
    """Share that is invoked twice."""
    delay_s: float = 1.0
    places: tuple[TaskPhase, ...] = tuple(TaskPhase)

    def draw(self, key: TaskKey, attempt: int) -> tuple[Fault | None, int]:
        """Return the fault of an attempt, and the number of its invocations, 1 or 2."""
        digest = hashlib.sha256(f"{self.seed}/{key}/{attempt}".encode()).digest()
        draw = int.from_bytes(digest[:6], "little") / (1 << 48)
        place = self.places[digest[6] % len(self.places)]
        if draw < self.kill:
            return Fault(place=place), 1
        if draw < self.kill + self.delay:
            return Fault(place=place, seconds=self.delay_s), 1
        return None, 2 if draw < self.kill + self.delay + self.duplicate else 1

    def strike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let these faults happen, in place of an emulated latency."""
        invoke = PoolExecutor.invoke

        def invoke_with_duplicates(pool: PoolExecutor, event: bytes) -> None:
            task = Task.from_event(event)
            for _ in range(self.draw(task.key, task.attempt)[1]):
                invoke(pool, event)

        monkeypatch.setattr(PoolExecutor, "invoke", invoke_with_duplicates)
        monkeypatch.setattr(Latency, "draw", lambda _, key, attempt: self.draw(key, attempt)[0])
