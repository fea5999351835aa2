"""Opening a session by name, and what is refused before ranks would wait for each other."""

from collections.abc import Iterator
from typing import Any

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler

import dglx_dist as dx
from dglx_dist.cluster.session import current_session
from dglx_dist.errors import ConfigError


@pytest.fixture
def session() -> Iterator[None]:
    with dx.init():
        yield


@pytest.mark.parametrize(
    "options", [{"no_such": 3}, {"seed": -1}, {"seed": "a"}, {"seed": 1 << 70}, {"seed": 1.5}]
)
def test_a_refused_init_leaves_no_session_open(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dx.init("data_parallel", **options)
    with pytest.raises(ConfigError, match="no session is open"):
        current_session()
    dx.init("data_parallel").close()


def test_a_graph_of_one_process_is_refused_with_the_remedy(session: None) -> None:
    graph: Any = dgl.graph(([0, 1], [1, 2]))
    with pytest.raises(ConfigError, match="distribute"):
        dx.DataLoader(graph, [0], NeighborSampler([2]))
    with pytest.raises(ConfigError, match="distribute"):
        dx.wrap(torch.nn.Linear(2, 2), graph)


def test_what_is_no_module_is_refused(session: None) -> None:
    with pytest.raises(ConfigError, match="Module"):
        dx.wrap(torch.nn.functional.relu, None)  # type: ignore[arg-type]
