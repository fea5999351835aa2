"""Rows from graph server to graph server, how far each is and how right, by one-sided calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from dglx_dist.comm.rpc import Rpc
from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.graph_server import GhostMessage, GraphServer, Kind, ScheduledTask

GHOSTS, GHOST_GRADIENTS = "lambda.ghosts", "lambda.ghost_gradients"
"""Operations, name: "step/sender"."""
REACHED, CORRECT = "lambda.reached", "lambda.correct"
"""Operations, name: "position/sender", "epoch/sender"."""
PHASES = {Kind.SCATTER: "ghosts", Kind.SEND_BACK: "ghost_gradients"}
"""Of the ledger: |G| (4 + s d) bytes per Scatter, epoch and direction; layer is the step."""
_OPS = {Kind.SCATTER: GHOSTS, Kind.SEND_BACK: GHOST_GRADIENTS}
_PAIR = re.compile(r"(0|[1-9][0-9]{0,17})/(0|[1-9][0-9]{0,5})")


@final
class GhostExchange:
    """Carries the letters of one rank's graph server from now until :meth:`close`; graph server r is rank r.

    Every rank makes its own before any of them sends, and closes it when none sends any more.

    Args:
        rpc: This rank's calls.
        server: Who sends and receives.
        hear: Called with the number of a peer and the position that it came to; any thread, quick.
        count: Called with the number of a peer, an epoch and its right answers; likewise.
    """

    def __init__(
        self,
        rpc: Rpc,
        server: GraphServer,
        hear: Callable[[int, int], None],
        count: Callable[[int, int, int], None],
    ) -> None:
        self._rpc, self._server, self._hear, self._count = rpc, server, hear, count
        rpc.register(GHOSTS, lambda name, arrays: self._receive(Kind.SCATTER, name, arrays))
        rpc.register(GHOST_GRADIENTS, lambda name, arrays: self._receive(Kind.SEND_BACK, name, arrays))
        rpc.register(REACHED, self._hear_position)
        rpc.register(CORRECT, self._hear_count)

    def send(self, move: ScheduledTask, letters: Sequence[GhostMessage]) -> None:
        """Send all letters and wait until they are read.

        Raises:
            PeerError: a graph server is dead or silent; it is named.
            RemoteError: it refused.
        """
        name = f"{move.step}/{self._server.rank}"
        sent = [
            self._rpc.submit(
                letter.peer,
                _OPS[move.kind],
                name,
                [letter.positions, *letter.rows],
                phase=PHASES[move.kind],
                layer=move.step,
            )
            for letter in letters
        ]
        for pending in sent:
            pending.result()

    def announce(self, position: int) -> None:
        """Tell all others how far all intervals of this graph server are; waits until they know."""
        self._tell_all(REACHED, position, [])

    def answer(self, epoch: int, correct: int) -> None:
        """Tell all others how many answers of ``epoch`` were right here; waits until they know."""
        self._tell_all(CORRECT, epoch, [np.array([correct], dtype=np.int64)])

    def close(self) -> None:
        """Receive no more."""
        for op in (GHOSTS, GHOST_GRADIENTS, REACHED, CORRECT):
            self._rpc.unregister(op)

    def _tell_all(self, op: str, number: int, arrays: Sequence[Array]) -> None:
        name = f"{number}/{self._server.rank}"
        others = [peer for peer in range(self._server.part.graph.num_servers) if peer != self._server.rank]
        told = [self._rpc.submit(peer, op, name, arrays, phase="control") for peer in others]
        for pending in told:
            pending.result()

    def _receive(self, kind: Kind, name: str, arrays: Sequence[Array]) -> list[Array]:
        step, sender = _parse(name)
        self._server.receive(sender, kind, step, arrays)
        return []

    def _hear_position(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        position, sender = _parse(name)
        self._hear(sender, position)
        return []

    def _hear_count(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        epoch, sender = _parse(name)
        if len(arrays) != 1 or arrays[0].dtype != np.int64 or arrays[0].shape != (1,):
            raise ConfigError(f"graph server {sender} sent no count of right answers of epoch {epoch}")
        self._count(sender, epoch, int(arrays[0][0]))
        return []


def _parse(name: str) -> tuple[int, int]:
    found = _PAIR.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name[:80]!r} names no step and sender; one looks like 2/1")
    return int(found[1]), int(found[2])
