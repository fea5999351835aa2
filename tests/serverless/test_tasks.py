"""Tasks and their keys: one text each, everything else is refused."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.tasks import (
    MAX_EVENT_BYTES,
    Address,
    Direction,
    Secrets,
    Task,
    TaskKey,
    TaskOptions,
    attempt_name,
    half_name,
    parse_attempt,
    parse_half,
)

from .programs import gat, gcn

F, B, FB = Direction.FORWARD, Direction.BACKWARD, Direction.FUSED
KEY = "z" * 40


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "key": TaskKey(3, 2, 7, B),
        "rows": 1000,
        "program": gcn().digest,
        "graph_server": Address(rank=1, host="left", endpoint="tcp://10.0.0.1:4000", public_key=KEY),
        "parameter_server": Address(rank=0, host="right", endpoint="tcp://10.0.0.2:4000"),
        "secrets": Secrets(secret="abc", public_key=KEY, secret_key=KEY),
        "timeout_s": 2.5,
        "attempt": 4,
        "options": TaskOptions(streaming=False, rematerialise=True),
    }
    return Task(**{**fields, **changes})


@pytest.mark.parametrize(
    "key", [TaskKey(3, 2, 7, F), TaskKey(0, 0, 0, B), TaskKey(10**9 - 1, 9999, 10**9 - 1, FB, 10**9 - 1)]
)
def test_a_key_comes_back_from_its_text(key: TaskKey) -> None:
    assert TaskKey.parse(str(key)) == key
    assert parse_half(half_name(key, 1)) == (key, 1)
    assert parse_attempt(attempt_name(key, 0, 12)) == (key, 0, 12)


def test_keys_have_an_order_and_differ_by_direction() -> None:
    assert str(TaskKey(3, 2, 7, F, 2)) == "r2.e3.s2.i7.f"
    assert len({TaskKey(3, 2, 7, direction) for direction in Direction}) == 3
    keys = [TaskKey(1, 0, 5, F), TaskKey(0, 9, 0, B), TaskKey(0, 9, 1, B), TaskKey(0, 1, 9, FB)]
    assert sorted(keys) == [keys[3], keys[1], keys[2], keys[0]]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "r0.e3.s2.i7",
            "r0.e3.s2.i7.g",
            "r0.e3.s2.i7.f ",
            " r0.e3.s2.i7.f",
            "r0.e3.s2.i7.f\n",
            "r0.e3.s2.i7.fb.f",
            "R0.e3.s2.i7.f",
        ),
        *(
            "r0.e03.s2.i7.f",
            "r0.e-3.s2.i7.f",
            "r0.e+3.s2.i7.f",
            "r0.e3.s2.i.f",
            "r0.e3 .s2.i7.f",
            "r0.e1e3.s2.i7.f",
            "r0.e٣.s2.i7.f",
            "e3.s2.i7.f",
            "r01.e3.s2.i7.f",
            "r-1.e3.s2.i7.f",
            "r1000000000.e3.s2.i7.f",
        ),
        *(
            "r0.e1000000000.s2.i7.f",
            "r0.e3.s10000.i7.f",
            "r0.e3.s2.i1000000000.f",
            "r0.e3.s2.i7.f/0",
            "x" * 5000,
        ),
    ],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no key of a task"):
        TaskKey.parse(text)


@pytest.mark.parametrize(
    "text", ["r0.e3.s2.i7.f", "r0.e3.s2.i7.f/", "r0.e3.s2.i7.f/2", "r0.e3.s2.i7.f/00", "e3/0", "/0", ""]
)
def test_what_names_no_half_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_half(text)


@pytest.mark.parametrize(
    "text",
    [
        "r0.e3.s2.i7.f/0",
        "r0.e3.s2.i7.f/0/",
        "r0.e3.s2.i7.f/2/1",
        "r0.e3.s2.i7.f/0/01",
        "r0.e3.s2.i7.f/0/-1",
        "1",
        "",
    ],
)
def test_what_names_no_attempt_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_attempt(text)


@pytest.mark.parametrize(
    "bad",
    [
        (-1, 0, 0, F),
        (0, 0, 0, F, -1),
        (0, 0, 0, F, 10**9),
        (0, 10**4, 0, F),
        (0, 0, 10**9, F),
        (0, True, 0, F),
        (0, 0, 0, "f"),
    ],
)
def test_a_key_is_checked_when_it_is_made(bad: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="key"):
        TaskKey(*bad)


def test_a_key_is_checked_against_the_program() -> None:
    for good in (TaskKey(9, 1, 3, F), TaskKey(9, 1, 3, B), TaskKey(9, 4, 0, FB), TaskKey(9, 4, 0, B)):
        good.check(gcn(), 4)
    TaskKey(0, 2, 0, B).check(gat(), 1)
    for bad, message in (
        (TaskKey(0, 1, 4, F), "interval 4 of 4"),
        (TaskKey(0, 5, 0, F), "step 5 of 5"),
        (TaskKey(0, 0, 0, F), "graph servers do themselves"),
        (TaskKey(0, 2, 0, B), "graph servers do themselves"),
        (TaskKey(0, 1, 0, FB), "only the last"),
    ):
        with pytest.raises(ConfigError, match=message):
            bad.check(gcn(), 4)


def test_a_task_comes_back_from_its_event() -> None:
    for one in (task(), task(secrets=Secrets(secret="s"), attempt=0, options=TaskOptions())):
        event = one.to_event()
        assert Task.from_event(event) == one
        assert Task.from_event(event.decode()) == one
        assert Task.from_event(json.loads(event)) == one
    assert len(task().to_event()) < 1000
    assert task().again() == task(attempt=5)


def test_nothing_secret_is_shown() -> None:
    one = task(secrets=Secrets(secret="open sesame", public_key=KEY, secret_key="k" * 40))
    assert "sesame" not in repr(one)
    assert "kkk" not in repr(one)
    with pytest.raises(ConfigError, match="secret") as caught:
        task(secrets=Secrets(secret="open sesame\n")).to_event()
    assert "sesame" not in str(caught.value)


def as_json() -> dict[str, Any]:
    return json.loads(task().to_event())


WRONG: dict[str, list[Any]] = {
    "version": [0, 2, "1"],
    "key": ["e3", 7, "r0.e3.s2.i7.f\n"],
    "rows": [-1, 1.5, True, "7", 1 << 50],
    "program": ["abc", "g" * 64, "A" * 64, 7],
    "timeout_s": [0, -1, 1e9, "1", True],
    "attempt": [-1, 10**6, 1.0],
    "options": [
        {},
        {"streaming": 1, "rematerialise": True},
        [],
        {"streaming": True, "rematerialise": True, "x": 1},
    ],
    "graph_server": ["tcp://10.0.0.1:1", {}, {"rank": 0}],
    "parameter_server": [7],
    "secrets": [
        "abc",
        {},
        {"secret": ""},
        {"secret": "a", "public_key": KEY},
        {"secret": "a", "public_key": "short"},
    ],
}


@pytest.mark.parametrize("field", as_json())
def test_every_field_of_an_event_must_be_there_and_right(field: str) -> None:
    without = {name: value for name, value in as_json().items() if name != field}
    for event in (without, *({**as_json(), field: bad} for bad in [None, *WRONG[field]])):
        with pytest.raises(ConfigError):
            Task.from_event(event)


@pytest.mark.parametrize(
    "change",
    [
        *({"rank": bad} for bad in (-1, "0", 1 << 40)),
        *({"endpoint": bad} for bad in ("ipc:///tmp/x", "http://10.0.0.1:1", "", 7, "tcp://" + "x" * 2000)),
        *({"host": bad} for bad in ("", "two\nlines", None)),
        *({"public_key": bad} for bad in ("short", "x" * 41, 40)),
        {"port": 7},
    ],
)
def test_every_field_of_an_address_is_checked(change: Mapping[str, Any]) -> None:
    event = as_json()
    event["graph_server"] |= change
    with pytest.raises(ConfigError, match="graph_server"):
        Task.from_event(event)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b"{}" + b" " * MAX_EVENT_BYTES, "more than 262144"),
        (b"[" * 200_000, "not valid JSON"),
        (b"\x80", "not valid JSON"),
        (b'{"a": Infinity}', "not a JSON number"),
        (b"null", "NoneType"),
        ({1: 2}, "named fields"),
        ({"handler": "os.system"}, "lacks"),
    ],
)
def test_what_is_no_event_is_refused(event: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Task.from_event(event)


def test_an_event_says_nothing_of_what_to_run() -> None:
    with pytest.raises(ConfigError, match="unknown field 'stage'"):
        Task.from_event({**as_json(), "stage": "os:system"})


def test_a_task_that_could_not_be_read_is_not_written() -> None:
    for bad in (task(rows=-1), task(program="x"), task(attempt=10**6), task(timeout_s=float("nan"))):
        with pytest.raises(ConfigError):
            bad.to_event()
