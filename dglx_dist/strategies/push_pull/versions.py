"""Which version of the weights a batch read and which it wrote: the staleness of the pipeline, observed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

from dglx_dist.strategies.push_pull.options import Side

_KEPT = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class Version:
    """One batch's step on one side."""

    batch: int
    side: Side
    read: int
    """Steps that had been taken when the batch read its weights."""
    written: int
    """Steps that had been taken when its own was."""

    @property
    def lag(self) -> int:
        """Steps of other batches between."""
        return self.written - self.read


@final
class VersionLog:
    """Counts the optimizer's steps on both sides and notes what each batch saw of them."""

    def __init__(self) -> None:
        self.steps: dict[Side, int] = {"M": 0, "D": 0}
        self.done: deque[Version] = deque(maxlen=_KEPT)
        """The latest, oldest first."""
        self._pending: list[tuple[int, Side, int]] = []

    def waits(self, side: Side) -> bool:
        """Whether gradients of ``side`` are there that nobody has stepped."""
        return any(one[1] == side for one in self._pending)

    def computed(self, batch: int, side: Side, read: int) -> None:
        """Note that the gradients of ``batch`` on one side are there to be stepped."""
        self._pending.append((batch, side, read))

    def put_aside(self) -> list[tuple[int, Side, int]]:
        """Forget, and return, what was computed and not stepped; for :meth:`put_back`."""
        pending, self._pending = self._pending, []
        return pending

    def put_back(self, pending: list[tuple[int, Side, int]]) -> None:
        """Remember again what :meth:`put_aside` returned: its gradients wait for the next step."""
        self._pending = pending + self._pending

    def stepped(self, sides: tuple[Side, ...]) -> None:
        """Note that an optimizer took a step that writes ``sides``; none where no gradient was there."""
        # A batch on which the model was called twice has one gradient, their sum.
        taken = list(dict.fromkeys(one for one in self._pending if one[1] in sides))
        self._pending = [one for one in self._pending if one[1] not in sides]
        for batch, side, read in taken:
            self.done.append(Version(batch=batch, side=side, read=read, written=self.steps[side]))
        for side in {side for _, side, _ in taken}:
            self.steps[side] += 1
