"""Batch norms whose statistics are those of one process, on any number of ranks."""

import copy
import pickle
import warnings
from typing import Any

import dgl
import pytest
import torch
from dgl.nn import SAGEConv
from torch import Tensor, nn

import dglx_dist as dx
from tests.helpers.ranks import run_each, run_ranks
from tests.strategies import equality

NUM_NODES, WIDTH, CLASSES = 40, 5, 3


def plain_graph() -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(NUM_NODES, (2, 160), generator=random)
    g = dgl.graph((ends[0], ends[1]), num_nodes=NUM_NODES)
    g.ndata["feat"] = 3 + torch.rand(NUM_NODES, WIDTH, generator=random, dtype=torch.float64)
    g.ndata["label"] = torch.randint(CLASSES, (NUM_NODES,), generator=random)
    # The shares of two ranks are uneven.
    g.ndata["train_mask"] = torch.arange(NUM_NODES) % 3 == 0
    return g


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(WIDTH, 8, "mean"), SAGEConv(8, CLASSES, "mean")])
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(CLASSES, affine=False, momentum=None)])
        self.double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.convs[0](blocks[0], x)))
        return self.norms[1](self.convs[1](blocks[-1], hidden))


def test_converts_in_place_and_keeps_hooks() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 6), nn.SyncBatchNorm(6), nn.BatchNorm1d(6)), []
    norms = list(model)[1:]
    norms[0].register_forward_hook(lambda *_: calls.append(1))
    assert dx.nn.BatchNorm.convert(model) is model
    assert list(model)[1:] == norms
    assert [type(norm) for norm in norms] == [dx.nn.BatchNorm] * 2
    assert model(torch.rand(3, 4)).shape == (3, 6)  # SyncBatchNorm of torch needs a GPU
    assert calls == [1]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(3),
        nn.BatchNorm3d(3),
        nn.LazyBatchNorm1d(),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.SyncBatchNorm(3, process_group="some ranks"),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_warns_of_norms_that_it_does_not_convert(norm: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), norm)
    with pytest.warns(UserWarning, match=rf"leaves the batch norms 1 unchanged.*{type(norm).__name__}\("):
        dx.nn.BatchNorm.convert(model)
    assert type(model[0]) is dx.nn.BatchNorm
    assert model[1] is norm
    assert type(norm) is not dx.nn.BatchNorm


@pytest.mark.parametrize("value", [None, nn.BatchNorm1d, [nn.BatchNorm1d(3)]])
def test_refuses_to_convert_what_is_no_module(value: Any) -> None:
    with pytest.raises(dx.ConfigError, match=r"convert takes a torch.nn.Module, not a (NoneType|type|list)"):
        dx.nn.BatchNorm.convert(value)


def conversion_after_wrap(strategy: str) -> list[str]:
    errors = []
    with dx.init(strategy=strategy, seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Net()
        g = dx.distribute(plain_graph(), parts=2)
        wrapped = dx.wrap(module, g)
        for model in (wrapped, module, module.norms):
            with pytest.raises(dx.ConfigError) as refused:
                dx.nn.BatchNorm.convert(model)
            errors.append(str(refused.value))
        copied = dx.nn.BatchNorm.convert(copy.deepcopy(module) if strategy == "data_parallel" else Net())
        assert not any(isinstance(part, nn.BatchNorm1d) for part in copied.modules())
        assert dx.nn.BatchNorm.convert(converted := dx.wrap(copied, g)) is converted
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_refuses_to_convert_a_wrapped_model(ranks: int) -> None:
    for of_ranks in run_each(conversion_after_wrap, [("data_parallel",), ("push_pull",)], ranks):
        for errors in of_ranks:
            assert len(errors) == 3
            assert all("model = dx.nn.BatchNorm.convert(model) before dx.wrap" in text for text in errors)


def passes_of_rows(rows_of_ranks: list[int], shape: tuple[int, ...]) -> tuple[str, list[float]]:
    with dx.init(strategy="data_parallel", seed=0) as session:
        g = dx.distribute(plain_graph(), parts=2)
        norm = dx.nn.BatchNorm(3)
        norm.running_mean.fill_(2)
        model = dx.wrap(norm, g)
        session.step_share = dx.strategies.base.count_targets(1, session)
        x = torch.ones(rows_of_ranks[session.topology.rank], *shape)
        try:
            model(x)
        except ValueError as error:
            return str(error), norm.running_mean.tolist()
        return "", [*norm.running_mean.tolist(), *norm.running_var.tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_refuses_one_row_over_all_ranks_and_keeps_statistics_where_no_rank_has_one(ranks: int) -> None:
    cases = [([0] * ranks, (3,)), ([1, 0], (3,)), *[([0, 1], (3,))] * (ranks - 1)]
    without, *of_one_row = run_each(passes_of_rows, cases, ranks)
    assert without == [("", [2, 2, 2, 1, 1, 1])] * ranks
    for error, running_mean in (result for of_ranks in of_one_row for result in of_ranks):
        assert "more than 1" in error
        assert running_mean == [2, 2, 2]


def test_refuses_inputs_that_are_no_rows() -> None:
    for of_ranks in run_each(passes_of_rows, [([2, 2], shape) for shape in ((4,), (3, 3), ())], 2):
        for error, _ in of_ranks:
            assert "dx.nn.BatchNorm(3) takes rows of 3 columns" in error


def trained_state(strategy: str, parts: int, is_converted: bool) -> dict[str, Any]:
    with dx.init(strategy=strategy, seed=0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        g = dx.distribute(plain_graph(), parts=parts)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        loader = dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=NUM_NODES)
        model: Any = Net()
        model = dx.wrap(dx.nn.BatchNorm.convert(model) if is_converted else model, g)
        equality.loop(model, loader, torch.optim.SGD(model.parameters(), lr=0.3), 3)
        state = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        sent = g.session.ledger.total(phase="batch_norm")
        warned = [str(warning.message) for warning in caught if "batch norm" in str(warning.message)]
        return {"state": state, "warned": len(warned), "sent": sent}


def distance(first: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(abs(first["state"][name] - other["state"][name]).max()) for name in first["state"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_train_with_the_statistics_of_one_process(ranks: int) -> None:
    single = run_ranks(trained_state, 1, args=("data_parallel", ranks, False))[0]
    cases = [("data_parallel", ranks, True), ("push_pull", ranks, True)]
    for of_rank in (result for of_ranks in run_each(trained_state, cases, ranks) for result in of_ranks):
        assert distance(single, of_rank) < 1e-10
        assert of_rank["warned"] == 0


def test_whole_graphs_have_the_statistics_of_one_process() -> None:
    cases = [(strategy, 2, True) for strategy in ("full_graph", "shared_preload", "cooperative")]
    alone, both = (run_each(trained_state, cases, ranks) for ranks in (1, 2))
    for case, (single,), of_ranks in zip(cases, alone, both, strict=True):
        assert max(distance(single, of_rank) for of_rank in of_ranks) < 1e-10, case


def test_statistics_of_each_rank_differ_and_are_warned_of() -> None:
    (single,), of_ranks = (run_ranks(trained_state, n, args=("data_parallel", 2, False)) for n in (1, 2))
    assert distance(single, of_ranks[0]) > 1e-3
    assert [of_rank["warned"] for of_rank in of_ranks] == [1, 0]
    assert single["warned"] == 0


def test_alone_it_is_the_batch_norm_of_torch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False, momentum=None))
    converted = dx.nn.BatchNorm.convert(copy.deepcopy(plain))
    assert not any(isinstance(module, nn.BatchNorm1d) for module in converted.modules())
    for model in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)), converted):
        torch.manual_seed(1)
        expected_model = copy.deepcopy(plain)
        for is_training in (True, True, False):
            x = torch.rand(7, 4)
            expected = expected_model.train(is_training)(x)
            assert torch.equal(model.train(is_training)(x), expected)
        state = expected_model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        model.load_state_dict(state)
