"""What a user may tell a loader, checked when it arrives."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglx_dist.errors import ConfigError
from dglx_dist.records import Array
from dglx_dist.sampling.precision import check_float

_NEEDLESS = {
    "use_uva": "features are read by the processor, on the loader's threads",
    "use_ddp": "pass each rank its own indices: dx.node_split(mask)",
    "num_workers": "batches are made on threads: see num_threads=",
    "pin_memory": "batches are moved to device= by the loader",
    "persistent_workers": "there are no worker processes",
    "use_prefetch_thread": "batches are always made ahead, depth= of them",
    "use_alternate_streams": "batches are moved to device= by the loader",
    "pin_prefetcher": "batches are moved to device= by the loader",
    "gpu_cache": "features are read by the processor, on the loader's threads",
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a loader makes its batches."""

    seed: int | None = None
    """Of the order and the draws; None: the session's."""
    depth: int = 1
    """Batches made ahead, never fewer than ``num_threads``. Each costs its memory."""
    num_threads: int = 1
    """How many batches are made at a time; 0: in the training loop itself."""
    device: torch.device | str | None = None
    """Where batches shall be; None: the session's device."""
    exclude: Tensor | Array | Mapping[Any, Tensor | Array] | None = None
    """(X,) ids of edges that are never drawn, by edge type when there are several; on all ranks the same if
    servers hold parts of the graph."""
    feature_dtype: torch.dtype | None = None
    """What floating-point input and edge columns become in blocks; None: float32 where they are stored as
    float16 or bfloat16, else what is stored."""


def read_options(options: Mapping[str, Any]) -> LoaderOptions:
    """Check the loader's options; those of DGL's loader that are of no use here are warned about.

    Raises:
        ConfigError: an option is unknown or has a value that cannot be honoured.
    """
    known = [field.name for field in fields(LoaderOptions)]
    for name in options:
        if name in _NEEDLESS:
            if options[name]:
                warnings.warn(f"{name}={options[name]} has no effect: {_NEEDLESS[name]}", stacklevel=3)
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"the loader has no option {name!r}{hint} (known: {', '.join(known)})")
    read = LoaderOptions(**{name: value for name, value in options.items() if name in known})
    whole_number("depth", read.depth, least=1)
    whole_number("num_threads", read.num_threads, least=0)
    if read.seed is not None:
        whole_number("seed", read.seed, least=0)
    if read.device is not None:
        _check_device(read.device)
    check_float(read.feature_dtype)
    # Threads beyond the depth would have nothing to do.
    return replace(read, depth=max(read.depth, read.num_threads))


def _check_device(device: object) -> None:
    try:
        torch.device(device)  # type: ignore[call-overload]  # whatever the user gave
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={device!r} is no device ({reason}); give e.g. 'cpu' or 'cuda:0'") from None


def whole_number(name: str, value: object, *, least: int) -> int:
    """Return ``value`` as an int that 64 bits hold.

    Raises:
        ConfigError: it is no whole number, below ``least``, or too large.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value < 1 << 63:
        raise ConfigError(f"{name}={value!r}; give a whole number of at least {least} and below 2**63")
    return int(value)
