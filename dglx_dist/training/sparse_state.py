"""Embeddings inside a checkpoint: a folder of their own, to which each rank writes the rows it owns."""

from __future__ import annotations

from pathlib import Path

from dglx_dist.errors import CheckpointError, StorageError
from dglx_dist.graph.opening import together
from dglx_dist.graph.sparse_files import check_state, read_state, write_state
from dglx_dist.graph.sparse_optimizer import SparseOptimizer

FOLDER = "sparse"


def save_sparse(sparse: SparseOptimizer, checkpoint: Path) -> None:
    """Write embeddings and optimiser state below ``checkpoint``, which exists; every rank must call it.

    Raises:
        CheckpointError: on all ranks, when one cannot write.
    """
    sparse.flush()
    folder, session = checkpoint / FOLDER, sparse.session

    def make() -> None:
        try:
            folder.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"cannot write {folder}: {error}; free space, or choose another folder"
            ) from error

    together(session, lambda: make() if session.topology.rank == 0 else None, CheckpointError)
    try:
        write_state(sparse.saved_state, folder, session)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def check_sparse(checkpoint: Path, saved: bool, sparse: SparseOptimizer | None) -> None:
    """Look whether ``sparse`` can be loaded; one rank alone.

    Args:
        checkpoint: A finished one.
        saved: Whether it has embeddings.
        sparse: What the user wants to load them into.

    Raises:
        CheckpointError: it has embeddings and nothing to load them into, or the other way round, or they are
            damaged or of another dataset or optimiser.
    """
    if saved and sparse is None:
        raise CheckpointError(f"{checkpoint} has embeddings, which belong to the model; give sparse=")
    if sparse is None:
        return
    if not saved:
        raise CheckpointError(f"{checkpoint} has no embeddings; load it without ``sparse``")
    try:
        check_state(sparse.saved_state, checkpoint / FOLDER)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def load_sparse(sparse: SparseOptimizer, checkpoint: Path) -> None:
    """Overwrite embeddings and optimiser state by the saved ones; every rank must call it.

    Raises:
        StorageError: a file cannot be read any more, after :func:`check_sparse` could.
    """
    sparse.flush()
    sparse.lr = read_state(sparse.saved_state, checkpoint / FOLDER, sparse.session)
