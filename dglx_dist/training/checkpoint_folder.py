"""Name a run's checkpoints, read and write their ``state.json``, and choose the checkpoint to load."""

import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dglx_dist.data.storage.files import discard, read_small_file
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.training.best_epoch import BEST_WEIGHTS

log = logging.getLogger(__name__)
VERSION = 3
STATE_NAME = "state.json"
REMEDY = "move its folder away to load the checkpoint before it"


def read_count(value: object) -> int:
    """Return ``value`` if it is a whole number and at least 0. Raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number of at least 0")
    return value


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write JSON values with their CRC-32, because a changed digit would still be valid JSON."""
    plain = json.loads(json.dumps(value))
    path.write_text(json.dumps({**plain, "crc32": _compute_crc(plain)}, indent=1), encoding="utf-8")


def _compute_crc(values: Mapping[str, object]) -> int:
    content = {name: value for name, value in values.items() if name != "crc32"}
    return zlib.crc32(json.dumps(content).encode())


@contextmanager
def read_state(folder: Path) -> Iterator[dict[str, Any]]:
    """Read and check ``state.json``. Errors inside the block become a CheckpointError with the file."""
    path = folder / STATE_NAME
    try:
        state = json.loads(read_small_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; {REMEDY}") from error
    try:
        _check_state(folder, state)
        yield state
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); {REMEDY}") from error


def _check_state(path: Path, state: Any) -> None:
    """Raise CheckpointError for another format version, and ValueError for damaged values.

    Values also count as damaged if they belong to another step than the folder's name says.
    """
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {state.get('version')}, but this package reads {VERSION}. Load it with the "
            "package that saved it, or start again without resuming."
        )

    for name in ("world_size", "epoch", "step"):
        read_count(state[name])
    # Earlier versions saved no objects.
    values = {"objects": {}, **state}
    for name in ("dataset", "extra", "objects"):
        if not isinstance(values[name], dict):
            raise ValueError(f"{name!r} has a wrong type or length")
    if len(state["loader"]) != state["world_size"]:
        raise ValueError("'loader' has a wrong type or length")
    if state["crc32"] != _compute_crc(state):
        raise ValueError("its values have changed since they were written")

    key = parse_key(path.name)
    if key is not None and key[:2] != (state["epoch"], state["step"]):
        raise ValueError(f"it belongs to step {state['step']} of epoch {state['epoch']}")


FOLDER_NAME = re.compile(r"epoch-(\d+)-step-(\d+)(\.old(?:-[0-9a-f]{8}\.partial)?)?")


def folder_name(epoch: int, step: int = 0) -> str:
    """Return the checkpoint's folder name after ``step`` steps in ``epoch``."""
    return f"epoch-{epoch:06d}-step-{step:09d}"


def find_latest(folder: str | Path) -> Path:
    """Return the newest complete checkpoint in a folder or run folder, or ``folder`` itself if it is one."""
    newest = find_newest(Path(folder)) or find_newest(Path(folder) / "checkpoints")
    if newest is not None:
        return newest
    remedy = "save one first, or start without resuming"
    weights_file = Path(folder) / BEST_WEIGHTS
    seed_folders = sorted(map(str, Path(folder).glob("seed-*/")))
    if weights_file.is_file():
        remedy = (
            "train with --checkpoint-every 1, or load its weights into the plain module: "
            f"module.load_state_dict(safetensors.torch.load_file({str(weights_file)!r}))"
        )
    elif seed_folders:
        remedy = f"it has runs of several seeds, so choose one, such as {seed_folders[0]}"
    raise CheckpointError(f"there is no complete checkpoint in {folder}; {remedy}")


BEST: Literal["best"] = "best"
NEWEST: Literal["newest"] = "newest"
Which: TypeAlias = Literal["best", "newest"]


def choose(folder: str | Path, which: Which | None) -> tuple[Path, str]:
    """Return the newest or the best checkpoint in ``folder``, and a text that says why it was chosen.

    ``which=None`` prefers the best one. It falls back to the newest if no epoch was evaluated or the best
    checkpoint no longer exists. The text is empty if ``folder`` is a checkpoint itself.
    """
    if which not in (None, BEST, NEWEST):
        raise ConfigError(f"which={which!r} must be 'best' or 'newest'. Leave it out to load the best one.")

    newest = find_latest(folder)
    if newest == Path(folder):
        return newest, ""
    if which == NEWEST:
        return newest, "the newest"

    obstacle = "no epoch was evaluated"
    best_epoch = _read_best_epoch(newest)
    if best_epoch is not None:
        # A checkpoint at the end of an epoch is named by the next epoch.
        path = newest.parent / folder_name(best_epoch + 1)
        # An earlier run with another best epoch may have left a checkpoint with this name.
        if (path / STATE_NAME).is_file() and _read_best_epoch(path) == best_epoch:
            return path, f"the best by validation (the newest is {newest.name}; which='newest' loads it)"
        obstacle = f"the best one, {path.name}, does not exist"

    if which == BEST:
        raise CheckpointError(f"{newest.parent} has no best checkpoint: {obstacle}. Use which='newest'.")
    return newest, "the newest" if best_epoch is None else f"the newest, because {obstacle}"


def _read_best_epoch(checkpoint: Path) -> int | None:
    """Return the best epoch that ``dx.fit`` had found when it saved the checkpoint.

    None: no epoch was evaluated, or another training loop saved the checkpoint.
    """
    with read_state(checkpoint) as state:
        extra = state["extra"]
        # Only ``dx.fit`` saves the name of the deciding metric.
        if "deciding" not in extra or not extra.get("best"):
            return None
        return read_count(extra["best"][0])


def find_newest(folder: Path) -> Path | None:
    """Return ``folder`` if it is a checkpoint, otherwise its newest complete checkpoint, or None."""
    if (folder / STATE_NAME).is_file():
        return folder
    complete = list_complete(folder)
    if not complete:
        return None
    _, path = max(complete)
    return path


Key: TypeAlias = tuple[int, int, bool]


def list_complete(folder: Path) -> list[tuple[Key, Path]]:
    """Return the complete checkpoints in ``folder`` with their keys, in any order."""
    complete = []
    for path in folder.iterdir() if folder.is_dir() else ():
        key = parse_key(path.name)
        if key is not None and (path / STATE_NAME).is_file():
            complete.append((key, path))
    return complete


def parse_key(name: str) -> Key | None:
    """Return (epoch, step, whether the folder is not being replaced), or None for other folders.

    Keys sort from the oldest checkpoint to the newest.
    """
    match = FOLDER_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), match[3] is None)


def remove_older(newest: Path, keep: int, protected: Path | None) -> None:
    """Remove all checkpoints before ``newest``, except the last ``keep - 1`` and ``protected``."""
    newest_entry = parse_key(newest.name), newest
    older = sorted(entry for entry in list_complete(newest.parent) if entry < newest_entry)
    # The newest checkpoint counts as one of the ``keep``.
    num_removed = max(0, len(older) + 1 - keep)
    for _, path in older[:num_removed]:
        try:
            if path != protected:
                discard(path)
        except OSError as error:
            log.warning("failed to remove an old checkpoint: %s", error)
