"""Plain DGL scripts run here with the lines that docs/migrating.md shows, and with no others."""

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dglx_dist.comm import session
from tests.compat.graphs import SCRIPTS
from tests.compat.test_scripts import DDP, WRAP
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "migrating.md"
ADDED = {"graphsage": 6, "gat": 5, "rgcn": 8, "link_prediction": 8}
"""Script -> lines that are new or changed; the page names these numbers."""
LEAST = {"link_prediction": 0.65}
"""Script -> accuracy below which it learned nothing, if not 0.9: a random pair is of one class as often."""


def patched(name: str, folder: Path) -> None:
    """Put the script into ``folder`` and apply its diff there."""
    shutil.copy(HERE / f"{name}.py", folder)
    subprocess.run(["git", "apply", str(HERE / f"{name}.diff")], cwd=folder, check=True)


def run_scripts(folder: str, names: list[str], arguments: list[str]) -> dict[str, float]:
    """Run scripts one after another as a user would, and return the test accuracy that each prints."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    found = {}
    for name in names:
        shown = io.StringIO()
        torch.manual_seed(0)
        with contextlib.redirect_stdout(shown):
            sys.argv = [f"{name}.py", *arguments]
            runpy.run_path(f"{name}.py", run_name="__main__")
        while session._CURRENT:
            session.current_session().close()
        (found[name],) = (float(text) for text in re.findall(r"test accuracy (\d\.\d+)", shown.getvalue()))
    return found


@pytest.mark.wide
def test_plain_scripts_run_in_plain_dgl(tmp_path: Path) -> None:
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    (found,) = run_ranks(run_scripts, 1, args=(str(tmp_path), list(ADDED), ["--epochs", "1"]))
    assert found.keys() == ADDED.keys()


@pytest.mark.parametrize("ranks", [2, *wide(1)])
def test_changed_scripts_learn_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    shutil.copy(HERE / "graphs.py", tmp_path)
    for name in ADDED:
        patched(name, tmp_path)
    # A server for each rank, so that two ranks share no part.
    found = run_ranks(run_scripts, ranks, args=(str(tmp_path), list(ADDED), []), ranks_per_server=1)
    assert all(one == found[0] for one in found), "every rank prints the accuracy over all of them"
    assert found[0].keys() == ADDED.keys()
    assert all(accuracy > LEAST.get(name, 0.9) for name, accuracy in found[0].items())
    # One cut of each graph; gat's is that of graphsage.
    assert len(list((tmp_path / "data").iterdir())) == 3


def blocks_of_the_page() -> list[list[str]]:
    """The lines of each diff that the page shows."""
    blocks = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return [[line for line in block.splitlines() if line] for block in blocks]


@pytest.mark.parametrize("name", ADDED)
def test_the_page_shows_the_diff_and_counts_its_lines(name: str) -> None:
    lines = (HERE / f"{name}.diff").read_text().splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len(added) == ADDED[name]
    changed = [line for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    assert changed in blocks_of_the_page()
    assert f"`{name}.py`: {ADDED[name]} lines" in PAGE.read_text()


def test_the_page_shows_what_is_changed_and_corrected_in_a_script_of_distdgl() -> None:
    # tests/compat runs it, as it is and with these lines changed.
    script = (SCRIPTS / "node_classification.py").read_text().splitlines()
    *_, changed, corrected = blocks_of_the_page()
    assert changed == ["+import dglx_dist", f"-    {DDP}", f"+    {WRAP}"]
    assert [line[0] for line in corrected if (line[1:] in script) == (line[0] == "+")] == list("-++-+")
