"""Store a checkpoint's tensors one after another in a file, with their names, positions and checksums."""

import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dglx_dist.comm.exchange import view_bytes
from dglx_dist.errors import CheckpointError
from dglx_dist.training.checkpoint_folder import REMEDY, read_count
from dglx_dist.training.object_state import format_dtype, parse_dtype


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor's position, type and checksum in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    first_byte: int
    crc32: int

    def read(self, name: str) -> Tensor:
        """Read the tensor. Raise CheckpointError if its file is too short or its bytes have changed."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        buffer = view_bytes(tensor)
        with self.path.open("rb") as file:
            file.seek(self.first_byte)
            num_bytes = file.readinto(buffer)
        if num_bytes != len(buffer) or zlib.crc32(buffer) != self.crc32:
            raise CheckpointError(f"{self.path} is damaged in {name!r} (byte {self.first_byte}); {REMEDY}")
        return tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, dict[str, Any]]:
    """Write ``tensors`` to a new file and flush it to disk. Return their entries for ``state.json``."""
    entries = {}
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            data = view_bytes(tensor.detach().cpu().contiguous())
            entries[name] = {
                "dtype": format_dtype(tensor),
                "shape": list(tensor.shape),
                "file": path.name,
                "first_byte": file.tell(),
                "num_bytes": len(data),
                "crc32": zlib.crc32(data),
            }
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return entries


def read_entry(folder: Path, name: str, entry: Mapping[str, Any]) -> SavedTensor:
    """Check an entry in ``state.json``. Nothing is allocated, as an untrusted entry may have any size."""
    file_name = entry["file"]
    path = folder / file_name
    if path.name != file_name:
        raise CheckpointError(f"{folder} refers to {file_name!r} outside of it. Load another checkpoint.")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {REMEDY}")

    first_byte = read_count(entry["first_byte"])
    num_bytes = read_count(entry["num_bytes"])
    last_byte = first_byte + num_bytes
    if path.stat().st_size < last_byte:
        raise CheckpointError(f"{path} is damaged: it is shorter than {last_byte} bytes; {REMEDY}")

    dtype = parse_dtype(entry["dtype"])
    shape = tuple(read_count(size) for size in entry["shape"])
    if num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has the shape {list(shape)} of {dtype} and {num_bytes} bytes")
    crc32 = read_count(entry["crc32"])
    return SavedTensor(dtype=dtype, shape=shape, path=path, first_byte=first_byte, crc32=crc32)


def add_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in tensors.items()}


def select_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under names with ``prefix``, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_model(path: Path, saved_tensors: Mapping[str, SavedTensor], model: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the saved model's names, shapes or dtypes differ from those in ``model``."""
    remedy = "Build the model as in the saved run."
    saved_model = select_prefix("model/", saved_tensors)
    for name in model:
        if name not in saved_model:
            raise CheckpointError(f"this model has {name!r}, but {path} does not. {remedy}")

    for name, saved in saved_model.items():
        tensor = model.get(name)
        if tensor is None:
            if name.endswith("target_scale"):
                remedy = "For a regression, first call model.standardise(torch.zeros(K), torch.ones(K))."
            raise CheckpointError(f"{path} has {name!r}, but this model does not. {remedy}")
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            raise CheckpointError(
                f"{name!r} is {saved.shape} {saved.dtype} in {path} but "
                f"{tuple(tensor.shape)} {tensor.dtype} in this model. {remedy}"
            )
