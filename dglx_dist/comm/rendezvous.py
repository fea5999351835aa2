"""Meeting of the ranks: network addresses, the rendezvous store with its barriers, the first failure.

The store itself refuses nobody, so every value that ranks put into it carries an HMAC with a key of the job.
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
"""Period at which a waiting rank probes those it waits for."""
_LOCAL_STORE_S = 10.0
"""For the store of a launcher on this machine, which was there before the ranks; then it has been killed."""
_FIRST_ERROR = "first_error"
_SECRET, _SECRET_FILE = "secret", "dglx-secret"
_SEAL_BYTES = 32
_HOW_TO_SHARE = (
    "write one (`openssl rand -hex 32`) to a file of mode 600 and set DGLX_SECRET_FILE on all machines"
)
_OPEN_SECRET = (
    "this job has no secret of its own, so its ranks get one through the rendezvous store: whoever reaches "
    "that on the network can read features, change what is trained, and pose as a rank"
)

log = logging.getLogger(__name__)


def open_store(rendezvous: Rendezvous, rank: int, world_size: int, timeout_s: float) -> Store:
    """Connect to the store of the job, or host it on rank 0 if the launcher does not.

    ConfigError: the host is unknown; PeerError: it did not answer within ``timeout_s``.
    """
    host, port = rendezvous.host, rendezvous.port
    hosts_it = rank == 0 and not rendezvous.hosted_by_agent
    limit_s = timeout_s
    if rendezvous.hosted_by_agent and rendezvous.is_local:
        limit_s = min(timeout_s, _LOCAL_STORE_S)
    try:
        open_it = _hosted_store if hosts_it else _connected_store
        store = open_it(host, port, world_size, limit_s)
        store.set_timeout(timedelta(seconds=timeout_s))
    except OSError as error:
        raise PeerError(
            f"rank 0 cannot serve the rendezvous at {host}:{port}: {_first_line(error)}; set MASTER_PORT to "
            "a free port, and MASTER_ADDR to an address of rank 0's machine, on all ranks"
        ) from error
    except RuntimeError as error:
        try:
            # Only now, since a name may be known later than its first look-up.
            socket.getaddrinfo(host, port)
        except OSError as unknown:
            raise ConfigError(
                f"MASTER_ADDR={host!r} is no host that this machine knows ({unknown})"
            ) from None
        if hosts_it:
            reason = _first_line(error)
            raise PeerError(f"rank 0 cannot serve the rendezvous at {host}:{port}: {reason}") from error
        who = "the launcher" if rendezvous.hosted_by_agent else "rank 0"
        raise PeerError(
            f"rank {rank} found no rendezvous at {host}:{port} within {limit_s:g} s; "
            f"{who} should serve it: is it running, and is the port open? ({_first_line(error)})"
        ) from error
    job = PrefixStore(f"dglx/{rendezvous.job}/{rendezvous.attempt}", store)
    # Every rank counts its own sessions, so that a session sees no keys of an earlier one.
    with _answered():
        return PrefixStore(str(job.add(f"sessions/{rank}", 1)), job)


@contextmanager
def _answered() -> Iterator[None]:
    """PeerError if the store does not answer: a failed read or a number that is none ends its connection."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"the rendezvous store does not answer ({_first_line(error)}): the launcher or rank 0 has ended, "
            "or another process writes to the store; open it to the machines of the job only"
        ) from error


def serve_store(host: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Serve a store on the address of ``host`` alone (port 0: any free one), without waiting for its clients.

    A TCPStore that binds by itself listens on every interface. OSError: the port is taken, or no such
    address.
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
    except NotImplementedError:  # torch 2.4's default, libuv, takes no socket
        return serve(use_libuv=False)


def _connected_store(host: str, port: int, world_size: int, timeout_s: float) -> Store:
    # On a thread: the time-out of a TCPStore ends the connection, but no wait for an answer of something else
    # that listens there.
    outcome: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            # With wait_for_workers its error would not name the missing ranks.
            limit = timedelta(seconds=timeout_s)
            outcome.put(TCPStore(host, port, world_size, timeout=limit, wait_for_workers=False))
        except RuntimeError as error:
            outcome.put(error)

    threading.Thread(target=connect, daemon=True, name="dglx-store").start()
    try:
        found = outcome.get(timeout=timeout_s + _CHECK_EVERY_S)
    except queue.Empty:
        # A TCPStore may also retry for longer than its time-out.
        try:
            socket.create_connection((host, port), _CHECK_EVERY_S).close()
        except OSError as error:
            raise RuntimeError(str(error)) from None
        raise RuntimeError("something else listens there: set MASTER_PORT to a free port") from None
    if isinstance(found, RuntimeError):
        raise found
    return found


def _hosted_store(host: str, port: int, world_size: int, timeout_s: float) -> Store:
    timeout, taken = timedelta(seconds=timeout_s), None
    if host in LOOPBACK_HOSTS:
        try:
            return serve_store(host, port, world_size, timeout)
        except OSError as error:
            taken = error
    # Any other host may be a name of another network's, to which nothing here can bind. A port that is taken
    # may be that of an earlier session of this process, whose store is then shared.
    try:
        return TCPStore(
            host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise taken or error from None


@final
class SealedStore(Store):
    """``inner`` with an HMAC before each value, which binds it to its key; counters have none.

    PeerError: a value was not written with ``secret``.
    """

    def __init__(self, inner: Store, secret: bytes) -> None:
        super().__init__()
        self.inner, self._secret = inner, secret

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.inner.set(key, self._seal(key, raw) + raw)  # type: ignore[arg-type]  # bytes are valid

    def get(self, key: str) -> bytes:
        with _answered():
            found = self.inner.get(key)
        return self._opened(key, found)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with _answered():
            found = self.inner.multi_get(keys)
        return [self._opened(key, one) for key, one in zip(keys, found, strict=True)]

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        self.inner.wait(keys, *limit)

    def renewed(self, *facts: object) -> SealedStore:
        """Return the store with a secret made from this one's and ``facts`` (JSON)."""
        return SealedStore(self.inner, derive_key(self._secret, *facts))

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(derive_key(self._secret, "value", key), value, "sha256")

    def _opened(self, key: str, found: bytes) -> bytes:
        value = found[_SEAL_BYTES:]
        if not hmac.compare_digest(found[:_SEAL_BYTES], self._seal(key, value)):
            raise PeerError(
                f"{key!r} in the rendezvous store (its last part is a rank) does not carry this job's seal: "
                "that rank has another secret or version, or another process writes to the store; give all "
                "ranks the same DGLX_SECRET or DGLX_SECRET_FILE and the same version of dglx_dist, and open "
                "the store to the machines of the job only"
            )
        return value


@final
class JobStore:
    """The store as used by the ranks of one session. Any thread."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.raw = self.unsealed = self._failures = store
        self.key = b""
        """Of the session, set by :meth:`seal`."""
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._barriers = 0

    def seal(self, settings: Settings, *, is_local: bool) -> None:
        """Agree on the job's secret, and seal with it what is written from here on.

        Without one in the ``settings``, rank 0 makes it. If all ranks are on this machine (``is_local``) they
        read it from rank 0's memory, which takes the same user; else it goes through the store, with a
        warning. ConfigError: some ranks have one and others none, or it is required and missing.
        """
        secret, made = settings.secret, b""
        if secret is None and settings.require_secret and not is_local:
            raise ConfigError(f"DGLX_REQUIRE_SECRET is set, but there is no secret; {_HOW_TO_SHARE}")
        if self.rank == 0:
            if secret is None:
                secret = made = secrets.token_hex(_SEAL_BYTES).encode()
            with _private_file(made if is_local else b"") as path:
                self.raw.set(_SECRET, path or made.decode())
                if made and not path:
                    log.warning("%s; %s", _OPEN_SECRET, _HOW_TO_SHARE)
                self._meet(secret)
            return
        if secret is None:
            self._wait([_SECRET], "the start", None)
            secret = self.raw.get(_SECRET)
            if not secret:
                self.raw.set(f"start/{self.rank}", "")  # without a seal, so that the others do not wait
                raise ConfigError(f"rank 0 has a secret and rank {self.rank} has none; {_HOW_TO_SHARE}")
            if is_local:
                secret = _read_private_file(secret.decode(errors="replace"))
        self._meet(secret)

    def _meet(self, secret: bytes) -> None:
        self.raw = self._failures = SealedStore(self.raw, derive_key(secret, "store", VERSION))
        mine = secrets.token_hex(_SEAL_BYTES)
        nonces = self.exchange("start", mine)
        # What another session wrote would open here, too, but then no two ranks get the same key.
        nonces[self.rank] = mine
        self.raw = self.raw.renewed(nonces)
        self.key = derive_key(secret, "session", nonces)

    def exchange(self, what: str, value: object) -> list[object]:
        """Send ``value`` (JSON) to every rank and return all of them by rank; each rank must call it once."""
        self.raw.set(f"{what}/{self.rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        self._wait(keys, what, None)
        return [json.loads(self.raw.get(key)) for key in keys]

    def barrier(self, what: str, check: Callable[[list[int]], None] | None = None) -> None:
        """Return when every rank has called it; all must call their barriers in the same order.

        ``check`` is called periodically with the missing ranks and may raise. PeerError names ranks that are
        missing after the session's time-out, or at another barrier.
        """
        self._barriers += 1
        keys = [f"barrier/{self._barriers}/{rank}" for rank in range(self.world_size)]
        self.raw.set(keys[self.rank], what)
        self._wait(keys, what, check)
        for rank, raw in enumerate(self.raw.multi_get(keys)):
            at = raw.decode(errors="replace")
            if at != what:
                raise PeerError(
                    f"rank {rank} is at {at!r} where rank {self.rank} is at {what!r}: the ranks did not take "
                    "the same steps; call collective functions outside of branches that differ between ranks"
                )

    def _wait(self, keys: Sequence[str], what: str, check: Callable[[list[int]], None] | None) -> None:
        """Wait until all of ``keys``, one per rank, are set; PeerError as for :meth:`barrier`."""
        started = time.monotonic()
        next_check_s = _CHECK_EVERY_S
        while not self._have(keys):
            waited_s = time.monotonic() - started
            if waited_s >= min(next_check_s, self.timeout_s):
                next_check_s = waited_s + _CHECK_EVERY_S
                missing = self._missing(keys, what, check)
                if missing and waited_s >= self.timeout_s:
                    names = ", ".join(map(str, missing))
                    raise PeerError(
                        f"ranks missing: {names} (of {self.world_size}) at {what!r} after {self.timeout_s:g} "
                        "s; look at their output, or raise timeout_s (DGLX_TIMEOUT)"
                    )
            # Polled, because Store.wait blocks the connection that other threads need and warns on stderr.
            time.sleep(min(0.0005 + waited_s / 20, 0.05))

    def report_failure(self, text: str) -> None:
        """Store ``text`` as the reason why this rank ends, unless another rank was first."""
        with contextlib.suppress(RuntimeError):  # the store is gone, so no rank could read it
            if not self._failures.check([_FIRST_ERROR]):
                self._failures.set(_FIRST_ERROR, json.dumps({"rank": self.rank, "text": text[:2000]}))

    def claim_message(self, text: str) -> bool:
        """Whether this rank is the first one that claims to show an error of this ``text``."""
        with contextlib.suppress(RuntimeError):
            return int(self.raw.add(f"shown/{zlib.crc32(text.encode())}", 1)) == 1
        return True

    def report_end(self) -> None:
        """Tell the others that this rank ends early, so that they do not take it for a dead one."""
        with contextlib.suppress(RuntimeError):
            self.raw.set(f"ended/{self.rank}", "")

    def have_ended(self, rank: int) -> bool:
        """Whether ``rank`` has told so."""
        with contextlib.suppress(RuntimeError):
            return bool(self.raw.check([f"ended/{rank}"]))
        return False

    def first_failure(self) -> tuple[int, str] | None:
        """(rank, text) of the first rank that reported a failure, or None; PeerError: it is no rank's."""
        try:
            if not self._failures.check([_FIRST_ERROR]):
                return None
            failure = json.loads(self._failures.get(_FIRST_ERROR))
        except RuntimeError:
            return None
        return int(failure["rank"]), str(failure["text"])

    def _missing(
        self, keys: Sequence[str], what: str, check: Callable[[list[int]], None] | None
    ) -> list[int]:
        """Return the missing ranks; raise PeerError if one of them failed or is dead."""
        missing = self._absent(keys)
        while missing:
            try:
                failure = self.first_failure()
                if failure is not None and failure[0] in missing:
                    raise PeerError(f"rank {failure[0]} failed before {what!r}: {failure[1]}")
                if check is not None:
                    check(missing)
                break
            except PeerError:
                # A rank may have arrived, and even ended, during the check: its silence is no error then.
                before, missing = missing, self._absent(keys)
                if missing == before:
                    raise
        return missing

    def _absent(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._have([key])]

    def _have(self, keys: Sequence[str]) -> bool:
        with _answered():
            return bool(self.raw.check(list(keys)))


@contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """Yield a path at which this user's processes on this machine read ``content``; "" if it is empty."""
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
    reason = "no such file of this user's"
    try:
        # The path comes from the store: no other file is taken for a secret, and none that blocks is opened.
        process = re.fullmatch(r"(/proc/[0-9]{1,10})/fd/[0-9]{1,10}", path)
        if process is not None and _is_memory_of_own(path, process[1]):
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                # Again of what is open: the process may have replaced it, or ended.
                if _is_memory_of_own(f"/proc/self/fd/{file.fileno()}", process[1]):
                    return file.read(2 * _SEAL_BYTES)
    except OSError as error:
        reason = str(error.strerror)
    raise PeerError(
        f"the secret of rank 0 cannot be read ({reason}): ranks run as different users or in different "
        f"containers, or another process writes to the rendezvous store; {_HOW_TO_SHARE}"
    )


def _is_memory_of_own(path: str, process: str) -> bool:
    """Whether ``path`` is the file of a secret in memory, made and held by processes of this user."""
    found, name = os.stat(path), os.readlink(path)
    is_own = found.st_uid == os.geteuid() == os.stat(process).st_uid
    return is_own and stat.S_ISREG(found.st_mode) and name == f"/memfd:{_SECRET_FILE} (deleted)"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def choose_listening_address(rendezvous: Rendezvous) -> str:
    """Return the numeric local address of the interface that ``GLOO_SOCKET_IFNAME`` or the rendezvous picks.

    ConfigError: there is no such interface, or only loopback although there are several machines.
    """
    if rendezvous.interface:
        return find_interface_address(rendezvous.interface)
    remedy = "use a name or address that every machine resolves, or set GLOO_SOCKET_IFNAME"
    address = find_address_towards(
        rendezvous.host, rendezvous.port, f"MASTER_ADDR={rendezvous.host!r}", remedy
    )
    if rendezvous.num_nodes > 1 and ipaddress.ip_address(address).is_loopback:
        # The rendezvous runs on this machine and its name is loopback here; others use a real address.
        address = _own_outer_address()
    return address


def find_interface_address(name: str, said_by: str = "GLOO_SOCKET_IFNAME") -> str:
    """Return the IPv4 address of the interface ``name``, or else its IPv6 address.

    ConfigError: it does not exist or has no address; the message names ``said_by``, the user's setting.
    """
    known = psutil.net_if_addrs()
    if name not in known:
        raise ConfigError(f"{said_by}={name!r} is no network interface here (there are: {', '.join(known)})")
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in known[name]:
            if found.family == family:
                return str(found.address).partition("%")[0]
    raise ConfigError(f"{said_by}={name!r} has no address; choose an interface that is up")


def read_link_speed(address: str) -> float | None:
    """Return the bytes per second of the network card with the numeric local ``address``.

    None where the kernel does not know, as for loopback and many virtual cards.
    """
    cards = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in cards and any(found.address == address for found in addresses):
            return cards[name].speed * 1e6 / 8 or None
    return None


def find_address_towards(host: str | None, port: int, said: str, remedy: str) -> str:
    """Return the numeric local address by which this machine reaches ``host``; messages call it ``said``."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # chooses the route; a datagram socket sends nothing yet
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{said} cannot be reached from here: {error}; {remedy}") from error


def _own_outer_address() -> str:
    name = socket.gethostname()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        found = set()
    outer = sorted(
        address for address in found if not ipaddress.ip_address(address.split("%")[0]).is_loopback
    )
    if not outer:
        raise ConfigError(
            f"several machines take part, but this one ({name}) knows itself only by a loopback address; set "
            "GLOO_SOCKET_IFNAME to the network interface that the others reach"
        )
    return outer[0]
