"""Loops that users write: other than one call, one backward and one step of one optimizer for each batch."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dglx_dist
from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.push_pull import runs
from tests.strategies.test_equality import difference

FIRST = "convs.0.fc_neigh.weight"


class Trained:
    """A model, its loader and the user's step, on one rank."""

    def __init__(
        self,
        g: DistGraph,
        strategy: str = "push_pull",
        frozen: Sequence[str] = (),
        sampler: Any = None,
        **options: Any,
    ) -> None:
        topology = g.session.topology
        ids = equality.new_ids_of_training(g)[: runs.BATCH * runs.STEPS]
        mine = equality.cut(ids, runs.SHARES["even"], topology.rank, topology.world_size)
        self.cuts = strategy == "push_pull"
        made = STRATEGIES.get(strategy)(g.session, options)
        size = -(-len(ids) // topology.world_size // runs.STEPS)
        self.loader = made.loader(g, mine, sampler or runs.sampler(), batch_size=size)
        model = runs.first_model("sage")
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        self.model: Any = made.wrap(model, g)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=equality.RATE)

    def scores(self, blocks: list[Any]) -> Tensor:
        scores: Tensor = self.model(blocks, blocks[0].srcdata["feat"])
        return scores

    def loss(self, blocks: list[Any]) -> Tensor:
        return F.cross_entropy(self.scores(blocks), blocks[-1].dstdata["label"])

    def epoch(self, loss_of: Callable[[list[Any]], Tensor] | None = None, stop_after: int = 99) -> None:
        for step, (_, _, blocks) in enumerate(self.loader):
            loss = (loss_of or self.loss)(blocks)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step + 1 == stop_after:
                break

    def weights(self) -> list[Any]:
        return [p.detach().numpy().copy() for p in self.model.whole().parameters()]


def replaced_optimizer(g: DistGraph) -> dict[str, Any]:
    """An optimizer that the user has replaced lives on; what it steps afterwards, and what the new one."""
    trained, steps = Trained(g, depth=3), {"old": 0, "new": 0}
    old = trained.optimizer
    trained.epoch()
    old.register_step_post_hook(lambda *_: steps.update(old=steps["old"] + 1))
    trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    trained.optimizer.register_step_post_hook(lambda *_: steps.update(new=steps["new"] + 1))
    trained.epoch()
    return steps


def left_out(g: DistGraph) -> dict[str, Any]:
    """An optimizer that was not given the parts' weights, as one that was built before wrap()."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dglx_dist.strategies.push_pull.pipeline")
    logger.addHandler(handler)
    trained = Trained(g)
    trained.epoch()
    right = list(told)
    cut = trained.model.parts.local
    rest = [p for name, p in trained.model.module.named_parameters() if name not in cut]
    trained.optimizer = torch.optim.SGD(rest, lr=0.1)
    trained.epoch()
    logger.removeHandler(handler)
    return {"right": right, "wrong": told}


def two_optimizers(g: DistGraph) -> dict[str, Any]:
    """One for each half of the parameters; both must step when the pipeline drains."""
    found = {}
    for name in ("one", "two"):
        trained = Trained(g, depth=3)
        if name == "two":
            named = list(trained.model.module.parameters())
            halves = [torch.optim.SGD(half, lr=equality.RATE) for half in (named[:2], named[2:])]
            trained.optimizer = Both(halves)  # type: ignore[assignment]
        trained.epoch()
        found[name] = trained.weights()
    return found


class Both:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def looked_at(g: DistGraph) -> dict[str, Any]:
    """A call without gradients between a batch's loss and its backward changes nothing."""
    found = {}
    for name in ("plain", "looked at"):
        trained = Trained(g, depth=2)

        def loss_of(blocks: list[Any], trained: Trained = trained, look: bool = name != "plain") -> Tensor:
            loss = trained.loss(blocks)
            with torch.no_grad():
                _ = trained.scores(blocks) if look else None
            return loss

        trained.epoch(loss_of)
        found[name] = trained.weights()
    return found


def frozen_later(g: DistGraph) -> dict[str, Any]:
    """A weight of the first layer is frozen after wrapping, under weight decay, which must not touch it."""
    found: dict[str, Any] = {}
    for strategy, options in (("push_pull", {}), ("data_parallel", {}), ("push_pull", {"group_size": 1})):
        trained = Trained(g, strategy, **options)
        trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1, weight_decay=0.1)
        trained.epoch()
        trained.model.module.get_parameter(FIRST).requires_grad_(False)
        trained.epoch()
        found[f"{strategy}{options}"] = trained.weights()
    return found


def frozen_first(g: DistGraph) -> dict[str, Any]:
    """All of the first layer's cut weights are frozen from the start; nobody will ever step them."""
    found: dict[str, Any] = {}
    for strategy, options in (("push_pull", {}), ("data_parallel", {}), ("push_pull", {"depth": 3})):
        trained = Trained(g, strategy, frozen=runs.PART_NAMES["sage"], **options)
        trained.epoch()
        found[f"{strategy}{options}"] = trained.weights()
        if strategy == "push_pull":
            found[f"left {options}"] = runs.left_over(trained.model)
    return found


def left_loops(g: DistGraph) -> dict[str, Any]:
    """How much is kept when the user leaves each epoch early, and keeps every loss."""
    trained, batches, losses = Trained(g, depth=3), [], []
    pipeline = trained.model._pipeline
    complete = pipeline.complete

    def noted(batch: Any, gradients: Any) -> None:
        batches.append(weakref.ref(batch))
        complete(batch, gradients)

    def loss_of(blocks: list[Any]) -> Tensor:
        losses.append(trained.loss(blocks))
        return losses[-1]

    pipeline.complete = noted
    for _ in range(4):
        trained.epoch(loss_of, stop_after=2)
    trained.epoch(loss_of)
    return {
        "kept": sum(one() is not None for one in batches),
        "completed": len(batches),
        "left": runs.left_over(trained.model),
        "steps": dict(trained.model.versions.steps),
    }


def gone_at_once(g: DistGraph) -> dict[str, Any]:
    """How many batches of an epoch stay until Python looks for objects that hold each other."""
    found = {}
    for strategy, options in HELD:
        trained, blocks_seen, batches_seen = Trained(g, strategy, **options), [], []

        def loss_of(
            blocks: list[Any],
            trained: Trained = trained,
            seen: list[Any] = blocks_seen,
            batches: list[Any] = batches_seen,
        ) -> Tensor:
            seen.extend(weakref.ref(block) for block in blocks)
            batches.extend(weakref.ref(block.push_pull) for block in blocks[:1] if trained.cuts)
            return trained.loss(blocks)

        gc.collect()
        gc.disable()
        trained.epoch(loss_of)
        held = sum(one() is not None for one in blocks_seen)
        batches = sum(one() is not None for one in batches_seen)
        gc.enable()
        found[f"{strategy} {options}"] = held, len(blocks_seen), batches
    return found


def dropped_loader(g: DistGraph) -> bool:
    """Whether the memory that a loader lent stays when the user has dropped the loader."""
    trained = Trained(g)
    gc.collect()
    gc.disable()
    trained.epoch()
    memory = weakref.ref(trained.loader._memory)
    del trained.loader
    stays = memory() is not None
    gc.enable()
    return stays


def modules_of_a_step(g: DistGraph) -> dict[str, list[str]]:
    """The package's modules whose functions any thread calls in an epoch of sampled batches."""
    package, found = str(Path(dglx_dist.__file__).parent), {}
    for strategy in ("data_parallel", "push_pull"):
        sampler = dgl.dataloading.NeighborSampler(
            [5, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        trained, called = Trained(g, strategy, sampler=sampler), set()

        def note(frame: Any, event: str, _: object, called: set[str] = called) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                called.add(Path(frame.f_code.co_filename).relative_to(package).as_posix())

        trained.epoch()
        threading.setprofile(note)
        sys.setprofile(note)
        trained.epoch()
        sys.setprofile(None)
        threading.setprofile(None)
        found[strategy] = sorted(called)
    return found


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        found = {one.__name__: one(g) for one in SCENES}
        g.barrier()
        return found


SCENES = (
    replaced_optimizer,
    left_out,
    two_optimizers,
    looked_at,
    frozen_later,
    frozen_first,
    left_loops,
    gone_at_once,
    dropped_loader,
    modules_of_a_step,
)

HELD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("data_parallel", {}),
    ("push_pull", {"structure": "push"}),
    ("push_pull", {"structure": "resample"}),
    ("push_pull", {"group_size": 1}),
    ("push_pull", {"depth": 2}),
    ("push_pull", {"depth": 3}),
)


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 2, args=(str(folder),))


def test_an_optimizer_that_was_replaced_steps_no_more(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["replaced_optimizer"] == {"old": 0, "new": runs.STEPS + 1}


def test_who_leaves_the_parts_weights_out_is_told_once(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["left_out"]["right"] == []
        (message,) = found["left_out"]["wrong"]
        assert "built before wrap()" in message


def test_several_optimizers_all_step_when_the_pipeline_drains(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        both = found["two_optimizers"]
        assert all(map(np.array_equal, both["one"], both["two"]))


def test_a_look_before_backward_changes_nothing(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        looked = found["looked_at"]
        assert all(map(np.array_equal, looked["plain"], looked["looked at"]))


def test_a_first_layer_may_be_frozen_while_training(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        plain, *others = (found["frozen_later"][name] for name in sorted(found["frozen_later"]))
        for other in others:
            assert difference(plain, other) <= 1e-12


def test_a_first_layer_may_be_frozen_from_the_start(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        frozen = found["frozen_first"]
        assert difference(frozen["push_pull{}"], frozen["data_parallel{}"]) <= 1e-12
        assert not any(frozen["left {}"].values())
        assert not any(frozen["left {'depth': 3}"].values())


def test_what_was_begun_or_kept_by_the_user_does_not_pile_up(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        loops = found["left_loops"]
        assert loops["kept"] == 0
        assert loops["completed"] == 4 * 2 + runs.STEPS
        assert not any(loops["left"].values())
        # The last batch of each epoch that was left is stepped in the next one.
        assert loops["steps"] == {"M": loops["completed"], "D": loops["completed"]}


def test_a_batch_is_gone_as_soon_as_nobody_uses_it(seen: list[dict[str, Any]]) -> None:
    """Or its rows lie in memory that is new each time, and that is given back whenever it happens to be."""
    for found in seen:
        assert len(found["gone_at_once"]) == len(HELD)
        for name, (held, blocks, batches) in found["gone_at_once"].items():
            assert blocks >= 2 * runs.STEPS, name
            assert held == 0, name
            # The model knows the rows of the last batch until it is called again.
            assert batches <= 1, name


def test_what_a_loader_lent_goes_with_the_loader(seen: list[dict[str, Any]]) -> None:
    assert not any(found["dropped_loader"] for found in seen)


def test_a_step_goes_through_few_modules(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        for strategy, most in {"data_parallel": 20, "push_pull": 30}.items():
            called = found["modules_of_a_step"][strategy]
            assert {"dataloading/step_loader.py", "strategies/gradient_sync.py"} <= set(called)
            assert len(called) <= most, called
