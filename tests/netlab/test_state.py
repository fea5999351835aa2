"""Notes of labs: names, files, damage, and what is removed by them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.netlab import hold, state
from scripts.netlab.base import LabError, LabSpec
from scripts.netlab.servers import NamespaceServer, find_process
from tests.netlab.helpers import NOBODY, make_state

SERVER = NamespaceServer(
    number=0,
    address="10.77.0.1",
    init=NOBODY,
    outer=NOBODY,
    cores=(0, 1),
    cpu_share=0.5,
    cpu_held_by="affinity and quota",
    cgroup="/sys/fs/cgroup/cpu/dglx-lab-a-0",
)


def test_is_read_as_it_was_written(own_notes: Path) -> None:
    spec = LabSpec(servers=2, external=Rate.parse("1gbit"), cpus=0.5)
    single = make_state(
        "a", spec=spec, complete=True, switch=(NOBODY,), servers=(SERVER, replace(SERVER, number=1))
    )
    state.write_notes(single, new=True)
    assert state.read_notes("a") == single
    lifted = replace(single, spec=LabSpec(servers=2, internal=Rate.parse("40gbit")), held="detached")
    state.write_notes(lifted)
    assert state.read_notes("a") == lifted
    assert [path.name for path in own_notes.iterdir()] == ["a.json"]


def test_a_name_is_given_once(own_notes: Path) -> None:
    state.write_notes(make_state("a"), new=True)
    with pytest.raises(ConfigError, match=r"'a' exists.*python scripts/netlab down a"):
        state.write_notes(make_state("a"), new=True)
    assert [path.name for path in own_notes.iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", ["", "-a", "a b", "../a", "a/b", "a.b", "x" * 41, "ä"])
def test_refuses_names_that_are_no_file_names(name: str, own_notes: Path) -> None:
    for ask in (state.check_name, state.read_notes, state.take_down):
        with pytest.raises(ConfigError, match="letters, digits and dashes"):
            ask(name)


def test_an_unknown_lab_is_told_with_those_there_are(own_notes: Path) -> None:
    with pytest.raises(ConfigError, match="up are: none"):
        state.read_notes("b")
    state.write_notes(make_state("a"), new=True)
    with pytest.raises(ConfigError, match="no lab called 'b'; up are: a"):
        state.read_notes("b")


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 99},
        {"owner": {"pid": "x", "started": 1}},
        {"owner": {"pid": -1, "started": 1}},
        {"owner": None},
        {"servers": [{"number": 0}]},
        {"servers": 3},
        {"held": "nobody"},
        {"complete": "yes"},
        *(
            {"spec": {"servers": count, "external": None, "internal": None, "cpus": None}}
            for count in (0, 10**12, float("inf"))
        ),
        *("", "{", "[]", "null", "\x00\x01", "[" * 100_000, "\udcff"),
    ],
    ids=lambda damage: repr(damage)[-20:],
)
def test_damaged_notes_are_named_until_they_are_taken_down(damage: Any, own_notes: Path) -> None:
    for name in ("a", "b"):
        state.write_notes(make_state(name), new=True)
        path = own_notes / f"{name}.json"
        text = json.dumps(json.loads(path.read_text()) | damage) if isinstance(damage, dict) else damage
        path.write_text(text, errors="surrogateescape")
    for ask in (lambda: state.read_notes("a"), state.list_labs):
        with pytest.raises(LabError, match=rf"{own_notes}/a.json is damaged.*down --all"):
            ask()
    assert state.clean_stale() == []
    state.take_down("a")
    assert state.lab_names() == ["b"]
    assert state.take_down_all() == ["b"]
    assert state.lab_names() == []


@pytest.mark.parametrize("where", ["switch", "init", "outer"])
def test_notes_that_name_another_process_as_theirs_are_damaged(where: str, own_notes: Path) -> None:
    """Whatever a file says: what is no holder is neither entered nor killed."""
    innocent = find_process(os.getpid())
    if where == "switch":
        state.write_notes(make_state("a", switch=(innocent,)), new=True)
    else:
        state.write_notes(make_state("a", servers=(replace(SERVER, **{where: innocent}),)), new=True)
    with pytest.raises(LabError, match=f"process {innocent.pid} holds no lab"):
        state.read_notes("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_refuses_a_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(state, "_FOLDER", "dglx-lab-of-a-test")
    monkeypatch.setattr(state.tempfile, "gettempdir", lambda: str(tmp_path))
    place = tmp_path / "dglx-lab-of-a-test"
    assert state.notes_folder() == place
    place.mkdir()
    assert state.notes_folder() == place
    place.chmod(0o777)
    with pytest.raises(LabError, match="only root can write to; remove it"):
        state.notes_folder()
    place.rmdir()
    place.symlink_to("/etc")
    with pytest.raises(LabError, match="only root can write to; remove it"):
        state.notes_folder()


def test_a_lab_lives_with_its_owner(own_notes: Path) -> None:
    own, dead = make_state("mine", complete=True), make_state("dead", owner=NOBODY, complete=True)
    assert own.alive
    assert not dead.alive
    assert not replace(own, boot="another").alive
    for case in (own, dead):
        state.write_notes(case, new=True)
    assert state.clean_stale() == ["dead"]
    assert [lab.name for lab in state.list_labs()] == ["mine"]


def test_a_lab_that_stays_up_lives_with_its_servers(own_notes: Path) -> None:
    """Its owner has ended; the process that holds it is a child of this test."""
    waits = [sys.executable, "-c", "input()", hold.__file__]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as child:
        holder = find_process(child.pid)
        up = make_state("up", owner=NOBODY, held="detached", complete=True, switch=(holder,))
        half_made = replace(up, name="half-made", complete=False, switch=())
        assert up.alive
        assert state.describe_life(up) == "up"
        assert not half_made.alive
        for case in (up, half_made):
            state.write_notes(case, new=True)
        assert state.clean_stale() == ["half-made"]
        assert child.poll() is None
        state.take_down("up")
        assert child.wait(timeout=30) != 0
    assert state.lab_names() == []


@pytest.mark.parametrize("got_the_number", [True, False])
def test_a_process_that_is_no_holder_is_left_alone(
    own_notes: Path, child: subprocess.Popen[bytes], got_the_number: bool
) -> None:
    """It got the number of one that has ended, or the notes are wrong."""
    named = find_process(child.pid)
    named = replace(named, started=1) if got_the_number else named
    state.write_notes(make_state("a", owner=NOBODY, switch=(named,)), new=True)
    assert got_the_number or state.clean_stale() == []
    state.take_down("a")
    assert state.lab_names() == []
    assert child.poll() is None
    child.communicate(b"\n", timeout=30)
