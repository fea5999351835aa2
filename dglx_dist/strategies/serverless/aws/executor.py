"""Executor ``aws``: workers as AWS Lambda functions, invoked asynchronously and billed from their log."""

import logging
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, final

from dglx_dist.data.json_fields import Within, read_record
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.serverless.aws.clients import (
    Client,
    Place,
    check_name,
    explain_errors,
    found_or_none,
    is_amazon,
)
from dglx_dist.strategies.serverless.executors.base import (
    Executor,
    ExecutorContext,
    Invocation,
    WorkerHandle,
    names_of,
)
from dglx_dist.strategies.serverless.tasks import Task
from dglx_dist.strategies.serverless.worker import WorkerAnswer
from dglx_dist.strategies.serverless.worker_process import Fault

log = logging.getLogger(__name__)

_REPORT = re.compile(
    r"REPORT RequestId: (?P<request>[0-9a-fA-F-]{36})\s+Duration: (?P<ms>[0-9.]+) ms"
    r"\s+Billed Duration: (?P<billed>[0-9.]+) ms\s+Memory Size: (?P<memory>[0-9]+) MB"
)
_INIT = re.compile(r"Init Duration: [0-9.]+ ms")
_CLOSE_TIMEOUT_S = 5.0
_LOOK_BACK_MS = 60_000
"""Containers write their logs with any delay, and their timestamps are by AWS's clock."""
MAX_REQUESTS = 32
"""Concurrent requests; each returns as soon as AWS has accepted the event."""


def read_report(line: str) -> tuple[str, Invocation] | None:
    """Return a request's id and its invocation from a log line, or None if the line is no REPORT.

    The duration includes a container's start if AWS bills the start.
    """
    report = _REPORT.search(line)
    if report is None:
        return None
    invocation = Invocation(
        duration_s=float(report["billed"]) / 1e3,
        cold=_INIT.search(line) is not None,
        memory_mb=int(report["memory"]),
    )
    return report["request"], invocation


@final
class ReportReader:
    """Polls a function's log in a thread for how long expected invocations took.

    Log lines arrive seconds late. The reader needs the permission ``logs:FilterLogEvents``. Without the
    permission it logs one warning, and durations stay unknown.
    """

    def __init__(self, client: Client, function: str, every_s: float) -> None:
        self._client = client
        self._group = f"/aws/lambda/{function}"
        self._every_s = every_s
        self._since_ms = int(time.time() * 1e3) - _LOOK_BACK_MS
        self._expected_requests: set[str] = set()
        self._invocations: list[Invocation] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dglx-reports", daemon=True)
        self._thread.start()

    def expect(self, request: str) -> None:
        """Look for the report on the invocation ``request``."""
        with self._lock:
            self._expected_requests.add(request)

    def take_found(self) -> list[Invocation]:
        """Return the invocations that were read since the last call."""
        with self._lock:
            invocations = self._invocations
            self._invocations = []
            return invocations

    def close(self) -> None:
        """Stop reading. May be called twice."""
        self._stopped.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with self._lock:
                is_expecting = bool(self._expected_requests)
            try:
                if is_expecting:
                    self._read()
            except (ConfigError, PeerError) as error:
                log.warning("durations of invocations stay unknown: %s", error)
                return

    def _read(self) -> None:
        query = {"logGroupName": self._group, "startTime": self._since_ms, "filterPattern": "REPORT"}
        pages = self._client.get_paginator("filter_log_events").paginate(**query)
        newest_ms = self._since_ms

        # There is no log before the first invocation.
        missing = self._client.exceptions.ResourceNotFoundException
        with explain_errors(f"could not read the log {self._group}"), suppress(missing):
            for page in pages:
                for event in page["events"]:
                    newest_ms = max(newest_ms, int(event["timestamp"]))
                    report = read_report(event["message"])
                    if report is not None:
                        self._note_invocation(*report)
        self._since_ms = max(self._since_ms, newest_ms - _LOOK_BACK_MS)

    def _note_invocation(self, request: str, invocation: Invocation) -> None:
        with self._lock:
            if request in self._expected_requests:
                self._expected_requests.remove(request)
                self._invocations.append(invocation)


@final
@dataclass(frozen=True, kw_only=True)
class AwsOptions:
    """Options of executor ``aws``."""

    function: Annotated[str, Within(1, 64)]
    """Name of the function."""
    region: Annotated[str, Within(1, 64)] | None = None
    """Name of the region, such as "eu-west-1", or None for boto3's default."""
    endpoint_url: Annotated[str, Within(1, 1024)] | None = None
    """Address of an AWS-compatible service, whose bill is simulated."""
    read_log: bool = True
    """Whether the function's log is read for the bill."""
    read_log_every_s: Annotated[float, Within(0.01, 3600)] = 5.0


@final
class AwsExecutor(Executor):
    """Invokes a function created by ``dglx lambda deploy``, one event per attempt. Options: ``AwsOptions``.

    The graph servers and parameter servers must be reachable from the function's subnets. Credentials come
    from boto3's own chain only. :meth:`take_lost` reports only events that AWS rejected, and
    :meth:`take_billed` is seconds late. Workers continue after :meth:`close` until servers stop.
    """

    option_names = names_of(AwsOptions)

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        settings = read_record(AwsOptions, options, "executor 'aws'", defaults=True)
        function = settings.function
        check_name(function)
        place = Place(region=settings.region, endpoint_url=settings.endpoint_url)
        client = place.client("lambda", connections=MAX_REQUESTS)
        self.simulated = not is_amazon(client)
        memory_mb = _check_usable(client, function)
        self._reports: ReportReader | None = None
        if settings.read_log:
            self._reports = ReportReader(place.client("logs"), function, settings.read_log_every_s)

        # Any number of threads may share the poster. The durations come from the log.
        poster = _Poster(client, function, self._reports)
        super().__init__(lambda: poster, context.notice, memory_mb=memory_mb, billed=False)

    def size(self, workers: int) -> None:
        # AWS starts a worker for each event, and the controller limits how many events there are.
        super().size(min(workers, MAX_REQUESTS))

    def take_billed(self) -> list[Invocation]:
        return [] if self._reports is None else self._reports.take_found()

    def close(self) -> None:
        super().close()
        if self._reports is not None:
            self._reports.close()


@final
class _Poster(WorkerHandle):
    def __init__(self, client: Client, function: str, reports: ReportReader | None) -> None:
        self._client = client
        self._function = function
        self._reports = reports

    def invoke(self, task: Task, fault: Fault | None) -> WorkerAnswer | None:
        event = task.to_event()
        with explain_errors(f"AWS did not accept an event for the function {self._function}"):
            answer = self._client.invoke(FunctionName=self._function, InvocationType="Event", Payload=event)
        if self._reports is not None:
            self._reports.expect(str(answer["ResponseMetadata"]["RequestId"]))
        return None

    def stop(self) -> None:
        pass  # A request ends within its time-out, and the client closes its connections when it is deleted.


def _check_usable(client: Client, function: str) -> int:
    """Return the memory of ``function`` in MB. Raises ConfigError if it is missing or not active."""
    purpose = f"could not look for the function {function}"
    missing = client.exceptions.ResourceNotFoundException
    settings = found_or_none(purpose, missing, client.get_function_configuration, FunctionName=function)
    if settings is None:
        raise ConfigError(
            f"there is no function {function!r} in {client.meta.region_name}; create it with "
            f"`dglx lambda deploy {function}`, or give its region"
        )

    # A function that was not called for weeks is "Inactive". The next event activates it.
    if settings.get("State", "Active") not in ("Active", "Inactive"):
        raise ConfigError(
            f"the function {function} is {settings['State']} "
            f"({settings.get('StateReason', '')}); wait, or deploy it again"
        )

    return int(settings["MemorySize"])
