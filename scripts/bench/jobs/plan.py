"""The job ``plan``: what each exact way to train is foretold to take at some bandwidths, by one dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dglx_dist.cli.plan_config import PlanConfig
from dglx_dist.cli.plan_job import cluster_of, constraints_of, measured
from dglx_dist.planner.choose import choose
from dglx_dist.planner.records import Candidate, Choice, Rate
from scripts.bench.jobs.context import JobContext


def run(params: Mapping[str, Any], _context: JobContext) -> dict[str, Any]:
    """Return by name and rate: ``chosen``, and ``ways``, what each that fits is and is foretold to take.

    Args:
        params: Name to ``plan``, fields of :class:`PlanConfig`, and ``rates`` between servers.

    Raises:
        ConfigError: a field is out of range, or the dataset lacks something.
        StorageError: a dataset is missing or damaged.
    """
    return {name: _choices(one) for name, one in params.items()}


def _choices(told: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(told["plan"])
    if fields.get("fanouts") is not None:
        fields["fanouts"] = tuple(fields["fanouts"])
    asked = PlanConfig(**fields)
    known, candidates = measured(asked)
    constraints = constraints_of(asked)
    compared = [one for one in candidates if _is_compared(one, constraints.unit)]
    found = {}
    for rate in told["rates"]:
        cluster = cluster_of(replace(asked, external=Rate.parse(rate)))
        found[rate] = _in_json(choose(compared, replace(known, cluster=cluster), constraints))
    return found


def _is_compared(one: Candidate, unit: str) -> bool:
    # Workers on the cores of their servers only slow each other down, and jobs of the bench have no cache.
    return one.exact and one.unit == unit and one.moves != "intervals" and one.cache is None


def _in_json(choice: Choice) -> dict[str, Any]:
    return {
        "chosen": None if choice.taken is None else choice.taken.candidate.name,
        "ways": {
            one.candidate.name: {
                "strategy": one.candidate.strategy,
                "options": dict(one.candidate.options),
                "whole": one.candidate.scheme is not None,
                "seconds": one.epoch_seconds,
                "bytes": one.inter_server_bytes + one.intra_server_bytes if one.bytes_exact else None,
            }
            for one in choice.predictions
            if one.feasible
        },
    }
