"""The counters of a network card."""

from __future__ import annotations

from pathlib import Path

from dglx_dist.errors import LabError
from dglx_dist.lab.base import Card


def read_card(device: str, *, pid: int | None = None) -> Card:
    """Read the counters of ``device`` in the network namespace of process ``pid``.

    Args:
        device: e.g. "eth0".
        pid: A process of the server; None: the calling one, which may be a rank inside it.

    Raises:
        LabError: the process has ended, or it has no such device.
    """
    process = "self" if pid is None else str(pid)
    try:
        lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    except OSError as error:
        raise LabError(
            f"the counters of {device} cannot be read, process {process} is gone ({error.strerror}); "
            "the lab was taken down meanwhile"
        ) from error
    cards = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    if device not in cards:
        there = ", ".join(name for name, numbers in cards.items() if numbers and numbers[0].isdigit())
        raise LabError(f"there is no network device {device!r} here, only {there}")
    return Card(sent=int(cards[device][8]), received=int(cards[device][0]))
