"""The servers and ranks of one experiment: a lab and a crew for each shape, all up at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, final

from dglx_dist.planner.records import Rate
from scripts.bench.crew import Crew
from scripts.bench.peers import launch
from scripts.bench.records import Job, Shape
from scripts.netlab.alive import scratch_folder
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.labs import open_lab

JOB_TIMEOUT_S = 900.0


class Stage(ABC):
    """Where jobs are done; one at a time, so that what waits costs the others nothing."""

    @abstractmethod
    def do(self, shape: Shape, job: Job, rate: Rate | None) -> list[dict[str, Any]]:
        """Do ``job`` on the servers of ``shape`` with ``rate`` between them; return the reports by rank.

        Args:
            shape: One of those that the stage was opened with.
            job: What to do.
            rate: Most that a server sends, or receives; None, or plain loopback: not limited.

        Raises:
            JobError: a rank failed, died or was silent for long.
        """

    @abstractmethod
    def describe(self, shape: Shape, rate: Rate | None) -> dict[str, Any]:
        """Return ``Lab.describe()`` of its servers with ``rate`` between them, which it sets."""

    @abstractmethod
    def limits(self, shape: Shape) -> bool:
        """Whether a rate between its servers holds; False on plain loopback."""


OpenStage: TypeAlias = Callable[[Sequence[Shape]], AbstractContextManager[Stage]]


@final
class _Set:
    """A lab, its crew as soon as a job wants one, and what launches programs in its place."""

    def __init__(self, lab: Lab, shape: Shape, folder: Path, closing: ExitStack) -> None:
        self.lab = lab
        self._shape, self._folder, self._closing = shape, folder, closing
        self._crew: Crew | None = None
        self._launches = launch.Launches(lab, shape.ranks_per_server, folder / "launches")

    def do(self, job: Job) -> list[dict[str, Any]]:
        """Have ``job`` done by the crew or, for the kind "program", by processes of its own."""
        if job.kind == launch.KIND:
            return self._launches.do(job, JOB_TIMEOUT_S)
        if self._crew is None:
            crew = Crew(self.lab, self._shape.ranks_per_server, self._folder / "crew")
            self._crew = self._closing.enter_context(crew)
        return self._crew.do(job, JOB_TIMEOUT_S)


@final
class LabStage(Stage):
    """Crews of real ranks in labs; :func:`open_stage` makes one."""

    def __init__(self, sets: dict[Shape, _Set]) -> None:
        self._sets = sets

    def do(self, shape: Shape, job: Job, rate: Rate | None) -> list[dict[str, Any]]:
        self._limit(shape, rate)
        return self._sets[shape].do(job)

    def describe(self, shape: Shape, rate: Rate | None) -> dict[str, Any]:
        self._limit(shape, rate)
        return self._sets[shape].lab.describe()

    def limits(self, shape: Shape) -> bool:
        return self._sets[shape].lab.kind != "loopback"

    def _limit(self, shape: Shape, rate: Rate | None) -> None:
        if self.limits(shape):
            self._sets[shape].lab.set_rates(rate, shape.internal)


@contextmanager
def open_stage(shapes: Sequence[Shape]) -> Iterator[Stage]:
    """Bring up the servers and start the ranks of each of ``shapes``; end them all afterwards.

    Raises:
        ConfigError: a shape asks for what this machine cannot give.
        JobError: ranks could not be started.
    """
    with ExitStack() as closing:
        # Not in /dev/shm, of which each server has its own.
        folder = closing.enter_context(scratch_folder())
        sets = {}
        for number, shape in enumerate(shapes):
            spec = LabSpec(servers=shape.servers, external=None, internal=shape.internal, cpus=shape.cpus)
            lab = closing.enter_context(open_lab(spec))
            sets[shape] = _Set(lab, shape, folder / f"shape-{number}", closing)
        yield LabStage(sets)
