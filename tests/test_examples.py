"""Each example runs, and says truly how it differs from the one before."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

# Half a minute alone, and several where kernels are compiled anew and other work takes the cores.
pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_ranks(folder: Path, name: str, *arguments: str) -> str:
    return run_script(EXAMPLES / name, folder, *arguments)


def accuracies(shown: str) -> list[float]:
    return [float(value) for value in re.findall(r"test (?:accuracy|MRR) (\d\.\d+)", shown)]


def test_one_process(tmp_path: Path) -> None:
    (accuracy,) = accuracies(run(tmp_path, sys.executable, str(EXAMPLES / "01_one_process.py")))
    assert accuracy > 0.7


def test_data_parallel(tmp_path: Path) -> None:
    """This one starts as users start it. The others get torchrun's variables directly, which is faster."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first, second = accuracies(run(tmp_path, *torchrun, str(EXAMPLES / "02_data_parallel.py")))
    assert first == second > 0.7


def test_partition_once_and_go_on(tmp_path: Path) -> None:
    script = "03_partition_once.py"
    assert "new node 0" in run_script(EXAMPLES / script, tmp_path, "--partition", ranks=1)
    first = on_ranks(tmp_path, script)
    assert "epoch 0:" in first
    assert accuracies(first)[0] > 0.7
    second = on_ranks(tmp_path, script)
    assert "epoch 0:" not in second
    assert "epoch 5:" in second


# Script, ranks that print the figure, its least value, and what else is shown.
RUNS = [
    ("04_pick_a_strategy.py --strategy dp", 1, 0.7, "strategies: "),
    ("05_trainable_embeddings.py", 2, 0.5, ""),
    ("06_link_prediction.py", 2, 0.3, "test MRR"),
    ("07_rgcn.py", 1, 0.8, ""),
    ("08_hgt.py", 1, 0.8, ""),
    ("09_push_pull.py", 2, 0.7, r"(?s)(cut by input columns: first\.fc_neigh\.weight, first\.fc_self.*){2}"),
    ("10_full_graph.py", 2, 0.7, ""),
    ("13_pyg.py", 2, 0.7, ""),
    ("11_lambda.py", 2, 0.7, r"(?ms)epoch 39: loss.*synchronous from epoch \d+$.*cost \$.*simulated"),
]


@pytest.mark.parametrize(("script", "printing", "least", "said"), RUNS)
def test_ranks_agree(tmp_path: Path, script: str, printing: int, least: float, said: str) -> None:
    if "pyg" in script:
        pytest.importorskip("torch_geometric", reason="needs PyTorch Geometric")
    shown = on_ranks(tmp_path, *script.split())
    result = accuracies(shown)
    assert (len(result), len(set(result))) == (printing, 1)
    assert result[0] > least
    assert re.search(said, shown)


def test_hgt_differs_from_rgcn_by_the_model_only() -> None:
    first, second = ((EXAMPLES / name).read_text() for name in ("07_rgcn.py", "08_hgt.py"))
    assert all(
        re.search(r"RGCN|HGT|Unchanged dgl.nn", line) or len(line.strip()) < 30
        for line in diff_lines(first, second)
    )


def code_of(text: str) -> list[str]:
    return [line for line in text.split('"""\n', 2)[-1].splitlines() if line.strip()]


def diff_lines(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(code_of(before), code_of(after))
    return [line.rstrip() for line in lines if line[0] in "+-"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("01_one_process.py", "02_data_parallel.py"),
        ("02_data_parallel.py", "09_push_pull.py"),
        ("02_data_parallel.py", "10_full_graph.py"),
    ],
)
def test_the_lines_that_differ_are_the_documented_ones(before: str, after: str) -> None:
    first, second = EXAMPLES / before, EXAMPLES / after
    documented = [
        line[4:] for line in second.read_text().split('"""')[1].splitlines() if re.match(r" {4}[+-] ", line)
    ]
    assert documented == diff_lines(first.read_text(), second.read_text())


def test_the_readme_shows_the_same_lines() -> None:
    first, second = (EXAMPLES / name for name in ("01_one_process.py", "02_data_parallel.py"))
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    shown = [line for line in block.splitlines() if line]
    actual = [f"{line[0]}{line[2:]}" for line in diff_lines(first.read_text(), second.read_text())]
    assert shown == actual


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_say_what_to_expect(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 120
    if path.name[0].isdigit():
        assert "Expect" in text.split('"""')[1]


def test_halo_has_the_same_error_on_any_number_of_ranks(tmp_path: Path) -> None:
    shown = [run_script(EXAMPLES / "12_halo.py", tmp_path, ranks=ranks) for ranks in (1, 2)]
    pattern = r"mean squared error (\S+) of a variance of (\S+)"
    figures = [tuple(map(float, match)) for text in shown for match in re.findall(pattern, text)]
    assert len(figures) == 2
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)
    assert all(error < variance / 10 for error, variance in figures)
