"""State of schedulers and other objects with ``state_dict`` in a checkpoint: JSON values and tensors."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.exchange import bytes_of
from dglx_dist.comm.session import Session
from dglx_dist.errors import CheckpointError

_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set)}


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint saves: a scheduler, an optimizer, a GradScaler or averaged weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def split_objects(objects: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the objects' states by ``<name>/<number>``, and JSON values by name."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, stateful in objects.items():
        if not isinstance(name, str) or not isinstance(stateful, Stateful) or isinstance(stateful, type):
            raise CheckpointError(
                f"state[{name!r}] is a {type(stateful).__name__}; give objects with state_dict() and "
                "load_state_dict() by names of type str"
            )
        values[name] = {
            "kind": type(stateful).__name__,
            "value": _encode(f"state[{name!r}]", name, stateful.state_dict(), tensors),
        }
    return tensors, values


def _encode(path: str, name: str, value: object, tensors: dict[str, Tensor]) -> Any:
    kind = type(value).__name__
    if isinstance(value, Tensor) and value.layout == torch.strided:
        key = f"{name}/{len(tensors)}"
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if _MAPPINGS.get(kind) is type(value) and isinstance(value, Mapping):
        for key in value:
            if type(key) not in (bool, int, float, str, type(None)):
                raise CheckpointError(f"{path} has the key {key!r} of type {type(key).__name__}; use strings")
        entries = [[key, _encode(f"{path}[{key!r}]", name, item, tensors)] for key, item in value.items()]
        return {"mapping": kind, "items": entries}
    if isinstance(value, list | tuple | set) and _SEQUENCES.get(kind) is type(value):
        entries = [_encode(f"{path}[{at}]", name, item, tensors) for at, item in enumerate(value)]
        return {"sequence": kind, "items": entries}
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}, which cannot be saved without running code on load; "
        "leave it out of state_dict(), and set it again where the object is created"
    )


def describe_objects(values: Mapping[str, Any], tensors: Mapping[str, Tensor], session: Session) -> Any:
    """Return the entry of ``state.json``; ``per_rank`` where the ranks' states differ. Collective."""
    digests = {name: crc32(bytes_of(value.detach().cpu().contiguous())) for name, value in tensors.items()}
    ranks = gather_json({"values": values, "digests": digests}, session)
    if any(rank != ranks[0] for rank in ranks):
        return {"per_rank": [rank["values"] for rank in ranks], "strategy": session.strategy}
    return {"values": values}


def prefix_of(entry: Mapping[str, Any], rank: int) -> str:
    """Return the prefix of the tensors that a rank reads."""
    return f"objects/{rank}/" if "per_rank" in entry else "objects/"


def select_values(
    path: object, entry: Mapping[str, Any], objects: Mapping[str, Stateful], session: Session
) -> Mapping[str, Any]:
    """Return the saved values of this rank; CheckpointError unless they are of the given ``objects``."""
    saved = entry["per_rank"] if "per_rank" in entry else [entry.get("values", {})]
    if objects.keys() != saved[0].keys():
        raise CheckpointError(
            f"{path} has state of {sorted(saved[0]) or 'no objects'}, but state= has {sorted(objects)}; pass "
            "the objects that it was saved with, under the same names"
        )
    if "per_rank" in entry:
        size = session.topology.world_size
        if len(saved) != size or entry["strategy"] != session.strategy:
            raise CheckpointError(
                f"{path} has different states of {sorted(objects)} on {len(saved)} ranks of strategy "
                f"{entry['strategy']!r}; load it on as many ranks, with that strategy (not {size} ranks of "
                f"{session.strategy!r})"
            )
    values: Mapping[str, Any] = saved[session.topology.rank if "per_rank" in entry else 0]
    for name, stateful in objects.items():
        if (kind := type(stateful).__name__) != values[name]["kind"]:
            raise CheckpointError(
                f"state[{name!r}] of {path} is a {values[name]['kind']}, not a {kind}; build the same object"
            )
    return values


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state of :func:`split_objects`; LookupError or TypeError if it is damaged."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]].clone()
    if "mapping" in value:
        pairs = {key: decode(item, tensors) for key, item in value["items"]}
        return _MAPPINGS[value["mapping"]](pairs)
    return _SEQUENCES[value["sequence"]](decode(item, tensors) for item in value["items"])
