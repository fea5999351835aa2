"""Ranks on the servers of a lab that stay and do one job after another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, final

from dglx_dist.errors import JobError
from scripts.bench import messages
from scripts.bench.messages import Failure
from scripts.bench.records import Job
from scripts.netlab import alive
from scripts.netlab.base import Lab

POLL_S = 0.02
LOOK_S = 0.25
"""How often a waiting driver asks whether the ranks still live."""
GRACE_S = 3.0
"""After the first failure: how long to wait for a rank that failed before, and whose report is on its way."""
LEAVE_S = 5.0
"""How long ranks may take to leave when asked to, before they are ended."""
LOG_LINES = 25


class Started(Protocol):
    """A command that runs on all servers; ``lab.launch.start`` returns one."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def stop(self) -> None:
        """End it."""


Start = Callable[[Lab, list[str], int, Path], Started]
"""(lab, command, ranks per server, folder for logs) -> what runs."""


@final
class Crew:
    """Ranks that wait for jobs; a context manager that ends them.

    Args:
        lab: Where they run.
        ranks_per_server: How many on each server.
        folder: Empty, on a disk that all servers share (not ``/dev/shm``).
        start: How the ranks are started; the default runs them under torchrun.
    """

    def __init__(self, lab: Lab, ranks_per_server: int, folder: Path, *, start: Start | None = None) -> None:
        self.world_size = len(lab.servers) * ranks_per_server
        self._ranks_per_server = ranks_per_server
        self._folder = folder
        self._number = 0
        self._broken = ""
        places = [{"address": server.address, "device": server.device} for server in lab.servers]
        folder.mkdir(parents=True, exist_ok=True)
        messages.write_json(folder / messages.CREW, {"places": places, "ranks_per_server": ranks_per_server})
        self._held: int | None = alive.hold(folder / messages.DRIVER)
        command = [str(Path(__file__).parent), "worker", str(folder)]
        self._started = (start or start_under_torchrun)(lab, command, ranks_per_server, folder / "launch")

    def do(self, job: Job, timeout_s: float) -> list[dict[str, Any]]:
        """Have all ranks do ``job`` and return what they report, by rank.

        Raises:
            JobError: a rank failed, died or did not report in time; it is named. The crew is then broken: it
                takes no other job, and its ranks have been ended.
        """
        if self._broken:
            raise JobError(f"this crew takes no job after one that failed ({self._broken}); make a new one")
        number = self._number
        self._number += 1
        messages.write_job(self._folder, number, job, timeout_s)
        try:
            return self._wait(number, job, timeout_s)
        except JobError as error:
            self._broken = str(error).splitlines()[0]
            self._end(leave_s=0.0)
            raise

    def close(self) -> None:
        """End all ranks, within seconds. May be called twice."""
        if self._held is not None and not self._broken:
            messages.write_job(self._folder, self._number, Job(kind=messages.END), LEAVE_S)
            self._end(leave_s=LEAVE_S)
        self._end(leave_s=0.0)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        while len(reports) < self.world_size:
            failures = self._collect(number, reports)
            if failures:
                if all(failure.lost_a_peer for failure in failures):
                    # At once: the launcher soon ends those that are alive now.
                    self._raise_for_dead(
                        number, job, [rank for rank in range(self.world_size) if rank not in reports]
                    )
                raise self._failed(number, job, self._first(number, failures))
            missing = [rank for rank in range(self.world_size) if rank not in reports]
            now = time.monotonic()
            if missing and now - looked > LOOK_S:
                looked = now
                self._raise_for_dead(number, job, missing)
            if missing and now > deadline:
                raise JobError(
                    f"{_ranks(missing)} did not finish job {number} ({job.kind}) in {timeout_s:g} s; "
                    f"{'the others did' if reports else 'nobody did'}{self._log_of(missing[0])}"
                )
            time.sleep(POLL_S)
        return [reports[rank] for rank in range(self.world_size)]

    def _collect(self, number: int, reports: dict[int, dict[str, Any]]) -> list[Failure]:
        failures = []
        for rank in range(self.world_size):
            if rank not in reports:
                found = messages.read_report(self._folder, number, rank)
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

    def _failed(self, number: int, job: Job, first: Failure) -> JobError:
        head = f"rank {first.rank} failed in job {number} ({job.kind}): {first.text}"
        return JobError(head + self._log_of(first.rank))

    def _raise_for_dead(self, number: int, job: Job, missing: list[int]) -> None:
        code = self._started.poll()
        dead = [rank for rank in missing if alive.has_ended(messages.alive_path(self._folder, rank))]
        # A rank reports before it ends, and may have done both since its report was looked for.
        dead = [rank for rank in dead if messages.read_report(self._folder, number, rank) is None]
        if dead:
            raise JobError(
                f"{_ranks(dead)} died in job {number} ({job.kind}) without a word; a system that is out of "
                f"memory ends processes so{self._log_of(dead[0])}"
            )
        if code is not None and not self._collect(number, {}):
            raise JobError(
                f"the launcher of the crew ended with exit code {code} in job {number} ({job.kind}); "
                f"missing: {_ranks(missing)}{self._log_of(missing[0])}"
            )

    def _log_of(self, rank: int) -> str:
        launcher = self._folder / "launch" / f"server-{rank // self._ranks_per_server}.log"
        for log in (messages.log_path(self._folder, rank), launcher):
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
            if lines:
                return "\n" + "\n".join(f"  {log.name}: {line}" for line in lines[-LOG_LINES:])
        return ""


def start_under_torchrun(lab: Lab, command: list[str], ranks_per_server: int, logs: Path) -> Started:
    """Start ``command`` on every server of ``lab``, see ``lab.launch``."""
    from scripts.netlab.launch import start

    return start(lab, command, ranks_per_server=ranks_per_server, log_folder=logs, show=False)


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
