"""Find the best epoch by validation: stop early, and keep that epoch's weights in files and in memory."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from dglx_dist.comm.collectives import barrier, broadcast_json, run_on_all_ranks
from dglx_dist.comm.session import current_session
from dglx_dist.data.storage.files import name_write_failures, replace_atomically
from dglx_dist.graph.optim import SparseOptimizer

log = logging.getLogger(__name__)

BEST_WEIGHTS, FINAL_WEIGHTS = "model.safetensors", "final.safetensors"
"""Files for the best epoch by validation (without validation: the last epoch) and for the last epoch."""


def write_safetensors(state: Mapping[str, Tensor], path: Path, **facts: object) -> None:
    """Write a state dict to a safetensors file with ``facts`` about it. Replace ``path`` if it exists.

    Tied tensors are written under each of their names, so that a strict ``load_state_dict`` finds them all.
    """
    tensors = dict(state)
    storages = set[int]()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            tensor = value.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # The library refuses tensors that share memory.
            tensors[name] = tensor.clone() if storage in storages else tensor
            storages.add(storage)

    metadata = {"format": "pt"}
    metadata |= {key: str(fact) for key, fact in facts.items()}
    try:
        # save_file() from safetensors would make files that only their owner can read.
        content = save(tensors, metadata)
    except (KeyError, ValueError) as error:
        log.warning("%s is not written, because safetensors cannot hold it (%s). Use dx.save.", path, error)
        return

    # The library writes the facts in random order. With a sorted header, equal weights are equal files. The
    # file begins with its header's length in 8 bytes.
    header_end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_end])
    header_text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    with name_write_failures(path), replace_atomically(path) as partial, partial.open("wb") as file:
        file.write(content[:8])
        file.write(header_text.encode().ljust(header_end - 8))
        file.write(memoryview(content)[header_end:])


class WeightFiles:
    """Two weight files in ``folder``, if it is not None. Every rank calls the methods, rank 0 writes."""

    def __init__(self, folder: str | Path | None, model: nn.Module) -> None:
        self._folder = None if folder is None else Path(folder)
        self._model = model
        self._is_first = current_session().topology.rank == 0

    def begin(self, best_epoch: int | None) -> None:
        """Remove the files from an earlier run, unless it is resumed with a best epoch."""
        if self._folder is not None and self._is_first and best_epoch is None:
            for name in (BEST_WEIGHTS, FINAL_WEIGHTS):
                (self._folder / name).unlink(missing_ok=True)

    def write(self, name: str, epoch: int) -> None:
        """Write the model's current weights, the ones after ``epoch``."""
        folder = self._folder
        if folder is None:
            return
        state = self._model.state_dict()

        def write() -> None:
            if self._is_first:
                folder.mkdir(parents=True, exist_ok=True)
                write_safetensors(state, folder / name, epoch=epoch)

        run_on_all_ranks(current_session(), write)

    def complete(self, epoch: int, best_epoch: int | None) -> None:
        """Write the current weights, from ``epoch``, as the best ones if validation has written none."""
        folder = self._folder
        if folder is None or broadcast_json((folder / BEST_WEIGHTS).is_file(), current_session()):
            return
        if self._is_first and best_epoch not in (None, epoch):
            log.warning(
                "%s gets the weights of epoch %d, because those of the best epoch, %s, no longer exist",
                *(folder, epoch, best_epoch),
            )

        self.write(BEST_WEIGHTS, epoch)


class BestWeights:
    """A copy of the best epoch's weights in memory, without checkpoints. All ranks make it."""

    def __init__(self, model: nn.Module, sparse: Sequence[SparseOptimizer]) -> None:
        self._model = model
        self._rows = [rows for optimizer in sparse for rows in optimizer.own_rows]
        self._weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self._best_rows = [rows.clone() for rows in self._rows]

    def load(self) -> None:
        self._model.load_state_dict(self._weights)
        for rows, best_rows in zip(self._rows, self._best_rows, strict=True):
            rows.copy_(best_rows)
        barrier(current_session(), "loading the weights of the best epoch")


class EarlyStopping:
    """Tracks the best validation score and when to stop.

    Args:
        patience: Evaluations without a better score after which training stops. None: never.
        less_is_better: Whether the best score is the smallest one.
        min_delta: A score that is better by less than this does not make training go on.
    """

    def __init__(self, patience: int | None, less_is_better: bool, min_delta: float = 0.0) -> None:
        self._patience = patience
        self._sign = -1 if less_is_better else 1
        self._min_delta = min_delta
        self._last: float | None = None
        """Last score that made training go on."""
        self.epoch: int | None = None
        """Best epoch. None before the first evaluation."""
        self.score: float | None = None
        self.evaluations_since = 0

    @property
    def is_over(self) -> bool:
        return self._patience is not None and self.evaluations_since >= self._patience

    def note(self, epoch: int, score: float) -> bool:
        """Record a score and return whether it is the best so far. Any number is better than NaN."""
        best = self.score
        was_nan = best is not None and math.isnan(best) and not math.isnan(score)
        is_best = best is None or was_nan or self._sign * score > self._sign * best
        if not is_best:
            self.evaluations_since += 1
            return False

        self.epoch, self.score = epoch, score
        # A score that is better by less than ``min_delta`` is the best, but does not prolong training.
        if was_nan or self._last is None or abs(score - self._last) >= self._min_delta:
            self._last, self.evaluations_since = score, 0
        else:
            self.evaluations_since += 1

        return True

    def resume(self, best: tuple[int | None, float | None], evaluations_since: int) -> None:
        """Continue from the best epoch and its score in a checkpoint."""
        self.epoch, self.score = best
        self.evaluations_since = evaluations_since
        self._last = self.score
