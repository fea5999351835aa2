"""Helpers of several experiments: the built-in graph, and variants that train on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dglx_dist.data.synthetic import SyntheticConfig
from dglx_dist.planner.records import Rate
from scripts.bench.records import BenchPlan, ExperimentPlan, Job, MatchedPhi, Ratio, Shape, Variant

GIGABIT = Rate.parse("1gbit")


def builds(
    names: Iterable[str], plan_at: Callable[[str, BenchPlan, Any], ExperimentPlan], sizes: Mapping[str, Any]
) -> dict[str, Callable[[BenchPlan], ExperimentPlan]]:
    """Return what builds each experiment at the size of the suite, of papers where it has none."""

    def build(name: str, plan: BenchPlan) -> ExperimentPlan:
        return plan_at(name, plan, sizes.get(plan.suite, sizes["papers"]))

    return {name: partial(build, name) for name in names}


def clustered_graph(plan: BenchPlan, **more: Any) -> SyntheticConfig:
    """Return the built-in graph with communities that METIS finds; ``more``: nodes, degree, ..."""
    return SyntheticConfig(**{"homophily": 0.95, "locality": 0.98, "seed": plan.seed + 1, **more})


def training_variant(
    name: str,
    folder: Path,
    params: Mapping[str, Any],
    *,
    curve: Mapping[str, Any] | None = None,
    **where: Any,
) -> Variant:
    """Return a variant of the job "train" on the dataset in ``folder``.

    ``params`` are fields of ``jobs.params.TrainParams``, ``where`` are arguments of :func:`of_job`.
    """
    drawn = None if curve is None else {"accuracy": True, **curve}
    return of_job(name, "train", {"data": str(folder), **params}, curve=drawn, **where)


def of_job(
    name: str,
    kind: str,
    params: Mapping[str, Any],
    *,
    shape: Shape,
    rate: Rate | MatchedPhi | None = None,
    curve: Mapping[str, Any] | None = None,
    simulated: str = "",
) -> Variant:
    """Return a variant of a job, one epoch of which warms up.

    ``curve``: what of ``params`` is different where accuracy is drawn from the first epoch on.
    """
    return Variant(
        name=name,
        shape=shape,
        job=Job(kind=kind, params=params, warm={"warmup": 0, "epochs": 1}),
        rate=rate,
        curve=None if curve is None else Job(kind=kind, params={**params, "warmup": 0, **curve}),
        simulated=simulated,
    )


def quotient(*, over: str, under: str, name: str = "", **more: Any) -> Ratio:
    """Return the ratio of two variants; ``name``: in place of "OVER / UNDER"."""
    return Ratio(name=name or f"{over} / {under}", over=over, under=under, **more)


def bytes_quotient(over: str, under: str, name: str = "", **more: Any) -> Ratio:
    """Return the ratio of what two variants send between servers."""
    name = name or f"bytes, {over} / {under}"
    return Ratio(name=name, over=over, under=under, quantity="bytes_outside", **more)


def predicted_time(phi: float, kappa: float, beta: float) -> float:
    """Return (1 - phi) kappa + phi beta: the time of a variant relative to the baseline.

    phi: share of the baseline's time on the network; kappa, beta: work and bytes relative to it. Nothing
    overlaps, because a layer waits for its rows; traffic within a server is free.
    """
    return (1.0 - phi) * kappa + phi * beta
