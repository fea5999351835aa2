"""Parameter servers without communication: plans, updates, stashes and sums."""

import hashlib
import math
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch

from dglx_dist.errors import ConfigError, shorten_list
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.program import Program


def assign(sizes: Sequence[int] | Array, num_servers: int) -> Array:
    """Assign each interval to the least loaded server, largest intervals first (Dorylus, section 5.1).

    The result depends only on the arguments, so the order in which gradients are summed never depends on
    timing. Every server gets an interval. Raises ConfigError if there are more servers than intervals.

    Args:
        sizes: (K,) row counts by interval, possibly 0.

    Returns:
        (K,) int64 server for each interval.
    """
    if not 1 <= num_servers <= len(sizes):
        raise ConfigError(
            f"parameter_servers={num_servers} with {len(sizes)} intervals; give 1 to "
            f"{len(sizes)}, or more intervals"
        )

    loads = [0] * num_servers
    server_of_interval = np.zeros(len(sizes), dtype=np.int64)
    for interval in sorted(range(len(sizes)), key=lambda interval: (-int(sizes[interval]), interval)):
        server = loads.index(min(loads))
        # The 1 stands for a task's fixed cost, and spreads empty intervals over the servers.
        loads[server] += int(sizes[interval]) + 1
        server_of_interval[interval] = server
    return server_of_interval


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPlan:
    """A program's weights and each interval's server. All ranks have equal plans."""

    program: Program
    server_of_interval: Array
    """(K,) int64 server for each interval, see :func:`assign`."""
    staleness: int = 0
    """The bound S. An interval may begin epoch e after e - S updates."""
    first_epoch: int = 0
    """Next epoch, which is above 0 when training resumes from a checkpoint."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight shapes by name, in the order in which weights are stored, summed and sent."""
        return self.program.weight_shapes

    @cached_property
    def steps(self) -> dict[int, list[str]]:
        """Weight names for each step that has any. Steps may share a weight."""
        return {index: list(self.program.weights_of(index)) for index in self.program.weighted_steps}

    @property
    def num_servers(self) -> int:
        return int(self.server_of_interval.max()) + 1

    @property
    def num_intervals(self) -> int:
        """K, the number of intervals on all graph servers."""
        return len(self.server_of_interval)

    @cached_property
    def size(self) -> int:
        """Number of elements in all weights, |theta|."""
        return sum(map(math.prod, self.shapes.values()))

    def intervals_of(self, server: int) -> list[int]:
        intervals: list[int] = np.flatnonzero(self.server_of_interval == server).tolist()
        return intervals

    def unflatten(self, vector: Array) -> list[Array]:
        """Split a vector with |theta| elements into one view per weight."""
        views = []
        begin = 0
        for shape in self.shapes.values():
            end = begin + math.prod(shape)
            views.append(vector[begin:end].reshape(shape))
            begin = end
        return views

    def check_weights(self, names: Collection[str], arrays: Sequence[Array], subject: str) -> None:
        """Raise ConfigError if ``arrays`` do not match the shapes and dtype of the weights ``names``."""
        if len(arrays) != len(names):
            raise ConfigError(
                f"{subject}: {len(arrays)} arrays for {len(names)} weights ({', '.join(names)})"
            )
        for name, array in zip(names, arrays, strict=True):
            if array.shape != self.shapes[name] or array.dtype != self.program.dtype:
                raise ConfigError(
                    f"{subject}: {name!r} is {array.dtype} of shape {array.shape}, not "
                    f"{self.program.dtype} of shape {self.shapes[name]}"
                )


_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_PLAIN_KERNELS = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
"""Optimizer options that choose torch's kernels and change no formula."""


@final
class Update:
    """A copy of the user's optimizer on the CPU, for a program's weights.

    Args:
        optimizer: An SGD, Adam or AdamW from torch.
        parameters: The model's parameters by name.
        names: All weight names, ordered like the arguments to :meth:`apply`. Weights that the optimizer lacks
            stay unchanged.
        clip_norm: Maximum norm for all gradients together, or None for no clipping.

    Raises:
        ConfigError: the optimizer has another type, or parameters that are not the model's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        names: Sequence[str],
        clip_norm: float | None = None,
    ) -> None:
        if type(optimizer) not in _OPTIMIZERS:
            raise ConfigError(
                f"the parameter servers have no optimizer {type(optimizer).__name__!r}; use "
                "torch.optim.SGD, Adam or AdamW, or another strategy"
            )

        self.names = tuple(names)
        self._clip_norm = clip_norm

        # The weight copies are empty, because each call to apply() sets their values.
        self._weights = {name: torch.nn.Parameter(torch.empty(0, device="cpu")) for name in names}
        copies: dict[torch.Tensor, torch.nn.Parameter] = {}
        for name, parameter in parameters.items():
            # Frozen parameters have no copy. Without a gradient torch does not even decay them.
            if parameter.requires_grad and name in self._weights:
                copies[parameter] = self._weights[name]

        groups = []
        known_parameters = set(parameters.values())
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in known_parameters:
                    raise ConfigError(
                        f"group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                        "that is not one of the model's; make the optimizer from model.parameters()"
                    )
            group_copies = [copies[parameter] for parameter in group["params"] if parameter in copies]
            groups.append({**group, **_PLAIN_KERNELS, "params": group_copies})

        make_optimizer: Any = type(optimizer)
        self._optimizer: torch.optim.Optimizer = make_optimizer(groups)
        for state_parameter, entries in optimizer.state.items():
            if state_parameter in copies:
                self._optimizer.state[copies[state_parameter]] = _copy_tensors(entries)

    @property
    def state(self) -> dict[str, Array]:
        """State for all weights, by "<weight>/<torch's key>"."""
        arrays = {}
        for name, weight in self._weights.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    arrays[f"{name}/{key}"] = value.numpy().copy()
        return arrays

    def apply(
        self, weights: Sequence[Array], gradients: Sequence[Array], rates: Sequence[float] | None = None
    ) -> tuple[Array, ...]:
        """Return the weights after one step, as new read-only arrays.

        Args:
            rates: One learning rate per group. If None, the groups keep their rates.
        """
        groups = self._optimizer.param_groups
        for parameter, weight, gradient in zip(self._weights.values(), weights, gradients, strict=True):
            parameter.data = torch.tensor(weight, device="cpu")
            parameter.grad = torch.as_tensor(gradient, device="cpu")
        if self._clip_norm is not None:
            trained = [parameter for group in groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self._clip_norm)
        if rates is not None:
            for group, rate in zip(groups, rates, strict=False):
                group["lr"] = rate
        self._optimizer.step()

        # Gradients are released, because they take as much memory as the weights.
        new_weights = []
        for parameter in self._weights.values():
            parameter.grad = None
            new_weight = parameter.detach().numpy()
            new_weight.flags.writeable = False
            new_weights.append(new_weight)
        return tuple(new_weights)


def _copy_tensors(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entries``, with tensors copied to the CPU."""
    copies = dict(entries)
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            copies[key] = value.detach().cpu().clone()
    return copies


@final
class _StepSum:
    """Sums one step's gradients, in interval order.

    A gradient that arrives before an earlier interval's gradient is kept until then.
    """

    def __init__(self, intervals: Sequence[int]) -> None:
        self.left = deque(intervals)
        """Intervals that are not in the sum yet, in ascending order."""
        self.total: list[Array] = []
        self._early_gradients: dict[int, Sequence[Array]] = {}

    @property
    def missing(self) -> list[int]:
        return [interval for interval in self.left if interval not in self._early_gradients]

    def add(self, interval: int, gradients: Sequence[Array]) -> None:
        self._early_gradients[interval] = gradients
        while self.left and self.left[0] in self._early_gradients:
            next_gradients = self._early_gradients.pop(self.left.popleft())
            if not self.total:
                self.total = [np.array(gradient) for gradient in next_gradients]
                continue
            for total, gradient in zip(self.total, next_gradients, strict=True):
                total += gradient


@final
class ParameterServer:
    """Stores the latest weights and its intervals' stashes (Dorylus, section 5.1). Thread-safe.

    Every server has all weights and makes every update. An update uses the sums from all servers, added in
    server order, so the weights are bit-identical on all servers. Callers' arrays are kept, not copied.

    Version v has the weights after v updates. An interval keeps its newest epoch's version until it begins
    the next epoch. If a worker dies after its last gradient, its replacement asks for these weights again.
    With staleness S an interval begins epoch e with version e - S or later, and an update needs all intervals
    to have begun its epoch, so at most S + 2 versions are stored.
    """

    def __init__(self, plan: ParameterPlan, index: int, weights: Sequence[Array], update: Update) -> None:
        plan.check_weights(plan.shapes, weights, "the first weights")
        self.plan = plan
        self.index = index
        self.updates = plan.first_epoch
        """Number of updates so far. It is also the latest version and the next epoch to be summed."""
        self._update = update
        self._lock = threading.Lock()
        self.rates: dict[int, Sequence[float]] = {}
        """Learning rates for the groups by epoch, for epochs whose rates differ from the update's."""
        self._versions = {self.updates: tuple(weights)}
        self._stash_of: dict[int, tuple[int, int]] = {}
        """Epoch and version that each interval uses."""
        self._intervals = plan.intervals_of(index)
        self._position = {name: index for index, name in enumerate(plan.shapes)}
        self._sums: dict[int, dict[int, _StepSum]] = {}
        """Sums over this server's intervals, by epoch and step."""
        self._received: dict[int, dict[int, Array]] = {}
        """Complete sums by epoch and server."""
        self._digests: dict[tuple[int, int, int], bytes] = {}
        """Gradient digests by epoch, interval and step, from the last updated epoch on."""

    @property
    def state(self) -> dict[str, Array]:
        """The update's state by "<weight>/<key>". Read it only while nothing is in flight."""
        return self._update.state

    def latest(self) -> tuple[Array, ...]:
        """Return the latest weights, in the plan's order."""
        with self._lock:
            return self._versions[self.updates]

    def weights(self, interval: int, epoch: int, step: int) -> list[Array]:
        """Return the weights for ``step``. An interval's first call in an epoch stashes the latest version.

        Raises ConfigError if the interval may not be in this epoch, or has begun a later one.
        """
        self._check_key(interval, epoch, step)
        with self._lock:
            self._check_begun(interval, epoch)
            stashed_epoch, version = self._stash_of.get(interval, (-1, -1))
            if epoch != stashed_epoch:
                if epoch < max(stashed_epoch, self.updates):
                    raise ConfigError(
                        f"weights of epoch {epoch} for interval {interval} are gone after {self.updates} "
                        "updates; the call comes from a worker that was given up"
                    )
                version = self.updates
                self._stash_of[interval] = epoch, version
            weights = self._versions[version]
        return [weights[self._position[name]] for name in self.plan.steps[step]]

    def gradients(self, interval: int, epoch: int, step: int, arrays: Sequence[Array]) -> bool:
        """Add the gradients for the weights in ``step``. Return False for duplicates, which are dropped.

        Raises ConfigError if the gradients do not fit, or differ from what an earlier attempt sent.
        """
        subject = f"gradients of interval {interval}, epoch {epoch}, step {step}"
        self._check_key(interval, epoch, step)
        self.plan.check_weights(self.plan.steps[step], arrays, subject)
        digest = _digest(arrays)
        key = (epoch, interval, step)
        with self._lock:
            self._check_begun(interval, epoch)
            if self._digests.get(key, digest) != digest:
                raise ConfigError(
                    f"{subject} came twice with different bits: workers compute with different kernels"
                )
            # Digests are kept for few epochs, but sums are complete for all updated epochs.
            if key in self._digests or epoch < self.updates:
                return False

            self._digests[key] = digest
            if epoch not in self._sums:
                self._sums[epoch] = self._make_sums()
            self._sums[epoch][step].add(interval, arrays)
        return True

    def own_sums(self) -> tuple[int, Array] | None:
        """Return the next update's epoch and (|theta|,) sums, or None if gradients are missing."""
        with self._lock:
            epoch = self.updates
            sums = self._sums.get(epoch)
            if sums is None or any(step_sum.left for step_sum in sums.values()):
                return None
            received = self._received.setdefault(epoch, {})
            if self.index not in received:
                received[self.index] = self._join_sums(sums)
            return epoch, received[self.index]

    def _join_sums(self, sums: Mapping[int, _StepSum]) -> Array:
        """Return the sums for all weights. If several steps use a weight, their gradients are added."""
        totals: dict[str, Array] = {}
        for step, step_sum in sums.items():
            for name, total in zip(self.plan.steps[step], step_sum.total, strict=True):
                totals[name] = totals[name] + total if name in totals else total
        return np.concatenate([totals[name].reshape(-1) for name in self.plan.shapes])

    def receive_sums(self, server: int, epoch: int, vector: Array) -> None:
        """Store another server's sums. Ignore sums that arrive again or for an updated epoch.

        Raises ConfigError if no server sends such sums now.
        """
        plan = self.plan
        if not 0 <= server < plan.num_servers or server == self.index:
            raise ConfigError(f"sums of server {server} came to {self.index} of {plan.num_servers}")
        if vector.shape != (plan.size,) or vector.dtype != plan.program.dtype:
            raise ConfigError(
                f"sums of server {server} are {vector.dtype} of shape {vector.shape}, not "
                f"{plan.program.dtype} of shape ({plan.size},)"
            )

        with self._lock:
            if epoch > self.updates + plan.staleness + 1:
                raise ConfigError(
                    f"sums of epoch {epoch} came from server {server} after {self.updates} updates"
                )
            if epoch >= self.updates:
                self._received.setdefault(epoch, {}).setdefault(server, vector)

    def servers_missing(self) -> list[int]:
        """Return the servers, possibly this one, whose sums for the next update are missing."""
        with self._lock:
            received = self._received.get(self.updates, {})
            return [server for server in range(self.plan.num_servers) if server not in received]

    def advance(self) -> int | None:
        """Make the next update and return the update count, or None if sums are missing.

        Only one thread may call this. Other threads may pull and push meanwhile.
        """
        if self.servers_missing():
            return None
        with self._lock:
            # Versions are dropped before the update, so that at most S + 2 are in memory.
            self._drop_unused_versions()
            epoch = self.updates
            weights = self._versions[epoch]
            received = self._received[epoch]

        # The sums are added in server order, which gives equal bits on all servers.
        total = received[0].copy()
        for server in range(1, self.plan.num_servers):
            total += received[server]
        gradients = self.plan.unflatten(total)
        new_weights = self._update.apply(weights, gradients, self.rates.get(epoch))
        with self._lock:
            self.updates += 1
            self._versions[self.updates] = new_weights
            self._drop_unused_versions()
            del self._received[epoch], self._sums[epoch]
            self._digests = {key: digest for key, digest in self._digests.items() if key[0] >= epoch}
            return self.updates

    def missing(self) -> str:
        """Describe which gradients this server lacks for the next update. Return "" if there are none."""
        with self._lock:
            epoch = self.updates
            sums = self._sums.get(epoch) or self._make_sums()
            texts = []
            for step, step_sum in sums.items():
                if step_sum.missing:
                    intervals = shorten_list(step_sum.missing, 8)
                    texts.append(f"epoch {epoch}, step {step}: gradients of intervals {intervals}")
            return "; ".join(texts)

    def drain(self) -> None:
        """Release all stashes. Raises ConfigError if an epoch is under way."""
        with self._lock:
            if self._sums or self._received:
                raise ConfigError(
                    f"epoch {min([*self._sums, *self._received])} is under way; wait for its update first"
                )
            self._stash_of.clear()
            self._drop_unused_versions()

    def _drop_unused_versions(self) -> None:
        used_versions = {self.updates, *(version for _, version in self._stash_of.values())}
        assert len(used_versions) <= self.plan.staleness + 2, f"{used_versions}, S={self.plan.staleness}"
        self._versions = {version: self._versions[version] for version in sorted(used_versions)}

    def _make_sums(self) -> dict[int, _StepSum]:
        return {step: _StepSum(self._intervals) for step in self.plan.steps}

    def _check_key(self, interval: int, epoch: int, step: int) -> None:
        if step not in self.plan.steps:
            raise ConfigError(f"step {step} has no weights; steps with weights: {list(self.plan.steps)}")
        if not 0 <= interval < self.plan.num_intervals or epoch < 0:
            raise ConfigError(f"there is no interval {interval} of {self.plan.num_intervals}, epoch {epoch}")
        server = int(self.plan.server_of_interval[interval])
        if server != self.index:
            raise ConfigError(f"interval {interval} is of parameter server {server}, not of {self.index}")

    def _check_begun(self, interval: int, epoch: int) -> None:
        if epoch > self.updates + self.plan.staleness:
            raise ConfigError(
                f"interval {interval} is in epoch {epoch} after {self.updates} updates, which "
                f"is beyond staleness {self.plan.staleness}"
            )


def _digest(arrays: Sequence[Array]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.digest()
