"""Opening a session by name, and what is refused before ranks would wait for each other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
from dgl.dataloading import NeighborSampler, as_edge_prediction_sampler
from dgl.nn import SAGEConv
from torch import nn

import dglx_dist as dx
from dglx_dist.comm.session import current_session
from dglx_dist.compat.dist_graph import DistGraph as ScriptGraph
from dglx_dist.compat.namespace import ScriptModel
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import Parts, WrappedModel
from tests.dataloading import bonds
from tests.strategies import equality


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


class Wrapped(WrappedModel):
    parts = Parts(replicated=(), local=())

    def exchange_seconds(self, *, reset: bool = False) -> float:
        return 0.0


ALONE: Any = dgl.graph(([0, 1], [1, 2]))


class Predicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.predictor = SAGEConv(equality.WIDTH, 3, "mean"), nn.Linear(3, 1)
        self.widths = [equality.WIDTH, 3]

    def forward(self, blocks: Any, x: Any) -> Any:
        return self.conv(blocks[0], x)


def test_an_error_of_one_rank_reads_nothing_from_the_others() -> None:
    class Fails(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            raise ValueError("of one rank")

        def whole(self) -> Any:
            raise AssertionError("collective")

    with pytest.raises(ValueError, match="of one rank"):
        ScriptModel(Fails())(torch.ones(1))
    with pytest.raises(ConfigError, match=r"on cpu.* inputs are on meta"):
        ScriptModel(Fails())(torch.ones(1, device="meta"))


@pytest.mark.parametrize("strategy", ["data_parallel", "full_graph", "push_pull"])
def test_attributes_of_the_module_are_read_through_its_wrapper(dataset: str, strategy: str) -> None:
    with dx.init(strategy):
        g = ScriptGraph.over(dx.DistGraph(dataset))
        module = Predicts().double()
        names = [name for name, _ in module.named_parameters()]
        model = dx.wrap(module, g)
        assert isinstance(model, ScriptModel) == (strategy == "push_pull")
        assert model.widths is module.widths
        with torch.no_grad():
            assert model.predictor is module.predictor
        # Its gradients would stay on this rank.
        with pytest.raises(AttributeError, match=r"belongs to the wrapped .*model\.module\.predictor"):
            model.predictor  # noqa: B018 - reading it raises
        with pytest.raises(AttributeError, match="'Predicts' object has no attribute 'nothing'"):
            model.nothing  # noqa: B018
        with pytest.raises(AttributeError, match=r"set model\.module\.widths"):
            model.widths = []
        model.mine = 3
        assert (model.mine, model.train(False).training, module.training) == (3, False, False)
        assert sorted(model.state_dict()) == sorted(names)
        if strategy == "data_parallel":
            # As torch's own __getattr__ does, for an object that is not made yet.
            with pytest.raises(AttributeError):
                type(model).__new__(type(model)).widths  # noqa: B018


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dx.DataLoader(ALONE, [0], NeighborSampler([2])), r"dx\.distribute"),
        (lambda: dx.DistEdgeDataLoader(ALONE, [0], NeighborSampler([2])), r"dx\.distribute"),
        (lambda: dx.wrap(torch.nn.Linear(2, 2), ALONE), r"dx\.distribute"),
        (lambda: dx.wrap(torch.relu, ALONE), "Module"),  # type: ignore[arg-type]  # what is wrong
        (lambda: dx.wrap(Wrapped(), ALONE), "wrapped already"),
    ],
)
def test_what_no_rank_can_use_is_refused(session: None, call: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_both_names_lead_to_batches_of_edges(session: None, tmp_path: Path) -> None:
    g = dx.DistGraph(bonds.write(bonds.ring(), tmp_path / "ring", 1))
    node_sampler = NeighborSampler([2])
    wrapped = as_edge_prediction_sampler(node_sampler, exclude="self")
    ids = dx.edge_split(torch.arange(100, 110), g.get_partition_book())
    direct = dx.DistEdgeDataLoader(g, ids, node_sampler, exclude="self", batch_size=4)
    for left, right in zip(dx.DataLoader(g, ids, wrapped, batch_size=4), direct, strict=True):
        assert torch.equal(left[1].edata[dgl.EID], right[1].edata[dgl.EID])
        assert torch.equal(left[2][0].edata[dgl.EID], right[2][0].edata[dgl.EID])
    nodes, _, blocks = next(iter(dx.DataLoader(g, [1, 2], node_sampler)))
    assert len(nodes) == blocks[0].num_src_nodes()
