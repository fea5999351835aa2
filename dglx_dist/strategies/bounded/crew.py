"""The workers of one graph server: an executor, the controller that watches it, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from typing import final

from dglx_dist.cluster.client import PeerAddress
from dglx_dist.cluster.network import link_speed
from dglx_dist.cluster.serve import Handler
from dglx_dist.cluster.session import Session
from dglx_dist.cluster.visitors import open_to_visitors
from dglx_dist.errors import ConfigError
from dglx_dist.offload.autotuner import TunerLimits
from dglx_dist.offload.controller import Controller
from dglx_dist.offload.controller_records import ControllerOptions, Counts
from dglx_dist.offload.executors.base import ExecutorContext
from dglx_dist.offload.executors.registry import EXECUTORS
from dglx_dist.offload.parameters.plan import ParameterPlan
from dglx_dist.offload.parameters.service import Places
from dglx_dist.offload.prices import PriceTable
from dglx_dist.offload.program import Program
from dglx_dist.offload.relaunch import RelaunchRule
from dglx_dist.offload.tasks import MAX_TIMEOUT_S, Address, Secrets, Task, TaskKey, TaskOptions
from dglx_dist.offload.user_stages import stages_of
from dglx_dist.strategies.bounded.options import LambdaOptions
from dglx_dist.strategies.bounded.spans import WorkerSpans
from dglx_dist.strategies.bounded.workers import ControlledWorkers


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CrewPlan:
    """What a crew works on; equal on all ranks."""

    program: Program
    plan: ParameterPlan
    places: Places
    options: LambdaOptions
    executor_options: Mapping[str, object]
    prices: PriceTable
    interface: str = ""
    """See LambdaSettings."""


@final
class Crew:
    """Up from now until :meth:`close`.

    Args:
        session: The run.
        plan: What is worked on.
        handlers: What answers the workers' operations in this process.

    Raises:
        ConfigError: the executor cannot be made with these options, or its workers cannot reach this rank.
    """

    def __init__(self, session: Session, plan: CrewPlan, handlers: Mapping[str, Handler]) -> None:
        self._plan, self._rank = plan, session.topology.rank
        self._digest = plan.program.digest
        self._task_options = TaskOptions(
            streaming=plan.options.streaming, rematerialise=plan.options.rematerialise
        )
        self._timeout_s = min(session.timeout_s, MAX_TIMEOUT_S)
        visiting = open_to_visitors(session, plan.interface)
        self._addresses = {rank: _address(peer) for rank, peer in visiting.addresses.items()}
        credentials = visiting.credentials
        self._secrets = Secrets(
            secret=credentials.secret.decode(),
            public_key=_text(credentials.public_key),
            secret_key=_text(credentials.secret_key),
        )
        self._controllers: list[Controller] = []
        with ExitStack() as undo:
            executor = EXECUTORS.get(plan.options.executor)(
                ExecutorContext(
                    # Gone with the rank, however it ends.
                    folder=session.scratch,
                    stages=stages_of(plan.program.steps),
                    handlers=handlers,
                    notice=self._wake,
                ),
                plan.executor_options,
            )
            undo.callback(executor.close)
            check_reachable(self._own_host, paid=not executor.simulated)
            self.simulated = executor.simulated
            """Whether no provider is paid."""
            self.controller = Controller(
                executor,
                self._controller_options(),
                clock=time.perf_counter,
                observer=WorkerSpans(session.timeline, plan.program),
            )
            self._controllers.append(self.controller)
            self.workers = ControlledWorkers(self.controller, self._task_of)
            """For the engine."""
            undo.enter_context(self.controller.run())
            self._open = undo.pop_all()

    @property
    def counts(self) -> Counts:
        """What has happened so far."""
        return self.controller.counts

    def close(self) -> None:
        """End all workers, at once; may be called twice."""
        self._open.close()

    def _controller_options(self) -> ControllerOptions:
        options = self._plan.options
        return ControllerOptions(
            limits=TunerLimits(intervals=options.intervals, link_bytes_per_s=link_speed(self._own_host)),
            workers=options.workers or None,
            batch=options.batch,
            relaunch=RelaunchRule(retries=options.retries),
            prices=self._plan.prices,
        )

    @property
    def _own_host(self) -> str:
        """Numeric address at which this rank answers workers."""
        return self._addresses[self._rank].endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def _wake(self) -> None:
        # The executor may have news before there is a controller.
        for controller in self._controllers:
            controller.wake()

    def _task_of(self, key: TaskKey, rows: int) -> Task:
        server = int(self._plan.plan.server_of_interval[key.interval])
        return Task(
            key=key,
            rows=rows,
            program=self._digest,
            graph_server=self._addresses[self._rank],
            parameter_server=self._addresses[self._plan.places.parameter_servers[server]],
            secrets=self._secrets,
            timeout_s=self._timeout_s,
            options=self._task_options,
        )


def check_reachable(host: str, *, paid: bool) -> None:
    """Raise ConfigError where functions of a provider, which are elsewhere, would call this machine alone.

    Args:
        host: Numeric address at which this rank answers.
        paid: Whether a provider runs the workers.
    """
    if paid and ip_address(host).is_loopback:
        raise ConfigError(
            f"workers run in a cloud, and this rank answers at {host}, which is this machine alone; with one "
            "rank give the option interface=NAME, with several set GLOO_SOCKET_IFNAME=NAME (see `ip addr`)"
        )


def _address(peer: PeerAddress) -> Address:
    return Address(rank=peer.rank, host=peer.host, endpoint=peer.endpoint, public_key=_text(peer.public_key))


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode()
