"""One value per id, computed by the server that owns the id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from dglx_dist.cluster.session import Session
from dglx_dist.graph.gather import spread_rows
from dglx_dist.graph.placement import Placement
from dglx_dist.graph.remote_plan import RemotePlan, plan_remote
from dglx_dist.records import Array

Compute: TypeAlias = Callable[[Array], Sequence[Array]]
"""(k,) int64 ids of the own server to arrays (k,) int64, always the same number of them."""

MAX_IDS = 1 << 20
"""Ids of one request; more are asked for in several."""

MAX_MESSAGE_BYTES = 8 << 20
"""Rows of one message; more are cut, so that rows are placed while others are under way.

Replies of 1 MiB were seen to cost the serving rank half as much processor time again."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The ids of one message, as slots of a plan."""

    rank: int
    first: int
    last: int


def rows_per_message(row_bytes: int) -> int:
    """Return how many rows of ``row_bytes``, each with its id, one message has at most; at least 1."""
    return max(1, MAX_MESSAGE_BYTES // max(row_bytes, 8))


def requests_of(plan: RemotePlan, placement: Placement, max_ids: int = MAX_IDS) -> list[Request]:
    """Return the messages of a plan: one per server, or several of at most ``max_ids``."""
    return [
        Request(rank=placement.serving_rank(server), first=begin, last=min(begin + max_ids, last))
        for server, (first, last) in enumerate(pairwise(plan.server_starts.tolist()))
        for begin in range(first, last, max_ids)
    ]


Answered: TypeAlias = Callable[[], list[Array]]
"""Computes what is the own server's, waits for the others, and returns all; for the thread that asked."""


def submit_to_owners(
    session: Session, placement: Placement, op: str, ids: Array, bounds: Array, compute: Compute
) -> Answered:
    """Ask ``op`` of the servers that own ``ids``, and return at once.

    Sends 8 bytes per distinct remote id and receives 8 per answer. Not collective.

    Args:
        session: The run.
        placement: Which rank answers for a server.
        op: Registered on every rank, answering its ids with ``compute``.
        ids: (K,) int64, each in [0, ``bounds[-1]``), any order, repeats allowed.
        bounds: (S + 1,) int64 id ranges of the servers.
        compute: For the ids of the own server.

    Returns:
        What waits for as many (K,) int64 arrays as ``compute`` returns, in the order of ``ids``.
    """
    own = placement.topology.server
    plan = plan_remote(ids, bounds, own)
    calls = [
        (session.rpc.submit(call.rank, op, "", [plan.ids[call.first : call.last]], phase="structure"), call)
        for call in requests_of(plan, placement)
    ]

    def answered() -> list[Array]:
        local = np.flatnonzero((ids >= bounds[own]) & (ids < bounds[own + 1]))
        answers = compute(ids[local])
        out = [np.empty(len(ids), dtype=np.int64) for _ in answers]
        for column, values in zip(out, answers, strict=True):
            column[local] = values
        for pending, call in calls:
            for column, values in zip(out, pending.result(), strict=True):
                spread_rows(values, column, plan.starts, plan.positions, call.first)
        return out

    return answered
