"""What moves and tasks are called in traces: the paper's names, and one row for each who works."""

from __future__ import annotations

from typing import final

from dglx_dist.cluster.timeline import WAIT, WORKER, Span, Timeline
from dglx_dist.offload.controller_records import Finished
from dglx_dist.offload.program import Program
from dglx_dist.offload.tasks import Direction, TaskKey
from dglx_dist.strategies.bounded.course import Kind

_NAMES = {
    Kind.WORK: "open {}",
    Kind.LOSS: "loss of {}",
    Kind.PUBLISH: "publish {}",
    Kind.SEND_BACK: "grad{}",
    Kind.COLLECT: "collect {}",
}
_TASKS = {Direction.FORWARD: "{}", Direction.BACKWARD: "grad{}", Direction.FUSED: "{}+grad"}


def move_name(step: str, kind: Kind) -> str:
    """Return "GA1", "SC1", "gradSC1", "open AV1" and so on for a move of a graph server."""
    return _NAMES.get(kind, "{}").format(step)


def task_name(program: Program, key: TaskKey) -> str:
    """Return "AV1", "gradAV1", or "AV2+grad" where forward and backward are one task."""
    return _TASKS[key.direction].format(program.steps[key.step].name)


@final
class WorkerSpans:
    """Notes each task that is done; give it to a controller, whose clock must be ``time.perf_counter``.

    Args:
        timeline: Of the rank.
        program: What is trained.
    """

    def __init__(self, timeline: Timeline, program: Program) -> None:
        self._timeline, self._program = timeline, program

    def __call__(self, done: Finished) -> None:
        """Note the wait of a worker that was up before its rows were there, and its work."""
        if not self._timeline.on:
            return
        work = max(done.sent, done.ready)
        if done.sent < work:
            self._note(done, f"{WAIT} for rows", done.sent, work)
        self._note(done, task_name(self._program, done.key), work, done.done)

    def _note(self, done: Finished, name: str, begin_s: float, end_s: float) -> None:
        self._timeline.note(
            Span(
                name=name,
                row=WORKER,
                begin_s=begin_s,
                end_s=end_s,
                batch=done.key.epoch,
                interval=done.key.interval,
            )
        )
