"""One job in a process of its own, with one thread and in no lab: ``scripts/bench alone FOLDER PARENT``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dglx_dist.comm.topology import rank_environment
from dglx_dist.errors import JobError
from scripts.bench import messages
from scripts.bench.jobs.context import JobContext, Place
from scripts.bench.jobs.registry import find_job
from scripts.bench.records import Job
from scripts.netlab.alive import scratch_folder

_LAST_LINES = 5
_PR_SET_PDEATHSIG = 1


def do_alone(job: Job, *, timeout_s: float = 600.0) -> Mapping[str, Any]:
    """Run ``job`` in a process of its own and return its report; the process ends with this one in any case.

    Raises:
        JobError: it failed or took longer than ``timeout_s``; the message has its last lines.
    """
    with scratch_folder() as folder:
        messages.write_job(folder, 0, job, timeout_s)
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
        report = messages.read_report(folder, 0, 0)
    if not isinstance(report, dict):
        raise JobError(f"job {job.kind} in a process of its own ended without a report")
    return report


def main(folder: Path) -> int:
    """Do the job that lies in ``folder`` and report there; what goes wrong is raised."""
    found = messages.read_job(folder, 0)
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
    messages.write_result(folder, 0, 0, find_job(job.kind)(job.params, context))
    return 0


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def start(argv: list[str]) -> int:
    """Be the process that does the job: FOLDER, and the id of the process that waits for it."""
    _end_with(int(argv[1]))
    return main(Path(argv[0]))
