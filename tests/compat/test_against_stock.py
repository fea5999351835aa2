"""The same program gives the same answers with DGL's ``dgl.distributed`` and with ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compat.graphs import run_script, told


@pytest.fixture(scope="module")
def answers(stock_parts: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What stock DGL says, and what we say."""
    folder = tmp_path_factory.mktemp("answers")
    config = [word for name, path in stock_parts.items() for word in (f"--{name}", str(path))]
    run_script("probe.py", [*config, "--out", str(folder / "stock.json")], ours=False)
    run_script("probe.py", [*config, "--out", str(folder / "ours.json")], ours=True)
    return told(folder / "stock.json"), told(folder / "ours.json")


@pytest.mark.parametrize(
    "subject",
    [
        *("about_graph", "about_edges", "about_sampling", "about_tensors", "about_splits", "about_loaders"),
        *("about_embeddings", "about_store", "about_types", "about_files", "about_typed_files"),
    ],
)
def test_answers_are_alike(answers: tuple[Any, Any], subject: str) -> None:
    stock, ours = answers
    assert ours[subject].keys() == stock[subject].keys()
    for question, answer in stock[subject].items():
        assert ours[subject][question] == answer, question
