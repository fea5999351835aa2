"""A distributed tensor in a folder: each rank writes and reads the rows it owns, whatever their number."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from dglx_dist.cluster.collectives import barrier
from dglx_dist.errors import StorageError
from dglx_dist.graph.column import Column
from dglx_dist.graph.opening import together
from dglx_dist.graph.owners import RowOwners
from dglx_dist.graph.policy import PartitionPolicy
from dglx_dist.graph.row_folders import save_folder
from dglx_dist.records import Array
from dglx_dist.storage.columns import numpy_dtype
from dglx_dist.storage.row_files import RowFile, SavedRows, check_rows, read_index, read_rows, write_rows


def save_rows(folder: str | Path, name: str, policy: PartitionPolicy, key: str) -> None:
    """Write a tensor into ``folder``, which holds it wholly or as before. Every rank must call it.

    Every rank writes the rows it owns as one file; when all are there, rank 0 writes the index and gives the
    folder its name. What is pushed meanwhile may be saved or not.

    Args:
        folder: Seen by all ranks under this name; what was saved there before is replaced.
        name: Of the tensor in the folder.
        policy: How its rows are laid over the servers.
        key: Its name in the store.

    Raises:
        StorageError: on all ranks, when one cannot write or does not see the folder, or when it holds
            something else than a saved tensor; what was there is unchanged.
    """
    store = policy.store

    def write_own(temporary: Path) -> list[RowFile]:
        column, (first, last) = store.column(key), _owned(policy)
        rows = _rows_of(column, first, last)
        return [write_rows(temporary, name, first, rows, info=column.info)]

    def settle() -> Path:
        store.fence()
        return Path(folder)

    target = together(store.session, settle)
    facts = {"policy": policy.policy_str, "dataset": policy.dataset}
    save_folder(store.session, target, write_own, facts)


def load_rows(folder: str | Path, name: str | None, policy: PartitionPolicy, key: str) -> None:
    """Fill a tensor from what :func:`save_rows` wrote on any number of ranks. Every rank must call it.

    Args:
        folder: Seen by all ranks.
        name: Of the tensor in the folder; None: the only one there.
        policy: How the rows of the tensor to fill are laid over the servers.
        key: Its name in the store.

    Raises:
        StorageError: on all ranks, when one finds the folder missing or damaged, or the tensor is of another
            shape, dtype or dataset. Nothing was changed then.
        ConfigError: the tensor belongs to the dataset on disk.
    """
    store = policy.store
    column = store.column(key)
    first, last = _owned(policy)

    def check() -> tuple[Path, SavedRows]:
        source = Path(folder)
        column.check_writable()
        store.fence()
        index = read_index(source)
        wanted = name if name is not None else _only(source, list(index.tensors))
        saved = index.tensor(wanted, source)
        _check_same(source, saved, index.facts, policy, column)
        check_rows(source, saved, first, last)
        return source, saved

    def read(source: Path, saved: SavedRows) -> None:
        for shard in column.shards:
            read_rows(source, saved, first, last, shard.rows[first - shard.first : last - shard.first])

    source, saved = together(store.session, check)
    together(store.session, lambda: read(source, saved))
    barrier(store.session, f"loading {key}")


def _owned(policy: PartitionPolicy) -> tuple[int, int]:
    topology = policy.store.session.topology
    return RowOwners(policy.bounds, topology).range_of(topology.rank)


def _rows_of(column: Column, first: int, last: int) -> Array:
    """Return the rows ``first`` to ``last - 1`` of the own server; a copy only when they lie in pieces."""
    for shard in column.shards:
        if shard.first <= first and last <= shard.first + len(shard.rows):
            return shard.rows[first - shard.first : last - shard.first]
    out = np.empty((last - first, *column.info.row_shape), numpy_dtype(column.info.dtype))
    column.read(np.arange(first, last), out)
    return out


def _only(folder: Path, names: list[str]) -> str:
    if len(names) != 1:
        raise StorageError(f"{folder} holds the tensors {', '.join(map(repr, names))}; say which with name=")
    return names[0]


def _check_same(
    folder: Path, saved: SavedRows, facts: object, policy: PartitionPolicy, column: Column
) -> None:
    shape = (column.num_rows, *column.info.row_shape)
    if (saved.shape, saved.info.dtype) != (shape, column.info.dtype):
        raise StorageError(
            f"{folder} holds {saved.name!r} as {saved.info.dtype} of shape {saved.shape}, and the tensor to "
            f"fill is {column.info.dtype} of shape {shape}; create one like it"
        )
    told = cast("dict[str, object]", facts)
    for what, mine in (("policy", policy.policy_str), ("dataset", policy.dataset)):
        # Rows of nobody's nodes or edges mean the same with any dataset, under any name.
        if policy.dataset and told.get(what) != mine:
            raise StorageError(
                f"{folder} holds {saved.name!r} of the {what} {told.get(what)!r}, and the tensor to fill "
                f"goes with {mine!r}; rows are numbered otherwise there; load it with its own dataset"
            )
