"""Opening a session by name, and what is refused before ranks would wait for each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler

import dglx_dist as dx
from dglx_dist.comm.session import current_session
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import Parts, WrappedModel
from tests.dataloading import bonds


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


def test_a_wrapped_model_is_not_wrapped_again(session: None) -> None:
    class Wrapped(WrappedModel):
        parts = Parts(replicated=(), local=())

        def exchange_seconds(self, *, reset: bool = False) -> float:
            return 0.0

    graph: Any = None
    with pytest.raises(ConfigError, match="wrapped already"):
        dx.wrap(Wrapped(), graph)


def test_both_names_lead_to_batches_of_edges(session: None, tmp_path: Path) -> None:
    g = dx.DistGraph(bonds.write(bonds.ring(), tmp_path / "ring", 1))
    node_sampler = NeighborSampler([2])
    wrapped = as_edge_prediction_sampler(node_sampler, exclude="self")
    ids = dx.edge_split(torch.arange(100, 110), g.get_partition_book())
    direct = dx.DistEdgeDataLoader(g, ids, node_sampler, exclude="self", batch_size=4)
    for one, other in zip(dx.DataLoader(g, ids, wrapped, batch_size=4), direct, strict=True):
        assert torch.equal(one[1].edata[dgl.EID], other[1].edata[dgl.EID])
        assert torch.equal(one[2][0].edata[dgl.EID], other[2][0].edata[dgl.EID])
    nodes, _, blocks = next(iter(dx.DataLoader(g, [1, 2], node_sampler)))
    assert len(nodes) == blocks[0].num_src_nodes()
    with pytest.raises(ConfigError, match=r"dx\.distribute"):
        dx.DistEdgeDataLoader(dgl.graph(([0], [1])), [0], node_sampler)
