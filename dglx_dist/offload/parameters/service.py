"""A parameter server on a rank: answers workers, exchanges sums with the other servers, tells of updates."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.cluster.ledger import WORKER
from dglx_dist.cluster.rpc import Rpc
from dglx_dist.cluster.timeline import PARAMETER_SERVER, Timeline
from dglx_dist.cluster.wire import payload_bytes
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.offload.parameters import ops
from dglx_dist.offload.parameters.server import ParameterServer
from dglx_dist.offload.tasks import Direction, TaskKey
from dglx_dist.records import Array

log = logging.getLogger(__name__)

_POLL_S, _PROBE_S, _LAST_WORDS_S, _ENDS_WITHIN_S = 1.0, 5.0, 2.0, 5.0
_MAX_REASON = 1000


@dataclass(frozen=True, kw_only=True)
class Places:
    """Which ranks play which part; equal on all ranks."""

    parameter_servers: tuple[int, ...]
    """(P,) rank of each parameter server."""
    graph_servers: tuple[int, ...]
    """Ranks that are told of updates."""

    def describe(self, server: int) -> str:
        """Name a parameter server."""
        return f"parameter server {server} on rank {self.parameter_servers[server]}"


@final
class ParameterService:
    """Serves ``server`` from now until :meth:`close`. A thread of its own makes the updates.

    Every rank makes its service and client before any of them calls, and closes them when none calls any
    more: put a barrier after the first and before the second.

    Args:
        rpc: This rank's calls.
        server: What is served.
        places: The others.
        timeout_s: How long the sums of another server may take after those of this one; None: the session's.
        timeline: Where updates are noted.
        run: Number of the run in its session; no task of another one is answered.
    """

    def __init__(
        self,
        rpc: Rpc,
        server: ParameterServer,
        places: Places,
        timeout_s: float | None = None,
        timeline: Timeline | None = None,
        run: int = 0,
    ) -> None:
        self.server, self._timeline, self._number = server, timeline, run
        self._rpc, self._places = rpc, places
        self._timeout_s = rpc.timeout_s if timeout_s is None else timeout_s
        self._failure = ""
        self._changed, self._closing = threading.Event(), threading.Event()
        self._handlers = {
            ops.WEIGHTS: self._give_worker,
            ops.WEIGHTS_FOR_RANK: self._give,
            ops.GRADIENTS: self._take_from_worker,
            ops.GRADIENTS_OF_RANK: self._take,
            ops.SUMS: self._take_sums,
            ops.MISSING: self._tell_missing,
            ops.LATEST: self._give_latest,
            ops.STATE: self._give_state,
        }
        for op, handler in self._handlers.items():
            rpc.register(op, handler, for_visitors=op in ops.FOR_WORKERS)
        self._thread = threading.Thread(target=self._run, name="dglx-parameters", daemon=True)
        self._thread.start()

    def raise_if_stopped(self) -> None:
        """Raise PeerError if an update went wrong: no other will be made."""
        if self._failure:
            raise PeerError(self._failure)

    def close(self) -> None:
        """Stop serving; may be called twice. Waits some seconds at most, for an update under way."""
        self._closing.set()
        self._changed.set()
        # It may wait for a rank that is dead; its calls end with the session.
        self._thread.join(_ENDS_WITHIN_S)
        for op in self._handlers:
            self._rpc.unregister(op)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._changed.wait()
                self._changed.clear()
                while not self._closing.is_set() and (ready := self.server.own_sums()) is not None:
                    with (
                        self._timeline.span("WU", PARAMETER_SERVER, ready[0])
                        if self._timeline
                        else nullcontext()
                    ):
                        self._update(*ready)
        except Exception as error:  # noqa: BLE001 - whoever waits for an update must hear of it
            # Also while closing: this rank may end because of the same, and the others must hear the cause.
            self._stop(error)

    def _update(self, epoch: int, sums: Array) -> None:
        name = ops.pair_name(epoch, self.server.index)
        sent = [
            self._rpc.submit(rank, ops.SUMS, name, [sums], phase=ops.BETWEEN)
            for index, rank in enumerate(self._places.parameter_servers)
            if index != self.server.index
        ]
        for pending in sent:
            pending.result(self._timeout_s)
        self._wait_for_sums(epoch)
        updates = self.server.advance()
        if updates is None:  # closing
            return
        name = ops.pair_name(updates, self.server.index)
        told = [
            self._rpc.submit(rank, ops.UPDATED, name, [], phase=ops.CONTROL)
            for rank in self._places.graph_servers
        ]
        for pending in told:
            pending.result(self._timeout_s)

    def _wait_for_sums(self, epoch: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (missing := self.server.servers_missing()) and not self._closing.is_set():
            if not self._changed.wait(min(_POLL_S, self._timeout_s)):
                raise_for_silent(
                    self._rpc, self._places, missing, f"its sums of epoch {epoch} are waited for"
                )
            self._changed.clear()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{self._places.describe(missing[0])} sent no sums of epoch {epoch} within "
                    f"{self._timeout_s:g} s; {what_misses(self._rpc, self._places, missing)}; look at the "
                    "workers, or raise timeout_s (DGLX_TIMEOUT)"
                )

    def _stop(self, error: Exception) -> None:
        index = self.server.index
        self._failure = f"{self._places.describe(index)} stopped: {type(error).__name__}: {error}"[
            :_MAX_REASON
        ]
        log.error("%s", self._failure)
        told = []
        for rank in self._places.graph_servers:
            with contextlib.suppress(DglxError):
                told.append(self._rpc.submit(rank, ops.STOPPED, self._failure, [], phase=ops.CONTROL))
        # The time counts from when they were asked, so for all of them together.
        for pending in told:
            with contextlib.suppress(DglxError):
                pending.result(_LAST_WORDS_S)

    def _key_of(self, name: str) -> TaskKey:
        self.raise_if_stopped()
        key = TaskKey.parse(name)
        key.check_run(self._number)
        return key

    def _give(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        key = self._key_of(name)
        return self.server.weights(key.interval, key.epoch, key.step)

    def _give_worker(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        answer = self._give(name, arrays)
        self._rpc.count(ops.DOWN, TaskKey.parse(name).step, None, WORKER, payload_bytes(answer))
        return answer

    def _take(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key = self._key_of(name)
        if key.direction is Direction.FORWARD:
            raise ConfigError(f"task {name} goes forward and has no gradients")
        if self.server.gradients(key.interval, key.epoch, key.step, arrays):
            self._changed.set()
        return []

    def _take_from_worker(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        answer = self._take(name, arrays)
        self._rpc.count(ops.UP, TaskKey.parse(name).step, WORKER, None, payload_bytes(arrays))
        return answer

    def _take_sums(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        epoch, server = ops.parse_pair(name)
        if len(arrays) != 1:
            raise ConfigError(f"sums {name} came as {len(arrays)} arrays, not as one")
        self.server.receive_sums(server, epoch, arrays[0])
        self._changed.set()
        return []

    def _tell_missing(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        text = self._failure or self.server.missing()
        return [np.frombuffer(text[:_MAX_REASON].encode(), np.uint8)]

    def _give_latest(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        return [np.concatenate([weight.reshape(-1) for weight in self.server.latest()])]

    def _give_state(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        return ops.pack_state(self.server.state)


def raise_for_silent(rpc: Rpc, places: Places, servers: Sequence[int], why: str) -> None:
    """Raise PeerError if ranks of ``servers`` do not answer, naming all; asks them at once, for seconds."""
    others = {places.parameter_servers[server]: server for server in servers}
    silent = rpc.silent([rank for rank in others if rank != rpc.rank], _PROBE_S)
    if silent:
        # Who ended because of another's death is silent as well: the first cause is among them.
        names = ", ".join(places.describe(others[rank]) for rank in silent)
        raise PeerError(f"no answer of {names} while {why}: probably dead; look at the output there")


def what_misses(rpc: Rpc, places: Places, servers: Sequence[int]) -> str:
    """Ask ``servers`` what their next updates wait for."""
    answers = []
    for server in servers:
        try:
            asked = rpc.submit(places.parameter_servers[server], ops.MISSING, "", [], phase=ops.CONTROL)
            (told,) = asked.result(_PROBE_S)
            lacks = f"waits for {told.tobytes().decode()}" if told.size else "waits for nothing of its own"
        except DglxError as error:
            lacks = f"says nothing ({error})"
        answers.append(f"{places.describe(server)} {lacks}")
    return "; ".join(answers)
