"""The same program gives the same answers with DGL's ``dgl.distributed`` and with ours."""

from pathlib import Path
from typing import Any

import pytest

from tests.compat.graphs import play, read_report
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="module")
def answers(stock: Path, probe_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    ours = tmp_path_factory.mktemp("answers") / "ours.json"
    run_ranks(play, 1, args=[[["--", *probe_words, "--out", str(ours)]], True])
    return read_report(stock / "probe.json"), read_report(ours)


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
