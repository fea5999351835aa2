"""Programs: a captured model as a sequence of steps for graph servers and workers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Literal, TypeAlias, final, get_args

from dglx_dist.data.json_fields import Fields, Within, read_record, write_json
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.tensor_program import MAX_ARRAYS, Shape, TensorProgram

FEATURES = "x"
"""Slot for the features."""
EDGE_DATA = "edge:"
"""Prefix for slot names with edge data."""
MAX_STEPS = 512
MAX_TRAIN = 1 << 40
MAX_PROGRAM_BYTES = 1 << 24
_Name: TypeAlias = Annotated[str, Within(1, 256)]
_Names: TypeAlias = Annotated[tuple[_Name, ...], Within(0, MAX_ARRAYS)]
DTYPES = ("float32", "float64")
_VERSION = 2

Per: TypeAlias = Literal["node", "edge"]
"""Whether a row belongs to a node or to an in-edge."""
End: TypeAlias = Literal["row", "source", "target"]
"""Row that an edge step reads: the edge's own row, its source's, or its target's."""
How: TypeAlias = Literal["sum", "max", "min"]
Place: TypeAlias = Literal["worker", "server", "once"]
"""Place for a tensor step: workers, the graph server, or the graph server once, before the first epoch."""


@final
@dataclass(frozen=True, kw_only=True)
class Slot:
    """Rows passed between steps: one for each node or each in-edge."""

    name: _Name
    shape: Shape
    """Shape of one row. () means one number."""
    per: Per
    dtype: Literal["", "int64"] = ""
    """The default is the program's dtype."""

    @property
    def width(self) -> int:
        """Number of columns in which a row is stored."""
        return math.prod(self.shape)


@final
@dataclass(frozen=True, kw_only=True)
class Gather:
    """Reduce source rows or in-edge rows to one row for each node (GA), on the graph server."""

    name: _Name
    source: _Name | None
    """Node slot, read at each edge's source. If None, the edges' rows are reduced."""
    edges: _Name | None
    """Edge slot.

    With a ``source``, it has one factor for each head, a run of columns, and None means that all factors are
    1.
    """
    how: How
    output: Slot


@final
@dataclass(frozen=True, kw_only=True)
class Softmax:
    """Softmax over each node's in-edges, column by column, on the graph server."""

    name: _Name
    source: _Name
    """Edge slot."""
    output: Slot


@final
@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Send boundary rows to the graph servers that have them as halo nodes (SC)."""

    name: _Name
    slots: _Names


@final
@dataclass(frozen=True, kw_only=True)
class Input:
    """One input to a tensor step."""

    slot: _Name
    end: End = "row"


@final
@dataclass(frozen=True, kw_only=True)
class Apply:
    """Run a tensor program on node rows (AV) or edge rows (AE)."""

    name: _Name
    per: Per
    place: Place
    inputs: Annotated[tuple[Input, ...], Within(0, MAX_ARRAYS)]
    outputs: Annotated[tuple[Slot, ...], Within(0, MAX_ARRAYS)]
    weights: _Names
    """Names in the user's state_dict."""
    body: TensorProgram


ProgramStep: TypeAlias = Gather | Softmax | Scatter | Apply


def inputs_of(step: ProgramStep) -> tuple[str, ...]:
    """Return the slots that ``step`` reads."""
    if isinstance(step, Gather):
        return tuple(name for name in (step.source, step.edges) if name is not None)
    if isinstance(step, Scatter):
        return step.slots
    if isinstance(step, Softmax):
        return (step.source,)
    return tuple(item.slot for item in step.inputs)


def outputs_of(step: ProgramStep) -> tuple[Slot, ...]:
    if isinstance(step, Apply):
        return step.outputs
    return () if isinstance(step, Scatter) else (step.output,)


def sources_of(step: ProgramStep) -> Iterator[str]:
    """Yield the slots that ``step`` reads at edge sources. These slots need halo rows."""
    if isinstance(step, Gather) and step.source is not None:
        yield step.source
    elif isinstance(step, Apply):
        # A dict removes duplicates and keeps the order.
        yield from dict.fromkeys(item.slot for item in step.inputs if item.end == "source")


def find_trained(steps: Sequence[ProgramStep]) -> frozenset[str]:
    """Return the slots that depend on a weight."""
    names: set[str] = set()
    for step in steps:
        has_weights = isinstance(step, Apply) and step.weights
        if has_weights or names.intersection(inputs_of(step)):
            # A slot with a dtype has integers, which have no gradient.
            names.update(slot.name for slot in outputs_of(step) if not slot.dtype)
    return frozenset(names)


def covers_halo(step: ProgramStep, with_halo: Collection[str], trained: Collection[str]) -> bool:
    """Return True if graph servers compute ``step`` for halo nodes, too, so that no server sends the rows.

    Args:
        with_halo: Slots with known halo rows.
        trained: Slots that depend on a weight.
    """
    if not isinstance(step, Apply) or step.per != "node" or step.place == "worker" or step.weights:
        return False
    return all(name in with_halo and name not in trained for name in inputs_of(step))


_STEPS: Mapping[str, Callable[..., ProgramStep]] = {
    kind.__name__.lower(): kind for kind in get_args(ProgramStep)
}


def _read_step(fields: Fields) -> ProgramStep:
    type_name = fields.choice("kind", tuple(_STEPS))
    values = {name: value for name, value in fields.mapping.items() if name != "kind"}
    return read_record(_STEPS[type_name], values, f"a step {type_name!r}")


@final
@dataclass(frozen=True, kw_only=True)
class Program:
    """Steps that one epoch's forward pass runs. The backward pass runs them in reverse.

    Raises ConfigError if a step reads a slot that no step before it makes. The message names the step.
    """

    inputs: tuple[Slot, ...]
    """Slots that never change: the features ``x``, degrees, and edge data."""
    steps: tuple[ProgramStep, ...]
    """The last step is an Apply on workers with one output, the scores."""
    loss: TensorProgram
    """Maps scores and labels for n nodes to their (n,) losses."""
    label: Slot
    """Classes or numbers. Classes are int64 and travel as int32. A node without a label has -1 or NaN."""
    num_train: int = 1
    """M, the number of training nodes on all graph servers. The summed loss is divided by M."""
    dtype: str = "float32"
    """Dtype of rows and weights: float32 or float64."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or not 1 <= self.num_train <= MAX_TRAIN:
            raise ConfigError(f"a program of dtype {self.dtype!r} for {self.num_train} training nodes")
        if not 0 < len(self.steps) <= MAX_STEPS:
            raise ConfigError(f"a program of {len(self.steps)} steps; give 1 to {MAX_STEPS}")

        known_slots = {slot.name for slot in self.inputs}
        for step in self.steps:
            missing = {*inputs_of(step)} - known_slots
            if missing:
                raise ConfigError(f"step {step.name!r} reads {sorted(missing)}, which no step before makes")
            known_slots.update(slot.name for slot in outputs_of(step))

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal characters. Equal programs have equal digests on all machines."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Return the program as JSON. Equal programs give equal bytes."""
        steps = [{"kind": type(step).__name__.lower(), **asdict(step)} for step in self.steps]
        return write_json({**asdict(self), "version": _VERSION, "steps": steps})

    @classmethod
    def from_json(cls, text: bytes | str) -> Program:
        """Read what :meth:`to_json` returned, at most 16 MiB. Nothing that it names is imported.

        Raises ConfigError if it is not a valid program for this version.
        """
        fields = Fields.parse(text, "a program", MAX_PROGRAM_BYTES)
        fields.integer("version", _VERSION, _VERSION)
        # Steps have several types, so they are read one by one.
        steps = tuple(map(_read_step, fields.nested_list("steps", 0, MAX_STEPS)))
        program = fields.record(cls, steps=lambda _name: steps)
        fields.reject_unread()
        return program

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """All slots by name: the inputs, then the steps' outputs in order."""
        outputs = [slot for step in self.steps for slot in outputs_of(step)]
        return {slot.name: slot for slot in (*self.inputs, *outputs)}

    def dtype_of(self, name: str) -> str:
        return self.slots[name].dtype or self.dtype

    @property
    def features(self) -> int:
        """Number of feature columns."""
        return self.slots[FEATURES].width

    @property
    def last(self) -> int:
        """Index of the last step. It may run fused with its backward pass."""
        return len(self.steps) - 1

    @property
    def scores(self) -> Slot:
        return outputs_of(self.steps[-1])[0]

    @cached_property
    def weighted_steps(self) -> tuple[int, ...]:
        """Indices for the steps that have weights."""
        return tuple(index for index in range(len(self.steps)) if self.weights_of(index))

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight shapes by the user's names, in step order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for index in self.weighted_steps:
            shapes.update(self.weights_of(index))
        return shapes

    def weights_of(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the weight shapes in step ``index`` by the user's names."""
        step = self.steps[index]
        if not isinstance(step, Apply):
            return {}
        return dict(zip(step.weights, step.body.weights, strict=True))

    @cached_property
    def trained_slots(self) -> frozenset[str]:
        """Slots that depend on a weight and therefore have gradients. Inputs never do."""
        return find_trained(self.steps)

    @cached_property
    def slots_with_halo(self) -> frozenset[str]:
        """Slots for which a graph server has halo rows, fetched, received or computed."""
        names = {slot.name for slot in self.inputs if slot.per == "node"}
        for step in self.steps:
            if isinstance(step, Scatter):
                names.update(step.slots)
            elif covers_halo(step, names, self.trained_slots):
                names.update(slot.name for slot in outputs_of(step))
        return frozenset(names)

    def covers_halo(self, step: ProgramStep) -> bool:
        """Return True if the graph server computes ``step`` for halo nodes, too."""
        return covers_halo(step, self.slots_with_halo, self.trained_slots)
