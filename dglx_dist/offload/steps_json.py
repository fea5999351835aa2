"""Steps as JSON: written by graph servers, read and checked by workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields, Json
from dglx_dist.offload.stages.base import Config
from dglx_dist.offload.stages.linear import MAX_WIDTH
from dglx_dist.offload.steps import Edge, Gather, Scatter, Slot, Step, Vertex
from dglx_dist.offload.steps_check import MAX_SLOTS, MAX_WEIGHTS

_LONGEST = 512
"""Characters of a name; the check of whole programs is stricter where it must be."""


def step_as_json(step: Step) -> Json:
    """Return ``step`` as JSON values."""
    if isinstance(step, Gather):
        output = _slot_as_json(step.output)
        return {
            "kind": "gather", "name": step.name, "source": step.source, "output": output, "edges": step.edges
        }  # fmt: skip
    if isinstance(step, Scatter):
        return {"kind": "scatter", "name": step.name, "slots": list(step.slots)}
    shared: dict[str, Json] = {"name": step.name, "stage": step.stage, "config": step.config}
    if isinstance(step, Vertex):
        outputs: list[Json] = [_slot_as_json(slot) for slot in step.outputs]
        own: dict[str, Json] = {
            "kind": "vertex", "inputs": list(step.inputs), "outputs": outputs, "weights": list(step.weights)
        }  # fmt: skip
    else:
        output = _slot_as_json(step.output)
        own = {"kind": "edge", "sources": step.sources, "targets": step.targets, "output": output}
    return shared | own


def _slot_as_json(slot: Slot) -> dict[str, Json]:
    return {"name": slot.name, "width": slot.width}


def read_step(given: object, index: int) -> Step:
    """Read what :func:`step_as_json` gave, as step ``index``.

    Raises:
        ConfigError: a field is missing, unknown or wrong.
    """
    fields = Fields(given, f"step {index} of a program")
    kind = fields.choice("kind", tuple(_READERS))
    step = _READERS[kind](fields, fields.text("name", _LONGEST))
    fields.end()
    return step


def _gather(fields: Fields, name: str) -> Gather:
    return Gather(
        name=name,
        source=_name(fields, "source"),
        output=_read_slot(fields.any("output"), fields.where),
        edges=fields.maybe("edges", lambda field: _name(fields, field), None),
    )


def _vertex(fields: Fields, name: str) -> Vertex:
    outputs = fields.items("outputs", MAX_SLOTS)
    return Vertex(
        name=name,
        stage=_name(fields, "stage"),
        config=_config(fields),
        inputs=fields.texts("inputs", MAX_SLOTS, _LONGEST),
        outputs=tuple(_read_slot(output, fields.where) for output in outputs),
        weights=fields.texts("weights", MAX_WEIGHTS, _LONGEST),
    )


def _scatter(fields: Fields, name: str) -> Scatter:
    return Scatter(name=name, slots=fields.texts("slots", MAX_SLOTS, _LONGEST))


def _edge(fields: Fields, name: str) -> Edge:
    return Edge(
        name=name,
        stage=_name(fields, "stage"),
        config=_config(fields),
        sources=_name(fields, "sources"),
        targets=_name(fields, "targets"),
        output=_read_slot(fields.any("output"), fields.where),
    )


_READERS: Mapping[str, Callable[[Fields, str], Step]] = {
    "gather": _gather,
    "vertex": _vertex,
    "scatter": _scatter,
    "edge": _edge,
}


def _name(fields: Fields, field: str) -> str:
    return fields.text(field, _LONGEST)


def _config(fields: Fields) -> Config:
    given = fields.any("config")
    if not isinstance(given, dict):
        raise ConfigError(f"{fields.where} has a config that is no object; give the fields of its stage")
    return given


def _read_slot(given: object, where: str) -> Slot:
    fields = Fields(given, f"a slot of {where}")
    slot = Slot(fields.text("name", _LONGEST), fields.whole("width", 1, MAX_WIDTH))
    fields.end()
    return slot
