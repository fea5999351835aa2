"""What one task asks of its two servers, in whose words a failure is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.offload.program import MAX_PROGRAM_BYTES
from dglx_dist.offload.tasks import Task, attempt_name, half_name
from dglx_dist.offload.work import kernels
from dglx_dist.offload.worker.caller import Answer, Caller
from dglx_dist.records import Array

PROGRAM, PULL, GIVE = "lambda.program", "lambda.pull", "lambda.give"
"""Of graph servers; see :class:`Exchange`."""
WEIGHTS, GRADIENTS = "lambda.weights", "lambda.gradients"
"""Of parameter servers."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02


@final
class Exchange:
    """The calls of one task.

    ``lambda.pull`` answered without arrays means "not yet": a worker may be started before its rows are
    there, and asks again rather than hold a thread of the server.
    """

    def __init__(self, caller: Caller, task: Task) -> None:
        self._caller, self._task = caller, task
        self._given: list[Answer] = []
        self._weights: Answer | None = None
        self._halves: list[Answer | None] = [None, None]

    def program(self) -> bytes:
        """Fetch the program's JSON, and say which kernels this worker computes with.

        Raises:
            ConfigError: something else came.
        """
        arrays = self._from_graph_server(PROGRAM, kernels()).wait(self._task.timeout_s)
        if len(arrays) != 1 or arrays[0].nbytes > MAX_PROGRAM_BYTES:
            raise self._wrong_answer(PROGRAM, f"one program of at most {MAX_PROGRAM_BYTES} bytes")
        return arrays[0].tobytes()

    def ask_weights(self) -> None:
        """Ask for the weights of the task's step."""
        task = self._task
        self._weights = self._caller.send(task.parameter_server, task.secrets, WEIGHTS, str(task.key))

    def weights(self) -> list[Array]:
        """Return the weights asked for; none where none were."""
        return [] if self._weights is None else self._weights.wait(self._task.timeout_s)

    def ask_half(self, half: int) -> None:
        """Ask for the rows of half 0 or 1."""
        self._halves[half] = self._from_graph_server(PULL, half_name(self._task.key, half))

    def half(self, half: int) -> list[Array]:
        """Return the rows asked for, once the graph server has them.

        Raises:
            PeerError: it had none in time.
        """
        task, asked = self._task, self._halves[half]
        assert asked is not None
        asked_at = time.monotonic()
        while not (arrays := asked.wait(task.timeout_s)):
            waited_s = time.monotonic() - asked_at
            if waited_s > task.timeout_s:
                server, name = task.graph_server, half_name(task.key, half)
                raise PeerError(
                    f"rank {server.rank} on {server.host} had no rows for {PULL} {name!r} "
                    f"within {task.timeout_s:g} s; what comes before this task is late, or raise timeout_s"
                )
            # In proportion to what it waited, so that few calls are made and rows do not lie there for long:
            # a worker that comes late to each task costs more than the pipeline gains.
            time.sleep(min(max(waited_s / 2, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            asked = self._from_graph_server(PULL, half_name(task.key, half))
        self._halves[half] = None
        return arrays

    def push(self, gradients: Sequence[Array]) -> None:
        """Push the gradients and wait until the parameter server has them."""
        task = self._task
        asked = self._caller.send(task.parameter_server, task.secrets, GRADIENTS, str(task.key), gradients)
        asked.wait(task.timeout_s)

    def give(self, half: int, rows: Sequence[Array]) -> None:
        """Send the rows of half 0 or 1 and return at once."""
        name = attempt_name(self._task.key, half, self._task.attempt)
        self._given.append(self._from_graph_server(GIVE, name, rows))

    def accepted(self) -> bool:
        """Wait for the answers to what was given; return whether all of it was taken."""
        found = [asked.wait(self._task.timeout_s) for asked in self._given]
        for arrays in found:
            if len(arrays) != 1 or arrays[0].shape != (1,) or arrays[0].dtype != np.int64:
                raise self._wrong_answer(GIVE, "yes or no")
        return all(arrays[0][0] == 1 for arrays in found)

    def _wrong_answer(self, op: str, wanted: str) -> ConfigError:
        server = self._task.graph_server
        return ConfigError(
            f"rank {server.rank} on {server.host} answered {op} without {wanted}: does it run another "
            "version of dglx_dist?"
        )

    def _from_graph_server(self, op: str, name: str, arrays: Sequence[Array] = ()) -> Answer:
        return self._caller.send(self._task.graph_server, self._task.secrets, op, name, arrays)
