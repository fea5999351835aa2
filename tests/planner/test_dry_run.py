"""Full-graph plans of all ranks made by one process, against plain counts of the same graph."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.reader import open_dataset, open_structure
from dglx_dist.errors import ConfigError
from dglx_dist.planner.costs.full_graph import FullGraphScheme, StepSizes, build_blocks, decode_work
from dglx_dist.planner.measure import time_step
from dglx_dist.planner.model_shape import build_topology
from dglx_dist.planner.workload import count_block_sizes, read_graph_stats
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.strategies.full_graph.plan_builder import make_all_plans, split_by_server
from dglx_dist.training.models import build_model
from tests.strategies.full_graph.plan_cases import NUM_NODES, plain_context

LAYERS = 3


def test_blocks_of_a_plan_are_as_large_as_it_is_and_the_model_runs_on_them() -> None:
    where, seeds = plain_context(2, 1), np.arange(3, NUM_NODES, 11)
    plan = make_all_plans(where, split_by_server(where, seeds), LAYERS, 1)[1]
    sizes = [[layer.num_sources, layer.targets, len(layer.indices)] for layer in plan.layers]
    sources, targets, edges = zip(*sizes, strict=True)
    blocks = build_blocks(plan)
    assert count_block_sizes(blocks) == ([*sources], [*targets], [*edges])
    assert time_step(build_model("sage", 6, 4, 3, LAYERS), blocks, 6) > 0
    with pytest.raises(ConfigError, match="no parameters to train"):
        time_step(nn.Identity(), blocks, 6)


def test_the_cut_is_that_of_the_servers(folder: Path) -> None:
    dataset = open_dataset(folder)
    csc, offsets = open_structure(dataset, EDGE_TYPE), dataset.manifest.node_offsets[NODE_TYPE]
    # The first two of four parts are those of server 0.
    targets = np.repeat(np.arange(len(csc.indptr) - 1), np.diff(csc.indptr))
    crossing = np.count_nonzero((targets < offsets[2]) != (csc.indices < offsets[2]))
    assert read_graph_stats(dataset, 2).edge_cut == pytest.approx(crossing / len(csc.indices))
    assert read_graph_stats(dataset, 1).edge_cut == 0.0


def test_more_cooperative_batches_than_seeds_are_counted() -> None:
    with start_session() as session:
        run: Any = SimpleNamespace(
            g=SimpleNamespace(session=session),
            partition=plain_context(2, 2),
            graph=SimpleNamespace(edges=300),
            num_layers=LAYERS,
            in_job=False,
            ranks_here=range(4),
            plan_seeds=np.array([3, 4, 100]),
        )
        work = FullGraphScheme(LAYERS, cooperative_batches=8).count(run)
    assert work.steps == 2, "the servers have 2 seeds and 1"


def test_steps_are_summed_and_the_largest_is_kept() -> None:
    """Two ranks, two steps of one layer; rank 1 has more edges, and server 0 sends what server 1 receives."""

    def sizes(edges: int, received: list[int]) -> list[int]:
        return [10, 5, 10 + edges, edges, edges + 1, 3, *received, 0, 0]

    steps = [[sizes(1, [0, 0]), sizes(4, [2, 0])], [sizes(2, [0, 1]), sizes(6, [7, 0])]]
    work = decode_work(np.array(steps), build_topology(2, 1))
    assert work.largest == StepSizes(rows=(10, 5), sources=(16,), edges=(6,), sent=(7,))
    assert (work.outside, work.inside) == ((10,), (0,))
    assert (work.external_rows, work.steps) == (12, 2)
