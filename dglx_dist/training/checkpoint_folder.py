"""Folder of a run's checkpoints: their names, ``state.json``, and the choice of the one to load."""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dglx_dist.data.storage.files import read_small_file
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.training.best_epoch import BEST_WEIGHTS

VERSION = 3
STATE_NAME = "state.json"
REMEDY = "move its folder away to load the checkpoint before it"


def read_count(value: object) -> int:
    """Return ``value`` if it is a whole number of at least 0. Raise ValueError otherwise."""
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
    """Raise CheckpointError for another version, and ValueError if values are damaged or of another step."""
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {state.get('version')}, but this package reads {VERSION}. Load it with the "
            "package that saved it, or start again without resuming."
        )

    numbers = [read_count(state[name]) for name in ("world_size", "epoch", "step")]
    typed = {"objects": {}, **state}
    wrong = [name for name in ("dataset", "extra", "objects") if not isinstance(typed[name], dict)]
    if wrong or len(state["loader"]) != numbers[0]:
        raise ValueError(f"{wrong[0] if wrong else 'loader'!r} has a wrong type or length")
    if state["crc32"] != _compute_crc(state):
        raise ValueError("its values have changed since they were written")
    if (key := parse_key(path.name)) is not None and key[:2] != (state["epoch"], state["step"]):
        raise ValueError(f"it belongs to step {state['step']} of epoch {state['epoch']}")


FOLDER_NAME = re.compile(r"epoch-(\d+)-step-(\d+)(\.old(?:-[0-9a-f]{8}\.partial)?)?")


def folder_name(epoch: int, step: int = 0) -> str:
    """Return the name of the checkpoint after ``step`` steps of ``epoch``."""
    return f"epoch-{epoch:06d}-step-{step:09d}"


def find_latest(folder: str | Path) -> Path:
    """Return the newest complete checkpoint of a folder or run folder, or ``folder`` itself if it is one."""
    newest = find_newest(Path(folder)) or find_newest(Path(folder) / "checkpoints")
    if newest is None:
        remedy = "save one first, or start without resuming"
        if (weights := Path(folder) / BEST_WEIGHTS).is_file():
            remedy = (
                "train with --checkpoint-every 1, or load its weights into the plain module: "
                f"module.load_state_dict(safetensors.torch.load_file({str(weights)!r}))"
            )
        elif seeds := sorted(map(str, Path(folder).glob("seed-*/"))):
            remedy = f"it has runs of several seeds, so choose one, such as {seeds[0]}"
        raise CheckpointError(f"there is no complete checkpoint in {folder}; {remedy}")
    return newest


BEST: Literal["best"] = "best"
NEWEST: Literal["newest"] = "newest"
Which: TypeAlias = Literal["best", "newest"]


def choose(folder: str | Path, which: Which | None) -> tuple[Path, str]:
    """Return the newest or the best checkpoint in ``folder``, and a text that says why it was chosen.

    With ``which=None`` it is the best one, if the run has evaluated epochs and that checkpoint still exists.
    The text is empty if ``folder`` is a checkpoint itself.
    """
    if which not in (None, BEST, NEWEST):
        raise ConfigError(f"which={which!r} must be 'best' or 'newest'. Leave it out to load the best one.")
    newest = find_latest(folder)
    if newest == Path(folder) or which == NEWEST:
        return newest, "" if newest == Path(folder) else "the newest"
    best = _read_best_epoch(newest)
    path = newest.parent / folder_name(0 if best is None else best + 1)
    if best is not None and (path / STATE_NAME).is_file() and _read_best_epoch(path) == best:
        return path, f"the best by validation (the newest is {newest.name}; which='newest' loads it)"
    reason = "no epoch was evaluated" if best is None else f"the best one, {path.name}, does not exist"
    if which == BEST:
        raise CheckpointError(f"{newest.parent} has no best checkpoint: {reason}. Use which='newest'.")
    return newest, "the newest" if best is None else f"the newest, because {reason}"


def _read_best_epoch(checkpoint: Path) -> int | None:
    """Return the best epoch so far of a run of ``dx.fit``. None: there is none, or another loop saved it."""
    with read_state(checkpoint) as state:
        extra = state["extra"]
        return read_count(extra["best"][0]) if "deciding" in extra and extra.get("best") else None


def find_newest(folder: Path) -> Path | None:
    if (folder / STATE_NAME).is_file():
        return folder
    complete = list_complete(folder)
    return max(complete)[1] if complete else None


Key: TypeAlias = tuple[int, int, bool]


def list_complete(folder: Path) -> list[tuple[Key, Path]]:
    paths = folder.iterdir() if folder.is_dir() else ()
    keys = [(parse_key(path.name), path) for path in paths]
    return [(key, path) for key, path in keys if key is not None and (path / STATE_NAME).is_file()]


def parse_key(name: str) -> Key | None:
    """Return (epoch, step, whether it is not being replaced), or None. Keys sort by age."""
    match = FOLDER_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), match[3] is None)
