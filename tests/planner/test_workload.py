"""Work of a batch, estimated and counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.api import init
from dglx_dist.cli.plan_job import make_plan
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.measure import MeasureConfig, measure
from dglx_dist.planner.model_shape import shape_of_module, topology_of
from dglx_dist.planner.workload import RankCount, RowSizes, work_of_counts
from dglx_dist.prepare import PartitionPlan, partition_to_disk
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.strategies.cost import BatchWork, CacheHits, Draws
from dglx_dist.strategies.full_graph import cost
from dglx_dist.training.config import PlanConfig
from dglx_dist.training.models import build_model
from tests.helpers.ranks import run_ranks
from tests.planner.hand_made import CLUSTER

SIZES = RowSizes(feature=40, label=8, gradients=100, partitioned=False)
BUSY = RankCount(
    seeds=45,
    steps=5,
    counted=2,
    remote_rows=[0, 60],
    remote_seeds=4,
    sources=[200, 60],
    targets=[60, 20],
    edges=[400, 100],
    requested=0,
    returned=0,
    largest=[[110, 30], [30, 10], [210, 55]],
)
IDLE = RankCount(**{name: (0 * np.array(value)).tolist() for name, value in vars(BUSY).items()})


def test_some_batches_stand_for_as_many_seeds_as_there_are() -> None:
    """2 of 5 batches have 20 of the 45 seeds, for the last batch has 5; a rank without seeds adds nothing."""
    found = work_of_counts([BUSY, IDLE], topology_of(2, 1), SIZES)
    assert not found.counted
    assert found.steps == 5
    assert found.survey.remote_rows == 60 * 45 / 20
    assert found.survey.feature_bytes == 48 * 135
    assert found.survey.label_bytes == 16 * 9
    assert found.worked == ((450, 135), (135, 45), (900, 225))
    assert found.largest == ((110, 30), (30, 10), (210, 55))
    without = work_of_counts([BUSY, IDLE], topology_of(2, 1), replace(SIZES, label=None))
    assert without.survey.label_bytes == 0


def test_hits_of_ranks_are_summed_and_a_cache_is_as_large_as_the_largest() -> None:
    """Of the busy rank 2 of 5 batches were counted, so its 40 hits are of 20 of 45 seeds."""
    cache = {"policy": "vip", "alpha": 0.5}
    ranks = [
        replace(BUSY, caches=[{**cache, "hits": 40, "once_rows": 7, "server_bytes": 70, "rank_bytes": 1}]),
        replace(IDLE, caches=[{**cache, "hits": 0, "once_rows": 5, "server_bytes": 50, "rank_bytes": 3}]),
    ]
    found = work_of_counts(ranks, topology_of(2, 1), SIZES).caches
    assert found == (CacheHits(**cache, hits=90, once_rows=12, server_bytes=70, rank_bytes=3),)  # type: ignore[arg-type]


def measure_some(data: str) -> BatchWork:
    with init(seed=0) as session:
        g = DistGraph(data, session=session)
        model = build_model("sage", 4, 4, 2)
        shape = shape_of_module(model, 4, 2)
        draws = Draws(fanouts=(2, 2), batch_size=4, most_batches=2)
        known, _ = measure(g, model, shape, MeasureConfig(cluster=CLUSTER, draws=draws, in_job=True))
        g.close()
    return known.mini_batches


def test_ranks_count_the_same_epochs_if_only_one_has_seeds_left(tmp_path: Path) -> None:
    """17 seeds in batches of 4: after two batches rank 1 has none, and rank 0 has one."""
    raw = generate(SyntheticConfig(nodes=68, degree=4, features=4, classes=2, seed=3))
    raw.node_data[NODE_TYPE]["train_mask"][:] = np.arange(68) % 4 == 0
    partition_to_disk(raw, tmp_path / "data", PartitionPlan(num_parts=2, method="contiguous"))
    first, second = run_ranks(
        measure_some, 2, args=(str(tmp_path / "data"),), ranks_per_server=1, timeout_s=60
    )
    assert first == second
    assert (sorted(first.survey.seeds_per_rank), first.steps, first.counted) == ([8, 9], 3, False)
    assert {one.policy for one in first.caches} == {"vip", "lookahead"}


def test_figures_alone_come_near_what_is_counted(tmp_path: Path) -> None:
    """A random graph without communities, cut at random: what the formulas are exact for on average."""
    config = SyntheticConfig(
        nodes=6000, degree=10, features=16, homophily=0.0, locality=0.0, exponent=9.0, train_rate=0.2, seed=3
    )
    raw = generate(config)
    raw = replace(  # The one node type may have any name.
        raw,
        num_nodes={"user": config.nodes},
        edges={("user", "knows", "user"): raw.edges[EDGE_TYPE]},
        node_data={"user": raw.node_data[NODE_TYPE]},
        edge_data={},
        num_classes={"user": raw.num_classes[NODE_TYPE]},
    )
    partition_to_disk(raw, tmp_path / "graph", PartitionPlan(num_parts=2, method="random"))
    common = {"hidden": 8, "fanouts": (5, 5), "batch_size": 100, "servers": 2, "unit": "any"}
    counted = make_plan(PlanConfig(data=str(tmp_path / "graph"), dry_batches=0, **common))  # type: ignore[arg-type]
    graph = counted.graph
    told = make_plan(
        PlanConfig(
            nodes=graph.nodes,
            edges=graph.edges,
            features=16,
            classes=graph.classes,
            train_share=graph.train_nodes / graph.nodes,
            edge_cut=graph.edge_cut,
            degree_spread=graph.degree_spread,
            **common,  # type: ignore[arg-type]
        )
    )
    strategies = [{one.candidate.strategy for one in choice.predictions} for choice in (told, counted)]
    assert strategies[0] == strategies[1]
    assert not any(one.bytes_exact or one.candidate.labor for one in told.predictions)
    by_name = {one.candidate.name: one for one in told.predictions}
    for one in counted.predictions:
        if one.candidate.name in ("data_parallel", "push_pull structure=push", "full_graph"):
            assert by_name[one.candidate.name].inter_server_bytes == pytest.approx(
                one.inter_server_bytes, rel=0.25
            )


def test_figures_that_make_no_sense_are_refused() -> None:
    for wrong, message in (
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 1e30}, "--nodes 1e.30 must be from 1 to"),
        ({"nodes": float("nan")}, "--nodes nan"),
        ({"edge_cut": 2.0}, "--edge-cut 2"),
        ({"train_share": 0.0}, "--train-share 0"),
        ({"degree_spread": 0.5}, "--degree-spread 0.5"),
    ):
        figures: dict[str, Any] = {"nodes": 10, "edges": 1, "features": 1}
        with pytest.raises(ConfigError, match=message):
            make_plan(PlanConfig(**figures | wrong))
    with pytest.raises(ConfigError, match="folder DIR of a partitioned dataset, or the figures"):
        PlanConfig()
    with pytest.raises(ConfigError, match="--layers is 2"):
        PlanConfig(data="x", fanouts=(1, 2, 3))


def test_plans_that_the_memory_cannot_hold_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = generate(SyntheticConfig(nodes=400, degree=6, features=4, seed=3))
    partition_to_disk(raw, tmp_path / "data", PartitionPlan(num_parts=2, method="hash"))
    plan = PlanConfig(data=str(tmp_path / "data"), servers=2, layers=2, hidden=4, unit="full_graph")
    said = "plans of whole graphs are too large to be counted"
    for free, expected in ((100 * raw.total_edges, False), (100 * raw.total_edges - 1, True)):
        monkeypatch.setattr(cost, "machine_memory", lambda free=free: (free, free))
        choice = make_plan(plan)
        assert any(said in one for one in choice.assumptions) is expected
