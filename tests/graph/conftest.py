"""A small graph on disk, partitioned unevenly, that every test of this room can draw."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dglx_dist.comm.session import Session, start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.graph.dist_graph import DistGraph
from tests.graph.small import build, write


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small graph in 3 parts, of which the middle one is empty."""
    folder = tmp_path_factory.mktemp("small") / "dataset"
    write(build(), folder)
    return folder


@pytest.fixture
def alone() -> Iterator[Session]:
    with start_session(topology=Topology(0, 1, (0,)), seed=1) as session:
        yield session


@pytest.fixture
def graph(alone: Session, small_dataset: Path) -> DistGraph:
    return DistGraph(small_dataset)
