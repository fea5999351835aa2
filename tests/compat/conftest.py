"""Partitions that stock DGL made."""

from collections.abc import Mapping
from pathlib import Path

import dgl.distributed
import pytest

from tests.compat.graphs import paper_graph, typed_graph


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
