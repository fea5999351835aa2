"""The executors by name."""

from __future__ import annotations

from dglx_dist.offload.executors.base import Executor
from dglx_dist.registry import Registry

EXECUTORS: Registry[Executor] = Registry(
    "executor",
    Executor,  # type: ignore[type-abstract]  # the registry only asks for subclasses of it
    builtin={
        "aws": "dglx_dist.offload.executors.aws:AwsExecutor",  # imports boto3, only when chosen
        "http": "dglx_dist.offload.executors.http:HttpExecutor",
        "inline": "dglx_dist.offload.executors.inline:InlineExecutor",
        "local": "dglx_dist.offload.executors.local:LocalExecutor",
    },
    group="dglx_dist.executors",
)
