from collections.abc import Iterator
from pathlib import Path

import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from tests.dataloading.rings import write_rings
from tests.dataloading.shop import write_shop


@pytest.fixture(scope="session")
def rings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("rings")
    return {num_parts: write_rings(folder / str(num_parts), num_parts) for num_parts in (1, 2, 4)}


@pytest.fixture
def graph(rings: dict[int, Path]) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(rings[1])


@pytest.fixture(scope="session")
def shop_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop") / "1", 1)


@pytest.fixture
def shop_graph(shop_folder: Path) -> Iterator[DistGraph]:
    with start_session():
        yield DistGraph(shop_folder)
