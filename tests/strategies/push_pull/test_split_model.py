"""The whole model from its parts: joined, split, copied, and the norm of its gradients."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.session import Session, Shared, start_session
from dglx_dist.errors import ConfigError
from dglx_dist.layers.dropout import deal_out_concatenated
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, ColumnInfo
from dglx_dist.strategies.push_pull.exchange import make_group
from dglx_dist.strategies.push_pull.feature_columns import ColumnSlice, ColumnStore
from dglx_dist.strategies.push_pull.options import PushPullOptions
from dglx_dist.strategies.push_pull.split_model import ColumnEmbedding
from dglx_dist.strategies.push_pull.strategy import PHASE, PushPullModel
from tests.helpers.ranks import run_ranks
from tests.strategies import equality

WIDTHS, HIDDEN, NODES = (3, 2), 4, 3
WIDTH = sum(WIDTHS)


class Knows(Shared):
    """Stands for a graph, which must not be copied."""

    def degrees(self) -> None: ...


class Net(nn.Module):
    """A norm and a convolution that are cut, a convolution that is not, and things a user keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = dgl.nn.SAGEConv(WIDTH, HIDDEN, "mean", norm=nn.LayerNorm(HIDDEN))
        self.second = dgl.nn.SAGEConv(HIDDEN, 2, "mean")
        self.graph = (Knows().degrees,)
        self.seen: Tensor | None = None

    def forward(self, block: Any, h: Tensor) -> Tensor:
        self.seen = self.first(block, self.norm(h))
        out: Tensor = self.second(block, self.seen)
        return out


def store_of(session: Session, size: int) -> ColumnStore:
    group = make_group(session, size)
    slices = []
    for name, width in zip("ab", WIDTHS, strict=True):
        columns = deal_out_concatenated([width], size)[group.part][0]
        info = ColumnInfo(dtype="float64", row_shape=(len(columns),))
        rows: Any = torch.ones(NODES, len(columns), dtype=torch.float64).numpy()
        fields = {"columns": columns, "info": info, "num_rows": NODES, "folder": None}
        slices.append(ColumnSlice(name=name, rows=rows, **fields))
    return ColumnStore(slices, group, session)


def wrap(net: nn.Module, session: Session, size: int) -> PushPullModel:
    graph = SimpleNamespace(session=session, num_nodes=lambda ntype: NODES, canonical_etypes=[EDGE_TYPE])
    opened: Any = SimpleNamespace(
        g=graph,
        session=session,
        group=make_group(session, size),
        options=PushPullOptions(),
        columns={NODE_TYPE: store_of(session, size)},
        pipelines=[],
        replicas=lambda: None,
    )
    return PushPullModel(net, opened, "mean")


def split(session: Session, size: int) -> tuple[Any, PushPullModel, dict[str, Tensor]]:
    torch.manual_seed(5)
    net = Net().double()
    uncut = {name: value.clone() for name, value in net.state_dict().items()}
    model = wrap(net, session, size)
    net.eval()
    return net, model, uncut


def check_joining(session: Session, size: int) -> None:
    """Check values that are not cut. test_convolutions.py joins and cuts the states of every convolution."""
    net, model, _ = split(session, size)
    steps = torch.tensor(3.0)
    assert model.join_state("first.fc_neigh.weight", steps) is steps
    assert model.cut_state("first.fc_neigh.weight", steps) is steps
    if size > 1:
        with pytest.raises(RuntimeError, match=r"norm\.weight.*uncut shape .*\(5,\)"):
            model.load_state_dict(net.state_dict())


def check_whole(session: Session, size: int) -> None:
    net, model, uncut = split(session, size)
    graph = dgl.create_block(([0, 1, 2, 2], [0, 0, 1, 2]), num_src_nodes=3, num_dst_nodes=3)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = Net().double().eval()
    plain.load_state_dict(uncut)
    # The stages of the first layer, as if there were no other part.
    net.first.forward.args[1].run_parts = None
    copied, own = copy.deepcopy(net), x[:, : net.norm.weight.numel()]
    computed = net.first(graph, own)
    net.seen = net.second.fc_self.weight * 2  # a result with a history
    whole_model: Any = model.whole()
    assert [type(submodule) for submodule in whole_model.modules()] == [
        type(submodule) for submodule in Net().modules()
    ]
    assert not any(module.training for module in whole_model.modules())
    assert torch.equal(whole_model(graph, x), plain(graph, x))
    assert whole_model.graph[0].__self__ is net.graph[0].__self__
    # A copy: training the parts does not reach it, and it shares nothing with the next.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(whole_model(graph, x), plain(graph, x))
    assert torch.equal(copied.first(graph, own), computed)
    assert not any(parameter.any() for parameter in model.whole().parameters())
    net.lock = copy  # a module of Python's, which nothing can copy
    with pytest.raises(ConfigError, match="cannot be copied"):
        model.whole()


def check_clipping(session: Session, size: int) -> None:
    uncut = split(session, size)[2]
    random = torch.Generator().manual_seed(2)
    gradients = {
        name: torch.randn(value.shape, generator=random, dtype=torch.float64) for name, value in uncut.items()
    }
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        net, model, _ = split(session, size)
        plain = Net().double()
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name].clone()
        for name, parameter in net.named_parameters():
            parameter.grad = model.cut_state(name, gradients[name]).clone()
        for bound in (0.5, 1e6):
            expected = nn.utils.clip_grad_norm_(plain.parameters(), bound, norm_type)
            norm = model.clip_grad_norm_(bound, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            assert len(set(map(str, gather_json(float(norm), session)))) == 1
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            own = dict(net.named_parameters())[name].grad
            torch.testing.assert_close(own, model.cut_state(name, parameter.grad), rtol=1e-12, atol=0)
    net, model, _ = split(session, size)
    assert model.clip_grad_norm_(1.0) == 0
    net.rows = nn.Parameter(torch.zeros(3, 2))
    net.rows.grad = torch.sparse_coo_tensor([[1, 1]], [[3.0, 0.0], [0.0, 4.0]], (3, 2), check_invariants=True)
    assert model.clip_grad_norm_(1.0) == 5
    torch.testing.assert_close(net.rows.grad.to_dense()[1], torch.tensor([0.6, 0.8]))
    net.norm.bias.grad = torch.full_like(net.norm.bias, math.nan)
    assert model.clip_grad_norm_(1.0, math.inf).isnan()
    with pytest.raises(ConfigError, match="norm_type=0"):
        model.clip_grad_norm_(1.0, 0)


def on_rank(sizes: tuple[int, ...]) -> int:
    with start_session(timeout_s=30) as session:
        for size in sizes:
            check_joining(session, size)
            check_whole(session, size)
            check_clipping(session, size)
        net, model, _ = split(session, sizes[-1])
        before = session.ledger.snapshot()
        model.join_state("first.fc_self.weight", net.first.fc_self.weight)
        return equality.moved_since(session, before)[PHASE]


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((1,), (0,)),
        # One column of the first feature and one of the second go to the second rank, 3 to the first.
        ((1, 2), (3, 2)),
        # (1, 1, 1, 0) columns of the first feature and (1, 1, 0, 0) of the second, to three others.
        ((2, 4), (6, 6, 3, 0)),
    ],
)
def test_states_are_joined_copied_and_clipped(sizes: tuple[int, ...], columns: tuple[int, ...]) -> None:
    moved = run_ranks(on_rank, len(columns), args=(sizes,))
    assert moved == [count * HIDDEN * 8 for count in columns]


def test_a_model_that_is_refused_stays_as_it_was() -> None:
    """One parameter in two places that are cut would become two."""
    net = Net().double()
    net.first.fc_neigh.weight = net.first.fc_self.weight
    before = dict(net.named_parameters(remove_duplicate=False))
    with start_session() as session, pytest.raises(ConfigError, match=r"'first\.fc_\w+.*the same parameter"):
        wrap(net, session, 1)
    assert all(parameter is before[name] for name, parameter in net.named_parameters(remove_duplicate=False))
    assert not any("forward" in vars(module) for module in net.modules())


def test_a_weight_that_a_parametrization_computes_is_refused() -> None:
    net = Net().double()
    nn.utils.parametrizations.weight_norm(net.first.fc_neigh)
    with start_session() as session, pytest.raises(ConfigError, match="' is computed from other parameters"):
        wrap(net, session, 1)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize(("sparse", "device"), [(False, "cpu"), (True, "cpu"), (False, "meta")])
def test_gradients_of_an_embedding_are_those_of_torch(padding: int | None, sparse: bool, device: str) -> None:
    nodes, gradients = torch.tensor([5, 2, 1, 2, 7, 1, 2, 7, 0]), torch.randn(9, 4)
    plain, cut = (nn.Embedding(9, 4, padding, sparse=sparse) for _ in range(2))
    plain(nodes).backward(gradients)
    parts = [(nodes[:3], gradients[:3]), (nodes[:2], None), (nodes[3:], gradients[3:])]
    there = [(ids.to(device), None if rows is None else rows.to(device)) for ids, rows in parts]
    ColumnEmbedding(cut.to(device), Any, NODE_TYPE, ()).add_gradients(there)  # type: ignore[arg-type]
    expected, gradient = plain.weight.grad, cut.weight.grad
    assert expected is not None
    assert gradient is not None
    assert (gradient.is_sparse, gradient.device.type) == (sparse, device)
    if device == "cpu":
        assert torch.equal(gradient.to_dense(), expected.to_dense())
        assert not sparse or torch.equal(gradient.indices(), expected.coalesce().indices())
