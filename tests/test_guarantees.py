"""The page of guarantees names tests that are there, and runs that are killed and preempted lose nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_named_test_is_there() -> None:
    page = (ROOT / "docs" / "reference" / "guarantees.md").read_text()
    tables = [part for part in page.split("\n\n") if part.startswith("| guaranteed | against | tested by |")]
    rows = [line for part in tables for line in part.splitlines()[2:]]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`(tests|scripts)/\S+`", row.rpartition(" | ")[2])] == []
    named = re.findall(r"`((?:tests|scripts)/[^`\s]+)`", page)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def chaos(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("DGLX_")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.wide
@pytest.mark.timeout(1200)
def test_a_worker_a_rank_and_a_preemption_cost_no_bit() -> None:
    rows = chaos("--kills", "2", "--preemptions", "1", "--only", "lambda", "--epochs", "40", "--seed", "29")
    # Fewer where the run was complete before its turn.
    assert re.search(r"\| all \| \| ([123]) \| \1 \| \1 \|", rows), rows


@pytest.mark.wide
@pytest.mark.timeout(3000)
def test_a_dozen_under_all_strategies() -> None:
    assert re.search(r"\| all \| \| (1\d) \| \1 \| \1 \|", chaos("--kills", "10", "--preemptions", "2"))
