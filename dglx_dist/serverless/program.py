"""Programs: a model as a sequence of steps for graph servers and workers, independent of torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, NoReturn, TypeAlias, final, get_args

from dglx_dist.data.json_fields import Fields, Within, write_json
from dglx_dist.errors import ConfigError
from dglx_dist.registry import suggest_name
from dglx_dist.serverless.stages.base import MAX_WIDTH, Config, Shapes, edge_stage, vertex_stage

FEATURES = "x"
"""Slot of the features; their halo rows are fetched once, before the first epoch."""
FIXED = "fixed:"
"""Prefix of names of constant edge values."""
MAX_STEPS, MAX_SLOTS, MAX_WEIGHTS = 512, 16, 32
"""Limits of a program's steps, and of the slots and weights of one step."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIXED = re.compile(FIXED + r"(0|[1-9][0-9]{0,3})")
_Name: TypeAlias = Annotated[str, Within(1, 512)]
""":func:`check_steps` is stricter."""
_Slots: TypeAlias = Annotated[tuple[_Name, ...], Within(0, MAX_SLOTS)]
_Width: TypeAlias = Annotated[int, Within(1, MAX_WIDTH)]
DTYPES, LOSSES = ("float32", "float64"), ("cross_entropy",)
MAX_TRAIN = 1 << 40
MAX_PROGRAM_BYTES = 1 << 20
_VERSION = 1
_SCALARS = ("features", "classes", "num_train", "dtype", "loss")


@final
@dataclass(frozen=True)
class Slot:
    """Rows passed between steps: (n, width) of nodes, or (E, width) of in-edges: see Program.edge_slots."""

    name: _Name
    width: _Width


@final
@dataclass(frozen=True, kw_only=True)
class Gather:
    """Sum source rows over each node's in-edges (GA), on the graph server."""

    name: _Name
    source: _Name
    """Slot of nodes; own rows and halo rows are read."""
    output: Slot
    edges: _Name | None = None
    """Edge weights: ``fixed:<n>``, or the slot of an Edge step, per head; None: 1."""


@final
@dataclass(frozen=True, kw_only=True)
class Vertex:
    """Apply a vertex stage to rows of nodes (AV), on a worker."""

    name: _Name
    stage: _Name
    """Name in the registry of stages."""
    config: Config = field(hash=False)
    inputs: _Slots
    """Slots of nodes; own rows are read."""
    outputs: Annotated[tuple[Slot, ...], Within(0, MAX_SLOTS)]
    weights: Annotated[tuple[_Name, ...], Within(0, MAX_WEIGHTS)] = ()
    """The user's names (state_dict), in the order of the stage's own names."""


@final
@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Send boundary rows to the graph servers that have them as halo nodes (SC)."""

    name: _Name
    slots: _Slots


@final
@dataclass(frozen=True, kw_only=True)
class Edge:
    """Apply an edge stage to the in-edges of nodes (AE), on a worker."""

    name: _Name
    stage: _Name
    config: Config = field(hash=False)
    sources: _Name
    """Slot of nodes; own rows and halo rows are read, at each edge's source."""
    targets: _Name
    """Slot of nodes; own rows are read."""
    output: Slot


@final
@dataclass(frozen=True, kw_only=True)
class Drop:
    """Set entries to 0, anew in each epoch, and divide the others by 1 - probability, on the graph server.

    Masks are those of :mod:`dglx_dist.layers.dropout`: keyed by seed, epoch, call, node or edge, and column.
    """

    name: _Name
    source: _Name
    """Slot of nodes or of edges; of the features, halo rows are dropped too."""
    output: Slot
    probability: Annotated[float, Within(0, 1)]
    call: Annotated[int, Within(0, MAX_STEPS)]
    """Number of the dropout within a forward pass of the model."""


ProgramStep: TypeAlias = Gather | Vertex | Scatter | Edge | Drop


def drops_features(step: ProgramStep) -> bool:
    """True if ``step`` drops features: of all sources, halo nodes too, so that no server sends them."""
    return isinstance(step, Drop) and step.source == FEATURES


def inputs_of(step: ProgramStep) -> Iterator[str]:
    """Yield the slots that ``step`` reads; fixed edge values are not slots."""
    if isinstance(step, Gather):
        yield step.source
        if step.edges is not None and not step.edges.startswith(FIXED):
            yield step.edges
    elif isinstance(step, Vertex):
        yield from step.inputs
    elif isinstance(step, Scatter):
        yield from step.slots
    elif isinstance(step, Edge):
        yield from (step.sources, step.targets)
    else:
        yield step.source


def stage_names(step: ProgramStep) -> Iterator[str]:
    """Yield the stages that ``step`` uses, those of a sequence included."""
    if isinstance(step, Vertex | Edge):
        yield step.stage
        parts: Any = step.config.get("stages", ()) if step.stage == "sequence" else ()
        yield from (part["stage"] for part in parts)


def outputs_of(step: ProgramStep) -> tuple[Slot, ...]:
    if isinstance(step, Vertex):
        return step.outputs
    return () if isinstance(step, Scatter) else (step.output,)


def check_steps(steps: Sequence[ProgramStep], features: int, classes: int) -> None:
    """Raise ConfigError, naming the step, unless ``steps`` can run in order and end with the classes."""
    if not 0 < len(steps) <= MAX_STEPS:
        raise ConfigError(f"the number of steps of a program is {len(steps)}; give 1 to {MAX_STEPS}")
    checker = _Checker(features)
    for step in steps:
        checker.check(step)
    last = steps[-1]
    if not isinstance(last, Vertex) or [slot.width for slot in last.outputs] != [classes]:
        raise ConfigError(
            f"the last step {last.name!r} must be a Vertex with one output of {classes} columns, "
            "the classes; end the program there"
        )


@final
class _Checker:
    def __init__(self, features: int) -> None:
        self._nodes = {FEATURES: features}
        self._edges: dict[str, int] = {}
        self._with_halo = {FEATURES}
        self._names: set[str] = set()
        self._weights: set[str] = set()

    def check(self, step: ProgramStep) -> None:
        if not isinstance(step, ProgramStep):
            raise ConfigError(f"{step!r} is not a step; give Gather, Vertex, Scatter, Edge or Drop")
        if not _NAME.fullmatch(step.name) or step.name in self._names:
            raise ConfigError(f"the step name {step.name!r} is taken or is not 1 to 64 of A-Z a-z 0-9 _ . -")
        self._names.add(step.name)
        match step:
            case Gather():
                self._gather(step)
            case Vertex():
                self._vertex(step)
            case Scatter():
                self._scatter(step)
            case Edge():
                self._edge(step)
            case Drop():
                self._drop(step)

    def _gather(self, step: Gather) -> None:
        width = self._width(step, step.source, self._nodes)
        self._has_halo(step, step.source)
        if step.output.width != width:
            _refuse(step, f"makes {step.output.width} columns from {width}; a sum keeps the columns")
        if step.edges is not None and not _FIXED.fullmatch(step.edges):
            heads = self._width(step, step.edges, self._edges)
            if width % heads:
                _refuse(step, f"weights {width} columns by {heads} heads; give a multiple of the heads")
        self._make(step, (step.output,), self._nodes)

    def _vertex(self, step: Vertex) -> None:
        stage = vertex_stage(step.stage, step.config)
        _equal(step, "inputs", stage.shapes.inputs, [self._width(step, n, self._nodes) for n in step.inputs])
        _equal(step, "outputs", stage.shapes.outputs, [slot.width for slot in step.outputs])
        shapes = stage.shapes.weights
        if not len(step.weights) == len(shapes) <= MAX_WEIGHTS:
            _refuse(step, f"has weights {list(step.weights)}, but its stage needs {list(shapes)}")
        for name in step.weights:
            if not 0 < len(name) <= 512 or name in self._weights:
                _refuse(step, f"has the weight {name!r}, which is not a name or belongs to another step")
            self._weights.add(name)
        self._make(step, step.outputs, self._nodes)

    def _scatter(self, step: Scatter) -> None:
        if not 0 < len(step.slots) <= MAX_SLOTS:
            _refuse(step, f"sends {len(step.slots)} slots; give 1 to {MAX_SLOTS}")
        for name in step.slots:
            self._width(step, name, self._nodes)
            if name in self._with_halo:
                _refuse(step, f"sends {name!r} again; rows are sent once in an epoch, features never")
            self._with_halo.add(name)

    def _edge(self, step: Edge) -> None:
        stage = edge_stage(step.stage, step.config)
        widths = [self._width(step, name, self._nodes) for name in (step.sources, step.targets)]
        _equal(step, "slots", (stage.width,) * 3, [*widths, step.output.width])
        self._has_halo(step, step.sources)
        self._make(step, (step.output,), self._edges)

    def _drop(self, step: Drop) -> None:
        among = self._edges if step.source in self._edges else self._nodes
        if step.output.width != self._width(step, step.source, among):
            _refuse(step, f"makes {step.output.width} columns from {among[step.source]}")
        if not 0 <= step.probability <= 1:
            _refuse(step, f"drops with probability {step.probability}; give one from 0 to 1")
        if drops_features(step):
            self._with_halo.add(step.output.name)
        self._make(step, (step.output,), among)

    def _width(self, step: ProgramStep, name: str, among: dict[str, int]) -> int:
        if name not in among:
            kind, hint = "nodes" if among is self._nodes else "edges", suggest_name(name, among)
            _refuse(step, f"reads {name!r}, which no earlier step makes for {kind}{hint}")
        return among[name]

    def _has_halo(self, step: ProgramStep, name: str) -> None:
        if name not in self._with_halo:
            _refuse(step, f"reads {name!r} over edges; put a Scatter of it before")

    def _make(self, step: ProgramStep, slots: Sequence[Slot], among: dict[str, int]) -> None:
        if not 0 < len(slots) <= MAX_SLOTS:
            _refuse(step, f"makes {len(slots)} slots; give 1 to {MAX_SLOTS}")
        for slot in slots:
            if not _NAME.fullmatch(slot.name):
                _refuse(step, f"makes {slot.name!r}; slots are named by 1 to 64 of A-Z a-z 0-9 _ . -")
            if slot.name in self._nodes or slot.name in self._edges:
                _refuse(step, f"makes {slot.name!r}, which already exists; choose another name")
            among[slot.name] = slot.width


def _equal(step: ProgramStep, subject: str, expected: Iterable[int], actual: Iterable[int]) -> None:
    if list(expected) != list(actual):
        _refuse(step, f"has {subject} of {list(actual)} columns, but its stage needs {list(expected)}")


def _refuse(step: ProgramStep, reason: str) -> NoReturn:
    raise ConfigError(f"step {step.name!r} {reason}")


_STEPS: Mapping[str, Callable[..., ProgramStep]] = {
    kind.__name__.lower(): kind for kind in get_args(ProgramStep)
}


def _read_step(fields: Fields) -> ProgramStep:
    kind = _STEPS[fields.choice("kind", tuple(_STEPS))]
    step = fields.record(kind, config=lambda name: fields.nested_fields(name).mapping)
    fields.reject_unread()
    return step


@final
@dataclass(frozen=True, kw_only=True)
class Program:
    """Steps of the forward pass of one epoch; the backward pass runs them in reverse."""

    steps: tuple[ProgramStep, ...]
    """The last step is a Vertex whose only output, (n, classes), goes into the loss."""
    features: int
    """Columns of the slot ``x``."""
    classes: int
    num_train: int
    """M: training nodes on all graph servers; divides the sum of losses."""
    dtype: str = "float32"
    """Type of all rows and weights: float32 or float64."""
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        fields = Fields(vars(self), "a program")
        for name, most in (("features", MAX_WIDTH), ("classes", MAX_WIDTH), ("num_train", MAX_TRAIN)):
            fields.integer(name, 1, most)
        fields.choice("dtype", DTYPES)
        fields.choice("loss", LOSSES)
        check_steps(self.steps, self.features, self.classes)

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal characters; equal programs have equal digests on all machines."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Return the program as JSON; equal programs give equal bytes."""
        scalars = {name: getattr(self, name) for name in _SCALARS}
        steps = [{"kind": type(step).__name__.lower(), **asdict(step)} for step in self.steps]
        return write_json({"version": _VERSION, "steps": steps, **scalars})

    @classmethod
    def from_json(cls, text: bytes | str) -> Program:
        """Read the result of :meth:`to_json`, at most 1 MiB; never imports anything that it names.

        Raises:
            ConfigError: it is not a valid program of this version.
            UnknownNameError: a stage is not registered in this process.
        """
        fields = Fields.parse(text, "a program", MAX_PROGRAM_BYTES)
        fields.integer("version", _VERSION, _VERSION)
        steps = tuple(map(_read_step, fields.nested_list("steps", 0, MAX_STEPS)))
        scalars: dict[str, Any] = {name: fields.raw_value(name) for name in _SCALARS}
        fields.reject_unread()
        return cls(steps=steps, **scalars)

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """All slots by name: ``x`` first, then in the order of the steps."""
        made = {slot.name: slot for step in self.steps for slot in outputs_of(step)}
        return {FEATURES: Slot(FEATURES, self.features)} | made

    @cached_property
    def edge_slots(self) -> frozenset[str]:
        """Slots of (E, width) rows of in-edges."""
        names: set[str] = set()
        for step in self.steps:
            if isinstance(step, Edge) or (isinstance(step, Drop) and step.source in names):
                names.add(step.output.name)
        return frozenset(names)

    @property
    def last(self) -> int:
        """Index of the last step, which may run fused with its backward pass."""
        return len(self.steps) - 1

    @cached_property
    def vertex_steps(self) -> tuple[int, ...]:
        """Indices of the Vertex steps, with or without weights."""
        return tuple(index for index, step in enumerate(self.steps) if isinstance(step, Vertex))

    @cached_property
    def weight_shapes(self) -> Shapes:
        """Shape of each weight by the user's name, in the order of the steps."""
        return {name: shape for at in self.vertex_steps for name, shape in self.weights_of(at).items()}

    def weights_of(self, index: int) -> Shapes:
        """Return the shape of each weight of Vertex step ``index`` by the user's name."""
        step = self.steps[index]
        assert isinstance(step, Vertex)
        shapes = vertex_stage(step.stage, step.config).shapes.weights
        return dict(zip(step.weights, shapes.values(), strict=True))

    @cached_property
    def trained_slots(self) -> frozenset[str]:
        """Slots that depend on a weight and therefore have gradients; ``x`` never does."""
        names: set[str] = set()
        for step in self.steps:
            if (isinstance(step, Vertex) and step.weights) or names.intersection(inputs_of(step)):
                names.update(slot.name for slot in outputs_of(step))
        return frozenset(names)
