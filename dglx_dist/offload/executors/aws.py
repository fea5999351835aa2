"""Workers as functions of AWS Lambda, invoked asynchronously: AWS takes the event and says no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.aws.clients import Client, Place, explained, is_amazon
from dglx_dist.offload.aws.deployment import check_name
from dglx_dist.offload.aws.reports import ReportReader
from dglx_dist.offload.executors.base import Executor, ExecutorContext, Invocation, Lost
from dglx_dist.offload.executors.pool import Hand, Pool, PoolPlan
from dglx_dist.offload.fields import Fields
from dglx_dist.offload.worker.answer import WorkerAnswer
from dglx_dist.offload.worker.faults import Fault

MAX_REQUESTS = 32
"""Requests under way at the same time: each returns as soon as AWS has the event."""
_LONGEST = 1024
_READ_LOG_EVERY_S = 5.0


@final
class AwsExecutor(Executor):
    """Invokes a function that ``dglx lambda deploy`` made, one event for each attempt.

    Functions call the graph servers and parameter servers, so these must be reachable from the function's
    subnets. Credentials come from boto3's own chain only.

    Options:
        function: Its name.
        region: Such as "eu-west-1"; default: as boto3 finds it.
        endpoint_url: Something else that speaks the interface of AWS; the bill is then simulated.
        read_log: Whether durations are read from the function's log, for the bill; true by default.
        read_log_every_s: How often; 5 s by default.
    """

    option_names = ("function", "region", "endpoint_url", "read_log", "read_log_every_s")

    def __init__(self, context: ExecutorContext, options: Mapping[str, object]) -> None:
        fields = Fields(options, "executor 'aws'")
        self._function = fields.text("function", 64)
        check_name(self._function)
        place = Place(
            region=fields.maybe("region", lambda name: fields.text(name, 64), None),
            endpoint_url=fields.maybe("endpoint_url", lambda name: fields.text(name, _LONGEST), None),
        )
        reads_log = fields.maybe("read_log", fields.flag, True)
        every_s = fields.maybe(
            "read_log_every_s", lambda name: fields.number(name, 0.01, 3600), _READ_LOG_EVERY_S
        )
        fields.end()
        client = place.client("lambda", connections=MAX_REQUESTS)
        self.simulated = not is_amazon(client)
        memory_mb = _check_usable(client, self._function)
        self._reports = ReportReader(place.client("logs"), self._function, every_s) if reads_log else None
        poster = _Poster(client, self._function, self._reports)
        self._pool = Pool(
            PoolPlan(make=lambda: poster, notice=context.notice, memory_mb=memory_mb, billed=False)
        )

    def invoke(self, event: bytes) -> None:
        """See Executor."""
        self._pool.invoke(event)

    def size(self, workers: int) -> None:
        """See Executor. AWS starts a worker for each event; the controller sends no more than these."""
        self._pool.size(min(workers, MAX_REQUESTS))

    def lost(self) -> list[Lost]:
        """See Executor. Only what AWS did not take; of what became of the rest it says nothing."""
        return self._pool.lost()

    def billed(self) -> list[Invocation]:
        """See Executor. Seconds late, and nothing without leave to read the log."""
        return [] if self._reports is None else self._reports.found()

    @property
    def workers(self) -> int:
        """0: how many containers there are is the service's own business."""
        return 0

    def close(self) -> None:
        """See Executor. Workers under way go on until nobody answers them."""
        self._pool.close()
        if self._reports is not None:
            self._reports.close()


@final
class _Poster(Hand):
    """Hands an event to AWS; the same for all threads, as a client of boto3 is."""

    def __init__(self, client: Client, function: str, reports: ReportReader | None) -> None:
        self._client, self._function, self._reports = client, function, reports

    def invoke(self, event: bytes, fault: Fault | None) -> WorkerAnswer | None:
        with explained(f"AWS did not take an event for the function {self._function}"):
            answer = self._client.invoke(FunctionName=self._function, InvocationType="Event", Payload=event)
        if self._reports is not None:
            self._reports.expect(str(answer["ResponseMetadata"]["RequestId"]))
        return None

    def stop(self) -> None:
        """Nothing: a request ends by itself, within its time-out."""

    def end(self) -> None:
        """Nothing: the client closes its connections when nobody has it any more."""


def _check_usable(client: Client, function: str) -> int:
    """Return the memory of ``function`` in MB; raise ConfigError unless it is there and active."""
    with explained(f"could not look for the function {function}"):
        try:
            found = client.get_function_configuration(FunctionName=function)
        except client.exceptions.ResourceNotFoundException:
            raise ConfigError(
                f"there is no function {function!r} in {client.meta.region_name}; make it with "
                f"`dglx lambda deploy {function}`, or name its region"
            ) from None
    # "Inactive" is a function that nobody called for weeks: the next event wakes it.
    if found.get("State", "Active") not in ("Active", "Inactive"):
        raise ConfigError(
            f"the function {function} is {found['State']} ({found.get('StateReason', '')}); wait, or deploy "
            "it again"
        )
    return int(found["MemorySize"])
