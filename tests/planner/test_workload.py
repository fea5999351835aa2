"""Work of a batch, estimated and counted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.api import init
from dglx_dist.cli.plan_job import make_plan
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.synthetic import SyntheticConfig, generate
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.planner.config import PlanConfig
from dglx_dist.planner.costs import full_graph
from dglx_dist.planner.costs.base import BatchWork, CacheHits
from dglx_dist.planner.measure import CountConfig, count
from dglx_dist.planner.model_shape import build_topology, infer_shape
from dglx_dist.planner.records import Draws
from dglx_dist.planner.workload import RankCount, RowSizes, combine_counts
from dglx_dist.records import NODE_TYPE
from dglx_dist.training.models import build_model
from tests.helpers.ranks import run_ranks
from tests.planner.hand_made import CLUSTER

SIZES = RowSizes(features={"_N": 40}, label=8, gradients=100, partitioned=False)
BUSY = RankCount(
    seeds=45,
    steps=5,
    counted_steps=2,
    remote_rows={"_N": 60},
    peer_rows={"_N": 0},
    remote_seeds=4,
    sources=[200, 60],
    targets=[60, 20],
    edges=[400, 100],
    requested=0,
    returned=0,
    largest=[[110, 30], [30, 10], [210, 55]],
    first_sources={"_N": 200},
    first_targets={"_N": 60},
    first_edges=[400],
)


def erase(value: Any) -> Any:
    return dict.fromkeys(value, 0) if isinstance(value, dict) else (0 * np.array(value)).tolist()


IDLE = RankCount(**{name: erase(value) for name, value in vars(BUSY).items()})


def test_some_batches_stand_for_as_many_seeds_as_there_are() -> None:
    """2 of 5 batches have 20 of the 45 seeds, for the last batch has 5; a rank without seeds adds nothing."""
    result = combine_counts([BUSY, IDLE], build_topology(2, 1), SIZES)
    assert not result.is_complete
    assert result.steps == 5
    assert result.survey.remote_rows == 60 * 45 / 20
    assert result.survey.feature_bytes == 48 * 135
    assert result.survey.label_bytes == 16 * 9
    assert result.largest == ((110, 30), (30, 10), (210, 55))
    without = combine_counts([BUSY, IDLE], build_topology(2, 1), replace(SIZES, label=None))
    assert without.survey.label_bytes == 0


def test_hits_of_ranks_are_summed_and_a_cache_is_as_large_as_the_largest() -> None:
    """The busy rank counted 2 of its 5 batches, so its 40 hits belong to 20 of 45 seeds."""
    cache = {"policy": "vip", "alpha": 0.5}
    ranks = [
        replace(BUSY, caches=[{**cache, "hits": 40, "once_rows": 7, "server_bytes": 70, "rank_bytes": 1}]),
        replace(IDLE, caches=[{**cache, "hits": 0, "once_rows": 5, "server_bytes": 50, "rank_bytes": 3}]),
    ]
    result = combine_counts(ranks, build_topology(2, 1), SIZES).caches
    assert result == (CacheHits(**cache, hits=90, once_rows=12, server_bytes=70, rank_bytes=3),)  # type: ignore[arg-type]


def measure_some(data: str) -> BatchWork:
    with init(seed=0) as session:
        g = DistGraph(data, session=session)
        model = build_model("sage", 4, 4, 2)
        shape = infer_shape(model, 4, 2)
        draws = Draws(fanouts=(2, 2), batch_size=4, most_batches=2)
        counts, _ = count(g, shape, CountConfig(cluster=CLUSTER, draws=draws, in_job=True))
        g.close()
    return counts.mini_batches


@pytest.mark.wide
def test_ranks_count_the_same_epochs_if_only_one_has_seeds_left(tmp_path: Path) -> None:
    """17 seeds in batches of 4: after two batches rank 1 has none, and rank 0 has one."""
    raw = generate(SyntheticConfig(nodes=68, degree=4, features=4, classes=2, seed=3))
    raw.node_data[NODE_TYPE]["train_mask"][:] = np.arange(68) % 4 == 0
    partition_to_disk(raw, tmp_path / "data", PartitionPlan(num_parts=2, method="contiguous"))
    first, second = run_ranks(
        measure_some, 2, args=(str(tmp_path / "data"),), ranks_per_server=1, timeout_s=60
    )
    assert first == second
    assert (sorted(first.survey.seeds_per_rank), first.steps, first.is_complete) == ([8, 9], 3, False)
    assert {cache.policy for cache in first.caches} == {"vip", "lookahead"}


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="the folder DIR of a dataset is missing"):
        PlanConfig()
    with pytest.raises(ConfigError, match="--layers is 2"):
        PlanConfig(data="x", fanouts=(1, 2, 3))


@pytest.mark.wide
def test_plans_beyond_the_memory_are_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = generate(SyntheticConfig(nodes=400, degree=6, features=4, seed=3))
    partition_to_disk(raw, tmp_path / "data", PartitionPlan(num_parts=2, method="hash"))
    plan = PlanConfig(data=str(tmp_path / "data"), servers=2, layers=2, hidden=4, unit="full_graph")
    for free, expected in ((100 * raw.total_edges, False), (100 * raw.total_edges - 1, True)):
        monkeypatch.setattr(full_graph, "machine_memory", lambda free=free: (free, free))
        predictions = make_plan(plan).predictions
        (prediction,) = (
            prediction for prediction in predictions if prediction.candidate.name == "full_graph"
        )
        assert prediction.feasible is not expected
        assert ("too large to be counted" in prediction.why_not) is expected
