"""Updates to owned rows: the rules from torch's optimizers, and how gradients reach the owners."""

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
        constants: Function from (lr, step number: 1, 2, ...) to the constants for ``kernel``.
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
        self.settings = settings
        self.state_names = state_names
        self._kernel = kernel
        self._compute_constants = constants

    def update(
        self, weight: Array, targets: Array, states: Sequence[Array], gradient: RowSum, step: int
    ) -> None:
        """Apply a gradient to weights and states in place. All arrays have the compute dtype.

        Args:
            weight: (n, d) rows.
            targets: Rows to update in ``weight``, one for each gradient row.
            states: Optimizer states. Their rows ``gradient.ids`` are updated.
            step: Step count for the parameter, from 1 on.
        """
        constants = self._compute_constants(self.lr, step)
        self._kernel(weight, targets, tuple(states), gradient, constants)


def sgd_rule(lr: float) -> UpdateRule:
    """Return the rule ``w -= lr g``."""
    return UpdateRule(lr, update_sgd, lambda rate, _: (rate,), {})


def adagrad_rule(lr: float, eps: float) -> UpdateRule:
    """Return the rule ``s += g^2; w -= lr g / (sqrt(s) + eps)``. Raise ConfigError if ``eps`` is invalid."""
    settings = {"eps": check_at_least_0("eps", eps)}
    return UpdateRule(lr, update_adagrad, lambda rate, _: (rate, eps), settings, ("sum",))


def adam_rule(lr: float, betas: tuple[float, float], eps: float, *, corrected: bool = False) -> UpdateRule:
    """Return Adam with moments that change only in touched rows, and one step count for all rows.

    If ``corrected``, ``eps`` is added to the second moment's root after bias correction, as in
    ``torch.optim.Adam`` and DGL, and the moments have DGL's names. Otherwise ``eps`` is added before the
    correction, as in ``torch.optim.SparseAdam``. The results differ if gradients are not much larger than
    ``eps / sqrt(1 - beta2)``. Raises ConfigError if a setting is invalid.
    """
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas={betas} must be two numbers in [0, 1)")
    beta1, beta2 = betas

    def compute_constants(rate: float, step: int) -> tuple[float, ...]:
        # The kernel does not correct the second moment. So `rate` and `eps` contain the correction.
        correction = math.sqrt(1.0 - beta2**step)
        scaled_eps = eps * correction if corrected else eps
        return rate * correction / (1.0 - beta1**step), 1.0 - beta1, 1.0 - beta2, scaled_eps

    settings = {"beta1": beta1, "beta2": beta2, "eps": check_at_least_0("eps", eps)}
    names = ("mem", "power") if corrected else ("mean", "square")
    return UpdateRule(lr, update_adam, compute_constants, settings, names)


def check_at_least_0(name: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"{name}={value} must be a number, at least 0")
    return value


@final
class OwnedRows:
    """The rows that this rank owns in one embedding. ``states`` are the tensors that ``rule`` needs."""

    def __init__(self, embedding: DistEmbedding, states: Sequence[DistTensor], rule: UpdateRule) -> None:
        topology = embedding.kvstore.session.topology
        self.embedding = embedding
        self.states = tuple(states)
        self.rule = rule
        self.owners = RowOwners(embedding.part_policy.bounds, topology)
        self.first, self.last = self.owners.get_range(topology.rank)
        self.steps = 0
        """Counts updates to the parameter, even if they change no row on this rank."""
        self.lock = embedding.kvstore.column(embedding.weight.kvstore_key).lock
        """Lock on the rows. Other optimizers and pushes that add hold it, too."""

        self._rows = view_owned_rows(embedding.weight)
        self._state_rows = tuple(view_as_numpy(view_owned_rows(state)) for state in states)
        self._dtype = np.dtype(str(embedding.compute_dtype).removeprefix("torch."))
        no_values = np.empty((0, embedding.embedding_dim), self._dtype)
        self.no_rows = make_row_sum(np.empty(0, np.int64), no_values)
        """Gradient from a rank that touched no row."""

    def check(self, gradient: RowSum) -> None:
        """Raise ConfigError if ``gradient``, which another rank sent, is not for rows on this rank."""
        ids, rows, _, _ = gradient
        if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != self._dtype:
            dtypes = f"{ids.dtype}, {rows.dtype}"
            raise ConfigError(f"gradients must be int64 ids and {self._dtype} rows, not {dtypes}")
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
            # A step without rows counts, because the bias correction depends on the step count.
            self.steps += 1
            if nonempty_gradients:
                total = sum_rows(nonempty_gradients)
                self._update(total._replace(ids=total.ids - self.first))

    def _update(self, gradient: RowSum) -> None:
        """Update the owned rows ``gradient.ids``, which are counted from this rank's first row."""
        rows, states = self._rows, self._state_rows
        compute_dtype = self.embedding.compute_dtype
        if rows.dtype == compute_dtype:
            self.rule.update(view_as_numpy(rows), gradient.ids, states, gradient, self.steps)
            return

        indices = torch.from_numpy(gradient.ids)
        converted_rows = rows[indices].to(compute_dtype).numpy()
        self.rule.update(converted_rows, np.arange(len(indices)), states, gradient, self.steps)
        rows[indices] = torch.from_numpy(converted_rows).to(rows.dtype)


MAX_PARAMETERS = 100
"""Maximum number of parameters per optimizer. Each takes two arrays in a message."""
_MAX_PROBLEM = 2000


class StepMessage(NamedTuple):
    """One rank's contribution to a step."""

    is_used: Sequence[bool]
    """Whether each parameter is part of the sender's backward passes, with or without rows."""
    gradients: Sequence[RowSum]
    """One gradient per parameter. Empty if there is a problem."""
    problem: str
    """Reason why the sender cannot take this step, to report to all ranks. Empty if it can."""


@dataclass(frozen=True, kw_only=True)
class StalenessReport:
    """Delay, in steps, until updates with this rank's own gradients are applied."""

    steps: int
    """Number of steps that this rank made."""
    largest_lag: int
    """Maximum number of own steps that an owner had not applied yet when ``step()`` returned."""
    mean_lag: float
    """Mean number of own steps that an owner had not applied yet when ``step()`` returned."""
    waits: int
    """Number of steps that waited because the limit was reached."""
    waited_s: float
    """Seconds that the steps waited."""


@final
class SparseExchange:
    """Sends gradients to the ranks that own the rows, and applies received gradients.

    If ``staleness`` is None, an owner waits for the gradients from all ranks, sums them in rank order, and
    applies the sum. Otherwise an owner applies gradients on arrival, and a rank waits for all but the last
    ``staleness`` of its own steps.

    Args:
        op: Unique name for the remote call, the same on all ranks.
        tables: Rows for each parameter. All ranks pass the same parameters.
    """

    def __init__(self, session: Session, op: str, tables: Sequence[OwnedRows], staleness: int | None) -> None:
        self._session = session
        self._op = op
        self._tables = tuple(tables)
        self._staleness = staleness
        advice = "every rank must call step() in each step"
        self._mailbox: Mailbox[StepMessage] = Mailbox(session, advice)
        self._in_flight: deque[list[Pending]] = deque()
        self._step = self._lag_sum = self._largest_lag = self._num_waits = 0
        self._waited_s = 0.0
        session.rpc.register(op, self._receive)

    def step(self, sums: Sequence[RowSum | None], is_used: Sequence[bool], problem: str = "") -> None:
        """Apply a step with this rank's weighted gradient for each parameter. See :meth:`_send`.

        Raises ConfigError if another rank has a problem. If this rank has a ``problem``, nothing is applied.
        """
        if self._staleness is None:
            self._step_together(self._send(sums, is_used, problem), problem)
        elif not problem:
            self._in_flight.append(self._send(sums, is_used))
            self._bound_lag(self._staleness)

    def flush(self) -> None:
        """Wait until all gradients from all ranks are applied. Every rank must call this."""
        while self._in_flight:
            self._finish_oldest()
        if self._staleness is not None:
            barrier(self._session, f"flush of {self._op}")

    def report(self) -> StalenessReport:
        return StalenessReport(
            steps=self._step,
            largest_lag=self._largest_lag,
            mean_lag=self._lag_sum / max(self._step, 1),
            waits=self._num_waits,
            waited_s=self._waited_s,
        )

    def close(self) -> None:
        self._session.rpc.unregister(self._op)

    def _step_together(self, calls: list[Pending], problem: str) -> None:
        """Apply the gradients from all ranks to this rank's rows. Return when every rank has done so.

        ``calls`` are this rank's own messages. If this rank has a ``problem``, nothing is applied, and the
        caller raises it. Raises ConfigError if another rank has a problem, and PeerError if one is dead.
        """
        topology = self._session.topology
        activity = f"step {self._step} of {self._op}"
        with report_failed_peers(self._session, activity):
            ranks = range(topology.world_size)
            messages = self._mailbox.take(self._step, None, ranks, activity)
        for call in calls:
            call.result()

        for rank, message in messages.items():
            if message.problem and rank != topology.rank:
                host = self._session.hosts[rank]
                raise ConfigError(f"rank {rank} on {host}: {message.problem}")
        if problem:
            return
        for index, table in enumerate(self._tables):
            if any(message.is_used[index] for message in messages.values()):
                table.apply([message.gradients[index] for message in messages.values()])
        # The gathered numbers are not needed. The call only waits for the other ranks.
        gather_int64([self._step], self._session)

    def _bound_lag(self, staleness: int) -> None:
        """Wait until at most ``staleness`` of this rank's steps are not applied, and record the lag."""
        while self._in_flight and all(call.is_ready() for call in self._in_flight[0]):
            self._finish_oldest()
        if len(self._in_flight) > staleness:
            start_s = time.perf_counter()
            while len(self._in_flight) > staleness:
                self._finish_oldest()
            self._num_waits += 1
            self._waited_s += time.perf_counter() - start_s
        self._largest_lag = max(self._largest_lag, len(self._in_flight))
        self._lag_sum += len(self._in_flight)

    def _finish_oldest(self) -> None:
        with report_failed_peers(self._session, f"pushes of {self._op}"):
            for call in self._in_flight.popleft():
                call.result()

    def _send(
        self, sums: Sequence[RowSum | None], is_used: Sequence[bool], problem: str = ""
    ) -> list[Pending]:
        """Start a new step: send this rank's gradients to the rows' owners. Return the calls.

        Args:
            sums: A gradient for each table, or None.
            is_used: Whether each table was part of this rank's backward passes.
            problem: Reason why this rank cannot take the step. It is sent instead of gradients, because the
                others wait for a message from every rank.
        """
        self._step += 1
        own_rank = self._session.topology.rank
        world_size = self._session.topology.world_size
        shares_by_table = []
        if not problem:
            shares_by_table = [self._split(*pair) for pair in zip(self._tables, sums, strict=True)]

        # A call's name does not count as payload, so flags and the problem travel in the name.
        flags = "".join("1" if flag else "0" for flag in is_used)
        name = f"{own_rank} {self._step} {flags} {problem[:_MAX_PROBLEM]}"
        submit = self._session.rpc.submit
        calls = []
        # Each rank starts with the next rank, so that ranks do not all send to the same rank first.
        for rank in (*range(own_rank + 1, world_size), *range(own_rank)):
            arrays: list[Array] = []
            for shares in shares_by_table:
                share = shares[rank].compact()
                arrays += [share.ids, share.rows]
            calls.append(submit(rank, self._op, name, arrays, phase="sparse_gradients"))
        # Local rows skip the handler, so they are neither copied nor checked.
        own_gradients = [shares[own_rank] for shares in shares_by_table]
        self._accept(own_rank, self._step, StepMessage(is_used, own_gradients, problem))
        return calls

    def _split(self, table: OwnedRows, total: RowSum | None) -> list[RowSum]:
        """Split a gradient by owner rank. The results share the rows in ``total``."""
        total = total or table.no_rows
        targets, starts = group_by_range(total.ids, table.owners.starts)
        positions = np.empty(len(targets), np.int64)
        positions[targets] = np.arange(len(targets))
        shares = []
        for start, end in pairwise(starts.tolist()):
            selection = positions[start:end]
            shares.append(total._replace(ids=total.ids[selection], indices=total.indices[selection]))
        return shares

    def _receive(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        """Check and keep a message from another rank. Raise ConfigError if it does not fit the tables."""
        sender, step, flags, problem = name.split(" ", 3)
        num_tables = len(self._tables)
        num_arrays = 0 if problem else 2 * num_tables
        if len(flags) != num_tables or len(arrays) != num_arrays:
            raise ConfigError(
                f"rank {sender} sent gradients of {len(flags)} embeddings in {len(arrays)} arrays to an "
                f"optimizer of {num_tables}. Build the optimizers with the same arguments on all ranks."
            )

        gradients = tuple(map(make_row_sum, arrays[::2], arrays[1::2]))
        for table, gradient in zip(self._tables, gradients, strict=not problem):
            table.check(gradient)
        is_used = [flag == "1" for flag in flags]
        self._accept(int(sender), int(step), StepMessage(is_used, gradients, problem))
        return []

    def _accept(self, sender: int, step: int, message: StepMessage) -> None:
        """Apply a message's gradients, or keep them until all ranks' gradients have arrived."""
        if self._staleness is None:
            self._mailbox.put(step, None, sender, message)
            return
        for table, is_used, gradient in zip(self._tables, message.is_used, message.gradients, strict=True):
            if is_used:
                table.apply([gradient])
