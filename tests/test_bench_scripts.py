"""The bench beside stock DGL still runs: both systems, on a tiny graph, on emulated machines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"


def test_both_systems_train_the_same_model_on_the_same_partition(tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCH))
    try:
        from peer.machines import what_is_missing
    finally:
        sys.path.remove(str(BENCH))
    missing = what_is_missing()
    if missing:
        pytest.skip(missing)
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / "distdgl.py"), "--quick", "--launches", "1", "--epochs", "1"),
            *("--json", str(figures), "--timeout", "200"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stock, ours = json.loads(figures.read_text())["systems"]
    assert (stock["system"], ours["system"]) == ("stock", "ours")
    # Different draws of the same neighbourhoods from the same weights.
    assert ours["input_rows"] == pytest.approx(stock["input_rows"], rel=0.1)
    assert ours["loss"] == pytest.approx(stock["loss"], rel=0.1)
    # What we count went over the wire, and headers and acknowledgements are all that we do not count.
    counted = sum(ours["ledger_mb"].values())
    assert counted < ours["wire_mb"] < 1.3 * counted
