"""Hand-made traces for tests of the lab."""

from __future__ import annotations

from collections.abc import Sequence

from dglx_dist.comm.ledger import LedgerRow
from dglx_dist.comm.trace import Pass
from dglx_dist.records import EpochRecord
from scripts.netlab.traces import RankTrace, Trace


def epoch(number: int, seconds: float) -> EpochRecord:
    return EpochRecord(
        epoch=number, loss=0.5, train_accuracy=0.5, val_accuracy=None, seconds=seconds, num_samples=4,
        sample_s=0.1, fetch_s=0.2, wait_s=0.3, compute_s=0.4, exchange_s=0.5, bytes_inside=6, bytes_outside=7,
    )  # fmt: skip


def row(source: int, destination: int, num_bytes: int, *, inside: bool = False) -> LedgerRow:
    return LedgerRow(
        phase="features", layer=1, source=source, destination=destination, inside=inside, num_bytes=num_bytes
    )


def rank_trace(
    rank: int,
    server_of_rank: Sequence[int],
    *,
    job: str = "a",
    ledger: Sequence[LedgerRow] = (),
    passes: Sequence[Pass] = (),
    epochs: Sequence[EpochRecord] = (),
) -> RankTrace:
    return RankTrace(
        job=job,
        rank=rank,
        world_size=len(server_of_rank),
        server_of_rank=tuple(server_of_rank),
        failed=False,
        ledger=tuple(ledger),
        passes=tuple(passes),
        epochs=tuple(epochs),
    )


def trace_of(server_of_rank: Sequence[int], ledgers: Sequence[Sequence[LedgerRow]]) -> Trace:
    """One session; ``ledgers`` by rank."""
    ranks = [rank_trace(rank, server_of_rank, ledger=rows) for rank, rows in enumerate(ledgers)]
    return Trace(sessions=(tuple(ranks),))
