"""RPC service and client of parameter servers: weights, gradients, sums between servers, update notices."""

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from dglx_dist.comm.ledger import CONTROL, WORKER
from dglx_dist.comm.rpc import Handler, Rpc
from dglx_dist.comm.trace import PARAMETER_SERVER, Timeline
from dglx_dist.comm.wire import payload_bytes
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.parameter_server import ParameterPlan, ParameterServer
from dglx_dist.strategies.serverless.program import DTYPES
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey
from dglx_dist.strategies.serverless.worker import GRADIENTS, WEIGHTS

# Variants of WEIGHTS and GRADIENTS for ranks that run a task themselves. The caller counts the bytes.
WEIGHTS_FOR_RANK = "lambda.weights_for_rank"
GRADIENTS_OF_RANK = "lambda.gradients_of_rank"
SUMS = "lambda.sums"
"""Called by other servers; name: "epoch/server"; one vector (|theta|,)."""
UPDATED, STOPPED = "lambda.updated", "lambda.stopped"
"""Sent to graph servers; name: "updates/server", or the reason."""
# Ranks ask for the missing inputs of the next update, the latest weights, and the state of the update.
MISSING = "lambda.missing"
LATEST = "lambda.latest"
STATE = "lambda.state"

# Ledger phases.
DOWN = "weights_down"
UP = "weights_up"
BETWEEN = "parameter_sums"
READ = "weights_read"

_PAIR = re.compile(r"(0|[1-9][0-9]{0,17})/(0|[1-9][0-9]{0,5})")
log = logging.getLogger(__name__)
_POLL_S = 1.0
_PROBE_S = 5.0
_NOTIFY_S = 2.0
_JOIN_TIMEOUT_S = 5.0
_MAX_REASON = 1000


def pair_name(number: int, server: int) -> str:
    """Return the name of a number, such as an epoch, and the server that sends it."""
    return f"{number}/{server}"


def parse_pair(name: str) -> tuple[int, int]:
    """Read :func:`pair_name`. Raises ConfigError if it is invalid."""
    match = _PAIR.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name[:80]!r} names no number and server; write it like 3/1")
    return int(match[1]), int(match[2])


def pack_state(state: Mapping[str, Array]) -> list[Array]:
    """Return a JSON table of path, dtype and shape, and all values in one buffer, both as uint8."""
    table = [[path, value.dtype.name, list(value.shape)] for path, value in state.items()]
    numbers = b"".join(np.ascontiguousarray(value).tobytes() for value in state.values())
    return [np.frombuffer(json.dumps(table).encode(), np.uint8), np.frombuffer(numbers, np.uint8)]


def unpack_state(plan: ParameterPlan, packed: Sequence[Array]) -> dict[str, Array]:
    """Read :func:`pack_state` into new arrays.

    Raises ConfigError if it does not fit the weights of ``plan``.
    """
    state: dict[str, Array] = {}
    begin = 0
    try:
        table, numbers = (array.tobytes() for array in packed)
        for path, dtype, shape in json.loads(table):
            name = path.rpartition("/")[0]
            if dtype not in DTYPES or name not in plan.shapes or tuple(shape) not in ((), plan.shapes[name]):
                raise ValueError(f"{path[:80]!r}, {dtype} of shape {shape}, belongs to no weight here")
            values = np.frombuffer(numbers, dtype, math.prod(shape), begin)
            state[path] = values.reshape(shape).copy()
            begin += values.nbytes
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the optimizer's state cannot be read: {error}; run the same version everywhere"
        ) from None

    return state


def bytes_of_read(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Return the bytes of :meth:`ParameterClient.latest` and ``state``, once Adam has made a step."""
    weights = {name: np.empty(shape, dtype) for name, shape in shapes.items()}
    moments = {f"{name}/{key}": value for name, value in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    steps = {f"{name}/step": np.empty((), np.float32) for name in weights}
    return payload_bytes([*weights.values(), *pack_state({**moments, **steps})])


def describe(server: int) -> str:
    return f"parameter server {server} on rank {server}"


@final
class ParameterService:
    """Serves ``server`` until :meth:`close`; a thread makes the updates.

    Put a barrier between the creation of all services and clients and the first call, and between the last
    call and :meth:`close`. Parameter server r is rank r.

    Args:
        run: Number of the run in its session; tasks of other runs are rejected.
    """

    def __init__(
        self, rpc: Rpc, server: ParameterServer, num_ranks: int, timeline: Timeline, run: int = 0
    ) -> None:
        self.server = server
        self._timeline = timeline
        self._number = run
        self._rpc = rpc
        self._ranks = range(num_ranks)
        self._timeout_s = rpc.timeout_s
        self._failure = ""
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._handlers: dict[str, Handler] = {
            WEIGHTS: self._give_worker,
            WEIGHTS_FOR_RANK: self._give,
            GRADIENTS: self._take_from_worker,
            GRADIENTS_OF_RANK: self._take,
            SUMS: self._take_sums,
            MISSING: self._give_missing,
            LATEST: lambda _name, _arrays: [np.concatenate([array.reshape(-1) for array in server.latest()])],
            STATE: lambda _name, _arrays: pack_state(server.state),
        }
        for op, handler in self._handlers.items():
            rpc.register(op, handler, for_clients=op in (WEIGHTS, GRADIENTS))
        self._thread = threading.Thread(target=self._run, name="dglx-parameters", daemon=True)
        self._thread.start()

    def raise_if_stopped(self) -> None:
        """Raise PeerError if an update failed: no further update will be made."""
        if self._failure:
            raise PeerError(self._failure)

    def close(self) -> None:
        """Stop serving; may be called twice. Waits up to 5 s for a running update."""
        self._closing.set()
        self._changed.set()
        # The thread may wait for a dead rank; then its calls end with the session.
        self._thread.join(_JOIN_TIMEOUT_S)
        for op in self._handlers:
            self._rpc.unregister(op)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._changed.wait()
                self._changed.clear()
                while not self._closing.is_set() and (ready := self.server.own_sums()) is not None:
                    with self._timeline.span("WU", PARAMETER_SERVER, ready[0]):
                        self._update(*ready)
        except Exception as error:  # noqa: BLE001 - reported to all who wait for an update
            # Also while closing: this rank may be ending for the same reason, and others need the cause.
            self._stop(error)

    def _update(self, epoch: int, sums: Array) -> None:
        index = self.server.index
        other_servers = {*range(self.server.plan.num_servers)} - {self.server.index}
        self._rpc.call_all(other_servers, SUMS, pair_name(epoch, index), [sums], phase=BETWEEN)
        self._wait_for_sums(epoch)
        updates = self.server.advance()
        if updates is not None:  # else it is closing
            self._rpc.call_all(self._ranks, UPDATED, pair_name(updates, index), [], phase=CONTROL)

    def _wait_for_sums(self, epoch: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (missing := self.server.servers_missing()) and not self._closing.is_set():
            if not self._changed.wait(min(_POLL_S, self._timeout_s)):
                raise_for_silent(self._rpc, missing, f"waiting for its sums of epoch {epoch}")
            self._changed.clear()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{describe(missing[0])} sent no sums of epoch {epoch} within "
                    f"{self._timeout_s:g} s; {what_misses(self._rpc, missing)}; check the "
                    "workers, or raise timeout_s (DGLX_TIMEOUT)"
                )

    def _stop(self, error: Exception) -> None:
        reason = f"{describe(self.server.index)} stopped: {type(error).__name__}: {error}"
        self._failure = reason[:_MAX_REASON]
        log.error("%s", self._failure)
        self._rpc.ask(self._ranks, STOPPED, self._failure, [], _NOTIFY_S, phase=CONTROL)

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
        self._rpc.ledger.add(DOWN, TaskKey.parse(name).step, self._rpc.rank, WORKER, payload_bytes(answer))
        return answer

    def _take(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key = self._key_of(name)
        if key.direction is Direction.FORWARD:
            raise ConfigError(f"task {name} goes forward and has no gradients")
        if self.server.gradients(key.interval, key.epoch, key.step, arrays):
            self._changed.set()
        return []

    def _take_from_worker(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        # First: these gradients may end the epoch, and with it what is counted as the epoch's.
        self._rpc.ledger.add(UP, TaskKey.parse(name).step, WORKER, self._rpc.rank, payload_bytes(arrays))
        return self._take(name, arrays)

    def _take_sums(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        epoch, server = parse_pair(name)
        if len(arrays) != 1:
            raise ConfigError(f"sums {name} have {len(arrays)} arrays instead of one")
        self.server.receive_sums(server, epoch, arrays[0])
        self._changed.set()
        return []

    def _give_missing(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        text = self._failure or self.server.missing()
        return [np.frombuffer(text[:_MAX_REASON].encode(), np.uint8)]


def raise_for_silent(rpc: Rpc, servers: Sequence[int], why: str) -> None:
    """Raise PeerError that names all of ``servers`` that do not answer a probe within seconds."""
    silent = rpc.find_silent([server for server in servers if server != rpc.rank], _PROBE_S)
    if silent:
        # Ranks that ended because of another's death are silent as well; the first cause is among them.
        names = ", ".join(map(describe, silent))
        raise PeerError(f"no answer of {names} while {why}: probably dead; check its output")


def what_misses(rpc: Rpc, servers: Sequence[int]) -> str:
    """Return a text that says what the next update of each of ``servers`` waits for."""
    answers = []
    for server in servers:
        try:
            (text,) = rpc.submit(server, MISSING, "", [], phase=CONTROL).result(_PROBE_S)
            state = f"waits for {text.tobytes().decode()}" if text.size else "waits for nothing of its own"
        except DglxError as error:
            state = f"does not answer ({error})"
        answers.append(f"{describe(server)} {state}")
    return "; ".join(answers)


@final
class ParameterClient:
    """A rank's connection to all parameter servers; receives notices until :meth:`close`. Thread-safe.

    Args:
        on_update: Called with the number of updates that every server has made when it grows, and once when
            a server stops; on any thread; must return quickly.
    """

    def __init__(self, rpc: Rpc, plan: ParameterPlan, on_update: Callable[[int], None]) -> None:
        self._rpc = rpc
        self._plan = plan
        self._on_update = on_update
        self._updates = [plan.first_epoch] * plan.num_servers
        self._failure = ""
        self._lock = threading.Lock()
        rpc.register(UPDATED, self._take_update)
        rpc.register(STOPPED, self._take_stop)

    def raise_if_stopped(self) -> None:
        """Raise PeerError if a parameter server has reported that it stopped."""
        if self._failure:
            raise PeerError(self._failure)

    def server_of(self, interval: int) -> int:
        return int(self._plan.server_of_interval[interval])

    def weights(self, key: TaskKey) -> list[Array]:
        """Fetch the weights of a task that this rank runs itself; PeerError or RemoteError on failure."""
        rank = self.server_of(key.interval)
        return self._rpc.call(rank, WEIGHTS_FOR_RANK, str(key), [], phase=DOWN, layer=key.step)

    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> list[Array]:
        """Send gradients, which must not change afterwards. Errors as in :meth:`weights`."""
        rank = self.server_of(key.interval)
        return self._rpc.call(rank, GRADIENTS_OF_RANK, str(key), arrays, phase=UP, layer=key.step)

    def latest(self) -> dict[str, Array]:
        """Fetch the latest weights by name; all servers have the same while nothing is in flight."""
        (vector,) = self._rpc.call(self._nearest(), LATEST, "", [], phase=READ)
        if vector.shape != (self._plan.size,) or vector.dtype != self._plan.program.dtype:
            raise ConfigError(
                f"the latest weights, {vector.dtype} of shape {vector.shape}, belong to another model"
            )
        return dict(zip(self._plan.shapes, self._plan.unflatten(vector), strict=True))

    def state(self) -> dict[str, Array]:
        """Fetch the state of the update by "<weight>/<key>"; see :meth:`latest`."""
        packed = self._rpc.call(self._nearest(), STATE, "", [], phase=READ)
        return unpack_state(self._plan, packed)

    def close(self) -> None:
        self._rpc.unregister(UPDATED)
        self._rpc.unregister(STOPPED)

    def _nearest(self) -> int:
        # A rank that is a parameter server asks itself.
        return self._rpc.rank % self._plan.num_servers

    def _take_update(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        updates, server = parse_pair(name)
        if server >= len(self._updates):
            raise ConfigError(f"there is no parameter server {server} of {len(self._updates)}")
        with self._lock:
            applied_before = min(self._updates)
            self._updates[server] = max(self._updates[server], updates)
            applied_now = min(self._updates)

        if applied_now > applied_before:
            self._on_update(applied_now)
        return []

    def _take_stop(self, reason: str, _arrays: Sequence[Array]) -> list[Array]:
        with self._lock:
            self._failure = self._failure or reason
            updates = min(self._updates)
        self._on_update(updates)
        return []
