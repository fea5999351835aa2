"""The outputs and messages of stock DGL, made once for all tests."""

from collections.abc import Mapping
from pathlib import Path

import dgl.distributed
import pytest

from tests.compat.graphs import SCRIPTS, paper_graph, play, typed_graph
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="session")
def stock_parts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Name to the JSON file: graphs of one type and of several, in one part and in two."""
    folder = tmp_path_factory.mktemp("stock")
    made = {}
    for name, graph, parts in (
        ("one", paper_graph(), 1),
        ("two", paper_graph(), 2),
        ("typed", typed_graph(), 1),
        ("typed_two", typed_graph(), 2),
    ):
        dgl.distributed.partition_graph(graph, name, parts, str(folder / name), part_method="metis")
        made[name] = folder / name / f"{name}.json"
    return made


@pytest.fixture(scope="session")
def probe_words(stock_parts: Mapping[str, Path]) -> list[str]:
    parts = [word for name, path in stock_parts.items() for word in (f"--{name}", str(path))]
    return [str(SCRIPTS / "probe.py"), *parts]


@pytest.fixture(scope="session")
def stock(
    stock_parts: Mapping[str, Path], probe_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("said")
    runs = []
    for script, graph in (("node_classification", "one"), ("embeddings", "one"), ("rgcn", "typed")):
        config = ["--graph_name", graph, "--part_config", str(stock_parts[graph])]
        runs.append([str(SCRIPTS / f"{script}.py"), *config, "--out", str(folder / script)])
    # Last: DGL 2's optimizers need the process group that the first script makes.
    runs.append([*probe_words, "--out", str(folder / "probe.json")])
    run_ranks(play, 1, args=[runs, False])
    return folder
