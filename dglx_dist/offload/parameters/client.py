"""What a graph server hears from the parameter servers, and asks of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from dglx_dist.cluster.rpc import Rpc
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.offload.parameters import ops
from dglx_dist.offload.parameters.plan import ParameterPlan
from dglx_dist.offload.parameters.service import Places, raise_for_silent, what_misses
from dglx_dist.offload.tasks import TaskKey
from dglx_dist.records import Array

_POLL_S = 1.0


@final
class ParameterClient:
    """Hears of updates from now until :meth:`close`; one per rank. Thread-safe.

    Args:
        rpc: This rank's calls.
        plan: What the servers agree on.
        places: Where they are.
        timeout_s: How long an update may be waited for; None: the session's.
        on_update: Called with the new :attr:`updates` when every server made another update, and once more
            when one stopped; from any thread, and must be quick.
    """

    def __init__(
        self,
        rpc: Rpc,
        plan: ParameterPlan,
        places: Places,
        *,
        timeout_s: float | None = None,
        on_update: Callable[[int], None] | None = None,
    ) -> None:
        self._rpc, self._plan, self._places = rpc, plan, places
        self._timeout_s = rpc.timeout_s if timeout_s is None else timeout_s
        self._on_update = on_update
        self._told = [plan.first_epoch] * plan.num_servers
        self._failure = ""
        self._heard = threading.Condition()
        rpc.register(ops.UPDATED, self._hear_update)
        rpc.register(ops.STOPPED, self._hear_stop)

    @property
    def updates(self) -> int:
        """Updates that every server has made: the least epoch that may be worked on."""
        with self._heard:
            return min(self._told)

    def raise_if_stopped(self) -> None:
        """Raise PeerError if a parameter server said that it stopped."""
        if self._failure:
            raise PeerError(self._failure)

    def wait_for(self, updates: int) -> None:
        """Wait until every server made ``updates`` updates.

        Raises:
            PeerError: a server stopped, is dead, or time is up; it is named, and what it waits for.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            wait_s = min(_POLL_S, max(deadline - time.monotonic(), 0.0))
            with self._heard:
                late = not self._heard.wait_for(lambda: self._failure or min(self._told) >= updates, wait_s)
                behind = [server for server, made in enumerate(self._told) if made < updates]
            self.raise_if_stopped()
            if not behind:
                return
            if late:
                raise_for_silent(self._rpc, self._places, behind, f"update {updates} is waited for")
            if time.monotonic() >= deadline:
                raise PeerError(
                    f"update {updates} was not made within {self._timeout_s:g} s: "
                    f"{what_misses(self._rpc, self._places, behind)}; look at the workers, or raise "
                    "timeout_s (DGLX_TIMEOUT)"
                )

    def rank_of(self, interval: int) -> int:
        """Return the rank whose parameter server answers for ``interval``."""
        return self._places.parameter_servers[int(self._plan.server_of_interval[interval])]

    def weights(self, key: TaskKey) -> list[Array]:
        """Return the weights of a task that this rank does itself; |W_l| numbers come in.

        Raises:
            PeerError: the server is dead or silent.
            RemoteError: it refused; the text says why.
        """
        rank = self.rank_of(key.interval)
        return self._rpc.call(rank, ops.WEIGHTS_FOR_RANK, str(key), [], phase=ops.DOWN, layer=key.step)

    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> None:
        """Hand in the gradients of a task that this rank did itself; the arrays must not change afterwards.

        Raises:
            PeerError: the server is dead or silent.
            RemoteError: it refused; the text says why.
        """
        rank = self.rank_of(key.interval)
        self._rpc.call(rank, ops.GRADIENTS_OF_RANK, str(key), arrays, phase=ops.UP, layer=key.step)

    def latest(self) -> dict[str, Array]:
        """Return the latest weights by name, of the server that is nearest; |theta| numbers come in.

        All servers have the same once :meth:`wait_for` returned and nothing is in flight.
        """
        (vector,) = self._rpc.call(self._nearest(), ops.LATEST, "", [], phase=ops.READ)
        if vector.shape != (self._plan.size,) or vector.dtype != self._plan.dtype:
            raise ConfigError(
                f"the latest weights, {vector.dtype} of shape {vector.shape}, are of another model"
            )
        return dict(zip(self._plan.shapes, self._plan.unflatten(vector), strict=True))

    def state(self) -> dict[str, Array]:
        """Return what the update keeps, by "<weight>/<key>"; see :meth:`latest`."""
        packed = self._rpc.call(self._nearest(), ops.STATE, "", [], phase=ops.READ)
        return ops.unpack_state(self._plan, packed)

    def close(self) -> None:
        """Hear no more."""
        self._rpc.unregister(ops.UPDATED)
        self._rpc.unregister(ops.STOPPED)

    def _nearest(self) -> int:
        ranks = self._places.parameter_servers
        return self._rpc.rank if self._rpc.rank in ranks else ranks[self._rpc.rank % len(ranks)]

    def _hear_update(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        updates, server = ops.parse_pair(name)
        if server >= len(self._told):
            raise ConfigError(f"there is no parameter server {server} of {len(self._told)}")
        with self._heard:
            before = min(self._told)
            self._told[server] = max(self._told[server], updates)
            after = min(self._told)
            self._heard.notify_all()
        if after > before and self._on_update is not None:
            self._on_update(after)
        return []

    def _hear_stop(self, reason: str, _arrays: Sequence[Array]) -> list[Array]:
        with self._heard:
            self._failure = self._failure or reason
            self._heard.notify_all()
        if self._on_update is not None:
            self._on_update(self.updates)
        return []
