"""Bytes and memory of data parallel training."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from dglx_dist.planner.costs.base import (
    ID_BYTES,
    CacheHits,
    Cost,
    CostModel,
    EpochCounts,
    Survey,
    build_traffic,
    present,
    ring_split,
)
from dglx_dist.strategies.candidate import Candidate


@final
class DataParallelCosts(CostModel):
    """Rows of remote input nodes without those in a cache, and sums of all gradients."""

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        work = counts.mini_batches
        cache = counts.find_cache(candidate) or CacheHits(policy="", alpha=0.0)
        row = ID_BYTES + counts.graph.feature_bytes
        missed = work.survey.feature_bytes - cache.hits * row
        trained_outside, inside = work.survey.trained_rows.traffic(counts.shape.trained_row_bytes)
        outside = {**count_row_bytes(replace(work.survey, feature_bytes=missed)), **trained_outside}
        sums = ring_split(counts.shape.gradient_bytes, counts.cluster.server_of_rank, work.steps)
        shared = cache.server_bytes + counts.own_feature_bytes
        startup_bytes = cache.once_rows * row
        return Cost(
            traffic=build_traffic(
                outside, inside, sums, startup_bytes=startup_bytes, is_exact=work.is_complete
            ),
            memory=counts.batch_memory(held=shared + cache.rank_bytes),
            shared=shared + counts.structure_bytes,
            on_host=counts.program_bytes + shared + cache.rank_bytes + counts.structure_bytes,
        )


def count_row_bytes(survey: Survey) -> dict[str, int]:
    """Return the bytes of all ranks by ledger phase, without empty phases."""
    return present(
        features=survey.feature_bytes,
        sampling=survey.sampling_bytes,
        labels=survey.label_bytes,
        gradients=survey.gradient_bytes,
    )
