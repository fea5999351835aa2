"""Every executor returns the arrays of a direct call, bit for bit; a dead worker is noticed at once."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dglx_dist.comm.rpc import Handler
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.serverless.executors.base import (
    EXECUTORS,
    Executor,
    ExecutorContext,
    Invocation,
    Lost,
)
from dglx_dist.strategies.serverless.tasks import Direction, TaskKey
from dglx_dist.strategies.serverless.worker import RemoteCaller, TaskPhase, Worker
from dglx_dist.strategies.serverless.worker_process import Fault

from .programs import gat, gcn, sage
from .servers import Bench, keys_of, serve, until

ROWS = [5, 0, 1, 4]


@contextmanager
def functions_service(
    answer: tuple[int, bytes] | None = None, certificate: Path | None = None
) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    seen: list[Mapping[str, str]] = []

    def run(event: bytes) -> bytes:
        caller = RemoteCaller()
        try:
            return json.dumps(Worker(caller).handle(event)).encode()
        finally:
            caller.close()

    class Service(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_POST(self) -> None:
            event = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(dict(self.headers.items()) | {"path": self.path})
            try:
                status, body = answer or (200, run(event))
            except Exception as error:
                status, body = 500, f"{type(error).__name__}: {error}".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    scheme = "http" if certificate is None else "https"
    try:
        yield f"{scheme}://127.0.0.1:{server.server_port}/f?key=1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def executor_of(
    name: str, handlers: Mapping[str, Handler], notice: Callable[[], None] = lambda: None
) -> Iterator[Executor]:
    with ExitStack() as undo:
        options = {"url": undo.enter_context(functions_service())[0]} if name == "http" else {}
        context = ExecutorContext(handlers=handlers, notice=notice)
        yield undo.enter_context(EXECUTORS.get(name)(context, options))


@pytest.mark.parametrize("name", ["inline", "local", "http"])
def test_every_task_is_the_direct_call(name: str) -> None:
    benches = [Bench(make(), ROWS) for make in (gcn, sage, gat)]
    handlers = benches[0].handlers()
    with executor_of(name, handlers) as executor:
        executor.size(2)
        for bench in benches:
            handlers.update(bench.handlers())
            with serve(bench):
                keys = [key for interval in range(len(ROWS)) for key in keys_of(bench.program, interval)]
                for key in keys:
                    executor.invoke(bench.task(key))
                assert bench.wait_for(executor, keys) == []
                for key in keys:
                    bench.check(key)
        executor.close()
        billed = executor.take_billed()
    if name == "inline":
        assert billed == []
        return
    done = sum(len(keys_of(bench.program)) * len(ROWS) for bench in benches)
    # What closing interrupts is the word of the last one or two, not their work.
    assert done - 2 <= len(billed) <= done
    assert name == "http" or 1 <= sum(item.cold for item in billed) <= 2
    assert all(item.duration_s > 0 and item.memory_mb == 192 for item in billed)


def lost_of(name: str, bench: Bench, key: TaskKey) -> Lost:
    message, billed = threading.Event(), list[Invocation]()
    with serve(bench), executor_of(name, bench.handlers(), message.set) as executor:
        executor.invoke(bench.task(key).again())
        assert message.wait(30)
        (lost,) = executor.take_lost()
        assert executor.take_lost() == []
        # The next one is done all the same.
        good = keys_of(bench.program)[0]
        executor.invoke(bench.task(good))
        bench.wait_for(executor, [good])
        bench.check(good)
        # A function that dies is paid for.
        until(lambda: billed.extend(executor.take_billed()) or len(billed) == 2 * (name != "inline"))
        return lost


@pytest.mark.parametrize("name", ["inline", "local", "http"])
def test_failed_task_is_reported_with_its_reason(name: str) -> None:
    bench, key = Bench(gcn(), ROWS), TaskKey(0, 0, 0, Direction.FORWARD)
    lost = lost_of(name, bench, key)
    assert (lost.key, lost.attempt) == (key, 1)
    assert (
        "task r0.e0.s0.i0.f, attempt 1: task r0.e0.s0.i0.f is step 'GA1', which graph servers do"
        in lost.reason
    )


@pytest.mark.parametrize("name", ["inline", "local"])
def test_a_kill_is_known_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, key = Bench(gcn(), ROWS), TaskKey(0, 4, 3, Direction.FUSED)
    kill = Fault(place=TaskPhase.PUSHED)
    monkeypatch.setattr(Executor, "fault_of", lambda _, task: kill if task.attempt else None)
    lost = lost_of(name, bench, key)
    assert (lost.key, lost.attempt) == (key, 1)
    how = "died: no output, as if it was killed" if name == "local" else "was killed by an injected fault"
    assert how in lost.reason
    assert bench.pushes == [key]
    assert key not in bench.given


def test_unknown_options_and_late_events_are_refused() -> None:
    bench = Bench(gcn(), ROWS)
    task = bench.task(keys_of(bench.program)[0])
    with pytest.raises(ConfigError, match="'memory' is not supported"):
        EXECUTORS.get("local")(ExecutorContext(), {"memory": 1})
    for name in ("inline", "local"):
        executor = EXECUTORS.get(name)(ExecutorContext(handlers=bench.handlers()), {})
        with pytest.raises(ConfigError, match="at least 1"):
            executor.size(0)
        executor.close()
        executor.close()
        with pytest.raises(PeerError, match=r"closed; task r0\.e0\.s1\.i0\.f came too late"):
            executor.invoke(task)
    with pytest.raises(ConfigError, match="needs the graph server's handlers"):
        EXECUTORS.get("inline")(ExecutorContext(), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'url' is missing"),
        ({"url": "ftp://x/"}, "https://HOST/PATH"),
        ({"url": "http://example.org/f"}, "unencrypted; use https://, or insecure=true"),
        *(
            ({"url": url}, "https://HOST/PATH")
            for url in (
                *("https://h:99999/f", "https://h:x/f", "https://[::1/f", "https:///f", "https://h/a b"),
                *("https://h/\u00e9", "file:///etc/passwd", "f"),
            )
        ),
        ({"url": "https://me:mine@example.org/f"}, "give the header Authorization"),
        ({"url": "https://example.org/f", "headers": {"a": 1}}, r"'headers\.a' is \(not shown\)"),
        ({"url": "https://example.org/f", "headers": {"a b": "1"}}, "cannot send the header 'a b'"),
        ({"url": "https://example.org/f", "headers": {"a": "\u20ac"}}, "cannot send the header 'a'"),
        ({"url": "https://example.org/f", "headers": dict.fromkeys(map(str, range(33)), "1")}, "0 to 32"),
        ({"url": "https://example.org/f", "headers": ["a"]}, "expected an object"),
        ({"url": "https://example.org/f", "faults": {}}, "'faults' is not supported"),
    ],
)
def test_options_of_http_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EXECUTORS.get("http")(ExecutorContext(), options)


def post(bench: Bench, **options: object) -> list[Lost]:
    message = threading.Event()
    with EXECUTORS.get("http")(ExecutorContext(notice=message.set), options) as executor:
        executor.invoke(bench.task(keys_of(bench.program)[0]))
        assert message.wait(30)
        return executor.take_lost()


def test_http_reports_the_message_of_the_service() -> None:
    bench = Bench(gcn(), ROWS)
    with functions_service((503, b"too busy")) as (url, seen):
        (lost,) = post(bench, url=url, headers={"x-api-key": "mine"})
        assert lost.reason.endswith("answered 503: too busy")
        assert seen[0]["x-api-key"] == "mine"
        assert seen[0]["path"] == "/f?key=1"
    (lost,) = post(bench, url=url)
    assert "POST to 127.0.0.1" in lost.reason
    assert "key=1" not in lost.reason
    with functions_service((500, b"\x1b]0;owned\x07" + b"x" * 60_000)) as (url, _):
        assert post(bench, url=url)[0].reason.endswith("answered 500: \ufffd]0;owned\ufffd" + "x" * 490)
    with functions_service((200, b"[]")) as (url, _):
        assert "a worker's answer" in post(bench, url=url)[0].reason
    with functions_service((200, b"x" * 100_000)) as (url, _):
        assert "more than 65536" in post(bench, url=url)[0].reason


def test_a_service_that_only_takes_events_bills_nothing_here() -> None:
    bench = Bench(gcn(), ROWS)
    with functions_service((202, b"")) as (url, seen):
        executor = EXECUTORS.get("http")(ExecutorContext(), {"url": url})
        with executor:
            for _ in range(3):
                executor.invoke(bench.task(keys_of(bench.program)[0]))
            until(lambda: len(seen) == 3)
        assert (executor.take_lost(), executor.take_billed()) == ([], [])


def test_closing_waits_for_no_service() -> None:
    bench = Bench(gcn(), ROWS)
    bench.late = 1 << 60
    message = threading.Event()
    with serve(bench), functions_service() as (url, seen):
        executor = EXECUTORS.get("http")(ExecutorContext(notice=message.set), {"url": url, "timeout_s": 60})
        for key in keys_of(bench.program)[:2]:
            executor.invoke(bench.task(key, timeout_s=2))
        until(lambda: seen)
        executor.close()
        assert (executor.take_lost(), len(seen)) == ([], 1)
        assert [thread.name for thread in threading.enumerate() if thread.name == "dglx-worker"] == []


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = self_signed(tmp_path)
    bench = Bench(gcn(), ROWS)
    key = keys_of(bench.program)[0]
    with serve(bench), functions_service(certificate=certificate) as (url, _):
        (lost,) = post(bench, url=url)
        assert "CERTIFICATE_VERIFY_FAILED" in lost.reason
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with EXECUTORS.get("http")(ExecutorContext(), {"url": url}) as executor:
            executor.invoke(bench.task(key))
            assert bench.wait_for(executor, [key]) == []
    bench.check(key)


def self_signed(folder: Path) -> Path:
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    private = key.private_bytes(
        form, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    file = folder / "certificate.pem"
    file.write_bytes(private + certificate.public_bytes(form))
    return file
