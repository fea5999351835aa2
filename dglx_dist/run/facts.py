"""What a run came to that its epochs do not tell; told by every rank."""

from __future__ import annotations

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.report.summary import RunFacts
from dglx_dist.storage.process_memory import peak
from dglx_dist.training.fit import FitResult


def facts_of(session: Session, result: FitResult) -> RunFacts:
    """Return strategy, ranks, accuracy and the largest memory of any rank; every rank must call it."""
    peaks = [int(str(one)) for one in gather_json(peak(), session)]
    return RunFacts(
        strategy=session.strategy,
        ranks=session.topology.world_size,
        servers=session.topology.num_servers,
        test_accuracy=result.test_accuracy,
        val_accuracy=result.val_accuracy,
        peak_memory_bytes=max(peaks),
    )
