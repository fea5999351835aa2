"""Save optimizers by parameter name, and other objects with ``state_dict``, in a checkpoint."""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.exchange import view_bytes
from dglx_dist.comm.session import Session
from dglx_dist.errors import CheckpointError
from dglx_dist.strategies.base import WrappedModel

_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set)}


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint saves: a scheduler, an optimizer, a GradScaler or averaged weights."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def split_objects(objects: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the objects' states into tensors by ``<name>/<number>``, and JSON values by name."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, stateful in objects.items():
        if not isinstance(name, str) or not isinstance(stateful, Stateful) or isinstance(stateful, type):
            raise CheckpointError(
                f"state[{name!r}] is a {type(stateful).__name__}. Pass objects with state_dict() and "
                "load_state_dict() under names of type str."
            )
        values[name] = {
            "kind": type(stateful).__name__,
            "value": _encode(f"state[{name!r}]", name, stateful.state_dict(), tensors),
        }
    return tensors, values


def _encode(path: str, name: str, value: object, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON values, with its tensors in ``tensors`` under keys that begin with ``name``.

    ``path`` names the value in errors. Raises CheckpointError for a type that only code could load.
    """
    class_name = type(value).__name__
    if isinstance(value, Tensor) and value.layout == torch.strided:
        key = f"{name}/{len(tensors)}"
        tensors[key] = value
        return {"tensor": key}

    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if _MAPPINGS.get(class_name) is type(value) and isinstance(value, Mapping):
        entries: list[Any] = []
        for key, item in value.items():
            if type(key) not in (bool, int, float, str, type(None)):
                raise CheckpointError(f"{path} has a key {key!r} of type {type(key).__name__}. Use strings.")
            entries.append([key, _encode(f"{path}[{key!r}]", name, item, tensors)])
        return {"mapping": class_name, "items": entries}

    if isinstance(value, list | tuple | set) and _SEQUENCES.get(class_name) is type(value):
        entries = [_encode(f"{path}[{index}]", name, item, tensors) for index, item in enumerate(value)]
        return {"sequence": class_name, "items": entries}
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}, which cannot be saved without running code on load. "
        "Remove the value from state_dict(), and set it again where the object is created."
    )


def describe_objects(values: Mapping[str, Any], tensors: Mapping[str, Tensor], session: Session) -> Any:
    """Return the entry for the objects in ``state.json``. Every rank must call this.

    The entry has the objects' ``values``. If values or tensors differ between ranks, it has each rank's
    values under ``per_rank`` instead.
    """
    # Tensors are saved in another file, so only their checksums are compared here.
    checksums = {}
    for name, tensor in tensors.items():
        checksums[name] = crc32(view_bytes(tensor.detach().cpu().contiguous()))
    states = gather_json({"values": values, "checksums": checksums}, session)
    if any(state != states[0] for state in states):
        return {"per_rank": [state["values"] for state in states], "strategy": session.strategy}
    return {"values": values}


def find_prefix(entry: Mapping[str, Any], rank: int) -> str:
    """Return the prefix for the tensors that a rank reads."""
    return f"objects/{rank}/" if "per_rank" in entry else "objects/"


def select_values(
    path: object, entry: Mapping[str, Any], objects: Mapping[str, Stateful], session: Session
) -> Mapping[str, Any]:
    """Return this rank's saved values. Raise CheckpointError if ``objects`` are not the saved ones."""
    is_per_rank = "per_rank" in entry
    saved_states = [entry.get("values", {})]
    index = 0
    if is_per_rank:
        saved_states = entry["per_rank"]
        index = session.topology.rank
    if objects.keys() != saved_states[0].keys():
        raise CheckpointError(
            f"{path} has state of {sorted(saved_states[0]) or 'no objects'}, but state= has "
            f"{sorted(objects)}. Pass the objects of the saved run under the same names."
        )

    num_ranks = session.topology.world_size
    if is_per_rank and (len(saved_states) != num_ranks or entry["strategy"] != session.strategy):
        raise CheckpointError(
            f"{path} has different states of {sorted(objects)} on {len(saved_states)} ranks of strategy "
            f"{entry['strategy']!r}. Load it on as many ranks, with that strategy (not on {num_ranks} ranks "
            f"with {session.strategy!r})."
        )

    # Another number of ranks was rejected above, so there is an entry for each rank.
    values: Mapping[str, Any] = saved_states[index]
    for name, stateful in objects.items():
        class_name = type(stateful).__name__
        saved_name = values[name]["kind"]
        if class_name != saved_name:
            raise CheckpointError(
                f"state[{name!r}] of {path} is a {saved_name}, not a {class_name}. Build the same object."
            )
    return values


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo the encoding from :func:`split_objects`. Raise LookupError or TypeError if a value is damaged."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]].clone()
    if "mapping" in value:
        pairs = {key: decode(item, tensors) for key, item in value["items"]}
        return _MAPPINGS[value["mapping"]](pairs)
    return _SEQUENCES[value["sequence"]](decode(item, tensors) for item in value["items"])


_MAX_FLOAT32 = torch.finfo(torch.float32).max

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def parse_dtype(name: object) -> torch.dtype:
    dtype = _DTYPES.get(f"torch.{name}")
    if dtype is None:
        raise CheckpointError(f"the checkpoint has the dtype {name!r}, which this torch does not have")
    return dtype


def format_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_optimizer(
    path: Path,
    saved: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
    module: nn.Module,
    tensors: Mapping[str, Any],
) -> None:
    """Raise CheckpointError if the saved state does not fit ``optimizer``. None fits every state.

    Raises ValueError if the checkpoint has state for a parameter that is in none of its groups.
    """
    if optimizer is None:
        return
    if saved is None:
        raise CheckpointError(f"{path} has no optimizer. Load it without an optimizer.")
    class_name = type(optimizer).__name__
    if class_name != saved["kind"]:
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['kind']}, not {class_name}. Use the same, or load no "
            "optimizer."
        )

    names = _name_parameters(optimizer, module)
    groups = optimizer.state_dict()["param_groups"]
    group_names = [sorted(names[position] for position in group["params"]) for group in groups]
    saved_names = [sorted(group["params"]) for group in saved["groups"]]
    for index, (current, expected) in enumerate(zip_longest(group_names, saved_names)):
        if current != expected:
            raise CheckpointError(
                f"parameter group {index} of the optimizer has other parameters than in the checkpoint. "
                "Build it from the same parameters."
            )

    stateful_names = {_parameter_name(path) for path in tensors} | saved["scalars"].keys()
    unknown_names = stateful_names.difference(*saved_names)
    if unknown_names:
        raise ValueError(f"the optimizer has state of {min(unknown_names)!r}, which is no parameter")


def join_optimizer(
    model: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], session: Session
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Join :func:`split_optimizer` results to the state for the uncut model. All ranks call this.

    Each rank has a slice of some parameters. If a rank's slice has no columns, it never had a gradient, and
    its tensors may be missing. Zeros replace these tensors. Values that exist once per parameter, such as
    steps, come from the lowest rank.
    """
    if not isinstance(model, WrappedModel) or not model.parts.local:
        return dict(tensors), dict(plain)

    sliced_names = set(model.parts.local)
    slices = {name: value for name, value in model.module.named_parameters() if name in sliced_names}
    scalars = {name: values for name, values in plain["scalars"].items() if name in slices}
    joined = {}
    slice_tensors = {}
    descriptions = {}
    for path, value in tensors.items():
        name = _parameter_name(path)
        if name not in slices:
            joined[path] = value
            continue
        slice_tensors[path] = value
        # The values are only needed if the tensor is not split like the parameter.
        is_slice = value.shape == slices[name].shape
        descriptions[path] = {"dtype": format_dtype(value), "values": None if is_slice else value.tolist()}

    # A later rank in this loop overwrites an earlier one, so the lowest rank comes last.
    for rank_state in reversed(gather_json({"tensors": descriptions, "scalars": scalars}, session)):
        assert isinstance(rank_state, dict)
        descriptions |= rank_state["tensors"]
        scalars |= rank_state["scalars"]

    # Each join is collective, so every rank goes through them in the same order.
    for path in sorted(descriptions):
        dtype = parse_dtype(descriptions[path]["dtype"])
        values = descriptions[path]["values"]
        if values is not None:
            joined[path] = torch.tensor(values, dtype=dtype)
            continue
        name = _parameter_name(path)
        rows = slice_tensors.get(path)
        if rows is None:
            rows = torch.zeros_like(slices[name], dtype=dtype, requires_grad=False)
        joined[path] = model.join_state(name, rows)

    return joined, {**plain, "scalars": {**plain["scalars"], **scalars}}


def cut_optimizer(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(model, WrappedModel):
        return dict(tensors)
    return {path: model.cut_state(_parameter_name(path), value) for path, value in tensors.items()}


def _parameter_name(path: str) -> str:
    return path.rpartition("/")[0]


_SCALARS = (int, float, bool, str, type(None))


def split_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors by <parameter>/<key> and its JSON values. ``model`` is not wrapped."""
    names = _name_parameters(optimizer, model)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for position, entries in state["state"].items():
        name = names[position]
        scalars[name] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                scalars[name][key] = _to_json(f"{name}/{key}", value)

    groups = []
    for group in state["param_groups"]:
        settings = {key: _to_json(key, value) for key, value in group.items() if key != "params"}
        groups.append(settings | {"params": [names[position] for position in group["params"]]})
    return tensors, {"groups": groups, "scalars": scalars, "kind": type(optimizer).__name__}


def build_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    plain: dict[str, Any],
) -> dict[str, Any]:
    """Undo :func:`split_optimizer`. Return the state that the optimizer loads."""
    # The saved state refers to parameters by name, and torch's state by position. The positions depend on the
    # strategy.
    positions = {name: position for position, name in _name_parameters(optimizer, model).items()}
    state: dict[int, dict[str, Any]] = {}
    for name, scalars in plain["scalars"].items():
        state[positions[name]] = {key: _from_json(value) for key, value in scalars.items()}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state[positions[name]][key] = tensor
    groups = []
    current_groups = optimizer.state_dict()["param_groups"]
    for index, (group, current_group) in enumerate(zip(plain["groups"], current_groups, strict=True)):
        settings = {key: _from_json(value) for key, value in group.items() if key != "params"}
        _check_group(optimizer, index, settings, state)
        groups.append(settings | {"params": current_group["params"]})
    return {"state": state, "param_groups": groups}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load ``state`` with its tensors' dtypes. Torch would convert most to the parameters' dtype."""
    optimizer.load_state_dict(state)
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for position, parameter in enumerate(parameters):
        entries = optimizer.state[parameter]
        for key, value in state["state"].get(position, {}).items():
            if isinstance(value, Tensor) and entries[key].dtype != value.dtype:
                entries[key] = value.to(entries[key].device)


def _check_group(
    optimizer: torch.optim.Optimizer, index: int, settings: Mapping[str, Any], state: Mapping[int, Any]
) -> None:
    """Raise ValueError if the optimizer cannot continue with a group's settings and states."""
    group = optimizer.param_groups[index]
    for key, value in settings.items():
        allowed_type = bool if isinstance(group.get(key), bool) else float | int | Tensor
        if isinstance(group.get(key), bool | float) and not isinstance(value, allowed_type):
            raise ValueError(f"{key!r} of the optimizer is {value!r}")

    if "lr" in group and not 0 <= float(settings["lr"]) <= _MAX_FLOAT32:
        raise ValueError(f"'lr' of the optimizer is {settings['lr']!r}")
    is_from_torch = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
    if not is_from_torch or type(optimizer) is torch.optim.LBFGS:
        return

    # All parameters with equally many dimensions share one small example, with size 2 along each axis.
    examples: dict[int, Tensor] = {}
    for parameter in group["params"]:
        shape = (2,) * parameter.dim()
        examples[parameter.dim()] = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    example_state = _take_example_step(type(optimizer), examples, settings)
    positions = optimizer.state_dict()["param_groups"][index]["params"]
    for position, parameter in zip(positions, group["params"], strict=True):
        saved = state.get(position)
        # A parameter that never had a gradient has no state.
        if not saved:
            continue
        for key, example in example_state[examples[parameter.dim()]].items():
            example_shape = getattr(example, "shape", None)
            shape = getattr(saved[key], "shape", None)
            is_wrong_type = (example_shape is None) != (shape is None)
            is_like_parameter = example_shape == (2,) * parameter.dim()
            if is_wrong_type or (is_like_parameter and shape != parameter.shape):
                raise ValueError(f"{key!r} of the optimizer's state has shape {shape}")


def _take_example_step(
    optimizer_type: type[Any], examples: Mapping[int, Tensor], settings: Mapping[str, Any]
) -> Mapping[Tensor, Any]:
    """Return a new optimizer's state after a step on ``examples``. ValueError if the step fails.

    Torch checks an optimizer's arguments, but not the values in a loaded group.
    """
    for parameter in examples.values():
        gradient = torch.ones_like(parameter)
        parameter.grad = gradient.to_sparse() if optimizer_type is torch.optim.SparseAdam else gradient
    arguments = inspect.signature(optimizer_type).parameters
    try:
        options = {name: value for name, value in settings.items() if name in arguments}
        optimizer = optimizer_type(list(examples.values()), **options)
        optimizer.step()
    except Exception as error:
        raise ValueError(f"{optimizer_type.__name__} does not take the saved settings: {error}") from error
    state: Mapping[Tensor, Any] = optimizer.state
    return state


def _name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    """Return each parameter's name by its position. One that ``model`` does not have gets a number."""
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {index: names_by_id.get(id(parameter), f"#{index}") for index, parameter in enumerate(parameters)}


def _to_json(name: str, value: object) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": format_dtype(value)}
    if isinstance(value, tuple | list) and all(isinstance(entry, _SCALARS) for entry in value):
        return {"tuple": list(value)} if isinstance(value, tuple) else list(value)
    if isinstance(value, _SCALARS):
        return value
    raise CheckpointError(
        f"the optimizer has {name!r} of type {type(value).__name__}, which cannot be saved without running "
        "code on load. Save it yourself through ``extra``."
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and "tuple" in value:
        return tuple(value["tuple"])
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=parse_dtype(value["dtype"]))
    return value
