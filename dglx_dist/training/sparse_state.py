"""Embeddings inside a checkpoint: a folder for each optimiser, to which each rank writes the rows it owns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from dglx_dist.errors import CheckpointError, StorageError
from dglx_dist.graph.opening import together
from dglx_dist.graph.sparse_files import check_state, read_state, write_state
from dglx_dist.graph.sparse_optimizer import SparseOptimizer

Sparse: TypeAlias = SparseOptimizer | Sequence[SparseOptimizer] | None
"""One optimiser of embeddings, several in an order that stays the same, or none."""

FOLDER = "sparse"


def optimizers_of(sparse: Sparse) -> Sequence[SparseOptimizer]:
    """Return what was given as a sequence."""
    if sparse is None:
        return ()
    return (sparse,) if isinstance(sparse, SparseOptimizer) else tuple(sparse)


def save_sparse(sparse: Sparse, checkpoint: Path) -> int:
    """Write embeddings and optimiser state below ``checkpoint``, which exists; every rank must call it.

    Returns:
        The number of optimisers.

    Raises:
        CheckpointError: on all ranks, when one cannot write.
    """
    optimizers = optimizers_of(sparse)
    for number, optimizer in enumerate(optimizers):
        _save_one(optimizer, _folder(checkpoint, number))
    return len(optimizers)


def check_sparse(checkpoint: Path, saved: int, sparse: Sparse) -> None:
    """Look whether ``sparse`` can be loaded; one rank alone.

    Args:
        checkpoint: A finished one.
        saved: The number of optimisers it has.
        sparse: What the user wants to load.

    Raises:
        CheckpointError: it has embeddings and nothing to load them into, or the other way round, or they are
            damaged or of another dataset, optimiser or number of optimisers.
    """
    optimizers = optimizers_of(sparse)
    if saved and not optimizers:
        raise CheckpointError(f"{checkpoint} has embeddings, which belong to the model; give sparse=")
    if optimizers and not saved:
        raise CheckpointError(f"{checkpoint} has no embeddings; load it without ``sparse``")
    if len(optimizers) != saved:
        raise CheckpointError(
            f"{checkpoint} has {saved} optimisers of embeddings, sparse= has {len(optimizers)}; give those "
            "that it was saved with, in that order"
        )
    for number, optimizer in enumerate(optimizers):
        try:
            check_state(optimizer.saved_state, _folder(checkpoint, number))
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def load_sparse(sparse: Sparse, checkpoint: Path) -> None:
    """Overwrite embeddings and optimiser state by the saved ones; every rank must call it.

    Raises:
        CheckpointError: a file cannot be read any more, after :func:`check_sparse` could.
    """
    for number, optimizer in enumerate(optimizers_of(sparse)):
        optimizer.flush()
        try:
            optimizer.lr = read_state(optimizer.saved_state, _folder(checkpoint, number), optimizer.session)
        except StorageError as error:
            raise CheckpointError(str(error)) from error


def _save_one(optimizer: SparseOptimizer, folder: Path) -> None:
    optimizer.flush()
    session = optimizer.session

    def make() -> None:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {folder}: {error}; free space, or choose another folder"
            ) from error

    together(session, lambda: make() if session.topology.rank == 0 else None, CheckpointError)
    try:
        write_state(optimizer.saved_state, folder, session)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _folder(checkpoint: Path, number: int) -> Path:
    return checkpoint / FOLDER / str(number)
