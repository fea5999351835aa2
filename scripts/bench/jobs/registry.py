"""Kinds of jobs by name, imported by the ranks when they get one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from dglx_dist.errors import UnknownNameError
from dglx_dist.registry import did_you_mean
from scripts.bench.jobs.context import JobContext

JobFunction: TypeAlias = Callable[[Mapping[str, Any], JobContext], Mapping[str, Any]]
"""(params, context) -> report of this rank, JSON values. Every rank of the crew calls it at once; it opens
and closes its own session, and raises what went wrong."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "calibrate": "scripts.bench.jobs.calibrate:run",
        "bounded": "scripts.bench.jobs.bounded:run",
        "echo": "scripts.bench.jobs.echo:run",
        "plan": "scripts.bench.jobs.plan:run",
        "survey": "scripts.bench.jobs.survey:run",
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
