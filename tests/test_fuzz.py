"""A part of the fuzz campaign: no reader crashes, hangs, or reads other values without a word."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wide

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)  # it is mostly starting processes, which takes long on a busy machine
@pytest.mark.parametrize("cases", [25, *wide(300)])
def test_damage_ends_in_an_error_of_ours_or_in_equal_values(cases: int) -> None:
    # Without those that draw pictures or start processes, which take longer; development/testing.md has all.
    quick = [
        f"--only={name}"
        for name in ("dataset", "cache", "rows", "checkpoint", "csv", "parquet", "npz", "wire")
    ]
    command = [
        sys.executable,
        str(ROOT / "scripts" / "fuzz.py"),
        "--cases",
        str(cases),
        "--seed",
        "7",
        *quick,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"| all | {cases} |" in process.stdout
