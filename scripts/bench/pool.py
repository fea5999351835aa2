"""Worker pools: the ranks on the servers of a lab that do one job after another, a pool for each shape."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

from dglx_dist.errors import JobError
from dglx_dist.planner.records import Rate
from scripts.bench import worker
from scripts.bench.peers import launch
from scripts.bench.peers.workload import Launch
from scripts.bench.records import Job, Shape
from scripts.bench.worker import Failure
from scripts.json_records import read_record
from scripts.netlab import alive
from scripts.netlab.alive import scratch_folder
from scripts.netlab.base import Lab, LabSpec
from scripts.netlab.labs import open_lab
from scripts.netlab.launch import start as torchrun
from scripts.out_files import last_lines

POLL_S = 0.02
LOOK_S = 0.25
"""How often a waiting driver asks whether the ranks still live."""
GRACE_S = 3.0
"""After the first failure: how long to wait for a rank that failed before, and whose report is on its way."""
LEAVE_S = 5.0
"""How long ranks may take to leave when asked to, before they are ended."""
JOB_TIMEOUT_S = 900.0
LOG_LINES = 25


class Started(Protocol):
    """A command that runs on all servers; ``netlab.launch.start`` returns one."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def stop(self) -> None:
        """End it."""


Start = Callable[[Lab, list[str], int, Path], Started]
"""(lab, command, ranks per server, folder for logs) -> what runs."""


@final
class WorkerPool:
    """Ranks that wait for jobs; a context manager that ends them.

    Args:
        lab: Where they run.
        ranks_per_server: How many on each server.
        folder: Empty, on a disk that all servers share (not ``/dev/shm``).
        start: How the ranks are started; the default runs them under torchrun.
    """

    def __init__(self, lab: Lab, ranks_per_server: int, folder: Path, *, start: Start | None = None) -> None:
        self._ranks = range(len(lab.servers) * ranks_per_server)
        self._ranks_per_server = ranks_per_server
        self._folder = folder
        self._number = 0
        self._broken = ""
        devices = [server.device for server in lab.servers]
        folder.mkdir(parents=True, exist_ok=True)
        told = {"devices": devices, "ranks_per_server": ranks_per_server}
        (folder / worker.POOL).write_text(json.dumps(told), encoding="utf-8")
        self._held: int | None = alive.hold(folder / worker.DRIVER)
        command = [str(Path(__file__).parent), "worker", str(folder)]
        self._started = (start or start_under_torchrun)(lab, command, ranks_per_server, folder / "launch")

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
        number = self._number
        self._number += 1
        worker.write_job(self._folder, number, job, timeout_s)
        try:
            return self._wait(number, job, timeout_s)
        except JobError as error:
            self._broken = str(error).splitlines()[0]
            self._end(leave_s=0.0)
            raise

    def close(self) -> None:
        """End all ranks, within seconds. May be called twice."""
        if self._held is not None and not self._broken:
            worker.write_job(self._folder, self._number, Job(kind=worker.END), LEAVE_S)
            self._end(leave_s=LEAVE_S)
        self._end(leave_s=0.0)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._broken = self._broken or "it was interrupted"
        self.close()

    def _end(self, *, leave_s: float) -> None:
        deadline = time.monotonic() + leave_s
        while self._started.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._held is not None:
            self._started.stop()
            # Ranks that the launcher did not reach see that their driver is gone.
            os.close(self._held)
            self._held = None

    def _wait(self, number: int, job: Job, timeout_s: float) -> list[dict[str, Any]]:
        reports: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        looked = time.monotonic()
        what = f"job {number} ({job.kind})"
        while len(reports) < len(self._ranks):
            failures = self._collect(number, reports)
            missing = [rank for rank in self._ranks if rank not in reports]
            if failures:
                if all(failure.lost_a_peer for failure in failures):
                    # At once: the launcher soon ends those that are alive now.
                    self._raise_for_dead(number, what, missing)
                first = self._first(number, failures)
                raise JobError(f"rank {first.rank} failed in {what}: {first.text}{self._log_of(first.rank)}")
            now = time.monotonic()
            if missing and now - looked > LOOK_S:
                looked = now
                self._raise_for_dead(number, what, missing)
            if missing and now > deadline:
                others = "the others did" if reports else "nobody did"
                raise JobError(
                    f"{_ranks(missing)} did not finish {what} in {timeout_s:g} s; {others}"
                    f"{self._log_of(missing[0])}"
                )
            time.sleep(POLL_S)
        return [reports[rank] for rank in self._ranks]

    def _collect(self, number: int, reports: dict[int, dict[str, Any]]) -> list[Failure]:
        failures = []
        for rank in self._ranks:
            found = None if rank in reports else worker.read_report(self._folder, number, rank)
            if isinstance(found, Failure):
                failures.append(found)
            elif found is not None:
                reports[rank] = found
        return failures

    def _first(self, number: int, failures: list[Failure]) -> Failure:
        deadline = time.monotonic() + GRACE_S
        while all(failure.lost_a_peer for failure in failures) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            failures = self._collect(number, {})
        return min(failures, key=lambda failure: (failure.lost_a_peer, failure.at_ns))

    def _raise_for_dead(self, number: int, what: str, missing: list[int]) -> None:
        code = self._started.poll()
        dead = [rank for rank in missing if alive.has_ended(worker.alive_path(self._folder, rank))]
        # A rank reports before it ends, and may have done both since its report was looked for.
        dead = [rank for rank in dead if worker.read_report(self._folder, number, rank) is None]
        if dead:
            raise JobError(
                f"{_ranks(dead)} died in {what} without a word; a system that is out of memory ends "
                f"processes so{self._log_of(dead[0])}"
            )
        if code is not None and not self._collect(number, {}):
            raise JobError(
                f"the launcher of the pool ended with exit code {code} in {what}; "
                f"missing: {_ranks(missing)}{self._log_of(missing[0])}"
            )

    def _log_of(self, rank: int) -> str:
        launcher = self._folder / "launch" / f"server-{rank // self._ranks_per_server}.log"
        own = worker.log_path(self._folder, rank)
        return last_lines([own], LOG_LINES) or last_lines([launcher], LOG_LINES)


def start_under_torchrun(lab: Lab, command: list[str], ranks_per_server: int, logs: Path) -> Started:
    """Start ``command`` on every server of ``lab``, see ``netlab.launch``."""
    return torchrun(lab, command, ranks_per_server=ranks_per_server, log_folder=logs, show=False)


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def do_alone(job: Job, *, timeout_s: float = 600.0) -> Mapping[str, Any]:
    """Run ``job`` as the only rank, in a process of its own and on all cores, and return its report.

    Raises:
        JobError: it failed, died or took longer than ``timeout_s``.
    """
    with (
        scratch_folder() as folder,
        open_lab(LabSpec(servers=1), force_loopback=True) as lab,
        WorkerPool(lab, 1, folder / "pool") as pool,
    ):
        return pool.do(job, timeout_s)[0]


class Stage:
    """Where jobs are done; one at a time, so that what waits costs the others nothing.

    Args:
        labs: That are up, by shape.
        folder: On a disk that all servers share.
        closing: Ends the worker pools, which are started when a job first wants one.
    """

    def __init__(self, labs: Mapping[Shape, Lab], folder: Path, closing: ExitStack) -> None:
        self._labs, self._folder, self._closing = labs, folder, closing
        self._pools: dict[Shape, WorkerPool] = {}
        self._launched = 0

    def do(self, shape: Shape, job: Job, rate: Rate | None) -> list[dict[str, Any]]:
        """Do ``job`` on the servers of ``shape`` with ``rate`` between them; return the reports by rank.

        Args:
            shape: One of those that the stage was opened with.
            job: What to do.
            rate: Most that a server sends, or receives; None, or plain loopback: not limited.

        Raises:
            JobError: a rank failed, died or was silent for long.
        """
        self._limit(shape, rate)
        lab, ranks = self._labs[shape], shape.ranks_per_server
        if job.kind == launch.KIND:
            self._launched += 1
            folder = self._folder / f"launch-{self._launched:03d}"
            told = read_record(Launch, job.params)
            return launch.run_once(lab, told, folder, ranks_per_server=ranks, timeout_s=JOB_TIMEOUT_S)
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
