"""What a graph server answers workers, over sockets and in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from dglx_dist.cluster.ledger import WORKER
from dglx_dist.cluster.rpc import Rpc
from dglx_dist.cluster.serve import Handler
from dglx_dist.cluster.wire import payload_bytes
from dglx_dist.offload.fields import printable
from dglx_dist.offload.tasks import TaskKey, parse_attempt, parse_half
from dglx_dist.offload.work import kernels
from dglx_dist.offload.worker.exchange import GIVE, GRADIENTS, PROGRAM, PULL, WEIGHTS
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.desk import Gift
from dglx_dist.strategies.bounded.graph_server import GraphServer
from dglx_dist.strategies.bounded.hands import Parameters

PROGRAM_PHASE, DOWN, UP = "lambda_program", "lambda_down", "lambda_up"
"""Phases of the ledger; a worker has none, so the graph server counts."""

_MOST_KERNELS, _LONGEST_KERNELS = 16, 400


@final
class Desk:
    """Answers workers from now until :meth:`close`.

    Args:
        rpc: This rank's calls.
        server: Whose tasks.
        over: Called with the key and attempt by which a task is over; any thread, quick.
        refused: Called with those of a duplicate that is whole.
    """

    def __init__(
        self,
        rpc: Rpc,
        server: GraphServer,
        over: Callable[[TaskKey, int], None],
        refused: Callable[[TaskKey, int], None],
    ) -> None:
        self._rpc, self._server, self._over, self._refused = rpc, server, over, refused
        self._program = np.frombuffer(server.program.to_json(), np.uint8)
        self._handlers: dict[str, Handler] = {PROGRAM: self._tell, PULL: self._pull, GIVE: self._give}
        phases = {PROGRAM: PROGRAM_PHASE, PULL: DOWN, GIVE: UP}
        self.kernels = {kernels()}
        """Of this process, and those that workers said theirs are."""
        for op, handler in self._handlers.items():
            rpc.register(op, self._counted(op, phases[op], handler), for_visitors=True)

    def handlers(self, parameters: Parameters) -> dict[str, Handler]:
        """Return what answers the operations of a worker in this process, without a byte on any wire."""

        def weights(name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
            return parameters.weights(TaskKey.parse(name))

        def gradients(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            parameters.gradients(TaskKey.parse(name), arrays)
            return []

        return {**self._handlers, WEIGHTS: weights, GRADIENTS: gradients}

    def close(self) -> None:
        """Answer no more."""
        for op in self._handlers:
            self._rpc.unregister(op)

    def _counted(self, op: str, phase: str, handler: Handler) -> Handler:
        def answer(name: str, arrays: Sequence[Array]) -> Sequence[Array]:
            answers = handler(name, arrays)
            layer = 0 if op == PROGRAM else TaskKey.parse(name.partition("/")[0]).step
            if op == GIVE:
                self._rpc.count(phase, layer, WORKER, None, payload_bytes(arrays))
            else:
                self._rpc.count(phase, layer, None, WORKER, payload_bytes(answers))
            return answers

        return answer

    def _tell(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        if name and len(self.kernels) < _MOST_KERNELS:
            self.kernels.add(printable(name, _LONGEST_KERNELS).replace("\n", " "))
        return [self._program]

    def _pull(self, name: str, _arrays: Sequence[Array]) -> Sequence[Array]:
        return self._server.desk.pull(*parse_half(name)) or []

    def _give(self, name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        key, half, attempt = parse_attempt(name)
        gift = self._server.give(key, half, arrays)
        if gift is Gift.LAST:
            self._over(key, attempt)
        elif gift is Gift.LATE and half == 1:
            self._refused(key, attempt)
        return [np.array([gift.accepted], dtype=np.int64)]
