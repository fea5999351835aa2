"""Sessions: how a rank starts and ends, with its RPC, ledger, scratch folder and failure reports."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import count, zip_longest
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dglx_dist.comm.auth import derive_key
from dglx_dist.comm.devices import AUTO, RankDevice, choose_backend, describe, is_built_for_gpus, take_device
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.rendezvous import JobStore, choose_listening_address, open_store
from dglx_dist.comm.rpc import Rpc, open_endpoints
from dglx_dist.comm.stopping import (
    SAME_INTERRUPT_S,
    SignalPipe,
    StopPoint,
    call_at_fork,
    call_if_alive,
    end_process,
    end_with_parent,
)
from dglx_dist.comm.topology import (
    Settings,
    Topology,
    assign_servers,
    bind_to_loopback,
    is_launched_by_torchrun,
    is_started_by_agent,
    read_rendezvous,
    read_settings,
    read_topology,
)
from dglx_dist.comm.trace import Timeline, TraceWriter, open_trace
from dglx_dist.data.storage.files import lock_shared, try_lock
from dglx_dist.errors import ConfigError, DglxError, PeerError, Stopped
from dglx_dist.memory import keep_memory
from dglx_dist.records import StepShare

_MACHINE_OPTIONS = frozenset({"memory", "threads"})
"""Options that may differ between machines."""


def collect_shared_facts(
    strategy: str, options: Mapping[str, object], seed: int, curve: bool
) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, as JSON. Types replace other values."""
    shared = {name: value for name, value in options.items() if name not in _MACHINE_OPTIONS}
    as_json = json.dumps(shared, default=lambda value: type(value).__name__)
    return {"strategy": strategy, "options": json.loads(as_json), "seed": seed, "curve": curve}


def check_hellos(facts: list[Any]) -> None:
    """Raise ConfigError if a rank reports an error, or has other settings than rank 0."""
    for hello in facts:
        if hello["no_trace"]:
            raise ConfigError(hello["no_trace"])

    remedies = {
        "strategy": "pass the same --strategy",
        "options": "pass the same options of the strategy",
        "seed": "pass the same seed",
        "curve": "set DGLX_CURVE to the same value",
    }
    for name, remedy in remedies.items():
        check_values_equal(f"the {name}", [hello[name] for hello in facts], f"{remedy} on all ranks")


def check_values_equal(
    what: str, values: Sequence[Any], remedy: str, error: type[DglxError] = ConfigError
) -> None:
    """Compare the JSON ``values`` from all ranks. Raise ``error``, which shows the first difference."""
    for rank, value in enumerate(values):
        if _differ(values[0], value):
            expected, actual = _find_first_difference(values[0], value)
            raise error(
                f"ranks disagree on {what}: rank 0 has {expected}, rank {rank} has {actual}; {remedy}"
            )


_MISSING_VALUE = object()


def _find_first_difference(a: Any, b: Any) -> tuple[str, str]:
    """Return both values as text. For dictionaries and lists, return the first items that differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in {**a, **b}:
            value_a = a.get(name, _MISSING_VALUE)
            value_b = b.get(name, _MISSING_VALUE)
            if _differ(value_a, value_b):
                return f"{name}={_show_value(value_a, value_b)}", f"{name}={_show_value(value_b, value_a)}"

    if isinstance(a, list) and isinstance(b, list):
        pairs = zip_longest(a, b, fillvalue=_MISSING_VALUE)
        a, b = next(pair for pair in pairs if _differ(*pair))
    return _show_value(a, b), _show_value(b, a)


def _differ(a: object, b: object) -> bool:
    # Compare JSON text, because with != nan would differ from itself, and true would equal 1.
    return json.dumps(a, sort_keys=True, default=id) != json.dumps(b, sort_keys=True, default=id)


def _show_value(value: object, counterpart: object) -> str:
    if value is _MISSING_VALUE:
        return "nothing"
    # Show the type, like a string's quotes, only if the values look equal without it.
    return repr(value) if str(value) == str(counterpart) else str(value)


log = logging.getLogger(__name__)

CALL_ALIKE_REMEDY = (
    "call the model, model.state_dict(), model.whole() and dx.save on every rank, also in evaluation (move "
    "such calls out of `if rank == 0`)"
)
"""Remedy if ranks that are alive wait for each other."""
_END_ALIKE_REMEDY = (
    "end the training loop after the same step on every rank, so give early stopping a number that is equal "
    f"on all ranks (dx.reduce_mean); {CALL_ALIKE_REMEDY}"
)
"""Remedy if a rank waits for another rank that has reached its end."""
ALL_GATHER = "all-gather"
"""A rank's status while it waits for all ranks."""
NEXT_BATCH = "the next batch"
"""A rank's status while it waits for its loader."""
_END = "the end of the session"
"""A rank's status while it waits at the end of the session."""
_APART_AFTER = 3
"""Consecutive probes that find ranks waiting for each other, until a warning is logged."""
_PROBE_TIMEOUT_S = 5.0
_PROBE_AT_END_TIMEOUT_S = 2.0
_CHECKPOINT_TIMEOUT_S = 10.0
"""Seconds that ranks have to write a checkpoint after their launcher was killed."""
_IGNORE_SIGNALS_S = 10.0
"""Seconds after a stop during which signals are ignored, because launchers send a signal several times."""


@final
class FailureWatch:
    """Reports this rank's first error to the others, and names dead ranks after a failure.

    Until :meth:`close`, an uncaught exception is written to the store before Python ends.
    """

    def __init__(self, store: JobStore, rpc: Rpc, hosts: Sequence[str]) -> None:
        self._store = store
        self._rpc = rpc
        self._hosts = hosts
        self.failed = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._report_exception

    def close(self) -> None:
        if sys.excepthook == self._report_exception:
            sys.excepthook = self._previous_hook

    def describe(
        self, activity: str, probe_s: float = _PROBE_TIMEOUT_S, *, compares_collectives: bool = True
    ) -> str:
        """Explain why ``activity`` cannot continue: failed ranks, silent ranks, or different collectives."""
        own_rank = self._store.rank
        peers = [rank for rank in range(self._store.world_size) if rank != own_rank]
        statuses = self._rpc.get_peer_status(peers, probe_s)

        # The store is read after the probe. A rank that lost a peer may end its session during the probe.
        reasons = []
        try:
            failure = self._store.first_failure()
            if failure is not None:
                reasons.append(f"rank {failure[0]} failed first: {failure[1]}")
        except PeerError as error:
            reasons.append(str(error))

        silent = [rank for rank, status in statuses.items() if status is None]
        if self._store.has_ended(own_rank):
            silent = []
        ended = [rank for rank in silent if self._store.has_ended(rank)]
        dead = [rank for rank in silent if rank not in ended]
        if dead:
            names = ", ".join(self._describe_rank(rank) for rank in dead)
            reasons.append(f"{names} did not answer within {probe_s:g} s and is probably dead")

        if not reasons:
            reasons = [f"{self._describe_rank(rank)} has ended" for rank in ended]
        if not reasons and compares_collectives:
            # All ranks are alive, so they are in different collectives.
            reasons = self._describe_collectives(statuses)
        return f"{activity}: " + ("; ".join(reasons) or "no rank is known to have ended")

    def _describe_collectives(self, statuses: Mapping[int, str | None]) -> list[str]:
        """Describe the ranks that are alive, but not in this rank's collective."""
        reasons = []
        for rank, status in statuses.items():
            if status is None or status == self._rpc.status:
                continue
            state = f"waits at {status!r}" if status else "computes"
            reasons.append(f"{self._describe_rank(rank)} is not in it, but {state}")
        if reasons:
            reasons.append(_END_ALIKE_REMEDY if _END in statuses.values() else CALL_ALIKE_REMEDY)
        return reasons

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    def _report_exception(
        self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an uncaught exception to the other ranks, as ``sys.excepthook``.

        The exception is printed unless another rank shows it or its cause.
        """
        self.failed = True
        self._store.report_failure(f"{error_type.__name__}: {error}")
        mark_error(error, self._store)
        if isinstance(error, DglxError) and error.is_shown_elsewhere:
            return
        self._previous_hook(error_type, error, trace)


_RANK_PREFIX = re.compile(r"^rank \d+ on \S+: ")


def mark_error(error: BaseException, store: JobStore) -> None:
    """Record in an error whether another rank shows it or its cause."""
    if not isinstance(error, DglxError) or error.is_shown_elsewhere:
        return
    # An error that quotes another rank's failure follows from it, and that rank shows the failure.
    if isinstance(error, PeerError):
        failure = store.first_failure()
        if failure is not None and failure[0] != store.rank and failure[1] in str(error):
            error.is_shown_elsewhere = True
            return
    is_first = store.claim_message(_RANK_PREFIX.sub("", str(error)))
    error.is_shown_elsewhere = not is_first


def show_briefly() -> None:
    """Show this package's uncaught errors in one line instead of a traceback, in torchrun's processes."""
    if is_launched_by_torchrun() and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_error


def _show_error(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print this package's errors with the last line in the user's code, as ``sys.excepthook``."""
    if not isinstance(error, DglxError):
        sys.__excepthook__(error_type, error, trace)
        return
    if error.is_shown_elsewhere:
        return

    location = ""
    for frame, line in walk_tb(trace):
        if not _is_library(frame):
            location = f"{frame.f_code.co_filename}:{line}: "
    # With a process group, torch adds the rank as a prefix.
    sys.stderr.write(f"{location}{error_type.__name__}: {error}\n")


def _is_library(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES


_PREFIX = "dglx-"
_LOCK = ".lock"
_SHARED_MEMORY = Path("/dev/shm")


@final
class Scratch:
    """A server's scratch folder ``path``. Its ranks open it with the same ``job`` and ``server``.

    Each rank holds a shared lock on the folder. The kernel releases the lock, however the process ends. The
    next Scratch removes folders without a lock.
    """

    def __init__(self, job: str, server: int, base: Path | None = None) -> None:
        if base is None:
            base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        elif not (base.is_dir() and os.access(base, os.W_OK)):
            raise ConfigError(f"DGLX_SCRATCH={base} is no writable folder. Make it, or unset DGLX_SCRATCH.")
        self.path = base / f"{_PREFIX}{os.getuid()}-{job}-s{server}"
        _remove_abandoned(base)
        self._lock = lock_shared(self.path / _LOCK, mode=0o700)

    def close(self) -> None:
        """Release the folder. The last rank removes it and abandoned folders. May be called twice."""
        if self._lock < 0:
            return
        os.close(self._lock)
        self._lock = -1
        _remove_abandoned(self.path.parent)


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError), try_lock(folder / _LOCK) as is_free:
            if is_free:
                shutil.rmtree(folder, ignore_errors=True)


# This is the package's only module-level state, because user code calls dx.init() once and then names no
# session. The package takes the session as an argument, or reads it from here by current_session().
_CURRENT: list[Session] = []
_REQUESTED: list[Callable[[], Session]] = []
"""Function that starts a requested session that could not start yet."""
V = TypeVar("V")


@final
class SessionField(Generic[V]):
    """A typed field on every session, for the module that declares the field.

    ``make`` creates the value at the first access. The access is collective if ``make`` communicates.
    """

    def __init__(self, make: Callable[[Session], V]) -> None:
        self._make = make

    def get(self, session: Session) -> V:
        if self not in session._fields:
            session._fields[self] = self._make(session)
        return session._fields[self]

    def set(self, session: Session, value: V) -> None:
        session._fields[self] = value


@final
@dataclass(kw_only=True, eq=False, repr=False)
class Session:
    """One rank's session; see :func:`start_session`. Close it, or use it as a context manager."""

    strategy: str
    options: dict[str, object]
    """The strategy's options."""
    timeout_s: float
    seed: int
    topology: Topology
    rpc: Rpc
    ledger: Ledger
    hosts: tuple[str, ...]
    """(W,) machine by rank, for messages."""
    device: torch.device
    ranks_of_device: int
    """Ranks that share the GPU. It is 1 on the CPU."""
    job: str
    """The session's unique name, equal on its ranks."""
    trace: TraceWriter | None
    """Writes the trace. None unless DGLX_TRACE is set."""
    scratch_in: Path | None = None
    """Folder on a disk for :attr:`scratch`. None uses memory if possible."""
    store: JobStore | None = None
    """Rendezvous store, or None on one rank."""
    owns_group: bool = False
    """Whether the process group ends with the session."""
    step_share: StepShare | None = field(default=None, init=False)
    """This rank's share in the current step. The loader sets it when it yields a batch."""
    model_share: StepShare | None = field(default=None, init=False)
    """Share with which the last wrapped model that ran forward weighs this rank's loss."""
    timeline: Timeline = field(default_factory=Timeline, init=False)
    """Timeline for this rank's spans. It is off until it is started."""
    before_close: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Functions that :meth:`close` calls first to finish outstanding work, unless the session failed."""
    on_close: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Functions that :meth:`close` calls next, also after a failure, to release resources. They must not
    wait."""

    def __post_init__(self) -> None:
        self.has_wrapped_model = False
        """Whether ``dx.wrap`` was called, so that all ranks take steps together."""
        self.is_loss_exact = False
        """Whether a loss since the last forward pass is a mean over all ranks."""
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(count)
        self._fields: dict[object, Any] = {}
        """Values by :class:`SessionField`."""
        self._closed = False
        self._num_apart = 0
        self._scratch = Scratch(self.job, self.topology.server, self.scratch_in)
        self.stop_point = StopPoint(self.rpc, self.topology.world_size)
        self._launcher_pid = os.getppid()
        self._interrupted_s = math.inf
        """Time at which the first SIGINT arrived, or infinity."""
        self._left_s = math.inf
        """Time at which the last :meth:`stoppable` block ended, or infinity."""

        self._watch: FailureWatch | None = None
        self._pipes: list[SignalPipe] = []
        if self.store is not None:
            self._watch = FailureWatch(self.store, self.rpc, self.hosts)
            self._pipes.append(SignalPipe([signal.SIGTERM], self._on_signal))

        atexit.register(self._at_exit)
        call_at_fork(call_if_alive(self._release_in_fork), call_if_alive(self._list_signals))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ConfigError, because a session and objects with a session cannot be pickled or copied."""
        raise ConfigError(
            "a graph of dx.distribute, its columns, loaders and embeddings are connected to the other ranks, "
            "so they cannot be pickled or copied. Save rows as g.ndata[name][ids], weights as "
            "model.state_dict() and positions as loader.state_dict(), and call dx.distribute again."
        )

    def adopt(self, strategy: str, options: Mapping[str, object]) -> None:
        """Switch to another ``strategy``. Every rank must call this before it makes a loader or model."""
        self.strategy = strategy
        self.options = dict(options)

    def next_number(self, kind: str) -> int:
        """Return 0, 1, 2, ... for each ``kind``. Ranks that make the same calls get the same numbers."""
        return next(self._counters[kind])

    @property
    def scratch(self) -> Path:
        """Folder that this server's ranks share. It is removed at the end; see :attr:`scratch_in`."""
        return self._scratch.path

    @property
    def is_first_on_machine(self) -> bool:
        return self.hosts.index(self.hosts[self.topology.rank]) == self.topology.rank

    @property
    def num_servers_on_machine(self) -> int:
        """Number of servers on the machine of this rank."""
        host = self.hosts[self.topology.rank]
        servers = zip(self.topology.server_of_rank, self.hosts, strict=True)
        return len({server for server, server_host in servers if server_host == host})

    def describe_failure(self, activity: str) -> str:
        """Name the dead or failed ranks after ``activity`` failed. Asks every rank, which takes seconds."""
        return "" if self._watch is None else self._watch.describe(activity)

    def fail(self, error: BaseException) -> None:
        if self.store is not None and not self._closed:
            self.store.report_failure(f"{type(error).__name__}: {error}")
            mark_error(error, self.store)

    def close(self, *, failed: bool = False) -> None:
        """End the session. May be called twice.

        This rank serves until the other ranks close their sessions, because they may still read its rows. If
        ``failed``, this rank does not wait. It never waits for a failed or dead rank. If outstanding work
        failed, this raises DglxError after closing the session.
        """
        if self._closed:
            return

        try:
            if not failed:
                for action in list(self.before_close):
                    action()
        except DglxError as error:
            self.fail(error)
            self.close(failed=True)
            raise

        self._closed = True
        atexit.unregister(self._at_exit)
        for release in self.on_close:
            release()
        self.rpc.status = _END
        if self.trace is not None:
            self.trace.write(self.job, self.topology, self.ledger, failed=failed)

        # After this barrier no rank reads this rank's rows, so the connections may end.
        if self.store is not None:
            if failed:
                self.store.report_end()
            else:
                self._wait_for_peers(self.store)
        if self._watch is not None:
            self._watch.close()
        self._close_pipes()
        self.rpc.close()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._scratch.close()
        if _CURRENT and _CURRENT[-1] is self:
            _CURRENT.pop()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error is not None and not isinstance(error, Stopped)
        if error is not None and failed:
            self.fail(error)
        self.close(failed=failed)

    @contextmanager
    def stoppable(self) -> Iterator[StopPoint]:
        """Let SIGTERM, SIGUSR1 and SIGINT stop the ``with`` blocks on all ranks at the same point.

        Schedulers send SIGTERM. If a rank dies, torchrun sends SIGTERM to the other ranks. If torchrun is
        killed, the kernel sends SIGTERM. This rank ends at once after a second SIGINT, a signal that not all
        ranks can follow, or a signal outside the block. The user's own handlers stay in effect.
        """
        pipe = SignalPipe([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], self._on_signal)
        self._pipes.append(pipe)
        self._interrupted_s = self._left_s = math.inf
        self.stop_point.open()
        failed = True
        try:
            yield self.stop_point
            failed = False
        finally:
            self.stop_point.close(failed=failed)
            self._left_s = time.monotonic()
            # Otherwise the session was closed meanwhile, or this process is a fork.
            if pipe in self._pipes:
                self._pipes.remove(pipe)
            pipe.close()

    def _on_signal(self, signal_number: int) -> None:
        """Stop all ranks, or end this process, even while the main thread hangs in a collective."""
        now_s = time.monotonic()
        name = signal.Signals(signal_number).name
        ends_now = now_s - self._left_s > _IGNORE_SIGNALS_S
        if signal_number == signal.SIGINT:
            ends_now |= now_s - self._interrupted_s > SAME_INTERRUPT_S
            self._interrupted_s = min(self._interrupted_s, now_s)
        if self.stop_point.is_over and not ends_now:
            return

        activity = f"rank {self.topology.rank} was told to end ({name})"
        if os.getppid() != self._launcher_pid:
            # No launcher will kill this rank if it hangs, so it limits the time itself.
            activity = f"rank {self.topology.rank} ends, because the process that started it has ended"
            timer = threading.Timer(_CHECKPOINT_TIMEOUT_S, self._end, (signal_number, activity))
            timer.daemon = True
            timer.start()
        if ends_now or not self.stop_point.ask():
            self._end(signal_number, activity)

    def _end(self, signal_number: int, activity: str) -> None:
        """Log ``activity`` with the other ranks' state, and end the process."""
        if self._watch is not None:
            # A signal may arrive while ranks are rightly at different places.
            activity = self._watch.describe(activity, _PROBE_AT_END_TIMEOUT_S, compares_collectives=False)
        log.error("%s", activity)
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            self._scratch.close()
        if self.store is not None:
            self.store.report_end()

        # The main thread may hang in a collective forever, so it cannot end the process.
        end_process(signal_number)

    def _close_pipes(self, *, forked: bool = False) -> None:
        while self._pipes:
            self._pipes.pop().close(forked=forked)

    def _list_signals(self) -> list[int]:
        return [number for pipe in self._pipes for number in pipe.list_signals()]

    def _at_exit(self) -> None:
        self.close(failed=self._watch is not None and self._watch.failed)

    def _release_in_fork(self) -> None:
        """Drop the session in a forked process. Connections stay open, because the parent uses them."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._watch is not None:
            self._watch.close()
        self._close_pipes(forked=True)
        self.rpc.forget()
        _CURRENT.clear()

    def _wait_for_peers(self, store: JobStore) -> None:
        try:
            store.barrier(_END, check=lambda missing: self.raise_for_dead(missing, _END))
        except (PeerError, RuntimeError) as error:
            store.report_failure(f"{type(error).__name__}: {error}")
            log.warning("rank %d ends without the others: %s", self.topology.rank, error)

    def raise_for_dead(self, missing: list[int], what: str) -> None:
        """Raise PeerError if a rank in ``missing`` at ``what`` is silent, or waits for this rank."""
        statuses = self.rpc.get_peer_status(missing, _PROBE_TIMEOUT_S)
        for rank, status in statuses.items():
            if status is None:
                has_ended = self.store is not None and self.store.has_ended(rank)
                state = "does not answer. It is probably dead. Look at its output."
                raise PeerError(
                    f"rank {rank} on {self.hosts[rank]} did not come to {what!r} and "
                    f"{'has ended' if has_ended else state}"
                )

        # Another thread may wait while the main thread computes, unless the main thread waits for the loader.
        is_main_thread = threading.current_thread() is threading.main_thread()
        if not is_main_thread and self.rpc.status != NEXT_BATCH:
            return

        # A rank at its end still serves rows, but joins no collective call.
        statuses_apart = {ALL_GATHER, _END}
        if what == _END:
            statuses_apart = {status for status in statuses.values() if status} - {NEXT_BATCH}
        peer = next((rank for rank, status in statuses.items() if status in statuses_apart), None)
        if peer is None:
            self._num_apart = 0
            return
        self._num_apart += 1
        remedy = _END_ALIKE_REMEDY if _END in (what, statuses[peer]) else CALL_ALIKE_REMEDY
        message = (
            f"rank {peer} on {self.hosts[peer]} waits at {statuses[peer]!r}, but rank "
            f"{self.topology.rank} waits at {what!r}; {remedy}"
        )

        # Wait before the error, because an earlier message may still be in transit on a slow network.
        if self._num_apart > self.timeout_s / 4:
            raise PeerError(message)
        if self._num_apart == _APART_AFTER:
            log.warning("%s", message)


def start_session(
    *,
    strategy: str = "data_parallel",
    options: Mapping[str, object] | None = None,
    timeout_s: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    device: torch.device | str = AUTO,
    topology: Topology | None = None,
) -> Session:
    """Join the job's other ranks and make the session the current one. Every rank must call this.

    Without torchrun the session has one rank and uses no network. The process group is created unless one
    exists. In a torchrun process, glibc is set to keep freed memory for the next step, unless the environment
    configures the allocator.

    Args:
        strategy: Name of the strategy, which is only stored.
        options: The strategy's options, which are only stored.
        timeout_s: Seconds that a rank may be silent, here and in every collective. DGLX_TIMEOUT overrides it.
        seed: The session's random seed.
        backend, device: As in :func:`dglx_dist.init`.
        topology: The job's topology. The default is read from the environment.

    Raises:
        ConfigError: If the environment is invalid, ranks disagree, a rank lacks its device, or a session is
            already open.
        PeerError: If ranks are missing after the time limit. The message lists them.
    """
    show_briefly()
    if _CURRENT or _REQUESTED:
        origin = "" if _CURRENT else " (dgl.distributed.initialize() requested it)"
        raise ConfigError(f"a session is already open{origin}. Close it by dglx_dist.shutdown(), or use it.")

    # Check everything that needs no other rank.
    if topology is None:
        _check_group(read_topology().world_size)
    settings = read_settings()
    limit_s = settings.timeout_s or timeout_s
    if not 0 < limit_s < float("inf"):
        raise ConfigError(f"timeout_s={limit_s} must be a number of seconds above 0")
    ranks = topology or read_topology()

    if is_started_by_agent():
        end_with_parent()
    if is_launched_by_torchrun() and not settings.allocator_set:
        keep_memory()

    arguments = {"strategy": strategy, "options": dict(options or {}), "seed": seed}
    arguments |= {"timeout_s": limit_s, "scratch_in": settings.scratch}
    if ranks.world_size == 1:
        session = _start_single(ranks, settings, arguments, device)
    else:
        request = (device, backend)
        session = _start_joint(ranks, settings, arguments, request, correct_nodes=topology is None)
    _CURRENT.append(session)
    return session


def current_session() -> Session:
    """Return this process's open session. A deferred session starts now, which is collective."""
    if not _CURRENT and _REQUESTED:
        _REQUESTED.pop()()
    if not _CURRENT:
        raise ConfigError("no session is open. Call dglx_dist.init() or dgl.distributed.initialize() first.")
    _check_group(_CURRENT[-1].topology.world_size)
    return _CURRENT[-1]


def _check_group(world_size: int) -> None:
    """Raise ConfigError if torch.distributed has a process group with another size than the session."""
    group_size = dist.get_world_size() if dist.is_initialized() else world_size
    if group_size != world_size:
        raise ConfigError(
            f"the process group of torch.distributed has {group_size} ranks, but this session has "
            f"{world_size}, so each process would train alone. Start the ranks with torchrun "
            f"--nproc-per-node {group_size} script.py instead of mp.spawn, and leave out "
            "init_process_group."
        )


def start_later(start: Callable[[], Session] | None) -> None:
    """Defer ``start`` to the first :func:`current_session` call. None cancels it."""
    _REQUESTED[:] = [] if start is None else [start]


def get_session_or_start(start: Callable[[], Session]) -> Session:
    return current_session() if _CURRENT or _REQUESTED else start()


_LIBRARIES = {__name__.partition(".")[0], "dgl", "torch", "collections"}


def warn_user(message: str) -> None:
    """Show a warning on rank 0. It points to the line in the user's code that called this package."""
    if _CURRENT and _CURRENT[-1].topology.rank:
        return
    # Skip frames in this package and in torch.
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def get_open_session() -> Session | None:
    return _CURRENT[-1] if _CURRENT else None


def _start_single(
    topology: Topology, settings: Settings, arguments: Mapping[str, Any], device: object
) -> Session:
    ledger = Ledger(topology)
    hosts = (socket.gethostname(),)
    own_device = take_device(device, 0, settings.device)
    _log_devices([own_device], hosts, choose_backend([own_device], hosts, None))

    return Session(
        **arguments,
        topology=topology,
        rpc=Rpc(0, ledger, arguments["timeout_s"]),
        ledger=ledger,
        hosts=hosts,
        device=torch.device(own_device.name),
        ranks_of_device=1,
        job=secrets.token_hex(8),
        trace=None if settings.trace is None else TraceWriter(settings.trace, topology.rank),
    )


def _start_joint(
    topology: Topology,
    settings: Settings,
    arguments: Mapping[str, Any],
    request: tuple[object, str | None],
    *,
    correct_nodes: bool,
) -> Session:
    """Start a session with the other ranks.

    ``arguments`` are stored in the session. ``request`` is (device, backend), as in :func:`start_session`. If
    ``correct_nodes``, the machines that the ranks report replace those in ``topology``.
    """
    if not is_launched_by_torchrun():
        raise ConfigError(f"{topology.world_size} ranks need torchrun's environment. Start with torchrun.")
    timeout_s = float(arguments["timeout_s"])
    rendezvous = read_rendezvous()
    bind_to_loopback(rendezvous)
    raw_store = open_store(rendezvous, topology.rank, topology.world_size, timeout_s)
    store = JobStore(raw_store, topology.rank, topology.world_size, timeout_s)
    store.seal(settings, is_local=rendezvous.is_local)

    # Tell the other ranks this rank's facts, and check that all ranks can work together.
    trace, trace_error = open_trace(settings.trace, topology.rank)
    device, backend = request
    own_device = take_device(device, rendezvous.local_rank, settings.device)
    hello = {
        "host": socket.gethostname(),
        "node": rendezvous.node,
        **collect_shared_facts(
            arguments["strategy"], arguments["options"], arguments["seed"], settings.curve
        ),
        "no_trace": trace_error,
        "device": asdict(own_device),
    }
    hellos: list[Any] = store.exchange("settings", hello)
    check_hellos(hellos)

    hosts = tuple(str(hello["host"]) for hello in hellos)
    devices = [RankDevice(**hello["device"]) for hello in hellos]
    backend = choose_backend(devices, hosts, backend)
    if correct_nodes:
        topology = assign_servers(topology, tuple(hello["node"] for hello in hellos))
    ranks_of_device = 1
    if own_device.card:
        ranks_of_device = sum(peer.card == own_device.card for peer in devices)

    ledger = Ledger(topology)
    rpc = Rpc(topology.rank, ledger, timeout_s)
    with ExitStack() as close_on_error:
        close_on_error.callback(rpc.close)
        address = choose_listening_address(rendezvous)
        _, addresses = open_endpoints(
            store.exchange,
            hosts,
            lambda credentials: rpc.listen(address, credentials),
            secret=store.key,
            encrypted=settings.curve,
        )
        rpc.connect(addresses)
        owns_group = _make_group(store, topology, timeout_s, backend)
        close_on_error.pop_all()

    if topology.rank == 0:
        _log_devices(devices, hosts, dist.get_backend_config())
        if settings.curve:
            log.warning(
                "DGLX_CURVE: calls and rows between ranks are encrypted, but collectives of %s, which sum "
                "gradients, are not",
                backend,
            )
    return Session(
        **arguments,
        topology=topology,
        rpc=rpc,
        ledger=ledger,
        hosts=hosts,
        device=torch.device(own_device.name),
        ranks_of_device=ranks_of_device,
        job=derive_key(store.key, "name of the job").decode()[:16],
        trace=trace,
        store=store,
        owns_group=owns_group,
    )


def _log_devices(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str) -> None:
    # If there is a GPU or torch is built for GPUs, users must see which device is used. So log a warning,
    # which Python shows without configured logging.
    is_worth_warning = ranks[0].card or (ranks[0].why and is_built_for_gpus())
    level = logging.WARNING if is_worth_warning else logging.INFO
    log.log(level, "%s", describe(ranks, hosts, backend))


def _make_group(store: JobStore, topology: Topology, timeout_s: float, backend: str) -> bool:
    """Create the process group. Return False if one exists already."""
    if dist.is_initialized():
        return False
    # The sealed store is Python code, but NCCL's threads may use the store after the interpreter has ended.
    group_store = store.raw if backend == "gloo" else store.unsealed

    dist.init_process_group(
        backend,
        store=PrefixStore("group", group_store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return True


T = TypeVar("T", bound="Shared")


class Shared:
    """Base class for objects that deep copies share, because a model may refer to its graph."""

    def __deepcopy__(self: T, memo: Mapping[int, object]) -> T:
        return self
