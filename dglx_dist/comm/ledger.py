"""Byte ledger: payload bytes between ranks by phase, layer, source and destination."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from dglx_dist.comm.topology import Topology

LedgerKey: TypeAlias = tuple[str, int, int, int]
"""(phase, layer, source rank, destination rank)."""

WORKER = -1
"""Stands for any stateless worker in place of a rank. The rank that it calls counts its bytes."""

CONTROL = "control"
"""Phase for messages by which ranks agree. They are not training payload."""

Snapshot: TypeAlias = Mapping[LedgerKey, int]


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """Bytes in one phase and layer from one rank to another."""

    phase: str
    layer: int
    source: int
    destination: int
    inside: bool
    """Whether both ranks are on one server. Always False for a worker."""
    num_bytes: int


@final
class Ledger:
    """Counts payload bytes, without headers. Thread-safe.

    The caller of a one-sided call counts both directions. In a collective each rank counts the bytes that it
    sends. Therefore the sum over ranks counts each byte once.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._bytes: dict[LedgerKey, int] = {}
        self._lock = threading.Lock()

    def add(self, phase: str, layer: int, source: int, destination: int, num_bytes: int) -> None:
        """Count ``num_bytes`` from rank ``source`` to rank ``destination``. Zero adds no row."""
        if num_bytes == 0 or source == destination:
            return
        key = (phase, layer, source, destination)
        with self._lock:
            self._bytes[key] = self._bytes.get(key, 0) + int(num_bytes)

    def total(self, *, phase: str | None = None, outside: bool | None = None) -> int:
        """Add up the bytes in one phase or in all. ``outside`` selects traffic between or within servers."""
        total = 0
        for row in self.rows():
            if phase is not None and row.phase != phase:
                continue
            if outside is not None and row.inside == outside:
                continue
            total += row.num_bytes
        return total

    def rows(self) -> list[LedgerRow]:
        return self.since({})

    def snapshot(self) -> Snapshot:
        with self._lock:
            return dict(self._bytes)

    def restore(self, snapshot: Snapshot) -> None:
        """Forget all counts since ``snapshot``."""
        with self._lock:
            self._bytes = dict(snapshot)

    def since(self, snapshot: Snapshot, *, control: bool = True) -> list[LedgerRow]:
        """List what was added after ``snapshot``, sorted.

        Counts in the phase CONTROL are included if ``control``.
        """
        rows = []
        for key, total in sorted(self.snapshot().items()):
            phase, layer, source, destination = key
            num_bytes = total - snapshot.get(key, 0)
            if num_bytes == 0 or (phase == CONTROL and not control):
                continue

            has_worker = WORKER in (source, destination)
            row = LedgerRow(
                phase=phase,
                layer=layer,
                source=source,
                destination=destination,
                inside=not has_worker and self._topology.is_same_server(source, destination),
                num_bytes=num_bytes,
            )
            rows.append(row)
        return rows


def ring_bytes(num_bytes: int, world_size: int, rank: int) -> int:
    """Return the bytes that ``rank`` sends in a ring all-reduce: 2 (W - 1) / W times ``num_bytes``.

    If W does not divide the bytes, the first ranks send one byte more. So the sum over ranks is exactly 2 (W
    - 1) ``num_bytes`` (Patarasuk and Yuan's bound). The backend may choose another algorithm.
    """
    share, remainder = divmod(2 * (world_size - 1) * num_bytes, world_size)
    return share + (rank < remainder)
