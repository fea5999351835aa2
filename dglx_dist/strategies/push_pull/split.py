"""Splitting the user's model: the first layer and what stands before it become parts, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.adapters import stages_of
from dglx_dist.layers.columns import Columns, deal_out_concatenated
from dglx_dist.layers.parts import part_of
from dglx_dist.layers.staged import Staged
from dglx_dist.strategies.push_pull.columns import ColumnStore
from dglx_dist.strategies.push_pull.group import Group
from dglx_dist.strategies.push_pull.inputs import (
    InputLayout,
    all_names,
    embeddings_of_all_nodes,
    find_input_modules,
)
from dglx_dist.strategies.push_pull.options import Sync
from dglx_dist.strategies.push_pull.origins import Origins
from dglx_dist.strategies.push_pull.state import Cut, without_weights


@final
@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of the run, as far as they decide how a model is split."""

    num_nodes: int
    """V."""
    seed: int
    sync: Sync
    """What is summed: the first layer's results, or its projected inputs."""
    origins: Origins
    """Of the model's inputs."""


@final
@dataclass(frozen=True, kw_only=True)
class SplitModel:
    """A model of which this rank has one part."""

    module: nn.Module
    layer: Staged
    """The first layer, of this part."""
    runs: tuple[Columns, ...]
    """This part's columns of the input."""
    cuts: Mapping[str, Cut]
    """Uncut name of each cut parameter to how it lies."""
    stashed: tuple[str, ...]
    """Parameters before the sum of which every batch in flight has its own leaves."""
    shared: tuple[str, ...]
    """Those of them that every part holds whole."""
    originals: Mapping[str, nn.Module]
    """Name of each replaced submodule to the user's, without its weights."""


def split_model(
    model: nn.Module, widths: Sequence[int], store: ColumnStore, group: Group, facts: Facts
) -> SplitModel:
    """Replace the first layer of ``model``, and what stands before it, by the group's part of this rank.

    Args:
        model: The user's, with its first weights; taken over.
        widths: Columns of each feature that the model puts side by side, or of its input embedding.
        store: The features.
        group: Who holds which columns.
        facts: What else of the run matters; every rank must call with the same.

    Raises:
        ConfigError: no layer takes that many columns and can be split, or something before it cannot.
    """
    width = sum(widths)
    name, whole = find_first_layer(model, width, facts.sync)
    runs = deal_out_concatenated(widths, group.size)
    layout = InputLayout(
        features=store.names, runs=runs[group.part], num_nodes=facts.num_nodes, seed=facts.seed
    )
    inputs = find_input_modules(model, name, layout, store.moments)
    before_split = dict(model.named_parameters(remove_duplicate=False))
    places, prefix = all_names(model, name), _prefix(name)
    cuts = {
        _prefix(place) + inner: Cut(
            shape=tuple(whole.get_parameter(inner).shape), dimension=dimension, runs=runs
        )
        for place in places
        for inner, dimension in whole.cut.items()
    }
    originals = {name: without_weights(model.get_submodule(name), whole.cut)}
    stashed = [prefix + inner for inner in (*whole.cut, *whole.shared)]
    seen: set[nn.Module] = set()
    for place, module in inputs.items():
        module.origins = facts.origins
        before = model.get_submodule(place)
        for inner, dimension in module.cut.items():
            shape = tuple(before.get_parameter(inner).shape)
            cuts[f"{place}.{inner}"] = Cut(shape=shape, dimension=dimension, runs=runs)
            if inner not in module.by_rows and module not in seen:
                stashed.append(f"{place}.{inner}")
        seen.add(module)
        originals[place] = without_weights(before, module.cut)
        _put(model, place, module)
    _refuse_ties(before_split, cuts)
    part = _tied(part_of(whole, runs[group.part]), whole)
    for place in places if name else ():
        _put(model, place, part)
    return SplitModel(
        module=model if name else part,
        layer=part,
        runs=runs[group.part],
        cuts=cuts,
        stashed=tuple(stashed),
        shared=tuple(prefix + shared for shared in whole.shared),
        originals=originals,
    )


def find_first_layer(model: nn.Module, width: int, sync: Sync) -> tuple[str, Staged]:
    """Return the name and the stages of the convolution that takes the features, the first of that width.

    Raises:
        ConfigError: there is none, or it cannot be split; the message has the reason.
    """
    reasons = []
    for name, module in model.named_modules():
        if not isinstance(module, Staged) and not type(module).__module__.startswith("dgl."):
            continue
        try:
            found = stages_of(module, sync)
        except ConfigError as error:
            reasons.append(f"{name or 'the model'}: {error}")
            continue
        if found.width == width:
            return name, found
    raise ConfigError(
        f"push_pull found no layer that takes the {width} columns of the input and can be split"
        + "".join(f"; {reason}" for reason in reasons)
    )


def input_widths(model: nn.Module, store: ColumnStore, num_nodes: int) -> tuple[int, ...]:
    """Return the columns of what goes into the model: of the features, or of its embedding of all nodes.

    Raises:
        ConfigError: there is neither.
    """
    if store.names:
        return tuple(store.widths[name] for name in store.names)
    for _, embedding in embeddings_of_all_nodes(model, num_nodes):
        return (embedding.embedding_dim,)
    raise ConfigError(
        f"the nodes have none of the features that the strategy was told of, and the model has no "
        f"torch.nn.Embedding({num_nodes}, ...) in their place; name the features with the option features="
    )


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _tied(part: Staged, whole: Staged) -> Staged:
    """Return ``part`` with the uncut parameters of ``whole`` itself: other layers may have them, too."""
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if name not in whole.cut:
            owner, _, last = name.rpartition(".")
            part.get_submodule(owner).register_parameter(last, parameter)
    return part


def _refuse_ties(before_split: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut]) -> None:
    """Raise ConfigError if something that is not cut has a parameter that is."""
    cut = {id(before_split[name]): name for name in cuts}
    for name, parameter in before_split.items():
        if id(parameter) in cut and name not in cuts:
            raise ConfigError(
                f"{cut[id(parameter)]!r} and {name!r} are one parameter, and push_pull cuts the first by "
                "columns; give each its own, or use strategy='data_parallel'"
            )
