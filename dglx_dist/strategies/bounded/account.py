"""What the workers of all ranks did and cost, and the line of live progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, final

from dglx_dist.offload.controller_records import Counts
from dglx_dist.offload.cost import Bill, Servers, Usage, bill, dollars
from dglx_dist.offload.prices import PriceTable
from dglx_dist.strategies.bounded.schedule.threads import Snapshot


@final
@dataclass(frozen=True, kw_only=True)
class Account:
    """Of one rank, or of all together."""

    counts: Counts = field(default_factory=Counts)
    server_seconds: float = 0.0
    """Seconds that graph servers trained, added over the ranks."""

    def __add__(self, other: Account) -> Account:
        names = [one.name for one in fields(Counts)]
        counts = {name: getattr(self.counts, name) + getattr(other.counts, name) for name in names}
        return Account(counts=Counts(**counts), server_seconds=self.server_seconds + other.server_seconds)

    def bill(self, kind: str, prices: PriceTable, *, simulated: bool, alone: bool = False) -> Bill:
        """Return the dollars, each graph server a server of ``kind``; ``alone``: there are no functions."""
        servers = [Servers(kind=kind, number=1, seconds=self.server_seconds)]
        used = Usage() if alone else self.counts.usage
        return bill(used, servers, prices, simulated=simulated)

    def describe(
        self, kind: str, prices: PriceTable, *, simulated: bool, alone: bool = False
    ) -> dict[str, object]:
        """Return numbers, dollars and how to read them, JSON values."""
        paid = self.bill(kind, prices, simulated=simulated, alone=alone)
        return {
            **asdict(self.counts),
            "server_seconds": self.server_seconds,
            "server": kind,
            "dollars_functions": paid.functions,
            "dollars_servers": paid.servers,
            "dollars": paid.total,
            "label": paid.label,
            "text": str(paid),
        }


NOTHING = Account()


def as_json(account: Account) -> dict[str, Any]:
    """Return what :func:`account_of_ranks` reads."""
    return {"counts": asdict(account.counts), "server_seconds": account.server_seconds}


def account_of_ranks(ranks: Iterable[Mapping[str, Any]]) -> Account:
    """Return the sum of what :func:`as_json` gave on each rank."""
    total = NOTHING
    for one in ranks:
        total += Account(counts=Counts(**one["counts"]), server_seconds=one["server_seconds"])
    return total


def progress_line(now: Snapshot, counts: Counts, workers: int, bill_now: Bill) -> str:
    """Return ``epoch 3 | AV1 3 GA1 2 | 4 workers | queue 2 | 0 relaunched | $0.0012 simulated``."""
    stages = Counter(step for step in now.steps if step)
    parts = [
        f"epoch {min(now.epochs)}",
        " ".join(f"{step} {number}" for step, number in sorted(stages.items())) or "drained",
        f"{workers} worker{'' if workers == 1 else 's'}",
        f"queue {now.queue}",
        f"{counts.relaunched} relaunched",
        f"{dollars(bill_now.total)}{' simulated' if bill_now.simulated else ''}",
    ]
    return " | ".join(parts)
