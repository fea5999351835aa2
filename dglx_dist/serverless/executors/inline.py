"""Executor ``inline``: workers as threads of the graph server (the paper's CPU-only servers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, final

from dglx_dist.data.json_fields import read_record
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.serverless.executors.base import ExecutorContext, Latency, PoolExecutor, WorkerHandle, names_of
from dglx_dist.serverless.worker import DirectCaller, Worker, WorkerAnswer
from dglx_dist.serverless.worker_process import Fault, FaultInjector


@final
class InlineExecutor(PoolExecutor):
    """Runs workers as threads without sockets; nothing is billed. Options: :class:`Latency`.

    A thread finishes its computation after :meth:`close`; its results are rejected.
    """

    in_process = True
    option_names = names_of(Latency)

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        latency = read_record(Latency, options, "executor 'inline'", defaults=True)
        handlers = context.handlers
        if not handlers:
            raise ConfigError("executor 'inline' needs the graph server's handlers; pass them in its context")
        super().__init__(
            lambda: _Thread(DirectCaller(handlers)),
            context.notice,
            memory_mb=0,
            billed=False,
            latency=latency,
        )


@final
class _Thread(WorkerHandle):
    def __init__(self, caller: DirectCaller) -> None:
        self._caller = caller
        self._faults = FaultInjector(_die)
        self._worker = Worker(caller, self._faults)

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer:
        self._faults.next = fault
        return self._worker.attempt(event)[0]

    def stop(self) -> None:
        self._caller.close()


def _die() -> NoReturn:
    raise PeerError("the worker was killed by an injected fault")
