"""Which kind of lab is opened, and what is refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglx_dist.errors import ConfigError, LabError
from scripts.netlab import labs, state
from scripts.netlab.base import LabSpec, usable_cores

ONE = LabSpec(servers=1)


@pytest.fixture
def poor_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without tc."""
    monkeypatch.setattr(labs, "what_is_missing", lambda: "tc: not installed, apt-get install iproute2")


def test_plain_loopback_says_what_is_missing(poor_machine: None, own_notes: Path) -> None:
    with labs.open_lab(ONE) as lab:
        assert lab.kind == "loopback"
        assert lab.missing == "tc: not installed, apt-get install iproute2"
        assert lab.describe()["missing"] == lab.missing
    assert not own_notes.exists()


def test_plain_loopback_on_request_lacks_nothing() -> None:
    with labs.open_lab(ONE, force_loopback=True) as lab:
        assert (lab.kind, lab.missing) == ("loopback", None)


def test_no_lab_stays_up_on_plain_loopback(poor_machine: None, own_notes: Path) -> None:
    with pytest.raises(LabError, match=r"apt-get install iproute2"):
        labs.open_detached(ONE, "a")
    assert not own_notes.exists()


@pytest.mark.parametrize(
    ("servers", "cpus", "name", "message"),
    [
        (251, None, "a", "251 servers: a lab has at most 250"),
        (1, len(usable_cores()) + 1.0, "a", "give each at most"),
        (1, None, "no/name", "letters, digits and dashes"),
    ],
)
def test_refuses_before_anything_is_made(
    servers: int,
    cpus: float | None,
    name: str,
    message: str,
    own_notes: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(labs, "Holder", lambda *_, **__: pytest.fail("namespaces were made"))
    monkeypatch.setattr(labs, "what_is_missing", lambda: None)
    for make in (lambda spec: labs.open_lab(spec, name=name), lambda spec: labs.open_detached(spec, name)):
        with pytest.raises(ConfigError, match=message):
            make(LabSpec(servers=servers, cpus=cpus))
    assert state.lab_names() == []


def test_attaches_to_no_lab_that_is_down_or_unfinished(
    own_notes: Path, monkeypatch: pytest.MonkeyPatch, needs_lab: None
) -> None:
    """While it is being made, a lab can be seen by others, and not used."""
    seen: list[str] = []

    def look(noted: state.LabState) -> None:
        with pytest.raises(ConfigError, match="not up any more, or not yet") as refused:
            labs.attach(noted.name)
        seen.append(str(refused.value))

    monkeypatch.setattr(labs, "_apply_rates", look)
    with labs.open_lab(ONE, name="a"):
        assert len(seen) == 1
    with pytest.raises(ConfigError, match="no lab called 'a'"):
        labs.attach("a")
