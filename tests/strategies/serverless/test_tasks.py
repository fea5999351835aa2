"""Tasks, their keys and their payloads: one canonical text each; everything else is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.tasks import (
    MAX_EVENT_BYTES,
    Address,
    Direction,
    Role,
    Secrets,
    Task,
    TaskKey,
    attempt_name,
    check_payload,
    half_name,
    list_pulled_items,
    list_submitted_items,
    parse_attempt,
    parse_half,
)
from tests.helpers.schema import check_every_field

from .programs import gat, gcn, sage

F, B, FB = Direction.FORWARD, Direction.BACKWARD, Direction.FUSED
KEY = "z" * 40


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "key": TaskKey(3, 2, 7, B),
        "rows": 1000,
        "first_row": 5000,
        "seed": 3,
        "program": gcn().digest,
        "graph_server": Address(rank=1, host="left", endpoint="tcp://10.0.0.1:4000", public_key=KEY),
        "parameter_server": Address(rank=0, host="right", endpoint="tcp://10.0.0.2:4000"),
        "secrets": Secrets(secret="abc", public_key=KEY, secret_key=KEY),
        "timeout_s": 2.5,
        "attempt": 4,
    }
    return Task(**{**fields, **changes})


@pytest.mark.parametrize(
    "key", [TaskKey(3, 2, 7, F), TaskKey(0, 0, 0, B), TaskKey(10**9 - 1, 9999, 10**9 - 1, FB, 10**9 - 1)]
)
def test_a_key_comes_back_from_its_text(key: TaskKey) -> None:
    assert TaskKey.parse(str(key)) == key
    assert parse_half(half_name(key, 1)) == (key, 1)
    assert parse_attempt(attempt_name(key, 0, 12)) == (key, 0, 12)


NO_KEYS = """r0.e3.s2.i7 r0.e3.s2.i7.g r0.e3.s2.i7.fb.f R0.e3.s2.i7.f r0.e03.s2.i7.f r0.e-3.s2.i7.f
r0.e+3.s2.i7.f r0.e3.s2.i.f r0.e1e3.s2.i7.f r0.e٣.s2.i7.f e3.s2.i7.f r01.e3.s2.i7.f r-1.e3.s2.i7.f
r1000000000.e3.s2.i7.f r0.e1000000000.s2.i7.f r0.e3.s10000.i7.f r0.e3.s2.i1000000000.f r0.e3.s2.i7.f/0"""


def test_invalid_keys_halves_and_attempts_are_refused() -> None:
    key = "r0.e3.s2.i7.f"
    for text in (*NO_KEYS.split(), "", f"{key} ", f" {key}", f"{key}\n", "r0.e3 .s2.i7.f", "x" * 5000):
        with pytest.raises(ConfigError, match="no key of a task"):
            TaskKey.parse(text)
    for text in (key, f"{key}/", f"{key}/2", f"{key}/00", "e3/0", "/0", ""):
        with pytest.raises(ConfigError):
            parse_half(text)
    for text in (f"{key}/0", f"{key}/0/", f"{key}/2/1", f"{key}/0/01", f"{key}/0/-1", "1", ""):
        with pytest.raises(ConfigError):
            parse_attempt(text)


def test_a_key_is_checked_against_the_program() -> None:
    for good in (TaskKey(9, 1, 3, F), TaskKey(9, 1, 3, B), TaskKey(9, 4, 0, FB), TaskKey(9, 4, 0, B)):
        good.check(gcn())
    for bad, message in (
        (TaskKey(0, 5, 0, F), "step 5 of 5"),
        (TaskKey(0, 0, 0, F), "graph servers do themselves"),
        (TaskKey(0, 2, 0, B), "graph servers do themselves"),
        (TaskKey(0, 1, 0, FB), "only the last"),
    ):
        with pytest.raises(ConfigError, match=message):
            bad.check(gcn())
    assert [step.name for step in gat().steps][2] == "AE1"
    with pytest.raises(ConfigError, match="graph servers do themselves"):
        TaskKey(0, 2, 0, B).check(gat())


def test_a_task_comes_back_from_its_event() -> None:
    for case in (task(), task(secrets=Secrets(secret="s"), attempt=0)):
        event = case.to_event()
        assert Task.from_event(event) == case
        assert Task.from_event(event.decode()) == case
        assert Task.from_event(json.loads(event)) == case
    assert len(task().to_event()) < 1000
    assert task().again() == task(attempt=5)


def test_nothing_secret_is_shown() -> None:
    single = task(secrets=Secrets(secret="open sesame", public_key=KEY, secret_key="k" * 40))
    assert "sesame" not in repr(single)
    assert "kkk" not in repr(single)
    with pytest.raises(ConfigError, match="secret") as caught:
        Task.from_event(task(secrets=Secrets(secret="open sesame\n")).to_event())
    assert "sesame" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"'secrets' is \(not shown\), expected an object") as caught:
        Task.from_event({**as_json(), "secrets": "open sesame"})


def as_json() -> dict[str, Any]:
    return json.loads(task().to_event())


def test_every_field_of_an_event_is_checked_or_kept() -> None:
    check_every_field(
        as_json(), lambda event: json.loads(Task.from_event(event).to_event()), ConfigError, "task"
    )
    for field, bad in (
        *(("program", digest) for digest in ("abc", "g" * 64, "A" * 64)),
        *(("timeout_s", seconds) for seconds in (0, 1e9)),
        *(("rows", 1 << 50), ("attempt", 10**6), ("version", 2), ("key", "r0.e3.s2.i7.f\n")),
        *(("secrets", {"secret": "a", "public_key": key}) for key in (KEY, "short")),
    ):
        with pytest.raises(ConfigError):
            Task.from_event({**as_json(), field: bad})


NO_EVENTS: dict[str, tuple[Any, str]] = {
    "cut off": (b"{", "not valid JSON"),
    "large": (b"{}" + b" " * MAX_EVENT_BYTES, "more than 262144"),
    "deep": (b'{"key":' + b"[" * 100_000, "not valid JSON"),
    "as deep as can be read": (
        b'{"version":' + b"[" * 700 + b"]" * 700 + b"}",
        r"'version' is \[\[\[\[\.\.\.\]",
    ),
    "a pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "not valid JSON"),
    "a number beyond all texts": (b'{"version":' + b"1" * 5000 + b"}", "not valid JSON"),
    "no number": (b'{"version":NaN}', "NaN is not a JSON number"),
    "no names": ({1: 2}, "named fields"),
    "nothing": (None, "it is None, expected an object"),
    "a number beyond all floats": ({"timeout_s": 10**400}, "'timeout_s' is 1000"),
    "steers a terminal": ({"program": "\x1b]0;owned\x07"}, r"'\\x1b\]0;owned"),
    "half a character": ({"graph_server": {"host": "\ud800"}}, r"'graph_server\.host'"),
    "a file as endpoint": ({"graph_server": {"endpoint": "ipc:///tmp/x"}}, "give tcp://HOST:PORT"),
    "a stage of its own": ({"stages": {"dense": "os:system"}}, "'stages' is not supported"),
}


@pytest.mark.parametrize("case", NO_EVENTS)
def test_invalid_events_are_refused(case: str) -> None:
    event, message = NO_EVENTS[case]
    if isinstance(event, dict) and case != "no names":
        good = as_json()
        for name, value in event.items():
            event = {**good, name: {**good[name], **value} if name == "graph_server" else value}
    with pytest.raises(ConfigError, match=message):
        Task.from_event(event)


def test_own_rows_of_features_get_no_gradient() -> None:
    program = sage()
    assert [item.slot for item in list_pulled_items(program, 1, F)] == ["h1", "x"]
    assert list_submitted_items(program, 1, B) == ()
    assert sorted(item.slot for item in list_submitted_items(program, 4, B)) == ["h2", "h3"]
    assert [item.role for item in list_submitted_items(gcn((5, 3)), 1, FB)] == [Role.STATISTICS]


def test_arrays_of_another_shape_or_dtype_are_refused() -> None:
    items = list_submitted_items(gcn(), 1, F)
    check_payload(items, [np.zeros((7, 4))], 7, "a gift")
    for wrong in ([np.zeros((6, 4))], [np.zeros((7, 3))], [np.zeros((7, 4), np.float32)], [np.zeros(28)]):
        with pytest.raises(ConfigError, match="a gift has output h2 of shape"):
            check_payload(items, wrong, 7, "a gift")
    with pytest.raises(ConfigError, match="a gift has 2 arrays, not 1"):
        check_payload(items, [np.zeros((7, 4))] * 2, 7, "a gift")
