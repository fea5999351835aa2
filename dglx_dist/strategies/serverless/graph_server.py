"""One graph server: rows, and what each move of an interval does to them (Dorylus, section 4).

It knows nothing of order: who may move when is :mod:`progress`'s affair, who carries messages :mod:`mail`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.serverless.parameter_server import ParameterServer
from dglx_dist.serverless.program import Edge, Gather, Program, Scatter, Vertex
from dglx_dist.serverless.stages.base import Arrays, loss_in_halves
from dglx_dist.serverless.tasks import (
    Direction,
    Item,
    Per,
    Role,
    TaskKey,
    Work,
    add_gradients,
    check_payload,
    half_rows,
    take_half,
)
from dglx_dist.strategies.serverless.graph_partition import Part
from dglx_dist.strategies.serverless.graph_rows import OverEdges, Stores


class Kind(Enum):
    """Who does a move, and how."""

    GATHER = "gather"
    """Sum source rows over in-edges; graph server."""
    SCATTER = "scatter"
    """Send boundary rows to ghosts; graph server."""
    WORK = "work"
    """Apply a stage forward, backward or fused; worker."""
    LOSS = "loss"
    """Compute the loss where the last step is not fused; graph server."""
    PUBLISH = "publish"
    """Make the gradient of a gathered sum known to sources, and compute those of its edges; graph server."""
    SEND_BACK = "send_back"
    """Send the gradients of ghosts to their owners; graph server."""
    COLLECT = "collect"
    """Add what flows back over out-edges to the gradients of own rows; graph server."""


class Barrier(Enum):
    """What a synchronous epoch waits for before a move."""

    NONE = "none"
    LOCAL = "local"
    """All intervals of this graph server have come as far."""
    GLOBAL = "global"
    """Those of all graph servers have."""


@final
@dataclass(frozen=True)
class ScheduledTask:
    """One part of an interval's epoch."""

    kind: Kind
    step: int
    """Index in the program."""
    direction: Direction = Direction.FORWARD
    barrier: Barrier = Barrier.NONE


def epoch_schedule(program: Program, fused: bool) -> tuple[ScheduledTask, ...]:
    """Return the moves of an epoch.

    Args:
        program: What is trained.
        fused: Whether the last step goes forward and backward in one task (section 6, task fusion).
    """
    forward = [_forward(program, index) for index in range(program.last)]
    if fused:
        last = [
            ScheduledTask(Kind.WORK, program.last, Direction.FUSED, _after_scatter(program, program.last))
        ]
    else:
        last = [
            _forward(program, program.last),
            ScheduledTask(Kind.LOSS, program.last, Direction.BACKWARD),
            ScheduledTask(Kind.WORK, program.last, Direction.BACKWARD),
        ]
    back = [move for index in reversed(range(program.last)) for move in _backward(program, index)]
    return (*forward, *last, *back)


def _forward(program: Program, index: int) -> ScheduledTask:
    step = program.steps[index]
    kind = Kind.WORK
    if isinstance(step, Gather):
        kind = Kind.GATHER
    elif isinstance(step, Scatter):
        kind = Kind.SCATTER
    return ScheduledTask(kind, index, barrier=_after_scatter(program, index))


def _after_scatter(program: Program, index: int) -> Barrier:
    """Whoever comes behind a Scatter may read ghosts."""
    comes_behind = index > 0 and isinstance(program.steps[index - 1], Scatter)
    return Barrier.GLOBAL if comes_behind else Barrier.NONE


def _backward(program: Program, index: int) -> list[ScheduledTask]:
    """Moves of one step back; none where no weight would get a gradient from them."""
    step = program.steps[index]
    back = Direction.BACKWARD
    if isinstance(step, Gather):
        return [ScheduledTask(Kind.PUBLISH, index, back)] if step.output.name in program.trained else []
    if isinstance(step, Scatter):
        if program.trained.isdisjoint(step.slots):
            return []
        return [
            ScheduledTask(Kind.SEND_BACK, index, back, Barrier.LOCAL),
            ScheduledTask(Kind.COLLECT, index, back, Barrier.GLOBAL),
        ]
    if isinstance(step, Edge):
        return [ScheduledTask(Kind.WORK, index, back)] if step.output.name in program.trained else []
    assert isinstance(step, Vertex)
    has_use = bool(step.weights) or not program.trained.isdisjoint(step.inputs)
    return [ScheduledTask(Kind.WORK, index, back)] if has_use else []


class SubmitResult(Enum):
    """What became of a half that a worker gave."""

    TAKEN = "taken"
    LAST = "last"
    """Taken, and the task has both halves now: it is over."""
    AGAIN = "again"
    """Dropped: this half came before."""
    LATE = "late"
    """Dropped: the task is over."""

    @property
    def accepted(self) -> bool:
        """Whether the rows are used."""
        return self in (SubmitResult.TAKEN, SubmitResult.LAST)


@final
@dataclass(eq=False)
class _OpenTask:
    work: Work
    rows: int
    halves: tuple[list[Array], list[Array]]
    given: dict[int, Sequence[Array]] = field(default_factory=dict)


@final
class TaskTable:
    """The tasks of one graph server that workers may take now. Thread-safe, and never blocks.

    Args:
        works: By step and direction, all that occur.
        order: Step and direction -> place in an epoch.
        intervals: Global numbers of this graph server's intervals.
        run: Number of the run in its session; no worker of another one is let near.
    """

    def __init__(
        self,
        works: dict[tuple[int, Direction], Work],
        order: dict[tuple[int, Direction], int],
        intervals: range,
        run: int = 0,
    ) -> None:
        self._works, self._order, self._intervals, self._run = works, order, intervals, run
        self._open: dict[TaskKey, _OpenTask] = {}
        self._over: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[TaskKey]:
        """Tasks that are open."""
        with self._lock:
            return sorted(self._open)

    def open(self, key: TaskKey, rows: int, arrays: Sequence[Array]) -> None:
        """Let workers take task ``key``; ``arrays`` are what its Work pulls, unchanged until it is over."""
        work = self._work(key)
        halves = tuple(take_half(work.pulled, arrays, rows, half) for half in (0, 1))
        with self._lock:
            self._open[key] = _OpenTask(work, rows, (halves[0], halves[1]))

    def pull(self, key: TaskKey, half: int) -> list[Array] | None:
        """Return what half 0 or 1 of a task pulls, None while its rows are not there yet.

        Raises:
            ConfigError: there is no such task here, or it is over.
        """
        self._work(key)
        with self._lock:
            task = self._open.get(key)
            if task is None and self._is_over(key):
                raise ConfigError(f"task {key} is over; the call comes from a worker that was given up")
        return None if task is None else task.halves[half]

    def give(
        self, key: TaskKey, half: int, arrays: Sequence[Array]
    ) -> tuple[SubmitResult, list[Sequence[Array]]]:
        """Take what a worker computed for half 0 or 1.

        Returns:
            What became of it, and when it was the last one the arrays of both halves, by half.

        Raises:
            ConfigError: there is no such task here, it has not begun, or the arrays are not what it gives.
        """
        work = self._work(key)
        with self._lock:
            task, refused = self._refused(key, half)
        if task is None or refused is not None:
            return refused or SubmitResult.LATE, []
        nodes = half_rows(task.rows, half)
        edges = len(task.halves[half][0]) if _has_edges(work) else None
        check_payload(work.given, arrays, nodes.stop - nodes.start, f"what came of {key}", num_edges=edges)
        with self._lock:
            # Another attempt may have given the same meanwhile.
            _, refused = self._refused(key, half)
            if refused is not None:
                return refused, []
            task.given[half] = arrays
            if len(task.given) < 2:
                return SubmitResult.TAKEN, []
            del self._open[key]
            self._over[key.interval] = key.epoch, self._order[key.step, key.direction]
        return SubmitResult.LAST, [task.given[0], task.given[1]]

    def _refused(self, key: TaskKey, half: int) -> tuple[_OpenTask | None, SubmitResult | None]:
        task = self._open.get(key)
        if task is not None:
            return task, SubmitResult.AGAIN if half in task.given else None
        if not self._is_over(key):
            raise ConfigError(f"rows of task {key} came before it began")
        return None, SubmitResult.LATE

    def _work(self, key: TaskKey) -> Work:
        key.check_run(self._run)
        if key.interval not in self._intervals:
            raise ConfigError(
                f"task {key} is of no interval from {self._intervals.start} to {self._intervals.stop - 1}, "
                "which this graph server has"
            )
        work = self._works.get((key.step, key.direction))
        if work is None:
            raise ConfigError(f"task {key}: no worker does step {key.step} in this direction here")
        return work

    def _is_over(self, key: TaskKey) -> bool:
        last = self._over.get(key.interval)
        return last is not None and (key.epoch, self._order[key.step, key.direction]) <= last


def _has_edges(work: Work) -> bool:
    return any(item.role is Role.SOURCES for item in work.pulled)


class GhostMessage(NamedTuple):
    """Rows for another graph server."""

    peer: int
    positions: Array
    """(r,) int32 in the list of ghosts that both sides have in the same order."""
    rows: tuple[Array, ...]
    """One (r, width) per slot."""


class _Interval:
    """What only one interval needs between its moves."""

    def __init__(self) -> None:
        self.gradients: dict[str, Array] = {}
        self.saved: dict[int, list[Array]] = {}
        self.sources: dict[int, Array] = {}


@final
class GraphServer:
    """Moves of one interval are made one after another; those of several at once, on any threads.

    Args:
        part: What it has.
        program: What is trained; the same everywhere.
        fused: Whether the last step goes forward and backward in one task.
        rematerialise: See TaskOptions.
        run: Number of the run in its session, equal on all graph servers; names its tasks.

    Raises:
        ConfigError: the part does not fit the program.
    """

    def __init__(
        self, part: Part, program: Program, *, fused: bool = True, rematerialise: bool = True, run: int = 0
    ) -> None:
        part.check(program)
        self.part, self.program, self.run = part, program, run
        self.course = epoch_schedule(program, fused)
        """The moves of each epoch."""
        self._stores = Stores(part, program)
        self._over_edges = OverEdges(part, program, self._stores)
        self._intervals = [_Interval() for _ in range(part.num_intervals)]
        self._statistics: dict[int, dict[int, Array]] = {}
        self._lock = threading.Lock()
        moves = {
            (move.step, move.direction): at for at, move in enumerate(self.course) if move.kind is Kind.WORK
        }
        self.works = {key: Work(program, *key, rematerialise) for key in moves}
        """What workers do, by step and direction."""
        numbers = range(part.first_interval, part.first_interval + part.num_intervals)
        self.desk = TaskTable(self.works, moves, numbers, run)
        """Where workers pull rows."""

    @property
    def rank(self) -> int:
        """Number of this graph server."""
        return self.part.graph.rank

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are kept between moves."""
        return self._stores.num_bytes

    def key_of(self, interval: int, epoch: int, move: ScheduledTask) -> TaskKey:
        """Return the key of a WORK move of own interval ``interval``."""
        return TaskKey(epoch, move.step, self.part.first_interval + interval, move.direction, self.run)

    def rows_of(self, interval: int) -> int:
        """Return the number of nodes of own interval ``interval``."""
        nodes = self.part.nodes_of(interval)
        return nodes.stop - nodes.start

    def compute(self, interval: int, epoch: int, move: ScheduledTask) -> None:
        """Make a move that neither workers nor other graph servers take part in."""
        step = self.program.steps[move.step]
        if move.kind is Kind.GATHER:
            assert isinstance(step, Gather)
            sums = self._over_edges.gather(step, interval)
            self._stores.write(step.output.name, self.part.nodes_of(interval), sums)
        elif move.kind is Kind.PUBLISH:
            assert isinstance(step, Gather)
            self._publish(interval, move.step, step)
        elif move.kind is Kind.COLLECT:
            assert isinstance(step, Scatter)
            self._collect(interval, step)
        else:
            assert move.kind is Kind.LOSS
            assert isinstance(step, Vertex)
            self._loss(interval, epoch, step)

    def open(self, interval: int, epoch: int, move: ScheduledTask) -> None:
        """Let workers take the task of a WORK move."""
        work, state = self.works[move.step, move.direction], self._intervals[interval]
        step = self.program.steps[move.step]
        if isinstance(step, Edge) and move.direction is Direction.FORWARD:
            # Kept until the way back: the gradient is then that of what was computed, whatever ghosts did.
            state.sources[move.step] = self._over_edges.source_rows(step.sources, interval)
        saved = iter(state.saved.pop(move.step, []))
        arrays = [
            next(saved) if item.role is Role.SAVED else self._pulled(interval, move.step, item)
            for item in work.pulled
        ]
        self.desk.open(self.key_of(interval, epoch, move), self.rows_of(interval), arrays)

    def give(self, key: TaskKey, half: int, arrays: Sequence[Array]) -> SubmitResult:
        """Take what a worker computed for half 0 or 1; return what became of it.

        Raises:
            ConfigError: see :meth:`TaskTable.give`.
        """
        result, both = self.desk.give(key, half, arrays)
        if result is not SubmitResult.LAST:
            return result
        interval, step = key.interval - self.part.first_interval, self.program.steps[key.step]
        items = self.works[key.step, key.direction].given
        found = [(item, (both[0][at], both[1][at])) for at, item in enumerate(items)]
        if isinstance(step, Edge):
            self._take_edges(interval, key, step, found[0][1])
        else:
            self._take_rows(interval, key, found)
        return result

    def letters(self, interval: int, move: ScheduledTask) -> list[GhostMessage]:
        """Return what a SCATTER or SEND_BACK move sends: one letter per graph server that needs rows."""
        step = self.program.steps[move.step]
        assert isinstance(step, Scatter)
        found = self._boundary_rows if move.kind is Kind.SCATTER else self._ghost_gradients
        return list(found(interval, step))

    def receive(self, peer: int, move_kind: Kind, index: int, arrays: Sequence[Array]) -> None:
        """Take a letter's positions and rows.

        Raises:
            ConfigError: there is no such Scatter or peer, or the arrays are not what it sends.
        """
        step = self.program.steps[index] if 0 <= index < len(self.program.steps) else None
        if not isinstance(step, Scatter) or not 0 <= peer < self.part.graph.num_servers:
            raise ConfigError(
                f"rows came from graph server {peer} for step {index}, which is no such Scatter"
            )
        graph, back = self.part.graph, move_kind is Kind.SEND_BACK
        slots = [name for name in step.slots if name in self.program.trained] if back else list(step.slots)
        first = 0 if back else graph.num_own + int(graph.ghost_starts[peer])
        size = len(self.part.routes.boundary[peer]) if back else len(graph.ghost_ids(peer))
        _check_message(self.program, slots, size, arrays, f"from graph server {peer} for step {step.name!r}")
        for name, rows in zip(slots, arrays[1:], strict=True):
            store = self._stores.received[name, peer] if back else self._stores.rows[name]
            with store.writing() as array:
                array[first + arrays[0]] = rows

    def statistics(self, epoch: int) -> tuple[float, int]:
        """Return, and forget, the sum of losses and the number of correct rows of own nodes in ``epoch``."""
        with self._lock:
            found = self._statistics.pop(epoch, {})
        total = sum((found[interval] for interval in sorted(found)), np.zeros(2))
        return float(total[0]), int(total[1])

    def correct(self, epoch: int) -> int:
        """Return the number of correct rows of own nodes in ``epoch`` so far, without forgetting it."""
        with self._lock:
            return int(sum(found[1] for found in self._statistics.get(epoch, {}).values()))

    def _pulled(self, interval: int, index: int, item: Item) -> Array:
        nodes, edges, state = (
            self.part.nodes_of(interval),
            self.part.edges_of(interval),
            self._intervals[interval],
        )
        if item.role is Role.INPUT or (item.role is Role.OUTPUT and item.per is Per.NODE):
            return self._stores.own(item.slot, nodes)
        if item.role is Role.OUTPUT:
            return self._stores.values[item.slot].array[edges]
        if item.role is Role.LABELS:
            return self.part.labels[nodes]
        if item.role is Role.INDPTR:
            bounds = self.part.graph.indptr[nodes.start : nodes.stop + 1]
            return bounds - bounds[0]
        if item.role is Role.SOURCES:
            return state.sources[index]
        assert item.role is Role.GRADIENT
        return self._slope(interval, item.slot, edges if item.per is Per.EDGE else nodes)

    def _slope(self, interval: int, slot: str, where: slice) -> Array:
        """Hand out the whole gradient of a slot; zeros where nothing that follows reads it."""
        slope = self._intervals[interval].gradients.pop(slot, None)
        if slope is not None:
            return slope
        width = self.program.slots[slot].width
        return np.zeros((where.stop - where.start, width), dtype=self.program.dtype)

    def _add_slope(self, interval: int, slot: str, *parts: Array) -> None:
        gradients = self._intervals[interval].gradients
        if slot not in gradients:
            gradients[slot] = np.concatenate(parts)
            return
        at = 0
        for part in parts:
            gradients[slot][at : at + len(part)] += part
            at += len(part)

    def _take_rows(
        self, interval: int, key: TaskKey, found: Sequence[tuple[Item, tuple[Array, Array]]]
    ) -> None:
        nodes, state = self.part.nodes_of(interval), self._intervals[interval]
        for item, halves in found:
            if item.role is Role.OUTPUT:
                self._stores.write(item.slot, nodes, *halves)
            elif item.role is Role.GRADIENT:
                self._add_slope(interval, item.slot, *halves)
            elif item.role is Role.SAVED:
                state.saved.setdefault(key.step, []).append(np.concatenate(halves))
            else:
                self._note(interval, key.epoch, halves[0] + halves[1])

    def _take_edges(self, interval: int, key: TaskKey, step: Edge, halves: tuple[Array, Array]) -> None:
        edges = self.part.edges_of(interval)
        if key.direction is Direction.FORWARD:
            self._stores.write_values(step.output.name, edges, *halves)
            return
        del self._intervals[interval].sources[key.step]
        if step.sources in self.program.trained:
            self._stores.publish(key.step, edges, *halves)
        if step.targets in self.program.trained:
            sums = self._over_edges.sum_to_targets(interval, np.concatenate(halves))
            self._add_slope(interval, step.targets, sums)

    def _publish(self, interval: int, index: int, step: Gather) -> None:
        nodes = self.part.nodes_of(interval)
        gradients = self._slope(interval, step.output.name, nodes)
        if step.source in self.program.trained:
            self._stores.publish(index, nodes, gradients)
        if step.edges is not None and step.edges in self.program.trained:
            self._add_slope(interval, step.edges, self._over_edges.products(step, interval, gradients))

    def _collect(self, interval: int, step: Scatter) -> None:
        nodes = self.part.nodes_of(interval)
        own = np.arange(nodes.start, nodes.stop, dtype=np.int32)
        for name in self._trained(step):
            slope = self._slope(interval, name, nodes)
            self._over_edges.pull_back(name, own, slope)
            self._add_received(interval, name, slope)
            self._intervals[interval].gradients[name] = slope

    def _add_received(self, interval: int, slot: str, slope: Array) -> None:
        first = self.part.nodes_of(interval).start
        for peer in range(self.part.graph.num_servers):
            boundary, bounds = self.part.routes.boundary[peer], self.part.routes.boundary_bounds[peer]
            some = slice(int(bounds[interval]), int(bounds[interval + 1]))
            if some.start < some.stop:
                with self._stores.received[slot, peer].reading() as rows:
                    slope[boundary[some] - first] += rows[some]

    def _loss(self, interval: int, epoch: int, step: Vertex) -> None:
        nodes, name = self.part.nodes_of(interval), step.outputs[0].name
        labels, scale = self.part.labels[nodes], 1 / self.program.num_train
        loss = loss_in_halves(self._stores.own(name, nodes), labels, scale)
        self._add_slope(interval, name, loss.gradient)
        self._note(interval, epoch, np.array([loss.loss_sum, loss.correct]))

    def _note(self, interval: int, epoch: int, statistics: Array) -> None:
        with self._lock:
            self._statistics.setdefault(epoch, {})[interval] = statistics

    def _boundary_rows(self, interval: int, step: Scatter) -> Iterator[GhostMessage]:
        for peer in range(self.part.graph.num_servers):
            boundary, bounds = self.part.routes.boundary[peer], self.part.routes.boundary_bounds[peer]
            first, end = int(bounds[interval]), int(bounds[interval + 1])
            if first < end:
                # Nobody else writes an interval's own rows, so none is torn without the lock.
                own = boundary[first:end]
                rows = tuple(self._stores.rows[name].array[own] for name in step.slots)
                yield GhostMessage(peer, np.arange(first, end, dtype=np.int32), rows)

    def _ghost_gradients(self, interval: int, step: Scatter) -> Iterator[GhostMessage]:
        graph = self.part.graph
        for peer in range(graph.num_servers):
            positions = self.part.routes.returned[peer][interval]
            if len(positions):
                ghosts = positions + np.int32(graph.num_own + graph.ghost_starts[peer])
                rows = []
                for name in self._trained(step):
                    width = self.program.slots[name].width
                    rows.append(np.zeros((len(positions), width), dtype=self.program.dtype))
                    self._over_edges.pull_back(name, ghosts, rows[-1])
                yield GhostMessage(peer, positions, tuple(rows))

    def _trained(self, step: Scatter) -> list[str]:
        return [name for name in step.slots if name in self.program.trained]


def _check_message(
    program: Program, slots: Sequence[str], size: int, arrays: Sequence[Array], where: str
) -> None:
    if len(arrays) != 1 + len(slots):
        raise ConfigError(f"{len(arrays)} arrays came {where}, not positions and {len(slots)} slots")
    positions = arrays[0]
    if positions.dtype != np.int32 or positions.ndim != 1:
        raise ConfigError(
            f"positions came {where} as {positions.dtype} of shape {positions.shape}, not int32"
        )
    if len(positions) and not 0 <= positions.min() <= positions.max() < size:
        raise ConfigError(f"positions from {positions.min()} to {positions.max()} of {size} came {where}")
    for name, rows in zip(slots, arrays[1:], strict=True):
        wanted = (len(positions), program.slots[name].width)
        if rows.shape != wanted or rows.dtype != program.dtype:
            raise ConfigError(
                f"{name!r} came {where} as {rows.dtype} {rows.shape}, not {program.dtype} {wanted}"
            )


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


def submit(server: GraphServer, parameters: Parameters, key: TaskKey, computed: Computed) -> bool:
    """Push the gradients, then give the rows; return whether the task is over by that."""
    work = server.works[key.step, key.direction]
    if work.pushes and work.weights:
        parameters.gradients(key, computed.gradients)
    return [server.give(key, half, computed.halves[half]) for half in (0, 1)][-1] is SubmitResult.LAST
