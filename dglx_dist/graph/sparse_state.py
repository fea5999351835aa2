"""Saved embeddings and optimiser states: each rank writes its rows, any number of ranks reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dglx_dist.comm.collectives import barrier, gather_int64, run_on_all_ranks
from dglx_dist.comm.session import Session
from dglx_dist.data.storage.row_files import RowFile, check_rows, read_index, read_rows, write_rows
from dglx_dist.errors import StorageError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.row_kernels import column_info, numpy_view
from dglx_dist.graph.shared_memory import fill_folder, save_folder
from dglx_dist.graph.sparse_update import OwnedRows


@dataclass(frozen=True, kw_only=True)
class SparseState:
    """The saved state, equal on all ranks except for ``steps`` in mode "async"."""

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
        return [
            write_rows(
                folder,
                name,
                table.first,
                numpy_view(_owned_rows(table, tensor)),
                info=column_info(tensor.dtype, tensor.shape[1:]),
            )
            for name, table, tensor in self.tensors()
        ]


def save_state(state: SparseState, folder: Path, session: Session) -> None:
    """Write ``state`` as ``folder``, replacing what was saved there; collective.

    Raises:
        StorageError: on all ranks, when one cannot write, or ``folder`` holds something other than saved
            rows; its former content is unchanged.
    """
    save_folder(session, folder, state.write_own, _facts(state, session))


def write_state(state: SparseState, folder: Path, session: Session) -> None:
    """Write ``state`` into an empty folder that all ranks see; collective. Raises as :func:`save_state`."""
    fill_folder(session, folder, state.write_own, _facts(state, session))


def check_state(state: SparseState, folder: Path) -> None:
    """Raise StorageError unless ``folder`` holds the state's tensors, with this rank's rows intact.

    The message names the first difference, or the missing or damaged file.
    """
    index = read_index(folder)
    facts = index.facts
    expected = {"kind": state.kind, "dataset": state.dataset, "settings": dict(state.settings)}
    for what, value in expected.items():
        if facts.get(what) != value:
            remedy = "use the dataset and the optimiser that it was saved with"
            if what == "dataset":
                remedy = "use the dataset that it was saved with (dx.distribute cuts another one for "
                remedy += "another number of servers, unless parts= is given)"
            raise StorageError(
                f"{folder} was saved with {what} {facts.get(what)!r}, this run has {value!r}; {remedy}"
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
    """Overwrite this rank's rows and steps by those of ``folder``; return the saved learning rate.

    Collective; call :func:`check_state` on all ranks before.

    Raises:
        StorageError: a file cannot be read any more.
    """

    def read_own() -> Mapping[str, object]:
        index = read_index(folder)
        for name, table, tensor in state.tensors():
            out = numpy_view(_owned_rows(table, tensor))
            read_rows(folder, index.tensor(name, folder), table.first, table.last, out)
        return index.facts

    facts = cast("dict[str, Any]", run_on_all_ranks(session, read_own))
    for table, steps in zip(state.tables, facts["steps"], strict=True):
        table.steps = int(steps)
    barrier(session, f"loading {folder}")
    return float(facts["lr"])


def _facts(state: SparseState, session: Session) -> dict[str, object]:
    """Return the content of the index; collective."""
    steps = gather_int64([table.steps for table in state.tables], session).max(axis=0)
    return {
        "kind": state.kind,
        "lr": state.lr,
        "settings": dict(state.settings),
        "dataset": state.dataset,
        "embeddings": state.embeddings(),
        "steps": steps.tolist(),
    }


def _owned_rows(table: OwnedRows, tensor: DistTensor) -> Any:
    start = tensor.local_range[0]
    return tensor.local_rows()[table.first - start : table.last - start]
