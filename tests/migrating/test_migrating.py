"""Plain DGL scripts run here with the lines that docs/guides/migrating.md shows, and with no others."""

import contextlib
import io
import os
import re
import runpy
import shutil
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
PAGE = HERE.parent.parent / "docs" / "guides" / "migrating.md"
ADDED = {"graphsage": 6, "gat": 5, "rgcn": 5, "link_prediction": 6}
"""Script -> lines that are new or changed; the page names these numbers."""
LEAST = {"link_prediction": 0.65}
"""Script -> accuracy below which it learned nothing, if not 0.9: a random pair is of one class as often."""


def change(name: str) -> str:
    """The script with the changes that the page shows below the number of its new lines.

    An import goes above the others. Of more new than removed lines the last go above what is removed next.
    """
    match = re.search(rf"`{name}\.py`: {ADDED[name]} lines.*?```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    assert len(re.findall(r"(?m)^\+", match[1])) == ADDED[name]
    text, waiting = (HERE / f"{name}.py").read_text(), list[str]()
    for shown in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)+)", match[1], re.MULTILINE):
        removed, new = ([line[1:] for line in lines.splitlines(keepends=True)] for lines in shown)
        if not removed:
            place = text.index("\nimport ") + 1
            text = text[:place] + "".join(new) + text[place:]
            continue
        assert text.count("".join(removed)) == 1, removed
        text = text.replace("".join(removed), "".join([*waiting, *new[: len(removed)]]))
        waiting = new[len(removed) :]
    assert not waiting
    return text


def run_scripts(folder: str, names: list[str], arguments: list[str]) -> dict[str, float]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    results = {}
    for name in names:
        shown = io.StringIO()
        torch.manual_seed(0)
        with contextlib.redirect_stdout(shown):
            sys.argv = [f"{name}.py", *arguments]
            runpy.run_path(f"{name}.py", run_name="__main__")
        while session._CURRENT:
            session.current_session().close()
        (results[name],) = (float(text) for text in re.findall(r"test accuracy (\d\.\d+)", shown.getvalue()))
    return results


@pytest.mark.wide
def test_plain_scripts_run_in_plain_dgl(tmp_path: Path) -> None:
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    (result,) = run_ranks(run_scripts, 1, args=(str(tmp_path), list(ADDED), ["--epochs", "1"]))
    assert result.keys() == ADDED.keys()


@pytest.mark.parametrize("ranks", [2, *wide(1)])
def test_changed_scripts_learn_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    shutil.copy(HERE / "graphs.py", tmp_path)
    for name in ADDED:
        (tmp_path / f"{name}.py").write_text(change(name))
    # A server for each rank, so that two ranks share no part.
    results = run_ranks(run_scripts, ranks, args=(str(tmp_path), list(ADDED), []), ranks_per_server=1)
    assert all(result == results[0] for result in results), "every rank prints the accuracy over all of them"
    assert results[0].keys() == ADDED.keys()
    assert all(accuracy > LEAST.get(name, 0.9) for name, accuracy in results[0].items())
    # One cut of each graph; gat's is that of graphsage.
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_the_page_shows_what_is_changed_and_corrected_in_a_script_of_distdgl() -> None:
    # tests/compat runs it, as it is and with these lines changed.
    script = (SCRIPTS / "node_classification.py").read_text().splitlines()
    page = PAGE.with_name("migrating_distdgl.md").read_text()
    blocks = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    change, corrected = ([line for line in block.splitlines() if line] for block in blocks[-2:])
    assert change == ["+import dglx_dist", f"-    {DDP}", f"+    {WRAP}"]
    assert [line[0] for line in corrected if (line[1:] in script) == (line[0] == "+")] == list("-++-+")
