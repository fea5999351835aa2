"""Bytes and memory for data parallel training."""

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
    """Counts remote input rows that miss the cache, and gradient sums."""

    @staticmethod
    def cost(candidate: Candidate, counts: EpochCounts) -> Cost:
        work = counts.mini_batches
        survey = work.survey
        cache = counts.find_cache(candidate)
        if cache is None:
            cache = CacheHits(policy="", alpha=0.0)

        # Rows in the cache are not sent again.
        row_bytes = ID_BYTES + counts.graph.feature_bytes
        missed_bytes = survey.feature_bytes - cache.hits * row_bytes
        trained_outside, trained_inside = survey.trained_rows.traffic(counts.shape.trained_row_bytes)
        outside = {**count_row_bytes(replace(survey, feature_bytes=missed_bytes)), **trained_outside}
        sums = ring_split(counts.shape.gradient_bytes, counts.cluster.server_of_rank, work.steps)
        startup_bytes = cache.once_rows * row_bytes
        traffic = build_traffic(
            outside, trained_inside, sums, startup_bytes=startup_bytes, is_exact=work.is_complete
        )

        shared_bytes = cache.server_bytes + counts.own_feature_bytes
        held_bytes = shared_bytes + cache.rank_bytes
        return Cost(
            traffic=traffic,
            memory=counts.batch_memory(held=held_bytes),
            shared=shared_bytes + counts.structure_bytes,
            on_host=counts.program_bytes + held_bytes + counts.structure_bytes,
        )


def count_row_bytes(survey: Survey) -> dict[str, int]:
    """Return the bytes that all ranks send, by ledger phase, without empty phases."""
    return present(
        features=survey.feature_bytes,
        sampling=survey.sampling_bytes,
        labels=survey.label_bytes,
        gradients=survey.gradient_bytes,
    )
