"""Losses of ``dx.fit`` over fewer terms than seeds, or weighed ones: the weights are those of one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.training.fit_config import FitConfig, FitResult
from tests.api.test_global_mean import CLASS_WEIGHTS, Net, plain_graph
from tests.helpers import wide
from tests.helpers.ranks import run_each

STEPS = 2


def masked_mean(scores: Tensor, targets: Tensor) -> Tensor:
    known = ~targets.isnan()
    return F.mse_loss(scores[known, 0], targets[known])


def masked_classes(scores: Tensor, labels: Tensor) -> Tensor:
    known = labels >= 0
    if not len(labels):
        return scores.sum() * 0
    return F.cross_entropy(scores[known], labels[known]) + 1e-4 * F.mse_loss(scores[:, 0], labels.double())


def log_likelihood(scores: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(scores.log_softmax(1), labels, CLASS_WEIGHTS)


def per_row(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none", label_smoothing=0.1).mean()


def weigh(function: Callable[..., Tensor], scores: Tensor, labels: Tensor) -> Tensor:
    column = scores[:, 0].sigmoid()
    return function(column, labels.double() / 4, weight=CLASS_WEIGHTS[labels])


def penalize(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels) + F.l1_loss(scores.mean(), scores.new_tensor(-99.0))


LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "module": ("gaps", nn.CrossEntropyLoss()),
    "weights": ("label", nn.CrossEntropyLoss(CLASS_WEIGHTS)),
    "both": ("gaps", nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=-100, label_smoothing=0.1)),
    "class 0": ("label", nn.CrossEntropyLoss(ignore_index=0)),
    "partial": ("label", partial(F.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=1)),
    "lambda": ("gaps", lambda scores, labels: F.cross_entropy(scores, labels)),
    "nll": ("label", log_likelihood),
    "masked": ("gaps", masked_classes),
    "rows": ("label", per_row),
    "huber": ("label", lambda scores, labels: nn.HuberLoss(delta=0.1)(scores[:, 0], labels.double())),
    "weighed huber": ("label", partial(weigh, partial(F.huber_loss, delta=0.1))),
    "weighed squares": ("label", partial(weigh, F.mse_loss)),
    "weighed distances": ("label", partial(weigh, F.l1_loss)),
    "distances per row": ("label", lambda s, y: weigh(partial(F.l1_loss, reduction="none"), s, y).mean()),
    "weighed bce": ("label", partial(weigh, F.binary_cross_entropy)),
    "own": ("unknown", lambda scores, y: F.cross_entropy(scores[y >= 0], y[y >= 0])),
    "penalty": ("label", penalize),
    "penalty beside gaps": ("gaps", penalize),
}


def given_graph() -> dgl.DGLGraph:
    g, ids = plain_graph(), torch.arange(40)
    g.ndata["gaps"] = torch.where(ids > 9, -100, g.ndata["label"])  # one rank may have none
    g.ndata["unknown"] = torch.where(ids > 9, torch.tensor([-1, -100]).repeat(20), g.ndata["label"])
    return g


def given_scores() -> dgl.DGLGraph:
    g, ids = plain_graph(), torch.arange(40)
    g.ndata["label"] = torch.where(ids % 6 == 1, torch.nan, ids.double() / 40)
    return g


class Layers(Net):
    def inference_layers(self) -> list[Any]:
        return [lambda block, h: torch.relu(self.convs[0](block, h)), self.convs[1]]


def plain_weights(name: str) -> tuple[float, dict[str, Tensor]]:
    g, model = given_scores() if name == "scores" else given_graph(), Layers()
    label, choose_loss = LOSSES.get(name, ("label", masked_mean))
    block = dgl.to_block(g, g.nodes(), include_dst_in_src=True)
    seeds = g.nodes() if name == "scores" else g.ndata["train_mask"].nonzero()[:, 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        loss = choose_loss(model([block, block], g.ndata["feat"])[seeds], g.ndata[label][seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach()), model.state_dict()


def furthest_from_plain(strategy: str) -> dict[str, float]:
    differences = {}
    with dx.init(strategy=strategy, seed=0):
        g = dx.distribute(given_graph(), parts=2)
        sizes = {} if strategy == "full_graph" else {"batch_size": 40}
        for name, (label, loss) in LOSSES.items():
            options: Any = {"epochs": STEPS, "label": label, "loss": loss, "eval_every": 0}
            if name == "own":
                options["loss"] = None
            config = FitConfig(**options, evaluate=lambda _: {}, show_progress=False)
            make = partial(torch.optim.SGD, lr=0.5)
            result = dx.fit(Layers(), g, config=config, fanouts=[-1, -1], make_optimizer=make, **sizes)
            differences[name] = difference_from_plain(name, *result)
        g = dx.distribute(given_scores(), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        every = dx.node_split(torch.ones(40, dtype=torch.bool), g.get_partition_book())
        loader = dx.DataLoader(g, every, sampler, **sizes)
        config = replace(config, label="label", loss=masked_mean, task="regression")
        result = dx.fit(Layers(), g, config=config, loader=loader, make_optimizer=make)
        return differences | {"scores": difference_from_plain("scores", *result)}


def difference_from_plain(name: str, model: nn.Module, found: FitResult) -> float:
    value, expected = plain_weights(name)
    weights = model.state_dict()
    furthest = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
    return furthest + abs(found.epochs[-1].loss - value)


@pytest.mark.parametrize("ranks", [2, *wide(1)])
def test_fit_takes_the_mean_over_the_terms_of_all_ranks(ranks: int) -> None:
    strategies = ["data_parallel", "push_pull", "full_graph"]
    for of_ranks in run_each(furthest_from_plain, [(strategy,) for strategy in strategies], ranks):
        for differences in of_ranks:
            assert differences == pytest.approx(dict.fromkeys([*LOSSES, "scores"], 0.0), abs=1e-12)


def bytes_of_training(loss: Callable[[Tensor, Tensor], Tensor] | None) -> dict[str, Any]:
    with dx.init(strategy="data_parallel", seed=0):
        g = dx.distribute(plain_graph(), parts=2)
        options: Any = {"epochs": 2, "loss": loss, "evaluate": lambda _: {}, "eval_every": 0}
        config = FitConfig(**options, show_progress=False)
        return dx.fit(Layers(), g, config=config, fanouts=[-1, -1], batch_size=8)[1].traffic


def test_a_loss_with_a_term_for_each_seed_sends_nothing_more() -> None:
    losses = [(None,), (F.cross_entropy,), (nn.CrossEntropyLoss(CLASS_WEIGHTS),)]
    plain, own, weighed = run_each(bytes_of_training, losses, 2)
    assert plain == own
    assert "metrics" not in own[0]
    assert "metrics" in weighed[0]


def test_warns_once_where_the_training_loss_is_nan() -> None:
    with dx.init(strategy="data_parallel", seed=0):
        g = dx.distribute(given_scores(), parts=2)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        loader = dx.DataLoader(g, torch.arange(40), sampler, batch_size=40)
        options: Any = {
            "epochs": 2,
            "task": "regression",
            "loss": lambda scores, y: F.mse_loss(scores[:, 0], y),
        }
        config = FitConfig(**options, evaluate=lambda _: {}, show_progress=False)
        with pytest.warns(UserWarning, match=r"loss of epoch 0 is NaN.*without a target") as caught:
            dx.fit(Layers(), g, config=config, loader=loader)
        assert [warning.filename for warning in caught] == [__file__]
