"""Exchange of ghost rows, progress and accuracy between graph servers by one-sided RPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from dglx_dist.comm.rpc import Rpc
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.serverless.parameter_service import pair_name, parse_pair
from dglx_dist.strategies.serverless.graph_server import GhostMessage, GraphServer, ScheduledTask, TaskKind

GHOSTS, GHOST_GRADIENTS = "lambda.ghosts", "lambda.ghost_gradients"
"""Operations named "step/sender"."""
REACHED, CORRECT = "lambda.reached", "lambda.correct"
"""Operations named "position/sender" and "epoch/sender"."""
PHASES = {TaskKind.SCATTER: "ghosts", TaskKind.SEND_BACK: "ghost_gradients"}
"""Ledger phases: |G| (4 + s d) bytes per Scatter, epoch and direction; the layer is the step."""
_OPS = {TaskKind.SCATTER: GHOSTS, TaskKind.SEND_BACK: GHOST_GRADIENTS}


@final
class GhostExchange:
    """Sends and receives the messages of one graph server until :meth:`close`; graph server r is rank r.

    Every rank constructs its exchange before any rank sends, and closes it after all have stopped sending.

    Args:
        on_position: Called with a peer and the position that it reached; from any thread, must not block.
        on_correct: Called with a peer, an epoch and its number of correct predictions; likewise.
    """

    def __init__(
        self,
        rpc: Rpc,
        server: GraphServer,
        on_position: Callable[[int, int], None],
        on_correct: Callable[[int, int, int], None],
    ) -> None:
        self._rpc, self._server = rpc, server
        self._on_position, self._on_correct = on_position, on_correct
        rpc.register(GHOSTS, lambda name, arrays: self._receive(TaskKind.SCATTER, name, arrays))
        rpc.register(GHOST_GRADIENTS, lambda name, arrays: self._receive(TaskKind.SEND_BACK, name, arrays))
        rpc.register(REACHED, self._receive_position)
        rpc.register(CORRECT, self._receive_correct)

    def send(self, task: ScheduledTask, messages: Sequence[GhostMessage]) -> None:
        """Send all messages and wait until every peer has read its own; PeerError names a silent one."""
        name = pair_name(task.step, self._server.rank)
        sent = [
            self._rpc.submit(
                message.peer,
                _OPS[task.kind],
                name,
                [message.positions, *message.rows],
                phase=PHASES[task.kind],
                layer=task.step,
            )
            for message in messages
        ]
        for pending in sent:
            pending.result()

    def announce_position(self, position: int) -> None:
        """Tell all peers the position that all intervals here have reached; wait for their replies."""
        self._broadcast(REACHED, position, [])

    def announce_correct(self, epoch: int, correct: int) -> None:
        """Tell all peers the number of correct predictions here; wait for their replies."""
        self._broadcast(CORRECT, epoch, [np.array([correct], dtype=np.int64)])

    def close(self) -> None:
        for op in (GHOSTS, GHOST_GRADIENTS, REACHED, CORRECT):
            self._rpc.unregister(op)

    def _broadcast(self, op: str, number: int, arrays: Sequence[Array]) -> None:
        name = pair_name(number, self._server.rank)
        peers = [peer for peer in range(self._server.part.graph.num_servers) if peer != self._server.rank]
        for pending in [self._rpc.submit(peer, op, name, arrays, phase="control") for peer in peers]:
            pending.result()

    def _receive(self, kind: TaskKind, name: str, arrays: Sequence[Array]) -> list[Array]:
        step, sender = parse_pair(name)
        self._server.receive(sender, kind, step, arrays)
        return []

    def _receive_position(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        position, sender = parse_pair(name)
        self._on_position(sender, position)
        return []

    def _receive_correct(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        epoch, sender = parse_pair(name)
        if len(arrays) != 1 or arrays[0].dtype != np.int64 or arrays[0].shape != (1,):
            raise ConfigError(f"graph server {sender} sent no count of correct predictions for epoch {epoch}")
        self._on_correct(sender, epoch, int(arrays[0][0]))
        return []
