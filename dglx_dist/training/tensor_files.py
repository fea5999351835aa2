"""Storage for ``torch.distributed.checkpoint`` in raw bytes and JSON, so that loading executes no code.

A folder has ``tensors-<rank>.bin`` (the bytes of one tensor after another) and ``tensors.json`` (position,
dtype, shape and CRC-32 of each piece).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dglx_dist.errors import CheckpointError

INDEX_NAME = "tensors.json"
_REMEDY = "load an older checkpoint; with --resume, move its folder away and the one before it is taken"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Position of one tensor, or of one shard of it."""

    file: str
    first_byte: int
    num_bytes: int
    crc32: int


@final
class RawWriter(StorageWriter):
    """Writes the tensors of this rank into its own file; the coordinator writes the index.

    Args:
        folder: An existing folder, the same on every rank.
        rank: This rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = f"tensors-{rank}.bin"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # One writer writes one checkpoint.

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass  # The folder exists.

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and flush this rank's tensors.

        Raises:
            CheckpointError: an item is not a tensor.
        """
        results = []
        with (self._folder / self._file).open("wb") as file:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    raise CheckpointError(f"{item.index.fqn!r} is not a tensor; put it into ``extra``")
                raw = bytes_of(planner.resolve_data(item))
                piece = Piece(
                    file=self._file, first_byte=file.tell(), num_bytes=len(raw), crc32=zlib.crc32(raw)
                )
                file.write(raw)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=len(raw), storage_data=asdict(piece))
                )
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # Only the coordinator calls it.
        tensors = {
            name: {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": list(tensor.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in tensor.chunks],
            }
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        pieces = [
            {"name": result.index.fqn, "offset": list(result.index.offset or ()), **result.storage_data}
            for of_rank in results
            for result in of_rank
        ]
        write_json(self._folder / INDEX_NAME, {"tensors": tensors, "pieces": pieces})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@final
class RawReader(StorageReader):
    """Reads the files of :class:`RawWriter` in a finished checkpoint ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[MetadataIndex, Piece] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[MetadataIndex, list[int]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # One reader reads one checkpoint.

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the index."""
        path = self._folder / INDEX_NAME
        index = read_json(path)
        with damage_named(path):
            _check_index(self._folder, index)
            return self._metadata(index)

    @staticmethod
    def _metadata(index: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=dtype_named(fields["dtype"])),
                    size=torch.Size(fields["shape"]),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                        for offsets, sizes in fields["chunks"]
                    ],
                )
                for name, fields in index["tensors"].items()
            },
            storage_data=index["pieces"],
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            self._dtypes[name] = tensor.properties.dtype
            for chunk in tensor.chunks:
                self._shapes[MetadataIndex(name, chunk.offsets)] = list(chunk.sizes)
        for fields in metadata.storage_data:
            key = MetadataIndex(fields["name"], fields["offset"])
            self._pieces[key] = Piece(**{name: fields[name] for name in Piece.__dataclass_fields__})

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested pieces into the tensors of ``planner``.

        Raises:
            CheckpointError: a file is shorter than the index says, or its bytes have changed.
        """
        for item in plan.items:
            stored = self._read(MetadataIndex(item.storage_index.fqn, item.storage_index.offset))
            for dimension, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dimension, first, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _read(self, key: MetadataIndex) -> Tensor:
        piece = self._pieces[key]
        path = self._folder / piece.file
        with path.open("rb") as file:
            file.seek(piece.first_byte)
            raw = file.read(piece.num_bytes)
        if len(raw) != piece.num_bytes or zlib.crc32(raw) != piece.crc32:
            raise CheckpointError(f"{path} is damaged in {key.fqn!r} (byte {piece.first_byte}); {_REMEDY}")
        flat = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(self._dtypes[key.fqn]).reshape(self._shapes[key])


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Name the file ``path`` in errors of values read from it, as CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as problem:
        raise CheckpointError(
            f"{path} is damaged ({type(problem).__name__}: {problem}); {_REMEDY}"
        ) from problem


def _check_index(folder: Path, index: Any) -> None:
    """Check that the pieces form complete tensors within files of ``folder``.

    Nothing is read or allocated before, because an untrusted index may have any file name and any size.

    Raises:
        CheckpointError: a file is not in the folder, or is too short.
        ValueError: pieces are missing, overlap or have another size than their tensor.
        KeyError, TypeError: the structure is wrong.
    """
    pieces = {}
    for fields in index["pieces"]:
        piece = Piece(**{key: fields[key] for key in Piece.__dataclass_fields__})
        _check_piece(folder, piece)
        pieces[fields["name"], tuple(fields["offset"])] = piece
    for name, fields in index["tensors"].items():
        shape, chunks = [whole(size) for size in fields["shape"]], fields["chunks"]
        item_bytes = dtype_named(fields["dtype"]).itemsize
        for offsets, sizes in chunks:
            ends = [whole(offset) + whole(size) for offset, size in zip(offsets, sizes, strict=True)]
            if len(ends) != len(shape) or any(map(int.__gt__, ends, shape)):
                raise ValueError(f"{name!r} has the shape {shape} and a piece that ends at {ends}")
            if pieces[name, tuple(offsets)].num_bytes != math.prod(sizes) * item_bytes:
                raise ValueError(f"a piece of {name!r} has another size than its shape")
        distinct = len({tuple(offsets) for offsets, _ in chunks})
        if distinct < len(chunks) or sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
            raise ValueError(f"the pieces of {name!r} do not form its shape")


def _check_piece(folder: Path, piece: Piece) -> None:
    path = folder / piece.file
    end = whole(piece.first_byte) + whole(piece.num_bytes)
    if path.name != piece.file:
        raise CheckpointError(f"{folder} refers to {piece.file!r} outside of it; load another checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {_REMEDY}")
    if path.stat().st_size < end:
        raise CheckpointError(f"{path} is damaged: it is shorter than {end} bytes; {_REMEDY}")


def whole(value: object) -> int:
    """Return ``value`` if it is a whole number of at least 0, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number of at least 0")
    return value


def bytes_of(tensor: Any) -> bytes:
    """Return the bytes of a tensor on any device, in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data)


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype ``name``, or raise CheckpointError."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the checkpoint has the dtype {name!r}, which this torch does not have")
    return found


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint; raise CheckpointError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; {_REMEDY}") from error
