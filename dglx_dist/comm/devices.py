"""The device of each rank, the backend of torch.distributed that all of them allow, and their memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dglx_dist.errors import ConfigError

AUTO = "auto"
"""The request for a GPU where there is one that can be used, else the CPU."""
_REMEDY = "take device='cpu', or 'auto' for a GPU only where there is one"
_NCCL = "cpu:gloo,cuda:nccl"


def num_gpus() -> int:
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


def no_gpu() -> str:
    """Return why :func:`num_gpus` is 0."""
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
    count = num_gpus()
    if not count:
        raise ConfigError(f"{name}={str(device)!r}, but {no_gpu()}; {_REMEDY}")
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
    if not (count := num_gpus()):
        return RankDevice(why=no_gpu())
    number = local_rank % count if wanted is None or wanted.index is None else wanted.index
    try:
        return RankDevice(name=f"cuda:{number}", card=use_gpu(number))
    except RuntimeError as error:
        unusable = f"cuda:{number} cannot be used ({str(error).splitlines()[0]})"
    if wanted is None:
        return RankDevice(why=unusable)
    name, asked = _request(device, variable)
    return RankDevice(problem=f"{name}={str(asked)!r}: {unusable}; see nvidia-smi, or {_REMEDY}")


def backend_of(ranks: Sequence[RankDevice], hosts: Sequence[str], backend: str | None) -> str:
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


def device_memory(device: torch.device) -> int:
    """Return the bytes of the GPU's memory; 0 on the CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
