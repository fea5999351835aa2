"""One parameter server: stashes, sums and updates; who carries the messages is not its affair."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.parameters.plan import ParameterPlan
from dglx_dist.offload.parameters.sums import EpochSums
from dglx_dist.offload.parameters.updates import Update
from dglx_dist.offload.parameters.versions import Versions
from dglx_dist.records import Array


@final
class ParameterServer:
    """Keeps the latest weights, and what intervals that report here stashed (section 5.1). Thread-safe.

    Every server has all weights and makes every update; an epoch's update is made from the sums of all
    servers, added in the servers' order, so that the weights stay equal to the last bit on all of them.

    Args:
        plan: What all servers agree on.
        index: Which of them this is.
        weights: One per name of the plan, as its first epoch begins; must not be changed afterwards.
        update: How weights change; this server's own.

    Raises:
        ConfigError: the weights are not the plan's.
    """

    def __init__(self, plan: ParameterPlan, index: int, weights: Sequence[Array], update: Update) -> None:
        plan.check_weights(list(plan.shapes), weights, "the first weights")
        if update.names != tuple(plan.shapes):
            raise ConfigError(
                f"the update is of {', '.join(update.names)}, the plan of {', '.join(plan.shapes)}"
            )
        self.plan, self.index = plan, index
        self._update, self._lock = update, threading.Lock()
        self._versions = Versions(weights, plan.first_epoch, plan.staleness)
        self._intervals = plan.intervals_of(index)
        self._reporting = plan.reporting
        self._sums: dict[int, EpochSums] = {}
        self._received: dict[int, dict[int, Array]] = {}
        self._digests: dict[int, dict[tuple[int, int], bytes]] = {}

    @property
    def updates(self) -> int:
        """Updates made, those before the first epoch included; also the number of the latest version."""
        with self._lock:
            return self._versions.latest

    @property
    def alive(self) -> tuple[int, ...]:
        """Versions that are kept, ascending."""
        with self._lock:
            return self._versions.alive

    @property
    def stashes(self) -> dict[int, tuple[int, int]]:
        """(epoch, version) that each interval of this server stashed last."""
        with self._lock:
            return self._versions.stashes

    @property
    def state(self) -> dict[str, Array]:
        """What the update keeps, by "<weight>/<key>"; read while nothing is in flight."""
        return self._update.state

    def latest(self) -> tuple[Array, ...]:
        """Return the latest weights, read-only, in the plan's order."""
        with self._lock:
            return self._versions.newest()

    def weights(self, interval: int, epoch: int, step: int) -> list[Array]:
        """Return the weights of ``step`` as ``interval`` sees them during all of ``epoch``.

        The first call of an epoch stashes the latest version.

        Raises:
            ConfigError: interval or step are not of this server, or the epoch has not begun or is over.
        """
        self._check_key(interval, epoch, step)
        with self._lock:
            self._check_begun(interval, epoch)
            held = self._versions.epoch_of(interval)
            if epoch < held or (epoch < self._versions.latest and epoch != held):
                raise ConfigError(
                    f"weights of epoch {epoch} for interval {interval} are gone after "
                    f"{self._versions.latest} updates; the call comes from a worker that was given up"
                )
            weights = self._versions.stashed(interval, epoch)
        position = {name: at for at, name in enumerate(self.plan.shapes)}
        return [weights[position[name]] for name in self.plan.steps[step]]

    def gradients(self, interval: int, epoch: int, step: int, arrays: Sequence[Array]) -> bool:
        """Take the gradients of ``step``'s weights; return False if they came before and are dropped.

        The arrays are kept and must not be changed afterwards.

        Raises:
            ConfigError: the key is not of this server, the epoch has not begun, the arrays are not like the
                weights, or the key came before with other bits.
        """
        what = f"gradients of interval {interval}, epoch {epoch}, step {step}"
        self._check_key(interval, epoch, step)
        self.plan.check_weights(self.plan.steps[step], arrays, what)
        if step not in self._reporting:
            return True
        digest = _digest(arrays)
        with self._lock:
            self._check_begun(interval, epoch)
            came = self._digests.setdefault(epoch, {}) if self._is_recent(epoch) else {}
            if (interval, step) in came or epoch < self._versions.latest:
                if came.get((interval, step), digest) != digest:
                    raise ConfigError(
                        f"{what} came twice with different bits; a stage must compute the same from the "
                        "same: does one draw at random, or differ between workers?"
                    )
                return False
            came[interval, step] = digest
            self._sums_of(epoch).add(step, interval, arrays)
        return True

    def own_sums(self) -> tuple[int, Array] | None:
        """Return (epoch, (|theta|,) sums) of the epoch that is updated next, None while gradients miss.

        The vector must not be changed.
        """
        with self._lock:
            epoch = self._versions.latest
            if epoch not in self._sums or not self._sums[epoch].is_complete:
                return None
            came = self._received.setdefault(epoch, {})
            if self.index not in came:
                came[self.index] = self._sums[epoch].total(self.plan.shapes)
            return epoch, came[self.index]

    def receive_sums(self, server: int, epoch: int, vector: Array) -> None:
        """Take the sums of another server. Once more the same epoch is no harm.

        Raises:
            ConfigError: there is no such server, the epoch cannot be complete, or they are not the plan's.
        """
        if not 0 <= server < self.plan.num_servers or server == self.index:
            raise ConfigError(f"sums of server {server} came to {self.index} of {self.plan.num_servers}")
        if vector.shape != (self.plan.size,) or vector.dtype != self.plan.dtype:
            raise ConfigError(
                f"sums of server {server} are {vector.dtype} of shape {vector.shape}, not {self.plan.dtype} "
                f"of shape ({self.plan.size},)"
            )
        with self._lock:
            if epoch > self._versions.latest + self.plan.staleness + 1:
                raise ConfigError(
                    f"sums of epoch {epoch} came from server {server} after {self._versions.latest} updates"
                )
            if epoch >= self._versions.latest:
                self._received.setdefault(epoch, {}).setdefault(server, vector)

    def servers_missing(self) -> list[int]:
        """Return the servers whose sums of the next update have not come, this one included."""
        with self._lock:
            came = self._received.get(self._versions.latest, {})
            return [server for server in range(self.plan.num_servers) if server not in came]

    def advance(self) -> int | None:
        """Make the next update if all sums are there; return the number of updates, or None.

        Called by one thread; the others may pull and push meanwhile.
        """
        with self._lock:
            epoch = self._versions.latest
            came = self._received.get(epoch, {})
            if len(came) < self.plan.num_servers:
                return None
            weights = self._versions.newest()
        total = came[0].copy()
        for server in range(1, self.plan.num_servers):
            total += came[server]
        after = self._update.apply(weights, self.plan.unflatten(total))
        with self._lock:
            self._versions.add(after)
            del self._received[epoch], self._sums[epoch]
            self._digests = {one: came for one, came in self._digests.items() if self._is_recent(one)}
            return self._versions.latest

    def missing(self) -> str:
        """Say what the next update waits for; "" when for nothing of this server."""
        with self._lock:
            epoch = self._versions.latest
            lacking = self._sums_of(epoch).missing()
        return "; ".join(
            f"epoch {epoch}, step {step}: gradients of intervals {_some(intervals)}"
            for step, intervals in sorted(lacking.items())
        )

    def drain(self) -> None:
        """Forget all stashes; every interval must have ended the same epoch.

        Raises:
            ConfigError: gradients of an epoch that is not updated yet have come.
        """
        with self._lock:
            begun = [epoch for epoch, sums in self._sums.items() if not sums.is_empty]
            if begun or self._received:
                raise ConfigError(
                    f"epoch {min([*begun, *self._received])} is under way; wait for its update first"
                )
            self._versions.release_all()

    def _is_recent(self, epoch: int) -> bool:
        """Whether bits of duplicates are still compared: in open epochs and the last one that was updated."""
        return epoch >= self._versions.latest - 1

    def _sums_of(self, epoch: int) -> EpochSums:
        if epoch not in self._sums:
            self._sums[epoch] = EpochSums(self._reporting, self._intervals)
        return self._sums[epoch]

    def _check_key(self, interval: int, epoch: int, step: int) -> None:
        if step not in self.plan.steps:
            raise ConfigError(f"step {step} has no weights; steps that have: {sorted(self.plan.steps)}")
        if not 0 <= interval < self.plan.num_intervals or epoch < 0:
            raise ConfigError(f"there is no interval {interval} of {self.plan.num_intervals}, epoch {epoch}")
        server = int(self.plan.server_of_interval[interval])
        if server != self.index:
            raise ConfigError(f"interval {interval} is of parameter server {server}, not of {self.index}")

    def _check_begun(self, interval: int, epoch: int) -> None:
        if epoch > self._versions.latest + self.plan.staleness:
            raise ConfigError(
                f"interval {interval} is in epoch {epoch} after {self._versions.latest} updates, which is "
                f"beyond staleness {self.plan.staleness}"
            )


def exchange(servers: Sequence[ParameterServer]) -> int | None:
    """Let the servers of one process exchange sums and update once; None while gradients miss.

    Args:
        servers: All of the plan, in order.
    """
    ready = [server.own_sums() for server in servers]
    found = [one for one in ready if one is not None]
    if len(found) < len(servers):
        return None
    for server in servers:
        for other, (epoch, vector) in zip(servers, found, strict=True):
            if other is not server:
                server.receive_sums(other.index, epoch, vector)
    updates = [server.advance() for server in servers]
    return updates[0]


def _digest(arrays: Sequence[Array]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.digest()


def _some(intervals: Sequence[int], limit: int = 8) -> str:
    text = ", ".join(str(interval) for interval in intervals[:limit])
    return text if len(intervals) <= limit else f"{text} and {len(intervals) - limit} more"
