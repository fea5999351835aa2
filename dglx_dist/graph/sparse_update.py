"""Updates of owned rows: the rules of torch's optimizers, and the exchange of gradients with the owners."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np
import torch

from dglx_dist.comm.collectives import barrier, gather_int64, report_failed_peers
from dglx_dist.comm.mailbox import Mailbox
from dglx_dist.comm.rpc import Pending
from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor, view_owned_rows
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.row_kernels import group_by_range, view_as_numpy
from dglx_dist.graph.sparse_gradient import (
    RowSum,
    make_row_sum,
    sum_rows,
    update_adagrad,
    update_adam,
    update_sgd,
)
from dglx_dist.records import Array


@final
class UpdateRule:
    """A formula with its settings. ``lr`` may change between steps.

    Args:
        constants: Function from (lr, number of the step: 1, 2, ...) to the constants of ``kernel``.
        state_names: Names of the tensors that are kept for the rows.

    Raises:
        ConfigError: ``lr`` is invalid.
    """

    def __init__(
        self,
        lr: float,
        kernel: Callable[..., None],
        constants: Callable[[float, int], tuple[float, ...]],
        settings: Mapping[str, float],
        state_names: tuple[str, ...] = (),
    ) -> None:
        self.lr = float(check_at_least_0("lr", lr))
        self.settings, self.state_names = settings, state_names
        self._kernel, self._constants = kernel, constants

    def update(
        self, weight: Array, targets: Array, states: Sequence[Array], gradient: RowSum, step: int
    ) -> None:
        """Update rows ``targets`` of (n, d) ``weight`` and rows ``gradient.ids`` of the states in place.

        All arrays have the compute dtype. ``step`` counts the steps of the parameter from 1, with this one.
        """
        self._kernel(weight, targets, tuple(states), gradient, self._constants(self.lr, step))


def sgd_rule(lr: float) -> UpdateRule:
    """Return the rule ``w -= lr g``."""
    return UpdateRule(lr, update_sgd, lambda rate, _: (rate,), {})


def adagrad_rule(lr: float, eps: float) -> UpdateRule:
    """Return the rule ``s += g^2; w -= lr g / (sqrt(s) + eps)``. Raise ConfigError if ``eps`` is invalid."""
    settings = {"eps": check_at_least_0("eps", eps)}
    return UpdateRule(lr, update_adagrad, lambda rate, _: (rate, eps), settings, ("sum",))


def adam_rule(lr: float, betas: tuple[float, float], eps: float, *, corrected: bool = False) -> UpdateRule:
    """Return Adam with moments that change only in touched rows, and one step count for all rows.

    ``corrected`` tells whether ``eps`` is added to the root of the second moment after bias correction, as in
    ``torch.optim.Adam`` and DGL, or before it, as in ``torch.optim.SparseAdam``. The two differ if gradients
    are not much larger than ``eps / sqrt(1 - beta2)``. The moments then have DGL's names, too. Raises
    ConfigError if a setting is invalid.
    """
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas={betas} must be two numbers in [0, 1)")
    beta1, beta2 = betas

    def constants(rate: float, step: int) -> tuple[float, ...]:
        correction = math.sqrt(1.0 - beta2**step)
        small = eps * correction if corrected else eps
        return rate * correction / (1.0 - beta1**step), 1.0 - beta1, 1.0 - beta2, small

    settings = {"beta1": beta1, "beta2": beta2, "eps": check_at_least_0("eps", eps)}
    names = ("mem", "power") if corrected else ("mean", "square")
    return UpdateRule(lr, update_adam, constants, settings, names)


def check_at_least_0(name: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"{name}={value} must be a number, at least 0")
    return value


@final
class OwnedRows:
    """The rows of one embedding that this rank owns. ``states`` are the tensors of ``rule``."""

    def __init__(self, embedding: DistEmbedding, states: Sequence[DistTensor], rule: UpdateRule) -> None:
        policy = embedding.part_policy
        topology = embedding.kvstore.session.topology
        self.embedding = embedding
        self.states = tuple(states)
        self.rule = rule
        self.owners = RowOwners(policy.bounds, topology)
        self.first, self.last = self.owners.get_range(topology.rank)
        self.steps = 0
        """Number of updates of the parameter so far. Updates without a row of this rank count, too."""
        self.lock = embedding.kvstore.column(embedding.weight.kvstore_key).lock
        """Lock that is held while rows are updated, also by other optimizers and by pushes that add."""
        self._rows = view_owned_rows(embedding.weight)
        self._state_rows = tuple(view_as_numpy(view_owned_rows(state)) for state in states)
        self._dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))
        no_values = np.empty((0, embedding.embedding_dim), self._dtype)
        self.no_rows = make_row_sum(np.empty(0, np.int64), no_values)
        """The gradient of a rank that touched no row."""

    def check(self, gradient: RowSum) -> None:
        """Raise ConfigError unless ``gradient`` from another rank is for rows of this rank."""
        ids = gradient.ids
        rows = gradient.rows
        dtype = self._dtype
        if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != dtype:
            raise ConfigError(f"gradients must be int64 ids and {dtype} rows, not {ids.dtype}, {rows.dtype}")
        if rows.shape != (len(ids), self.embedding.embedding_dim):
            raise ConfigError(f"gradients of {len(ids)} ids cannot have shape {rows.shape}")
        if len(ids) and (ids.min() < self.first or ids.max() >= self.last):
            raise ConfigError(
                f"this rank owns the rows {self.first} to {self.last - 1} of {self.embedding.name!r}, not "
                f"{ids.min()} to {ids.max()}. Build the optimizers with the same arguments on all ranks."
            )

    def apply(self, gradients: Sequence[RowSum]) -> None:
        """Sum ``gradients`` in their order and update each touched row once. Any thread may call this."""
        nonempty_gradients = [gradient for gradient in gradients if len(gradient.ids)]
        with self.lock:
            self.steps += 1
            if nonempty_gradients:
                total = sum_rows(nonempty_gradients)
                self._update(total._replace(ids=total.ids - self.first))

    def _update(self, gradient: RowSum) -> None:
        """Update the owned rows ``gradient.ids``, which are counted from the first row of this rank.

        Rows in another dtype than :attr:`DistEmbedding.compute_dtype` are converted, updated and stored back.
        """
        rows = self._rows
        compute_dtype = self.embedding.compute_dtype
        row_numbers = gradient.ids
        if rows.dtype == compute_dtype:
            self.rule.update(view_as_numpy(rows), row_numbers, self._state_rows, gradient, self.steps)
            return
        index = torch.from_numpy(row_numbers)
        converted = rows[index].to(compute_dtype).numpy()
        self.rule.update(converted, np.arange(len(index)), self._state_rows, gradient, self.steps)
        rows[index] = torch.from_numpy(converted).to(rows.dtype)


MAX_PARAMETERS = 100
"""Maximum number of parameters of one optimizer. Each takes two arrays of a message."""
_MAX_PROBLEM = 2000


class StepMessage(NamedTuple):
    """One rank's share of a step."""

    used: Sequence[bool]
    """Whether each parameter is part of the sender's backward passes, with or without rows."""
    gradients: Sequence[RowSum]
    """Gradient of each parameter. Empty if there is a problem."""
    problem: str
    """Reason why the sender cannot take this step, which is reported to all ranks. Otherwise ""."""


@dataclass(frozen=True, kw_only=True)
class StalenessReport:
    """Delay in steps of the updates with this rank's own gradients."""

    steps: int
    """Number of steps of this rank."""
    largest_lag: int
    """Maximum number of own steps that some owner had not applied when ``step()`` returned."""
    mean_lag: float
    """Mean of these numbers over the steps."""
    waits: int
    """Number of steps that waited because the limit was reached."""
    waited_s: float
    """Seconds that these steps waited."""


@final
class SparseExchange:
    """Sends gradients to the owners of their rows, and applies received gradients.

    With ``staleness`` None, an owner sums the gradients of all ranks in the order of the ranks, and applies
    the sum when all have arrived. Otherwise it applies gradients on arrival, and a rank waits for all but
    ``staleness`` of its own steps. ``op``, a unique name of the remote call, and ``tables``, the parameters,
    are the same on all ranks.
    """

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows], staleness: int | None) -> None:
        self._session = session
        self._op = op
        self._tables = tuple(tables)
        self._staleness = staleness
        self._mailbox: Mailbox[StepMessage] = Mailbox(session, "every rank must call step() in each step")
        self._in_flight: deque[list[Pending]] = deque()
        self._step = self._lag_sum = self._largest = self._waits = 0
        self._waited_s = 0.0
        session.rpc.register(op, self._receive)

    def step(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> None:
        """Apply a step. ``sums`` has this rank's weighted gradient of each parameter.

        ``used`` tells whether each parameter was used. ``problem`` is the reason why this rank cannot take
        the step. Raises ConfigError if another rank has a problem.
        """
        if self._staleness is None:
            self._step_together(self._send(sums, used, problem), problem)
        elif not problem:
            self._in_flight.append(self._send(sums, used))
            self._bound_lag(self._staleness)

    def flush(self) -> None:
        """Wait until all gradients of all ranks are applied. Every rank must call this."""
        while self._in_flight:
            self._finish_oldest()
        if self._staleness is not None:
            barrier(self._session, f"flush of {self._op}")

    def report(self) -> StalenessReport:
        return StalenessReport(
            steps=self._step,
            largest_lag=self._largest,
            mean_lag=self._lag_sum / max(self._step, 1),
            waits=self._waits,
            waited_s=self._waited_s,
        )

    def close(self) -> None:
        self._session.rpc.unregister(self._op)

    def _step_together(self, pending: list[Pending], problem: str) -> None:
        """Apply the gradients of all ranks to this rank's rows. Return when every rank has done so.

        ``pending`` are this rank's own messages. With a ``problem`` of this rank nothing is applied, and the
        caller raises it. Raises ConfigError if another rank has a problem, and PeerError if one is dead.
        """
        topology = self._session.topology
        activity = f"step {self._step} of {self._op}"
        with report_failed_peers(self._session, activity):
            received = self._mailbox.take(self._step, None, range(topology.world_size), activity)
        for call in pending:
            call.result()
        for rank, message in received.items():
            if message.problem and rank != topology.rank:
                raise ConfigError(f"rank {rank} on {self._session.hosts[rank]}: {message.problem}")
        if problem:
            return
        for number, table in enumerate(self._tables):
            if any(message.used[number] for message in received.values()):
                table.apply([message.gradients[number] for message in received.values()])
        # This only waits for the other ranks. The gathered numbers are not needed.
        gather_int64([self._step], self._session)

    def _bound_lag(self, staleness: int) -> None:
        """Wait until at most ``staleness`` steps of this rank are not applied, and record the lag."""
        while self._in_flight and all(call.is_ready() for call in self._in_flight[0]):
            self._finish_oldest()
        if len(self._in_flight) > staleness:
            started = time.perf_counter()
            while len(self._in_flight) > staleness:
                self._finish_oldest()
            self._waits += 1
            self._waited_s += time.perf_counter() - started
        self._largest = max(self._largest, len(self._in_flight))
        self._lag_sum += len(self._in_flight)

    def _finish_oldest(self) -> None:
        with report_failed_peers(self._session, f"pushes of {self._op}"):
            for call in self._in_flight.popleft():
                call.result()

    def _send(self, sums: Sequence[RowSum | None], used: Sequence[bool], problem: str = "") -> list[Pending]:
        """Send this rank's gradients of one step to the owners of the rows, and return the calls.

        ``sums`` and ``used`` have one entry for each table. If this rank has a ``problem``, it sends that
        instead, because the others wait for a message of every rank. The call starts a new step.
        """
        self._step += 1
        this_rank = self._session.topology.rank
        world_size = self._session.topology.world_size
        shares = [] if problem else [self._split(*pair) for pair in zip(self._tables, sums, strict=True)]
        # The name of a call does not count as payload.
        name = f"{this_rank} {self._step} {''.join(str(int(flag)) for flag in used)} {problem[:_MAX_PROBLEM]}"
        pending = []
        for rank in (*range(this_rank + 1, world_size), *range(this_rank)):
            arrays = [array for share in shares for array in share[rank].compact()[:2]]
            submit = self._session.rpc.submit
            pending.append(submit(rank, self._op, name, arrays, phase="sparse_gradients"))
        # Local rows skip the handler, so they are neither copied nor checked.
        self._accept(
            this_rank, self._step, StepMessage(used, [share[this_rank] for share in shares], problem)
        )
        return pending

    def _split(self, table: OwnedRows, total: RowSum | None) -> list[RowSum]:
        """Return the part of a gradient for each owner, by rank. The parts share the rows of ``total``."""
        total = total or table.no_rows
        places, first = group_by_range(total.ids, table.owners.starts)
        positions = np.empty(len(places), np.int64)
        positions[places] = np.arange(len(places))
        shares = []
        for start, end in pairwise(first.tolist()):
            selected = positions[start:end]
            shares.append(RowSum(total.ids[selected], total.rows, total.places[selected], total.weight))
        return shares

    def _receive(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        """Check and keep the message of another rank. Raise ConfigError if it does not fit the tables."""
        sender, step, used, problem = name.split(" ", 3)
        if len(used) != len(self._tables) or len(arrays) != (0 if problem else 2 * len(self._tables)):
            raise ConfigError(
                f"rank {sender} sent gradients of {len(used)} embeddings in {len(arrays)} arrays to an "
                f"optimizer of {len(self._tables)}. Build the optimizers with the same arguments on all "
                "ranks."
            )
        gradients = tuple(map(make_row_sum, arrays[::2], arrays[1::2]))
        for table, gradient in zip(self._tables, gradients, strict=not problem):
            table.check(gradient)
        flags = [mark == "1" for mark in used]
        self._accept(int(sender), int(step), StepMessage(flags, gradients, problem))
        return []

    def _accept(self, sender: int, step: int, message: StepMessage) -> None:
        if self._staleness is None:
            self._mailbox.put(step, None, sender, message)
            return
        for table, used, gradient in zip(self._tables, message.used, message.gradients, strict=True):
            if used:
                table.apply([gradient])
