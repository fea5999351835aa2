"""How a graph server has its tasks done, whoever does them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from dglx_dist.offload.controller import Controller
from dglx_dist.offload.tasks import Task, TaskKey


class Workers(Protocol):
    """Who does tasks. Thread-safe."""

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """Have a task of ``rows`` nodes done; ``ready``: whether its rows can be pulled already."""

    def ready(self, key: TaskKey) -> None:
        """Say that the rows of a task that was launched before can be pulled now."""

    def done(self, key: TaskKey, attempt: int) -> None:
        """Say that all rows of ``attempt`` came; also of one that is refused."""

    def raise_if_failed(self) -> None:
        """Raise what keeps tasks from being done."""


@final
class ControlledWorkers:
    """Workers behind a controller, which is run and closed by its owner.

    Args:
        controller: Launches, and launches again.
        task_of: Makes the task from its key and its rows.
    """

    def __init__(self, controller: Controller, task_of: Callable[[TaskKey, int], Task]) -> None:
        self._controller, self._task_of = controller, task_of

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """See :class:`Workers`."""
        self._controller.launch(self._task_of(key, rows), ready=ready)

    def ready(self, key: TaskKey) -> None:
        """See :class:`Workers`."""
        self._controller.ready(key)

    def done(self, key: TaskKey, attempt: int) -> None:
        """See :class:`Workers`. Which half of which attempt is used, the graph server has decided."""
        self._controller.finished(key, attempt)

    def raise_if_failed(self) -> None:
        """See :class:`Workers`."""
        self._controller.raise_if_failed()
