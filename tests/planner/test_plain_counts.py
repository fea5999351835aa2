"""Work and foreign rows on a path of six nodes: 0 <- 1 <- 2 <- 3 <- 4 <- 5, cut between 2 and 3."""

from __future__ import annotations

import numpy as np

from tests.planner.plain_counts import exchanging_work, preloading_work

INDPTR, INDICES = np.array([0, 1, 2, 3, 4, 5, 5]), np.array([1, 2, 3, 4, 5])
BOUNDS = np.array([0, 3, 6])


def test_servers_that_exchange_compute_what_is_needed_of_their_own() -> None:
    """Layer 2 computes 2 and 4; layer 1 computes 2, 3, 4 and 5, which has no in-edge."""
    work = exchanging_work(INDPTR, INDICES, BOUNDS, np.array([2, 4]), 2)
    assert work.edges == (1 + 1, 1 + 2)
    assert work.foreign == (0, 0)


def test_servers_that_preload_compute_their_closures() -> None:
    """Server 0 computes 2, then 2 and 3, from 2, 3 and 4; server 1 needs no foreign row."""
    whole = preloading_work(INDPTR, INDICES, BOUNDS, [[np.array([2])], [np.array([4])]], 2)
    assert whole.edges == (1 + 2, 1 + 1)
    assert whole.foreign == (2, 0)
    assert whole.kappa(exchanging_work(INDPTR, INDICES, BOUNDS, np.array([2, 4]), 2)) == 1.0
    # One hop from 0, 1, 2 leads to 3, whose in-edge from 4 is then left out.
    sampled = preloading_work(INDPTR, INDICES, BOUNDS, [[np.array([2])], [np.array([4])]], 2, hops=1)
    assert sampled.edges == (1 + 1, 1 + 1)
    assert sampled.foreign == (1, 0)


def test_co_batches_share_nothing() -> None:
    """Of 1 and of 2 by themselves: 1 from 2, then 2 from 3; 2 from 3, then 3 from 4."""
    work = preloading_work(INDPTR, INDICES, BOUNDS, [[np.array([1]), np.array([2])], []], 2)
    assert work.edges == (1 + 2 + 1 + 2, 0)
    assert work.foreign == (1 + 2, 0)
