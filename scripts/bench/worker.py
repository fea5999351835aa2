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
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dglx_dist.comm.session import current_session
from dglx_dist.comm.topology import read_topology
from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.registry import suggest_name
from scripts.bench.records import Job
from scripts.netlab.servers import read_card
from scripts.out_files import write_text

POOL = "pool.json"
END = "end"
"""Kind of the job after which the ranks leave."""


def write_job(folder: Path, number: int, job: Job, timeout_s: float) -> None:
    """Hand ``job`` to all ranks."""
    value = {"kind": job.kind, "params": dict(job.params), "timeout_s": timeout_s}
    write_text(folder / f"job-{number:05d}.json", json.dumps(value))


def read_job(folder: Path, number: int) -> tuple[Job, float] | None:
    """Return the job and how many seconds it may take; None: it is not there yet."""
    value = read_json(folder / f"job-{number:05d}.json")
    return None if value is None else (Job(kind=value["kind"], params=value["params"]), value["timeout_s"])


def report_path(folder: Path, number: int, rank: int) -> Path:
    """Return the path of the report of ``rank`` for job ``number``. Reports are written atomically."""
    return folder / f"job-{number:05d}.rank-{rank}.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None: it is not there yet."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Context of a job on one rank. torchrun's environment is set, and no session is open."""

    rank: int
    server: int
    device: str | None
    """Name of this server's card; None: plain loopback, which has no counters of its own."""
    folder: Path
    """Shared by all ranks and jobs of the pool; gone when the pool is."""
    number: int
    """Number of the job in this worker pool, starting at 0. It is the same on all ranks."""
    timeout_s: float
    """Seconds after which the pool gives the job up."""

    def card_sent(self) -> int | None:
        """Bytes that this server's card has sent so far, headers included; None on plain loopback."""
        return None if self.device is None else read_card(self.device).sent


JobFunction: TypeAlias = Callable[[Mapping[str, Any], JobContext], Mapping[str, Any]]
"""(params, context) -> report of this rank, JSON values. Every rank of the pool calls it at once; it opens
and closes its own session, and raises what went wrong."""

KINDS: Mapping[str, str] = {
    "calibrate": "counts:calibrate_compute",
    "bounded": "bounded:run",
    "echo": "echo:run",
    "plan": "counts:plan",
    "survey": "counts:survey",
    "train": "train:run",
}
"""Kind to "module:function" in ``jobs``."""


def find_job(kind: str) -> JobFunction:
    """Return the function behind ``kind``, importing its module now; UnknownNameError: there is none."""
    if kind not in KINDS:
        hint = suggest_name(kind, KINDS)
        raise UnknownNameError(f"there is no kind of job {kind!r}{hint} (known: {', '.join(KINDS)})")
    module, _, name = KINDS[kind].partition(":")
    function: JobFunction = getattr(importlib.import_module(f"scripts.bench.jobs.{module}"), name)
    return function


POLL_S, IDLE_POLL_S, IDLE_S = 0.01, 0.1, 1.0
"""How often a rank looks for its next job, and how often after it has waited for IDLE_S: the ranks of another
pool are then measured on the same cores."""
SILENT_S = 3 * 3600.0
"""After so long without a job a rank leaves, although its launcher lives."""


def serve(argv: list[str]) -> int:
    """Do the jobs that appear in the folder ``argv[0]``; 0 after the last one, 1 when its driver is silent.

    Whoever ends the driver ends this too: the launcher's guard does.
    """
    folder, rank, number = Path(argv[0]), read_topology().rank, 0
    while job_and_timeout := wait_for_job(folder, number):
        job, timeout_s = job_and_timeout
        if job.kind == END:
            return 0
        do(job, _context(folder, rank, number, timeout_s))
        number += 1
    sys.stderr.write("the driver of this worker pool is silent; leaving\n")
    return 1


def wait_for_job(folder: Path, number: int, *, silent_s: float = SILENT_S) -> tuple[Job, float] | None:
    """Wait for job ``number``; None when none came in ``silent_s`` seconds, or the folder is gone."""
    start = time.monotonic()
    while (job := read_job(folder, number)) is None:
        waited_s = time.monotonic() - start
        if waited_s > silent_s or not folder.is_dir():
            return None
        time.sleep(POLL_S if waited_s < IDLE_S else IDLE_POLL_S)
    return job


def do(job: Job, context: JobContext) -> None:
    """Do ``job`` and report; SystemExit after the launcher was told what went wrong."""
    # Who hangs says where, just before the pool gives up and shows the end of its log.
    faulthandler.dump_traceback_later(max(context.timeout_s - 1.0, context.timeout_s / 2))
    try:
        _start_afresh()
        report = dict(find_job(job.kind)(job.params, context))
        write_text(report_path(context.folder, context.number, context.rank), json.dumps(report))
    except BaseException as error:
        # Imported here: it loads torch, which the driver does without.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        traceback.print_exc()
        get_error_handler().record_exception(error)
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
    if (pool := read_json(folder / POOL)) is None:
        raise ConfigError(f"{folder} is no folder of a worker pool; `python scripts/bench` makes one")
    server = rank // pool["ranks_per_server"]
    where = {"rank": rank, "server": server, "device": pool["devices"][server], "folder": folder}
    return JobContext(**where, number=number, timeout_s=timeout_s)
