"""Workers in threads of the graph server itself: the CPU-only servers of the paper's comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, final

from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.serverless.executors.base import (
    Executor,
    ExecutorContext,
    Faults,
    Hand,
    Invocation,
    Latency,
    Lost,
    Pool,
    PoolPlan,
)
from dglx_dist.serverless.json_fields import Fields, write_json
from dglx_dist.serverless.worker import DirectCaller, Worker, WorkerAnswer
from dglx_dist.serverless.worker_process import Fault, FaultyPlace


@final
class InlineExecutor(Executor):
    """Runs the same handler in threads, with no socket; nothing is billed.

    Options: ``faults``, see :class:`~dglx_dist.serverless.executors.base.Faults`, in which a thread that is
    killed gives up its task; ``latency_s`` and ``latency_sigma`` as of executor ``local``.
    """

    in_process = True
    option_names = ("faults", "latency_s", "latency_sigma")

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        fields = Fields(options, "executor 'inline'")
        faults = fields.maybe("faults", lambda name: Faults.read(fields.any(name)), None)
        latency = Latency.read(fields)
        fields.end()
        if not context.handlers:
            raise ConfigError("executor 'inline' needs what answers workers in this process: give handlers")
        handlers = context.handlers
        self._pool = Pool(
            PoolPlan(
                make=lambda: _Thread(DirectCaller(handlers)),
                notice=context.notice,
                memory_mb=0,
                billed=False,
                faults=faults,
                latency=latency,
            )
        )

    def invoke(self, event: bytes) -> None:
        """See Executor."""
        self._pool.invoke(event)

    def size(self, workers: int) -> None:
        """See Executor."""
        self._pool.size(workers)

    def lost(self) -> list[Lost]:
        """See Executor."""
        return self._pool.lost()

    def billed(self) -> list[Invocation]:
        """See Executor."""
        return self._pool.billed()

    @property
    def workers(self) -> int:
        """See Executor."""
        return self._pool.workers

    def close(self) -> None:
        """See Executor. What a thread computes it computes to its end; its results are refused."""
        self._pool.close()


@final
class _Thread(Hand):
    def __init__(self, caller: DirectCaller) -> None:
        self._caller = caller
        self._faults = FaultyPlace(_die)
        self._worker = Worker(caller, self._faults)

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer:
        self._faults.next = fault
        return WorkerAnswer.from_json(write_json(self._worker.handle(event)))

    def stop(self) -> None:
        self._caller.close()

    def end(self) -> None:
        self.stop()


def _die() -> NoReturn:
    raise PeerError("the worker was killed on purpose")
