"""An engine with its workers and parameter servers, from one state of the weights to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from dglx_dist.cluster.serve import Handler
from dglx_dist.cluster.session import Session
from dglx_dist.offload.controller_records import Counts
from dglx_dist.offload.parameters.assign import assign
from dglx_dist.offload.parameters.plan import ParameterPlan
from dglx_dist.offload.parameters.server import ParameterServer
from dglx_dist.offload.parameters.service import Places
from dglx_dist.offload.parameters.updates import Update
from dglx_dist.offload.program import Program
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.crew import Crew, CrewPlan
from dglx_dist.strategies.bounded.engine import Engine, EngineConfig
from dglx_dist.strategies.bounded.graph_server import GraphServer
from dglx_dist.strategies.bounded.part import Part
from dglx_dist.strategies.bounded.settings import LambdaSettings, threads_of
from dglx_dist.strategies.bounded.workers import Workers

_RUNS = "runs of strategy lambda"
"""Under which a session keeps how many there were."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """What training goes on from; weights and update are equal on all ranks."""

    weights: Sequence[Array]
    """In the order of the program."""
    update: Update
    epoch: int
    """The one that comes next."""
    is_synchronous: bool = False
    """Whether training became synchronous before, as ``switch_at`` asks."""


@final
class Running:
    """Up from now until :meth:`close`; every rank makes it and closes it, together.

    Args:
        session: The run.
        program: What is trained.
        part: This rank's.
        interval_sizes: (K,) nodes of every interval of all ranks.
        settings: Of the strategy.
        start: Where it begins.

    Raises:
        ConfigError: there are more parameter servers than intervals, or the executor cannot be made.
    """

    def __init__(
        self,
        session: Session,
        program: Program,
        part: Part,
        interval_sizes: Array,
        settings: LambdaSettings,
        start: Start,
    ) -> None:
        options, topology = settings.options, session.topology
        num_servers = options.parameter_servers
        plan = ParameterPlan.of(
            program,
            assign(interval_sizes, num_servers),
            num_servers=num_servers,
            staleness=options.staleness,
            first_epoch=start.epoch,
        )
        places = Places(
            parameter_servers=tuple(range(num_servers)), graph_servers=tuple(range(topology.world_size))
        )
        crew_plan = CrewPlan(
            program=program,
            plan=plan,
            places=places,
            options=options,
            executor_options=settings.executor_options,
            prices=settings.prices,
            interface=settings.interface,
        )
        crews: list[Crew] = []

        def hire(handlers: Mapping[str, Handler]) -> Workers:
            crews.append(Crew(session, crew_plan, handlers))
            return crews[0].workers

        parameters = (
            ParameterServer(plan, topology.rank, start.weights, start.update)
            if topology.rank < num_servers
            else None
        )
        config = EngineConfig(
            plan=plan,
            places=places,
            pace=replace(
                options.pace(start.epoch, program.num_train),
                synchronous_from=start.epoch if start.is_synchronous else None,
            ),
            threads=threads_of(session, options.threads),
        )
        server = GraphServer(
            part,
            program,
            fused=options.fusion,
            rematerialise=options.rematerialise,
            run=_next_run(session),
        )
        try:
            self.engine = Engine(session, server, config, parameters, hire)
        except BaseException:
            for crew in crews:
                crew.close()
            raise
        self.crew = crews[0]
        self.crew.controller.watch(lambda: self.engine.queue_length)

    def close(self, *, failed: bool = False) -> Counts:
        """End everything; return what the workers did. After a failure it waits for nobody."""
        # Workers first. A function cannot be ended: one that is late asks in the name of this run, and the
        # servers of the next one refuse it.
        self.crew.close()
        if failed:
            self.engine.abandon()
        else:
            self.engine.close()
        return self.crew.counts


def _next_run(session: Session) -> int:
    """Number the runs of a session from 1; equal on all ranks, which make them together."""
    before = session.attached.get(_RUNS, 0)
    assert isinstance(before, int)
    session.attached[_RUNS] = before + 1
    return before + 1
