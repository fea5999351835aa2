"""What is removed by the notes of labs, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError, LabError
from scripts.netlab import hold, state
from scripts.netlab.servers import find_process
from tests.netlab.notes import NOBODY, noted


def test_a_lab_lives_with_its_owner(own_notes: Path) -> None:
    mine, dead = noted("mine", complete=True), noted("dead", owner=NOBODY, complete=True)
    assert mine.alive
    assert not dead.alive
    assert not replace(mine, boot="another").alive
    for one in (mine, dead):
        state.reserve(one)
    assert state.clean_stale() == ["dead"]
    assert [one.name for one in state.list_labs()] == ["mine"]


def test_a_lab_that_stays_up_lives_with_its_servers(own_notes: Path) -> None:
    """Its owner has ended; the process that holds it is a child of this test."""
    waits = [sys.executable, "-c", "input()", hold.__file__]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as child:
        holder = find_process(child.pid)
        up = noted("up", owner=NOBODY, held="detached", complete=True, switch=(holder,))
        half_made = replace(up, name="half-made", complete=False, switch=())
        assert up.alive
        assert state.describe_life(up) == "up"
        assert not half_made.alive
        for one in (up, half_made):
            state.reserve(one)
        assert state.clean_stale() == ["half-made"]
        assert child.poll() is None
        state.take_down("up")
        assert child.wait(timeout=30) != 0
    assert state.lab_names() == []


def test_a_process_that_got_the_number_of_a_holder_is_left_alone(own_notes: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        earlier = replace(find_process(child.pid), started=1)
        state.reserve(noted("a", owner=NOBODY, switch=(earlier,)))
        state.take_down("a")
        assert state.lab_names() == []
        assert child.poll() is None
        child.communicate(b"\n", timeout=30)


def test_a_process_that_notes_name_without_its_being_a_holder_is_left_alone(own_notes: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state.reserve(noted("a", owner=NOBODY, switch=(find_process(child.pid),)))
        assert state.clean_stale() == []
        state.take_down("a")
        assert state.lab_names() == []
        assert child.poll() is None
        child.communicate(b"\n", timeout=30)


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}'])
def test_damaged_notes_stay_until_they_are_taken_down(text: str, own_notes: Path) -> None:
    own_notes.mkdir()
    (own_notes / "a.json").write_text(text)
    (own_notes / "b.json").write_text(text)
    assert state.clean_stale() == []
    state.take_down("a")
    assert state.lab_names() == ["b"]
    assert state.take_down_all() == ["b"]
    assert state.lab_names() == []


def test_there_is_nothing_to_take_down(own_notes: Path) -> None:
    assert state.take_down_all() == []
    assert state.clean_stale() == []
    with pytest.raises(ConfigError, match="no lab called 'a'"):
        state.take_down("a")


def test_a_lab_of_root_is_left_to_root(own_notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.reserve(noted("a", owner=NOBODY))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LabError, match="sudo python scripts/netlab down a"):
        state.take_down_all()
    assert state.lab_names() == ["a"]
