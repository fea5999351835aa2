"""A rank that stays and does one job after another: ``python scripts/bench worker FOLDER``.

torchrun starts it on all servers of a lab. As the processes stay, what is compared shares imports, compiled
kernels, caches of files and the luck of the launch. Every job opens and closes its own session.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import time
import traceback
from pathlib import Path

from dglx_dist.comm.session import current_session
from dglx_dist.comm.topology import read_topology
from dglx_dist.errors import ConfigError, PeerError
from scripts.bench import messages
from scripts.bench.jobs.context import JobContext, Place
from scripts.bench.jobs.registry import find_job
from scripts.bench.messages import Failure
from scripts.bench.records import Job
from scripts.netlab import alive

POLL_S, IDLE_POLL_S = 0.01, 0.1
"""How often a rank looks for its next job, and how often after it has waited for LOOK_S: the ranks of another
crew are then measured on the same cores."""
LOOK_S = 1.0
"""How often a waiting rank asks whether its driver still lives."""
SILENT_S = 3 * 3600.0
"""After so long without a job a rank leaves, although its driver lives."""


def main(folder: Path) -> int:
    """Do the jobs that appear in ``folder`` until one says that it is the end.

    Returns:
        The exit code: 0 after the last job; 1 when the driver is gone or silent.

    Raises:
        SystemExit: a job raised something, which has been reported; no other job could be trusted after it.
    """
    rank = read_topology().rank
    _write_to(messages.log_path(folder, rank))
    held = alive.hold(messages.alive_path(folder, rank))
    try:
        for number in range(10**9):
            found = wait_for_job(folder, number)
            if found is None:
                sys.stderr.write("the driver of this crew is gone or silent; leaving\n")
                return 1
            job, timeout_s = found
            if job.kind == messages.END:
                return 0
            _do(job, _context(folder, rank, number, timeout_s))
        return 0
    finally:
        os.close(held)


def wait_for_job(folder: Path, number: int, *, silent_s: float = SILENT_S) -> tuple[Job, float] | None:
    """Wait for job ``number``; None when the driver ended, or gave none in ``silent_s`` seconds."""
    start = looked = time.monotonic()
    while True:
        found = messages.read_job(folder, number)
        if found is not None:
            return found
        now = time.monotonic()
        if now - looked > LOOK_S:
            looked = now
            if now - start > silent_s or not folder.is_dir() or alive.has_ended(folder / messages.DRIVER):
                return None
        time.sleep(POLL_S if now - start < LOOK_S else IDLE_POLL_S)


def _do(job: Job, context: JobContext) -> None:
    # Who hangs says where, just before the crew gives up and shows the end of its log.
    faulthandler.dump_traceback_later(max(context.timeout_s - 1.0, context.timeout_s / 2))
    try:
        _start_afresh()
        result = find_job(job.kind)(job.params, context)
        messages.write_result(context.folder, context.number, context.rank, result)
    except BaseException as error:
        # In the log before the report: who reads the one shows the other.
        traceback.print_exc()
        failure = Failure(
            rank=context.rank,
            text=f"{type(error).__name__}: {error}",
            at_ns=time.monotonic_ns(),
            lost_a_peer=isinstance(error, PeerError),
        )
        messages.write_failure(context.folder, context.number, failure)
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
    crew = messages.read_json(folder / messages.CREW)
    if crew is None:
        raise ConfigError(
            f"{folder} is no folder of a crew: it has no {messages.CREW}; `python scripts/bench` makes one"
        )
    places = tuple(Place(**place) for place in crew["places"])
    return JobContext(
        rank=rank,
        world_size=len(places) * crew["ranks_per_server"],
        ranks_per_server=crew["ranks_per_server"],
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


def start(argv: list[str]) -> int:
    """Be a rank that does the jobs in FOLDER, the one argument."""
    return main(Path(argv[0]))
