"""A functions service on this machine: AWS's Lambda Invoke API in front, its Runtime API for containers.

A container is a process in which AWS's own runtime client (``awslambdaric``) runs the handler from the build
context of an image, with the libraries that are installed here. boto3 talks to it by ``endpoint_url``. The
parts of the interface that deploying and reading logs need are there, too; IAM knows no role.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .functions_container import Answering, Container, Outcome, serve

REGION = "eu-west-1"
ACCOUNT = "123456789012"
REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
_FUNCTION = re.compile(r"/20\d\d-\d\d-\d\d/functions/([A-Za-z0-9_-]+)(/[a-z-]+)?")


class Refused(Exception):
    """An answer that is an error, as AWS words it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Function:
    """One function, its containers and the events that wait for one."""

    def __init__(
        self, name: str, settings: dict[str, Any], task: Path, image: str, tags: dict[str, str]
    ) -> None:
        self.name, self.settings, self.tags = name, dict(settings), tags
        self.retries, self.age_s = 2, 21_600
        self.event_config: dict[str, Any] | None = None
        self.concurrency = 1000
        self.containers: list[Container] = []
        self.made: list[Container] = []
        self.busy: set[Container] = set()
        self.outcomes: list[Outcome] = []
        self.lines: list[tuple[int, str]] = []
        self.task, self.image = task, image

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "FunctionName": self.name,
            "FunctionArn": f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{self.name}",
            "State": "Active",
            "LastUpdateStatus": "Successful",
            "Version": "$LATEST",
            **self.settings,
        }


class FunctionsService(AbstractContextManager["FunctionsService"]):
    """Serves until closed: ``boto3.client("lambda", endpoint_url=service.url)``."""

    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}
        self.images: dict[str, Path] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._server = serve(_Handler, self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for function in self.functions.values():
            self.discard(function)
        for thread in self._threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self._threads)

    def discard(self, function: Function) -> None:
        for container in function.made:
            container.close()

    def push(self, folder: Path) -> str:
        """Return the URI of an image whose build context is ``folder``."""
        uri = f"{REGISTRY}/{folder.name}:{len(self.images)}"
        self.images[uri] = folder
        return uri

    def add(self, name: str, folder: Path, **settings: Any) -> Function:
        defaults = {"MemorySize": 192, "Timeout": 60}
        self.functions[name] = Function(name, {**defaults, **settings}, folder, self.push(folder), {})
        return self.functions[name]

    def kill_busy(self, name: str) -> int:
        with self._changed:
            busy = list(self.functions[name].busy)
        for container in busy:
            container.kill()
        return len(busy)

    def wait_for(self, name: str, number: int, within_s: float = 60.0) -> list[Outcome]:
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.functions[name].outcomes) >= number, within_s)
            assert done, f"{len(self.functions[name].outcomes)} of {number} ended within {within_s} s"
            return list(self.functions[name].outcomes)

    def invoke(self, function: Function, request: str, event: bytes, *, waits: bool) -> Outcome | None:
        """Run ``event``; ``waits``: until it has ended, and refused where no container is free."""
        if waits:
            container = self._container(function, waits=False)
            if container is None:
                raise Refused(429, "TooManyRequestsException", "Rate Exceeded.")
            return self._run(function, container, request, event)
        thread = threading.Thread(target=self._run_event, args=(function, request, event), daemon=True)
        self._threads.append(thread)
        thread.start()
        return None

    def _run_event(self, function: Function, request: str, event: bytes) -> None:
        arrived = time.monotonic()
        for _ in range(1 + function.retries):
            container = self._container(function, waits=True)
            if container is None or time.monotonic() - arrived > function.age_s:
                return
            if self._run(function, container, request, event).error is None:
                return

    def _container(self, function: Function, *, waits: bool) -> Container | None:
        with self._changed:
            while not self._closed:
                function.containers = [item for item in function.containers if item.alive]
                idle = [item for item in function.containers if item not in function.busy]
                if idle or len(function.containers) < function.concurrency:
                    container = idle[-1] if idle else Container(function.task, function.configuration)
                    if not idle:
                        function.containers.append(container)
                        function.made.append(container)
                    function.busy.add(container)
                    return container
                if not waits:
                    return None
                self._changed.wait()
        return None

    def _run(self, function: Function, container: Container, request: str, event: bytes) -> Outcome:
        outcome = container.run(request, event, float(function.settings["Timeout"]))
        with self._changed:
            function.busy.discard(container)
            function.outcomes.append(outcome)
            function.lines.append((int(time.time() * 1e3), outcome.report(function.settings["MemorySize"])))
            self._changed.notify_all()
        return outcome


class _Handler(Answering):
    owner: FunctionsService

    def do_POST(self) -> None:
        body, request = self.body(), str(uuid.uuid4())
        try:
            if not self.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256"):
                raise Refused(403, "UnrecognizedClientException", "The request is not signed.")
            if self.path == "/":
                self._other(request, body)
            else:
                self._function(request, body)
        except Refused as error:
            message = {"Type": "User", "Message": str(error), "message": str(error), "__type": error.kind}
            self._send(error.status, message, request, {"x-amzn-ErrorType": error.kind})

    do_GET = do_PUT = do_DELETE = do_POST

    def _other(self, request: str, body: bytes) -> None:
        """The log service, by JSON, or IAM, which knows nobody, by XML."""
        target = self.headers.get("X-Amz-Target", "")
        if not target:
            text = (
                "<ErrorResponse><Error><Type>Sender</Type><Code>NoSuchEntity</Code><Message>no role"
                f"</Message></Error><RequestId>{request}</RequestId></ErrorResponse>"
            )
            self._send(404, text.encode(), request)
            return
        record = json.loads(body)
        groups = {f"/aws/lambda/{name}": function for name, function in self.owner.functions.items()}
        if target.endswith("DescribeLogGroups"):
            self._send(200, {"logGroups": [{"logGroupName": name} for name in groups]}, request)
        elif target.endswith("FilterLogEvents"):
            lines = groups[record["logGroupName"]].lines
            # Two to a page: whoever reads one page only reads too little.
            start = int(record.get("nextToken", 0))
            chosen = [line for line in lines if line[0] >= record["startTime"]]
            page = [{"timestamp": at, "message": text} for at, text in chosen[start : start + 2]]
            more = {"nextToken": str(start + 2)} if start + 2 < len(chosen) else {}
            self._send(200, {"events": page, **more}, request)
        else:
            self._send(200, {}, request)

    def _function(self, request: str, body: bytes) -> None:
        if self.command == "POST" and self.path.rstrip("/") == "/2015-03-31/functions":
            self._create(request, json.loads(body))
            return
        match = _FUNCTION.fullmatch(self.path.split("?")[0])
        function = self.owner.functions.get(match[1]) if match else None
        if match is None or function is None:
            raise Refused(404, "ResourceNotFoundException", f"Function not found: {self.path}")
        kind, label = (self.command, match[2] or ""), function
        routes: dict[tuple[str, str], Callable[[], object]] = {
            ("GET", ""): lambda: {
                "Configuration": label.configuration,
                "Tags": label.tags,
                "Code": {"ImageUri": label.image},
            },
            ("GET", "/configuration"): lambda: label.configuration,
            ("PUT", "/event-invoke-config"): lambda: self._put_event_config(label, json.loads(body)),
            ("GET", "/event-invoke-config"): lambda: self._event_config(label),
            ("DELETE", ""): lambda: self._delete(label),
        }
        if kind == ("POST", "/invocations"):
            self._invoke(function, request, body)
        else:
            self._send(204 if self.command == "DELETE" else 200, routes[kind](), request)

    def _create(self, request: str, asked: dict[str, Any]) -> None:
        name, image = asked.pop("FunctionName"), asked.pop("Code")["ImageUri"]
        if image not in self.owner.images:
            raise Refused(400, "InvalidParameterValueException", f"Source image {image} does not exist.")
        folder, tags = self.owner.images[image], asked.pop("Tags", {})
        self.owner.functions[name] = Function(name, asked, folder, image, tags)
        self._send(201, self.owner.functions[name].configuration, request)

    def _put_event_config(self, function: Function, asked: dict[str, Any]) -> dict[str, Any]:
        function.event_config = asked
        function.retries = asked["MaximumRetryAttempts"]
        function.age_s = asked["MaximumEventAgeInSeconds"]
        return asked

    def _event_config(self, function: Function) -> dict[str, Any]:
        if function.event_config is None:
            raise Refused(404, "ResourceNotFoundException", "The function has no EventInvokeConfig")
        return function.event_config

    def _delete(self, function: Function) -> None:
        del self.owner.functions[function.name]
        self.owner.discard(function)

    def _invoke(self, function: Function, request: str, body: bytes) -> None:
        asynchronous = self.headers.get("X-Amz-Invocation-Type") == "Event"
        outcome = self.owner.invoke(function, request, body, waits=not asynchronous)
        if outcome is None:
            self._send(202, b"", request)
            return
        headers = {"X-Amz-Executed-Version": "$LATEST"}
        if outcome.error is not None:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if self.headers.get("X-Amz-Log-Type") == "Tail":
            text = outcome.log + "\n" + outcome.report(function.settings["MemorySize"])
            headers["X-Amz-Log-Result"] = base64.b64encode(text.encode()[-4096:]).decode()
        self._send(200, outcome.body, request, headers)

    def _send(self, status: int, told: object, request: str, headers: dict[str, str] | None = None) -> None:
        body = told if isinstance(told, bytes) else b"" if told is None else json.dumps(told).encode()
        told_of = {"x-amzn-RequestId": request, **(headers or {})}
        if status == 204:
            self.answer(204, None, told_of)
        else:
            self.answer(status, body, {**told_of, "Content-Type": "application/json"})
