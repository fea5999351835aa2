"""A model as steps that graph servers and workers take in turn, without anything of torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields, Json, read_json, write_json
from dglx_dist.offload.stages.base import EdgeStage, Shapes, VertexStage
from dglx_dist.offload.stages.linear import MAX_WIDTH
from dglx_dist.offload.stages.registry import edge_stage, vertex_stage
from dglx_dist.offload.steps import FEATURES, Edge, Slot, Step, Vertex, inputs_of, outputs_of
from dglx_dist.offload.steps_check import MAX_STEPS, check_steps
from dglx_dist.offload.steps_json import read_step, step_as_json

DTYPES, LOSSES = ("float32", "float64"), ("cross_entropy",)
MAX_TRAIN = 1 << 40
MAX_PROGRAM_BYTES = 1 << 20
_VERSION = 1


@final
@dataclass(frozen=True, kw_only=True)
class Program:
    """Steps of one epoch forward; backward takes them in reverse. Checked when it is made.

    Raises:
        ConfigError: a step does not fit those before it or its stage; the message names the step.
    """

    steps: tuple[Step, ...]
    """The last one is a Vertex, whose one output (n, classes) goes into the loss."""
    features: int
    """Columns of the slot ``x``."""
    classes: int
    num_train: int
    """M: training nodes on all graph servers, by which the sum of losses is divided."""
    dtype: str = "float32"
    """Of all rows and weights: float32 or float64."""
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        fields = Fields(vars(self), "a program")
        self._check_sizes(fields)
        check_steps(self.steps, self.features, self.classes)

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal characters: equal where programs are equal, in any process and on any machine."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Return the program as JSON; equal programs give equal bytes."""
        sizes: dict[str, Json] = {
            "features": self.features,
            "classes": self.classes,
            "num_train": self.num_train,
        }
        kinds: dict[str, Json] = {"dtype": self.dtype, "loss": self.loss}
        steps: list[Json] = [step_as_json(step) for step in self.steps]
        return write_json({"version": _VERSION, "steps": steps, **sizes, **kinds})

    @classmethod
    def from_json(cls, text: bytes | str) -> Program:
        """Read what :meth:`to_json` wrote. Nothing is imported by a name in it.

        Raises:
            ConfigError: it is no JSON, above 1 MiB, of another version, or no program that makes sense.
            UnknownNameError: a stage is not registered in this process.
        """
        fields = Fields(read_json(text, MAX_PROGRAM_BYTES, "a program"), "a program")
        fields.whole("version", _VERSION, _VERSION)
        steps = [read_step(step, index) for index, step in enumerate(fields.items("steps", MAX_STEPS))]
        features, classes, num_train, dtype, loss = cls._check_sizes(fields)
        fields.end()
        return cls(
            steps=tuple(steps),
            features=features,
            classes=classes,
            num_train=num_train,
            dtype=dtype,
            loss=loss,
        )

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """All slots by name, ``x`` first, in the order in which steps make them."""
        made = {slot.name: slot for step in self.steps for slot in outputs_of(step)}
        return {FEATURES: Slot(FEATURES, self.features)} | made

    @cached_property
    def producers(self) -> dict[str, int]:
        """Slot to the index of the step that makes it; ``x`` is not in it."""
        return {slot.name: index for index, step in enumerate(self.steps) for slot in outputs_of(step)}

    @property
    def last(self) -> int:
        """Index of the step whose output goes into the loss, and which may run fused with its backward."""
        return len(self.steps) - 1

    @cached_property
    def vertex_steps(self) -> tuple[int, ...]:
        """Indices of the Vertex steps: those that have weights are among them."""
        return tuple(index for index, step in enumerate(self.steps) if isinstance(step, Vertex))

    @cached_property
    def weight_shapes(self) -> Shapes:
        """The user's names of all weights to their shapes, in the order of the steps."""
        shapes: Shapes = {}
        for index in self.vertex_steps:
            shapes |= self.weights_of(index)
        return shapes

    def weights_of(self, index: int) -> Shapes:
        """Return the user's names of the weights of Vertex step ``index``, with their shapes."""
        step = self._vertex(index)
        return dict(zip(step.weights, self.vertex_stage(index).weight_shapes.values(), strict=True))

    def vertex_stage(self, index: int) -> VertexStage:
        """Make the stage of Vertex step ``index``; it keeps no state, so keep it.

        Raises:
            ConfigError: there is no such Vertex step.
        """
        step = self._vertex(index)
        return vertex_stage(step.stage, step.config)

    def edge_stage(self, index: int) -> EdgeStage:
        """Make the stage of Edge step ``index``.

        Raises:
            ConfigError: there is no such Edge step.
        """
        step = self._step(index)
        if not isinstance(step, Edge):
            raise ConfigError(f"step {index} ({step.name}) applies no edge stage")
        return edge_stage(step.stage, step.config)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Slots that depend on a weight, so that gradients flow into them. ``x`` never does."""
        found: set[str] = set()
        for step in self.steps:
            if (isinstance(step, Vertex) and step.weights) or found.intersection(inputs_of(step)):
                found.update(slot.name for slot in outputs_of(step))
        return frozenset(found)

    def _step(self, index: int) -> Step:
        if not 0 <= index < len(self.steps):
            raise ConfigError(f"there is no step {index}; this program has {len(self.steps)}")
        return self.steps[index]

    def _vertex(self, index: int) -> Vertex:
        step = self._step(index)
        if not isinstance(step, Vertex):
            raise ConfigError(f"step {index} ({step.name}) applies no vertex stage")
        return step

    @staticmethod
    def _check_sizes(fields: Fields) -> tuple[int, int, int, str, str]:
        return (
            fields.whole("features", 1, MAX_WIDTH),
            fields.whole("classes", 1, MAX_WIDTH),
            fields.whole("num_train", 1, MAX_TRAIN),
            fields.choice("dtype", DTYPES),
            fields.choice("loss", LOSSES),
        )
