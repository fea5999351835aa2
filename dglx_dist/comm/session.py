"""Sessions: start and end of one rank's run, with its RPC, ledger, scratch folder and failure reports."""

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
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import count, zip_longest
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, Generic, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dglx_dist.comm.auth import derive_key
from dglx_dist.comm.devices import AUTO, RankDevice, choose_backend, describe, is_built_for_gpus, take_device
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.rendezvous import JobStore, choose_listening_address, open_store
from dglx_dist.comm.rpc import Rpc, open_endpoints
from dglx_dist.comm.stopping import SAME_KEY_S, SignalPipe, StopPoint, end_process, end_with_parent
from dglx_dist.comm.topology import (
    Settings,
    Topology,
    assign_servers,
    bind_alike,
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

_OPTIONS_OF_MACHINE = frozenset({"memory", "threads"})
"""Options that may differ between machines."""


def collect_shared_facts(
    strategy: str, options: Mapping[str, object], seed: int, curve: bool
) -> dict[str, Any]:
    """Return what must be equal on all ranks, for :func:`check_hellos`; no JSON value: by its type."""
    shared = {name: value for name, value in options.items() if name not in _OPTIONS_OF_MACHINE}
    comparable = json.loads(json.dumps(shared, default=lambda value: type(value).__name__))
    return {"strategy": strategy, "options": comparable, "seed": seed, "curve": curve}


def check_hellos(facts: list[Any]) -> None:
    """Raise ConfigError if a rank says hello with a problem, or with other facts than rank 0."""
    for problem in [one["no_trace"] for one in facts if one["no_trace"]]:
        raise ConfigError(problem)
    same = {"strategy": "give the same --strategy", "options": "give the strategy the same options"}
    for name, remedy in {**same, "seed": "give the same seed", "curve": "set DGLX_CURVE alike"}.items():
        check_values_equal(f"the {name}", [one[name] for one in facts], f"{remedy} on all ranks")


def check_values_equal(
    what: str, values: Sequence[Any], remedy: str, error: type[DglxError] = ConfigError
) -> None:
    """Raise ``error`` with the first difference unless the ``values`` of all ranks, JSON, are equal."""
    for rank, value in enumerate(values):
        if _differ(value, values[0]):
            first, other = _first_difference(values[0], value)
            raise error(f"ranks disagree on {what}: rank 0 has {first}, rank {rank} has {other}; {remedy}")


_NOTHING = object()


def _first_difference(one: Any, other: Any) -> tuple[str, str]:
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = ((name, one.get(name, _NOTHING), other.get(name, _NOTHING)) for name in {**one, **other})
        name, one, other = next((name, a, b) for name, a, b in pairs if _differ(a, b))
        return f"{name}={_shown(one, other)}", f"{name}={_shown(other, one)}"
    if isinstance(one, list) and isinstance(other, list):
        one, other = next(pair for pair in zip_longest(one, other, fillvalue=_NOTHING) if _differ(*pair))
    return _shown(one, other), _shown(other, one)


def _differ(one: object, other: object) -> bool:
    # Not by ==, to which nan differs from itself, and true is 1.
    return json.dumps(one, sort_keys=True, default=id) != json.dumps(other, sort_keys=True, default=id)


def _shown(value: object, beside: object) -> str:
    if value is _NOTHING:
        return "nothing"
    return repr(value) if str(value) == str(beside) else str(value)


log = logging.getLogger(__name__)

CALL_ALIKE = (
    "every rank must call the model alike, in evaluation too, and model.state_dict(), model.whole() and "
    "dx.save; move such calls out of `if rank == 0`"
)
"""The remedy where ranks that are alive wait for each other."""
ALL_GATHER, NEXT_BATCH, _END = "all-gather", "the next batch", "the end of the session"
"""Statuses of ranks whose training loop waits: for all ranks, for a loader's threads, and for all to end."""
_APART_AFTER = 3
"""Probes in a row in which ranks wait for each other until a warning says so."""
_PROBE_S = 5.0
_PROBE_AT_END_S = 2.0
_WITHOUT_LAUNCHER_S = 10.0
"""For the checkpoint of ranks whose launcher was killed."""
_LEAVES_S = 10.0
"""After a stop: schedulers and launchers send the signal several times."""


@final
class FailureWatch:
    """Reports this rank's first error to the others, and names dead ranks after a failure.

    While it is open, an uncaught exception is written to the store before Python ends.
    """

    def __init__(self, store: JobStore, rpc: Rpc, hosts: Sequence[str]) -> None:
        self._store, self._rpc, self._hosts = store, rpc, hosts
        self.failed = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook

    def close(self) -> None:
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook

    def describe(self, doing: str, probe_s: float = _PROBE_S) -> str:
        """Describe the other ranks: the first failure, silent ranks, ranks in another collective."""
        others = [rank for rank in range(self._store.world_size) if rank != self._store.rank]
        statuses = self._rpc.peer_status(others, probe_s)
        # After the probe: ranks that lost the dead one, this one too, may have ended their session meanwhile.
        own, parts = self._store.rank, []
        try:
            failure = self._store.first_failure()
        except PeerError as error:
            failure, parts = None, [str(error)]
        silent = [] if self._store.have_ended(own) else [rank for rank, at in statuses.items() if at is None]
        ended = [rank for rank in silent if self._store.have_ended(rank)]
        elsewhere = {rank: at for rank, at in statuses.items() if at is not None and at != self._rpc.status}
        if failure is not None:
            parts.append(f"rank {failure[0]} failed first: {failure[1]}")
        if dead := [f"rank {rank} on {self._hosts[rank]}" for rank in silent if rank not in ended]:
            parts.append(f"{', '.join(dead)} did not answer within {probe_s:g} s and is probably dead")
        parts = parts or [f"rank {rank} on {self._hosts[rank]} has ended" for rank in ended]
        if not parts:
            # All ranks are alive, so they are in different collectives.
            parts = [
                f"rank {rank} on {self._hosts[rank]} is not in it, but "
                + (f"waits at {at!r}" if at else "computes")
                for rank, at in elsewhere.items()
            ]
            parts += [CALL_ALIKE] if parts else []
        return f"{doing}: " + ("; ".join(parts) if parts else "no rank is known to have ended")

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed = True
        self._store.report_failure(f"{kind.__name__}: {error}")
        mark_error(error, self._store)
        if not (isinstance(error, DglxError) and error.is_shown_elsewhere):
            self._previous_hook(kind, error, trace)


_OF_RANK = re.compile(r"^rank \d+ on \S+: ")


def mark_error(error: BaseException, store: JobStore) -> None:
    """Note in an error whether another rank shows it, or its cause."""
    if isinstance(error, DglxError) and not error.is_shown_elsewhere:
        failure = store.first_failure() if isinstance(error, PeerError) else None
        is_effect = failure is not None and failure[0] != store.rank and failure[1] in str(error)
        is_first = is_effect or store.claim_message(_OF_RANK.sub("", str(error)))
        error.is_shown_elsewhere = is_effect or not is_first


def show_briefly() -> None:
    """Have uncaught errors of this package shown by one line in processes of torchrun, not by tracebacks."""
    if is_launched_by_torchrun() and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, DglxError):
        sys.__excepthook__(kind, error, trace)
        return
    if error.is_shown_elsewhere:
        return
    where = ""
    for frame, line in walk_tb(trace):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            where = f"{frame.f_code.co_filename}:{line}: "
    # With a process group, torch puts the rank in front.
    sys.stderr.write(f"{where}{kind.__name__}: {error}\n")


_PREFIX = "dglx-"
_LOCK = ".lock"
_SHARED_MEMORY = Path("/dev/shm")


@final
class Scratch:
    """The folder ``path``. Every rank of the server opens it with the same ``job`` and ``server``.

    Each holds a shared lock on it, which the kernel releases however the process ends; a folder without lock
    is abandoned, and the next Scratch removes it.
    """

    def __init__(self, job: str, server: int, base: Path | None = None) -> None:
        if base is None:
            base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        elif not (base.is_dir() and os.access(base, os.W_OK)):
            raise ConfigError(f"DGLX_SCRATCH={base} is no folder that can be written; make it, or unset it")
        self.path = base / f"{_PREFIX}{os.getuid()}-{job}-s{server}"
        _remove_abandoned(base)
        self._lock = lock_shared(self.path / _LOCK, mode=0o700)

    def close(self) -> None:
        """Release the folder; the last rank removes it, and abandoned ones. May be called twice."""
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


def if_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the bound ``method`` while its object exists, by a weak reference."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


# The only module-level state of the package: user code calls dx.init() once and then names no session.
# The package takes the session as an argument, or reads it from here by current_session().
_CURRENT: list[Session] = []
# Starts a requested session that could not start yet.
_LATER: list[Callable[[], Session]] = []


V = TypeVar("V")


@final
class SessionField(Generic[V]):
    """A typed field of every session, owned by the module that declares it.

    ``make`` makes the value when it is first asked for, which is collective if it communicates.
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
    """One rank's run, see :func:`start_session`. Close it, or use it as a context manager."""

    strategy: str
    options: dict[str, object]
    """Of the strategy."""
    timeout_s: float
    seed: int
    topology: Topology
    rpc: Rpc
    ledger: Ledger
    hosts: tuple[str, ...]
    """(W,) machine of each rank, for messages."""
    device: torch.device
    ranks_of_device: int
    """Ranks that share the GPU; 1 on the CPU."""
    job: str
    """Unique name of the session, equal on its ranks."""
    trace: TraceWriter | None
    """None unless DGLX_TRACE asks for it."""
    scratch_in: Path | None = None
    """Folder on a disk for :attr:`scratch`; None: in memory, if possible."""
    store: JobStore | None = None
    """None on one rank."""
    owns_group: bool = False
    """Whether the process group ends with the session."""
    step_share: StepShare | None = field(default=None, init=False)
    """Set by the loader when it yields a batch."""
    model_share: StepShare | None = field(default=None, init=False)
    """The share by which the wrapped model called last weighs this rank's loss."""
    timeline: Timeline = field(default_factory=Timeline, init=False)
    """Off until started."""
    before_close: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Called first by :meth:`close`, unless the session failed, to finish outstanding work."""
    on_close: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Called next by :meth:`close`, also after a failure, to release resources; must not wait."""

    def __post_init__(self) -> None:
        self.has_wrapped_model = False
        """Whether ``dx.wrap`` was called, hence all ranks take steps together."""
        self.is_loss_exact = False
        """Whether a loss since the last forward pass is a mean over all ranks."""
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        self._fields: dict[object, Any] = {}
        """By :class:`SessionField`."""
        self._closed, self._num_apart = False, 0
        self._scratch = Scratch(self.job, self.topology.server, self.scratch_in)
        self._watch: FailureWatch | None = None
        self.stop_point = StopPoint(self.rpc, self.topology.world_size)
        self._pipes: list[SignalPipe] = []
        self._launcher, self._interrupted_s, self._left_s = os.getppid(), math.inf, math.inf
        if self.store is not None:
            self._watch = FailureWatch(self.store, self.rpc, self.hosts)
            self._pipes.append(SignalPipe([signal.SIGTERM], self._on_signal))
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=if_alive(self._leave_to_parent))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or copied, with all that holds the session."""
        raise ConfigError(
            "a graph of dx.distribute, its columns, loaders and embeddings are connected to the other ranks, "
            "so they cannot be pickled or copied; save rows as g.ndata[name][ids], weights as "
            "model.state_dict(), positions as loader.state_dict(), and make the graph again by dx.distribute"
        )

    def adopt(self, strategy: str, options: Mapping[str, object]) -> None:
        """Continue under a chosen ``strategy``; every rank must call it before it makes a loader or model."""
        self.strategy, self.options = strategy, dict(options)

    def next_number(self, kind: str) -> int:
        """Return 0, then 1 and so on for each ``kind``: the same on all ranks, if they call alike."""
        return next(self._numbers[kind])

    @property
    def scratch(self) -> Path:
        """Folder shared by the ranks of this server, removed at the end; see :attr:`scratch_in`."""
        return self._scratch.path

    @property
    def is_first_on_machine(self) -> bool:
        return self.hosts.index(self.hosts[self.topology.rank]) == self.topology.rank

    def describe_failure(self, doing: str) -> str:
        """Name the dead or failed ranks after ``doing`` failed; asks every rank, which takes seconds."""
        return "" if self._watch is None else self._watch.describe(doing)

    def fail(self, error: BaseException) -> None:
        if self.store is not None and not self._closed:
            self.store.report_failure(f"{type(error).__name__}: {error}")
            mark_error(error, self.store)

    def close(self, *, failed: bool = False) -> None:
        """End the session. May be called twice.

        Keeps serving until the other ranks close theirs too, because they may still read from here; but does
        not wait when ``failed``, nor for a failed or dead rank. DglxError: outstanding work failed, and the
        session has ended as a failed one.
        """
        if self._closed:
            return
        try:
            for action in () if failed else [*self.before_close]:
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
        if self.store is not None:
            self.store.report_end() if failed else self._wait_for_the_others(self.store)
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
        """Let SIGTERM, SIGUSR1 and SIGINT stop the block on all ranks at the same point; collective.

        SIGTERM is sent by schedulers, by torchrun to the survivors of a dead rank, and by the kernel when
        torchrun is killed. A second SIGINT ends this rank at once, and so does a signal that not all ranks
        can follow, or outside of the block. The user's own handlers stay in effect.
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
            if pipe in self._pipes:  # else the session was closed meanwhile, or this process is a fork
                self._pipes.remove(pipe)
            pipe.close()

    def _on_signal(self, number: int) -> None:
        """Stop all ranks, or end this process, even while the main thread hangs in a collective."""
        now, name = time.monotonic(), signal.Signals(number).name
        again = number == signal.SIGINT and now - self._interrupted_s > SAME_KEY_S
        if number == signal.SIGINT:
            self._interrupted_s = min(self._interrupted_s, now)
        again = again or now - self._left_s > _LEAVES_S
        if self.stop_point.is_over and not again:
            return
        doing = f"rank {self.topology.rank} was told to end ({name})"
        if os.getppid() != self._launcher:
            doing = f"rank {self.topology.rank} ends, since the process that started it has ended"
            limit = threading.Timer(_WITHOUT_LAUNCHER_S, self._end, (number, doing))
            limit.daemon = True
            limit.start()
        if again or not self.stop_point.ask():
            self._end(number, doing)

    def _end(self, number: int, doing: str) -> None:
        log.error("%s", doing if self._watch is None else self._watch.describe(doing, _PROBE_AT_END_S))
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            self._scratch.close()
        if self.store is not None:
            self.store.report_end()
        # The main thread may hang in a collective for ever, so it cannot end the process.
        end_process(number)

    def _close_pipes(self, *, forked: bool = False) -> None:
        while self._pipes:
            self._pipes.pop().close(forked=forked)

    def _at_exit(self) -> None:
        self.close(failed=self._watch is not None and self._watch.failed)

    def _leave_to_parent(self) -> None:
        """In a forked process: the rank is the parent, so this must not end anything of it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._watch is not None:
            self._watch.close()
        self._close_pipes(forked=True)
        self.rpc.forget()
        _CURRENT.clear()

    def _wait_for_the_others(self, store: JobStore) -> None:
        try:
            store.barrier(_END, check=lambda missing: self.raise_for_dead(missing, _END))
        except (PeerError, RuntimeError) as error:
            store.report_failure(f"{type(error).__name__}: {error}")
            log.warning("rank %d ends without the others: %s", self.topology.rank, error)

    def raise_for_dead(self, missing: list[int], what: str) -> None:
        """Raise PeerError if one of the ranks ``missing`` at ``what`` is silent, or waits for this rank."""
        statuses = self.rpc.peer_status(missing, _PROBE_S)
        for rank in [rank for rank, status in statuses.items() if status is None]:
            ended = self.store is not None and self.store.have_ended(rank)
            raise PeerError(
                f"rank {rank} on {self.hosts[rank]} did not come to {what!r} and "
                + ("has ended" if ended else "does not answer: it is probably dead; look at its output")
            )
        if threading.current_thread() is not threading.main_thread() and self.rpc.status != NEXT_BATCH:
            return
        apart = next((rank for rank, status in statuses.items() if status in (ALL_GATHER, _END)), None)
        self._num_apart = 0 if apart is None else self._num_apart + 1
        if apart is None:
            return
        message = (
            f"rank {apart} on {self.hosts[apart]} waits at {statuses[apart]!r}, and rank "
            f"{self.topology.rank} at {what!r}: {CALL_ALIKE}"
        )
        # A message that was sent before may still be on a slow network.
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
    """Join the other ranks of the job and make the session the current one; collective.

    Without torchrun it is a session of one rank, which uses no network. The process group is created unless
    one exists. In a process that torchrun started, glibc is set to keep freed memory for the next step,
    unless the environment configures the allocator.

    Args:
        strategy: Name of the strategy; only stored.
        options: The strategy's options; only stored.
        timeout_s: How long a rank may be silent, here and in every collective; DGLX_TIMEOUT overrides it.
        backend, device: As of :func:`dglx_dist.init`.
        topology: None: read from the environment.

    Raises:
        ConfigError: the environment is invalid, ranks disagree, a rank lacks its device, or a session is open
            already.
        PeerError: ranks are missing after the time-out; the message lists them.
    """
    show_briefly()
    if _CURRENT or _LATER:
        asked = "" if _CURRENT else " (dgl.distributed.initialize() asked for it)"
        raise ConfigError(f"a session is open already{asked}; close it with dglx_dist.shutdown() or use it")
    if topology is None:
        _check_group(read_topology().world_size)
    settings = read_settings()
    limit_s = settings.timeout_s or timeout_s
    if not 0 < limit_s < float("inf"):
        raise ConfigError(f"timeout_s={limit_s} must be a number of seconds above 0")
    found = topology or read_topology()
    if is_started_by_agent():
        end_with_parent()
    if is_launched_by_torchrun() and not settings.allocator_set:
        keep_memory()
    mine = {"strategy": strategy, "options": dict(options or {}), "timeout_s": limit_s, "seed": seed}
    mine["scratch_in"] = settings.scratch
    if found.world_size == 1:
        session = _session_of_one_rank(found, settings, mine, device)
    else:
        correct_nodes, request = topology is None, (device, backend)
        session = _session_of_ranks(found, settings, mine, request, correct_nodes=correct_nodes)
    _CURRENT.append(session)
    return session


def current_session() -> Session:
    """Return the open session of this process; starts a deferred one, collectively; ConfigError if none."""
    if not _CURRENT and _LATER:
        _LATER.pop()()
    if not _CURRENT:
        raise ConfigError("no session is open; call dglx_dist.init() or dgl.distributed.initialize() first")
    _check_group(_CURRENT[-1].topology.world_size)
    return _CURRENT[-1]


def _check_group(world_size: int) -> None:
    """Raise ConfigError if torch.distributed has a process group of another size than the session."""
    if dist.is_initialized() and dist.get_world_size() != world_size:
        raise ConfigError(
            f"the process group of torch.distributed has {dist.get_world_size()} ranks, but this session has "
            f"{world_size}: each process would train alone. Start the ranks with torchrun --nproc-per-node "
            f"{dist.get_world_size()} script.py in place of mp.spawn, and leave init_process_group out"
        )


def start_later(start: Callable[[], Session] | None) -> None:
    """Defer ``start`` to the first call of :func:`current_session`; None: cancel."""
    _LATER[:] = [] if start is None else [start]


def get_session_or_start(start: Callable[[], Session]) -> Session:
    """Return the open or deferred session, else call ``start``, which is collective."""
    return current_session() if _CURRENT or _LATER else start()


_LIBRARIES = {__name__.partition(".")[0], "dgl", "torch", "collections"}


def warn_user(message: str) -> None:
    """Warn on rank 0, at the line outside of this package, DGL and torch that led here."""
    if _CURRENT and _CURRENT[-1].topology.rank:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def get_open_session() -> Session | None:
    return _CURRENT[-1] if _CURRENT else None


def _session_of_one_rank(
    topology: Topology, settings: Settings, mine: Mapping[str, Any], device: object
) -> Session:
    ledger, hosts, taken = Ledger(topology), (socket.gethostname(),), take_device(device, 0, settings.device)
    _say_devices([taken], hosts, choose_backend([taken], hosts, None))
    return Session(
        **mine,
        topology=topology,
        rpc=Rpc(0, ledger, mine["timeout_s"]),
        ledger=ledger,
        hosts=hosts,
        device=torch.device(taken.name),
        ranks_of_device=1,
        job=secrets.token_hex(8),
        trace=None if settings.trace is None else TraceWriter(settings.trace, topology.rank),
    )


def _session_of_ranks(
    topology: Topology,
    settings: Settings,
    mine: Mapping[str, Any],
    request: tuple[object, str | None],
    *,
    correct_nodes: bool,
) -> Session:
    """Meet the other ranks; ``mine`` has the arguments of :func:`start_session` that a session stores.

    ``request`` is the device and the backend.
    """
    if not is_launched_by_torchrun():
        raise ConfigError(f"{topology.world_size} ranks need torchrun's environment; start with torchrun")
    timeout_s, rendezvous = float(mine["timeout_s"]), read_rendezvous()
    bind_alike(rendezvous)
    raw = open_store(rendezvous, topology.rank, topology.world_size, timeout_s)
    store = JobStore(raw, topology.rank, topology.world_size, timeout_s)
    store.seal(settings, is_local=rendezvous.is_local)
    trace, no_trace = open_trace(settings.trace, topology.rank)
    device, backend = request
    taken = take_device(device, rendezvous.local_rank, settings.device)
    hello = {
        "host": socket.gethostname(),
        "node": rendezvous.node,
        **collect_shared_facts(mine["strategy"], mine["options"], mine["seed"], settings.curve),
        "no_trace": no_trace,
        "device": asdict(taken),
    }
    hellos: list[Any] = store.exchange("settings", hello)
    check_hellos(hellos)
    hosts = tuple(str(one["host"]) for one in hellos)
    devices = [RankDevice(**one["device"]) for one in hellos]
    backend = choose_backend(devices, hosts, backend)
    if correct_nodes:
        topology = assign_servers(topology, tuple(one["node"] for one in hellos))
    ledger = Ledger(topology)
    rpc = Rpc(topology.rank, ledger, timeout_s)
    with ExitStack() as undo:
        undo.callback(rpc.close)
        address = choose_listening_address(rendezvous)
        _, addresses = open_endpoints(
            store.exchange,
            hosts,
            lambda served: rpc.listen(address, served),
            secret=store.key,
            encrypted=settings.curve,
        )
        rpc.connect(addresses)
        owns_group = _make_group(store, topology, timeout_s, backend)
        undo.pop_all()
    if topology.rank == 0:
        _say_devices(devices, hosts, dist.get_backend_config())
        if settings.curve:
            log.warning(
                "DGLX_CURVE: calls and rows between ranks are encrypted; collectives of %s, which sum "
                "gradients, are not",
                backend,
            )
    return Session(
        **mine,
        topology=topology,
        rpc=rpc,
        ledger=ledger,
        hosts=hosts,
        device=torch.device(taken.name),
        ranks_of_device=sum(one.card == taken.card for one in devices) if taken.card else 1,
        job=derive_key(store.key, "name of the job").decode()[:16],
        trace=trace,
        store=store,
        owns_group=owns_group,
    )


def _say_devices(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str) -> None:
    # Python shows warnings where nobody configured logging: who has a GPU, or a torch for one, must see what
    # became of it. With a torch for CPUs the line says nothing new.
    is_news = ranks[0].card or (ranks[0].why and is_built_for_gpus())
    log.log(logging.WARNING if is_news else logging.INFO, "%s", describe(ranks, hosts, backend))


def _make_group(store: JobStore, topology: Topology, timeout_s: float, backend: str) -> bool:
    if dist.is_initialized():
        return False
    # NCCL's threads outlive the interpreter, in which a sealed store runs.
    found = store.raw if backend == "gloo" else store.unsealed
    dist.init_process_group(
        backend,
        store=PrefixStore("group", found),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return True


T = TypeVar("T", bound="Shared")


class Shared:
    """Objects that a deep copy shares with the original: a model may refer to its graph."""

    def __deepcopy__(self: T, memo: Mapping[int, object]) -> T:
        return self
