"""What ranks counted of their batches, laid onto the whole epoch."""

from __future__ import annotations

from dataclasses import replace

from dglx_dist.planner.model_shape import topology_of
from dglx_dist.planner.workload import RankCount, RowSizes, work_of_counts

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
IDLE = RankCount(
    seeds=0,
    steps=0,
    counted=0,
    remote_rows=[0, 0],
    remote_seeds=0,
    sources=[0, 0],
    targets=[0, 0],
    edges=[0, 0],
    requested=0,
    returned=0,
    largest=[[0, 0], [0, 0], [0, 0]],
)


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


def test_without_labels_none_are_sent() -> None:
    found = work_of_counts([BUSY, IDLE], topology_of(2, 1), replace(SIZES, label=None))
    assert found.survey.label_bytes == 0
