"""A graph convolution written as stages, so that a strategy can cut it where it likes (P3, P-TAGS)."""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import dgl.function as fn
import torch
from dgl import DGLError
from dgl.heterograph import DGLBlock
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.dropout import Columns, DropDraws, drop_attention, dropped

PartialSums: TypeAlias = tuple[Tensor, ...]
"""Tensors that are sums over the parts once all parts' have been added up."""


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """What one part sees of a block."""

    block: DGLBlock
    x: Tensor
    """(L0, F_p) this part's columns of the source nodes' inputs; F_p may be 0."""
    edges: Mapping[str, Tensor]
    """Per-edge arguments of the convolution, such as weights: name to (E1, ...); the same on every part."""
    draws: DropDraws | None = None
    """What dropout before *sync* draws by, so that the parts drop what one process would; None: there is one
    part, which draws as torch does."""


RunParts: TypeAlias = Callable[["SplittableConv", StageInput], PartialSums]
"""A layer with one part's weights, and what this rank called it with, to the sums of all parts."""


class SplittableConv(nn.Module, ABC):
    """One graph convolution as the stages of P3's P-TAGS interface (section 3.4).

    Up to *sync* a stage is linear in the input columns, so each part may do it with its own columns and
    its own rows of the weights, and the parts' results are added up:

    * *partition*: :attr:`cut` names the weights that have one row (or column) per input column;
    * *transform*: what a part does per source node, before edges;
    * *scatter*: values that an edge needs in full, such as attention logits; summed over the parts;
    * *gather*: what a part aggregates per destination node;
    * *sync*: the sum over parts; a strategy does it, in one process there is nothing to do;
    * *apply*: the rest, per destination node: bias, norm, activation. Sees full sums. (``apply`` itself is
      taken by ``nn.Module``.)

    Write a layer by filling in :attr:`cut`, :meth:`gather` and :meth:`apply_nodes`, and use it as any module:
    ``layer(block, x)``. Bias, norm, activation and dropout of the result belong in :meth:`apply_nodes`: in an
    earlier stage they would be added once per part.
    """

    cut: Mapping[str, int]
    """Parameter name to the dimension that runs over the input columns."""
    shared: tuple[str, ...] = ()
    """Names of the parameters that stages before *sync* use whole; gradients are summed over the parts."""
    run_parts: RunParts | None = None
    """What does the stages up to *sync* where other parts take part; None: this is all there is."""
    edge_arguments: tuple[str, ...] = ("edge_weight",)
    """Names of the tensors with a row per edge that :meth:`forward` takes."""
    edges_after_sync: bool = False
    """Whether only :meth:`apply_edges` uses the per-edge values; they stay with the owner then."""

    @property
    def width(self) -> int:
        """Input columns of the layer, or of the part that this is."""
        name, dimension = next(iter(self.cut.items()))
        return int(self.get_parameter(name).shape[dimension])

    def own_edges(self, block: DGLBlock) -> dict[str, Tensor]:
        """Return per-edge values, (E1, ...) each, that the layer takes from its whole block; none by default.

        Only the owner of a block computes them; the parts are given them in ``StageInput.edges``.
        """
        return {}

    def transform(self, given: StageInput) -> Any:
        """Return what :meth:`scatter` and :meth:`gather` start from; the input itself when not overridden."""
        return given.x

    def scatter(self, given: StageInput, transformed: Any) -> PartialSums:
        """Return this part's share of what the edges need in full; nothing when not overridden."""
        return ()

    @abstractmethod
    def gather(self, given: StageInput, transformed: Any, scattered: PartialSums) -> PartialSums:
        """Return this part's share of the sums at the destinations, each (D1, ...); at the sources (L0, ...).

        Args:
            given: The block, this part's columns, and the edges.
            transformed: What :meth:`transform` returned.
            scattered: What :meth:`scatter` returned, summed over the parts.
        """

    @abstractmethod
    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """Return the layer's output from what :meth:`gather` returned, summed over the parts."""

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
        """Return the same where that takes edges and their values; :meth:`apply_nodes` when not overridden.

        Only the owner of a block does it, so ``given`` has all of ``edges``, but of ``x`` a part's columns.
        """
        return self.apply_nodes(given.block, gathered)

    def forward(
        self,
        block: DGLBlock,
        x: Tensor | tuple[Tensor, Tensor],
        *edges: Tensor | None,
        **named: Tensor | None,
    ) -> Tensor:
        """Do all stages with all columns: (L0, F) to the layer's (D1, ...).

        Args:
            block: The block.
            x: Inputs of the sources, the destinations first, as in every block; of a pair, as DGL's
                convolutions take it, the second must be those first rows.
            edges: Per-edge arguments in the order of :attr:`edge_arguments`.
            named: The same by name.

        Raises:
            ConfigError: an argument is not one of them, or the pair is of other rows.
        """
        values = {**self.own_edges(block), **self.edges_by_name(edges, named)}
        given = StageInput(block=block, x=self.sources(block, x), edges=values)
        sums = self.sync(replace(given, edges={}) if self.edges_after_sync else given)
        return self.apply_edges(given, sums)

    def sync(self, given: StageInput) -> PartialSums:
        """Return what :meth:`gather` gives, summed over all parts; a strategy replaces :attr:`run_parts`."""
        if self.run_parts is not None:
            return self.run_parts(self, given)
        transformed = self.transform(given)
        return self.gather(given, transformed, self.scatter(given, transformed))

    def drop_inputs(self, given: StageInput, probability: float) -> Tensor:
        """Return (L0, F_p): ``given.x`` with entries dropped, while training.

        Raises:
            ConfigError: other parts take part, and nothing says what they drop.
        """
        self._check_draws(given, probability)
        return dropped(given.x, probability, self.training, given.draws)

    def drop_edges(self, given: StageInput, attention: Tensor, probability: float) -> Tensor:
        """Return ``attention`` ((E1, K, 1)) with entries dropped, while training.

        Raises:
            ConfigError: other parts take part, and nothing says what they drop.
        """
        self._check_draws(given, probability)
        if given.draws is None or not self.training:
            return dropped(attention, probability, self.training, None)
        return drop_attention(given.block, attention, probability, given.draws)

    def _check_draws(self, given: StageInput, probability: float) -> None:
        if probability > 0 and self.training and self.run_parts is not None and given.draws is None:
            raise ConfigError(
                f"{type(self).__name__} drops with probability {probability} before its sum, and the "
                "strategy does not say what all parts drop; set it to 0 in the first layer, or use "
                "strategy='data_parallel'"
            )

    def sources(self, block: DGLBlock, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Return the inputs of the sources from what a user calls a convolution with."""
        if isinstance(x, Tensor):
            return x
        sources, targets = x
        if targets.shape != sources[: block.num_dst_nodes()].shape:
            raise ConfigError(
                f"the pair of inputs has shapes {tuple(sources.shape)} and {tuple(targets.shape)}, but the "
                f"block has {block.num_dst_nodes()} destinations, the first of its sources; pass h, or "
                "(h, h[:block.num_dst_nodes()])"
            )
        return sources

    def edges_by_name(
        self, positional: Sequence[Tensor | None], named: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """Return the per-edge arguments that were given, by name."""
        unknown = sorted(named.keys() - set(self.edge_arguments))
        if unknown or len(positional) > len(self.edge_arguments):
            raise ConfigError(
                f"{type(self).__name__} takes {', '.join(self.edge_arguments) or 'nothing'} beside the block "
                f"and its inputs, not {', '.join(unknown) or f'{len(positional)} arguments'}"
            )
        found = dict(zip(self.edge_arguments, positional, strict=False)) | dict(named)
        return {name: values for name, values in found.items() if values is not None}


def add_up(parts: Sequence[PartialSums]) -> PartialSums:
    """Return the sums over the parts, added in the order of the parts."""
    return tuple(sum(rest, first) for first, *rest in zip(*parts, strict=True))


Sync: TypeAlias = Literal["columns", "inputs"]
"""What the parts add up: sums over in-edges, or, where need be, projected source rows."""

_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "SAGEConv": "dglx_dist.layers.convolutions:SageStages",
        "GraphConv": "dglx_dist.layers.convolutions:GraphConvStages",
        "SGConv": "dglx_dist.layers.convolutions:SgcStages",
        "GINConv": "dglx_dist.layers.convolutions:GinStages",
        "GATConv": "dglx_dist.layers.convolutions:GatStages",
        "RelGraphConv": "dglx_dist.layers.convolutions:RelationalStages",
    }
)
"""Class of ``dgl.nn`` to "module:Class" of its stages."""

_BY_ROWS: Mapping[str, str] = MappingProxyType(
    {
        "SAGEConv": "dglx_dist.layers.convolutions:sage_of_rows",
        "GATConv": "dglx_dist.layers.convolutions:GatRowStages",
        "GATv2Conv": "dglx_dist.layers.convolutions:GatV2Stages",
        "EdgeConv": "dglx_dist.layers.convolutions:EdgeConvStages",
    }
)
"""The same under ``sync="inputs"``; others are as in :data:`_ADAPTERS`."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "GATv2Conv": "its logits are nonlinear in the sum of both ends, so an edge needs all columns of both",
        "EdgeConv": "it takes the largest of its messages, and the largest of sums is no sum of the largest",
        "PNAConv": "it takes the largest, the smallest and the spread of messages of whole rows",
        "DGNConv": "it takes the largest, the smallest and the spread of messages of whole rows",
        "DotGatConv": "its logits are products of whole rows",
        "AGNNConv": "its logits are angles between whole rows",
        "GatedGraphConv": "it passes whole rows through a gated unit",
    }
)


def stages_of(module: nn.Module, sync: Sync = "columns") -> SplittableConv:
    """Return ``module`` as stages; its parameters are shared, not copied.

    Args:
        module: A convolution.
        sync: "columns": the parts add up sums over in-edges. "inputs": also layers that are no such sum, but
            begin with a linear map of each source row; the parts add up those rows, (L0, width) of them.

    Raises:
        ConfigError: nobody says how it splits; the message has the reason and what to do.
    """
    if isinstance(module, SplittableConv):
        return module
    kind = type(module)
    known = {**_ADAPTERS, **_BY_ROWS} if sync == "inputs" else _ADAPTERS
    if kind.__module__.startswith("dgl.") and kind.__name__ in known:
        place, name = known[kind.__name__].split(":")
        made: SplittableConv = getattr(importlib.import_module(place), name)(module)
        return made
    why = _REFUSED.get(kind.__name__, "nothing says how it splits")
    other = "With sync='inputs' its projected rows are sent. " if kind.__name__ in _BY_ROWS else ""
    raise ConfigError(
        f"{kind.__name__} cannot be cut by input columns: {why}. {other}These can be cut: "
        f"{', '.join(known)}, and what is written as dglx_dist.layers.Staged; any module trains under "
        "strategy='data_parallel'"
    )


def sum_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return (D1, ...) sums of the source rows ((L0, ...)) over in-edges, times ``weight`` ((E1, ...))."""
    return _reduce(block, rows, weight, "sum")


def mean_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sums divided by the number of in-edges; zeros where there are none."""
    return _reduce(block, rows, weight, "mean")


def narrows_first(block: DGLBlock, columns: int, width: int) -> bool:
    """Whether projecting ``columns`` to ``width`` before the sum over in-edges is cheaper than after it.

    Counted over forward and backward, an element that comes over an edge as four multiplications. Projecting
    first multiplies every source row, twice, and sums rows back over the edges in the backward; summing first
    does neither, as the inputs need no gradient. Parts may decide differently: their sums are the same.
    """
    sources, targets, edges = block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()
    first = 2 * sources * columns * width + 2 * 4 * edges * width
    last = 4 * edges * columns + 2 * targets * columns * width
    return first < last


def _reduce(block: DGLBlock, rows: Tensor, weight: Tensor | None, how: str) -> Tensor:
    if block.num_edges() == 0 or rows.numel() == 0:
        # DGL's kernels refuse rows without columns, and a block without edges keeps no result.
        return (
            rows[:1]
            .sum(0, keepdim=True)
            .expand(0, *rows.shape[1:])
            .new_zeros((block.num_dst_nodes(), *rows.shape[1:]))
            + 0 * rows.sum()
        )
    with block.local_scope():
        block.srcdata["row"] = rows
        message = fn.copy_u("row", "message")
        if weight is not None:
            block.edata["weight"] = weight
            message = fn.u_mul_e("row", "weight", "message")
        block.update_all(message, fn.sum("message", "out") if how == "sum" else fn.mean("message", "out"))
        return block.dstdata["out"]


def refuse_nodes_without_edges(block: DGLBlock) -> None:
    """Raise what DGL's convolutions raise for destinations that no edge enters.

    Raises:
        DGLError: there are some.
    """
    if (block.in_degrees() == 0).any():
        raise DGLError(
            "There are 0-in-degree nodes in the graph, whose output would be invalid. Add self-loops with "
            "dgl.add_self_loop(g) before partitioning, or set allow_zero_in_degree=True in the convolution."
        )


def part_of(layer: SplittableConv, runs: Sequence[Columns]) -> SplittableConv:
    """Return a copy of ``layer`` whose cut weights have the columns ``runs`` only; others are copied whole.

    The copy is a leaf of its own: training it does not touch ``layer``.
    """
    part = copy.deepcopy(layer)
    for name, dimension in layer.cut.items():
        whole = layer.get_parameter(name)
        owner, _, last = name.rpartition(".")
        piece = cut_out(whole.detach(), runs, dimension)
        trained = nn.Parameter(piece, requires_grad=whole.requires_grad)
        part.get_submodule(owner).register_parameter(last, trained)
    return part


def cut_out(whole: Tensor, runs: Sequence[Columns], dimension: int) -> Tensor:
    """Return a copy of the ``runs`` of a tensor along ``dimension``, one after the other."""
    return torch.cat([whole.narrow(dimension, run.first, len(run)) for run in runs], dim=dimension)


def join_parts(pieces: Sequence[Tensor], runs: Sequence[Sequence[Columns]], dimension: int) -> Tensor:
    """Return the uncut tensor of which part p has the columns ``runs[p]``: what :func:`cut_out` undoes."""
    placed = [
        (run.first, piece)
        for part, cuts in zip(pieces, runs, strict=True)
        for run, piece in zip(cuts, torch.split(part, [len(cut) for cut in cuts], dim=dimension), strict=True)
    ]
    return torch.cat([piece for _, piece in sorted(placed, key=lambda pair: pair[0])], dim=dimension)
