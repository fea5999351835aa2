"""What an epoch of mini-batches comes to: the record that the formulas take, from what ranks counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dglx_dist.cluster.topology import Topology
from dglx_dist.planner.survey import RankCount, Survey, summed
from dglx_dist.records import Array


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """What a cache of remote rows is worth."""

    alpha: float
    """Its size, by the server's own nodes."""
    rows: int
    """In the caches of all servers."""
    hits: int
    """Of the remote rows of an epoch, all ranks."""


@dataclass(frozen=True, kw_only=True)
class BatchWork:
    """One epoch of mini-batches."""

    survey: Survey
    """Totals of all ranks."""
    worked: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """(L,) sources, targets and edges of the rank with most edges, in an epoch."""
    first: tuple[int, int, int]
    """Sources, targets and edges of layer 1 of all ranks together."""
    largest: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """(L,) the same of the largest batch."""
    card_share: float
    """Remote rows through the busiest card, by those of all ranks."""
    caches: tuple[CacheHits, ...] = ()
    counted: bool = True
    """Whether every batch of the epoch was."""

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self.survey.steps


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Bytes, for totals."""

    feature: int
    label: int | None
    """None: there are none, so that a loop takes its targets from elsewhere."""
    gradients: int
    """Of all gradients of a step, with their flags."""
    partitioned: bool
    """Whether servers ask each other for in-edges."""


def work_of_counts(
    ranks: Sequence[RankCount],
    topology: Topology,
    sizes: RowSizes,
    *,
    cached: Mapping[float, int] | None = None,
) -> BatchWork:
    """Return what the ranks' counts come to; those of a part of the epoch are scaled to all of it.

    Args:
        ranks: (W,).
        topology: Of the run.
        sizes: Bytes of rows and gradients.
        cached: Size of a cache to the rows of all of them, in the order in which hits were counted.
    """
    scaled = [_whole(one) for one in ranks]
    found = summed(
        scaled,
        row_bytes={"feat": sizes.feature, "label": sizes.label or 0},
        parameter_bytes=sizes.gradients,
        partitioned=sizes.partitioned,
        ranks_per_server=len(topology.ranks_of_server(0)),
    )
    if sizes.label is None:
        found = replace(found, label_bytes=0)
    busiest = max(scaled, key=lambda one: sum(one.edges))
    largest = max(scaled, key=lambda one: one.largest[0][0]).largest
    rows = [(alpha, count) for alpha, count in (cached or {}).items()]
    return BatchWork(
        survey=found,
        worked=(tuple(busiest.sources), tuple(busiest.targets), tuple(busiest.edges)),
        first=(found.input_rows, found.first_targets, found.first_edges),
        largest=(tuple(largest[0]), tuple(largest[1]), tuple(largest[2])),
        card_share=_card_share(scaled, topology),
        caches=tuple(
            CacheHits(alpha=alpha, rows=count, hits=sum(one.hits[place] for one in scaled))
            for place, (alpha, count) in enumerate(rows)
        ),
        counted=all(one.counted >= one.steps for one in ranks),
    )


def _card_share(ranks: Sequence[RankCount], topology: Topology) -> float:
    """Return the rows through the busiest card, in or out, by all that cross."""
    pairs: Array = np.zeros((topology.num_servers, topology.num_servers))
    for rank, one in enumerate(ranks):
        pairs[topology.server_of_rank[rank]] += one.remote_rows
    total = float(pairs.sum())
    if not total:
        return 1.0 / topology.num_servers
    return float(max(pairs.sum(axis=0).max(), pairs.sum(axis=1).max())) / total


def _whole(one: RankCount) -> RankCount:
    """Return the counts of all steps, from those of some."""
    if one.counted >= one.steps or not one.counted:
        return one
    # The last batch of an epoch may be smaller, so targets tell more than batches do.
    factor = one.seeds / max(one.targets[-1], 1)

    def scaled(values: Sequence[int]) -> list[int]:
        return [round(factor * value) for value in values]

    return replace(
        one,
        remote_rows=scaled(one.remote_rows),
        remote_seeds=round(factor * one.remote_seeds),
        sources=scaled(one.sources),
        targets=scaled(one.targets),
        edges=scaled(one.edges),
        asked=round(factor * one.asked),
        returned=round(factor * one.returned),
        hits=scaled(one.hits),
    )
