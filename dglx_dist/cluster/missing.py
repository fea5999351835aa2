"""What is said of ranks that something is waited for, while it is and when time is up."""

from __future__ import annotations

from collections.abc import Sequence

from dglx_dist.cluster.session import Session
from dglx_dist.errors import PeerError


def raise_for_missing(
    session: Session, missing: Sequence[int], what: str, *, before: str, undone: str, advice: str, late: bool
) -> None:
    """Raise PeerError if one of the ranks ``missing`` at ``what`` failed, is dead, or time is up.

    Args:
        session: The run.
        missing: Ranks from which something has not come; at least one.
        what: What is waited for, for those that are asked.
        before: Before what a rank failed, as "before 'step 1'".
        undone: What those missing did not do, as "sent nothing for 'step 1'".
        advice: What to do about it.
        late: Whether time is up.
    """
    failure = session.store.first_failure() if session.store is not None else None
    if failure is not None and failure[0] in missing:
        raise PeerError(f"rank {failure[0]} failed {before}: {failure[1]}")
    session.raise_for_dead(list(missing), what)
    if late:
        names = ", ".join(f"rank {rank} on {session.hosts[rank]}" for rank in missing)
        raise PeerError(
            f"{names} {undone} within {session.timeout_s:g} s ({session.describe_failure(what)}); {advice}, "
            "or raise timeout_s (DGLX_TIMEOUT)"
        )
