"""What is expected before anything is measured: from counted bytes, a rate and a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dglx_dist.planner.records import Rate
from dglx_dist.planner.workload import Survey
from scripts.bench.alone import do_alone
from scripts.bench.records import Job
from scripts.bench.simulate import ComputeCost


def survey(jobs: Mapping[str, Mapping[str, Any]], servers: Mapping[str, int] | int) -> dict[str, Survey]:
    """Count what runs of the job ``train`` will move, in one process for all.

    Args:
        jobs: Name to the job's parameters.
        servers: How many it will run on, one rank on each; by name where they differ.

    Raises:
        JobError: the process that counts failed.
    """
    by_name = dict.fromkeys(jobs, servers) if isinstance(servers, int) else servers
    asked = {name: {"train": dict(job), "servers": by_name[name]} for name, job in jobs.items()}
    return {name: Survey(**one) for name, one in do_alone(Job(kind="survey", params=asked)).items()}


def calibrated(params: Mapping[str, Any]) -> ComputeCost:
    """Measure on one core what the job ``train`` with ``params`` computes; nothing else should run.

    Raises:
        JobError: the process that measures failed.
    """
    return ComputeCost.from_json(do_alone(Job(kind="calibrate", params=params)))


def weak_scaling(one_step_s: float, found: Survey, rate: Rate) -> float:
    """Return the expected samples per second of a run relative to one server that moves nothing.

    A step lasts as long as its compute or its pulls, which are made ahead, and then the gradients, which are
    not: they are there when backward ends.

    Args:
        one_step_s: Compute of one step.
        found: Of the run, one rank per server.
        rate: Of each server's card.
    """
    servers = found.ranks
    bytes_per_s = rate.bits_per_s / 8
    pulled = found.payload_bytes - found.gradient_bytes
    pull_s = pulled / (servers * found.steps) / bytes_per_s
    gradient_s = found.gradient_bytes / (servers * found.steps) / bytes_per_s
    return servers * one_step_s / (max(one_step_s, pull_s) + gradient_s)
