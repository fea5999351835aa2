"""Embeddings and their optimiser's state in a folder: each rank writes its rows, any number reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dglx_dist.comm.collectives import barrier, gather_int64
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.row_files import RowFile, check_rows, read_index, read_rows, write_rows
from dglx_dist.errors import StorageError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.opening import together
from dglx_dist.graph.row_kernels import column_info, numpy_view
from dglx_dist.graph.shared_memory import fill_folder, save_folder
from dglx_dist.graph.sparse_update import OwnedRows


@dataclass(frozen=True, kw_only=True)
class SparseState:
    """What is saved: the same on all ranks but for ``steps`` in mode "async"."""

    kind: str
    """Name of the optimiser's class."""
    lr: float
    settings: Mapping[str, float]
    dataset: str
    """Checksum of the dataset whose ids the rows have."""
    tables: Sequence[OwnedRows]

    def embeddings(self) -> list[dict[str, Any]]:
        """Return what must be equal when the rows are read, by embedding."""
        return [
            {
                "name": table.embedding.name,
                "shape": list(table.embedding.weight.shape),
                "dtype": str(table.embedding.weight.dtype),
            }
            for table in self.tables
        ]

    def tensors(self) -> Iterator[tuple[str, OwnedRows, DistTensor]]:
        """Yield (name in the folder, owned rows, tensor)."""
        for number, table in enumerate(self.tables):
            yield f"{number}.weight", table, table.embedding.weight
            for name, state in zip(table.rule.state_names, table.states, strict=True):
                yield f"{number}.{name}", table, state

    def write_own(self, folder: Path) -> list[RowFile]:
        """Write the rows that this rank owns, one file per tensor."""
        return [
            write_rows(
                folder,
                name,
                table.first,
                numpy_view(_own(table, tensor)),
                info=column_info(tensor.dtype, tensor.shape[1:]),
            )
            for name, table, tensor in self.tensors()
        ]


def save_state(state: SparseState, folder: Path, session: Session) -> None:
    """Write ``state`` as ``folder``, in the place of what was saved there; every rank must call it.

    Raises:
        StorageError: on all ranks, when one cannot write, or ``folder`` holds something else than saved
            rows; what was in it before is unchanged.
    """
    save_folder(session, folder, state.write_own, _facts(state, session))


def write_state(state: SparseState, folder: Path, session: Session) -> None:
    """Write ``state`` into an empty folder that all ranks see; every rank must call it.

    Raises:
        StorageError: on all ranks, when one cannot write.
    """
    fill_folder(session, folder, state.write_own, _facts(state, session))


def check_state(state: SparseState, folder: Path) -> None:
    """Look whether ``folder`` holds what ``state`` has, and whether this rank's rows are intact.

    Raises:
        StorageError: it does not; the message names the first difference. Or a file is missing or damaged.
    """
    index = read_index(folder)
    facts = index.facts
    mine = {"kind": state.kind, "dataset": state.dataset, "settings": dict(state.settings)}
    for what, value in mine.items():
        if facts.get(what) != value:
            cure = "use the dataset and the optimiser that it was saved with"
            if what == "dataset":
                cure = "use the dataset that it was saved with (dx.distribute cuts another one for "
                cure += "another number of servers, unless parts= is given)"
            raise StorageError(
                f"{folder} was saved with {what} {facts.get(what)!r}, this run has {value!r}; {cure}"
            )
    saved = cast("list[object]", facts.get("embeddings"))
    if saved != state.embeddings():
        raise StorageError(
            f"{folder} holds the embeddings {saved}, this optimiser has {state.embeddings()}; make them as "
            "they were, with name= and in the same order"
        )
    steps, lr = facts.get("steps"), facts.get("lr")
    if not isinstance(lr, int | float) or not isinstance(steps, list) or len(steps) != len(state.tables):
        raise StorageError(f"{folder} is damaged: lr is {lr!r} and steps {steps!r}; use another copy")
    if not all(isinstance(count, int) and count >= 0 for count in steps):
        raise StorageError(f"{folder} is damaged: steps is {steps!r}; use another copy")
    for name, table, _ in state.tensors():
        check_rows(folder, index.tensor(name, folder), table.first, table.last)


def read_state(state: SparseState, folder: Path, session: Session) -> float:
    """Overwrite this rank's rows and steps by those of ``folder``; every rank must call it.

    Call :func:`check_state` on all ranks before.

    Returns:
        The saved learning rate.

    Raises:
        StorageError: a file cannot be read any more.
    """

    def read_own() -> Mapping[str, object]:
        index = read_index(folder)
        for name, table, tensor in state.tensors():
            out = numpy_view(_own(table, tensor))
            read_rows(folder, index.tensor(name, folder), table.first, table.last, out)
        return index.facts

    facts = cast("dict[str, Any]", together(session, read_own))
    for table, steps in zip(state.tables, facts["steps"], strict=True):
        table.steps = int(steps)
    barrier(session, f"loading {folder}")
    return float(facts["lr"])


def _facts(state: SparseState, session: Session) -> dict[str, object]:
    """Return what the index says of the whole; collective."""
    steps = gather_int64([table.steps for table in state.tables], session).max(axis=0)
    return {
        "kind": state.kind,
        "lr": state.lr,
        "settings": dict(state.settings),
        "dataset": state.dataset,
        "embeddings": state.embeddings(),
        "steps": steps.tolist(),
    }


def _own(table: OwnedRows, tensor: DistTensor) -> Any:
    start = tensor.local_range[0]
    return tensor.local_rows()[table.first - start : table.last - start]
