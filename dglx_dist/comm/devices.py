"""Choose each rank's device and a torch.distributed backend that all of them allow, and copy to devices."""

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
"""Request for a GPU if one can be used, or else the CPU."""
_REMEDY = "Use device='cpu', or 'auto' to get a GPU only if there is one."
_NCCL = "cpu:gloo,cuda:nccl"


def count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use_gpu(index: int) -> str:
    """Select a GPU, compute on it, and return its identity. Raise RuntimeError if it cannot compute."""
    torch.cuda.set_device(index)  # This is what "cuda" without an index means in the user's code.
    torch.ones(1, device=torch.device("cuda", index)).add_(1).item()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(uuid or f"{socket.gethostname()}, cuda:{index}")


def is_built_for_gpus() -> bool:
    return bool(torch.version.cuda or torch.version.hip)


def explain_missing_gpu() -> str:
    """Return why :func:`count_gpus` is 0."""
    reason = "finds no GPU with a driver here" if is_built_for_gpus() else "is built without CUDA"
    return f"torch {torch.__version__} {reason}"


def check_device(device: object, name: str = "device") -> torch.device:
    """Return ``device`` if this process has it. Otherwise raise ConfigError with ``name`` as the option."""
    try:
        checked = torch.device(device)  # type: ignore[call-overload]  # any object of the user
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name}={device!r} is not a device. Use 'cpu', 'cuda', or 'cuda:0'.") from error
    if checked.type != "cuda":
        return checked

    count = count_gpus()
    if not count:
        raise ConfigError(f"{name}={str(device)!r}, but {explain_missing_gpu()}. {_REMEDY}")
    if (checked.index or 0) >= count:
        available = ", ".join(f"cuda:{index}" for index in range(count))
        raise ConfigError(f"{name}={str(device)!r}, but this machine has {available}. Use one of them.")
    return checked


def _select_request(device: object, variable: str | None) -> tuple[str, object]:
    """Return the request's name in messages, and its value. DGLX_DEVICE replaces ``auto``."""
    if variable and device in (None, AUTO):
        return "DGLX_DEVICE", variable
    return "device", device


def check_request(device: object, variable: str | None) -> torch.device | None:
    """Return the requested device, or None for ``auto``. Raise ConfigError if the device does not exist.

    ``variable`` is DGLX_DEVICE's value, which applies if ``device`` is ``auto``.
    """
    name, value = _select_request(device, variable)
    if value in (None, AUTO):
        return None
    requested = check_device(value, name)
    if requested.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name}={str(value)!r}: ranks train on GPUs or CPUs. Use auto, cuda or cpu.")
    return requested


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """A rank's device, as JSON values."""

    name: str = "cpu"
    card: str = ""
    """The GPU's identity, or "" for the CPU."""
    why: str = ""
    """Reason for the CPU, or "" if it was requested or the device is a GPU."""
    problem: str = ""
    """Reason if the rank does not have its requested device, or ""."""


def take_device(device: object, local_rank: int, variable: str | None = None) -> RankDevice:
    """Take the requested device, or choose a GPU by ``local_rank``.

    Raises nothing. A problem is in the result, because the other ranks have to learn about it.
    """
    try:
        requested = check_request(device, variable)
    except ConfigError as error:
        return RankDevice(problem=str(error))
    if requested is not None and requested.type == "cpu":
        return RankDevice()

    num_gpus = count_gpus()
    if num_gpus == 0:
        return RankDevice(why=explain_missing_gpu())
    index = local_rank % num_gpus
    if requested is not None and requested.index is not None:
        index = requested.index

    try:
        return RankDevice(name=f"cuda:{index}", card=use_gpu(index))
    except RuntimeError as error:
        reason = f"cuda:{index} cannot be used ({str(error).splitlines()[0]})"
    if requested is None:
        return RankDevice(why=reason)
    name, value = _select_request(device, variable)
    return RankDevice(problem=f"{name}={str(value)!r}: {reason}. See nvidia-smi. {_REMEDY}")


def choose_backend(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str | None) -> str:
    """Choose a torch.distributed backend that fits the devices of all ranks.

    Args:
        ranks: Device by rank.
        hosts: Machine by rank.
        backend: The user's choice, which is returned if it is possible. None: NCCL if every rank has its own
            GPU, otherwise gloo.

    Raises:
        ConfigError: If a rank does not have its requested device, if only some ranks have a GPU, or if NCCL
            is requested although ranks share a GPU.
    """
    for rank, device in enumerate(ranks):
        if device.problem:
            location = f"rank {rank} on {hosts[rank]}: " if len(ranks) > 1 else ""
            raise ConfigError(location + device.problem)

    on_cpu = [rank for rank, device in enumerate(ranks) if not device.card]
    on_gpu = [rank for rank, device in enumerate(ranks) if device.card]
    if on_cpu and on_gpu:
        gpu_rank, cpu_rank = on_gpu[0], on_cpu[0]
        cpu_reason = ranks[cpu_rank].why or "as requested"
        raise ConfigError(
            f"ranks have different devices: rank {gpu_rank} on {hosts[gpu_rank]} has {ranks[gpu_rank].name}, "
            f"rank {cpu_rank} on {hosts[cpu_rank]} has the CPU ({cpu_reason}). "
            "Give every rank a GPU, or pass device='cpu' to all."
        )

    shares_gpu = _share_gpu(ranks)
    if backend is None:
        can_use_nccl = on_gpu and not shares_gpu and dist.is_nccl_available()
        return _NCCL if can_use_nccl else "gloo"
    if shares_gpu and "nccl" in backend:
        raise ConfigError(
            f"backend={backend!r}, but ranks share a GPU, which NCCL does not support. Leave backend out."
        )
    return backend


def _share_gpu(ranks: Sequence[RankDevice]) -> bool:
    cards = [device.card for device in ranks if device.card]
    return len(set(cards)) < len(cards)


def describe(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str) -> str:
    """Say in one line which devices the ranks have, how rows travel between them, and why."""
    names = list(dict.fromkeys(device.name for device in ranks))
    devices = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    num_machines = len(set(hosts))
    group = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    if num_machines > 1:
        group += f" on {num_machines} machines"

    if _share_gpu(ranks):
        return f"{group} share {devices}: rows go through host memory by gloo"

    line = f"{group}, {devices}"
    if len(ranks) > 1:
        uses_nccl = ranks[0].card and "nccl" in backend
        line += ", NCCL" if uses_nccl else ", gloo"
    if ranks[0].why:
        line += f": {ranks[0].why}"
    return line


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def get_device_memory(device: torch.device) -> int:
    """Return the GPU's memory in bytes, or 0 on the CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


T = TypeVar("T")


def resolve_device(requested: torch.device | str | None, rank_device: torch.device) -> torch.device:
    """Return the ``requested`` device on a rank with device ``rank_device``. The default is ``rank_device``.

    Raises ConfigError if it is not a device, or this machine does not have it.
    """
    if requested is None:
        return rank_device
    device = check_device(requested)
    if device.index is None and device.type == rank_device.type:
        return rank_device
    if device.index is None and device.type == "cuda":
        # On another thread than this one, "cuda" without an index would mean the first GPU.
        return torch.device("cuda", torch.cuda.current_device())
    return device


@final
class Streams:
    """One GPU's copy stream, and page-locked memory. Thread-safe. Tests replace it on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate this

    def use(self) -> AbstractContextManager[Any]:
        """Make the copy stream and its device this thread's current ones in a ``with`` block."""
        return torch.cuda.stream(self._stream)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def copy(self, pinned: Tensor) -> Tensor:
        return pinned.to(self._device, non_blocking=True)

    def record_event(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        """Let the current stream's later work wait for ``event``.

        Keep ``tensors`` alive until it is done.
        """
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            # Otherwise a later copy could get this memory while the current stream still computes with it.
            tensor.record_stream(current)


@final
class CopyStream:
    """Copies batches to a device while the device computes. The host never waits. Thread-safe."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[Any, list[Tensor]]] = deque()
        """Tensors that are being copied. They are kept until the copies are done, and then their memory may
        be reused.
        """

    def copy_async(self, move: Callable[[Copy], T]) -> tuple[T, Callable[[], None]]:
        """Call ``move`` with a function that copies tensors. Return its result and a function to call.

        The consumer calls that function once, on its own thread and stream, before it uses the copies.
        """
        sources: list[Tensor] = []
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            sources.append(self._streams.pin(tensor))
            copies.append(self._streams.copy(sources[-1]))
            return copies[-1]

        with self._streams.use():
            try:
                result = move(copy)
            finally:
                done = self._streams.record_event()
                self._keep(done, sources)

        def arrive() -> None:
            self._streams.wait(done, copies)
            copies.clear()

        return result, arrive

    def _keep(self, done: Any, sources: list[Tensor]) -> None:
        with self._lock:
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((done, sources))


def open_copy_stream(device: torch.device) -> CopyStream | None:
    """Return a copy stream for one loader's batches, or None if ``device`` needs no stream."""
    return CopyStream(Streams(device)) if device.type == "cuda" else None


def copy_async(
    copies: CopyStream | None, device: torch.device, move: Callable[[Copy], T]
) -> tuple[T, Callable[[], None] | None]:
    """Call :meth:`CopyStream.copy_async`, or copy at once if there is no stream."""
    return (move(lambda tensor: tensor.to(device)), None) if copies is None else copies.copy_async(move)


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def start_copy_to_host(rows: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Return ``rows`` contiguous in host memory, and a function that waits for the copy if one is running."""
    if rows.device.type != "cuda":
        return rows.contiguous().cpu(), None
    host = allocate_host_memory(rows.shape, rows)
    host.copy_(rows, non_blocking=True)
    return host, torch.cuda.current_stream(rows.device).record_event().synchronize


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors in host memory. All copies begin before the first one is waited for."""
    copies = [start_copy_to_host(tensor) for tensor in tensors]
    for _, arrive in copies:
        if arrive is not None:
            arrive()
    return [copy for copy, _ in copies]


def allocate_host_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate host memory with the dtype of ``like``, page-locked if ``like`` is on a GPU.

    Torch reuses page-locked memory once copies from it are done.
    """
    return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.device.type == "cuda")
