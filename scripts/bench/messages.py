"""The files by which a crew and its ranks talk: ``job-00007.json`` and ``job-00007.rank-2.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.records import Job

CREW, DRIVER = "crew.json", "driver.alive"
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
