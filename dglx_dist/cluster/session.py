"""One run of one rank: who takes part, how to reach them, what was counted, and a clean end."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dglx_dist.cluster.agreement import check_agreement, must_be_alike
from dglx_dist.cluster.allocator import keep_memory
from dglx_dist.cluster.auth import Credentials, make_credentials_keys
from dglx_dist.cluster.client import PeerAddress
from dglx_dist.cluster.failure import FailureWatch
from dglx_dist.cluster.ledger import Ledger
from dglx_dist.cluster.network import listening_address
from dglx_dist.cluster.rpc import Rpc
from dglx_dist.cluster.scratch import Scratch
from dglx_dist.cluster.serve import ServeConfig
from dglx_dist.cluster.store import JobStore, open_store
from dglx_dist.cluster.timeline import Timeline
from dglx_dist.cluster.topology import (
    Settings,
    Topology,
    bind_alike,
    launched_by_torchrun,
    read_rendezvous,
    read_settings,
    read_topology,
    with_nodes,
)
from dglx_dist.cluster.trace import TraceWriter, open_trace
from dglx_dist.cluster.weak import if_alive
from dglx_dist.errors import ConfigError, DglxError, PeerError
from dglx_dist.records import StepShare

log = logging.getLogger(__name__)

_PROBE_S = 5.0
_END = "the end of the session"

# The one module-level slot of the package: user code calls dx.init() once and then names no session. What
# is inside the package takes the session as an argument, or reads it from here by current_session().
_CURRENT: list[Session] = []
# Beside it: how to start the session that is wanted, where user code said so before it could be started.
_LATER: list[Callable[[], Session]] = []


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """What the user said."""

    strategy: str
    options: Mapping[str, object]
    timeout_s: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a session is made of."""

    topology: Topology
    rpc: Rpc
    ledger: Ledger
    scratch: Scratch
    store: JobStore | None
    hosts: tuple[str, ...]
    device: torch.device
    owns_group: bool
    job: str
    """Equal on all ranks of this session, and on no other."""
    trace: TraceWriter | None


@final
class Session:
    """What :func:`start_session` made. Close it, or use it as a context manager."""

    def __init__(self, config: SessionConfig, parts: _Parts) -> None:
        self.strategy, self.options = config.strategy, dict(config.options)
        self.timeout_s, self.seed = config.timeout_s, config.seed
        self.topology, self.device = parts.topology, parts.device
        self.rpc, self.ledger = parts.rpc, parts.ledger
        self.store, self.trace = parts.store, parts.trace
        """None on one rank; None unless DGLX_TRACE asks for it."""
        self.hosts = parts.hosts
        """(W,) machine of each rank, for messages."""
        self.step_share: StepShare | None = None
        """Set by the loader when it yields a batch."""
        self.timeline = Timeline()
        """Off until somebody turns it on."""
        self.attached: dict[str, object] = {}
        """What lower rooms keep as long as the session lasts, such as the graph opened last."""
        self.before_close: list[Callable[[], None]] = []
        """Called by :meth:`close` before anything ends, unless it failed: work that is still under way."""
        self.on_close: list[Callable[[], None]] = []
        """Called by :meth:`close` behind these, also when it failed: what is open; waits for nobody."""
        self._scratch, self._owns_group, self._job = parts.scratch, parts.owns_group, parts.job
        self._closed = False
        self._watch: FailureWatch | None = None
        if self.store is not None:
            self._watch = FailureWatch(self.store, self.rpc, self.hosts, self._scratch.close)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=if_alive(self._leave_to_parent))

    def adopt(self, strategy: str, options: Mapping[str, object]) -> None:
        """Go on under ``strategy``, which was chosen; every rank must, before any loader or model is made."""
        self.strategy, self.options = strategy, dict(options)

    @property
    def scratch(self) -> Path:
        """Folder shared by the ranks of this server, in memory where possible; removed at the end."""
        return self._scratch.path

    def describe_failure(self, doing: str) -> str:
        """Say who is dead or failed first, after ``doing`` went wrong; asks every rank, for seconds."""
        return "" if self._watch is None else self._watch.describe(doing)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends because of ``error``."""
        if self.store is not None and not self._closed:
            self.store.report_failure(f"{type(error).__name__}: {error}")

    def close(self, *, failed: bool = False) -> None:
        """End the session. May be called twice.

        Waits, serving, until the other ranks close theirs too, because they may still read from here;
        not when ``failed``, nor for a rank that failed or died.

        Raises:
            DglxError: what was still under way went wrong; the session has then ended as one that failed.
        """
        if self._closed:
            return
        if not failed:
            self._finish_work()
        self._closed = True
        atexit.unregister(self._at_exit)
        for let_go in self.on_close:
            let_go()
        self.rpc.doing = _END
        if self.trace is not None:
            self.trace.write(self._job, self.topology, self.ledger, failed=failed)
        if self.store is not None and not failed:
            self._wait_for_the_others(self.store)
        if self._watch is not None:
            self._watch.close()
        self.rpc.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._scratch.close()
        if _CURRENT and _CURRENT[-1] is self:
            _CURRENT.pop()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close(failed=error is not None)

    def _finish_work(self) -> None:
        try:
            for action in self.before_close:
                action()
        except DglxError as error:
            self.fail(error)
            self.close(failed=True)
            raise

    def _at_exit(self) -> None:
        self.close(failed=self._watch is not None and self._watch.failed)

    def _leave_to_parent(self) -> None:
        """In a forked process: the rank is the parent, so nothing of it may be ended from here."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._watch is not None:
            self._watch.forget()
        self.rpc.forget()
        _CURRENT.clear()

    def _wait_for_the_others(self, store: JobStore) -> None:
        try:
            store.barrier(_END, check=lambda missing: self.raise_for_dead(missing, _END))
        except (PeerError, RuntimeError) as error:
            log.warning("rank %d ends without the others: %s", self.topology.rank, error)

    def raise_for_dead(self, missing: list[int], what: str) -> None:
        """Raise PeerError if one of the ranks ``missing`` at ``what`` does not answer."""
        for rank in self.rpc.silent(missing, _PROBE_S):
            raise PeerError(
                f"rank {rank} on {self.hosts[rank]} did not come to {what!r} and does not answer: it is "
                "probably dead; look at its output"
            )


def start_session(
    *,
    strategy: str = "data_parallel",
    options: Mapping[str, object] | None = None,
    timeout_s: float = 300.0,
    seed: int = 0,
    backend: str | None = None,
    topology: Topology | None = None,
) -> Session:
    """Join the other ranks of the job and make the session the current one. Every rank must call it.

    Without torchrun it is a session of one rank, which touches no network. The process group is created
    unless the caller has one already. In a process that torchrun started, glibc is told to keep freed memory
    for the next step, unless the environment says something about the allocator.

    Args:
        strategy: Name of the strategy; only kept here.
        options: The strategy's options; only kept here.
        timeout_s: How long a rank may be silent, here and in every collective; DGLX_TIMEOUT overrides it.
        seed: Seed of everything random; equal on all ranks.
        backend: Of the process group; None: gloo, and nccl beside it where there is CUDA.
        topology: None: read from the environment.

    Raises:
        ConfigError: the environment makes no sense, ranks disagree, or a session is open already.
        PeerError: ranks are missing after the time-out; the message lists them.
    """
    if _CURRENT or _LATER:
        asked = "" if _CURRENT else " (dgl.distributed.initialize() asked for it)"
        raise ConfigError(f"a session is open already{asked}; close it with dglx_dist.shutdown() or use it")
    settings = read_settings()
    limit_s = settings.timeout_s or timeout_s
    if not 0 < limit_s < float("inf"):
        raise ConfigError(f"timeout_s={limit_s} must be a number of seconds above 0")
    found = topology or read_topology()
    if launched_by_torchrun() and not settings.allocator_set:
        keep_memory()
    config = SessionConfig(strategy=strategy, options=options or {}, timeout_s=limit_s, seed=seed)
    if found.world_size == 1:
        parts = _alone(found, limit_s, settings)
    else:
        parts = _joined(found, config, settings, correct_nodes=topology is None, backend=backend)
    session = Session(config, parts)
    _CURRENT.append(session)
    return session


def current_session() -> Session:
    """Return the session that is open in this process; one that was to start later starts, collectively.

    Raises:
        ConfigError: there is none.
    """
    if not _CURRENT and _LATER:
        _LATER.pop()()
    if not _CURRENT:
        raise ConfigError("no session is open; call dglx_dist.init() or dgl.distributed.initialize() first")
    return _CURRENT[-1]


def start_later(start: Callable[[], Session] | None) -> None:
    """Start the session by ``start`` when :func:`current_session` is first asked for; None: not any more."""
    _LATER[:] = [] if start is None else [start]


def session_or(start: Callable[[], Session]) -> Session:
    """Return the session that is open or was to start later, else what ``start`` opens; collective then."""
    return current_session() if _CURRENT or _LATER else start()


def session_if_open() -> Session | None:
    """Return the session that is open, None where there is none yet."""
    return _CURRENT[-1] if _CURRENT else None


def _alone(topology: Topology, timeout_s: float, settings: Settings) -> _Parts:
    trace = None if settings.trace is None else TraceWriter(settings.trace, topology.rank)
    ledger, job = Ledger(topology), secrets.token_hex(8)
    return _Parts(
        topology=topology,
        rpc=Rpc(0, ledger, timeout_s),
        ledger=ledger,
        scratch=Scratch(job, 0),
        store=None,
        hosts=(socket.gethostname(),),
        device=_device(0),
        owns_group=False,
        job=job,
        trace=trace,
    )


def _joined(
    topology: Topology,
    config: SessionConfig,
    settings: Settings,
    *,
    correct_nodes: bool,
    backend: str | None,
) -> _Parts:
    if not launched_by_torchrun():
        raise ConfigError(f"{topology.world_size} ranks need torchrun's environment; start with torchrun")
    rendezvous = read_rendezvous()
    bind_alike(rendezvous)
    raw = open_store(rendezvous, topology.rank, topology.world_size, config.timeout_s)
    store = JobStore(raw, topology.rank, topology.world_size, config.timeout_s)
    public, secret = make_credentials_keys() if settings.curve else (None, None)
    trace, no_trace = open_trace(settings.trace, topology.rank)
    hello = {
        "host": socket.gethostname(),
        "node": rendezvous.node,
        "key": public and public.decode(),
        "token": secrets.token_hex(32),
        **must_be_alike(config.strategy, config.options, config.seed, settings.curve),
        "no_trace": no_trace,
    }
    said: list[Any] = store.exchange("start", hello)
    check_agreement(said)
    if correct_nodes:
        topology = with_nodes(topology, tuple(one["node"] for one in said))
    credentials = Credentials(
        secret=said[0]["token"].encode(),
        public_key=public,
        secret_key=secret,
        accepted_keys=frozenset(one["key"].encode() for one in said if one["key"]),
    )
    ledger = Ledger(topology)
    rpc = Rpc(topology.rank, ledger, config.timeout_s, ServeConfig())
    with ExitStack() as undo:
        undo.callback(rpc.close)
        endpoint = rpc.listen(listening_address(rendezvous), credentials)
        rpc.connect(_addresses(said, store.exchange("endpoint", endpoint)))
        owns_group = _make_group(raw, topology, config.timeout_s, backend)
        undo.pop_all()
    device = _device(rendezvous.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what "cuda" without a number then means to the user's code
    # Made from the secret, but telling nothing of it: folder names are public on a machine.
    job = hashlib.sha256(credentials.secret).hexdigest()[:16]
    return _Parts(
        topology=topology,
        rpc=rpc,
        ledger=ledger,
        scratch=Scratch(job, topology.server),
        store=store,
        hosts=tuple(one["host"] for one in said),
        device=device,
        owns_group=owns_group,
        job=job,
        trace=trace,
    )


def _addresses(said: list[Any], endpoints: Sequence[Any]) -> dict[int, PeerAddress]:
    return {
        rank: PeerAddress(
            rank=rank,
            host=one["host"],
            endpoint=endpoint,
            public_key=one["key"].encode() if one["key"] else None,
        )
        for rank, (one, endpoint) in enumerate(zip(said, endpoints, strict=True))
    }


def _make_group(raw: Store, topology: Topology, timeout_s: float, backend: str | None) -> bool:
    if dist.is_initialized():
        return False
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(
        chosen,
        store=PrefixStore("group", raw),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return True


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
