"""A local stand-in for S3: moto behind a WSGI layer that counts bytes and breaks requests on demand."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Fault = Callable[[Any, Any, Any], Any]
"""A WSGI application around the next one: (application, environ, start_response) -> chunks."""


def cut_after(num_bytes: int) -> Fault:
    """Send the head and ``num_bytes`` bytes of the body, then close the connection."""

    def apply(application: Any, environ: Any, start_response: Any) -> Iterator[bytes]:
        body = b"".join(application(environ, start_response))

        def chunks() -> Iterator[bytes]:
            yield body[:num_bytes]
            raise ConnectionAbortedError("the test cuts the connection")

        return chunks()

    return apply


def answer(status: str, code: str) -> Fault:
    """Answer with an error of S3."""

    def apply(_application: Any, _environ: Any, start_response: Any) -> list[bytes]:
        body = f"<Error><Code>{code}</Code><Message>secret-of-the-test</Message></Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    return apply


def wait_before(seconds: float) -> Fault:
    """Answer late."""

    def apply(application: Any, environ: Any, start_response: Any) -> Any:
        time.sleep(seconds)
        return application(environ, start_response)

    return apply


@dataclass
class StandIn:
    """The running service. ``faults`` are used up by the requests that match (method, path pattern)."""

    endpoint: str = ""
    faults: list[tuple[str, str, Fault]] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, range) of all requests."""
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of bodies that were sent, by (application id of the client, path)."""

    def fail(self, method: str, pattern: str, *faults: Fault) -> None:
        """Break the next requests of ``method`` on paths with ``pattern``, one by each fault."""
        self.faults += [(method, pattern, fault) for fault in faults]

    def take_fault(self, method: str, path: str) -> Fault | None:
        for index, (wanted, pattern, fault) in enumerate(self.faults):
            if wanted == method and re.search(pattern, path):
                del self.faults[index]
                return fault
        return None

    @cached_property
    def _client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def client(self) -> Any:
        """Return a client of boto3. The first call needs credentials in the environment."""
        return self._client

    def put_folder(self, folder: Path, bucket: str, prefix: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                self.client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

    def count_bytes(self, pattern: str, application: str = "") -> int:
        """Return the bytes of objects sent to the clients whose id has ``application``."""
        matches = (
            n for (who, path), n in self.sent.items() if application in who and re.search(pattern, path)
        )
        return sum(matches)


@contextmanager
def serve(host: str = "127.0.0.1", port: int = 0) -> Iterator[StandIn]:
    """Run the stand-in on a thread of this process."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_args: Any) -> None:
            return None

        def log_error(self, *_args: Any) -> None:
            return None

    stand_in = StandIn()
    service = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def application(environ: Any, start_response: Any) -> Iterator[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        (client,) = re.findall(r"app/(\S+)", environ.get("HTTP_USER_AGENT", "")) or [""]
        with lock:
            stand_in.requests.append((method, path, environ.get("HTTP_RANGE", "")))
            fault = stand_in.take_fault(method, path)
        chunks = fault(service, environ, start_response) if fault else service(environ, start_response)
        for chunk in chunks:
            if method == "GET":
                with lock:
                    stand_in.sent[client, path] += len(chunk)
            yield chunk

    server = make_server(host, port, application, threaded=True, request_handler=Quiet)
    stand_in.endpoint = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()


def _main(host: str, port: str, bucket: str, folder: str) -> None:
    """Serve ``folder`` as BUCKET/graph until the input ends, then print what was sent, and a run."""
    with serve(host, int(port)) as running:
        running.client().create_bucket(Bucket=bucket)
        running.put_folder(Path(folder), bucket, "graph")
        print("ready", flush=True)
        sys.stdin.read()
        sent = {
            client: running.count_bytes("/graph/", client)
            for client in {client for client, _ in running.sent}
        }
        entries = running.client().list_objects_v2(Bucket=bucket, Prefix="run/").get("Contents", [])
        metrics = running.client().get_object(Bucket=bucket, Key="run/metrics.jsonl")["Body"].read().decode()
        keys = [entry["Key"] for entry in entries]
        print(json.dumps({"sent": sent, "keys": keys, "metrics": metrics}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
