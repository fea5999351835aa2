"""Bytes and memory of data parallel training."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from dglx_dist.planner.costs.base import (
    ID_BYTES,
    CacheHits,
    Cost,
    CostModel,
    Counted,
    Survey,
    present,
    ring_split,
    traffic_with_sums,
)
from dglx_dist.strategies.candidate import Candidate


@final
class DataParallelCosts(CostModel):
    """Rows of remote input nodes, less those that a cache holds, and sums of all gradients."""

    @staticmethod
    def cost(candidate: Candidate, counted: Counted) -> Cost:
        work, cache = counted.mini_batches, counted.cache_of(candidate) or CacheHits(policy="", alpha=0.0)
        row = ID_BYTES + counted.graph.feature_bytes
        missed = work.survey.feature_bytes - cache.hits * row
        phases = row_bytes(replace(work.survey, feature_bytes=missed))
        sums = ring_split(counted.shape.gradient_bytes, counted.cluster.server_of_rank, work.steps)
        shared = cache.server_bytes + counted.own_features
        return Cost(
            traffic=traffic_with_sums(phases, {}, sums, once=cache.once_rows * row, exact=work.counted),
            memory=counted.batch_memory(held=shared + cache.rank_bytes),
            shared=shared + counted.structure,
            on_host=counted.program_bytes + shared + cache.rank_bytes + counted.structure,
        )


def row_bytes(found: Survey) -> dict[str, int]:
    """Return the bytes by ledger phase, over all ranks; empty phases are left out."""
    return present(
        features=found.feature_bytes,
        sampling=found.sampling_bytes,
        labels=found.label_bytes,
        gradients=found.gradient_bytes,
    )
