"""Programs and the work they describe: one canonical text; invalid ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dglx_dist.errors import ConfigError, UnknownNameError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless.program import (
    MAX_PROGRAM_BYTES,
    Gather,
    Program,
    ProgramStep,
    Scatter,
    Slot,
    Vertex,
)
from dglx_dist.strategies.serverless.stages.base import (
    Backward,
    Config,
    Forward,
    Mask,
    Rows,
    StageShapes,
    VertexStage,
    register_stage,
)
from dglx_dist.strategies.serverless.tasks import Direction, TaskComputation
from tests.helpers.schema import check_every_field

from .programs import dropping, gat, gcn, sage

PROGRAMS = {"gcn": gcn, "sage": sage, "gat": gat, "dropping": dropping, "one layer": lambda: gcn((5, 3))}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_comes_back_from_its_text(name: str) -> None:
    program = PROGRAMS[name]()
    text = program.to_json()
    again = Program.from_json(text)
    assert again == program
    assert again.to_json() == text
    assert again.digest == program.digest
    assert Program.from_json(text.decode()) == program


def test_a_digest_is_the_programs_and_nothing_elses() -> None:
    """Other processes, orders of fields and hash seeds give the same one; any other program another."""
    command = "from tests.serverless.programs import gat; print(gat().digest)"
    process = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == gat().digest
    remaining = [gat(), gcn(), sage(), gcn((5, 4, 4, 3)), gcn(num_train=7), replace(gcn(), dtype="float32")]
    assert len({program.digest for program in remaining}) == len(remaining)


def replace_step(index: int, **fields: Any) -> Callable[[], Program]:
    def make() -> Program:
        program = gcn()
        steps = list(program.steps)
        steps[index] = replace(steps[index], **fields)
        return replace(program, steps=tuple(steps))

    return make


def steps(*some: ProgramStep | str) -> Callable[[], Program]:
    return lambda: replace(gcn(), steps=some)  # type: ignore[arg-type]


LAST = gcn().steps[4]
WRONG: dict[str, tuple[Callable[[], Program], str]] = {
    "no steps": (steps(), "number of steps"),
    "no step": (steps("AV1"), "not a step"),
    "ends in a gather": (steps(*gcn().steps[:1]), "must be a Vertex"),
    "other classes": (lambda: replace(gcn(), classes=4), "must be a Vertex"),
    "no classes": (lambda: replace(gcn(), classes=0), "classes"),
    "no features": (lambda: replace(gcn(), features=-1), "features"),
    "other features": (lambda: replace(gcn(), features=6), "makes 5 columns from 6"),
    "half a node": (lambda: replace(gcn(), num_train=0.5), "num_train"),  # type: ignore[arg-type]
    "true classes": (lambda: replace(gcn(), classes=True), "classes"),
    "no train nodes": (lambda: replace(gcn(), num_train=0), "num_train"),
    "float16": (lambda: replace(gcn(), dtype="float16"), "dtype"),
    "other loss": (lambda: replace(gcn(), loss="mse"), "loss"),
    "same name twice": (replace_step(1, name="GA1"), "taken"),
    "name with a slash": (replace_step(1, name="A/1"), "A-Z"),
    "no name": (replace_step(1, name=""), "A-Z"),
    "gather of nothing": (replace_step(0, source="h9"), "no earlier step makes"),
    "gather of what comes later": (replace_step(0, source="h1"), "no earlier step makes"),
    "gather without scatter": (steps(*gcn().steps[:2], *gcn().steps[3:]), "put a Scatter"),
    "gather into more columns": (replace_step(0, output=Slot("a1", 6)), "keeps the columns"),
    "gather by unknown edges": (replace_step(0, edges="att"), "no earlier step makes for edges"),
    "gather by rows of nodes": (replace_step(3, edges="h1"), "no earlier step makes for edges"),
    "gather by a bad number": (replace_step(0, edges="fixed:01"), "no earlier step makes for edges"),
    "slot is there already": (replace_step(0, output=Slot("x", 5)), "already exists"),
    "slot without a name": (replace_step(0, output=Slot("", 5)), "slots are named"),
    "unknown stage": (replace_step(1, stage="dens"), "did you mean 'dense'"),
    "stage by path": (replace_step(1, stage="os:system"), "no stage"),
    "stage of edges": (replace_step(1, stage="attention_edges", config={"heads": 1, "slope": 1.0}), "edges"),
    "bad config": (replace_step(1, config={"in": 5}), "'out' is missing"),
    "too few inputs": (replace_step(1, inputs=()), "inputs"),
    "input of other columns": (replace_step(1, inputs=("x", "a1")), "inputs"),
    "output of other columns": (replace_step(1, outputs=(Slot("h1", 5),)), "outputs"),
    "no outputs": (replace_step(1, outputs=()), "outputs"),
    "too few weights": (replace_step(1, weights=("w",)), "its stage needs"),
    "same weight twice": (replace_step(1, weights=("w", "w")), "belongs to another step"),
    "weight of another step": (replace_step(4, weights=("w", "layers.1.bias")), "belongs to another step"),
    "weight without a name": (replace_step(1, weights=("w", "")), "not a name"),
    "scatter of nothing": (replace_step(2, slots=()), "slots"),
    "scatter of features": (replace_step(2, slots=("x",)), "again"),
    "scatter twice": (replace_step(2, slots=("h1", "h1")), "again"),
    "scatter of what is not there": (replace_step(2, slots=("h2",)), "no earlier step makes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_inconsistent_programs_are_refused(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        make()


def test_edges_are_checked_too() -> None:
    program = gat()
    edge = program.steps[2]
    for change, message in (
        ({"sources": "er1"}, "put a Scatter"),
        ({"sources": "z1"}, "columns"),
        ({"targets": "att0"}, "no earlier step makes"),
        ({"output": Slot("att1", 2)}, "columns"),
        ({"stage": "dense", "config": {"in": 1, "out": 1, "bias": False}}, "is a vertex stage"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(program, steps=(*program.steps[:2], replace(edge, **change), *program.steps[3:]))
    rows = Vertex(name="V", stage="attention_finish", config={}, inputs=("att1",), outputs=(Slot("y", 3),))
    with pytest.raises(ConfigError):
        replace(program, steps=(*program.steps[:3], rows))
    with pytest.raises(ConfigError, match="is an edge stage"):
        replace(program, steps=(*program.steps[:3], replace(rows, stage=edge.stage, config=edge.config)))
    with pytest.raises(ConfigError, match="no earlier step makes for nodes"):
        replace(program, steps=(*program.steps[:3], Scatter(name="S", slots=("att1",))))
    odd = Gather(name="G", source="x", output=Slot("s1", 5), edges="att1")
    with pytest.raises(ConfigError, match="5 columns by 3 heads"):
        replace(program, steps=(*program.steps[:3], odd))


def test_drops_are_checked_too() -> None:
    program = dropping()
    assert program.edge_slots == {"att2", "d3"}
    assert program.trained_slots == set(program.slots) - {"x", "d1", "a1"}
    first, remaining = program.steps[0], program.steps[1:]
    for change, message in (
        ({"source": "h1"}, "no earlier step makes for nodes"),
        ({"output": Slot("d1", 4)}, "makes 4 columns from 5"),
        ({"probability": 1.5}, "probability 1.5"),
        ({"output": Slot("x", 5)}, "already exists"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(program, steps=(replace(first, **change), *remaining))
    with pytest.raises(ConfigError, match="put a Scatter of it before"):
        replace(program, steps=(*program.steps[:11], *program.steps[12:]))
    with pytest.raises(ConfigError, match="no earlier step makes for nodes"):
        replace(program, steps=(*program.steps[:8], replace(program.steps[9], inputs=("d3",))))


def as_json() -> dict[str, Any]:
    return json.loads(gat().to_json())


def test_every_field_of_the_text_is_checked_or_kept() -> None:
    for program in (gat(), dropping()):
        check_every_field(
            json.loads(program.to_json()),
            lambda text: json.loads(Program.from_json(json.dumps(text)).to_json()),
            ConfigError,
            ".",
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[]", r"it is \[\], expected an object"),
        (json.dumps({**as_json(), "version": 2}), "version"),
        (json.dumps({**as_json(), "more": 1}), "key 'more' is not supported"),
        (json.dumps({**as_json(), "steps": as_json()["steps"] * 60}), "list of 0 to 512"),
        (" " * (MAX_PROGRAM_BYTES + 1), "more than 1048576"),
    ],
)
def test_texts_that_are_no_program_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Program.from_json(text)


def test_program_text_cannot_name_unregistered_stages() -> None:
    text = as_json()
    text["steps"][0]["stage"] = "subprocess:run"
    with pytest.raises(UnknownNameError, match="there is no stage 'subprocess:run'"):
        Program.from_json(json.dumps(text))


LAST_STEP = TaskComputation(gcn(), 4, Direction.FUSED, True)
WEIGHTS = [np.zeros(shape) for shape in LAST_STEP.weights.values()]
PULLED = [np.zeros((2, 4)), np.zeros(2, dtype=np.int32)]


@pytest.mark.parametrize(
    ("place", "array", "message"),
    [
        (0, np.zeros((3, 4)), "shape"),
        (0, np.zeros((2, 5)), "shape"),
        (0, np.zeros((2, 4), dtype=np.float32), "float32"),
        (1, np.zeros(2, dtype=np.int64), "int64"),
        (1, np.zeros((2, 1), dtype=np.int32), "shape"),
        (1, np.array([0, 3], dtype=np.int32), "labels from 0 to 3"),
        (1, np.array([0, -2], dtype=np.int32), "labels from -2 to 0"),
    ],
)
def test_pulled_arrays_are_checked(place: int, array: Array, message: str) -> None:
    LAST_STEP.half(WEIGHTS, PULLED, 2)
    changed = [array if index == place else old for index, old in enumerate(PULLED)]
    with pytest.raises(ConfigError, match=message):
        LAST_STEP.half(WEIGHTS, changed, 2)


def test_arrays_and_weights_are_counted_and_compared() -> None:
    with pytest.raises(ConfigError, match="1 arrays, not 2"):
        LAST_STEP.half(WEIGHTS, PULLED[:1], 2)
    for bad in (WEIGHTS[:1], WEIGHTS[::-1], [WEIGHTS[0].astype(np.float32), WEIGHTS[1]]):
        with pytest.raises(ConfigError, match=r"got weights.*layers\.2\.bias"):
            LAST_STEP.half(bad, PULLED, 2)


class Careless(VertexStage):
    """h = x w, with a mistake of choice."""

    def __init__(self, config: Config) -> None:
        self._mistake = config["mistake"]
        self.shapes = StageShapes({"w": (4, 3)}, (4,), (3,))

    def forward(self, weights: Rows, inputs: Rows) -> Forward:
        h = inputs[0] @ weights[0]
        if self._mistake == "a class more":
            h = np.concatenate([h, h[:, :1]], axis=1)
        elif self._mistake == "writes to its rows":
            inputs[0][:] = 0
        elif self._mistake == "no array":
            return Forward((h.tolist(),), ())  # type: ignore[arg-type]
        return Forward((h, h) if self._mistake == "an output more" else (h,), ())

    def backward(
        self, weights: Rows, inputs: Rows, gradients: Rows, *, saved: Rows | None = None, wanted: Mask = None
    ) -> Backward:
        slope = gradients[0][:, :3]
        if self._mistake == "writes to its weights":
            weights[0][:] = 0
        dw = inputs[0].T @ slope
        return Backward(
            (None if self._mistake == "a gradient less" else slope @ weights[0].T,),
            (dw.tolist() if self._mistake == "a list" else dw,),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("a class more", r"returned has output h2 of shape \(2, 4\) and float64, not \(2, 3\)"),
        ("an output more", "returned has 2 arrays, not 1"),
        ("no array", "returned has output h2 of type list"),
        ("a gradient less", "returned has 1 arrays, not 2"),
        ("a list", "returned gradients .*no array"),
        ("writes to its rows", "read-only"),
        ("writes to its weights", "read-only"),
    ],
)
def test_mistakes_of_a_users_own_stage_are_found(mistake: str, message: str) -> None:
    register_stage("careless", Careless)
    last = replace(gcn().steps[4], stage="careless", config={"mistake": mistake}, weights=("w",))  # type: ignore[arg-type]
    program = replace(gcn(), steps=(*gcn().steps[:4], last))
    x, labels, weights = np.ones((2, 4)), np.zeros(2, dtype=np.int32), [np.ones((4, 3))]
    with pytest.raises(ValueError, match=message):
        TaskComputation(program, 4, Direction.FUSED, True).half(weights, [x, labels], 2)
    assert (x.all(), weights[0].all()) == (True, True)
