"""One-sided calls: between real ranks, and with hand-made pairs in one process."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import numpy as np
import pytest
import zmq

from dglx_dist.comm import rpc as rpc_module
from dglx_dist.comm.auth import Credentials, ZapAuthenticator
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.rpc import PeerAddress, Rpc
from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.comm.wire import Head, Kind
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from tests.helpers.ranks import run_ranks

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4)


@contextlib.contextmanager
def pair(
    *, mine: Credentials | None = None, theirs: Credentials | None = None, timeout_s: float = 20.0
) -> Iterator[tuple[Rpc, Rpc]]:
    """Ranks 0 and 1 in this process; rank 0 can call rank 1."""
    own, second = (credentials or Credentials(secret=b"s") for credentials in (mine, theirs))
    caller, server = (Rpc(rank, Ledger(Topology(rank, 2, (0, 1))), timeout_s) for rank in range(2))
    caller.listen("127.0.0.1", own)
    endpoint = server.listen("127.0.0.1", second)
    caller.connect({1: PeerAddress(rank=1, host="there", endpoint=endpoint, public_key=second.public_key)})
    try:
        yield caller, server
    finally:
        caller.close()
        server.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int64).reshape(3, 4),
        np.arange(70_000, dtype=np.float32)[::-1],
        np.arange(1_700_000, dtype=np.float32),
        np.zeros((0, 5), dtype=np.float16),
        np.float64(3.5).reshape(()),
        np.array([True, False]),
        np.arange(6, dtype=">i4"),
        np.arange(24).reshape(4, 6).T,
    ],
    ids=["matrix", "reversed", "frames", "empty", "scalar", "bool", "bigendian", "transposed"],
)
def test_arrays_arrive_as_they_left(array: np.ndarray) -> None:
    with pair() as (caller, server):
        server.register("echo", lambda _name, arrays: arrays)
        first, second = caller.call(1, "echo", "x", [array, TABLE], phase="p")
    assert first.shape == array.shape
    assert first.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(first, array)
    assert np.array_equal(second, TABLE)
    assert first.flags.writeable
    assert first.flags.aligned


def test_caller_counts_both_directions_and_payload_only() -> None:
    with pair() as (caller, server):
        server.register("rows", lambda name, arrays: [TABLE[arrays[0]]])
        ids = np.array([3, 1, 3], dtype=np.int64)
        (rows,) = caller.call(1, "rows", "feat", [ids], phase="features", layer=2)
        counted = [astuple(row) for row in caller.ledger.rows()]
        assert server.ledger.total() == 0
    assert np.array_equal(rows, TABLE[[3, 1, 3]])
    assert counted == [("features", 2, 0, 1, False, 3 * 8), ("features", 2, 1, 0, False, 3 * 16)]


def test_call_to_oneself_runs_here_and_counts_nothing() -> None:
    rpc, ran_on = Rpc(0, Ledger(Topology(0, 1, (0,))), 1.0), []
    rpc.register("where", lambda _name, arrays: ran_on.append(threading.get_ident()) or arrays)
    assert rpc.call(0, "where", "", [TABLE], phase="p")[0] is TABLE
    assert ran_on == [threading.get_ident()]
    assert rpc.ledger.total() == 0
    with pytest.raises(RemoteError, match=r"rank 0 .*no operation 'nothing'.*where"):
        rpc.call(0, "nothing", "", [], phase="p")
    with pytest.raises(ConfigError, match="operation 'where' is already registered"):
        rpc.register("where", lambda _name, arrays: arrays)


def test_error_of_a_handler_reaches_the_caller_as_text() -> None:
    def fail(_name: str, _arrays: object) -> list[np.ndarray]:
        raise IndexError("row 99 of 10")

    with pair() as (caller, server):
        server.register("fail", fail)
        with pytest.raises(RemoteError, match=r"rank 1 on there failed at fail 'feat': IndexError: row 99"):
            caller.call(1, "fail", "feat", [], phase="p")
        with pytest.raises(RemoteError, match="no operation 'unknown'"):
            caller.call(1, "unknown", "", [], phase="p")
        server.register("object", lambda _name, _arrays: [np.array([object()])])
        with pytest.raises(RemoteError, match="dtype object cannot be sent"):
            caller.call(1, "object", "", [], phase="p")
        assert caller.find_silent([1], 5.0) == []


def test_slow_handler_holds_up_nobody_and_silence_is_named() -> None:
    release = threading.Event()
    with pair() as (caller, server):
        server.register("wait", lambda _name, _arrays: release.wait(20) and [])
        server.register("quick", lambda _name, arrays: arrays)
        slow = caller.submit(1, "wait", "w", [], phase="p")
        assert np.array_equal(caller.call(1, "quick", "", [TABLE], phase="p")[0], TABLE)
        with pytest.raises(PeerError, match=r"rank 1 on there did not answer wait 'w' within 0.05 s"):
            slow.result(0.05)
        release.set()
        assert slow.result(20) == []


def test_threads_wait_for_calls_of_another_one_meanwhile_that_asks_whether_they_are_ready() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(3) as pool, pair() as (caller, server):
        server.register("wait", lambda _name, _arrays: release.wait(20) and [])
        server.register("echo", lambda _name, arrays: arrays)
        slow = caller.submit(1, "wait", "", [], phase="p")
        waiting = pool.submit(slow.result)
        took_s = 0.0
        for _ in range(20):
            while not slow._link._in_use.locked():
                pass
            started = time.monotonic()
            assert not slow.is_ready()
            took_s += time.monotonic() - started
        release.set()
        assert waiting.result(20) == []
        calls = [caller.submit(1, "echo", "", [TABLE + number], phase="p") for number in range(30)]
        for number, rows in enumerate(pool.map(lambda call: call.result()[0], calls)):
            assert np.array_equal(rows, TABLE + number)
        assert took_s < 1.0  # with 0.1 s of waiting for each it would be 2


def test_replies_find_their_calls_in_any_order_and_from_many_threads() -> None:
    with ThreadPoolExecutor(4) as pool, pair() as (caller, server):
        server.register("rows", lambda _name, arrays: [np.tile(arrays[0], 50)])

        def ask(first: int) -> None:
            numbers = range(first, first + 20)
            calls = [caller.submit(1, "rows", "", [np.array([number])], phase="p") for number in numbers]
            for number, call in reversed([*zip(numbers, calls, strict=True)]):
                assert np.array_equal(call.result()[0], np.full(50, number))

        list(pool.map(ask, range(0, 400, 100)))
        assert caller.ledger.total(phase="p") == 80 * (8 + 400)


def test_call_nobody_waits_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (caller, server):
        server.register("rows", lambda _name, arrays: arrays)
        for _ in range(10):
            caller.submit(1, "rows", "", [TABLE], phase="p")
        dropped = [caller.submit(1, "rows", "", [TABLE], phase="p")]
        read = rpc_module.read_arrays

        def read_late(socket: zmq.Socket[bytes], head: Head) -> list[np.ndarray]:
            # The collector may drop a call at any time, also while its reply is read.
            if (head.kind, head.request) == (Kind.REPLY, 11):
                dropped.clear()
            return read(socket, head)

        monkeypatch.setattr(rpc_module, "read_arrays", read_late)
        caller.call(1, "rows", "", [], phase="p")
        assert dropped == []
        link = caller._client._local.links[1]
        assert len(link._waiting) == len(link.replies) == 0


def test_end_of_the_peer_is_noticed_while_waiting() -> None:
    started, release = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool, pair(timeout_s=60.0) as (caller, server):
        server.register("wait", lambda _name, _arrays: started.set() or (release.wait(20) and []))
        pending = caller.submit(1, "wait", "", [], phase="p")
        assert started.wait(20)
        closing = pool.submit(server.close)
        with pytest.raises(PeerError, match="rank 1 on there closed its connection or died during"):
            pending.result()
        release.set()
        closing.result(20)
        with pytest.raises(PeerError, match="does not accept connections"):
            caller.call(1, "wait", "", [], phase="p")


def test_closing_under_calls_of_other_threads_ends_them_with_an_error_that_says_so() -> None:
    with ThreadPoolExecutor(3) as pool, pair() as (caller, server):
        server.register("rows", lambda _name, _arrays: [np.zeros(300_000)])
        under_way = threading.Barrier(4)

        def ask_for_ever() -> None:
            caller.call(1, "rows", "", [TABLE], phase="p")
            under_way.wait(20)
            while True:
                caller.call(1, "rows", "", [TABLE], phase="p")

        request = [pool.submit(ask_for_ever) for _ in range(3)]
        under_way.wait(20)
        caller.close()
        for query in request:
            with pytest.raises(PeerError, match="session"):
                query.result(20)


def test_reply_that_came_in_time_counts_however_late_it_is_asked_for() -> None:
    with pair() as (caller, server):
        server.register("echo", lambda _name, arrays: arrays)
        early = caller.submit(1, "echo", "", [TABLE], phase="p")
        late = caller.submit(1, "echo", "", [TABLE], phase="p")
        assert late._link.pump(20_000)  # the reply of the first; that of the second follows
        assert late._link.pump(20_000)
        third = caller.submit(1, "echo", "", [TABLE], phase="p")
        assert late._link._socket.poll(20_000)  # has come, but was not taken in
        for case in (early, late, third):
            assert np.array_equal(case.result(1e-9)[0], TABLE)


def test_handler_that_ends_its_thread_ends_only_the_call() -> None:
    def leave(_name: str, _arrays: object) -> list[np.ndarray]:
        raise SystemExit("enough")

    with pair() as (caller, server):
        server.register("leave", leave)
        for _ in range(5):  # more often than there are threads in the pool
            with pytest.raises(RemoteError, match="SystemExit: enough"):
                caller.call(1, "leave", "", [], phase="p")


def test_a_number_of_a_socket_that_is_still_closing_can_come_again() -> None:
    """Threads come and go, and ZeroMQ lets go of a closed socket later than the system of its number."""
    with pair() as (caller, server):
        server.register("echo", lambda _name, arrays: arrays)
        still_there = [caller._contexts[0].socket(zmq.PAIR) for _ in range(200)]
        for number, old in enumerate(still_there):
            old.bind(f"inproc://monitor.s-{number}")
        (answer,) = caller.call(1, "echo", "", [TABLE], phase="p")
        assert np.array_equal(answer, TABLE)
        for old in still_there:
            old.close(0)


def test_find_silent_returns_only_ranks_without_answer() -> None:
    with pair(timeout_s=60.0) as (caller, server):
        assert caller.find_silent([0, 1], 20.0) == []
        server.close()
        assert caller.find_silent([0, 1], 20.0) == [1]
        caller.close()
        assert caller.find_silent([1], 20.0) == [1]


def test_wrong_secret_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pair(mine=Credentials(secret=b"guess")) as (caller, server):
        server.register("rows", lambda _name, arrays: pytest.fail("a stranger was served"))
        with pytest.raises(PeerError, match="refused the connection"):
            caller.call(1, "rows", "", [TABLE], phase="p")
    assert "refused a connection from 127.0.0.1: it does not know this job's secret" in caplog.text


def greet_without_security(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        stranger.connect(endpoint)
        stranger.send(b"hello")
        assert monitor.poll(20_000)
        stranger.disable_monitor()
        monitor.close(0)


def send_raw_bytes(endpoint: str) -> None:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(20)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 8)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass  # whatever it greets with, it hangs up


@pytest.mark.parametrize("come", [greet_without_security, send_raw_bytes])
def test_refuses_and_logs_strangers(caplog: pytest.LogCaptureFixture, come: Callable[[str], None]) -> None:
    with caplog.at_level(logging.WARNING), pair() as (caller, server):
        server.register("rows", lambda _name, _arrays: pytest.fail("a stranger was served"))
        server.register("echo", lambda _name, arrays: arrays)
        come(server._servers[0].endpoint)
        deadline = time.monotonic() + 20
        while "refused a connection" not in caplog.text and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert "refused a connection" in caplog.text
        assert np.array_equal(caller.call(1, "echo", "", [TABLE], phase="p")[0], TABLE)


@pytest.mark.parametrize("flags", [0x06, 0x02])  # a command of the handshake; a message
def test_a_stranger_cannot_make_a_rank_hold_much(flags: int) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    with pair() as (_, server):
        host, port = server._servers[0].endpoint.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(greeting + bytes([flags]) + (8 << 30).to_bytes(8, "big"))
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                stranger.sendall(bytes(64 << 20))


def test_malformed_message_of_a_member_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pair() as (caller, server):
        server.register("echo", lambda _name, arrays: arrays)
        assert caller.find_silent([1], 20) == []
        link = caller._client._local.links[1]
        for frames in ([b"garbage"], [b""], [b"DGLX" + b"\xff" * 60], [b"x", b"y", b"z" * 100_000]):
            link._socket.send_multipart(frames)
        assert np.array_equal(caller.call(1, "echo", "", [TABLE], phase="p")[0], TABLE)
    assert caplog.text.count("dropped a malformed message") == 4


def test_curve_accepts_only_the_keys_of_the_job() -> None:
    keys = [zmq.curve_keypair() for _ in range(3)]
    members = frozenset(public for public, _ in keys[:2])
    sides = [Credentials(secret=b"", public_key=p, secret_key=s, accepted_keys=members) for p, s in keys]
    with pair(mine=sides[0], theirs=sides[1]) as (caller, server):
        server.register("echo", lambda _name, arrays: arrays)
        frames = np.arange(5 << 20, dtype=np.uint8)
        assert np.array_equal(caller.call(1, "echo", "", [frames], phase="p")[0], frames)
    with pair(mine=sides[2], theirs=sides[1]) as (caller, _), pytest.raises(PeerError, match="refused"):
        caller.call(1, "echo", "", [], phase="p")


def test_secret_is_not_shown_when_printed() -> None:
    assert "hidden" not in repr(Credentials(secret=b"hidden", secret_key=b"hidden", public_key=b"p"))


def _everyone_asks_everyone() -> list[list[float]]:
    with start_session() as session:
        rank = session.topology.rank
        session.rpc.register("mine", lambda _name, arrays: [arrays[0] * 10 + rank])
        session.store and session.store.barrier("registered")
        return [
            session.rpc.call(index, "mine", "", [np.array([1.0])], phase="p")[0].tolist()
            for index in range(session.topology.world_size)
        ]


@pytest.mark.parametrize(("world_size", "curve"), [(1, "0"), (3, "0"), (3, "1")])
def test_ranks_call_each_other(world_size: int, curve: str) -> None:
    for row in run_ranks(_everyone_asks_everyone, world_size, environment={"DGLX_CURVE": curve}):
        assert row == [[10.0 + index] for index in range(world_size)]


@contextlib.contextmanager
def record_traffic(endpoint: str) -> Iterator[tuple[str, bytearray]]:
    """Pass the connections to another port on to ``endpoint``; yield that port, and what callers send."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    message = bytearray()

    def carry(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                copy += piece
                target.sendall(piece)

    def serve() -> None:
        with contextlib.suppress(OSError):
            inside = opened.enter_context(listener.accept()[0])
            outside = opened.enter_context(socket.create_connection((host, int(port))))
            threading.Thread(target=carry, args=(outside, inside, bytearray()), daemon=True).start()
            carry(inside, outside, message)

    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", message


def test_a_recorded_handshake_is_worth_nothing_at_any_rank(caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(secret=b"the job's key")
    served: list[str] = []
    third = Rpc(2, Ledger(Topology(0, 1, (0,))), 20.0)
    with caplog.at_level(logging.WARNING), pair(mine=credentials, theirs=credentials) as (caller, server):
        endpoints = [server._servers[0].endpoint, third.listen("127.0.0.1", credentials)]
        for case in (server, third):
            case.register("rows", lambda _name, arrays: served.append("rows") or arrays)
        with record_traffic(endpoints[0]) as (proxy, message):
            caller.connect({1: PeerAddress(rank=1, host="there", endpoint=proxy)})
            caller.call(1, "rows", "", [TABLE], phase="p")
            heard = bytes(message)
        assert b"rows" in heard
        assert b"the job's key" not in heard
        for endpoint in endpoints:
            host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
            with socket.create_connection((host, int(port))) as stranger:
                stranger.settimeout(20)
                stranger.sendall(heard)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1024):
                        pass
        third.close()
    assert served == ["rows"]
    assert caplog.text.count("it does not know this job's secret") == 2


def test_a_server_that_does_not_know_the_key_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    # It accepts everybody, as a stranger at the port of a dead rank would.
    monkeypatch.setattr(ZapAuthenticator, "_accepts", lambda *_: True)
    with pair(theirs=Credentials(secret=b"guess")) as (caller, server):
        server.register("rows", lambda _name, _arrays: [TABLE])
        for _ in range(2):
            with pytest.raises(PeerError, match="rank 1 on there does not know this job's secret"):
                caller.call(1, "rows", "", [TABLE], phase="p")


def test_a_rank_that_ends_while_it_is_connected_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, proof = threading.Event(), Credentials.proof

    def late(*args: object) -> bytes:
        assert ended.wait(20)
        time.sleep(0.2)  # until ZeroMQ has noticed
        return proof(*args)

    with ThreadPoolExecutor(1) as pool, pair() as (caller, _), contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        caller.connect({1: PeerAddress(rank=1, host="there", endpoint=endpoint)})
        ending = pool.submit(lambda: listener.accept()[0].close() or ended.set())
        monkeypatch.setattr(Credentials, "present", lambda *_: None)
        monkeypatch.setattr(Credentials, "proof", late)
        with pytest.raises(PeerError, match="rank 1 on there"):
            caller.call(1, "echo", "", [TABLE], phase="p")
        ending.result(20)


def test_port_of_a_dead_rank_gets_no_new_connection() -> None:
    """Another process at that port would get queued messages, and its replies would be believed."""
    started, release = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool, pair(timeout_s=60.0) as (caller, server):
        server.register("wait", lambda _name, _arrays: started.set() or (release.wait(20) and []))
        pending = caller.submit(1, "wait", "", [], phase="p")
        assert started.wait(20)
        port = int(server._servers[0].endpoint.rpartition(":")[2])
        closing = pool.submit(server.close)
        assert pending._link._monitor.poll(20_000)
        release.set()
        closing.result(20)
        with socket.create_server(("127.0.0.1", port)) as stranger:
            stranger.settimeout(1.0)
            with pytest.raises(TimeoutError):
                stranger.accept()
        with pytest.raises(PeerError, match="rank 1 on there closed its connection or died during"):
            pending.result()
