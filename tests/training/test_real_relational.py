"""Real graphs on two ranks, through the script whose figures are in docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

# A minute or two alone, and several where other work takes the cores.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


def shown_by(out: Path, *arguments: str) -> str:
    script = ROOT / "scripts" / "bench" / "__main__.py"
    given = ("real_relational", *arguments, "--data", str(DATA), "--out", str(out))
    return run_script(script, out, *given, timeout_s=800)


@pytest.mark.real_data
@pytest.mark.skipif(not (DATA / "aifb.npz").exists(), reason="the real graphs are not here")
def test_rgcn_on_aifb(tmp_path: Path) -> None:
    (mean,) = re.findall(r"mean (\d\.\d+)", shown_by(tmp_path, "aifb", "--seeds", "5", "6"))
    assert float(mean) >= 0.9


@pytest.mark.real_data
@pytest.mark.skipif(not (DATA / "coauthor_physics.npz").exists(), reason="the real graphs are not here")
def test_rows_in_place_of_features(tmp_path: Path) -> None:
    shown = shown_by(tmp_path, "physics", "--seeds", "5")
    (largest,), (mean,) = re.findall(r"class (\d\.\d+)", shown), re.findall(r"mean (\d\.\d+)", shown)
    assert float(mean) > float(largest) + 0.15
