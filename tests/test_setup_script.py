"""The Python and the versions that scripts/setup.sh takes, with Pythons that only print their arguments."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parent.parent
# Says its version, makes a .venv of itself, and writes down what pip is asked for. Without a version it
# fails, as a shim of pyenv does; a "bare" one has no ensurepip.
PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) version="{version}"; [ -n "$version" ] && echo "${{version% bare}}" ;;
    *ensurepip*) [[ "{version}" != *bare ]] ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/dglx ;;
    *"pip install"*) echo "$@" >>pip.log ;;
esac
"""
TOOLS = ("bash", "cat", "cp", "cut", "dirname", "grep", "mkdir", "sha256sum", "uname")
ALL = {"python3": "3.9", **{f"python3.{minor}": f"3.{minor}" for minor in range(10, 15)}}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "my copy"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "constraints", folder / "constraints")
    return folder


def setup(copy: Path, found: dict[str, str], python: str | None = None) -> tuple[int, str, str]:
    """Run setup.sh where the Pythons of ``found`` are: return its exit code, output, and pip's arguments."""
    tools = copy.parent / "tools"
    shutil.rmtree(tools, ignore_errors=True)
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, version in found.items():
        (tools / name).write_text(PYTHON.format(version=version))
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools)} | ({} if python is None else {"PYTHON": python})
    done = subprocess.run(
        [copy / "scripts" / "setup.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    log = copy / "pip.log"
    return done.returncode, done.stdout + done.stderr, log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    ("found", "python", "version"),
    [
        (ALL, None, "3.11"),
        (ALL, "python3.12", "3.12"),
        ({"python3.10": "3.10", "python3.12": "3.12"}, None, "3.12"),
        ({"python3.10": "3.10", "python3": "3.14"}, None, "3.10"),
        ({"python3.14": "3.14", "python3": "3.13"}, None, "3.13"),
        ({"python3": "3.12"}, None, "3.12"),
        ({"python3.11": "3.11 bare", "python3.12": "", "python3.10": "3.10"}, None, "3.10"),
    ],
)
def test_versions_suit_python(copy: Path, found: dict[str, str], python: str | None, version: str) -> None:
    code, message, line = setup(copy, found, python)
    assert code == 0, message
    (torch,) = re.findall(r"^torch==.*", (ROOT / "constraints" / f"{version}.txt").read_text(), re.MULTILINE)
    assert line.splitlines() == [
        f"-m pip install -qq --constraint constraints/{version}.txt {torch}+cpu",
        f"-m pip install -qq --constraint constraints/{version}.txt setuptools>=77 wheel -e .[dev]",
    ]
    assert setup(copy, found, python) == (0, "", line), "nothing has changed since"


@pytest.mark.parametrize(
    ("found", "python", "message"),
    [
        ({}, None, "no Python 3.10, 3.11, 3.12 or 3.13 found. DGL"),
        ({"python3": "3.14"}, None, "found, only 3.14. DGL"),
        ({"python3.11": "3.11 bare"}, None, "python3.11 cannot make virtual environments; install"),
        (ALL, "python3.14", "found at PYTHON=python3.14, only 3.14. DGL"),
        (ALL, "/no/such/python", "found at PYTHON=/no/such/python. DGL"),
    ],
)
def test_refuses_other_pythons(copy: Path, found: dict[str, str], python: str | None, message: str) -> None:
    code, output, request = setup(copy, found, python)
    assert (code, request) == (1, "")
    assert message in output


def test_an_environment_of_another_python_is_not_changed(copy: Path) -> None:
    setup(copy, ALL)
    code, message, _ = setup(copy, ALL, "python3.12")
    assert (code, message) == (
        1,
        "setup.sh: .venv has Python 3.11, not that of PYTHON=python3.12; remove the folder .venv first\n",
    )


def pins(version: str) -> dict[str, str]:
    text = (ROOT / "constraints" / f"{version}.txt").read_text()
    return {name.lower(): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


def test_declared_versions_are_those_of_the_environments() -> None:
    project = read_configuration(ROOT / "pyproject.toml")["project"]
    pythons = [path.stem for path in (ROOT / "constraints").iterdir()]
    classifiers = [line for line in project["classifiers"] if re.search(r"Python :: \d", line)]
    assert sorted(line.rpartition(" ")[2] for line in classifiers) == sorted(pythons)
    assert set(str(project["requires-python"]).split(",")) == {">=3.10", "<3.14"}
    oldest = pins("3.10")
    for needed in project["dependencies"]:
        requirement, _, marker = needed.partition("; python_version ")
        name, _, least = requirement.partition(">=")
        # DGL is installed on all versions, and pip does it on those with a wheel.
        only_new = marker.startswith(">=")
        assert all(name in pins(python) for python in pythons if python == "3.13" or not only_new), name
        # The oldest environment has exactly the oldest versions that are allowed.
        is_oldest = only_new or oldest[name].split(".")[: len(least.split("."))] == least.split(".")
        assert is_oldest or not least, needed
