"""What AWS writes at the end of each invocation, read from the function's log: this is what it bills."""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.offload.aws.clients import Client, explained
from dglx_dist.offload.executors.base import Invocation

log = logging.getLogger(__name__)

_REPORT = re.compile(
    r"REPORT RequestId: (?P<request>[0-9a-fA-F-]{36})\s+Duration: (?P<ms>[0-9.]+) ms"
    r"\s+Billed Duration: (?P<billed>[0-9.]+) ms\s+Memory Size: (?P<memory>[0-9]+) MB"
)
_INIT = re.compile(r"Init Duration: [0-9.]+ ms")
_END_S = 5.0
_LOOK_BACK_MS = 60_000
"""Containers write logs of their own, each as late as it likes, by AWS's clock and not by this machine's."""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """One REPORT line."""

    request: str
    invocation: Invocation


def read_report(line: str) -> Report | None:
    """Read a line of a function's log; None where it is another one.

    The duration is the one billed: it holds the time to start a container where AWS bills that.
    """
    found = _REPORT.search(line)
    if found is None:
        return None
    invocation = Invocation(
        duration_s=float(found["billed"]) / 1e3,
        cold=_INIT.search(line) is not None,
        memory_mb=int(found["memory"]),
    )
    return Report(request=found["request"], invocation=invocation)


@final
class ReportReader:
    """Reads the log of a function now and then, in a thread of its own, for the invocations it was told of.

    Log lines come seconds late, and reading them needs a permission (``logs:FilterLogEvents``); without it
    a warning is logged once and durations stay unknown.

    Args:
        client: Of CloudWatch logs.
        function: Whose log.
        every_s: How often it is read, while there is something to learn.
    """

    def __init__(self, client: Client, function: str, every_s: float = 5.0) -> None:
        self._client, self._group, self._every_s = client, f"/aws/lambda/{function}", every_s
        self._since_ms = int(time.time() * 1e3) - _LOOK_BACK_MS
        self._waited: set[str] = set()
        self._found: list[Invocation] = []
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="dglx-reports", daemon=True)
        self._thread.start()

    def expect(self, request: str) -> None:
        """Look for the report of the invocation ``request``; any thread."""
        with self._lock:
            self._waited.add(request)

    def found(self) -> list[Invocation]:
        """Return what was found since the last call; any thread, returns at once."""
        with self._lock:
            found, self._found = self._found, []
            return found

    def close(self) -> None:
        """Stop reading; may be called twice."""
        self._stopped.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with self._lock:
                wanted = bool(self._waited)
            try:
                if wanted:
                    self._read()
            except (ConfigError, PeerError) as error:
                log.warning("durations of invocations stay unknown: %s", error)
                return

    def _read(self) -> None:
        more: dict[str, str] = {}
        newest = self._since_ms
        while True:
            with explained(f"could not read the log {self._group}"):
                try:
                    page = self._client.filter_log_events(
                        logGroupName=self._group, startTime=self._since_ms, filterPattern="REPORT", **more
                    )
                except self._client.exceptions.ResourceNotFoundException:
                    return  # The first invocation makes it.
            for event in page["events"]:
                newest = max(newest, int(event["timestamp"]))
                self._take(read_report(event["message"]))
            if not page.get("nextToken"):
                break
            more = {"nextToken": page["nextToken"]}
        self._since_ms = max(self._since_ms, newest - _LOOK_BACK_MS)

    def _take(self, report: Report | None) -> None:
        with self._lock:
            if report is not None and report.request in self._waited:
                self._waited.remove(report.request)
                self._found.append(report.invocation)
