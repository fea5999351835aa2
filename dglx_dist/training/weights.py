"""Weights of the best and of the last epoch: as plain files, and in memory of a run without checkpoints."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import barrier, broadcast_json, run_on_all_ranks
from dglx_dist.comm.exchange import bytes_of
from dglx_dist.comm.session import current_session
from dglx_dist.data.storage.files import named_failures, replaced_file
from dglx_dist.graph.optim import SparseOptimizer

log = logging.getLogger(__name__)

BEST_WEIGHTS, FINAL_WEIGHTS = "model.safetensors", "final.safetensors"
"""Of the best epoch by validation, of the last one without validation; and of the last one."""
_DTYPES = {
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{torch.bfloat16: "BF16", torch.uint8: "U8", torch.bool: "BOOL"},
}


def write_safetensors(state: Mapping[str, Tensor], path: Path, **facts: object) -> None:
    """Write a state dict in the format of the safetensors library, with texts about it; replaces ``path``."""
    odd = next((name for name, value in state.items() if getattr(value, "dtype", None) not in _DTYPES), None)
    if odd is not None:
        log.warning("%s is not written: safetensors has no type for %r; use dx.save", path, odd)
        return
    # The largest types first, so that each tensor is aligned.
    names = sorted(state, key=lambda name: -state[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | {k: str(v) for k, v in facts.items()}}
    end = 0
    for name in names:
        begin, end = end, end + state[name].nbytes
        entry = {"dtype": _DTYPES[state[name].dtype], "shape": list(state[name].shape)}
        header[name] = entry | {"data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with named_failures(path), replaced_file(path) as partial, partial.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in names:
            file.write(bytes_of(state[name].detach().cpu().contiguous()))


class WeightFiles:
    """The two files of weights of a run in ``folder``; None: there are none. All ranks call it alike."""

    def __init__(self, folder: str | Path | None, model: nn.Module) -> None:
        self._folder, self._model = None if folder is None else Path(folder), model
        self._is_first = current_session().topology.rank == 0

    def begin(self, best_epoch: int | None) -> None:
        """Remove the files of an earlier run, unless it is resumed with a best epoch."""
        if self._folder is not None and self._is_first and best_epoch is None:
            for name in (BEST_WEIGHTS, FINAL_WEIGHTS):
                (self._folder / name).unlink(missing_ok=True)

    def write(self, name: str, epoch: int) -> None:
        """Write the model's current weights, those after ``epoch``."""
        if (folder := self._folder) is None:
            return
        state = self._model.state_dict()

        def write() -> None:
            if self._is_first:
                folder.mkdir(parents=True, exist_ok=True)
                write_safetensors(state, folder / name, epoch=epoch)

        run_on_all_ranks(current_session(), write)

    def complete(self, epoch: int, best_epoch: int | None) -> None:
        """Write the current weights as those of the best epoch, if validation has written none."""
        folder = self._folder
        if folder is None or broadcast_json((folder / BEST_WEIGHTS).is_file(), current_session()):
            return
        if self._is_first and best_epoch not in (None, epoch):
            log.warning(
                "%s has the weights of epoch %d: those of the best, %s, are gone", folder, epoch, best_epoch
            )
        self.write(BEST_WEIGHTS, epoch)


class BestWeights:
    """A copy of the weights of the best epoch in memory, of a run without checkpoints; collective."""

    def __init__(self, model: nn.Module, sparse: Sequence[SparseOptimizer]) -> None:
        self._model, self._own = model, [rows for one in sparse for rows in one.own_rows]
        self._weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._rows = [rows.clone() for rows in self._own]

    def load(self) -> None:
        self._model.load_state_dict(self._weights)
        for rows, kept in zip(self._own, self._rows, strict=True):
            rows.copy_(kept)
        barrier(current_session(), "taking the weights of the best epoch")
