"""Full-graph plans of all ranks made by one process, against plain counts of the same graph."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.reader import open_dataset, open_structure
from dglx_dist.graph.structure import ReplicatedStructure
from dglx_dist.planner.model_shape import topology_of
from dglx_dist.planner.profile import busy_cores, time_on_plans
from dglx_dist.planner.workload import stats_of_dataset
from dglx_dist.records import EDGE_TYPE
from dglx_dist.strategies.cost import PartitionContext
from dglx_dist.strategies.full_graph.cost import (
    FullGraphScheme,
    full_work_of,
    plan_trials,
)
from dglx_dist.strategies.full_graph.memory_estimate import StepSizes
from dglx_dist.strategies.full_graph.plan_builder import plan_all, seeds_by_server
from dglx_dist.training.models import build_model
from tests.planner.hand_made import shape_of_kind
from tests.strategies import equality

LAYERS = 3


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PartitionContext, np.ndarray]:
    folder = equality.write_parts(tmp_path_factory.mktemp("plans"))
    dataset, csc = open_dataset(folder), open_structure(open_dataset(folder), EDGE_TYPE)
    offsets = dataset.manifest.node_offsets["_N"]
    mask = np.concatenate([dataset.part(part).node_data("_N", "train_mask") for part in range(4)])
    structure = ReplicatedStructure(EDGE_TYPE, len(mask), csc.indptr, csc.indices)
    found = PartitionContext(
        structure=structure,
        bounds=np.array([0, int(offsets[2]), int(offsets[4])]),
        topology=topology_of(2, 2),
        seed=0,
    )
    return folder, found, np.flatnonzero(mask)


def test_trials_are_the_neighbourhoods_of_a_server(
    context: tuple[Path, PartitionContext, np.ndarray],
) -> None:
    """The largest is what the server's ranks compute together, and the model runs on it by itself."""
    _, where, seeds = context
    alone = replace(where, topology=topology_of(2, 1))
    plan = plan_all(alone, seeds_by_server(alone, seeds), LAYERS, LAYERS)[1]
    *smaller, whole = plan_trials(alone, seeds, LAYERS, server=1)
    edges, sources = [len(one.indices) for one in plan.layers], [one.num_sources for one in plan.layers]
    targets = [one.targets for one in plan.layers]
    assert [block.num_edges() for block in whole] == edges
    assert [block.num_src_nodes() for block in whole] == sources
    assert [block.num_dst_nodes() for block in whole] == targets
    assert [len(blocks) for blocks in smaller] == [LAYERS] * 2
    assert smaller[0][0].num_edges() < whole[0].num_edges()
    shape = shape_of_kind("sage", 6, 4, 3, LAYERS)
    model = build_model("sage", 6, 4, 3, LAYERS)
    with busy_cores(1):
        found = time_on_plans(model, shape, [*smaller, whole], time.thread_time)
    assert found[0][2].tolist() == [1.0, *shape.work(sources, targets, edges)]
    assert time_on_plans(nn.Linear(6, 3), shape, [whole], time.thread_time) is None


def test_the_cut_is_that_of_the_servers(context: tuple[Path, PartitionContext, np.ndarray]) -> None:
    folder, where, _ = context
    csc = open_structure(open_dataset(folder), EDGE_TYPE)
    server_of = np.searchsorted(where.bounds, np.arange(500), side="right") - 1
    targets = np.repeat(np.arange(500), np.diff(csc.indptr))
    crossing = np.count_nonzero(server_of[targets] != server_of[csc.indices])
    assert stats_of_dataset(open_dataset(folder), 2).edge_cut == pytest.approx(crossing / len(csc.indices))
    assert stats_of_dataset(open_dataset(folder), 1).edge_cut == 0.0


def test_more_cooperative_batches_than_seeds_are_counted(
    context: tuple[Path, PartitionContext, np.ndarray],
) -> None:
    folder, where, seeds = context
    with start_session() as session:
        run: Any = SimpleNamespace(g=SimpleNamespace(session=session), partition=where, in_job=False)
        run.graph, run.num_layers = stats_of_dataset(open_dataset(folder), 2), LAYERS
        run.seeds = seeds[[0, 1, -1]]
        work = FullGraphScheme(LAYERS, cooperative_batches=8).count(run)
    assert work.steps == 2, "the servers have 2 seeds and 1"


def test_steps_are_summed_and_the_busiest_found() -> None:
    """Two ranks, two steps of one layer; rank 1 has more edges, and server 0 sends what server 1 receives."""

    def sizes(edges: int, received: list[int]) -> list[int]:
        return [10, 5, 10 + edges, edges, edges + 1, 3, *received]

    steps = [[sizes(1, [0, 0]), sizes(4, [2, 0])], [sizes(2, [0, 1]), sizes(6, [7, 0])]]
    work = full_work_of(np.array(steps), topology_of(2, 1))
    assert work.worked == ((30,), (10,), (10,))
    assert work.largest == StepSizes(rows=(10, 5), sources=(16,), edges=(6,), sent=(7,))
    assert (work.outside, work.card_rows) == ((10,), (9,))
    assert (work.external_rows, work.steps) == (12, 2)
