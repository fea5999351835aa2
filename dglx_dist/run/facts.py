"""What a run came to that its epochs do not tell; told by every rank."""

from __future__ import annotations

import resource

from dglx_dist.cluster.collectives import gather_json
from dglx_dist.cluster.session import Session
from dglx_dist.report.summary import RunFacts
from dglx_dist.training.fit import FitResult


def facts_of(session: Session, result: FitResult) -> RunFacts:
    """Return strategy, ranks, accuracy and the largest memory of any rank; every rank must call it."""
    # Linux counts the largest resident set in units of 1024 bytes.
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = [int(str(peak)) for peak in gather_json(mine, session)]
    return RunFacts(
        strategy=session.strategy,
        ranks=session.topology.world_size,
        servers=session.topology.num_servers,
        test_accuracy=result.test_accuracy,
        val_accuracy=result.val_accuracy,
        peak_memory_bytes=max(peaks),
    )
