"""Updates of owned rows: the rules of torch's optimisers, and the exchange of gradients with the owners."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, final

import numpy as np
import torch

from dglx_dist.comm.collectives import barrier, gather_int64, peers_named
from dglx_dist.comm.mailbox import Mailbox
from dglx_dist.comm.rpc import Pending
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.row_kernels import group_by_range, numpy_view
from dglx_dist.graph.sparse_gradient import (
    NEVER,
    RowSum,
    count_rows,
    forget_rows,
    one_row_each,
    split_rows,
    update_adagrad,
    update_adam,
    update_sgd,
)
from dglx_dist.records import Array


class UpdateRule(ABC):
    """One formula with its settings; ``lr`` may be changed between steps. ConfigError for an invalid one."""

    state_names: ClassVar[tuple[str, ...]]
    """Of the tensors that are kept beside the rows."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if not 0.0 <= lr < math.inf:
            raise ConfigError(f"lr={lr} must be a number, at least 0")
        self._lr = float(lr)

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """Return all settings but ``lr`` by name."""

    @abstractmethod
    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        """Update the rows ``at`` of (n, d) ``weight`` and the rows ``gradient.ids`` of the states in place.

        All have the compute dtype. ``step``: 1, 2, ...: steps of the whole parameter, this one included.
        """


@final
class SgdRule(UpdateRule):
    """``w -= lr g``."""

    state_names = ()

    def settings(self) -> dict[str, float]:
        return {}

    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        update_sgd(weight, at, gradient, self.lr)


@final
class AdagradRule(UpdateRule):
    """``s += g^2; w -= lr g / (sqrt(s) + eps)``."""

    state_names = ("sum",)

    def __init__(self, lr: float, eps: float) -> None:
        super().__init__(lr)
        self._eps = _positive(eps)

    def settings(self) -> dict[str, float]:
        return {"eps": self._eps}

    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        update_adagrad(weight, at, states[0], gradient, self.lr, self._eps)


@final
class AdamRule(UpdateRule):
    """Adam with moments that change only in touched rows, and one step count for all rows.

    ``corrected``: whether ``eps`` is added to the root of the second moment after bias correction, as
    ``torch.optim.Adam`` and DGL do, or before it, as ``torch.optim.SparseAdam`` does. The two differ where
    gradients are not much larger than ``eps / sqrt(1 - beta2)``.
    """

    state_names = ("mean", "square")

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, *, corrected: bool = False) -> None:
        super().__init__(lr)
        self._corrected = corrected
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"betas={betas} must be two numbers in [0, 1)")
        self._betas = betas
        self._eps = _positive(eps)

    def settings(self) -> dict[str, float]:
        return {"beta1": self._betas[0], "beta2": self._betas[1], "eps": self._eps}

    def update(self, weight: Array, at: Array, states: Sequence[Array], gradient: RowSum, step: int) -> None:
        mean, square = states
        beta1, beta2 = self._betas
        correction = math.sqrt(1.0 - beta2**step)
        rate = self.lr * correction / (1.0 - beta1**step)
        eps = self._eps * correction if self._corrected else self._eps
        constants = (rate, 1.0 - beta1, 1.0 - beta2, eps)
        update_adam(weight, at, mean, square, gradient, constants)


def _positive(eps: float) -> float:
    if not 0.0 <= eps < math.inf:
        raise ConfigError(f"eps={eps} must be a number, at least 0")
    return eps


@final
class OwnedRows:
    """The rows of one embedding that this rank owns; ``states`` are the tensors of ``rule``."""

    def __init__(self, embedding: DistEmbedding, states: Sequence[DistTensor], rule: UpdateRule) -> None:
        policy, topology = embedding.part_policy, embedding.kvstore.session.topology
        self.embedding, self.states, self.rule = embedding, tuple(states), rule
        self.owners = RowOwners(policy.bounds, topology)
        self.first, self.last = self.owners.range_of(topology.rank)
        self.steps = 0
        """Updates of the parameter so far, also those without a row of this rank."""
        self.lock = embedding.kvstore.column(embedding.weight.kvstore_key).lock
        """Held while rows are updated, also by other optimisers of these rows and by pushes that add."""
        start = embedding.weight.local_range[0]
        owned = slice(self.first - start, self.last - start)
        self._rows = embedding.weight.local_rows()[owned]
        self._state_rows = tuple(numpy_view(state.local_rows()[owned]) for state in states)
        self._dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))
        nothing = np.empty((0, embedding.embedding_dim), self._dtype)
        self.no_rows = one_row_each(np.empty(0, np.int64), nothing)
        """The gradient of a rank that touched no row."""
        self._slot_of = np.empty(0, np.int32)

    def check(self, gradient: RowSum) -> None:
        """Raise ConfigError unless ``gradient``, from another rank, is for rows of this one."""
        ids, rows, dtype = gradient.ids, gradient.rows, self._dtype
        if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != dtype:
            raise ConfigError(f"gradients must be int64 ids and {dtype} rows, not {ids.dtype}, {rows.dtype}")
        if rows.shape != (len(ids), self.embedding.embedding_dim):
            raise ConfigError(f"gradients of {len(ids)} ids cannot have shape {rows.shape}")
        if len(ids) and (ids.min() < self.first or ids.max() >= self.last):
            raise ConfigError(
                f"this rank owns the rows {self.first} to {self.last - 1} of {self.embedding.name!r}, not "
                f"{ids.min()} to {ids.max()}; build the optimisers alike on all ranks"
            )

    def apply(self, gradients: Sequence[RowSum]) -> None:
        """Sum ``gradients`` in their order and update each row they touch once; any thread."""
        with self.lock:
            self.steps += 1
            for gradient in self._summed([one for one in gradients if len(one.ids)]):
                self._update(gradient)

    def _update(self, gradient: RowSum) -> None:
        rows, wide, touched = self._rows, self.embedding.compute_dtype, gradient.ids
        if rows.dtype == wide:
            self.rule.update(numpy_view(rows), touched, self._state_rows, gradient, self.steps)
            return
        index = torch.from_numpy(touched)
        weight = rows[index].to(wide).numpy()
        self.rule.update(weight, np.arange(len(touched)), self._state_rows, gradient, self.steps)
        rows[index] = torch.from_numpy(weight).to(rows.dtype)

    def _summed(self, gradients: Sequence[RowSum]) -> list[RowSum]:
        """Return gradients with ids counted from the first row and each row once; copy only repeated rows."""
        first = self.first
        if len(gradients) < 2:
            return [one._replace(ids=one.ids - first) for one in gradients]
        if len(self._slot_of) < self.last - first:
            self._slot_of = np.full(self.last - first, NEVER, dtype=np.int32)
        repeated = sum(count_rows(one.ids, first, self._slot_of) for one in gradients)
        touched = np.empty(repeated, dtype=np.int64)
        sums = np.empty((repeated, self.embedding.embedding_dim), dtype=self._dtype)
        found, count = [], 0
        for one in gradients:
            single, places, count = split_rows(one, first, self._slot_of, touched, sums, count)
            found.append(RowSum(single, one.rows, places, one.weight))
        for one in gradients:
            forget_rows(one.ids, first, self._slot_of)
        return [*found, one_row_each(touched, sums)]


MAX_PARAMETERS = 100
"""Of one optimiser: each takes two arrays of a message."""
_MAX_PROBLEM = 2000


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMessage:
    """One rank's share of a step."""

    sender: int
    step: int
    """1, 2, ..."""
    used: tuple[bool, ...]
    """Of each parameter, whether it is part of the sender's backward passes, with any rows or none."""
    gradients: tuple[RowSum, ...]
    """Of each parameter; empty when there is a problem."""
    problem: str = ""
    """Why the sender cannot take this step, reported to all ranks."""

    def name(self) -> str:
        """Return what is sent as the name of the call, which is no payload."""
        used = "".join("1" if used else "0" for used in self.used)
        return f"{self.sender} {self.step} {used} {self.problem[:_MAX_PROBLEM]}"

    def arrays(self) -> list[Array]:
        return [array for one in self.gradients for array in (one.ids, one.rows)]


def read_message(name: str, arrays: Sequence[Array], num_parameters: int) -> StepMessage:
    """Decode a message; ConfigError when it is not of an optimiser of ``num_parameters`` parameters."""
    sender, step, used, problem = name.split(" ", 3)
    expected = 0 if problem else 2 * num_parameters
    if len(used) != num_parameters or len(arrays) != expected:
        raise ConfigError(
            f"rank {sender} sent gradients of {len(used)} embeddings in {len(arrays)} arrays to an optimiser "
            f"of {num_parameters}; build the optimisers alike on all ranks"
        )
    return StepMessage(
        sender=int(sender),
        step=int(step),
        used=tuple(mark == "1" for mark in used),
        gradients=tuple(map(one_row_each, arrays[::2], arrays[1::2])),
        problem=problem,
    )


@dataclass(frozen=True, kw_only=True)
class StalenessReport:
    """Delay of the updates by this rank's own gradients, in steps."""

    steps: int
    """Steps of this rank."""
    largest_lag: int
    """Most own steps, the last included, that some owner had not applied when ``step()`` returned."""
    mean_lag: float
    """Mean of these over the steps."""
    waits: int
    """Steps that waited because the bound was reached."""
    waited_s: float
    """Seconds of those waits."""


class Exchange(ABC):
    """Sends gradients to owners, and applies those that arrive.

    ``op`` is a unique name of the remote call; it and ``tables``, the parameters, are the same on all ranks.
    """

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows]) -> None:
        self._session, self._op, self._tables = session, op, tuple(tables)
        self._step = 0
        session.rpc.register(op, self._receive)

    def send(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> list[Pending]:
        """Count a step, send each remote owner its share, and then accept the local one."""
        self._step += 1
        topology = self._session.topology
        shares = [() if problem else self._cut(number, rows) for number, rows in enumerate(sums)]
        messages = [
            StepMessage(
                sender=topology.rank,
                step=self._step,
                used=tuple(used),
                gradients=tuple(share[rank] for share in shares if share),
                problem=problem,
            )
            for rank in range(topology.world_size)
        ]
        submit = partial(self._session.rpc.submit, op=self._op, phase="sparse_gradients")
        own = topology.rank
        sent = [
            submit(rank, name=messages[rank].name(), arrays=messages[rank].arrays())
            for rank in (*range(own + 1, topology.world_size), *range(own))
        ]
        # Not through the handler: local rows are neither copied nor checked.
        self.accept(messages[own])
        return sent

    @abstractmethod
    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        """Have a step applied: of each parameter this rank's weighted gradient, and whether it was used.

        ``problem``: why this rank cannot take the step. ConfigError: another rank has one.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until all gradients of all ranks are applied; collective."""

    @abstractmethod
    def report(self) -> StalenessReport:
        """Return what was measured on this rank so far."""

    @abstractmethod
    def accept(self, message: StepMessage) -> None:
        """Take in a message of a rank; any thread."""

    def close(self) -> None:
        self._session.rpc.unregister(self._op)

    def _cut(self, number: int, total: RowSum | None) -> tuple[RowSum, ...]:
        """Return the share of each owner: a weighted copy for the others, a view for this rank."""
        table = self._tables[number]
        total = total or table.no_rows
        places, first = group_by_range(total.ids, table.owners.starts)
        positions = np.empty(len(places), np.int64)
        positions[places] = np.arange(len(places))
        shares = []
        for rank, (start, end) in enumerate(pairwise(first.tolist())):
            chosen = positions[start:end]
            share = RowSum(total.ids[chosen], total.rows, total.places[chosen], total.weight)
            shares.append(share if rank == self._session.topology.rank else share.for_sending())
        return tuple(shares)

    def _receive(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        message = read_message(name, arrays, len(self._tables))
        for table, gradient in zip(self._tables, message.gradients, strict=not message.problem):
            table.check(gradient)
        self.accept(message)
        return []


@final
class SyncExchange(Exchange):
    """Every owner adds up the gradients of all ranks in the order of the ranks, then applies them once."""

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows]) -> None:
        advice = "every rank must call step(), also without gradients"
        self._mailbox: Mailbox[StepMessage] = Mailbox(session, advice)
        super().__init__(session, op, tables)

    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        sent = self.send(sums, used, problem)
        world_size, what = self._session.topology.world_size, f"step {self._step} of {self._op}"
        with peers_named(self._session, what):
            received = self._mailbox.take(self._step, None, range(world_size), what)
        messages = [received[rank] for rank in range(world_size)]
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
                table.apply([message.gradients[number] for message in messages])
        gather_int64([self._step], self._session)

    def flush(self) -> None:
        pass

    def report(self) -> StalenessReport:
        return StalenessReport(steps=self._step, largest_lag=0, mean_lag=0.0, waits=0, waited_s=0.0)

    def accept(self, message: StepMessage) -> None:
        self._mailbox.put(message.step, None, message.sender, message)


@final
class AsyncExchange(Exchange):
    """Owners apply gradients as they arrive; a rank waits for all but ``staleness`` own steps."""

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows], staleness: int) -> None:
        self._staleness = staleness
        self._in_flight: deque[list[Pending]] = deque()
        self._lag_sum = 0
        self._largest, self._waits, self._waited_s = 0, 0, 0.0
        super().__init__(session, op, tables)

    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        if problem:
            return
        self._in_flight.append(self.send(sums, used))
        while self._in_flight and all(call.ready() for call in self._in_flight[0]):
            self._finish_oldest()
        if len(self._in_flight) > self._staleness:
            started = time.perf_counter()
            while len(self._in_flight) > self._staleness:
                self._finish_oldest()
            self._waits += 1
            self._waited_s += time.perf_counter() - started
        self._largest = max(self._largest, len(self._in_flight))
        self._lag_sum += len(self._in_flight)

    def flush(self) -> None:
        while self._in_flight:
            self._finish_oldest()
        barrier(self._session, f"flush of {self._op}")

    def report(self) -> StalenessReport:
        return StalenessReport(
            steps=self._step,
            largest_lag=self._largest,
            mean_lag=self._lag_sum / max(self._step, 1),
            waits=self._waits,
            waited_s=self._waited_s,
        )

    def accept(self, message: StepMessage) -> None:
        for table, used, gradient in zip(self._tables, message.used, message.gradients, strict=True):
            if used:
                table.apply([gradient])

    def _finish_oldest(self) -> None:
        with peers_named(self._session, f"pushes of {self._op}"):
            for call in self._in_flight.popleft():
                call.result()
