"""The equality matrix: every strategy, on any ranks and servers, leaves the weights of one plain DGL process.

A new strategy is one more line in COLUMNS.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.equality import DEEP_MODELS, FEW, MODELS, SHARES, STACKS, STEPS, SUMS, Column
from tests.strategies.serverless import fifo

COLUMNS = [
    Column("data_parallel"),
    Column("push_pull"),
    Column(
        "lambda",
        (("mode", "pipe"), ("executor", "inline"), ("intervals", 3), ("parameter_servers", 2)),
        shares=("uneven",),
        name="lambda pipe",
    ),
    # Who names a seed does not matter to these: rows lie where their owners or their servers are.
    *(
        Column(
            strategy,
            options,
            SUMS if ("aggregate", "cover") in options else DEEP_MODELS,
            ("empty",),
            steps,
            keeps_loader=True,
        )
        for strategy, options, steps in (
            ("full_graph", (), STEPS),
            ("full_graph", (("aggregate", "cover"),), STEPS),
            ("full_graph", (("aggregate", "cover"), ("use_pp", False)), STEPS),
            ("shared_preload", (("hops", 0),), STEPS),
            ("shared_preload", (("hops", 1),), STEPS),
            ("shared_preload", (("hops", 1), ("aggregate", "cover")), STEPS),
            ("shared_preload", (("hops", 2),), 2 * STEPS),
            ("shared_preload", (("external_hops", 2), ("external_fanout", -1)), STEPS),
            ("cooperative", (("batches", 1),), STEPS),
        )
    ),
]

MAIN = tuple(COLUMNS)

# What stands between the layers, and the models that have it.
COLUMNS += [
    Column("data_parallel", models=(*FEW, *STACKS), shares=("uneven",), name="stacks of data_parallel"),
    Column(
        "push_pull",
        models=("sage cat", "gin residual", "gat max"),
        shares=("uneven",),
        name="stacks of push_pull",
    ),
    *(
        Column(strategy, options, FEW, ("empty",), keeps_loader=True, name=f"stacks of {strategy}")
        for strategy, options in (
            ("full_graph", (("aggregate", "cover"),)),
            ("shared_preload", (("hops", 1),)),
            ("cooperative", (("batches", 1),)),
        )
    ),
    replace(COLUMNS[2], models=("sage norm",), name="stacks of lambda"),
]

IN_TORCH = [
    replace(column, is_on_torch_path=True, models=("sage", "gat"), shares=column.shares[-1:])
    for column in MAIN
]

ON_TWO = [*(replace(column, models=column.models[::2]) for column in MAIN), *IN_TORCH]
ON_FOUR = [
    *(replace(column, models=column.models[1::2], shares=column.shares[-1:]) for column in MAIN),
    *COLUMNS[len(MAIN) :],
]
EVERYTHING = [*COLUMNS, *IN_TORCH]
# (ranks, ranks per server, columns): one server, several of them, servers of unequal size (three ranks:
# two and one). In the default tier, two and four ranks share the models, and one trains all of them.
PLACEMENTS = [
    *((1, 1, COLUMNS), (2, 1, ON_TWO), (4, 2, ON_FOUR)),
    *wide(*((2, 1, EVERYTHING), (4, 2, COLUMNS), (3, 2, EVERYTHING), (2, 2, EVERYTHING), (3, 3, EVERYTHING))),
    *wide(*((3, 1, EVERYTHING), (4, 4, COLUMNS), (4, 1, COLUMNS))),
]
TOLERANCE = 1e-10


@functools.cache
def plain_weights(kind: str, steps: int = STEPS) -> list[Any]:
    return equality.one_process(kind, steps=steps)[0]


def difference(mine: list[Any], other: list[Any]) -> float:
    assert [w.shape for w in mine] == [w.shape for w in other]
    return max(float(np.abs(a - b).max()) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize(("ranks", "ranks_per_server", "columns"), PLACEMENTS)
def test_every_strategy_has_the_weights_of_one_process(
    folder: Path, ranks: int, ranks_per_server: int, columns: list[Column]
) -> None:
    results = run_ranks(
        equality.on_ranks,
        ranks,
        args=(str(folder), columns),
        ranks_per_server=ranks_per_server,
        timeout_s=280,
    )
    expected = {
        f"{column}/{kind}/{share}": plain_weights(kind, column.steps)
        for column in columns
        for kind in column.models
        for share in equality.shares_of(column, ranks)
    }
    for result in results:
        assert set(result) == set(expected)
        worst = {cell: difference(weights, expected[cell]) for cell, weights in result.items()}
        wrong = {cell: value for cell, value in worst.items() if not value <= TOLERANCE}
        assert not wrong


@pytest.mark.wide
def test_lambda_async_without_staleness_trains_the_weights_of_one_process(folder: Path) -> None:
    """Column `lambda async(S=0, FIFO)`: threads have no order, so all graph servers are in one."""
    with start_session() as session:
        g = DistGraph(folder, session=session)
        for graph_servers in (1, 2, 3, 4):
            for kind in MODELS:
                weights = fifo.weights_after(g, kind, graph_servers, STEPS)
                assert difference(weights, plain_weights(kind, STEPS)) <= TOLERANCE, (graph_servers, kind)


@pytest.mark.parametrize("kind", SUMS)
def test_ten_steps_move_the_weights(kind: str) -> None:
    """Else equality would be no news."""
    first = [p.detach().numpy() for p in equality.plain_model(kind).parameters()]
    moved = [np.abs(a - b).max() for a, b in zip(first, plain_weights(kind), strict=True)]
    # GAT's attention hardly feels ten steps; everything else moves by far more than the tolerance.
    assert min(moved) > 1e-6


MANY_STEPS, BATCH = 20, 4


def _targets_of_step(ids: Any, step: int) -> Any:
    """Two ranks' batches of BATCH, one after the other."""
    return ids[step * 2 * BATCH : (step + 1) * 2 * BATCH]


def _many_steps(folder: str, fanouts: list[int]) -> list[Any]:
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    rank, world_size = session.topology.rank, session.topology.world_size
    ids = equality.new_ids_of_training(g)
    size = 2 * BATCH // world_size
    batches = [_targets_of_step(ids, step) for step in range(MANY_STEPS)]
    own = torch.cat([batch[rank * size : (rank + 1) * size] for batch in batches])
    sampler = dgl.dataloading.NeighborSampler(
        fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    strategy = STRATEGIES.get("data_parallel")(session, {}).open(g)
    loader = strategy.loader(own, sampler, batch_size=size)
    model = strategy.wrap(equality.model_of("sage", g).to(session.device))
    equality.train(model, loader, 1)
    return [p.detach().cpu().numpy().copy() for p in model.parameters()]


def test_two_ranks_of_half_the_batch_are_one_process(folder: Path) -> None:
    """With every neighbour, against plain DGL."""
    results = run_ranks(_many_steps, 2, args=(str(folder), [-1, -1]), ranks_per_server=1)
    everyone = equality.plain_graph().ndata["train_mask"].nonzero()[:, 0]
    batches = [_targets_of_step(everyone, step) for step in range(MANY_STEPS)]
    assert [len(batch) for batch in batches] == [2 * BATCH] * MANY_STEPS
    plain, _ = equality.one_process("sage", batches)
    for result in results:
        assert difference(result, plain) <= TOLERANCE


def test_ranks_draw_the_same_sample_as_one(folder: Path) -> None:
    """With sampled neighbours: the draws belong to the node, not to the rank."""
    alone = run_ranks(_many_steps, 1, args=(str(folder), [2, 2]))[0]
    for result in run_ranks(_many_steps, 2, args=(str(folder), [2, 2])):
        assert difference(result, alone) <= TOLERANCE
    everyone = equality.plain_graph().ndata["train_mask"].nonzero()[:, 0]
    exact, _ = equality.one_process("sage", [_targets_of_step(everyone, step) for step in range(MANY_STEPS)])
    assert difference(alone, exact) > 1e-3


def _wrong_rules(folder: str) -> dict[str, list[Any]]:
    """Train uneven shards by the rule of torch's own DDP, and by an unweighted sum."""
    session = start_session(timeout_s=60)
    g = DistGraph(folder)
    rank, world_size = session.topology.rank, session.topology.world_size
    ids = equality.new_ids_of_training(g)
    own_ids = equality.cut(ids, SHARES["uneven"], rank, world_size)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = (
        STRATEGIES.get("data_parallel")(session, {}).open(g).loader(own_ids, sampler, batch_size=len(ids))
    )
    loader.checks_training = False
    results = {}
    # A sum is so many times DDP's mean, and plain SGD takes either times its rate.
    for rule, times in {"mean of means": 1, "unweighted sum": world_size}.items():
        model = torch.nn.parallel.DistributedDataParallel(equality.model_of("sage", g).to(session.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=times * equality.RATE)
        equality.loop(model, loader, optimizer, STEPS)
        results[rule] = [p.detach().cpu().numpy().copy() for p in model.parameters()]
    return results


def test_wrong_rules_are_told_apart(folder: Path) -> None:
    result = run_ranks(_wrong_rules, 2, args=(str(folder),))[0]
    for rule, weights in result.items():
        assert difference(weights, plain_weights("sage")) > 1e-3, rule
    assert difference(*result.values()) > 1e-3
