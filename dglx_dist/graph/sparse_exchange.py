"""How gradients of rows reach their owners: all ranks in step, or each at its own pace."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import final

from dglx_dist.cluster.collectives import barrier, gather_int64, peers_named
from dglx_dist.cluster.rpc import Pending
from dglx_dist.cluster.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_gradient import Parcel, RowSum, weighed_copy
from dglx_dist.graph.sparse_inbox import Inbox
from dglx_dist.graph.sparse_kernels import group_by_owner
from dglx_dist.graph.sparse_message import StepMessage, read_message
from dglx_dist.graph.sparse_rows import OwnedRows
from dglx_dist.records import Array

PHASE = "sparse_gradients"


@dataclass(frozen=True, kw_only=True)
class StalenessReport:
    """How late the updates of this rank's own gradients were, in steps."""

    steps: int
    """Steps of this rank."""
    largest_lag: int
    """Most own steps, the last included, that some owner had not applied when ``step()`` returned."""
    mean_lag: float
    """Their mean over the steps."""
    waits: int
    """Steps that had to wait because the bound was reached."""
    waited_s: float
    """Seconds of those waits."""


class Exchange(ABC):
    """Sends gradients to owners, and applies those that come here.

    Args:
        session: The run.
        op: Name of the remote call, the same on all ranks and of nobody else.
        tables: The parameters, the same on all ranks.
    """

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows]) -> None:
        self._session, self._op, self._tables = session, op, tuple(tables)
        self._step = 0
        session.rpc.register(op, self._receive)

    def send(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> list[Pending]:
        """Count a step, send each other owner its share, and then take in one's own."""
        self._step += 1
        topology = self._session.topology
        shares = [() if problem else self._cut(number, rows) for number, rows in enumerate(sums)]
        messages = [
            StepMessage(
                sender=topology.rank,
                step=self._step,
                used=tuple(used),
                parcels=tuple(share[rank] for share in shares if share),
                problem=problem,
            )
            for rank in range(topology.world_size)
        ]
        submit = partial(self._session.rpc.submit, op=self._op, phase=PHASE)
        own = topology.rank
        sent = [
            submit(rank, name=messages[rank].name(), arrays=messages[rank].arrays())
            for rank in (*range(own + 1, topology.world_size), *range(own))
        ]
        # Not through the handler, as one's own rows stay where they are.
        self.accept(messages[own])
        return sent

    @abstractmethod
    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        """Have a step applied.

        Args:
            sums: Of each parameter, this rank's weighed gradient; None for none.
            used: Of each parameter, whether a backward pass came by it.
            problem: Why this rank cannot take the step.

        Raises:
            ConfigError: another rank has a problem.
            PeerError: a rank is dead, silent or elsewhere.
            RemoteError: an owner could not apply it.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until all gradients of all ranks are applied; collective."""

    @abstractmethod
    def report(self) -> StalenessReport:
        """Return what was measured on this rank so far."""

    @abstractmethod
    def accept(self, message: StepMessage) -> None:
        """Take in what a rank sent; any thread."""

    def close(self) -> None:
        """Take in nothing any more: a barrier belongs before it."""
        self._session.rpc.unregister(self._op)

    def _cut(self, number: int, total: RowSum | None) -> tuple[Parcel, ...]:
        """Return the share of each owner: those of others weighed, one's own where it lies."""
        table = self._tables[number]
        total = total or table.nothing
        places, first = group_by_owner(total.ids, table.owners.starts)
        parcels = []
        for rank, (start, end) in enumerate(pairwise(first.tolist())):
            mine = Parcel(
                ids=total.ids[places[start:end]],
                rows=total.rows,
                places=places[start:end],
                weight=total.weight,
            )
            parcels.append(mine if rank == self._session.topology.rank else weighed_copy(mine))
        return tuple(parcels)

    def _receive(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        message = read_message(name, arrays, len(self._tables))
        for table, parcel in zip(self._tables, message.parcels, strict=not message.problem):
            table.check(parcel)
        self.accept(message)
        return []


@final
class SyncExchange(Exchange):
    """Every owner adds up the gradients of all ranks in the order of the ranks, then applies them once."""

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows]) -> None:
        self._inbox = Inbox(session)
        super().__init__(session, op, tables)

    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        """See :meth:`Exchange.step`; returns when every owner has applied it."""
        sent = self.send(sums, used, problem)
        messages = self._inbox.take(self._step, f"step {self._step} of {self._op}")
        for call in sent:
            call.result()
        for message in messages:
            if message.problem and message.sender != self._session.topology.rank:
                host = self._session.hosts[message.sender]
                raise ConfigError(f"rank {message.sender} on {host}: {message.problem}")
        if problem:
            return
        for number, table in enumerate(self._tables):
            if any(message.used[number] for message in messages):
                table.apply([message.parcels[number] for message in messages])
        gather_int64([self._step], self._session)

    def flush(self) -> None:
        """See :meth:`Exchange.flush`: nothing is ever left."""

    def report(self) -> StalenessReport:
        """See :meth:`Exchange.report`: there is none."""
        return StalenessReport(steps=self._step, largest_lag=0, mean_lag=0.0, waits=0, waited_s=0.0)

    def accept(self, message: StepMessage) -> None:
        """See :meth:`Exchange.accept`."""
        self._inbox.put(message)


@final
class AsyncExchange(Exchange):
    """Owners apply gradients when they come; a rank waits only when too many of its own are on their way.

    Args:
        staleness: Most own steps that some owner may not have applied when ``step`` returns.
    """

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows], staleness: int) -> None:
        self._staleness = staleness
        self._under_way: deque[list[Pending]] = deque()
        self._lag_sum = 0
        self._largest, self._waits, self._waited_s = 0, 0, 0.0
        super().__init__(session, op, tables)

    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        """See :meth:`Exchange.step`; waits for nobody unless the bound is reached."""
        if problem:
            return
        self._under_way.append(self.send(sums, used))
        while self._under_way and all(call.ready() for call in self._under_way[0]):
            self._finish_oldest()
        if len(self._under_way) > self._staleness:
            started = time.perf_counter()
            while len(self._under_way) > self._staleness:
                self._finish_oldest()
            self._waits += 1
            self._waited_s += time.perf_counter() - started
        self._largest = max(self._largest, len(self._under_way))
        self._lag_sum += len(self._under_way)

    def flush(self) -> None:
        """See :meth:`Exchange.flush`."""
        while self._under_way:
            self._finish_oldest()
        barrier(self._session, f"flush of {self._op}")

    def report(self) -> StalenessReport:
        """See :meth:`Exchange.report`."""
        return StalenessReport(
            steps=self._step,
            largest_lag=self._largest,
            mean_lag=self._lag_sum / max(self._step, 1),
            waits=self._waits,
            waited_s=self._waited_s,
        )

    def accept(self, message: StepMessage) -> None:
        """See :meth:`Exchange.accept`."""
        for table, used, parcel in zip(self._tables, message.used, message.parcels, strict=True):
            if used:
                table.apply([parcel])

    def _finish_oldest(self) -> None:
        with peers_named(self._session, f"pushes of {self._op}"):
            for call in self._under_way.popleft():
                call.result()
