"""Full-graph strategies on a graph of several types leave the weights and rows of one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph import typed_cases as cases
from tests.strategies.test_equality import TOLERANCE

PLACEMENTS = [(1, 1), (3, 1), (4, 2), *wide((2, 2), (2, 1), (3, 3))]
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full_graph", {}),
    ("full_graph", {"aggregate": "cover", "use_pp": False}),
    ("shared_preload", {}),
    ("shared_preload", {"hops": 1, "aggregate": "cover"}),
    ("shared_preload", {"hops": 1, "use_pp": False}),
    ("cooperative", {}),
)
KINDS = ("rgcn", "hgt", "sage")
"""Models that are trained with all options. The others are trained by full_graph."""


def list_runs() -> list[tuple[str, dict[str, Any], str]]:
    runs = [(name, options, kind) for name, options in OPTIONS for kind in KINDS]
    return runs + [("full_graph", {}, kind) for kind in cases.MODELS if kind not in KINDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_parts(tmp_path_factory.mktemp("typed"))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {kind: cases.one_process(kind) for kind in cases.MODELS}


@pytest.mark.parametrize(("ranks", "ranks_per_server"), PLACEMENTS)
def test_weights_and_rows_match_one_process(
    folder: Path, plain: dict[str, Any], ranks: int, ranks_per_server: int
) -> None:
    runs = list_runs()
    for results in run_ranks(
        cases.on_rank, ranks, args=(str(folder), runs), ranks_per_server=ranks_per_server
    ):
        for run, result in zip(runs, results, strict=True):
            wrong = {k: v for k, v in cases.difference(result, plain[run[2]]).items() if not v <= TOLERANCE}
            assert not wrong, run
