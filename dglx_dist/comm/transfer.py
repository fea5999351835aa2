"""Copies between host memory and a device: page-locked memory, streams, and no waiting of the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar, final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dglx_dist.comm.devices import check_device

T = TypeVar("T")

Copy: TypeAlias = Callable[[Tensor], Tensor]
"""A tensor in host memory to its copy on a device."""


def device_of(given: torch.device | str | None, own: torch.device) -> torch.device:
    """Return the device that ``given`` names on a rank whose own is ``own``; None: that one.

    ConfigError: it is no device, or this machine does not have it.
    """
    if given is None:
        return own
    device = check_device(given)
    if device.index is None and device.type == own.type:
        return own
    # On another thread than this one, "cuda" without an index would mean the first one.
    has_index = device.index is not None or device.type != "cuda"
    return device if has_index else torch.device("cuda", torch.cuda.current_device())


@final
class Streams:
    """The stream of copies of one GPU, and page-locked memory. Thread-safe; tests have them for CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it bare

    def copying(self) -> AbstractContextManager[Any]:
        """Make the stream of copies, and its device, the current ones of this thread."""
        return torch.cuda.stream(self._stream)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in page-locked memory: itself if it lies there."""
        return tensor.pin_memory()

    def copy(self, pinned: Tensor) -> Tensor:
        """Begin to copy to the device, on the current stream."""
        return pinned.to(self._device, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        """Return the end of the work that the stream of copies has so far."""
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        """Let later work of the current stream wait for ``event``, and ``tensors`` live until it is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            # Else its memory could be given to a later copy while this stream still computes with it.
            tensor.record_stream(current)


@final
class CopyStream:
    """Copies the tensors of batches to a device beside its computation. Thread-safe; the host never waits."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[Any, list[Tensor]]] = deque()
        """The sources of copies, kept until these are done: their memory may be used again afterwards."""

    def carry(self, move: Callable[[Copy], T]) -> tuple[T, Callable[[], None]]:
        """Return what ``move`` makes with a function that copies tensors, and what its consumer must call.

        The consumer calls that once, on its own thread and stream, before it uses the copies.
        """
        sources: list[Tensor] = []
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            sources.append(self._streams.pinned(tensor))
            copies.append(self._streams.copy(sources[-1]))
            return copies[-1]

        with self._streams.copying():
            try:
                moved = move(copy)
            finally:
                done = self._streams.event()
                self._keep(done, sources)

        def arrive() -> None:
            self._streams.wait(done, copies)
            copies.clear()

        return moved, arrive

    def _keep(self, done: Any, sources: list[Tensor]) -> None:
        with self._lock:
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((done, sources))


def open_copies(device: torch.device) -> CopyStream | None:
    """Return what copies the batches of one loader to ``device``; None: no streams are used for it."""
    return CopyStream(Streams(device)) if device.type == "cuda" else None


def carried(
    copies: CopyStream | None, device: torch.device, move: Callable[[Copy], T]
) -> tuple[T, Callable[[], None] | None]:
    """:meth:`CopyStream.carry`, or without ``copies`` at once: then there is nothing to call."""
    return (move(lambda tensor: tensor.to(device)), None) if copies is None else copies.carry(move)


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """Return ``rows`` of host memory on ``device``, copied on the current stream; no GPU is waited for."""
    if device.type == "cuda":
        # torch keeps the page-locked copy until it is read.
        return rows.pin_memory().to(device, non_blocking=True)
    return rows.to(device)


_SOURCES = WeakTensorKeyDictionary()
"""Ids on a device to (the tensor of the host of which they are a copy, the versions of both then)."""


def ids_to_device(ids: Tensor, device: torch.device, copy: Copy | None = None) -> Tensor:
    """Return ``ids`` of the host on ``device``, where :func:`ids_on_host` knows them without waiting."""
    moved = to_device(ids, device) if copy is None else copy(ids)
    if ids.is_cpu and not (moved.is_cpu or moved.is_inference() or ids.is_inference()):
        _SOURCES[moved] = ids, moved._version, ids._version
    return moved


def ids_on_host(ids: Tensor) -> Tensor:
    """Return ``ids`` on the host; waits for their device, unless they are an unchanged copy from there."""
    known = None if ids.is_cpu else _SOURCES.get(ids)  # type: ignore[no-untyped-call]  # torch leaves it bare
    if known is not None and known[1:] == (ids._version, known[0]._version):
        return known[0].detach()
    return ids.detach().cpu()


def to_host(rows: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Return ``rows`` contiguous in host memory, and what waits until they have arrived; None: they have."""
    if rows.device.type != "cuda":
        return rows.contiguous().cpu(), None
    host = host_memory(rows.shape, rows)
    host.copy_(rows, non_blocking=True)
    return host, torch.cuda.current_stream(rows.device).record_event().synchronize


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors in host memory. All copies begin before the first one is waited for."""
    copies = [to_host(one) for one in tensors]
    for _, arrive in copies:
        if arrive is not None:
            arrive()
    return [copy for copy, _ in copies]


def host_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return new host memory of the dtype of ``like``, page-locked if that is on a GPU.

    Torch lends page-locked memory again once copies from it are done.
    """
    return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.device.type == "cuda")
