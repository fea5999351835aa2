"""What is asked of parameter servers by name, and how answers are packed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

import numpy as np

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import read_json
from dglx_dist.offload.parameters.plan import ParameterPlan
from dglx_dist.records import Array

WEIGHTS, GRADIENTS = "lambda.weights", "lambda.gradients"
"""By workers, name: the task's key. The server counts the bytes, for a worker has no ledger."""
FOR_WORKERS = frozenset({WEIGHTS, GRADIENTS})
"""What whoever holds no more than a worker's secret may ask."""
WEIGHTS_FOR_RANK, GRADIENTS_OF_RANK = "lambda.weights_for_rank", "lambda.gradients_of_rank"
"""The same by ranks that do a task themselves; as ever the caller counts."""
SUMS = "lambda.sums"
"""Server to server, name: "epoch/server"; one vector (|theta|,)."""
UPDATED, STOPPED = "lambda.updated", "lambda.stopped"
"""Server to graph servers, name: "updates/server", or the reason."""
MISSING, LATEST, STATE = "lambda.missing", "lambda.latest", "lambda.state"
"""By ranks: what the next update waits for, the latest weights, what the update keeps."""

DOWN, UP, BETWEEN, CONTROL, READ = "weights_down", "weights_up", "parameter_sums", "control", "weights_read"
"""Phases of the ledger."""

_PAIR = re.compile(r"(0|[1-9][0-9]{0,8})/(0|[1-9][0-9]{0,5})")
_STATE_DTYPES = ("float32", "float64")
_MAX_TABLE_BYTES = 1 << 24


def pair_name(number: int, server: int) -> str:
    """Name an epoch, or a number of updates, and a server."""
    return f"{number}/{server}"


def parse_pair(name: str) -> tuple[int, int]:
    """Read :func:`pair_name`.

    Raises:
        ConfigError: it is none.
    """
    found = _PAIR.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name[:80]!r} names no epoch and server; one looks like 3/1")
    return int(found[1]), int(found[2])


def pack_state(state: Mapping[str, Array]) -> list[Array]:
    """Return a table of contents as JSON, and all numbers in one buffer, both as uint8."""
    table = [[path, value.dtype.name, list(value.shape)] for path, value in state.items()]
    numbers = b"".join(np.ascontiguousarray(value).tobytes() for value in state.values())
    return [np.frombuffer(json.dumps(table).encode(), np.uint8), np.frombuffer(numbers, np.uint8)]


def unpack_state(plan: ParameterPlan, packed: list[Array]) -> dict[str, Array]:
    """Read :func:`pack_state`, as one of ``plan``'s weights; the arrays are new.

    Raises:
        ConfigError: it is not of these weights.
    """
    if len(packed) != 2:
        raise ConfigError(f"the optimizer's state came as {len(packed)} arrays, not as table and numbers")
    table, numbers = packed[0].tobytes(), packed[1].tobytes()
    state: dict[str, Array] = {}
    begin = 0
    for path, dtype, shape in _entries(table):
        name = path.rpartition("/")[0]
        if (
            name not in plan.shapes
            or dtype not in _STATE_DTYPES
            or tuple(shape) not in ((), plan.shapes[name])
        ):
            raise ConfigError(
                f"the optimizer's state {path[:80]!r}, {dtype} of shape {shape}, is of no weight here"
            )
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(numbers):
            raise ConfigError(f"the optimizer's state ends before the numbers of {path!r}")
        state[path] = np.frombuffer(numbers[begin:end], dtype).reshape(shape).copy()
        begin = end
    return state


def _entries(table: bytes) -> list[tuple[str, str, list[int]]]:
    """Read the table: path, dtype and shape of each entry."""
    where = "the table of an optimizer's state"
    found = read_json(table, _MAX_TABLE_BYTES, where)
    if not isinstance(found, list):
        raise ConfigError(f"{where} is a {type(found).__name__}, not a list; is it of another version?")
    entries = []
    for entry in found:
        match entry:
            case [str(path), str(dtype), [*shape]] if all(type(one) is int for one in shape):
                entries.append((path, dtype, shape))
            case _:
                raise ConfigError(f"{where} has an entry that is none; is it of another version?")
    return entries
