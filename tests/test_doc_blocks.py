"""Blocks of code in the documentation: commands have the options that they use, Python has the names."""

import ast
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import dglx_dist
from dglx_dist.cli.app import app
from tests.helpers.sources import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield (page, text) of each block in one of the languages."""
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            if language in languages:
                yield str(page.relative_to(ROOT)), text


def is_argument(word: str) -> bool:
    return word not in ("&&", "||", ";", "|")


def list_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each ``dglx`` command in a block, from its name on."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if line.count('"') % 2 == line.count("'") % 2 == 0 else []
        for place, word in enumerate(words):
            if word in ("dglx", "dglx_dist.cli"):
                yield list(itertools.takewhile(is_argument, words[place + 1 :]))
                break


def test_commands_have_the_options_that_pages_use() -> None:
    root = get_command(app)
    checked, wrong = 0, []
    for page, text in blocks("", "bash", "sh"):
        for words in list_commands(text):
            command = root
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            known = {name for parameter in command.params for name in parameter.opts} | {"--debug", "--help"}
            used = [word.split("=")[0] for word in words if word.startswith("--")]
            wrong += [f"{page}: {name} of {command.name}" for name in used if name not in known]
            checked += 1
    assert checked > 40
    assert wrong == []


def test_python_blocks_use_public_names() -> None:
    checked = 0
    for page, text in blocks("python"):
        try:
            tree = ast.parse(text, page)
        except IndentationError:
            continue  # a method or a field that goes into a class of the package
        checked += 1
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dx"
        }
        assert used <= set(dglx_dist.__all__), page
    assert checked > 15


@pytest.mark.timeout(400)
def test_the_first_run_works(tmp_path: Path) -> None:
    """The commands of the page run one after another in an empty folder."""
    page = (ROOT / "docs" / "start" / "first_run.md").read_text()
    commands = [words for _, text in BLOCK.findall(page) for words in list_commands(text)]
    assert [words[0] for words in commands] == ["partition", "inspect", "train", "report", "train", "report"]
    for words in commands:
        command = [sys.executable, "-m", "dglx_dist.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    for name in re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE):
        assert (tmp_path / "runs" / "demo" / name).is_file(), name


def test_the_samplers_of_the_page_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "samplers.md").read_text()
    python_blocks = (text for language, text in BLOCK.findall(page) if language == "python")
    prefetching, shadow, clusters, own = python_blocks
    program = f"""
import dgl
import torch
import torch.nn.functional as F
import dglx_dist as dx

dx.init()
graph = dgl.rand_graph(200, 2000)
graph.ndata["feat"] = torch.rand(200, 4)
graph.ndata["label"] = torch.randint(3, (200,))
graph.ndata["train_mask"] = torch.ones(200, dtype=torch.bool)
g = dx.distribute(graph)
train_ids = dx.node_split(g.ndata["train_mask"])
{prefetching}
    assert x.shape[1] == 4 and len(y) == len(output_nodes)
model = dx.wrap(dgl.nn.SAGEConv(4, 3, "mean"), g)
{shadow}
    loss.backward()
{clusters}
    loss.backward()
{own}
for input_nodes, output_nodes, blocks in loader:
    assert len(blocks) == 2 and blocks[0].num_src_nodes() == len(input_nodes)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
