"""Loops that users write: other than one call, one backward and one step of one optimizer for each batch.

Each is a function that runs on every rank; the test of its name shows how it failed.
"""

import gc
import logging
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist
from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.push_pull import runs
from tests.strategies.test_equality import difference


class Trained:
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
        own_ids = equality.cut(ids, runs.SHARES["even"], topology.rank, topology.world_size)
        made = STRATEGIES.get(strategy)(g.session, options).open(g)
        size = -(-len(ids) // topology.world_size // runs.STEPS)
        self.loader = made.loader(own_ids, sampler or runs.sampler(), batch_size=size)
        model = runs.first_model("sage")
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        self.model: Any = made.wrap(model)
        self.optimizers = [self.sgd([p for p in self.model.parameters() if p.requires_grad])]

    @staticmethod
    def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=equality.RATE, **options)

    def loss(self, blocks: list[Any]) -> Tensor:
        return runs.choose_loss(self.model, blocks)

    def epoch(self, choose_loss: Callable[[list[Any]], Tensor] | None = None, stop_after: int = 99) -> None:
        for step, (_, _, blocks) in enumerate(self.loader):
            loss = (choose_loss or self.loss)(blocks)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            if step + 1 == stop_after:
                break

    def weights(self) -> list[Any]:
        return [p.detach().numpy().copy() for p in self.model.whole().parameters()]


def an_optimizer_that_was_replaced_steps_no_more(g: DistGraph) -> None:
    trained, steps = Trained(g, depth=3), Counter[str]()
    (old,) = trained.optimizers
    trained.epoch()
    new = trained.sgd(trained.model.parameters())
    old.register_step_post_hook(lambda *_: steps.update(["old"]))
    new.register_step_post_hook(lambda *_: steps.update(["new"]))
    trained.optimizers = [new]
    trained.epoch()
    assert steps == {"new": runs.STEPS + 1}, steps


def who_leaves_the_parts_weights_out_is_told_once(g: DistGraph) -> None:
    """An optimizer that was built before wrap() has the same effect."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dglx_dist.strategies.push_pull.pipeline")
    logger.addHandler(handler)
    trained = Trained(g)
    trained.epoch()
    assert not messages
    cut = trained.model.parts.local
    named = trained.model.module.named_parameters()
    trained.optimizers = [trained.sgd([p for name, p in named if name not in cut])]
    trained.epoch()
    logger.removeHandler(handler)
    (message,) = messages
    assert "build the optimizer after wrap()" in message


def several_optimizers_all_step_when_the_pipeline_drains(g: DistGraph) -> None:
    first, two = Trained(g, depth=3), Trained(g, depth=3)
    parameters = list(two.model.module.parameters())
    two.optimizers = [two.sgd(parameters[:2]), two.sgd(parameters[2:])]
    for trained in (first, two):
        trained.epoch()
    assert all(map(np.array_equal, first.weights(), two.weights()))


def a_look_before_backward_changes_nothing(g: DistGraph) -> None:
    plain, looked = Trained(g, depth=2), Trained(g, depth=2)

    def choose_loss(blocks: list[Any]) -> Tensor:
        loss = looked.loss(blocks)
        with torch.no_grad():
            looked.loss(blocks)
        return loss

    plain.epoch()
    looked.epoch(choose_loss)
    assert all(map(np.array_equal, plain.weights(), looked.weights()))


def a_first_layer_may_be_frozen_while_training(g: DistGraph) -> None:
    """Weight decay must not touch it from then on."""
    results = []
    for strategy, options in (("data_parallel", {}), ("push_pull", {}), ("push_pull", {"group_size": 1})):
        trained = Trained(g, strategy, **options)
        trained.optimizers = [trained.sgd(trained.model.parameters(), weight_decay=0.1)]
        trained.epoch()
        trained.model.module.get_parameter(runs.PART_NAMES["sage"][0]).requires_grad_(False)
        trained.epoch()
        results.append(trained.weights())
    assert max(difference(results[0], weights) for weights in results[1:]) <= 1e-12


def a_first_layer_may_be_frozen_from_the_start(g: DistGraph) -> None:
    """Nobody ever steps it."""
    frozen = runs.PART_NAMES["sage"]
    rows, columns = Trained(g, "data_parallel", frozen), Trained(g, "push_pull", frozen)
    late = Trained(g, "push_pull", frozen, depth=3)
    for trained in (rows, columns, late):
        trained.epoch()
    assert difference(columns.weights(), rows.weights()) <= 1e-12
    for trained in (columns, late):
        left = runs.left_over(trained.model)
        assert not any(left.values()), left


def what_was_begun_or_kept_by_the_user_does_not_pile_up(g: DistGraph) -> None:
    """Each epoch is left early, and the user keeps every loss."""
    trained, batches, losses = Trained(g, depth=3), [], []
    pipeline = trained.model._pipeline
    complete = pipeline.complete

    def note_batch(batch: Any, gradients: Any) -> None:
        batches.append(weakref.ref(batch))
        complete(batch, gradients)

    def choose_loss(blocks: list[Any]) -> Tensor:
        losses.append(trained.loss(blocks))
        return losses[-1]

    pipeline.complete = note_batch
    for _ in range(4):
        trained.epoch(choose_loss, stop_after=2)
    trained.epoch(choose_loss)
    assert not any(reference() is not None for reference in batches)
    assert len(batches) == 4 * 2 + runs.STEPS
    assert not any(runs.left_over(trained.model).values())
    # The last batch of each epoch that was left is stepped in the next one.
    assert trained.model._pipeline.log.steps == {"M": len(batches), "D": len(batches)}


def a_batch_is_gone_as_soon_as_nobody_uses_it(g: DistGraph) -> None:
    """Before Python looks for objects that hold each other; so its rows lie in memory that is used again."""
    push_pull = (
        {"structure": "push"},
        {"structure": "resample"},
        {"group_size": 1},
        {"depth": 2},
        {"depth": 3},
    )
    for strategy, options in (("data_parallel", {}), *(("push_pull", settings) for settings in push_pull)):
        trained, seen, batches = Trained(g, strategy, **options), [], []

        def choose_loss(
            blocks: list[Any],
            trained: Trained = trained,
            seen: list[Any] = seen,
            batches: list[Any] = batches,
        ) -> Tensor:
            seen.extend(weakref.ref(block) for block in blocks)
            batches.extend(weakref.ref(block.push_pull) for block in blocks if hasattr(block, "push_pull"))
            return trained.loss(blocks)

        gc.collect()
        gc.disable()
        trained.epoch(choose_loss)
        held, known = (sum(item() is not None for item in references) for references in (seen, batches))
        gc.enable()
        assert len(seen) >= 2 * runs.STEPS
        assert held == 0, (strategy, options, held)
        # The model knows the rows of the last batch until it is called again.
        assert known <= 1, (strategy, options, known)
        assert bool(batches) == (strategy == "push_pull")


def what_a_loader_lent_goes_with_the_loader(g: DistGraph) -> None:
    trained = Trained(g)
    gc.collect()
    gc.disable()
    trained.epoch()
    memory = weakref.ref(trained.loader._memory)  # type: ignore[attr-defined]
    del trained.loader
    stays = memory() is not None
    gc.enable()
    assert not stays


def a_model_goes_with_its_parameters(g: DistGraph) -> None:
    for strategy, options in (("data_parallel", {}), ("push_pull", {}), ("push_pull", {"depth": 3})):
        trained = Trained(g, strategy, **options)
        trained.epoch()
        held = [weakref.ref(trained.model._exchange), *map(weakref.ref, trained.model.parameters())]
        del trained
        gc.collect()
        assert not any(reference() is not None for reference in held), (strategy, options)


def a_step_goes_through_few_modules(g: DistGraph) -> None:
    """Modules of the package whose functions any thread calls while two steps of an epoch are taken."""
    package = str(Path(dglx_dist.__file__).parent)
    for strategy, most in {"data_parallel": 17, "push_pull": 28}.items():
        sampler = dgl.dataloading.NeighborSampler(
            [5, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        gc.collect()  # models of the loops before still watch every optimizer
        trained, called, steps = Trained(g, strategy, sampler=sampler), set[str](), list[int]()

        def choose_loss(blocks: list[Any], trained: Trained = trained, steps: list[int] = steps) -> Tensor:
            steps.append(len(blocks))
            return trained.loss(blocks)

        def note(
            frame: Any, event: str, _: object, called: set[str] = called, steps: list[int] = steps
        ) -> None:
            if 2 <= len(steps) <= 3 and event == "call" and frame.f_code.co_filename.startswith(package):
                called.add(Path(frame.f_code.co_filename).relative_to(package).as_posix())

        trained.epoch()
        threading.setprofile(note)
        sys.setprofile(note)
        trained.epoch(choose_loss)
        sys.setprofile(None)
        threading.setprofile(None)
        assert {"dataloading/step_loader.py", "strategies/gradient_sync.py"} <= called
        called.discard("comm/auth.py")  # at the first message of a connection, in whichever step that is
        assert len(called) <= most, sorted(called)


LOOPS = (
    an_optimizer_that_was_replaced_steps_no_more,
    who_leaves_the_parts_weights_out_is_told_once,
    several_optimizers_all_step_when_the_pipeline_drains,
    a_look_before_backward_changes_nothing,
    a_first_layer_may_be_frozen_while_training,
    a_first_layer_may_be_frozen_from_the_start,
    what_was_begun_or_kept_by_the_user_does_not_pile_up,
    a_batch_is_gone_as_soon_as_nobody_uses_it,
    what_a_loader_lent_goes_with_the_loader,
    a_model_goes_with_its_parameters,
    a_step_goes_through_few_modules,
)


def on_rank(folder: str) -> dict[str, str]:
    with start_session(timeout_s=60):
        g, failures = DistGraph(folder), {}
        for loop in LOOPS:
            try:
                loop(g)
            except AssertionError:
                failures[loop.__name__] = traceback.format_exc()
        g.barrier()
        return failures


@pytest.fixture(scope="module")
def failures(folder: Path) -> list[dict[str, str]]:
    return run_ranks(on_rank, 2, args=(str(folder),))


@pytest.mark.parametrize("loop", [loop.__name__ for loop in LOOPS])
def test_every_loop_trains_as_expected(failures: list[dict[str, str]], loop: str) -> None:
    assert [of_rank.get(loop, "") for of_rank in failures] == ["", ""]
