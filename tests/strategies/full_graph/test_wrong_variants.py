"""Mistakes that other implementations make leave other weights: equality is no accident."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.full_graph import loader as loader_module
from dglx_dist.strategies.full_graph import plan_builder
from dglx_dist.strategies.full_graph.loader import FullGraphLoader, PlanMaker, PlanSource, PlanSpec
from dglx_dist.strategies.full_graph.model import install
from dglx_dist.strategies.full_graph.options import read_request
from dglx_dist.strategies.full_graph.plan_builder import make_plans
from tests.helpers.ranks import run_ranks
from tests.strategies.full_graph import runs
from tests.strategies.test_equality import TOLERANCE, difference

EPOCHS = 6
Wrap = Callable[[DistGraph, Any, nn.Module], Any]


def right(g: DistGraph, strategy: Any, model: nn.Module) -> Any:
    return strategy.wrap(model)


def mean_of_means(g: DistGraph, strategy: Any, model: nn.Module) -> Any:
    """Average the means of all ranks, as torch's own DDP does."""
    wrapped = strategy.wrap(model, "sum")
    return lambda blocks, x: _scale_gradient(wrapped(blocks, x), 1 / g.session.topology.world_size)


def weighed_at_parameters(g: DistGraph, strategy: Any, model: nn.Module) -> Any:
    """The halo's gradients then count as those of a rank that has other targets."""
    install(model)
    return STRATEGIES.get("data_parallel")(g.session, {}).open(g).wrap(model)


def without_adjoint(g: DistGraph, strategy: Any, model: nn.Module) -> Any:
    """Rows of the halo as constants."""
    module: Any = model
    for conv in module.convs:
        conv.register_forward_pre_hook(_detach_halo)
    return strategy.wrap(model)


def _scale_gradient(scores: Tensor, factor: float) -> Tensor:
    return scores.detach() + (scores - scores.detach()) * factor


def _detach_halo(module: nn.Module, given: Any) -> Any:
    block, rows = given
    all_rows = block.all_rows(rows)
    return block, torch.cat([all_rows[: block.own_rows], all_rows[block.own_rows :].detach()])


WRONG: dict[str, Wrap] = {
    "mean of means": mean_of_means,
    "weighed at parameters": weighed_at_parameters,
    "without adjoint": without_adjoint,
}


def train(g: DistGraph, wrap: Wrap, kind: str) -> list[Any]:
    strategy, loader = runs.open_loader(g, "full_graph")
    return steps_on(loader, runs.first_model(kind), lambda model: wrap(g, strategy, model))


def steps_on(loader: Any, module: nn.Module, wrap: Callable[[nn.Module], Any]) -> list[Any]:
    return runs.train(module, wrap(module), runs.batches_of(loader), epochs=EPOCHS)


def counting_replicas(g: DistGraph) -> list[Any]:
    """Every server's loss on all training nodes that it holds, those of other servers included."""
    is_training = g.ndata["train_mask"][:]
    held = make_plans(g, g.local_nodes(), 1, 1).nodes
    seeds = torch.from_numpy(held)[is_training[held]]
    maker = PlanMaker(g, seeds.numpy())
    with pytest.MonkeyPatch.context() as patched:
        # Each server, of one rank, keeps the seeds that its rank gave.
        patched.setattr(plan_builder, "_split_by_leader", lambda context, ids: {context.topology.rank: ids})
        plans = PlanSource(g, maker, PlanSpec(num_layers=2, hops=2))
    assert plans.share(0, plans.plan(0, 0)).num_global > int(is_training.sum())
    request = read_request("full_graph", g, seeds, runs.sampler(), {})
    loader = FullGraphLoader(g, plans, request, use_pp=True)
    strategy: Any = STRATEGIES.get("full_graph")(g.session, {}).open(g)
    return steps_on(loader, runs.first_model("sage"), lambda model: strategy.wrap(model))


def on_rank(folder: str) -> dict[str, list[Any]]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        results = {name: train(g, wrap, "sage") for name, wrap in WRONG.items()}
        results["right"] = train(g, right, "sage")
        results["replicas count"] = counting_replicas(g)
        results["right norm"] = train(g, right, "gcn_symmetric")
        # Degrees of the piece of the graph in place of those of the whole.
        made = loader_module.halo_block
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                loader_module, "halo_block", lambda *args, **named: made(*args, etype=named["etype"])
            )
            results["degrees of a piece"] = train(g, right, "gcn_symmetric")
        g.barrier()
        return results


def test_mistakes_are_told_apart(folder: Path) -> None:
    expected = {
        kind: runs.one_process(runs.first_model(kind), epochs=EPOCHS) for kind in ("sage", "gcn_symmetric")
    }
    for result in run_ranks(on_rank, 3, args=(str(folder),), ranks_per_server=1):
        assert difference(result["right"], expected["sage"]) <= TOLERANCE
        assert difference(result["right norm"], expected["gcn_symmetric"]) <= TOLERANCE
        for name in WRONG:
            assert difference(result[name], expected["sage"]) > 1e-4, name
        assert difference(result["replicas count"], expected["sage"]) > 1e-4
        assert difference(result["degrees of a piece"], expected["gcn_symmetric"]) > 1e-4
