"""Cuts the recording of a model at the operations of the graph into the steps of a program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn, vmap

from dglx_dist.errors import ConfigError
from dglx_dist.layers.tracer import MODEL_ERRORS
from dglx_dist.strategies.serverless.capture import (
    OTHER_STRATEGY,
    SIZES,
    Node,
    Recording,
    Value,
    find_call,
    list_needed,
)
from dglx_dist.strategies.serverless.program import (
    FEATURES,
    Apply,
    End,
    Gather,
    Input,
    Per,
    Place,
    Program,
    ProgramStep,
    Scatter,
    Slot,
    Softmax,
    covers_halo,
    find_trained,
    outputs_of,
    sources_of,
)
from dglx_dist.strategies.serverless.tensor_program import (
    DTYPES,
    MAX_CONSTANT,
    PRODUCTS,
    Constant,
    Operation,
    TensorProgram,
    find_operation,
)
from dglx_dist.strategies.serverless.verify import check_program

CLASS_LABEL = Slot(name="label", shape=(), per="node", dtype="int64")
"""Label of a classification."""
_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_IGNORED_KEYWORDS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")

_Depth: TypeAlias = int
_MOST_EDGE_COLUMNS = 8
"""Largest width of rows of edges that are computed once and kept."""
_ONCE: _Depth = -1
"""Depth of pieces that depend on neither weights nor dropout. They run once, before the first epoch."""


@final
@dataclass
class TensorPiece:
    """Operations on rows of one kind without an operation of the graph between them."""

    per: Per
    inputs: dict[tuple[Value, End], None] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[Value, None] = field(default_factory=dict)

    @property
    def has_product(self) -> bool:
        return any(node.name.partition(".")[0] in PRODUCTS for node in self.nodes)


@final
class Cutter:
    """Cuts a recording. A second one, of a graph of another size, tells sizes from other numbers.

    An operation runs as late as its result allows, so that few rows travel. Pieces are numbered by depth, the
    number of operations of the graph before them.
    """

    def __init__(self, recordings: Sequence[Recording], scores: Value, edges_on_workers: bool | None) -> None:
        self._first, second = recordings
        self._twin_values = pair_values(self._first, second)
        self._twins = dict(zip(self._first.nodes, second.nodes, strict=True))
        needed = set(list_needed(scores))
        self._nodes = [node for node in self._first.nodes if not needed.isdisjoint(node.outputs)]
        self._scores, self._edges_on_workers = scores, edges_on_workers
        self._depths = self._find_depths()
        self._pieces: dict[tuple[_Depth, Per], TensorPiece] = {}
        self._slots: dict[Value, Slot] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """The inputs that the model reads, and the features."""
        return tuple(
            self._slot_of(value)
            for name, value in self._first.inputs.items()
            if name == FEATURES or value in self._slots
        )

    def cut(self) -> tuple[ProgramStep, ...]:
        """Return the steps.

        Raises:
            ConfigError: rows of one step depend on the number of rows, or travel in a dtype other than
                floats and int64.
        """
        self._fill_pieces()
        graph_nodes: defaultdict[_Depth, list[Node]] = defaultdict(list)
        for node in self._nodes:
            if node.kind in ("gather", "softmax"):
                graph_nodes[self._depths[node]].append(node)
        last = self._depth_of(self._scores)
        steps: list[ProgramStep] = []
        for depth in range(_ONCE, last + 1):
            steps += [self._make_graph_step(node) for node in graph_nodes[depth]]
            pers: tuple[Per, Per] = ("node", "edge")
            for per in pers:
                if (piece := self._pieces.get((depth, per))) is not None:
                    is_last = depth == last and self._scores in piece.outputs
                    steps.append(self._make_apply(piece, is_once=depth == _ONCE, is_last=is_last))

        # The scores come last, beside pieces of the same depth.
        steps.sort(key=lambda step: isinstance(step, Apply) and self._slots[self._scores] in step.outputs)
        return tuple(self._add_scatters(steps))

    # Depths.

    def _is_once(self, value: Value) -> bool:
        if value.per != "edge" or not value.is_constant:
            return value.per is not None and value.is_constant
        # Wide rows of all edges would take more memory than the graph.
        if math.prod(value.tensor.shape[1:]) > _MOST_EDGE_COLUMNS or value.maker is None:
            return value.maker is None
        sources = (source for source in value.maker.inputs if source.per == "edge")
        return all(
            (source.maker and source.maker.kind == "spread") or self._is_once(source) for source in sources
        )

    def _find_depths(self) -> dict[Node, _Depth]:
        early: dict[Value, _Depth] = {}
        for node in self._nodes:
            depth = max((early.get(value, 0) for value in node.inputs if value.per), default=0)
            crosses = node.kind in ("gather", "softmax") or (
                node.kind == "spread" and not node.outputs[0].is_constant
            )
            early |= dict.fromkeys(node.outputs, depth + crosses)

        depths: dict[Node, _Depth] = {}
        latest: dict[Value, _Depth] = {self._scores: early.get(self._scores, 0)}
        for node in reversed(self._nodes):
            if all(value.per is None for value in node.outputs):
                continue
            if node.kind in ("gather", "softmax"):
                depth = early[node.outputs[0]]
            else:
                depth = min(latest[value] for value in node.outputs if value in latest)

            depths[node] = depth
            before = depth - (node.kind in ("gather", "softmax", "spread"))
            for value in node.inputs:
                latest[value] = min(latest.get(value, before), before)

        return depths

    def _depth_of(self, value: Value) -> _Depth:
        # Features have no maker.
        return self._depths[value.maker] if value.maker else 0

    # Pieces.

    def _fill_pieces(self) -> None:
        for node in self._nodes:
            if node.kind in ("tensor", "drop") and (per := node.outputs[0].per) is not None:
                depth = _ONCE if self._is_once(node.outputs[0]) else self._depths[node]
                piece = self._piece(depth, per)
                piece.nodes.append(node)
                for value in node.inputs:
                    if value.per is not None:
                        self._read(piece, value)
            elif node.kind in ("gather", "softmax"):
                for value in node.inputs:
                    self._materialise(value, self._depths[node] - 1)
        self._materialise(self._scores, self._depth_of(self._scores), is_scores=True)

    def _piece(self, depth: _Depth, per: Per) -> TensorPiece:
        return self._pieces.setdefault((depth, per), TensorPiece(per))

    def _home(self, value: Value) -> TensorPiece | None:
        maker = value.maker
        if maker is None or maker.kind not in ("tensor", "drop") or value.per is None:
            return None
        return self._pieces.get((_ONCE if self._is_once(value) else self._depths[maker], value.per))

    def _read(self, piece: TensorPiece, value: Value) -> None:
        if value.maker is not None and value.maker.kind == "spread":
            source, end = value.maker.inputs[0], value.maker.name
            self._materialise(source, 0)
            piece.inputs[source, end] = None  # type: ignore[index]
        elif self._home(value) is not piece:
            self._materialise(value, 0)
            piece.inputs[value, "row"] = None

    def _materialise(self, value: Value, depth: _Depth, *, is_scores: bool = False) -> None:
        """Make ``value`` a slot. Without an operation of its own, a piece of ``depth`` passes it on."""
        home = self._home(value)
        is_spread = value.maker is not None and value.maker.kind == "spread"
        if home is not None:
            home.outputs[value] = None
        elif is_spread or is_scores:
            piece = self._piece(depth, value.per or "node")
            self._read(piece, value)
            piece.outputs[value] = None

        self._slot_of(value)

    def _slot_of(self, value: Value) -> Slot:
        if value not in self._slots:
            maker, per = value.maker, value.per
            assert per is not None, "only rows travel"
            dtype = value.tensor.dtype
            if dtype not in (torch.int64, self._first.inputs[FEATURES].tensor.dtype):
                raise ConfigError(
                    f"{maker.module if maker else 'the model'} passes rows of {dtype} over edges; convert "
                    f"them to the dtype of the weights, {OTHER_STRATEGY}"
                )

            name = value.name or self._name("h" if per == "node" else "m")
            shape = tuple(value.tensor.shape[1:])
            self._slots[value] = Slot(
                name=name, shape=shape, per=per, dtype="" if dtype.is_floating_point else "int64"
            )
        return self._slots[value]

    def _name(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind]}"

    # Steps.

    def _make_graph_step(self, node: Node) -> ProgramStep:
        output = self._slot_of(node.outputs[0])
        if node.kind == "softmax":
            return Softmax(name=self._name("SM"), source=self._slots[node.inputs[0]].name, output=output)
        source, edges = (None if value is None else self._slots[value].name for value in node.arguments)
        how: Any = node.name
        return Gather(name=self._name("GA"), source=source, edges=edges, how=how, output=output)

    def _make_apply(self, piece: TensorPiece, *, is_once: bool, is_last: bool) -> Apply:
        if not piece.inputs:
            # New rows depend on nothing, but need a number.
            piece.inputs[self._first.inputs[FEATURES], "row" if piece.per == "node" else "target"] = None
            self._slot_of(self._first.inputs[FEATURES])

        writer = _BodyWriter(self._twin_values, self._twins, piece)
        body = writer.write()
        place: Place = "once" if is_once else "server"
        if not is_once and piece.per == "node" and (is_last or piece.has_product or writer.weights):
            place = "worker"
        if not is_once and piece.per == "edge":
            on_workers = _moves_less_than_it_computes(piece)
            if self._edges_on_workers is not None:
                on_workers = self._edges_on_workers
            place = "worker" if on_workers else "server"

        kind = "AV" if piece.per == "node" else "AE"
        return Apply(
            name=self._name("ON" if is_once else kind),
            per=piece.per,
            place=place,
            inputs=tuple(Input(slot=self._slots[value].name, end=end) for value, end in piece.inputs),
            outputs=tuple(self._make_output(value) for value in piece.outputs),
            weights=tuple(writer.weights),
            body=body,
        )

    def _make_output(self, value: Value) -> Slot:
        slot = self._slots[value]
        if value.maker is None or value.maker.kind not in ("tensor", "drop"):
            # Passed on from another slot, under a name of its own.
            slot = self._slots[value] = Slot(
                name=self._name("h" if slot.per == "node" else "m"), shape=slot.shape, per=slot.per
            )
        return slot

    def _add_scatters(self, steps: Sequence[ProgramStep]) -> Iterator[ProgramStep]:
        # Of slots that are read at sources of edges, unless graph servers compute or fetch their halo rows.
        names = {name for step in steps for name in sources_of(step)}
        with_halo = {value.name for value in self._first.inputs.values()}
        trained = find_trained(steps)
        for step in steps:
            yield step
            outputs = outputs_of(step)
            if covers_halo(step, with_halo, trained):
                with_halo.update(slot.name for slot in outputs)
                continue
            slots = tuple(slot.name for slot in outputs if slot.name in names and slot.per == "node")
            if slots:
                yield Scatter(name=self._name("SC"), slots=slots)


_EDGE_INTENSITY = 8.0
"""Operations for each byte moved from which a step on edges pays on workers.

A graph server like the paper's c5.2xlarge makes some 20 G operations a second in such steps, and 100
functions move 2.5 GB a second, 200 Mbit/s each (Dorylus, section 6)."""


def _moves_less_than_it_computes(piece: TensorPiece) -> bool:
    """Return whether ``piece`` makes at least ``_EDGE_INTENSITY`` operations for each byte that it moves."""
    rows = next(iter(piece.outputs)).tensor.shape[0]
    computed = 0
    for node in piece.nodes:
        for result in node.outputs:
            inner = 1
            if node.name.partition(".")[0] in PRODUCTS:
                # A product of (n, k) and (k, m) multiplies and adds k times for each result.
                inner = 2 * node.inputs[-2].tensor.shape[-1]
            computed += inner * (result.tensor.numel() if isinstance(result.tensor, Tensor) else 0)

    values = [*(value for value, _ in piece.inputs), *piece.outputs]
    moved = sum(math.prod(value.tensor.shape[1:]) * value.tensor.element_size() for value in values)
    return computed / rows >= _EDGE_INTENSITY * moved


@final
class _BodyWriter:
    """Writes the tensor program of a piece."""

    def __init__(
        self, twin_values: Mapping[Value, Value], twins: Mapping[Node, Node], piece: TensorPiece
    ) -> None:
        self._twin_values = twin_values
        self._twins = twins
        self._piece = piece
        self.weights: dict[str, Value] = {}
        """Weights that it reads, by the user's name."""
        self._constants: list[Value] = []
        value, _ = next(iter(piece.inputs))
        self._sizes = [len(rows.tensor) for rows in (value, twin_values[value])]
        if piece.per == "edge":
            self._sizes = [num_edges for _, num_edges in SIZES]

    def write(self) -> TensorProgram:
        helpers: dict[Node, None] = {}
        for node in self._piece.nodes:
            for value in node.inputs:
                self._collect(value, helpers)
        numbers: dict[Value, int] = {}
        inputs = [self._read_value(value, end) for value, end in self._piece.inputs]
        for value in (*inputs, *self.weights.values(), *self._constants):
            numbers[value] = len(numbers)
        next_number = len(numbers)
        operations = []
        written = {*helpers, *self._piece.nodes}
        for node in self._twins:
            if node not in written:
                continue
            results = range(next_number, next_number + len(node.outputs))
            next_number = results.stop
            operations.append(self._write_operation(node, numbers, tuple(results)))
            numbers |= zip(node.outputs, results, strict=True)

        return TensorProgram(
            inputs=tuple(tuple(value.tensor.shape[1:]) for value in inputs),
            weights=tuple(tuple(value.tensor.shape) for value in self.weights.values()),
            constants=tuple(map(self._write_constant, self._constants)),
            operations=tuple(operations),
            outputs=tuple(numbers[value] for value in self._piece.outputs),
        )

    def _collect(self, value: Value, helpers: dict[Node, None]) -> None:
        # What has no rows is computed in every piece that reads it.
        if value.per is not None:
            return
        if value.name:
            self.weights[value.name] = value
        elif value.maker is None:
            if value not in self._constants:
                self._constants.append(value)
        elif value.maker not in helpers:
            for source in value.maker.inputs:
                self._collect(source, helpers)
            helpers[value.maker] = None

    def _read_value(self, value: Value, end: End) -> Value:
        """Return the value that stands for ``value`` at an end of edges."""
        if end == "row":
            return value
        spreads = (node for node in self._twins if node.kind == "spread" and node.name == end)
        return next((node.outputs[0] for node in spreads if node.inputs[0] is value), value)

    def _write_operation(
        self, node: Node, numbers: Mapping[Value, int], results: tuple[int, ...]
    ) -> Operation:
        twin = self._twins[node]
        if node.kind == "tensor":
            try:
                find_operation(node.name)
            except ConfigError as error:
                raise ConfigError(f"{node.module}: {error}; {OTHER_STRATEGY}") from None

        def write(argument: Any, twin_argument: Any) -> Any:
            return self._write_argument(node, argument, twin_argument, numbers)

        keywords = {
            name: write(value, twin.keywords[name])
            for name, value in node.keywords.items()
            if name not in _IGNORED_KEYWORDS
        }
        arguments = tuple(map(write, node.arguments, twin.arguments))
        if node.name in ("view.default", "_unsafe_view.default"):
            # -1 would be ambiguous without rows.
            shapes = (list(made.outputs[0].tensor.shape) for made in (node, twin))
            arguments = (arguments[0], write(*shapes))

        return Operation(name=node.name, arguments=arguments, keywords=keywords, results=results)

    def _write_argument(
        self, node: Node, argument: Any, twin_argument: Any, numbers: Mapping[Value, int]
    ) -> Any:
        if isinstance(argument, list | tuple):
            pairs = zip(argument, twin_argument, strict=True)
            return [self._write_argument(node, item, twin, numbers) for item, twin in pairs]
        if isinstance(argument, Value):
            return {"value": numbers[argument]}
        if isinstance(argument, torch.dtype) and argument in _NAMES_OF_DTYPES:
            return {"dtype": _NAMES_OF_DTYPES[argument]}
        if isinstance(argument, float) and not math.isfinite(argument):
            return {"number": str(argument)}
        if argument == twin_argument and (argument is None or isinstance(argument, bool | int | float | str)):
            return argument

        if isinstance(argument, int) and isinstance(twin_argument, int):
            (times, rest), (twin_times, twin_rest) = map(divmod, (argument, twin_argument), self._sizes)
            if times == twin_times and not rest and not twin_rest:
                return {"rows": times}

        raise ConfigError(
            f"{node.module} computes with a number of the graph ({node.name}: {argument} on one graph, "
            f"{twin_argument} on another), but a task has only some of the rows; remove it, {OTHER_STRATEGY}"
        )

    def _write_constant(self, value: Value) -> Constant:
        tensor, twin = value.tensor, self._twin_values[value].tensor
        is_equal = tensor.shape == twin.shape and torch.equal(tensor, twin)
        is_finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        if (
            not (is_equal and is_finite)
            or tensor.numel() > MAX_CONSTANT
            or tensor.dtype not in _NAMES_OF_DTYPES
        ):
            raise ConfigError(
                f"the model reads a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} that is neither "
                "features, data of edges nor a parameter, or is not finite; make it a parameter without "
                f"gradient, {OTHER_STRATEGY}"
            )

        numbers = tuple(map(float, tensor.detach().flatten().tolist()))
        dtype = _NAMES_OF_DTYPES[tensor.dtype]
        return Constant(dtype=dtype, shape=tuple(tensor.shape), numbers=numbers)


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps (B, ...) scores and (B, ...) labels to the mean loss over the B rows."""


@final
@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured model."""

    program: Program
    """Its loss is a stand-in until :meth:`with_loss`."""
    needs_in_edges: str
    """Layer that refuses nodes without in-edges, or ""."""

    def with_loss(self, loss: Loss, label: Slot, num_train: int = 1) -> Captured:
        """Return the program that trains with ``loss``. ConfigError if that is not the mean over its rows."""
        body = capture_loss(loss, self.program.scores.shape, label, DTYPES[self.program.dtype])
        program = replace(self.program, loss=body, label=label, num_train=num_train)
        return replace(self, program=program)


def capture(
    model: nn.Module,
    features: int,
    edge_columns: Mapping[str, Slot] = MappingProxyType({}),
    edges_on_workers: bool | None = None,
) -> Captured:
    """Return the program of ``model``.

    Args:
        features: Number of columns of the features.
        edge_columns: Data of edges by name, which the model may read.
        edges_on_workers: Where steps on edges run. None: where they are cheaper.

    Raises:
        ConfigError: a part of the model cannot be a step. The message names it and a remedy.
    """
    _check_parameters(model)
    call, (recording, scores) = find_call(model, features, edge_columns)
    second, _ = call.record(1)
    cutter = Cutter([recording, second], scores, edges_on_workers)
    steps = cutter.cut()
    shape = outputs_of(steps[-1])[0].shape
    label = Slot(name="label", shape=shape, per="node")
    program = Program(
        inputs=cutter.inputs,
        steps=steps,
        loss=capture_loss(_add_up, shape, label, call.dtype),
        label=label,
        dtype=_NAMES_OF_DTYPES[call.dtype],
    )
    check_program(program, call)
    return Captured(program=program, needs_in_edges=recording.needs_in_edges)


def _add_up(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores + labels).flatten(1).sum(1).mean()


def capture_loss(loss: Loss, shape: tuple[int, ...], label: Slot, dtype: torch.dtype) -> TensorProgram:
    """Return the program from (n, ...) scores and labels to (n,) losses.

    ``loss`` must be the mean of the losses of its rows. ConfigError if it is not.
    """
    recordings = []
    results = []

    # As many rows as classes, so that each has its own weight.
    classes = math.prod(shape) if label.dtype else 1
    for num_rows in (max(size, classes) for size, _ in SIZES):
        generator = torch.Generator().manual_seed(num_rows)
        scores = torch.randn(num_rows, *shape, dtype=dtype, generator=generator)
        labels = torch.arange(num_rows) % classes
        if not label.dtype:
            labels = torch.rand(num_rows, *label.shape, dtype=dtype, generator=generator)
        recording = Recording({})
        recording.add_input("scores", scores, "node")
        recording.add_input("labels", labels, "node")

        try:
            with torch.no_grad(), recording:
                by_row: Tensor = vmap(partial(_loss_of_row, loss))(scores, labels)
            mean = loss(scores, labels).detach()
        except MODEL_ERRORS as error:
            raise ConfigError(
                f"the loss could not be called for one row of scores: {type(error).__name__}: {error}; give "
                f"a function of tensors that returns the mean over rows, {OTHER_STRATEGY}"
            ) from error

        if not torch.allclose(by_row.mean(), mean, rtol=1e-4, atol=1e-6):
            raise ConfigError(
                f"the loss of {num_rows} rows is {float(mean):.6g}, but the mean over single rows "
                f"is {float(by_row.mean()):.6g}. Strategy 'lambda' needs a mean over rows: divide a weighted "
                "loss by the number of rows"
            )

        recordings.append(recording)
        results.append(recording.value_of(by_row))

    piece = TensorPiece(
        "node", inputs=dict.fromkeys((value, "row") for value in recordings[0].inputs.values())
    )
    twins = pair_values(*recordings)
    needed = set(list_needed(results[0]))
    piece.nodes = [
        node
        for node in recordings[0].nodes
        if node.outputs[0].per == "node" and not needed.isdisjoint(node.outputs)
    ]
    piece.outputs[results[0]] = None
    return _BodyWriter(twins, dict(zip(recordings[0].nodes, recordings[1].nodes, strict=True)), piece).write()


def _loss_of_row(loss: Loss, row: Tensor, label: Tensor) -> Tensor:
    return loss(row[None], label[None]).reshape(())


def pair_values(first: Recording, second: Recording) -> dict[Value, Value]:
    """Return the value of ``second`` for each of ``first``. ConfigError if they ran other operations."""
    if [(node.kind, node.name) for node in first.nodes] != [(node.kind, node.name) for node in second.nodes]:
        raise ConfigError(
            "the model runs other operations on a graph of another size; remove the condition, "
            f"{OTHER_STRATEGY}"
        )
    return {
        value: twin_value
        for node, twin in zip(first.nodes, second.nodes, strict=True)
        for value, twin_value in zip(
            [*node.inputs, *node.outputs], [*twin.inputs, *twin.outputs], strict=True
        )
    }


def _check_parameters(model: nn.Module) -> None:
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.float64}:
        dtypes = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
        raise ConfigError(
            f"the model's parameters are {dtypes}; strategy 'lambda' trains float32 or float64, all of one "
            "dtype: call model.float()"
        )

    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ConfigError(
            f"the model is on {device}, but graph servers and workers of strategy 'lambda' compute on CPUs; "
            "leave model.to(device) out, or take device='cpu' in dx.init (dglx train --device cpu)"
        )
