"""Trains on all ranks: each is a graph server, the first ones are parameter servers too (Dorylus)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from dglx_dist.cluster.collectives import barrier, gather_json
from dglx_dist.cluster.missing import raise_for_missing
from dglx_dist.cluster.serve import Handler
from dglx_dist.cluster.session import Session
from dglx_dist.errors import PeerError
from dglx_dist.offload.parameters.client import ParameterClient
from dglx_dist.offload.parameters.plan import ParameterPlan
from dglx_dist.offload.parameters.server import ParameterServer
from dglx_dist.offload.parameters.service import ParameterService, Places, what_misses
from dglx_dist.offload.tasks import TaskKey
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.graph_server import GraphServer
from dglx_dist.strategies.bounded.mail import Mail
from dglx_dist.strategies.bounded.pace import Pace
from dglx_dist.strategies.bounded.progress import Progress
from dglx_dist.strategies.bounded.schedule.threads import Snapshot, ThreadSchedule
from dglx_dist.strategies.bounded.serving import Desk
from dglx_dist.strategies.bounded.workers import Workers

_PEER_CHECK_S = 5.0

Hire: TypeAlias = Callable[[Mapping[str, Handler]], Workers]
"""Makes the workers of this rank from what answers their operations in this process."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EngineConfig:
    """What all ranks agree on, but for ``threads``."""

    plan: ParameterPlan
    places: Places
    pace: Pace
    threads: int = 1
    """Threads of this rank that make moves: its cores."""


@final
@dataclass(frozen=True, kw_only=True)
class EpochTotals:
    """One epoch, over all ranks; equal on all."""

    epoch: int
    loss_sum: float
    """Over all training nodes; not divided."""
    correct: int
    """Training nodes whose largest output is at their label."""
    seconds: float
    """From the update before to the update after it, on the slowest rank: epochs may overlap."""


@final
class Engine:
    """Epochs from the first to wherever :meth:`run` is told, on this rank together with all others.

    Every rank must make it, run it and close it, together.

    Args:
        session: The run.
        server: This rank's graph server.
        config: How.
        parameters: This rank's parameter server, if it has one.
        hire: Who does tasks; called once, and what it raises leaves nothing behind.
    """

    def __init__(
        self,
        session: Session,
        server: GraphServer,
        config: EngineConfig,
        parameters: ParameterServer | None,
        hire: Hire,
    ) -> None:
        self._session, self._server, self._config = session, server, config
        pace, rank = config.pace, session.topology.rank
        self._peers = [peer for peer in range(session.topology.world_size) if peer != rank]
        self._progress = Progress(server.course, server.part.num_intervals, pace, self._peers)
        self._updated_at = {pace.first_epoch: time.perf_counter()}
        self._desk = Desk(session.rpc, server, self._given, self._refused)
        self._mail = Mail(session.rpc, server, self._heard, self._counted)
        self.parameters = ParameterClient(session.rpc, config.plan, config.places, on_update=self._updated)
        """The latest weights and the optimizer's state, between runs."""
        self._service = (
            None
            if parameters is None
            else ParameterService(
                session.rpc, parameters, config.places, timeline=session.timeline, run=server.run
            )
        )
        try:
            self._workers = hire(self._desk.handlers(self.parameters))
        except BaseException:
            self.abandon()
            raise
        self._schedule = ThreadSchedule(
            server,
            self._progress,
            self._workers,
            self._mail,
            threads=config.threads,
            timeline=session.timeline,
            early=pace.mode != "no_pipe",
        )
        self._epoch = pace.first_epoch
        barrier(session, "making the engines of all graph servers")

    @property
    def epoch(self) -> int:
        """The epoch that comes next: all intervals ended the one before it."""
        return self._epoch

    @property
    def queue_length(self) -> int:
        """Moves that wait for a thread."""
        return self._schedule.queue_length

    @property
    def kernels(self) -> list[str]:
        """What this graph server and its workers compute with; see :func:`dglx_dist.offload.work.kernels`."""
        return sorted(self._desk.kernels)

    def snapshot(self) -> Snapshot:
        """Return what this graph server does now; any thread."""
        return self._schedule.snapshot()

    @property
    def synchronous_from(self) -> int | None:
        """The epoch from which on asynchronous training is synchronous; None: it is not known yet."""
        return self._config.pace.synchronous_from

    def run(self, epochs: int) -> list[EpochTotals]:
        """Train ``epochs`` more epochs; afterwards nothing is in flight on any rank. Collective.

        Raises:
            PeerError: a rank is dead or silent, or nothing moved for the session's time-out; the message
                says who is missing. Or no worker did a task in as many attempts as allowed.
        """
        first, end = self._epoch, self._epoch + epochs
        self._updated_at = {first: time.perf_counter()}
        self._schedule.run(end, self._look)
        self._epoch = end
        barrier(self._session, f"the end of epoch {end - 1}")
        if self._service is not None:
            self._service.server.drain()
        return self._totals(first, end)

    def close(self) -> None:
        """Let go of everything, once no rank needs anything of another any more. Collective."""
        barrier(self._session, "closing the engines of all graph servers")
        self.abandon()

    def abandon(self) -> None:
        """As :meth:`close` where the run has failed: waits for nobody."""
        self._mail.close()
        self._desk.close()
        self.parameters.close()
        if self._service is not None:
            self._service.close()

    def _totals(self, first: int, end: int) -> list[EpochTotals]:
        """Sums in the order of the ranks; returns when all ranks have drained."""
        mine = []
        for epoch in range(first, end):
            loss_sum, correct = self._server.statistics(epoch)
            seconds = self._updated_at[epoch + 1] - self._updated_at[epoch]
            mine.append([loss_sum, correct, seconds])
        gathered: Array = np.array(gather_json(mine, self._session), dtype=np.float64)
        per_rank = gathered.reshape(-1, end - first, 3)
        return [
            EpochTotals(
                epoch=epoch,
                loss_sum=math.fsum(per_rank[:, epoch - first, 0]),
                correct=int(per_rank[:, epoch - first, 1].sum()),
                seconds=float(per_rank[:, epoch - first, 2].max()),
            )
            for epoch in range(first, end)
        ]

    def _given(self, key: TaskKey, attempt: int) -> None:
        self._schedule.given(key, attempt)

    def _refused(self, key: TaskKey, attempt: int) -> None:
        self._schedule.refused(key, attempt)

    def _heard(self, peer: int, position: int) -> None:
        self._schedule.heard(peer, position)

    def _counted(self, peer: int, epoch: int, correct: int) -> None:
        self._schedule.counted(peer, epoch, correct)

    def _updated(self, updates: int) -> None:
        now = time.perf_counter()
        for number in range(max(self._updated_at) + 1, updates + 1):
            self._updated_at[number] = now
        self._schedule.updated(updates)

    def _look(self, quiet_s: float, behind: Sequence[int]) -> None:
        self.parameters.raise_if_stopped()
        late = quiet_s >= self._session.timeout_s
        if not late and quiet_s < _PEER_CHECK_S:
            return
        # At the gate nobody in particular is late, but the update needs all that are alive.
        if missing := behind or self._peers:
            raise_for_missing(
                self._session,
                list(missing),
                "the next Scatter of the intervals" if behind else "the next update of the weights",
                before="in an epoch",
                undone="did not end a Scatter",
                advice="look at its output and its workers",
                late=late and bool(behind),
            )
        if late:
            raise PeerError(self._standstill(quiet_s))

    def _standstill(self, quiet_s: float) -> str:
        open_tasks = [str(key) for key in self._server.desk.keys[:5]]
        tasks = f"no worker gave rows for {', '.join(open_tasks)}; " if open_tasks else ""
        behind = range(self._config.plan.num_servers)
        misses = what_misses(self._session.rpc, self._config.places, behind)
        return (
            f"nothing moved on graph server {self._server.rank} for {quiet_s:.0f} s: {tasks}{misses}; look "
            "at what the workers say, or raise timeout_s (DGLX_TIMEOUT)"
        )
