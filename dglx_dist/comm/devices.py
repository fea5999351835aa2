"""The device of each rank, the backend of torch.distributed that all of them allow, and their memory."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.internals.pytorch import Copy

AUTO = "auto"
"""The request for a GPU where there is one that can be used, else the CPU."""
_REMEDY = "take device='cpu', or 'auto' for a GPU only where there is one"
_NCCL = "cpu:gloo,cuda:nccl"


def count_gpus() -> int:
    """Return how many GPUs torch finds in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use_gpu(number: int) -> str:
    """Make a GPU the current one, compute on it, and return its identity; RuntimeError: it cannot compute."""
    torch.cuda.set_device(number)  # the meaning of "cuda" without a number in the user's code
    torch.ones(1, device=torch.device("cuda", number)).add_(1).item()
    found = getattr(torch.cuda.get_device_properties(number), "uuid", None)
    return str(found or f"{socket.gethostname()}, cuda:{number}")


def is_built_for_gpus() -> bool:
    return bool(torch.version.cuda or torch.version.hip)


def explain_missing_gpu() -> str:
    """Return why :func:`count_gpus` is 0."""
    why = "finds no GPU with a driver here" if is_built_for_gpus() else "is built without CUDA"
    return f"torch {torch.__version__} {why}"


def check_device(device: object, name: str = "device") -> torch.device:
    """Return ``device`` if this process has it; ConfigError, by the ``name`` of the option, otherwise."""
    try:
        found = torch.device(device)  # type: ignore[call-overload]  # whatever the user gave
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{name}={device!r} is no device; give 'cpu', 'cuda', or one as 'cuda:0'"
        ) from error
    if found.type != "cuda":
        return found
    count = count_gpus()
    if not count:
        raise ConfigError(f"{name}={str(device)!r}, but {explain_missing_gpu()}; {_REMEDY}")
    if (found.index or 0) >= count:
        known = ", ".join(f"cuda:{number}" for number in range(count))
        raise ConfigError(f"{name}={str(device)!r}, but this machine has {known}; take one of them")
    return found


def _request(device: object, variable: str | None) -> tuple[str, object]:
    # Its name in messages, and the value.
    return ("DGLX_DEVICE", variable) if variable and device in (None, AUTO) else ("device", device)


def check_request(device: object, variable: str | None) -> torch.device | None:
    """Return the device that a session is to have, None for ``auto``; ConfigError: there is none such.

    ``variable`` is the value of DGLX_DEVICE, which stands for ``auto``.
    """
    name, asked = _request(device, variable)
    found = None if asked in (None, AUTO) else check_device(asked, name)
    if found is not None and found.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name}={str(asked)!r}: ranks train on GPUs or CPUs; give auto, cuda or cpu")
    return found


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """The device that a rank has taken. JSON values."""

    name: str = "cpu"
    card: str = ""
    """Identity of the GPU; "": the CPU."""
    why: str = ""
    """Why it is the CPU; "": it was asked for, or it is not."""
    problem: str = ""
    """Why the rank has not the device that it should have; "": it has."""


def take_device(device: object, local_rank: int, variable: str | None = None) -> RankDevice:
    """Take the device of :func:`check_request`, a GPU by the rank's number; an error is in the result."""
    try:
        wanted = check_request(device, variable)
    except ConfigError as error:
        return RankDevice(problem=str(error))
    if wanted is not None and wanted.type == "cpu":
        return RankDevice()
    if not (count := count_gpus()):
        return RankDevice(why=explain_missing_gpu())
    number = local_rank % count if wanted is None or wanted.index is None else wanted.index
    try:
        return RankDevice(name=f"cuda:{number}", card=use_gpu(number))
    except RuntimeError as error:
        unusable = f"cuda:{number} cannot be used ({str(error).splitlines()[0]})"
    if wanted is None:
        return RankDevice(why=unusable)
    name, asked = _request(device, variable)
    return RankDevice(problem=f"{name}={str(asked)!r}: {unusable}; see nvidia-smi, or {_REMEDY}")


def choose_backend(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str | None) -> str:
    """Return the backend for the (W,) devices of all ranks; ``backend`` is the user's.

    ConfigError: a rank has not the device that it should have, only some have a GPU, or NCCL is asked for
    where ranks share one.
    """
    for rank, one in enumerate(ranks):
        if one.problem:
            where = f"rank {rank} on {hosts[rank]}: " if len(ranks) > 1 else ""
            raise ConfigError(where + one.problem)
    without = next((rank for rank, one in enumerate(ranks) if not one.card), None)
    having = next((rank for rank, one in enumerate(ranks) if one.card), None)
    if without is not None and having is not None:
        raise ConfigError(
            f"ranks have different devices: rank {having} on {hosts[having]} has {ranks[having].name}, rank "
            f"{without} on {hosts[without]} the CPU ({ranks[without].why or 'as asked for'}); give every "
            "rank a GPU, or device='cpu' to all"
        )
    shares = len({one.card for one in ranks}) < len(ranks)
    if backend is not None:
        if shares and having is not None and "nccl" in backend:
            raise ConfigError(
                f"backend={backend!r}, but ranks share a GPU, which NCCL does not support; leave backend out"
            )
        return backend
    return "gloo" if shares or having is None or not dist.is_nccl_available() else _NCCL


def describe(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str) -> str:
    """Return one line: the devices of all ranks, how rows go between them, and why."""
    names, machines = list(dict.fromkeys(one.name for one in ranks)), len(set(hosts))
    shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    who = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    who += f" on {machines} machines" if machines > 1 else ""
    if len({one.card for one in ranks}) < len(ranks) and ranks[0].card:
        return f"{who} share {shown}: rows go through host memory by gloo"
    by = "NCCL" if ranks[0].card and "nccl" in backend else "gloo"
    how = "" if len(ranks) == 1 else f", {by}"
    return f"{who}, {shown}{how}" + (f": {ranks[0].why}" if ranks[0].why else "")


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has computed all that was submitted to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def get_device_memory(device: torch.device) -> int:
    """Return the bytes of the GPU's memory; 0 on the CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


T = TypeVar("T")


def resolve_device(given: torch.device | str | None, own: torch.device) -> torch.device:
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

    def pin(self, tensor: Tensor) -> Tensor:
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

    def copy_async(self, move: Callable[[Copy], T]) -> tuple[T, Callable[[], None]]:
        """Return what ``move`` makes with a function that copies tensors, and what its consumer must call.

        The consumer calls that once, on its own thread and stream, before it uses the copies.
        """
        sources: list[Tensor] = []
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            sources.append(self._streams.pin(tensor))
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


def open_copy_stream(device: torch.device) -> CopyStream | None:
    """Return what copies the batches of one loader to ``device``; None: no streams are used for it."""
    return CopyStream(Streams(device)) if device.type == "cuda" else None


def copy_async(
    copies: CopyStream | None, device: torch.device, move: Callable[[Copy], T]
) -> tuple[T, Callable[[], None] | None]:
    """:meth:`CopyStream.copy_async`, or without ``copies`` at once: then there is nothing to call."""
    return (move(lambda tensor: tensor.to(device)), None) if copies is None else copies.copy_async(move)


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def to_host(rows: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Return ``rows`` contiguous in host memory, and what waits until they have arrived; None: they have."""
    if rows.device.type != "cuda":
        return rows.contiguous().cpu(), None
    host = allocate_host_memory(rows.shape, rows)
    host.copy_(rows, non_blocking=True)
    return host, torch.cuda.current_stream(rows.device).record_event().synchronize


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors in host memory. All copies begin before the first one is waited for."""
    copies = [to_host(one) for one in tensors]
    for _, arrive in copies:
        if arrive is not None:
            arrive()
    return [copy for copy, _ in copies]


def allocate_host_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return new host memory of the dtype of ``like``, page-locked if that is on a GPU.

    Torch lends page-locked memory again once copies from it are done.
    """
    return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.device.type == "cuda")
