"""A worker without a process of its own: a task done where the graph server is, to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

from dglx_dist.offload.parameters.server import ParameterServer
from dglx_dist.offload.payload import half_rows
from dglx_dist.offload.stages.base import Arrays
from dglx_dist.offload.tasks import TaskKey
from dglx_dist.offload.work import add_gradients
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.desk import Gift
from dglx_dist.strategies.bounded.graph_server import GraphServer


class Parameters(Protocol):
    """Where weights come from and gradients go."""

    def weights(self, key: TaskKey) -> list[Array]:
        """Return the weights of a task, as its interval sees them in its epoch."""

    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> None:
        """Hand in the gradients of a task's weights; twice does no harm."""


@final
class LocalParameters:
    """The parameter servers of one process.

    Args:
        servers: All of a plan, in order.
    """

    def __init__(self, servers: Sequence[ParameterServer]) -> None:
        self._servers = servers

    def weights(self, key: TaskKey) -> list[Array]:
        """See :class:`Parameters`."""
        return self._of(key).weights(key.interval, key.epoch, key.step)

    def gradients(self, key: TaskKey, arrays: Sequence[Array]) -> None:
        """See :class:`Parameters`."""
        self._of(key).gradients(key.interval, key.epoch, key.step, arrays)

    def _of(self, key: TaskKey) -> ParameterServer:
        return self._servers[int(self._servers[0].plan.server_of_interval[key.interval])]


class Computed(NamedTuple):
    """What a task computed, not yet handed in."""

    halves: tuple[Arrays, Arrays]
    gradients: Arrays


def compute_task(server: GraphServer, parameters: Parameters, key: TaskKey) -> Computed:
    """Pull weights and rows of the open task ``key``, and compute it in its two halves."""
    work = server.works[key.step, key.direction]
    rows = server.rows_of(key.interval - server.part.first_interval)
    weights = parameters.weights(key) if work.weights else []
    found = []
    for half in (0, 1):
        arrays = server.desk.pull(key, half)
        assert arrays is not None, f"task {key} is not open"
        nodes = half_rows(rows, half)
        found.append(work.half(weights, arrays, nodes.stop - nodes.start))
    gradients = add_gradients(found[0].gradients, found[1].gradients) if work.pushes else ()
    return Computed((found[0].rows, found[1].rows), gradients)


def hand_in(server: GraphServer, parameters: Parameters, key: TaskKey, computed: Computed) -> bool:
    """Push the gradients, then give the rows; return whether the task is over by that."""
    work = server.works[key.step, key.direction]
    if work.pushes and work.weights:
        parameters.gradients(key, computed.gradients)
    return [server.give(key, half, computed.halves[half]) for half in (0, 1)][-1] is Gift.LAST
