"""An error of the package in a script under torchrun is one line on one rank."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dglx_dist.errors import shorten_list
from tests.helpers.scripts import start_script

START = "import os, torch, dgl, dglx_dist as dx\nrank = int(os.environ['RANK'])\n"
GRAPH = "dgl.graph(([0, 1], [1, 0]))"


def run(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(START + text)
    outcomes = start_script(script)
    assert {outcome.exitcode for outcome in outcomes} == {1}
    return "".join(outcome.output for outcome in outcomes)


def run_under_torchrun(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(START + text)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    return done.stderr


# A rank that ends while another one still connects is an error of Gloo there; a collective waits for both.
MEET = "dx.reduce_mean(1.0, 1)"
RANK_1_FAILS = f"dx.init(timeout=20)\n{MEET}\nif rank == 1:\n    dx.wrap(3, None)\ndx.reduce_mean(1.0, 1)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"dx.init(timeout=60)\n{MEET}\ndx.wrap(3, None)",
            "ConfigError: wrap takes a torch.nn.Module, not a int",
        ),
        (
            f"with dx.init(timeout=60):\n    {MEET}\n    dx.wrap(3, None)",
            "ConfigError: wrap takes a torch.nn.Module",
        ),
        (RANK_1_FAILS, "rank1.*ConfigError: wrap takes"),
        (f"dx.distribute({GRAPH}, method='metos')", "no partitioner 'metos'"),
    ],
)
def test_an_error_is_one_line_on_one_rank(tmp_path: Path, text: str, message: str) -> None:
    shown = run(tmp_path, text)
    assert re.search(message, line_of(tmp_path, shown))
    assert "Traceback" not in shown


def line_of(folder: Path, shown: str) -> str:
    (line,) = (line for line in shown.splitlines() if f"{folder / 'script.py'}:" in line)
    return line


@pytest.mark.wide
def test_torchrun_adds_its_own_traceback_only(tmp_path: Path) -> None:
    shown = run_under_torchrun(tmp_path, RANK_1_FAILS)
    assert re.search("rank1.*ConfigError: wrap takes", line_of(tmp_path, shown))
    assert shown.count("Traceback") == 1


def test_an_error_before_the_ranks_have_met_is_one_line_for_each(tmp_path: Path) -> None:
    shown = run(tmp_path, "dx.init('data_paralel')")
    lines = [line for line in shown.splitlines() if "UnknownNameError: " in line]
    assert "Traceback" not in shown
    assert 1 <= len(lines) <= 2
    assert "did you mean 'data_parallel'" in lines[0]


def test_errors_of_the_user_keep_their_traceback(tmp_path: Path) -> None:
    shown = run(tmp_path, f"dx.init(timeout=60)\n{MEET}\n1 / 0")
    assert "ZeroDivisionError" in shown
    assert "1 / 0" in shown
    assert "Traceback" in shown


def test_long_lists_are_cut() -> None:
    assert shorten_list(range(45)) == "0, 1, 2 and 42 more"
    assert shorten_list(["a", "b", "c", "d"]) == "a, b, c, d"
