"""Let the ranks meet: network addresses, the rendezvous store with its barriers, and the first failure.

Any process can write to the store, so each value from a rank carries an HMAC with the job's key.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import os
import queue
import re
import secrets
import socket
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import final

import psutil
from torch.distributed.distributed_c10d import PrefixStore, Store

from dglx_dist.comm.auth import derive_key
from dglx_dist.comm.topology import LOOPBACK_HOSTS, Rendezvous, Settings
from dglx_dist.comm.wire import VERSION
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.internals.pytorch import TCPStore

_CHECK_EVERY_S = 1.0
"""A rank that waits for others probes them at this interval, in seconds."""
_LOCAL_STORE_TIMEOUT_S = 10.0
"""Seconds to wait for a local launcher's store, which starts before the ranks unless it was killed."""
_FIRST_ERROR = "first_error"
_MAX_REASON_CHARS = 2000
_SECRET, _SECRET_FILE = "secret", "dglx-secret"
_SEAL_BYTES = 32
_SECRET_HINT = (
    "Write a secret (`openssl rand -hex 32`) to a file of mode 600 and set DGLX_SECRET_FILE on all machines."
)
_OPEN_SECRET_WARNING = (
    "This job has no secret of its own, so its ranks get one through the rendezvous store. Anybody who "
    "reaches the store on the network can read features, change the training, and act as a rank."
)

log = logging.getLogger(__name__)


def open_store(rendezvous: Rendezvous, rank: int, world_size: int, timeout_s: float) -> Store:
    """Connect to the job's store, or host it on rank 0 if the launcher does not.

    Raises ConfigError if the host is unknown, and PeerError if the store did not answer within ``timeout_s``.
    """
    host, port = rendezvous.host, rendezvous.port
    is_host = rank == 0 and not rendezvous.hosted_by_agent
    open_tcp_store = _host_store if is_host else _connect_store
    limit_s = timeout_s
    if rendezvous.hosted_by_agent and rendezvous.is_local:
        limit_s = min(timeout_s, _LOCAL_STORE_TIMEOUT_S)

    try:
        store = open_tcp_store(host, port, world_size, limit_s)
        store.set_timeout(timedelta(seconds=timeout_s))
    except OSError as error:
        raise PeerError(
            f"rank 0 cannot serve the rendezvous at {host}:{port}: {_read_first_line(error)}. Set "
            "MASTER_PORT to a free port, and MASTER_ADDR to an address of rank 0's machine, on all ranks."
        ) from error
    except RuntimeError as error:
        # Check the name after the failure, because the first look-up may fail for a new name.
        _check_host(host, port)
        reason = _read_first_line(error)
        if is_host:
            raise PeerError(f"rank 0 cannot serve the rendezvous at {host}:{port}: {reason}") from error
        server = "The launcher" if rendezvous.hosted_by_agent else "Rank 0"
        raise PeerError(
            f"rank {rank} found no rendezvous at {host}:{port} within {limit_s:g} s. {server} should serve "
            f"it. Is it running, and is the port open? ({reason})"
        ) from error

    job = PrefixStore(f"dglx/{rendezvous.job}/{rendezvous.attempt}", store)
    # Each rank counts its sessions, and each session has its own prefix, so that old keys are not visible.
    with _report_silent_store():
        session_number = job.add(f"sessions/{rank}", 1)
    return PrefixStore(str(session_number), job)


def _check_host(host: str, port: int) -> None:
    """Raise ConfigError unless the name ``host`` has an address."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR={host!r} is not a known host ({error})") from None


@contextmanager
def _report_silent_store() -> Iterator[None]:
    """Turn the store's errors in a ``with`` block into a PeerError.

    The store closes a client's connection after a failed read or an invalid number.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"the rendezvous store does not answer ({_read_first_line(error)}). The launcher or rank 0 has "
            "ended, or another process writes to the store. Open it to the machines of the job only."
        ) from error


def serve_store(host: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Serve a store only on the address that ``host`` resolves to, without waiting for its clients.

    Port 0 selects a free port. A TCPStore that binds by itself would listen on every interface. Raises
    OSError if the port is in use, or there is no such address.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server((str(address[0]), int(address[1])), family=family)
    serve = partial(
        TCPStore,
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    try:
        return serve()
    except NotImplementedError:
        # torch 2.4 uses libuv by default, which takes no socket.
        return serve(use_libuv=False)


def _connect_store(host: str, port: int, world_size: int, timeout_s: float) -> Store:
    """Connect to another rank's store. Raise RuntimeError if it does not answer in time."""
    outcome: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            # With wait_for_workers the error would not name the missing ranks.
            limit = timedelta(seconds=timeout_s)
            outcome.put(TCPStore(host, port, world_size, timeout=limit, wait_for_workers=False))
        except RuntimeError as error:
            outcome.put(error)

    # Connect on a thread. A TCPStore's time limit covers the connection, but not the wait for an answer if
    # another program listens there.
    threading.Thread(target=connect, daemon=True, name="dglx-store").start()
    try:
        result = outcome.get(timeout=timeout_s + _CHECK_EVERY_S)
    except queue.Empty:
        # A TCPStore may also retry for longer than its time limit, so check whether anything listens.
        try:
            socket.create_connection((host, port), _CHECK_EVERY_S).close()
        except OSError as error:
            raise RuntimeError(str(error)) from None
        raise RuntimeError("something else listens there. Set MASTER_PORT to a free port.") from None

    if isinstance(result, RuntimeError):
        raise result
    return result


def _host_store(host: str, port: int, world_size: int, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    bind_error = None
    if host in LOOPBACK_HOSTS:
        try:
            return serve_store(host, port, world_size, timeout)
        except OSError as error:
            bind_error = error

    # Any other host may be a name in another network, to which nothing here can bind. A port that is in use
    # may belong to an earlier session in this process. Its store is then shared.
    try:
        return TCPStore(
            host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise bind_error or error from None


@final
class SealedStore(Store):
    """Store that writes an HMAC before each value of ``inner``. Counters have none.

    The HMAC binds a value to its key. Raises PeerError if a value was not written with ``secret``.
    """

    def __init__(self, inner: Store, secret: bytes) -> None:
        super().__init__()
        self.inner = inner
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        sealed = self._seal(key, content) + content
        self.inner.set(key, sealed)  # type: ignore[arg-type]  # the store also takes bytes

    def get(self, key: str) -> bytes:
        with _report_silent_store():
            sealed = self.inner.get(key)
        return self._unseal(key, sealed)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with _report_silent_store():
            sealed = self.inner.multi_get(keys)
        return [self._unseal(key, value) for key, value in zip(keys, sealed, strict=True)]

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        self.inner.wait(keys, *limit)

    def with_new_secret(self, *values: object) -> SealedStore:
        """Return a store with a secret that is derived from the current secret and ``values`` (JSON)."""
        return SealedStore(self.inner, derive_key(self._secret, *values))

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(derive_key(self._secret, "value", key), value, "sha256")

    def _unseal(self, key: str, sealed: bytes) -> bytes:
        seal, value = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise PeerError(
                f"{key!r} in the rendezvous store (its last part is a rank) does not carry this job's seal. "
                "That rank has another secret or version, or another process writes to the store. Give all "
                "ranks the same DGLX_SECRET or DGLX_SECRET_FILE and the same version of dglx_dist, and open "
                "the store to the machines of the job only."
            )
        return value


@final
class JobStore:
    """The ranks' values, barriers and failures for one session in the rendezvous store. Thread-safe."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.raw = store
        """Store for the session's values. :meth:`seal` replaces it with a store that authenticates values."""
        self.unsealed = store
        self._failures = store
        self.key = b""
        """Key that authenticates the session's values. Empty before :meth:`seal`."""
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._num_barriers = 0

    def seal(self, settings: Settings, *, is_local: bool) -> None:
        """Agree on the job's secret, and seal all later values with it.

        If ``settings`` has no secret, rank 0 makes one. If all ranks are on this machine (``is_local``), they
        read the secret from rank 0's memory, which requires the same user. Otherwise rank 0 writes it to the
        store, with a warning. Raises ConfigError if only some ranks have a secret, or if a secret is required
        but missing.
        """
        secret = settings.secret
        if secret is None and settings.require_secret and not is_local:
            raise ConfigError(f"DGLX_REQUIRE_SECRET is set, but there is no secret. {_SECRET_HINT}")
        if self.rank == 0:
            self._publish_secret(secret, is_local=is_local)
            return
        if secret is None:
            secret = self._fetch_secret(is_local=is_local)
        self._use_secret(secret)

    def _publish_secret(self, secret: bytes | None, *, is_local: bool) -> None:
        """Use ``secret``, or make a secret and give it to the other ranks."""
        new_secret = b""
        if secret is None:
            secret = new_secret = secrets.token_hex(_SEAL_BYTES).encode()
        # Keep the file open until all ranks use the secret. An empty value tells them that the user set one.
        with _private_file(new_secret if is_local else b"") as path:
            self.raw.set(_SECRET, path or new_secret.decode())
            if new_secret and not path:
                log.warning("%s %s", _OPEN_SECRET_WARNING, _SECRET_HINT)
            self._use_secret(secret)

    def _fetch_secret(self, *, is_local: bool) -> bytes:
        """Return the secret that rank 0 generated. Raise ConfigError if the user gave rank 0 a secret."""
        self._wait_for([_SECRET], "the start", None)
        secret = self.raw.get(_SECRET)
        if not secret:
            # Other ranks wait for a value from this rank. They refuse this one, because it has no seal, and
            # so they stop at once.
            self.raw.set(f"start/{self.rank}", "")
            raise ConfigError(f"rank 0 has a secret and rank {self.rank} has none. {_SECRET_HINT}")
        if is_local:
            return _read_private_file(secret.decode(errors="replace"))
        return secret

    def _use_secret(self, secret: bytes) -> None:
        """Seal the values with ``secret``, and agree with all ranks on a key for this session."""
        sealed_store = SealedStore(self.raw, derive_key(secret, "store", VERSION))
        self.raw = self._failures = sealed_store
        # Values from another session have a valid seal, too, but their nonces lead to a different key.
        own_nonce = secrets.token_hex(_SEAL_BYTES)
        nonces = self.exchange("start", own_nonce)
        nonces[self.rank] = own_nonce
        self.raw = sealed_store.with_new_secret(nonces)
        self.key = derive_key(secret, "session", nonces)

    def exchange(self, what: str, value: object) -> list[object]:
        """Return every rank's ``value`` (JSON), by rank. Every rank calls this once per ``what``."""
        self.raw.set(f"{what}/{self.rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        self._wait_for(keys, what, None)
        return [json.loads(self.raw.get(key)) for key in keys]

    def barrier(self, what: str, check: Callable[[list[int]], None] | None = None) -> None:
        """Return when every rank has called this. All ranks must call their barriers in the same order.

        ``check`` is called periodically with the missing ranks and may raise. Raises PeerError with the ranks
        that are missing after the time limit, or that are at another barrier.
        """
        self._num_barriers += 1
        keys = [f"barrier/{self._num_barriers}/{rank}" for rank in range(self.world_size)]
        self.raw.set(keys[self.rank], what)
        self._wait_for(keys, what, check)

        for rank, encoded in enumerate(self.raw.multi_get(keys)):
            other_barrier = encoded.decode(errors="replace")
            if other_barrier != what:
                raise PeerError(
                    f"rank {rank} is at {other_barrier!r}, but rank {self.rank} is at {what!r}. The ranks "
                    "did not take the same steps. Call collective functions outside of branches that differ "
                    "between ranks."
                )

    def _wait_for(self, keys: Sequence[str], what: str, check: Callable[[list[int]], None] | None) -> None:
        """Wait until all ``keys``, one per rank, are set. Raise PeerError with the ranks that are missing."""
        start_s = time.monotonic()
        next_check_s = _CHECK_EVERY_S
        while not self._has_keys(keys):
            waited_s = time.monotonic() - start_s
            if waited_s >= min(next_check_s, self.timeout_s):
                next_check_s = waited_s + _CHECK_EVERY_S
                missing = self._check_missing(keys, what, check)
                if missing and waited_s >= self.timeout_s:
                    ranks = ", ".join(map(str, missing))
                    raise PeerError(
                        f"ranks missing: {ranks} (of {self.world_size}) at {what!r} after {self.timeout_s:g} "
                        "s. Look at their output, or raise timeout_s (DGLX_TIMEOUT)."
                    )

            # Poll, because Store.wait blocks the connection that other threads need, and warns on stderr.
            time.sleep(min(0.0005 + waited_s / 20, 0.05))

    def report_failure(self, text: str) -> None:
        """Store ``text`` as the reason why this rank ends, unless another rank was first."""
        # If the store is gone, no rank could read the reason.
        with contextlib.suppress(RuntimeError):
            if not self._failures.check([_FIRST_ERROR]):
                failure = {"rank": self.rank, "text": text[:_MAX_REASON_CHARS]}
                self._failures.set(_FIRST_ERROR, json.dumps(failure))

    def claim_message(self, text: str) -> bool:
        """Return whether this rank is the first to ask to show an error with this ``text``."""
        with contextlib.suppress(RuntimeError):
            return int(self.raw.add(f"shown/{zlib.crc32(text.encode())}", 1)) == 1
        return True

    def report_end(self) -> None:
        """Tell the other ranks that this rank ends early, so that they do not consider it dead."""
        with contextlib.suppress(RuntimeError):
            self.raw.set(f"ended/{self.rank}", "")

    def has_ended(self, rank: int) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self.raw.check([f"ended/{rank}"]))
        return False

    def first_failure(self) -> tuple[int, str] | None:
        """Return (rank, text) for the first rank that reported a failure, or None."""
        try:
            if not self._failures.check([_FIRST_ERROR]):
                return None
            failure = json.loads(self._failures.get(_FIRST_ERROR))
        except RuntimeError:
            return None
        return int(failure["rank"]), str(failure["text"])

    def _check_missing(
        self, keys: Sequence[str], what: str, check: Callable[[list[int]], None] | None
    ) -> list[int]:
        """Return the missing ranks. Raise PeerError if a missing rank failed or is dead."""
        missing = self._find_missing(keys)
        while missing:
            try:
                self._raise_for_failed(missing, what)
                if check is not None:
                    check(missing)
                return missing
            except PeerError:
                # A rank may have arrived, and even ended, during the check. Then its silence is no error.
                old_missing = missing
                missing = self._find_missing(keys)
                if missing == old_missing:
                    raise
        return missing

    def _raise_for_failed(self, missing: Sequence[int], what: str) -> None:
        failure = self.first_failure()
        if failure is not None:
            rank, reason = failure
            if rank in missing:
                raise PeerError(f"rank {rank} failed before {what!r}: {reason}")

    def _find_missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._has_keys([key])]

    def _has_keys(self, keys: Sequence[str]) -> bool:
        with _report_silent_store():
            return bool(self.raw.check(list(keys)))


@contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """Yield a path from which this user's processes read ``content``, or "" if it is empty."""
    if not content:
        yield ""
        return
    descriptor = os.memfd_create(_SECRET_FILE)
    try:
        os.write(descriptor, content)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _read_private_file(path: str) -> bytes:
    """Read rank 0's secret from a :func:`_private_file` path. Raise PeerError if that fails."""
    reason = "no such file of this user"
    try:
        # The path comes from the store, so accept only a secret's file, and open none that blocks.
        process = re.fullmatch(r"(/proc/[0-9]{1,10})/fd/[0-9]{1,10}", path)
        if process is not None and _is_own_secret_file(path, process[1]):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                # Check the open file again, because the process may have replaced it or ended.
                if _is_own_secret_file(f"/proc/self/fd/{descriptor}", process[1]):
                    return file.read(2 * _SEAL_BYTES)
    except OSError as error:
        reason = str(error.strerror)

    raise PeerError(
        f"the secret of rank 0 cannot be read ({reason}). Ranks run as different users or in different "
        f"containers, or another process writes to the rendezvous store. {_SECRET_HINT}"
    )


def _is_own_secret_file(path: str, process: str) -> bool:
    """Return whether ``path`` is an in-memory secret file in a process that this user runs."""
    status = os.stat(path)
    process_status = os.stat(process)
    is_own = status.st_uid == os.geteuid() == process_status.st_uid
    is_secret = os.readlink(path) == f"/memfd:{_SECRET_FILE} (deleted)"
    return is_own and is_secret and stat.S_ISREG(status.st_mode)


def _read_first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def choose_listening_address(rendezvous: Rendezvous) -> str:
    """Return the local address on the interface that ``GLOO_SOCKET_IFNAME`` or the rendezvous picks.

    Raises ConfigError if there is no such interface, or only loopback although there are several machines.
    """
    if rendezvous.interface:
        return find_interface_address(rendezvous.interface)
    remedy = "Use a name or address that every machine resolves, or set GLOO_SOCKET_IFNAME."
    setting = f"MASTER_ADDR={rendezvous.host!r}"
    address = find_address_towards(rendezvous.host, rendezvous.port, setting, remedy)
    if rendezvous.num_nodes > 1 and ipaddress.ip_address(address).is_loopback:
        # The rendezvous is on this machine, so its name is loopback here. Other machines need a real address.
        address = _find_own_address()
    return address


def find_interface_address(name: str, setting: str = "GLOO_SOCKET_IFNAME") -> str:
    """Return the IPv4 address on the interface ``name``, or else its IPv6 address.

    Raises ConfigError if it does not exist or has no address. The message names the user's ``setting``.
    """
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        known_names = ", ".join(interfaces)
        raise ConfigError(f"{setting}={name!r} is no network interface here (known: {known_names})")
    # Prefer an IPv4 address.
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces[name]:
            if address.family == family:
                return str(address.address).partition("%")[0]
    raise ConfigError(f"{setting}={name!r} has no address. Choose an interface that is up.")


def read_link_speed(address: str) -> float | None:
    """Return the bytes per second of the network card with the numeric local ``address``.

    The result is None if the kernel reports no speed, as for loopback and many virtual cards.
    """
    cards = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        has_address = any(entry.address == address for entry in entries)
        if has_address and name in cards:
            megabits_per_s = cards[name].speed
            return megabits_per_s * 1e6 / 8 or None
    return None


def find_address_towards(host: str | None, port: int, setting: str, remedy: str) -> str:
    """Return the local address from which this machine reaches ``host``. Messages name the ``setting``."""
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, socket_type, protocol, _, target = candidates[0]
        with socket.socket(family, socket_type, protocol) as probe:
            # Connecting chooses the route. A datagram socket sends nothing yet.
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{setting} cannot be reached from here: {error}. {remedy}") from error


def _find_own_address() -> str:
    """Return an address for this machine's host name that is not loopback, or raise ConfigError."""
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, None)
    except OSError:
        entries = []

    for address in sorted({str(entry[4][0]) for entry in entries}):
        without_scope = address.split("%")[0]
        if not ipaddress.ip_address(without_scope).is_loopback:
            return address
    raise ConfigError(
        f"several machines take part, but this one ({name}) knows itself only by a loopback address. Set "
        "GLOO_SOCKET_IFNAME to the network interface that the others reach."
    )
