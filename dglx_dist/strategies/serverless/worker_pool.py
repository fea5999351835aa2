"""Workers of a graph server: an executor behind a controller, and what tasks tell them of this job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from typing import final

from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.rendezvous import link_speed
from dglx_dist.comm.rpc import Handler
from dglx_dist.comm.session import Session
from dglx_dist.comm.trace import WAIT, WORKER, Span, Timeline
from dglx_dist.errors import ConfigError
from dglx_dist.serverless.aws.package import stages_of
from dglx_dist.serverless.controller import Controller, ControllerOptions, Finished, most_workers
from dglx_dist.serverless.cost import Counts
from dglx_dist.serverless.executors.base import EXECUTORS, ExecutorContext
from dglx_dist.serverless.parameter_server import ParameterPlan
from dglx_dist.serverless.program import Program
from dglx_dist.serverless.tasks import MAX_TIMEOUT_S, Address, Direction, Secrets, Task, TaskKey, TaskOptions
from dglx_dist.strategies.serverless.options import LambdaOptions


@final
class WorkerPool:
    """The workers of this rank, behind a controller, from construction until :meth:`close`. Thread-safe.

    ``handlers`` are those of workers' operations in this process.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        plan: ParameterPlan,
        options: LambdaOptions,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._plan, rank = plan, session.topology.rank
        self._addresses, secrets = addresses_of(open_client_access(session, options.interface))
        own_host = self._addresses[rank].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._task = partial(
            Task,
            program=program.digest,
            graph_server=self._addresses[rank],
            secrets=secrets,
            timeout_s=min(session.timeout_s, MAX_TIMEOUT_S),
            options=TaskOptions(streaming=options.streaming, rematerialise=options.rematerialise),
        )
        # The executor may give notice before the controller exists.
        self._wake: Callable[[], None] = lambda: None
        with ExitStack() as undo:
            executor = EXECUTORS.get(options.executor)(
                ExecutorContext(
                    # The session removes it, however the rank ends.
                    folder=session.scratch,
                    stages=stages_of(program.steps),
                    handlers=handlers,
                    notice=lambda: self._wake(),
                ),
                options.executor_options,
            )
            undo.callback(executor.close)
            check_reachable(own_host, paid=not executor.simulated)
            self.simulated = executor.simulated
            """True if no provider is paid."""
            self.controller = Controller(
                executor,
                ControllerOptions(
                    most=most_workers(options.intervals, link_speed(own_host)),
                    workers=options.workers or None,
                    batch=options.batch,
                    retries=options.retries,
                    prices=options.price_table,
                ),
                clock=time.perf_counter,
                observer=partial(_note_spans, session.timeline, program),
            )
            self._wake, self.ready = self.controller.wake, self.controller.ready
            self.raise_if_failed = self.controller.raise_if_failed
            undo.enter_context(self.controller.run())
            self.close = undo.pop_all().close
            """Stops all workers immediately; idempotent."""

    @property
    def counts(self) -> Counts:
        return self.controller.counts

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """Launch a task of ``rows`` nodes; ``ready``: whether its rows can be pulled already."""
        server = self._addresses[int(self._plan.server_of_interval[key.interval])]
        self.controller.launch(self._task(key=key, rows=rows, parameter_server=server), ready=ready)

    def done(self, key: TaskKey, attempt: int) -> None:
        """Note that all rows of ``attempt`` arrived, also those of a rejected duplicate."""
        self.controller.finished(key, attempt)


def check_reachable(host: str, *, paid: bool) -> None:
    """Raise ConfigError if functions of a paid cloud would have to call ``host``, a loopback address."""
    if paid and ip_address(host).is_loopback:
        raise ConfigError(
            f"workers run in a cloud, but this rank answers at {host}, which only this machine can reach; "
            "with one rank set the option interface=NAME, with several set GLOO_SOCKET_IFNAME=NAME "
            "(see `ip addr`)"
        )


def addresses_of(access: ClientAccess) -> tuple[dict[int, Address], Secrets]:
    """Return the address of each rank, and the credentials of workers."""

    def text(key: bytes | None) -> str | None:
        return None if key is None else key.decode()

    addresses = {
        rank: Address(rank=rank, host=one.host, endpoint=one.endpoint, public_key=text(one.public_key))
        for rank, one in access.addresses.items()
    }
    shown = access.credentials
    keys = {"public_key": text(shown.public_key), "secret_key": text(shown.secret_key)}
    return addresses, Secrets(secret=shown.secret.decode(), **keys)


def _note_spans(timeline: Timeline, program: Program, done: Finished) -> None:
    # The worker's wait for its rows, and its work, with the clock of the timeline.
    key, work = done.key, max(done.sent, done.ready)
    note = partial(Span, row=WORKER, batch=key.epoch, interval=key.interval)
    if done.sent < work:
        timeline.note(note(name=f"{WAIT} for rows", begin_s=done.sent, end_s=work))
    spans = {Direction.FORWARD: "{}", Direction.BACKWARD: "grad{}", Direction.FUSED: "{}+grad"}
    name = spans[key.direction].format(program.steps[key.step].name)
    timeline.note(note(name=name, begin_s=work, end_s=done.done))
