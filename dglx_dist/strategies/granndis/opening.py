"""From a graph, seeds and options to a loader; from a module to a model on halo blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from dglx_dist.cluster.collectives import gather_int64
from dglx_dist.errors import ConfigError
from dglx_dist.graph.opening import together
from dglx_dist.records import StepShare
from dglx_dist.sampling.opening import check_alike
from dglx_dist.strategies.base import Reduction
from dglx_dist.strategies.granndis.loader import FullGraphLoader
from dglx_dist.strategies.granndis.model import HaloModel
from dglx_dist.strategies.granndis.options import FullGraphOptions, hops_of
from dglx_dist.strategies.granndis.plan_source import OnePlan, PlanSource
from dglx_dist.strategies.granndis.planning import PlanRequest, check_one_type, make_plans
from dglx_dist.strategies.granndis.request import Request, read_request
from dglx_dist.strategies.granndis.resampled import SampledPlans

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph


def open_loader(
    strategy: str,
    g: DistGraph,
    indices: Any,
    sampler: Any,
    options: FullGraphOptions,
    loader_options: Mapping[str, Any],
) -> FullGraphLoader:
    """Return a loader of one step an epoch on all seeds; every rank must call it.

    Args:
        strategy: Name for messages.
        g: A graph of one node and one edge type.
        indices: This rank's seeds.
        sampler: Of ``dgl.dataloading``.
        options: Of the strategy.
        loader_options: What ``dglx_dist.DataLoader`` takes.

    Raises:
        ConfigError: on all ranks: see :func:`read_request` and :func:`make_plans`; or there are fewer layers
            than the option ``hops`` asks for.
        PeerError: a rank did not take part.
    """
    check_alike(g.session, f"options of {strategy}", f"{options}")
    request = read_request(strategy, g, indices, sampler, loader_options)
    hops = together(g.session, lambda: hops_of(options, request.num_layers), ConfigError)
    return FullGraphLoader(g, _source(g, request, hops, options), request, use_pp=options.use_pp)


def _source(g: DistGraph, request: Request, hops: int, options: FullGraphOptions) -> PlanSource:
    seeds, num_layers, split = request.seeds, request.num_layers, options.split
    if options.eas is not None:
        wanted = PlanRequest(seeds=seeds, num_layers=num_layers, hops=hops, split=split)
        return SampledPlans(g, wanted, options.eas, seed=request.seed)
    plan = make_plans(g, seeds, num_layers, hops, split=split)
    counts = gather_int64([plan.seeds], g.session)
    return OnePlan(plan, StepShare(num_local=plan.seeds, num_global=int(counts.sum())))


def wrap_model(
    strategy: str, model: nn.Module, g: DistGraph, options: FullGraphOptions, reduction: Reduction
) -> HaloModel:
    """Return ``model`` on halo blocks; every rank must call it.

    Raises:
        ConfigError: there are several types; or as :class:`HaloModel`.
    """
    check_one_type(strategy, g)
    return HaloModel(model, g.session, reduction=reduction, bucket_bytes=options.bucket_bytes)
