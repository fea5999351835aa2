"""What every executor runs: one task from its event to its end (Dorylus, sections 4 and 6)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import final

from dglx_dist.errors import ConfigError, DglxError, RemoteError
from dglx_dist.offload.fields import Json
from dglx_dist.offload.payload import half_rows
from dglx_dist.offload.program import Program
from dglx_dist.offload.tasks import Direction, Secrets, Task
from dglx_dist.offload.work import Computed, Work, add_gradients
from dglx_dist.offload.worker.answer import WorkerAnswer
from dglx_dist.offload.worker.caller import Caller
from dglx_dist.offload.worker.exchange import Exchange
from dglx_dist.offload.worker.places import At, Place, go_on
from dglx_dist.records import Array


@final
class Worker:
    """Does tasks one after another, and keeps only what saves time: connections and the last program.

    Gradients are pushed, and acknowledged, before the last rows are given. The graph server takes a task as
    done by its rows alone, so a worker that dies anywhere loses nothing: the next attempt pushes the same
    bits under the same key, which count once.

    Args:
        caller: How servers are asked.
        at: Called at each place of a task's course.
    """

    def __init__(self, caller: Caller, at: At = go_on) -> None:
        self._caller, self._at = caller, at
        self._kept: _Kept | None = None
        self._cold = True

    def handle(self, event: object, context: object = None) -> dict[str, Json]:
        """Do the task that ``event`` describes; return ``WorkerAnswer.as_json``.

        Args:
            event: What ``Task.to_event`` wrote, as text or as the object a functions service made of it.
            context: What such a service adds; not looked at.

        Raises:
            ConfigError: the event is no task, or names what this worker does not know.
            DglxError: it went wrong; the message names the task, the attempt, and what was asked of whom.
        """
        started = time.perf_counter()
        task = Task.from_event(event)
        cold, self._cold = self._cold, False
        try:
            accepted = self._do(task)
        except DglxError as error:
            raise type(error)(f"task {task.key}, attempt {task.attempt}: {error}") from error
        except Exception as error:
            text = f"task {task.key}, attempt {task.attempt}: {type(error).__name__}: {error}"
            raise RemoteError(text) from error
        seconds = time.perf_counter() - started
        answer = WorkerAnswer(
            key=task.key, attempt=task.attempt, accepted=accepted, seconds=seconds, cold=cold
        )
        return answer.as_json()

    def _do(self, task: Task) -> bool:
        self._caller.begin()
        exchange = Exchange(self._caller, task)
        work = self._work(task, exchange)
        self._at(Place.BEFORE_PULL)
        if task.options.streaming:
            computed = self._streamed(task, work, exchange)
        else:
            computed = self._at_once(task, work, exchange)
        self._at(Place.COMPUTED)
        if work.pushes and work.weights:
            exchange.push(add_gradients(computed[0].gradients, computed[1].gradients))
        self._at(Place.PUSHED)
        for half, one in enumerate(computed):
            if not _given_early(task, half):
                exchange.give(half, one.rows)
        accepted = exchange.accepted()
        self._at(Place.END)
        return accepted

    def _streamed(self, task: Task, work: Work, exchange: Exchange) -> list[Computed]:
        """Compute the first half while the second comes, and where nothing is pushed while the first goes."""
        _ask_first(work, exchange)
        first = exchange.half(0)
        exchange.ask_half(1)
        weights = exchange.weights()
        computed = [self._half(task, work, 0, weights, first)]
        if _given_early(task, 0):
            exchange.give(0, computed[0].rows)
        computed.append(self._half(task, work, 1, weights, exchange.half(1)))
        return computed

    def _at_once(self, task: Task, work: Work, exchange: Exchange) -> list[Computed]:
        _ask_first(work, exchange)
        first = exchange.half(0)
        exchange.ask_half(1)
        halves, weights = [first, exchange.half(1)], exchange.weights()
        return [self._half(task, work, half, weights, arrays) for half, arrays in enumerate(halves)]

    def _half(self, task: Task, work: Work, half: int, weights: list[Array], arrays: list[Array]) -> Computed:
        nodes = half_rows(task.rows, half)
        computed = work.half(weights, arrays, nodes.stop - nodes.start)
        self._at(Place.HALF)
        return computed

    def _work(self, task: Task, exchange: Exchange) -> Work:
        kept, run = self._kept, (task.secrets, task.key.run)
        # Anew for each run, though programs may be equal: with this call a worker introduces itself.
        if kept is None or kept.program.digest != task.program or kept.run != run:
            program = Program.from_json(exchange.program())
            if program.digest != task.program:
                raise ConfigError(
                    f"rank {task.graph_server.rank} on {task.graph_server.host} gave program "
                    f"{program.digest[:12]}, not {task.program[:12]}: it is of another run"
                )
            kept = self._kept = _Kept(program, run)
        return kept.work(task)


@final
@dataclass(frozen=True)
class _Kept:
    """A program, and the kinds of task that were asked for so far."""

    program: Program
    run: tuple[Secrets, int]
    _works: dict[tuple[int, Direction, bool], Work] = field(default_factory=dict)

    def work(self, task: Task) -> Work:
        key = task.key
        kind = (key.step, key.direction, task.options.rematerialise)
        if kind not in self._works:
            # How many intervals there are is the graph server's to know and check.
            key.check(self.program, key.interval + 1)
            self._works[kind] = Work(self.program, *kind)
        return self._works[kind]


def _ask_first(work: Work, exchange: Exchange) -> None:
    if work.weights:
        exchange.ask_weights()
    exchange.ask_half(0)


def _given_early(task: Task, half: int) -> bool:
    """Whether rows of ``half`` leave before the other half is computed."""
    return half == 0 and task.options.streaming and task.key.direction is Direction.FORWARD
