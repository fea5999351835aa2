"""Variants of the experiments beside peers: one system under one setting each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dglx_dist.errors import ConfigError
from dglx_dist.planner.records import Rate
from scripts.bench import data
from scripts.bench.peers import phases
from scripts.bench.peers.data import Written
from scripts.bench.peers.launch import KIND, Launch
from scripts.bench.peers.versions import versions
from scripts.bench.peers.workload import Workload
from scripts.bench.records import Job, Shape, Variant

TWO_SERVERS = Shape(servers=2, cpus=1.0)
GIGABIT = Rate.parse("1gbit")

HOW = (
    "Both systems are launched anew for every repetition, with processes of their own, on the same emulated "
    "servers: same model on unchanged dgl.nn, same initial weights, fan-outs, batch size and optimiser; each "
    "rank has the same training nodes in every epoch. One epoch warms up and two are measured, between "
    "barriers. One thread for each process, and one core for each trainer and what else its server runs. "
    "Bytes of peers are the cards'; memory is that of a server's processes together, shared pages once, "
    "divided by its ranks."
)


def variant(
    name: str,
    launch: Launch,
    *,
    shape: Shape = TWO_SERVERS,
    rate: Rate | None = None,
) -> Variant:
    """Return a variant that launches ``launch`` for every repetition; one epoch of one launch warms up."""
    job = Job(kind=KIND, params=launch.params(), warm={"epochs": 1, "warmup": 0})
    return Variant(name=name, shape=shape, job=job, rate=rate)


def launch_of(system: str, workload: Workload, written: Written, **settings: Any) -> Launch:
    """Return a launch of ``system`` on its own copy of ``written``.

    Raises:
        ConfigError: the graph was not written in the format of ``system``.
    """
    path = {"stock": written.dgl, "pyg": written.arrays}.get(system, written.ours)
    if path is None:
        raise ConfigError(f"the graph of {system} is not written; ask prepare() for its format")
    return Launch(system=system, workload=workload, data=str(path), **settings)


def facts(written: Written, systems: tuple[str, ...]) -> Mapping[str, Any]:
    """Return what the report shows beside the figures, JSON values."""
    return {
        **data.facts(written.ours),
        "versions": versions(),
        "phases": {system: phases.told(system) for system in systems},
    }
