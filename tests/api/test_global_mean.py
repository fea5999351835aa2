"""Losses over fewer terms than seeds: gradients of ranks are those of one process."""

import logging.handlers
import warnings
from collections.abc import Callable
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.comm.topology import Topology
from dglx_dist.records import StepShare
from dglx_dist.strategies.base import count_targets
from dglx_dist.strategies.gradient_sync import GradientExchange
from tests.helpers.ranks import run_ranks

NUM_NODES, CLASSES = 40, 3
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)


def plain_graph() -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(NUM_NODES, (2, 200), generator=random)
    g = dgl.graph((ends[0], ends[1]), num_nodes=NUM_NODES)
    g.ndata["feat"] = torch.rand(NUM_NODES, 5, generator=random, dtype=torch.float64)
    g.ndata["label"] = torch.randint(CLASSES, (NUM_NODES,), generator=random)
    g.ndata["train_mask"] = torch.arange(NUM_NODES) % 2 == 0
    return g


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(5, 8, "mean"), SAGEConv(8, CLASSES, "mean")]).double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convs[0](blocks[0], x))
        return self.convs[1](blocks[1], hidden)


def ignoring(scores: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    known = torch.where(ids > 9, labels, -100)  # most of one rank's, and none of the other's
    return F.cross_entropy(scores, known, ignore_index=-100, reduction="sum"), float((known >= 0).sum())


def ignoring_all_but_one(scores: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    known = torch.where(ids == 4, labels, -100)
    return F.cross_entropy(scores, known, ignore_index=-100, reduction="sum"), float((known >= 0).sum())


def weighing(scores: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    loss = F.cross_entropy(scores, labels, weight=CLASS_WEIGHTS, reduction="sum")
    return loss, float(CLASS_WEIGHTS[labels].sum())


def masking(scores: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    targets = torch.where(ids % 6 == 0, torch.nan, ids.double() / NUM_NODES)
    known = ~targets.isnan()
    return F.mse_loss(scores[known, 0], targets[known], reduction="sum"), float(known.sum())


STRATEGIES = ("data_parallel", "push_pull", "full_graph")
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, float]]] = {
    function.__name__: function for function in (ignoring, ignoring_all_but_one, weighing, masking)
}


def step_of_plain(name: str) -> tuple[float, dict[str, Tensor]]:
    g, model = plain_graph(), Net()
    block = dgl.to_block(g, g.nodes(), include_dst_in_src=True)
    seeds = g.ndata["train_mask"].nonzero()[:, 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total, count = LOSSES[name](model([block, block], g.ndata["feat"])[seeds], seeds, g.ndata["label"][seeds])
    (total / count).backward()
    optimizer.step()
    return float(total.detach() / count), model.state_dict()


def furthest_from_plain(strategy: str) -> dict[str, float]:
    with dx.init(strategy=strategy, seed=0):
        g = dx.distribute(plain_graph(), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        seeds = dx.node_split(g.ndata["train_mask"])
        loader = dx.DataLoader(g, seeds, sampler, batch_size=NUM_NODES)
        differences = {}
        for name, choose_loss in LOSSES.items():
            model = dx.wrap(Net(), g)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _, nodes, blocks in loader:
                scores = model(blocks, blocks[0].srcdata["feat"])
                loss = dx.global_mean(*choose_loss(scores, g.orig_ids(nodes), blocks[-1].dstdata["label"]))
                loss.backward()
                optimizer.step()
            value, expected = step_of_plain(name)
            assert abs(float(loss.detach()) - value) < 1e-12
            weights = model.state_dict()
            differences[name] = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
        return differences


def by_strategy(function: Callable[[str], Any]) -> dict[str, Any]:
    return {strategy: function(strategy) for strategy in STRATEGIES}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mean_over_fewer_terms_has_the_gradient_of_one_process(ranks: int) -> None:
    for results in run_ranks(by_strategy, ranks, args=(furthest_from_plain,)):
        for differences in results.values():
            assert differences == pytest.approx(dict.fromkeys(LOSSES, 0.0), abs=1e-12)


def step_with_gaps(strategy: str, way: str) -> tuple[list[str], list[str]]:
    plain = plain_graph()
    ids = torch.arange(NUM_NODES)
    plain.ndata["gaps"] = torch.where(ids % 6 == 0, -100, plain.ndata["label"])
    plain.ndata["one gap"] = torch.where(ids == 0, -1, plain.ndata["label"] % 2 * 2)
    plain.ndata["label"] = torch.where(ids % 2 == 1, torch.nan, ids + 0.5)
    name = {"nan": "label", "numbers": "label", "one rank": "one gap"}.get(way, "gaps")
    every = torch.ones(NUM_NODES, dtype=torch.bool)
    is_read = way == "read" and strategy != "full_graph"
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("dglx_dist.strategies.gradient_sync").addHandler(handler)
    with dx.init(strategy=strategy, seed=0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        g = dx.distribute(plain, parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=[] if is_read else [name]
        )
        ids = dx.node_split(every if way == "nan" else g.ndata["train_mask"], g.get_partition_book())
        model = dx.wrap(Net(), g, "sum" if way == "sum" else "mean")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = {} if strategy == "full_graph" else {"batch_size": 4}
        for epoch in range(2):
            for _, _, blocks in dx.DataLoader(g, ids, sampler, **sizes):
                scores, labels = model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata[name]
                if way == "nan":
                    loss = F.mse_loss(scores[:, 0], labels)
                elif way == "numbers":
                    loss = F.mse_loss(scores[:, 0], labels, reduction="mean")
                elif way == "sum":
                    loss = F.cross_entropy(scores, labels, reduction="sum")
                elif way == "global mean" or (way == "global mean, then not" and epoch == 0):
                    loss = dx.global_mean(
                        F.cross_entropy(scores, labels, reduction="sum"), (labels >= 0).sum()
                    )
                else:
                    loss = F.cross_entropy(scores, labels, ignore_index=-1 if way == "one rank" else -100)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        warned = [str(warning.message) for warning in caught if "global_mean" in str(warning.message)]
        assert all(
            warning.filename == __file__ for warning in caught if "global_mean" in str(warning.message)
        )
        return warned, [record.getMessage() for record in handler.buffer]


WAYS = ("read", "nan", "global mean", "global mean, then not", "sum", "numbers", "one rank")


def steps_with_gaps(strategy: str) -> dict[str, tuple[list[str], list[str]]]:
    return {way: step_with_gaps(strategy, way) for way in WAYS}


def test_warns_once_of_steps_over_seeds_without_targets() -> None:
    first, second = run_ranks(by_strategy, 2, args=(steps_with_gaps,))
    for strategy in STRATEGIES:
        for way in WAYS:
            (warned, logged), (not_warned, of_rank_1) = first[strategy][way], second[strategy][way]
            case = f"{strategy}, {way}"
            if way == "one rank":
                (message,) = warned + of_rank_1
                rank = int(not warned)
                assert f"seeds in this batch of rank {rank} have no part in the loss" in message, case
                continue
            assert (logged, not_warned) == ([], []), case
            if way in ("global mean", "sum", "numbers"):
                assert (warned, of_rank_1) == ([], []), case
            else:
                assert len(warned) == 1, case
                assert "seeds in this batch of rank 0 have no part in the loss" in warned[0], case
                assert len(of_rank_1) <= 1, case


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU, on machines without one."""

    device = torch.device("cuda")


def messages_of(scores: Tensor, choose_loss: Callable[[Tensor], Tensor]) -> list[str]:
    """Return the warnings of a loss over two ranks' worth of seeds, all of this rank's in ``scores``."""
    with dx.init(strategy="data_parallel") as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.topology = Topology(0, 2, (0, 0))
        session.model_share = StepShare(num_local=3, num_global=6)
        scores = scores.requires_grad_() * 1
        GradientExchange([], session, 1).watch_gaps(scores)
        choose_loss(scores.as_subclass(Tensor)).backward()
        session.topology = Topology(0, 1, (0,))
        return [str(warning.message) for warning in caught if "global_mean" in str(warning.message)]


def masked_loss(scores: Tensor) -> Tensor:
    return scores[1:].square().mean()


def over_nothing(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.full((3,), -100))


@pytest.mark.parametrize(
    ("choose_loss", "seeds"),
    [
        (masked_loss, 1),
        (lambda scores: (scores - torch.tensor([[1.0], [torch.nan], [torch.nan]])).square().mean(), 3),
        (lambda scores: (scores * torch.tensor([[1.0], [0.0], [0.0]])).sum(), 2),
        (over_nothing, 3),
        (torch.mean, 0),
        (lambda scores: scores[:, 0].mean(), 0),
    ],
)
def test_counts_seeds_without_a_part_in_the_loss(choose_loss: Callable[[Tensor], Tensor], seeds: int) -> None:
    expected = [f"{seeds} of the 3 seeds in this batch of rank 0 have no part in the loss"] if seeds else []
    assert [message.split(" (")[0] for message in messages_of(torch.ones(3, 2), choose_loss)] == expected


def test_takes_a_gradient_that_rounds_to_0_for_a_part_in_the_loss() -> None:
    def saturated_loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores, torch.tensor([0, 0, 1]))

    assert messages_of(torch.tensor([[200.0, 0.0]] * 3), saturated_loss) == []


@pytest.mark.parametrize(
    "scores",
    [
        torch.ones(4, 2),
        torch.ones(3, 2, dtype=torch.bfloat16),
        torch.ones(3, 2).as_subclass(OnGpu),
        torch.tensor(1.0),
    ],
)
def test_looks_at_scores_of_seeds_on_cpus_alone(scores: Tensor) -> None:
    """A step does not wait for a GPU, rows of something else are no seeds, and 16 bits round early."""
    assert messages_of(scores, lambda one: one.sum() * 0) == []


def errors_of_wrong_values() -> list[str]:
    wrong: list[tuple[Any, Any, Any]] = [
        (torch.tensor(1.0), -1, "mean"),
        (torch.tensor(1.0), torch.tensor(torch.nan), "mean"),
        (torch.tensor(1.0), float("inf"), "mean"),
        (torch.tensor(1.0), torch.ones(3, dtype=torch.bool), "mean"),
        (torch.tensor(1.0), "7", "mean"),
        (torch.tensor(1.0), None, "mean"),
        (torch.ones(3), 3, "mean"),
        (1.0, 1, "mean"),
        (torch.tensor(1), 1, "mean"),
        (torch.tensor(1.0), 1, "none"),
        (1.0, -2, None),
        (torch.ones(3), 3, None),
        (None, 1, None),
        (1.0, float("nan"), None),
        (np.array("x"), 3, None),
    ]
    with dx.init(strategy="data_parallel") as session:
        errors = []
        session.model_share = count_targets(1, session)
        for case in wrong:
            total, count, reduction = case if session.topology.rank == 0 else (torch.tensor(2.0), 3, "sum")
            is_value = case[2] is None
            with pytest.raises(dx.ConfigError) as refused:
                dx.reduce_mean(total, count) if is_value else dx.global_mean(total, count, reduction)
            errors.append(str(refused.value))
        return errors


WRONG_VALUES = (
    *("count=-1 must be", "count=tensor(nan) must be", "count=inf must be", "count=<(3,) tensor> must be"),
    *("count='7' must be", "count=None must be", "total=<(3,) tensor> must be", "total=1.0 must be"),
    *("total=tensor(1) must be", "reduction='none' must be", "count=-2 must be"),
    *("value=<(3,) tensor> must be", "value=None must be", "count=nan must be"),
    "value=array('x', dtype='<U1') must be",
)


def test_refuses_what_is_no_sum_and_no_count_on_all_ranks() -> None:
    first, second = run_ranks(errors_of_wrong_values, 2)
    for message, other, words in zip(first, second, WRONG_VALUES, strict=True):
        assert message.startswith(words)
        assert "another rank has a wrong value for this mean" in other


def test_ignores_the_mean_of_no_values() -> None:
    with dx.init(strategy="data_parallel"):
        assert np.isnan(dx.reduce_mean(None, 0))
        assert np.isnan(dx.reduce_mean(torch.zeros(0), 0))


def test_takes_counts_of_any_kind_of_number() -> None:
    with dx.init(strategy="data_parallel") as session:
        session.model_share = count_targets(1, session)
        for count in (
            4,
            4.0,
            np.int64(4),
            np.float32(4),
            torch.tensor(4),
            torch.tensor([4]),
            torch.tensor(4.0),
        ):
            assert float(dx.global_mean(torch.tensor(2.0), count)) == 0.5
            assert dx.reduce_mean(2.0, count) == 2.0
        assert float(dx.global_mean(torch.tensor(0.0), 0)) == 0.0
