"""Stand-in for a device's streams and page-locked memory, on CPUs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

GARBAGE = 85


class LateStreams:
    """Copies happen as late as the order of events allows: when somebody waits for them.

    Until then the copy holds garbage. The source is read then, and only referred to: whoever begins a copy
    must keep it, and must not write to it. ``log`` has what was done, and on which thread; ``carried`` counts
    the events that nobody has acquired there.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.carried = threading.Semaphore(0)
        self._begun: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self._num_done = 0
        self._here = threading.local()

    def _note(self, what: str) -> None:
        self.log.append((what, threading.current_thread().name))

    @contextmanager
    def use(self) -> Iterator[None]:
        self._here.copies = True
        try:
            yield
        finally:
            self._here.copies = False

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy(self, pinned: Tensor) -> Tensor:
        assert self._here.copies, "a copy outside of its stream"
        self._note("copy")
        late = torch.full_like(pinned, GARBAGE)
        self._begun.append((weakref.ref(pinned), late))
        return late

    def record_event(self) -> LateEvent:
        self._note("event")
        self.carried.release()
        return LateEvent(self, len(self._begun))

    def wait(self, event: LateEvent, tensors: Sequence[Tensor]) -> None:
        assert not getattr(self._here, "copies", False), "the stream of copies waits for itself"
        self._note("wait")
        while self._num_done < event.position:
            source, late = self._begun[self._num_done]
            rows = source()
            assert rows is not None, "memory was freed before its copy was done"
            late.copy_(rows)
            self._num_done += 1


class LateEvent:
    def __init__(self, streams: LateStreams, position: int) -> None:
        self._streams, self.position = streams, position

    def query(self) -> bool:
        return self._streams._num_done >= self.position
