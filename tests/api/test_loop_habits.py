"""Habits of PyTorch's training loops: weights of 1 and 2 ranks are those of plain DGL in one process.

A habit is a function of a model and its steps. It trains, and runs unchanged in one process and on ranks.
"""

import contextlib
import copy
import functools
import io
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import Tensor, nn

import dglx_dist as dx
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.base import WrappedModel
from tests.helpers import wide
from tests.helpers.ranks import run_each

NUM_NODES, CLASSES, STEPS = 40, 3, 4
HUGE = 1e290
STRATEGIES: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "push_pull": {},
    "full_graph": {},
    "shared_preload": {"hops": 1},
}


def plain_graph(last_column: float = 1.0) -> dgl.DGLGraph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(NUM_NODES, (2, 200), generator=random)
    g = dgl.graph((ends[0], ends[1]), num_nodes=NUM_NODES)
    g.ndata["feat"] = torch.rand(NUM_NODES, 5, generator=random, dtype=torch.float64)
    g.ndata["feat"][:, -1] *= last_column
    g.ndata["label"] = torch.randint(CLASSES, (NUM_NODES,), generator=random)
    g.ndata["train_mask"] = torch.arange(NUM_NODES) % 3 == 0
    return g


class Net(nn.Module):
    def __init__(self, overflows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(5, 8, "mean"), SAGEConv(8, CLASSES, "mean")]).double()
        if overflows:
            for weight in (self.convs[0].fc_neigh.weight, self.convs[0].fc_self.weight):
                weight.data[:, -1] = 0.0

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convs[0](blocks[0], x))
        return self.convs[1](blocks[1], hidden)


@dataclass
class Step:
    """One batch of all training nodes; ``scores`` calls the model for their rows."""

    scores: Callable[[nn.Module], Tensor]
    labels: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(self.scores(model), self.labels)


Steps = Iterator[Step]


def sgd(model: nn.Module, rate: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def clip_by(clip: Callable[[list[nn.Parameter]], object], model: nn.Module, steps: Steps) -> None:
    optimizer = sgd(model)
    for step in steps:
        optimizer.zero_grad()
        step.loss(model).backward()
        clip(list(model.parameters()))
        optimizer.step()


def clip_by_hand(parameters: list[nn.Parameter]) -> None:
    total = torch.stack([p.grad.detach().norm(2) for p in parameters if p.grad is not None]).norm(2)
    squares = sum(float((p.grad.data**2).sum()) for p in parameters if p.grad is not None)
    assert math.isclose(squares**0.5, float(total), rel_tol=1e-12)
    for parameter in parameters:
        parameter.grad.mul_(0.01 / total)


def clip_by_total_norm(parameters: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = nn.utils.get_total_norm(gradients, 3.0, foreach=False)
    nn.utils.clip_grads_with_norm_(parameters, 0.01, total)


def holding(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, WrappedModel) else contextlib.nullcontext()


def accumulate(model: nn.Module, steps: Steps) -> None:
    """Two steps of two backwards each, the first of them held; what is cleared after them is not sent."""
    optimizer = sgd(model)
    for number, step in enumerate(steps):
        last = number % 2 == 1
        with contextlib.nullcontext() if last else holding(model):
            (step.loss(model) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
            with holding(model):
                step.loss(model).backward()
            optimizer.zero_grad(set_to_none=number == 1)


def accumulate_beside_gradients_that_were_sent(model: nn.Module, steps: Steps) -> None:
    optimizer = sgd(model)
    for number, step in enumerate(steps):
        with (
            contextlib.nullcontext()
            if number != 1 or not isinstance(model, WrappedModel)
            else model.no_sync()
        ):
            step.loss(model).backward()
    optimizer.step()


def train(model: nn.Module, steps: Steps) -> None:
    optimizer = sgd(model)
    for step in steps:
        optimizer.zero_grad()
        step.loss(model).backward()
        optimizer.step()


def average(model: nn.Module, steps: Steps) -> dict[str, Tensor]:
    """Average the weights, and write both as checkpoints are written."""
    averaged, optimizer = torch.optim.swa_utils.AveragedModel(model), sgd(model)
    for step in steps:
        optimizer.zero_grad()
        step.loss(model).backward()
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            assert step.scores(averaged).isfinite().all()
    written = io.BytesIO()
    torch.save({"model": model.state_dict(), "averaged": averaged.state_dict()}, written)
    written.seek(0)
    state = torch.load(written)
    assert state["averaged"].pop("n_averaged") == STEPS
    means = {name.removeprefix("module."): value for name, value in state["averaged"].items()}
    return {**{f"averaged {name}": value for name, value in means.items()}, **state["model"]}


def copy_and_train(model: nn.Module, steps: Steps) -> dict[str, Tensor]:
    """Train for two steps, then a copy for two more; the model keeps its weights."""
    train(model, itertools.islice(steps, 2))
    copied = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    train(copied, steps)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return copied.state_dict()


def scale(model: nn.Module, steps: Steps) -> None:
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(step.loss(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0 * 2 ** (STEPS // 2)


def scale_until_it_fits(model: nn.Module, steps: Steps) -> None:
    """Only the gradient of the last input column overflows, which push_pull has on the last rank."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**80, backoff_factor=2.0**-70)
    for step in itertools.islice(steps, 2):
        optimizer.zero_grad()
        scaler.scale(step.loss(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.003)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10
    for _ in steps:
        pass


def keep_zeros(model: nn.Module, steps: Steps) -> None:
    optimizer = sgd(model)
    for step in steps:
        optimizer.zero_grad(set_to_none=False)
        step.loss(model).backward()
        optimizer.step()


def step_by_two_optimizers(model: nn.Module, steps: Steps) -> None:
    first, second = (list(conv.parameters()) for conv in inner(model).convs)
    optimizers = [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(second, lr=0.5)]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        step.loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()


def step_by_groups(model: nn.Module, steps: Steps) -> None:
    first, second = (list(conv.parameters()) for conv in inner(model).convs)
    optimizer = torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": second, "weight_decay": 0.5}])
    for step in steps:
        optimizer.zero_grad()
        step.loss(model).backward()
        optimizer.step()


def freeze(number: int, model: nn.Module, steps: Steps) -> None:
    train(model, itertools.islice(steps, 2))
    inner(model).convs[number].requires_grad_(False)
    train(model, steps)


def register_hooks(model: nn.Module, steps: Steps) -> None:
    """Hooks that change what they see, and one on the model that counts its calls."""
    calls: list[str] = []
    last = inner(model).convs[1]
    last.register_forward_hook(lambda module, args, output: output * 2)
    last.register_full_backward_hook(lambda module, before, after: calls.append("backward"))
    last.fc_self.weight.register_hook(lambda gradient: gradient * 3)
    model.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.register_forward_hook(lambda module, args, output: output / 3)
    train(model, steps)
    assert sorted(calls) == ["backward"] * STEPS + ["before"] * STEPS


def search_by_closure(model: nn.Module, steps: Steps) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for step in steps:

        def closure(step: Step = step) -> Tensor:
            optimizer.zero_grad()
            loss = step.loss(model)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)


def go_backward_twice(model: nn.Module, steps: Steps) -> None:
    optimizer = sgd(model)
    for step in steps:
        optimizer.zero_grad()
        loss = step.loss(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def inner(model: nn.Module) -> Any:
    return model.module if isinstance(model, WrappedModel) else model


HABITS: dict[str, Callable[[nn.Module, Steps], dict[str, Tensor] | None]] = {
    "clip_grad_norm_": functools.partial(clip_by, lambda ps: nn.utils.clip_grad_norm_(ps, 0.01)),
    "clip_grad_norm_ foreach": functools.partial(
        clip_by, lambda ps: nn.utils.clip_grad_norm_(ps, 0.01, 1.0, foreach=True)
    ),
    "clip_grad_norm_ inf": functools.partial(
        clip_by, lambda ps: nn.utils.clip_grad_norm_(ps, 0.01, math.inf)
    ),
    "clip_grad_value_": functools.partial(clip_by, lambda ps: nn.utils.clip_grad_value_(ps, 0.003)),
    "get_total_norm": functools.partial(clip_by, clip_by_total_norm),
    "clip by hand": functools.partial(clip_by, clip_by_hand),
    "GradScaler": scale,
    "zero_grad(set_to_none=False)": keep_zeros,
    "two optimizers": step_by_two_optimizers,
    "parameter groups": step_by_groups,
    "freezing the first layer": functools.partial(freeze, 0),
    "freezing the last layer": functools.partial(freeze, 1),
    "hooks": register_hooks,
    "LBFGS": search_by_closure,
    "retain_graph": go_backward_twice,
    "deepcopy": copy_and_train,
    "AveragedModel": average,
    "no_sync": accumulate,
    "no_sync in between": accumulate_beside_gradients_that_were_sent,
}
REFUSALS = {
    ("push_pull", "LBFGS"): "LBFGS uses uncut parameters",
    ("push_pull", "retain_graph"): "call the model once for each backward",
}
OVERFLOWS = {"GradScaler": scale_until_it_fits}


@functools.cache
def of_plain(habit: str, overflows: bool) -> dict[str, Tensor]:
    g, model = plain_graph(HUGE if overflows else 1.0), Net(overflows)
    seeds = g.ndata["train_mask"].nonzero()[:, 0]

    def call(model: nn.Module) -> Tensor:
        block = dgl.to_block(g, g.nodes(), include_dst_in_src=True)
        scores: Tensor = model([block, block], g.ndata["feat"])[seeds]
        return scores

    steps = iter([Step(call, g.ndata["label"][seeds])] * STEPS)
    return (OVERFLOWS if overflows else HABITS)[habit](model, steps) or model.state_dict()


def loader_of(g: Any) -> Any:
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    return dx.DataLoader(g, dx.node_split(g.ndata["train_mask"]), sampler, batch_size=NUM_NODES)


def of_ranks(strategy: str, overflows: bool) -> dict[str, Any]:
    """Return the largest difference of each habit's weights from those of plain DGL."""
    with dx.init(strategy=strategy, seed=0, timeout=30, **STRATEGIES[strategy]):
        g = dx.distribute(plain_graph(HUGE if overflows else 1.0), parts=2)
        loader = loader_of(g)

        def steps() -> Steps:
            for _ in range(STEPS):
                for _, _, blocks in loader:
                    call = functools.partial(call_model, blocks)
                    yield Step(call, blocks[-1].dstdata["label"])

        differences: dict[str, Any] = {}
        for name, habit in (OVERFLOWS if overflows else HABITS).items():
            model = dx.wrap(Net(overflows), g)
            try:
                weights = habit(model, steps()) or model.state_dict()
            except ConfigError as error:
                differences[name] = str(error)
                continue
            expected = of_plain(name, overflows)
            differences[name] = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
        return differences


def call_model(blocks: Any, model: nn.Module) -> Tensor:
    scores: Tensor = model(blocks, blocks[0].srcdata["feat"])
    return scores


def of_each_strategy(
    function: Callable[..., Any], ranks: int = 2, *arguments: Any
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each strategy and what ``function(strategy, *arguments)`` returns on every rank."""
    cases = [(strategy, *arguments) for strategy in STRATEGIES]
    yield from zip(STRATEGIES, run_each(function, cases, ranks), strict=True)


@pytest.mark.parametrize("ranks", [*wide(1), 2])
def test_habits_train_as_in_one_process(ranks: int) -> None:
    for strategy, results in of_each_strategy(of_ranks, ranks, False):
        for differences in results:
            for (refusing, habit), message in REFUSALS.items():
                if refusing == strategy:
                    assert message in str(differences[habit])
                    differences[habit] = 0.0
            assert differences == pytest.approx(dict.fromkeys(HABITS, 0.0), abs=1e-12), strategy


def test_all_ranks_skip_a_step_that_overflows_on_one() -> None:
    for strategy, results in of_each_strategy(of_ranks, 2, True):
        for differences in results:
            assert differences == pytest.approx(dict.fromkeys(OVERFLOWS, 0.0), abs=1e-12), strategy


def train_in(dtype: torch.dtype, model: nn.Module, batches: Callable[[], Iterator[Any]]) -> dict[str, Tensor]:
    """Train a model whose weights have ``dtype``; the loss is in float32."""
    optimizer = sgd(model)
    for _ in range(STEPS):
        for blocks, rows, labels in batches():
            optimizer.zero_grad()
            scores = model(blocks, rows.to(dtype))
            F.cross_entropy(scores[: len(labels)].float(), labels).backward()
            optimizer.step()
    return {name: value.float() for name, value in model.state_dict().items()}


def in_lower_precision(strategy: str) -> dict[str, Any]:
    """Return weights of bfloat16, cast before and after dx.wrap, and what float16 raises."""
    with dx.init(strategy=strategy, seed=0, timeout=30, **STRATEGIES[strategy]):
        g = dx.distribute(plain_graph(), parts=2)

        def batches() -> Iterator[Any]:
            for _, _, blocks in loader_of(g):
                yield blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]

        weights: dict[str, Any] = {
            "before": train_in(torch.bfloat16, dx.wrap(Net().bfloat16(), g), batches),
            "after": train_in(torch.bfloat16, dx.wrap(Net(), g).bfloat16(), batches),
        }
        try:
            train_in(torch.float16, dx.wrap(Net().half(), g), batches)
        except dgl.DGLError as error:
            weights["half"] = str(error)
        return weights


@pytest.mark.parametrize("ranks", [*wide(1), 2])
def test_lower_precision_trains_to_its_rounding_and_half_is_refused_by_dgl_on_cpus(ranks: int) -> None:
    g = plain_graph()
    seeds = g.ndata["train_mask"].nonzero()[:, 0]
    nodes = torch.cat([seeds, (~g.ndata["train_mask"]).nonzero()[:, 0]])
    block = dgl.to_block(g, nodes, include_dst_in_src=True)
    batch = [block, block], g.ndata["feat"][nodes], g.ndata["label"][seeds]
    expected = train_in(torch.bfloat16, Net().bfloat16(), lambda: iter([batch]))
    with pytest.raises(dgl.DGLError, match="can only be bfloat16"):
        train_in(torch.float16, Net().half(), lambda: iter([batch]))
    for _, results in of_each_strategy(in_lower_precision, ranks):
        for weights in results:
            assert "can only be bfloat16" in weights["half"]
            for when in ("before", "after"):
                for name, value in expected.items():
                    torch.testing.assert_close(weights[when][name], value, rtol=0, atol=2**-6)


def gradient_bytes_of_accumulation(strategy: str) -> tuple[int, int, str]:
    """Return the bytes of gradients of one backward and of three under no_sync(), and the error of a step."""
    with dx.init(strategy=strategy, seed=0, timeout=30, **STRATEGIES[strategy]) as session:
        g = dx.distribute(plain_graph(), parts=2)
        model = dx.wrap(Net(), g)
        optimizer, sent = sgd(model), []
        for num_backwards in (1, 3):
            before = session.ledger.snapshot()
            for number in range(num_backwards):
                held = number < num_backwards - 1
                for _, _, blocks in loader_of(g):
                    with model.no_sync() if held else contextlib.nullcontext():
                        F.cross_entropy(call_model(blocks, model), blocks[-1].dstdata["label"]).backward()
            moved = (row for row in session.ledger.since(before) if row.phase == "gradients")
            sent.append(sum(row.num_bytes for row in moved))
            if num_backwards == 1:
                optimizer.step()
            optimizer.zero_grad()
        with model.no_sync():
            for _, _, blocks in loader_of(g):
                F.cross_entropy(call_model(blocks, model), blocks[-1].dstdata["label"]).backward()
        try:
            optimizer.step()
        except ConfigError as error:
            return sent[0], sent[1], str(error)
        return sent[0], sent[1], ""


def test_no_sync_sends_gradients_once_and_refuses_to_step_before() -> None:
    for strategy, results in of_each_strategy(gradient_bytes_of_accumulation):
        for one_backward, three_backwards, message in results:
            assert one_backward == three_backwards > 0, strategy
            assert "SGD would step by the gradient of 'convs." in message
            assert "outside of no_sync()" in message


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = Net(), nn.BatchNorm1d(CLASSES).double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        scores: Tensor = self.norm(self.net(blocks, x))
        return scores


def train_with_sync_batch_norm(strategy: str) -> str:
    with dx.init(strategy=strategy, seed=0, timeout=30, **STRATEGIES[strategy]):
        g = dx.distribute(plain_graph(), parts=2)
        try:
            model = dx.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(Normalized()), g)
            for _, _, blocks in loader_of(g):
                call_model(blocks, model)
        except (ConfigError, ValueError) as error:
            return str(error)
        return ""


def test_refuses_sync_batch_norm_on_the_cpu() -> None:
    messages = {
        "data_parallel": "SyncBatchNorm expected input tensor to be on GPU",
        "push_pull": "SyncBatchNorm expected input tensor to be on GPU",
        "full_graph": "'norm' is a SyncBatchNorm",
        "shared_preload": "'norm' is a SyncBatchNorm",
    }
    for strategy, errors in of_each_strategy(train_with_sync_batch_norm):
        assert all(messages[strategy] in error for error in errors), strategy
