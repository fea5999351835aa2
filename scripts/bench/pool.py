"""Worker pools: the ranks on the servers of a lab that do one job after another, a pool for each shape."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

from dglx_dist.planner.records import Rate
from scripts.bench import worker
from scripts.bench.peers import launch
from scripts.bench.peers.workload import Launch
from scripts.bench.records import Job, JobError, Shape
from scripts.json_records import read_record
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.labs import open_lab
from scripts.netlab.launch import start as torchrun
from scripts.out_files import last_lines, scratch_folder

POLL_S = 0.02
LEAVE_S = 5.0
"""How long ranks may take to leave when asked to, before they are ended."""
JOB_TIMEOUT_S = 900.0
LOG_LINES = 25


@final
class WorkerPool:
    """Ranks on a lab that wait for jobs; a context manager that ends them.

    ``folder``: empty, on a disk that all servers share (not ``/dev/shm``).
    """

    def __init__(self, lab: Lab, ranks_per_server: int, folder: Path) -> None:
        self._ranks = range(len(lab.servers) * ranks_per_server)
        self._folder, self._number, self._broken = folder, 0, ""
        folder.mkdir(parents=True, exist_ok=True)
        setup = {"devices": [server.device for server in lab.servers], "ranks_per_server": ranks_per_server}
        (folder / worker.POOL).write_text(json.dumps(setup), encoding="utf-8")
        command = [str(Path(__file__).parent), "worker", str(folder)]
        self._started = torchrun(
            lab, command, ranks_per_server=ranks_per_server, log_folder=folder, show=False
        )

    def do(self, job: Job, timeout_s: float) -> list[dict[str, Any]]:
        """Have all ranks do ``job`` and return what they report, by rank.

        Raises:
            JobError: a rank failed, died or did not report in time; it is named. The pool is then broken: it
                takes no other job, and its ranks have been ended.
        """
        if self._broken:
            raise JobError(
                f"this worker pool takes no job after one that failed ({self._broken}); make a new one"
            )
        number, description = self._number, f"job {self._number} ({job.kind})"
        self._number += 1
        worker.write_job(self._folder, number, job, timeout_s)
        reports = [worker.report_path(self._folder, number, rank) for rank in self._ranks]
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in self._ranks if not reports[rank].is_file()]:
            if (code := self._started.poll()) is not None:
                self._fail(f"{description} failed: {self._started.failure or f'exit code {code}'}")
            if time.monotonic() > deadline:
                late = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                progress_of_others = "the others did" if len(missing) < len(reports) else "nobody did"
                self._fail(f"{late} did not finish {description} in {timeout_s:g} s; {progress_of_others}")
            time.sleep(POLL_S)
        return [json.loads(report.read_text(encoding="utf-8")) for report in reports]

    def _fail(self, why: str) -> NoReturn:
        self._broken = why
        self._started.stop()
        raise JobError(why + last_lines(sorted(self._folder.glob("server-*.log")), LOG_LINES))

    def close(self) -> None:
        """End all ranks, within seconds. May be called twice."""
        if not self._broken:
            self._broken = "it was closed"
            worker.write_job(self._folder, self._number, Job(kind=worker.END), LEAVE_S)
            deadline = time.monotonic() + LEAVE_S
            while self._started.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self._started.stop()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._broken = self._broken or "it was interrupted"
        self.close()


def do_alone(job: Job, *, timeout_s: float = 600.0) -> Mapping[str, Any]:
    """Run ``job`` as the only rank, in a process of its own and on all cores, and return its report."""
    with (
        scratch_folder() as folder,
        open_lab(LabSpec(servers=1), force_loopback=True) as lab,
        WorkerPool(lab, 1, folder / "pool") as pool,
    ):
        return pool.do(job, timeout_s)[0]


class Stage:
    """Runs jobs on the servers, one job at a time, so that waiting ranks cost the others nothing.

    ``labs`` are up; ``closing`` ends the worker pools, which are started when a job first wants one.
    """

    def __init__(self, labs: Mapping[Shape, Lab], folder: Path, closing: ExitStack) -> None:
        self._labs, self._folder, self._closing = labs, folder, closing
        self._pools: dict[Shape, WorkerPool] = {}
        self._launched = 0

    def do(self, shape: Shape, job: Job, rate: Rate | None) -> list[dict[str, Any]]:
        """Do ``job`` on the servers of ``shape`` with ``rate`` between them; return the reports by rank.

        ``rate`` None, or plain loopback: not limited. JobError: a rank failed, died or was silent for long.
        """
        self._limit(shape, rate)
        lab, ranks = self._labs[shape], shape.ranks_per_server
        if job.kind == launch.KIND:
            self._launched += 1
            folder = self._folder / f"launch-{self._launched:03d}"
            program = read_record(Launch, job.params)
            return launch.run_once(lab, program, folder, ranks_per_server=ranks, timeout_s=JOB_TIMEOUT_S)
        if shape not in self._pools:
            pool = WorkerPool(lab, ranks, self._folder / f"pool-{len(self._pools)}")
            self._pools[shape] = self._closing.enter_context(pool)
        return self._pools[shape].do(job, JOB_TIMEOUT_S)

    def describe(self, shape: Shape, rate: Rate | None) -> dict[str, Any]:
        """Return ``Lab.describe()`` of its servers with ``rate`` between them, which it sets."""
        self._limit(shape, rate)
        return self._labs[shape].describe()

    def limits(self, shape: Shape) -> bool:
        """Whether a rate between its servers holds; False on plain loopback."""
        return self._labs[shape].kind != "loopback"

    def _limit(self, shape: Shape, rate: Rate | None) -> None:
        if self.limits(shape):
            self._labs[shape].set_rates(rate, None)


OpenStage: TypeAlias = Callable[[Sequence[Shape]], AbstractContextManager[Stage]]


@contextmanager
def open_stage(shapes: Sequence[Shape]) -> Iterator[Stage]:
    """Bring up the servers of each of ``shapes`` and end all that runs on them afterwards."""
    with ExitStack() as closing:
        # Not in /dev/shm, of which each server has its own.
        folder = closing.enter_context(scratch_folder())
        labs = {}
        for shape in shapes:
            spec = LabSpec(servers=shape.servers, cpus=shape.cpus)
            labs[shape] = closing.enter_context(open_lab(spec))
        yield Stage(labs, folder, closing)
