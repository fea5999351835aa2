"""The ranks of a worker pool: each does one job after another, told and reported in files of one folder.

``python scripts/bench worker FOLDER`` is such a rank; torchrun starts it on all servers of a lab. As the
processes stay, what is compared shares imports, compiled kernels, caches of files and the luck of the launch.
Every job opens and closes its own session.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from dglx_dist.comm.session import current_session
from dglx_dist.comm.topology import read_topology
from dglx_dist.errors import ConfigError, PeerError, UnknownNameError
from dglx_dist.registry import did_you_mean
from scripts.bench.records import Job
from scripts.netlab import alive
from scripts.out_files import write_text

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


def alive_path(folder: Path, rank: int) -> Path:
    """The sign of life of ``rank``."""
    return folder / f"rank-{rank}.alive"


def log_path(folder: Path, rank: int) -> Path:
    """Everything that ``rank`` writes to its standard output and error."""
    return folder / f"rank-{rank}.log"


def write_job(folder: Path, number: int, job: Job, timeout_s: float) -> None:
    """Hand ``job`` to all ranks."""
    value = {"kind": job.kind, "params": dict(job.params), "timeout_s": timeout_s}
    write_text(folder / f"job-{number:05d}.json", json.dumps(value))


def read_job(folder: Path, number: int) -> tuple[Job, float] | None:
    """Return the job and how many seconds it may take; None: it is not there yet."""
    value = read_json(folder / f"job-{number:05d}.json")
    return None if value is None else (Job(kind=value["kind"], params=value["params"]), value["timeout_s"])


def write_report(folder: Path, number: int, rank: int, report: Mapping[str, Any] | Failure) -> None:
    """Report what ``rank`` found (JSON values, else TypeError), or why it found nothing."""
    value = {"failure": vars(report)} if isinstance(report, Failure) else {"result": dict(report)}
    write_text(folder / f"job-{number:05d}.rank-{rank}.json", json.dumps(value))


def read_report(folder: Path, number: int, rank: int) -> dict[str, Any] | Failure | None:
    """Return what ``rank`` found, or why it found nothing; None: neither is there yet."""
    value = read_json(folder / f"job-{number:05d}.rank-{rank}.json")
    if value is None:
        return None
    return Failure(**value["failure"]) if "failure" in value else dict(value["result"])


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None: it is not there yet."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Where and as whom a job runs; torchrun's environment is set, and no session is open."""

    rank: int
    server: int
    """Of this rank."""
    device: str | None
    """Name of this server's card; None: plain loopback, which has no counters of its own."""
    folder: Path
    """Shared by all ranks and jobs of the pool; gone when the pool is."""
    number: int
    """Of the job in this worker pool, from 0: the same on all ranks."""
    timeout_s: float
    """Seconds after which the pool gives the job up."""

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
        "calibrate": "counts:calibrate_compute",
        "bounded": "bounded:run",
        "echo": "echo:run",
        "plan": "counts:plan",
        "survey": "counts:survey",
        "train": "train:run",
    }
)
"""Kind to "module:function" in ``jobs``."""


def find_job(kind: str) -> JobFunction:
    """Return the function behind ``kind``, importing its module now.

    Raises:
        UnknownNameError: there is no such kind.
    """
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise UnknownNameError(f"there is no kind of job {kind!r}{hint} (known: {', '.join(KINDS)})")
    module, _, name = KINDS[kind].partition(":")
    function: JobFunction = getattr(importlib.import_module(f"scripts.bench.jobs.{module}"), name)
    return function


POLL_S, IDLE_POLL_S = 0.01, 0.1
"""How often a rank looks for its next job, and how often after it has waited for LOOK_S: the ranks of another
pool are then measured on the same cores."""
LOOK_S = 1.0
"""How often a waiting rank asks whether its driver still lives."""
SILENT_S = 3 * 3600.0
"""After so long without a job a rank leaves, although its driver lives."""


def serve(argv: list[str]) -> int:
    """Do the jobs that appear in the folder ``argv[0]`` until one says that it is the end.

    Return 0 after the last job, 1 when the driver is gone or silent; SystemExit after a job that failed.
    """
    folder, rank = Path(argv[0]), read_topology().rank
    _write_to(log_path(folder, rank))
    held = alive.hold(alive_path(folder, rank))
    number = 0
    try:
        while found := wait_for_job(folder, number):
            job, timeout_s = found
            if job.kind == END:
                return 0
            do(job, _context(folder, rank, number, timeout_s))
            number += 1
        sys.stderr.write("the driver of this worker pool is gone or silent; leaving\n")
        return 1
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


def do(job: Job, context: JobContext) -> None:
    """Do ``job`` and report; SystemExit after what went wrong has been reported."""
    # Who hangs says where, just before the pool gives up and shows the end of its log.
    faulthandler.dump_traceback_later(max(context.timeout_s - 1.0, context.timeout_s / 2))
    try:
        _start_afresh()
        report = find_job(job.kind)(job.params, context)
        write_report(context.folder, context.number, context.rank, report)
    except BaseException as error:
        # In the log before the report: who reads the one shows the other.
        traceback.print_exc()
        failure = Failure(
            rank=context.rank,
            text=f"{type(error).__name__}: {error}",
            at_ns=time.monotonic_ns(),
            lost_a_peer=isinstance(error, PeerError),
        )
        write_report(context.folder, context.number, context.rank, failure)
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
    server = rank // pool["ranks_per_server"]
    device = pool["devices"][server]
    return JobContext(
        rank=rank, server=server, device=device, folder=folder, number=number, timeout_s=timeout_s
    )


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
