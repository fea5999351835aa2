"""What is expected before anything is measured: from counted bytes, a rate and a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dglx_dist.bench.alone import do_alone
from dglx_dist.bench.jobs.survey import Survey
from dglx_dist.bench.records import Job
from dglx_dist.bench.simulate import ComputeCost
from dglx_dist.errors import ConfigError
from dglx_dist.lab.rates import Rate


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


def speedup_added(phi: float, bytes_ratio: float) -> float:
    """Return 1 / ((1 - phi) + phi beta): nothing is hidden, and only the time on the network changes.

    Args:
        phi: Share of the baseline's time that its network adds, in [0, 1).
        bytes_ratio: beta, bytes of the variant by those of the baseline.
    """
    _check(phi, bytes_ratio)
    return 1.0 / ((1.0 - phi) + phi * bytes_ratio)


def speedup_hidden(phi: float, bytes_ratio: float) -> float:
    """Return 1 / max(1 - phi, beta): the network works all the time, and compute hides behind it.

    With everything overlapped the baseline's time *is* that of its bytes, so the variant's bytes take beta of
    it, unless compute, 1 - phi of it, takes longer.
    """
    _check(phi, bytes_ratio)
    return 1.0 / max(1.0 - phi, bytes_ratio)


def weak_scaling(one_step_s: float, found: Survey, rate: Rate) -> float:
    """Return the expected samples per second of a run relative to one server that moves nothing.

    A step lasts as long as its compute or its pulls, which are made ahead, and then the gradients, which are
    not: they are there when backward ends.

    Args:
        one_step_s: Compute of one step.
        found: Of the run, one rank per server.
        rate: Of each server's card.
    """
    servers = len(found.seeds_per_server)
    bytes_per_s = rate.bits_per_s / 8
    pulled = found.payload_bytes - found.gradient_bytes
    pull_s = pulled / (servers * found.steps) / bytes_per_s
    gradient_s = found.gradient_bytes / (servers * found.steps) / bytes_per_s
    return servers * one_step_s / (max(one_step_s, pull_s) + gradient_s)


def _check(phi: float, bytes_ratio: float) -> None:
    if not 0 <= phi < 1 or bytes_ratio < 0:
        raise ConfigError(f"phi={phi} must be in [0, 1) and bytes_ratio={bytes_ratio} at least 0")
