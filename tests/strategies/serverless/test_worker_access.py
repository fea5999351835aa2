"""A worker's secret opens the operations of workers, at a port of their own, and nothing else of a rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dglx_dist.comm.collectives import barrier
from dglx_dist.comm.endpoints import ClientAccess, open_client_access
from dglx_dist.comm.session import Session, start_session
from dglx_dist.errors import PeerError, RemoteError
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.graph.partition_book import Placement
from dglx_dist.records import Array
from dglx_dist.serverless.parameter_service import Places
from dglx_dist.serverless.tasks import TaskKey
from dglx_dist.serverless.worker import GIVE, GRADIENTS, PROGRAM, PULL, WEIGHTS
from dglx_dist.strategies.serverless.engine import Engine, EngineConfig
from dglx_dist.strategies.serverless.graph_server import GraphServer
from dglx_dist.strategies.serverless.options import StalenessPolicy
from tests.helpers.ranks import run_ranks

from . import cases
from .client import WorkerClient

OF_RANKS = {
    *("kv.pull", "kv.push", "kv.add", "kv.handle", "cluster.ping", "lambda.ghosts", "lambda.reached"),
    *("lambda.state", "lambda.latest", "lambda.sums", "lambda.updated", "lambda.stopped", "lambda.missing"),
    *("lambda.weights_for_rank", "lambda.gradients_of_rank", "lambda.ghost_gradients", "lambda.correct"),
}
OF_WORKERS = {PROGRAM, PULL, GIVE, WEIGHTS, GRADIENTS}
LARGE: Array = np.zeros(1 << 18)
"""2 MiB: travels in pieces."""


class Idle:
    """Workers that do nothing."""

    def launch(self, key: TaskKey, rows: int, *, ready: bool) -> None:
        """Nothing."""

    def ready(self, key: TaskKey) -> None:
        """Nothing."""

    def done(self, key: TaskKey, attempt: int) -> None:
        """Nothing."""

    def raise_if_failed(self) -> None:
        """Nothing."""


def idle_engine(session: Session) -> Engine:
    program, parts, rank = cases.gcn(), cases.case().parts([0, 17, 40], 3), session.topology.rank
    plan = cases.plan_of(program, parts, 2)
    places = Places(parameter_servers=(0, 1), graph_servers=(0, 1))
    config = EngineConfig(plan=plan, places=places, policy=StalenessPolicy())
    parameters = cases.parameter_server(program, plan, rank)
    return Engine(session, GraphServer(parts[rank], program), config, parameters, lambda _handlers: Idle())


def asked(client: WorkerClient, op: str) -> str:
    """Return what ``op`` is answered with."""
    try:
        found = client.ask(op, "r0.e0.s1.i0.f", [LARGE])
    except RemoteError as error:
        return str(error)
    return f"{len(found)} arrays"


def is_kept_out(access: ClientAccess, rank: int) -> None:
    """Check that whoever shows and asks so is not let in by ``rank``."""
    client = WorkerClient(access, rank=rank)
    with pytest.raises(PeerError, match="refused the connection"):
        client.ask(PROGRAM, "")
    client.caller.close()


def knock() -> dict[str, str]:
    """Ask the other rank, as a worker, for all that it answers; return what it said."""
    with start_session(timeout_s=60.0) as session:
        KVStore(session, Placement(2, session.topology))
        engine, access, other = idle_engine(session), open_client_access(session), 1 - session.topology.rank
        assert open_client_access(session) is access
        before = engine.parameters.latest()
        client = WorkerClient(access, rank=other)
        answers = {op: asked(client, op) for op in sorted(session.rpc._handlers)}
        client.caller.close()
        assert session.rpc.credentials is not None
        is_kept_out(replace(access, addresses=session.rpc.addresses), other)
        is_kept_out(replace(access, credentials=session.rpc.credentials), other)
        barrier(session, "both have asked")
        for name, value in engine.parameters.latest().items():
            assert value.tobytes() == before[name].tobytes()
        engine.parameters.raise_if_stopped()
        engine.close()
        return answers


@pytest.mark.parametrize("environment", [{}, {"DGLX_CURVE": "1"}], ids=["plain", "curve"])
def test_a_workers_secret_opens_the_operations_of_workers_alone(environment: dict[str, str]) -> None:
    for answers in run_ranks(knock, 2, environment=environment):
        assert set(answers) >= OF_RANKS | OF_WORKERS
        opened = {op for op, said in answers.items() if "no operation" not in said}
        assert opened == OF_WORKERS
        assert answers[PROGRAM] == "1 arrays"
        assert "names no half" in answers[PULL]
        known = ", ".join(sorted(OF_WORKERS))
        assert (
            f"no operation 'lambda.state' is registered here (there are: {known})" in answers["lambda.state"]
        )
