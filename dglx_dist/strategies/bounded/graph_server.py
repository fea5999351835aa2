"""One graph server: rows, and what each move of an interval does to them (Dorylus, section 4).

It knows nothing of order: who may move when is :mod:`progress`'s affair, who carries messages :mod:`mail`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.payload import Item, Per, Role
from dglx_dist.offload.program import Program
from dglx_dist.offload.stages.loss import loss_in_halves
from dglx_dist.offload.steps import Edge, Gather, Scatter, Vertex
from dglx_dist.offload.tasks import Direction, TaskKey
from dglx_dist.offload.work import Work
from dglx_dist.records import Array
from dglx_dist.strategies.bounded.course import Kind, Move, course_of
from dglx_dist.strategies.bounded.desk import Gift, TaskDesk
from dglx_dist.strategies.bounded.over_edges import OverEdges
from dglx_dist.strategies.bounded.part import Part
from dglx_dist.strategies.bounded.stores import Stores


class Letter(NamedTuple):
    """Rows for another graph server."""

    peer: int
    positions: Array
    """(r,) int32 in the list of ghosts that both sides have in the same order."""
    rows: tuple[Array, ...]
    """One (r, width) per slot."""


class _Interval:
    """What only one interval needs between its moves."""

    def __init__(self) -> None:
        self.slopes: dict[str, Array] = {}
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
        self.course = course_of(program, fused)
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
        self.desk = TaskDesk(self.works, moves, numbers, run)
        """Where workers pull rows."""

    @property
    def rank(self) -> int:
        """Number of this graph server."""
        return self.part.graph.rank

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are kept between moves."""
        return self._stores.num_bytes

    def key_of(self, interval: int, epoch: int, move: Move) -> TaskKey:
        """Return the key of a WORK move of own interval ``interval``."""
        return TaskKey(epoch, move.step, self.part.first_interval + interval, move.direction, self.run)

    def rows_of(self, interval: int) -> int:
        """Return the number of nodes of own interval ``interval``."""
        nodes = self.part.nodes_of(interval)
        return nodes.stop - nodes.start

    def compute(self, interval: int, epoch: int, move: Move) -> None:
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

    def open(self, interval: int, epoch: int, move: Move) -> None:
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

    def give(self, key: TaskKey, half: int, arrays: Sequence[Array]) -> Gift:
        """Take what a worker computed for half 0 or 1; return what became of it.

        Raises:
            ConfigError: see :meth:`TaskDesk.give`.
        """
        gift, both = self.desk.give(key, half, arrays)
        if gift is not Gift.LAST:
            return gift
        interval, step = key.interval - self.part.first_interval, self.program.steps[key.step]
        items = self.works[key.step, key.direction].given
        found = [(item, (both[0][at], both[1][at])) for at, item in enumerate(items)]
        if isinstance(step, Edge):
            self._take_edges(interval, key, step, found[0][1])
        else:
            self._take_rows(interval, key, found)
        return gift

    def letters(self, interval: int, move: Move) -> list[Letter]:
        """Return what a SCATTER or SEND_BACK move sends: one letter per graph server that needs rows."""
        step = self.program.steps[move.step]
        assert isinstance(step, Scatter)
        found = self._boundary_rows if move.kind is Kind.SCATTER else self._ghost_slopes
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
        _check_letter(self.program, slots, size, arrays, f"from graph server {peer} for step {step.name!r}")
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
        slope = self._intervals[interval].slopes.pop(slot, None)
        if slope is not None:
            return slope
        width = self.program.slots[slot].width
        return np.zeros((where.stop - where.start, width), dtype=self.program.dtype)

    def _add_slope(self, interval: int, slot: str, *parts: Array) -> None:
        slopes = self._intervals[interval].slopes
        if slot not in slopes:
            slopes[slot] = np.concatenate(parts)
            return
        at = 0
        for part in parts:
            slopes[slot][at : at + len(part)] += part
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
        slopes = self._slope(interval, step.output.name, nodes)
        if step.source in self.program.trained:
            self._stores.publish(index, nodes, slopes)
        if step.edges is not None and step.edges in self.program.trained:
            self._add_slope(interval, step.edges, self._over_edges.products(step, interval, slopes))

    def _collect(self, interval: int, step: Scatter) -> None:
        nodes = self.part.nodes_of(interval)
        own = np.arange(nodes.start, nodes.stop, dtype=np.int32)
        for name in self._trained(step):
            slope = self._slope(interval, name, nodes)
            self._over_edges.pull_back(name, own, slope)
            self._add_received(interval, name, slope)
            self._intervals[interval].slopes[name] = slope

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

    def _boundary_rows(self, interval: int, step: Scatter) -> Iterator[Letter]:
        for peer in range(self.part.graph.num_servers):
            boundary, bounds = self.part.routes.boundary[peer], self.part.routes.boundary_bounds[peer]
            first, end = int(bounds[interval]), int(bounds[interval + 1])
            if first < end:
                # Nobody else writes an interval's own rows, so none is torn without the lock.
                own = boundary[first:end]
                rows = tuple(self._stores.rows[name].array[own] for name in step.slots)
                yield Letter(peer, np.arange(first, end, dtype=np.int32), rows)

    def _ghost_slopes(self, interval: int, step: Scatter) -> Iterator[Letter]:
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
                yield Letter(peer, positions, tuple(rows))

    def _trained(self, step: Scatter) -> list[str]:
        return [name for name in step.slots if name in self.program.trained]


def _check_letter(
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
