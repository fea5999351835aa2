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
_END_S = 5.0
_LOOK_BACK_MS = 60_000
"""Containers write their logs with any delay, and their timestamps are by AWS's clock."""
MAX_REQUESTS = 32
"""Concurrent requests; each returns as soon as AWS has accepted the event."""


def read_report(line: str) -> tuple[str, Invocation] | None:
    """Read the id of a request and its invocation from a log line; None if it is not a REPORT.

    If AWS bills the start of a container, so does the invocation.
    """
    report = _REPORT.search(line)
    if report is None:
        return None
    return report["request"], Invocation(
        duration_s=float(report["billed"]) / 1e3,
        cold=_INIT.search(line) is not None,
        memory_mb=int(report["memory"]),
    )


@final
class ReportReader:
    """Polls the log of a function in a thread for the durations of expected invocations.

    Log lines arrive seconds late. Reading them needs the permission ``logs:FilterLogEvents``; without it
    the reader logs one warning and durations stay unknown.
    """

    def __init__(self, client: Client, function: str, every_s: float) -> None:
        self._client = client
        self._group = f"/aws/lambda/{function}"
        self._every_s = every_s
        self._since_ms = int(time.time() * 1e3) - _LOOK_BACK_MS
        self._waited: set[str] = set()
        self._found: list[Invocation] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dglx-reports", daemon=True)
        self._thread.start()

    def expect(self, request: str) -> None:
        """Look for the report of the invocation ``request``."""
        with self._lock:
            self._waited.add(request)

    def take_found(self) -> list[Invocation]:
        """Return the invocations found since the last call."""
        with self._lock:
            invocations = self._found
            self._found = []
            return invocations

    def close(self) -> None:
        """Stop reading; may be called twice."""
        self._stopped.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with self._lock:
                is_expecting = bool(self._waited)
            try:
                if is_expecting:
                    self._read()
            except (ConfigError, PeerError) as error:
                log.warning("durations of invocations stay unknown: %s", error)
                return

    def _read(self) -> None:
        query = {"logGroupName": self._group, "startTime": self._since_ms, "filterPattern": "REPORT"}
        pages = self._client.get_paginator("filter_log_events").paginate(**query)
        newest = self._since_ms
        missing = self._client.exceptions.ResourceNotFoundException

        # The first invocation creates the log.
        with explain_errors(f"could not read the log {self._group}"), suppress(missing):
            for page in pages:
                for event in page["events"]:
                    newest = max(newest, int(event["timestamp"]))
                    report = read_report(event["message"])
                    with self._lock:
                        if report is not None and report[0] in self._waited:
                            self._waited.remove(report[0])
                            self._found.append(report[1])

        self._since_ms = max(self._since_ms, newest - _LOOK_BACK_MS)


@final
@dataclass(frozen=True, kw_only=True)
class AwsOptions:
    """Options of executor ``aws``."""

    function: Annotated[str, Within(1, 64)]
    """Name of the function."""
    region: Annotated[str, Within(1, 64)] | None = None
    """Such as "eu-west-1"; None: boto3's."""
    endpoint_url: Annotated[str, Within(1, 1024)] | None = None
    """Address of an AWS-compatible service; the bill is then simulated."""
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
        chosen = read_record(AwsOptions, options, "executor 'aws'", defaults=True)
        check_name(chosen.function)
        place = Place(region=chosen.region, endpoint_url=chosen.endpoint_url)
        client = place.client("lambda", connections=MAX_REQUESTS)
        self.simulated = not is_amazon(client)
        memory_mb = _check_usable(client, chosen.function)
        self._reports: ReportReader | None = None
        if chosen.read_log:
            self._reports = ReportReader(place.client("logs"), chosen.function, chosen.read_log_every_s)
        poster = _Poster(client, chosen.function, self._reports)
        super().__init__(lambda: poster, context.notice, memory_mb=memory_mb, billed=False)

    def size(self, workers: int) -> None:
        # AWS starts a worker per event; the controller limits how many are sent.
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
        pass  # a request ends within its time-out; the client closes its connections when it is collected


def _check_usable(client: Client, function: str) -> int:
    """Return the memory of ``function`` in MB; raise ConfigError unless it is there and active."""
    purpose = f"could not look for the function {function}"
    missing = client.exceptions.ResourceNotFoundException
    settings = found_or_none(purpose, missing, client.get_function_configuration, FunctionName=function)
    if settings is None:
        raise ConfigError(
            f"there is no function {function!r} in {client.meta.region_name}; create it with "
            f"`dglx lambda deploy {function}`, or give its region"
        )

    # A function that was not called for weeks is "Inactive"; the next event activates it.
    if settings.get("State", "Active") not in ("Active", "Inactive"):
        raise ConfigError(
            f"the function {function} is {settings['State']} ({settings.get('StateReason', '')}); wait, or "
            "deploy it again"
        )

    return int(settings["MemorySize"])
