"""RPC service and client for parameter servers: weights, gradients, sums between servers, update notices."""

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

# Variants that ranks use in place of WEIGHTS and GRADIENTS when they run a task themselves. The caller counts
# the bytes.
WEIGHTS_FOR_RANK = "lambda.weights_for_rank"
GRADIENTS_OF_RANK = "lambda.gradients_of_rank"
SUMS = "lambda.sums"
"""Operation between servers, with the name "epoch/server" and one vector that has |theta| elements."""
UPDATED, STOPPED = "lambda.updated", "lambda.stopped"
"""Notices to graph servers. Their names are "updates/server" and the reason."""
# Ranks ask which inputs the next update lacks, and for the latest weights and the update's state.
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
_POLL_INTERVAL_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_NOTIFY_TIMEOUT_S = 2.0
_JOIN_TIMEOUT_S = 5.0
_MAX_REASON = 1000


def pair_name(number: int, server: int) -> str:
    """Return a name that combines a number, such as an epoch, with the server that sends it."""
    return f"{number}/{server}"


def parse_pair(name: str) -> tuple[int, int]:
    """Return the number and server in a :func:`pair_name`. Raises ConfigError if ``name`` is invalid."""
    match = _PAIR.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name[:80]!r} names no number and server; write it like 3/1")
    return int(match[1]), int(match[2])


def pack_state(state: Mapping[str, Array]) -> list[Array]:
    """Return a JSON table with path, dtype and shape, and all values in one buffer, both as uint8."""
    table = [[path, value.dtype.name, list(value.shape)] for path, value in state.items()]
    table_bytes = json.dumps(table).encode()
    value_bytes = b"".join(np.ascontiguousarray(value).tobytes() for value in state.values())
    return [np.frombuffer(table_bytes, np.uint8), np.frombuffer(value_bytes, np.uint8)]


def unpack_state(plan: ParameterPlan, packed: Sequence[Array]) -> dict[str, Array]:
    """Return new arrays from what :func:`pack_state` returned.

    Raises ConfigError if the arrays do not fit the weights in ``plan``.
    """
    state: dict[str, Array] = {}
    begin = 0
    try:
        table_bytes, value_bytes = (array.tobytes() for array in packed)
        for path, dtype, shape in json.loads(table_bytes):
            name, _, _ = path.rpartition("/")
            # A state has one number, or one value for each element in its weight.
            fits = name in plan.shapes and tuple(shape) in ((), plan.shapes[name])
            if not fits or dtype not in DTYPES:
                raise ValueError(f"{path[:80]!r}, {dtype} of shape {shape}, belongs to no weight here")
            values = np.frombuffer(value_bytes, dtype, math.prod(shape), begin)
            state[path] = values.reshape(shape).copy()
            begin += values.nbytes
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the optimizer's state cannot be read: {error}; run the same version everywhere"
        ) from None

    return state


def count_parameter_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Count the bytes that parameter servers send to a client for all weights and Adam's state.

    ``shapes`` has the weight shapes by name.
    """
    # Pack arrays with the same shapes, because the packed state's header depends on their names.
    weights = {name: np.empty(shape, dtype) for name, shape in shapes.items()}
    state = {}
    for name, weight in weights.items():
        # Both averages have the weight's shape.
        state[f"{name}/exp_avg"] = weight
        state[f"{name}/exp_avg_sq"] = weight
        state[f"{name}/step"] = np.empty((), np.float32)
    return payload_bytes([*weights.values(), *pack_state(state)])


def describe(server: int) -> str:
    return f"parameter server {server} on rank {server}"


@final
class ParameterService:
    """Serves ``server`` until :meth:`close`. A thread makes the updates.

    Put a barrier between creating all services and clients and the first call, and another between the last
    call and :meth:`close`. Parameter server r is rank r.

    Args:
        run: Run number within its session. Tasks from other runs are rejected.
    """

    def __init__(
        self, rpc: Rpc, server: ParameterServer, num_ranks: int, timeline: Timeline, run: int = 0
    ) -> None:
        self.server = server
        self._timeline = timeline
        self._run_number = run
        self._rpc = rpc
        self._ranks = range(num_ranks)
        self._timeout_s = rpc.timeout_s
        self._failure = ""
        self._has_input = threading.Event()
        """Set when gradients or sums have arrived, or when the service closes."""
        self._is_closing = threading.Event()
        self._handlers: dict[str, Handler] = {
            WEIGHTS: self._send_weights_to_worker,
            WEIGHTS_FOR_RANK: self._send_weights,
            GRADIENTS: self._receive_gradients_of_worker,
            GRADIENTS_OF_RANK: self._receive_gradients,
            SUMS: self._receive_sums,
            MISSING: self._send_missing,
            LATEST: self._send_latest,
            STATE: lambda _name, _arrays: pack_state(server.state),
        }
        for op, handler in self._handlers.items():
            rpc.register(op, handler, for_clients=op in (WEIGHTS, GRADIENTS))
        self._thread = threading.Thread(target=self._run, name="dglx-parameters", daemon=True)
        self._thread.start()

    def raise_if_stopped(self) -> None:
        """Raise PeerError if an update failed, after which there is no further update."""
        if self._failure:
            raise PeerError(self._failure)

    def close(self) -> None:
        """Stop serving, and wait up to 5 s for a running update. May be called twice."""
        self._is_closing.set()
        self._has_input.set()
        # The thread may wait for a dead rank. Its calls then end with the session.
        self._thread.join(_JOIN_TIMEOUT_S)
        for op in self._handlers:
            self._rpc.unregister(op)

    def _run(self) -> None:
        """Make an update whenever this server's sums are complete. The service's thread runs this."""
        try:
            while not self._is_closing.is_set():
                self._has_input.wait()
                self._has_input.clear()
                while not self._is_closing.is_set():
                    epoch_and_sums = self.server.own_sums()
                    if epoch_and_sums is None:
                        break
                    epoch, sums = epoch_and_sums
                    with self._timeline.span("WU", PARAMETER_SERVER, epoch):
                        self._update(epoch, sums)
        except Exception as error:  # noqa: BLE001 - reported to all who wait for an update
            # Errors are also reported while closing. This rank may be ending for the same reason, and other
            # ranks need the cause.
            self._stop(error)

    def _update(self, epoch: int, sums: Array) -> None:
        """Exchange the sums for ``epoch`` with the other servers, update the weights, and tell all ranks."""
        index = self.server.index
        other_servers = {*range(self.server.plan.num_servers)} - {index}
        self._rpc.call_all(other_servers, SUMS, pair_name(epoch, index), [sums], phase=BETWEEN)
        self._wait_for_sums(epoch)
        updates = self.server.advance()

        # Without an update the service is closing.
        if updates is not None:
            self._rpc.call_all(self._ranks, UPDATED, pair_name(updates, index), [], phase=CONTROL)

    def _wait_for_sums(self, epoch: int) -> None:
        """Wait for sums from all servers. Raises PeerError if a server is dead or too late."""
        deadline = time.monotonic() + self._timeout_s
        while not self._is_closing.is_set():
            missing_servers = self.server.servers_missing()
            if not missing_servers:
                return

            if not self._has_input.wait(min(_POLL_INTERVAL_S, self._timeout_s)):
                raise_for_silent(self._rpc, missing_servers, f"waiting for its sums of epoch {epoch}")
            self._has_input.clear()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{describe(missing_servers[0])} sent no sums of epoch {epoch} within "
                    f"{self._timeout_s:g} s; {what_misses(self._rpc, missing_servers)}; check "
                    "the workers, or raise timeout_s (DGLX_TIMEOUT)"
                )

    def _stop(self, error: Exception) -> None:
        reason = f"{describe(self.server.index)} stopped: {type(error).__name__}: {error}"
        self._failure = reason[:_MAX_REASON]
        log.error("%s", self._failure)
        self._rpc.ask(self._ranks, STOPPED, self._failure, [], _NOTIFY_TIMEOUT_S, phase=CONTROL)

    def _parse_key(self, name: str) -> TaskKey:
        """Return the key of a task in this run. Raises PeerError after a failed update."""
        self.raise_if_stopped()
        key = TaskKey.parse(name)
        key.check_run(self._run_number)
        return key

    def _send_weights(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        key = self._parse_key(name)
        return self.server.weights(key.interval, key.epoch, key.step)

    def _send_weights_to_worker(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        weights = self._send_weights(name, arrays)
        step = TaskKey.parse(name).step
        self._rpc.ledger.add(DOWN, step, self._rpc.rank, WORKER, payload_bytes(weights))
        return weights

    def _receive_gradients(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        key = self._parse_key(name)
        if key.direction is Direction.FORWARD:
            raise ConfigError(f"task {name} goes forward and has no gradients")
        if self.server.gradients(key.interval, key.epoch, key.step, arrays):
            self._has_input.set()
        return []

    def _receive_gradients_of_worker(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        # The bytes are counted first, because these gradients may end the epoch that the bytes belong to.
        step = TaskKey.parse(name).step
        self._rpc.ledger.add(UP, step, WORKER, self._rpc.rank, payload_bytes(arrays))
        return self._receive_gradients(name, arrays)

    def _receive_sums(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        epoch, server = parse_pair(name)
        if len(arrays) != 1:
            raise ConfigError(f"sums {name} have {len(arrays)} arrays instead of one")
        self.server.receive_sums(server, epoch, arrays[0])
        self._has_input.set()
        return []

    def _send_missing(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        text = self._failure or self.server.missing()
        return [np.frombuffer(text[:_MAX_REASON].encode(), np.uint8)]

    def _send_latest(self, _name: str, _arrays: Sequence[Array]) -> list[Array]:
        return [np.concatenate([array.reshape(-1) for array in self.server.latest()])]


def raise_for_silent(rpc: Rpc, servers: Sequence[int], activity: str) -> None:
    """Raise PeerError if any of ``servers`` does not answer a probe within seconds. It names them all."""
    silent_servers = rpc.find_silent([server for server in servers if server != rpc.rank], _PROBE_TIMEOUT_S)
    if silent_servers:
        # Ranks that ended because a rank died are silent, too. The first cause is among them.
        names = ", ".join(map(describe, silent_servers))
        raise PeerError(f"no answer of {names} while {activity}: probably dead; check its output")


def what_misses(rpc: Rpc, servers: Sequence[int]) -> str:
    """Describe what the next update on each of ``servers`` waits for."""
    states = []
    for server in servers:
        try:
            (text,) = rpc.submit(server, MISSING, "", [], phase=CONTROL).result(_PROBE_TIMEOUT_S)
            state = f"waits for {text.tobytes().decode()}" if text.size else "waits for nothing of its own"
        except DglxError as error:
            state = f"does not answer ({error})"
        states.append(f"{describe(server)} {state}")
    return "; ".join(states)


@final
class ParameterClient:
    """A rank's connection to all parameter servers. Receives notices until :meth:`close`. Thread-safe.

    Args:
        on_update: Called with the number of updates that every server has made, each time it grows and once
            when a server stops. May be called on any thread, and must return quickly.
    """

    def __init__(self, rpc: Rpc, plan: ParameterPlan, on_update: Callable[[int], None]) -> None:
        self._rpc = rpc
        self._plan = plan
        self._on_update = on_update
        self._updates = [plan.first_epoch] * plan.num_servers
        self._failure = ""
        self._lock = threading.Lock()
        rpc.register(UPDATED, self._receive_update)
        rpc.register(STOPPED, self._receive_stop)

    def raise_if_stopped(self) -> None:
        """Raise PeerError if a parameter server has reported that it stopped."""
        if self._failure:
            raise PeerError(self._failure)

    def server_of(self, interval: int) -> int:
        return int(self._plan.server_of_interval[interval])

    def weights(self, key: TaskKey) -> list[Array]:
        """Fetch the weights for a task that this rank runs itself. Raises PeerError or RemoteError."""
        rank = self.server_of(key.interval)
        return self._rpc.call(rank, WEIGHTS_FOR_RANK, str(key), [], phase=DOWN, layer=key.step)

    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> list[Array]:
        """Send gradients, which must not change afterwards. Errors as in :meth:`weights`."""
        rank = self.server_of(key.interval)
        return self._rpc.call(rank, GRADIENTS_OF_RANK, str(key), arrays, phase=UP, layer=key.step)

    def latest(self) -> dict[str, Array]:
        """Fetch the latest weights by name. While nothing is in flight, all servers have equal weights."""
        (vector,) = self._rpc.call(self._choose_server(), LATEST, "", [], phase=READ)
        if vector.shape != (self._plan.size,) or vector.dtype != self._plan.program.dtype:
            raise ConfigError(
                f"the latest weights, {vector.dtype} of shape {vector.shape}, belong to another model"
            )
        return dict(zip(self._plan.shapes, self._plan.unflatten(vector), strict=True))

    def state(self) -> dict[str, Array]:
        """Fetch the update's state by "<weight>/<key>". See :meth:`latest`."""
        packed = self._rpc.call(self._choose_server(), STATE, "", [], phase=READ)
        return unpack_state(self._plan, packed)

    def close(self) -> None:
        self._rpc.unregister(UPDATED)
        self._rpc.unregister(STOPPED)

    def _choose_server(self) -> int:
        # A rank that is a parameter server calls itself, and the other ranks are spread over all servers.
        return self._rpc.rank % self._plan.num_servers

    def _receive_update(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
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

    def _receive_stop(self, reason: str, _arrays: Sequence[Array]) -> list[Array]:
        with self._lock:
            self._failure = self._failure or reason
            updates = min(self._updates)
        self._on_update(updates)
        return []
