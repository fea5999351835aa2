"""The protocol of a worker pool: jobs and reports in files of one folder, and the processes that do the jobs.

``python scripts/bench worker FOLDER`` is a rank that stays and does one job after another; torchrun starts it
on all servers of a lab. As the processes stay, what is compared shares imports, compiled kernels, caches of
files and the luck of the launch. Every job opens and closes its own session.
``python scripts/bench alone FOLDER PARENT`` does one job with one thread and in no lab.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from dglx_dist.comm.session import current_session
from dglx_dist.comm.topology import rank_environment, read_topology
from dglx_dist.errors import ConfigError, JobError, PeerError, UnknownNameError
from dglx_dist.registry import did_you_mean
from scripts.bench.records import Job
from scripts.netlab import alive
from scripts.netlab.alive import scratch_folder

POOL, DRIVER = "pool.json", "driver.alive"
END = "end"
"""Kind of the job after which the ranks leave."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank could not do its job."""

    rank: int
    text: str
    """Type and message."""
    at_ns: int
    """When, by a clock that all ranks of this machine share."""
    lost_a_peer: bool
    """Whether it failed because another rank had."""


def job_path(folder: Path, number: int) -> Path:
    """Where job ``number`` is written."""
    return folder / f"job-{number:05d}.json"


def report_path(folder: Path, number: int, rank: int) -> Path:
    """Where ``rank`` reports on job ``number``."""
    return folder / f"job-{number:05d}.rank-{rank}.json"


def alive_path(folder: Path, rank: int) -> Path:
    """The sign of life of ``rank``."""
    return folder / f"rank-{rank}.alive"


def log_path(folder: Path, rank: int) -> Path:
    """Everything that ``rank`` writes to its standard output and error."""
    return folder / f"rank-{rank}.log"


def write_job(folder: Path, number: int, job: Job, timeout_s: float) -> None:
    """Hand ``job`` to all ranks."""
    value = {"kind": job.kind, "params": dict(job.params), "timeout_s": timeout_s}
    write_json(job_path(folder, number), value)


def read_job(folder: Path, number: int) -> tuple[Job, float] | None:
    """Return the job and how many seconds it may take; None: it is not there yet."""
    value = read_json(job_path(folder, number))
    return None if value is None else (Job(kind=value["kind"], params=value["params"]), value["timeout_s"])


def write_result(folder: Path, number: int, rank: int, result: Mapping[str, Any]) -> None:
    """Report what ``rank`` found.

    Raises:
        TypeError: it is not made of JSON values.
    """
    write_json(report_path(folder, number, rank), {"result": dict(result)})


def write_failure(folder: Path, number: int, failure: Failure) -> None:
    """Report why ``failure.rank`` found nothing."""
    value = {"text": failure.text, "at_ns": failure.at_ns, "lost_a_peer": failure.lost_a_peer}
    write_json(report_path(folder, number, failure.rank), {"failure": value})


def read_report(folder: Path, number: int, rank: int) -> dict[str, Any] | Failure | None:
    """Return what ``rank`` found, or why it found nothing; None: neither is there yet."""
    value = read_json(report_path(folder, number, rank))
    if value is None:
        return None
    if "failure" in value:
        return Failure(rank=rank, **value["failure"])
    return dict(value["result"])


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` so that ``path`` is whole as soon as it is there."""
    text = json.dumps(value)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what :func:`write_json` wrote; None: it is not there yet."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class Place:
    """One server of the pool, as its ranks see it."""

    address: str
    """IPv4, reached by all servers."""
    device: str | None
    """Name of its card; None: plain loopback."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Where and as whom a job runs; torchrun's environment is set, and no session is open."""

    rank: int
    world_size: int
    ranks_per_server: int
    places: tuple[Place, ...]
    """(S,) by server; ranks of one server are contiguous."""
    folder: Path
    """Shared by all ranks and jobs of the pool; gone when the pool is."""
    number: int
    """Of the job in this worker pool, from 0: the same on all ranks."""
    timeout_s: float
    """Seconds after which the pool gives the job up."""

    @property
    def server(self) -> int:
        """Server of this rank."""
        return self.rank // self.ranks_per_server

    @property
    def local_rank(self) -> int:
        """Position of this rank on its server."""
        return self.rank % self.ranks_per_server

    @property
    def device(self) -> str | None:
        """Name of this server's card; None: plain loopback, which has no counters of its own."""
        return self.places[self.server].device

    def card_sent(self) -> int | None:
        """Bytes that this server's card has sent so far, headers included; None on plain loopback."""
        if self.device is None:
            return None
        from scripts.netlab.servers import read_card

        return read_card(self.device).sent

    def peak_bytes(self) -> int:
        """Largest resident memory of this rank since the job began, shared pages included."""
        from dglx_dist.data.storage.files import peak

        return peak()


JobFunction: TypeAlias = Callable[[Mapping[str, Any], JobContext], Mapping[str, Any]]
"""(params, context) -> report of this rank, JSON values. Every rank of the pool calls it at once; it opens
and closes its own session, and raises what went wrong."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "calibrate": "scripts.bench.jobs.counts:calibrate_compute",
        "bounded": "scripts.bench.jobs.bounded:run",
        "echo": "scripts.bench.jobs.echo:run",
        "plan": "scripts.bench.jobs.counts:plan",
        "survey": "scripts.bench.jobs.counts:survey",
        "train": "scripts.bench.jobs.train:run",
    }
)
"""Kind to "module:function"."""


def find_job(kind: str) -> JobFunction:
    """Return the function behind ``kind``, importing its module now.

    Raises:
        UnknownNameError: there is no such kind.
    """
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise UnknownNameError(f"there is no kind of job {kind!r}{hint} (known: {', '.join(KINDS)})")
    module, _, name = KINDS[kind].partition(":")
    function: JobFunction = getattr(importlib.import_module(module), name)
    return function


POLL_S, IDLE_POLL_S = 0.01, 0.1
"""How often a rank looks for its next job, and how often after it has waited for LOOK_S: the ranks of another
pool are then measured on the same cores."""
LOOK_S = 1.0
"""How often a waiting rank asks whether its driver still lives."""
SILENT_S = 3 * 3600.0
"""After so long without a job a rank leaves, although its driver lives."""


def serve(folder: Path) -> int:
    """Do the jobs that appear in ``folder`` until one says that it is the end.

    Returns:
        The exit code: 0 after the last job; 1 when the driver is gone or silent.

    Raises:
        SystemExit: a job raised something, which has been reported; no other job could be trusted after it.
    """
    rank = read_topology().rank
    _write_to(log_path(folder, rank))
    held = alive.hold(alive_path(folder, rank))
    try:
        for number in range(10**9):
            found = wait_for_job(folder, number)
            if found is None:
                sys.stderr.write("the driver of this worker pool is gone or silent; leaving\n")
                return 1
            job, timeout_s = found
            if job.kind == END:
                return 0
            _do(job, _context(folder, rank, number, timeout_s))
        return 0
    finally:
        os.close(held)


def wait_for_job(folder: Path, number: int, *, silent_s: float = SILENT_S) -> tuple[Job, float] | None:
    """Wait for job ``number``; None when the driver ended, or gave none in ``silent_s`` seconds."""
    start = looked = time.monotonic()
    while True:
        found = read_job(folder, number)
        if found is not None:
            return found
        now = time.monotonic()
        if now - looked > LOOK_S:
            looked = now
            if now - start > silent_s or not folder.is_dir() or alive.has_ended(folder / DRIVER):
                return None
        time.sleep(POLL_S if now - start < LOOK_S else IDLE_POLL_S)


def _do(job: Job, context: JobContext) -> None:
    # Who hangs says where, just before the pool gives up and shows the end of its log.
    faulthandler.dump_traceback_later(max(context.timeout_s - 1.0, context.timeout_s / 2))
    try:
        _start_afresh()
        result = find_job(job.kind)(job.params, context)
        write_result(context.folder, context.number, context.rank, result)
    except BaseException as error:
        # In the log before the report: who reads the one shows the other.
        traceback.print_exc()
        failure = Failure(
            rank=context.rank,
            text=f"{type(error).__name__}: {error}",
            at_ns=time.monotonic_ns(),
            lost_a_peer=isinstance(error, PeerError),
        )
        write_failure(context.folder, context.number, failure)
        _leave_session(error)
        raise SystemExit(1) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _leave_session(error: BaseException) -> None:
    try:
        session = current_session()
    except ConfigError:
        return
    session.fail(error)
    session.close(failed=True)


def _start_afresh() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _context(folder: Path, rank: int, number: int, timeout_s: float) -> JobContext:
    pool = read_json(folder / POOL)
    if pool is None:
        raise ConfigError(
            f"{folder} is no folder of a worker pool: it has no {POOL}; `python scripts/bench` makes one"
        )
    places = tuple(Place(**place) for place in pool["places"])
    return JobContext(
        rank=rank,
        world_size=len(places) * pool["ranks_per_server"],
        ranks_per_server=pool["ranks_per_server"],
        places=places,
        folder=folder,
        number=number,
        timeout_s=timeout_s,
    )


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def start_worker(argv: list[str]) -> int:
    """Be a rank that does the jobs in FOLDER, the one argument."""
    return serve(Path(argv[0]))


_LAST_LINES = 5
_PR_SET_PDEATHSIG = 1


def do_alone(job: Job, *, timeout_s: float = 600.0) -> Mapping[str, Any]:
    """Run ``job`` in a process of its own and return its report; the process ends with this one in any case.

    Raises:
        JobError: it failed or took longer than ``timeout_s``; the message has its last lines.
    """
    with scratch_folder() as folder:
        write_job(folder, 0, job, timeout_s)
        command = [sys.executable, str(Path(__file__).parent), "alone", str(folder), str(os.getpid())]
        try:
            subprocess.run(
                command,
                env=rank_environment(1) | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=timeout_s,
            )
        except subprocess.CalledProcessError as error:
            last = "\n".join(error.stdout.decode(errors="replace").splitlines()[-_LAST_LINES:])
            raise JobError(f"job {job.kind} in a process of its own failed:\n{last}") from None
        except subprocess.TimeoutExpired:
            raise JobError(f"job {job.kind} in a process of its own took over {timeout_s:g} s") from None
        report = read_report(folder, 0, 0)
    if not isinstance(report, dict):
        raise JobError(f"job {job.kind} in a process of its own ended without a report")
    return report


def run_alone(folder: Path) -> int:
    """Do the job that lies in ``folder`` and report there; what goes wrong is raised."""
    found = read_job(folder, 0)
    if found is None:
        sys.stderr.write(f"there is no job in {folder}\n")
        return 2
    job, timeout_s = found
    context = JobContext(
        rank=0,
        world_size=1,
        ranks_per_server=1,
        places=(Place(address="127.0.0.1", device=None),),
        folder=folder,
        number=0,
        timeout_s=timeout_s,
    )
    write_result(folder, 0, 0, find_job(job.kind)(job.params, context))
    return 0


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def start_alone(argv: list[str]) -> int:
    """Be the process that does the job: FOLDER, and the id of the process that waits for it."""
    _end_with(int(argv[1]))
    return run_alone(Path(argv[0]))
