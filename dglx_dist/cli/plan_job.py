"""Plan for ``dglx plan``: find the fastest strategy for ready-made models on real or hypothetical servers."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import nn

from dglx_dist.api import init
from dglx_dist.comm.devices import count_gpus, get_device_memory
from dglx_dist.data.storage.manifest import read_manifest
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.memory import machine_memory
from dglx_dist.planner.auto import batch_assumptions, plan_draws
from dglx_dist.planner.choose import choose
from dglx_dist.planner.config import PlanConfig
from dglx_dist.planner.costs.base import EpochCounts, TypedFeatures
from dglx_dist.planner.measure import CountConfig, count, predict_and_time
from dglx_dist.planner.model_shape import describe_relational, infer_shape
from dglx_dist.planner.records import Choice, ChoiceOptions, Cluster, Draws, ModelShape, Prediction, Rate
from dglx_dist.planner.workload import check_plannable
from dglx_dist.records import FEATURE
from dglx_dist.report.tables import plural
from dglx_dist.strategies.base import DEFAULT_STRATEGY
from dglx_dist.training.model_kinds import RELATIONAL_KINDS
from dglx_dist.training.models import build_model
from dglx_dist.training.relational import build_relational

Notify = Callable[[str], None]

_PAYLOAD = 0.94
"""Share of a link's rate that carries payload. Headers and acknowledgements take what remains."""
_LOOPBACK_BYTES_PER_S = 1.2e9
"""Rate of sockets between processes on the same server."""
_DEFAULT_RATE = "1gbit"
_MAX_FOREIGN_CORES = 0.3
"""Cores that other programs may use while the model is timed, without a warning."""
_EPOCH = 1
"""Counted epoch. The first one only warms the caches."""


def read_constraints(plan: PlanConfig) -> ChoiceOptions:
    """Return the constraints for the choice. Without mini-batches, it is among whole graphs."""
    if plan.unit == "mini_batch" and _plan_draws(plan) is None:
        return replace(plan, unit="full_graph")
    return plan


def _plan_draws(plan: PlanConfig) -> Draws | None:
    return plan_draws(plan, plan.layers, plan.fanouts, plan.batch_size, epoch=_EPOCH)


def make_plan(plan: PlanConfig, notify: Notify | None = None) -> Choice:
    """Count and time every way to train, and choose one. ``notify`` is told about each step.

    One process calls this. Raises ConfigError if the dataset lacks data for training, or parts for the
    servers, and StorageError if the dataset is damaged.
    """
    counts, predictions = measure(plan, notify)
    return choose(predictions, counts, read_constraints(plan))


def measure(plan: PlanConfig, notify: Notify | None = None) -> tuple[EpochCounts, list[Prediction]]:
    """Count and time like :func:`make_plan`, and return all candidates' costs."""
    folder = plan.data
    assert folder is not None, "a PlanConfig has a dataset"
    ntype = check_plannable(read_manifest(Path(folder)), folder)
    cluster = build_cluster(plan)

    # The model is timed with as many threads as a rank in the plan would have.
    previous_threads = torch.get_num_threads()
    planned_cores = max(int(cluster.cores), 1)
    torch.set_num_threads(min(planned_cores, _count_usable_cores()))
    try:
        with init(DEFAULT_STRATEGY, seed=plan.seed, device=plan.device) as session:
            cluster = _add_gpus(plan, cluster, session.device)
            g = DistGraph(folder, structure="replicated", session=session)
            result = _measure_on(plan, g, ntype, cluster, notify)
            g.close()
    finally:
        torch.set_num_threads(previous_threads)
    return result


def _count_usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _add_gpus(plan: PlanConfig, cluster: Cluster, device: torch.device) -> Cluster:
    """Add the memory of a rank's GPU to ``cluster``, if ``device`` is one."""
    limit = plan.device_memory_bytes
    if device.type != "cuda":
        if limit is not None:
            raise ConfigError(
                "--device-memory is for GPUs, but the model is timed on the CPU here. "
                "Leave it out, or plan on a machine with a GPU."
            )
        return cluster

    if limit is not None:
        return replace(cluster, device_memory_bytes=limit)
    # The negations round up: with more ranks than GPUs, some ranks share one.
    ranks_per_gpu = -(-plan.ranks_of_machine // count_gpus())
    limit = get_device_memory(device) // ranks_per_gpu
    assumption = f"{limit / 1e9:.1f} GB of GPU memory per rank, as on this machine (--device-memory)"
    return replace(cluster, device_memory_bytes=limit, assumptions=(*cluster.assumptions, assumption))


def _build_model(plan: PlanConfig, g: DistGraph, ntype: str) -> tuple[nn.Module, ModelShape]:
    """Build the model that ``dglx train`` would build for ``ntype``, and describe its shape."""
    classes = g.num_classes(ntype)
    if plan.model in RELATIONAL_KINDS:
        columns = {name: g.nodes[name].data for name in g.ntypes}
        widths = {name: data[FEATURE].shape[1] for name, data in columns.items() if FEATURE in data}
        features = TypedFeatures(etypes=tuple(g.canonical_etypes), widths=widths)
        relational = build_relational(plan, g, widths, classes, [ntype])
        return relational, describe_relational(relational, features, classes, kind=plan.model)

    if not g.is_homogeneous:
        raise ConfigError(
            f"{plan.data} has {len(g.ntypes)} node and {len(g.canonical_etypes)} edge types, "
            f"but --model {plan.model} supports one of each. Use --model "
            f"{' or '.join(RELATIONAL_KINDS)}."
        )

    width = g.ndata[FEATURE].shape[1]
    sizes = (width, plan.hidden, classes, plan.layers)
    module = build_model(plan.model, *sizes, heads=plan.heads, graph=g, **plan.between)
    return module, infer_shape(module, width, classes, plan.layers, kind=plan.model, hidden=plan.hidden)


def _measure_on(
    plan: PlanConfig, g: DistGraph, ntype: str, cluster: Cluster, notify: Notify | None
) -> tuple[EpochCounts, list[Prediction]]:
    """Count and time on the opened graph ``g``. Add an assumption if other programs disturb the timing."""
    with torch.random.fork_rng(devices=[]):
        module, shape = _build_model(plan, g, ntype)
    module.to(g.session.device)

    usable_cores = _count_usable_cores()
    assumptions = list(batch_assumptions(plan.unit, plan.layers, plan.fanouts))
    if cluster.cores > usable_cores:
        cores = plural(cluster.cores, "core")
        assumptions.append(
            f"a rank with {cores} computes as fast as the {usable_cores} cores here that timed it"
        )

    # The structure has an 8-byte offset for each node, and a 4-byte source for each edge.
    structure_bytes = 8 * g.num_nodes() + 4 * g.num_edges()
    config = CountConfig(
        cluster=cluster,
        draws=_plan_draws(plan),
        caches=g.is_homogeneous,
        ntype=ntype,
        partitioned=_is_partitioned(plan, structure_bytes),
        epoch=_EPOCH,
        assumptions=tuple(assumptions),
    )
    counts, candidates = count(g, shape, config, notify)

    if notify is not None:
        notify("the model on some batches and plans")
    begin = _CpuTimes.read()
    predictions = predict_and_time(g, module, counts, candidates, ntype)
    foreign_cores = _CpuTimes.read().count_foreign_cores(begin)
    if foreign_cores > _MAX_FOREIGN_CORES:
        warning = (
            f"other programs used {foreign_cores:.1f} of {usable_cores} cores while the model "
            "was timed, so compute seconds are too long and differ between plans; plan again "
            "on an idle machine"
        )
        counts = replace(counts, assumptions=(*counts.assumptions, warning))
    return counts, predictions


@dataclass(frozen=True)
class _CpuTimes:
    """Seconds at one moment."""

    wall: float
    machine: float
    """CPU time that all processes have used on all cores since the machine started."""
    process: float
    """CPU time that this process has used."""

    @classmethod
    def read(cls) -> "_CpuTimes":
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system
        return cls(time.perf_counter(), busy, time.process_time())

    def count_foreign_cores(self, begin: "_CpuTimes") -> float:
        """Return how many cores other processes have used on average since ``begin``."""
        foreign = (self.machine - begin.machine) - (self.process - begin.process)
        return foreign / max(self.wall - begin.wall, 1e-9)


def build_cluster(plan: PlanConfig) -> Cluster:
    """Describe the servers in the plan. Default values are listed as assumptions."""
    assumptions = []
    external = plan.external or Rate.parse(_DEFAULT_RATE)
    if plan.external is None and plan.servers > 1:
        assumptions.append(f"{external} between servers (--bandwidth-external)")

    internal_bytes_per_s = _LOOPBACK_BYTES_PER_S
    if plan.internal is not None:
        internal_bytes_per_s = _PAYLOAD * plan.internal.bits_per_s / 8
    elif plan.per_server > 1:
        rate = f"{internal_bytes_per_s / 1e9:g} GB/s"
        assumptions.append(f"{rate} between the ranks of a server (--bandwidth-internal)")

    sharing = plan.ranks_of_machine
    where = "all servers share this machine" if plan.here else "each server is like this machine"
    cores = plan.cores
    if cores is None:
        cores = _count_usable_cores() / sharing
        assumptions.append(f"{cores:g} cores per rank: {where} (--cores, --here)")
    memory = plan.memory_bytes
    if memory is None:
        memory = machine_memory()[0] // sharing
        assumptions.append(f"{memory / 1e9:.1f} GB of memory per rank: {where} (--memory)")

    return Cluster(
        servers=plan.servers,
        ranks_per_server=plan.per_server,
        external_bytes_per_s=_PAYLOAD * external.bits_per_s / 8,
        internal_bytes_per_s=internal_bytes_per_s,
        cores=cores,
        memory_bytes=memory,
        device_memory_bytes=plan.device_memory_bytes or 0,
        assumptions=tuple(assumptions),
    )


def _is_partitioned(plan: PlanConfig, structure_bytes: int) -> bool:
    """Return whether the servers would cut the structure: on request, or if it fills half a machine."""
    if plan.servers == 1:
        return False
    if plan.structure != "auto":
        return plan.structure == "partitioned"

    # Servers on the same machine map one copy of the structure.
    machine_bytes = machine_memory()[0]
    if plan.memory_bytes is not None:
        machine_bytes = plan.memory_bytes * plan.ranks_of_machine
    return structure_bytes > machine_bytes // 2
