"""One container of the local functions service: a process under AWS's runtime client, and its Runtime API."""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from dglx_dist.strategies.serverless.executors.local import arithmetic_variables

API = "/2018-06-01/runtime"
RUNTIME_MODULES = ("awslambdaric", "runtime_client", "snapshot_restore_py", "simplejson")
INIT_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    request: str
    body: bytes
    error: str | None
    """Type of the error, as the runtime client tells it; None where there was none."""
    duration_s: float
    init_s: float | None
    """How long the container took to start; None for a warm one."""
    log: str

    def report(self, memory_mb: int) -> str:
        ms = self.duration_s * 1e3
        init = "" if self.init_s is None else f"\tInit Duration: {self.init_s * 1e3:.2f} ms"
        return (
            f"REPORT RequestId: {self.request}\tDuration: {ms:.2f} ms\tBilled Duration: {int(ms) + 1} ms\t"
            f"Memory Size: {memory_mb} MB\tMax Memory Used: 64 MB{init}\t\n"
        )


class Answering(BaseHTTPRequestHandler):
    owner: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes | None, headers: dict[str, str]) -> None:
        """Send ``body``; None: an answer that has none, nor a length."""
        self.send_response(status)
        length = {} if body is None else {"Content-Length": str(len(body))}
        for name, value in {**headers, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body or b"")


def serve(handler: type[Answering], owner: object) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"owner": owner}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class Container:
    """Runs invocations one after another until it dies, or takes too long over one."""

    def __init__(self, task: Path, configuration: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="container-")
        self._inbox: queue.Queue[tuple[str, bytes, float] | None] = queue.Queue()
        self._outbox: queue.Queue[tuple[str, str | None, bytes]] = queue.Queue()
        self._configuration, self._fresh = configuration, True
        self.alive, self._started = True, time.monotonic()
        self._waiting = threading.Event()
        self._server = serve(_RuntimeApi, self)
        self._log = Path(self._folder.name, "log")
        self._process = self._start(task)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def run(self, request: str, event: bytes, timeout_s: float) -> Outcome:
        """Hand ``event`` to the handler and wait until it has ended, or is killed."""
        init_s = self._init() if self._fresh else None
        self._fresh = False
        before = self._log.stat().st_size
        begun = time.monotonic()
        if self.alive:
            self._inbox.put((request, event, time.time() + timeout_s))
        try:
            _, error, body = self._outbox.get(timeout=timeout_s)
        except queue.Empty:
            error, body = (
                "Sandbox.Timedout",
                _encode_error("Sandbox.Timedout", f"Task timed out after {timeout_s} s"),
            )
        if error is not None and error.startswith("Sandbox."):
            self.kill()
        took = time.monotonic() - begun
        log = self._log.read_bytes()[before:].decode(errors="replace")
        return Outcome(request=request, body=body, error=error, duration_s=took, init_s=init_s, log=log)

    def kill(self) -> None:
        self.alive = False
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._watcher.join()
        self._folder.cleanup()

    def next(self) -> tuple[str, bytes, float] | None:
        """Return the next request of the runtime client, or None at the end."""
        self._waiting.set()
        return self._inbox.get()

    def finish(self, request: str, error: str | None, body: bytes) -> None:
        self._outbox.put((request, error, body))

    def _init(self) -> float:
        self._waiting.wait(INIT_WITHIN_S)
        return time.monotonic() - self._started

    def _start(self, task: Path) -> subprocess.Popen[bytes]:
        places = [task, _links(Path(self._folder.name, "runtime"), RUNTIME_MODULES)]
        # What the image installs. dglx_dist is installed here by a .pth file, which -S does not read.
        places.append(Path(torch.__file__).parent.parent)
        port, handler = self._server.server_address[1], _read_handler(task)
        environment = {
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{port}",
            "AWS_LAMBDA_FUNCTION_NAME": self._configuration["FunctionName"],
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(self._configuration["MemorySize"]),
            "LAMBDA_TASK_ROOT": str(task),
            "_HANDLER": handler,
            "PYTHONPATH": ":".join(map(str, places)),
            "OPENBLAS_NUM_THREADS": "1",
            **arithmetic_variables(),
        }
        # -S: dglx_dist is that of the image.
        command = [sys.executable, "-S", "-m", "awslambdaric", handler]
        with self._log.open("wb") as log:
            return subprocess.Popen(command, env=environment, cwd=task, stdout=log, stderr=log)

    def _watch(self) -> None:
        code = self._process.wait()
        self.alive = False
        words = self._log.read_text(errors="replace")[-1000:]
        self._waiting.set()
        self._inbox.put(None)
        self._outbox.put(
            ("", "Sandbox.Exit", _encode_error("Runtime.ExitError", f"Runtime exited: {code}\n{words}"))
        )
        self._server.shutdown()
        self._server.server_close()


class _RuntimeApi(Answering):
    owner: Container

    def do_GET(self) -> None:
        assert self.path == f"{API}/invocation/next"
        result = self.owner.next()
        if result is None:
            self.close_connection = True
            return
        request, event, deadline = result
        headers = {
            "Lambda-Runtime-Aws-Request-Id": request,
            "Lambda-Runtime-Deadline-Ms": str(int(deadline * 1e3)),
            "Lambda-Runtime-Invoked-Function-Arn": "arn:aws:lambda:local",
            "Lambda-Runtime-Trace-Id": "Root=1-0-0",
            "Content-Type": "application/json",
        }
        self.answer(200, event, headers)

    def do_POST(self) -> None:
        body = self.body()
        parts = self.path.removeprefix(API).strip("/").split("/")
        if parts[-1] == "response":
            self.owner.finish(parts[1], None, body)
        else:
            kind = self.headers.get("Lambda-Runtime-Function-Error-Type", "Unhandled")
            self.owner.finish(parts[1], f"Sandbox.{kind}" if parts[0] == "init" else kind, body)
        self.answer(202, b"", {})


def _read_handler(task: Path) -> str:
    (command,) = re.findall(r'^CMD \["(.+)"\]$', Path(task, "Dockerfile").read_text(), re.MULTILINE)
    return str(command)


def _links(folder: Path, modules: Sequence[str]) -> Path:
    """Make ``folder`` with links to what is installed here of ``modules``."""
    folder.mkdir()
    for name in modules:
        spec = importlib.util.find_spec(name)
        place = Path(spec.origin)
        place = place.parent if place.name == "__init__.py" else place
        (folder / place.name).symlink_to(place)
    return folder


def _encode_error(kind: str, message: str) -> bytes:
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()
