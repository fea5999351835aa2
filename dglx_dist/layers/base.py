"""Graph convolutions as stages that can be split by input columns (P3, P-TAGS), and their registry."""

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
"""Tensors whose sums over the parts a layer needs."""


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """The input of one part of a split layer."""

    block: DGLBlock
    x: Tensor
    """(L0, F_p) this part's columns of the source nodes' inputs; F_p may be 0."""
    edges: Mapping[str, Tensor]
    """Per-edge arguments of the convolution, such as weights: name to (E1, ...); the same on every part."""
    draws: DropDraws | None = None
    """Keys of the dropout before *sync*, so that the parts drop what one process would; None: a single part,
    which draws as torch does."""


RunParts: TypeAlias = Callable[["SplittableConv", StageInput], PartialSums]
"""A layer with one part's weights and the input on this rank to the sums over all parts."""


class SplittableConv(nn.Module, ABC):
    """One graph convolution as the stages of P3's P-TAGS interface (section 3.4).

    Stages before *sync* are linear in the input columns, so each part computes them with its own columns and
    its own rows of the weights, and the results of the parts are summed:

    * *partition*: :attr:`cut` names the weights that have one row (or column) per input column;
    * *transform*: per source node, before edges;
    * *scatter*: values that an edge needs in full, such as attention logits; summed over the parts;
    * *gather*: aggregation per destination node;
    * *sync*: the sum over parts, which a strategy computes;
    * *apply*: the rest, per destination node, from full sums: bias, norm, activation. (``nn.Module`` has an
      ``apply`` of its own, hence :meth:`apply_nodes`.)

    Subclasses define :attr:`cut`, :meth:`gather` and :meth:`apply_nodes`, and are used as any module:
    ``layer(block, x)``. Bias, norm, activation and dropout of the result belong in :meth:`apply_nodes`: in an
    earlier stage they would be added once per part.
    """

    cut: Mapping[str, int]
    """Parameter name to the dimension that runs over the input columns."""
    shared: tuple[str, ...] = ()
    """Parameters that stages before *sync* use whole; their gradients are summed over the parts."""
    run_parts: RunParts | None = None
    """Runs the stages up to *sync* on all parts; None: there is only one."""
    edge_arguments: tuple[str, ...] = ("edge_weight",)
    """Names of the per-edge arguments of :meth:`forward`."""
    edges_after_sync: bool = False
    """Whether only :meth:`apply_edges` uses the per-edge values, which then stay with the owner."""

    @property
    def width(self) -> int:
        """Input columns of the layer, or of this part of it."""
        name, dimension = next(iter(self.cut.items()))
        return int(self.get_parameter(name).shape[dimension])

    def own_edges(self, block: DGLBlock) -> dict[str, Tensor]:
        """Return per-edge values, (E1, ...) each, that depend on the whole block; none by default.

        The owner of a block computes them and passes them to the parts in ``StageInput.edges``.
        """
        return {}

    def transform(self, given: StageInput) -> Any:
        """Return the input of :meth:`scatter` and :meth:`gather`; by default the columns themselves."""
        return given.x

    def scatter(self, given: StageInput, transformed: Any) -> PartialSums:
        """Return this part's share of the values that edges need in full; by default none."""
        return ()

    @abstractmethod
    def gather(self, given: StageInput, transformed: Any, scattered: PartialSums) -> PartialSums:
        """Return this part's share of the sums at the destinations, each (D1, ...); at the sources (L0, ...).

        Args:
            given: The block, this part's columns, and the edges.
            transformed: The result of :meth:`transform`.
            scattered: The results of :meth:`scatter`, summed over the parts.
        """

    @abstractmethod
    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """Return the layer's output from the results of :meth:`gather`, summed over the parts."""

    def apply_edges(self, given: StageInput, gathered: PartialSums) -> Tensor:
        """As :meth:`apply_nodes`, for layers that need edges and their values here.

        It runs on the owner of a block: ``given`` has all of ``edges``, but only a part's columns of ``x``.
        """
        return self.apply_nodes(given.block, gathered)

    def forward(
        self,
        block: DGLBlock,
        x: Tensor | tuple[Tensor, Tensor],
        *edges: Tensor | None,
        **named: Tensor | None,
    ) -> Tensor:
        """Run all stages: (L0, F) to the layer's (D1, ...).

        Args:
            block: The block.
            x: Inputs of the sources, the destinations first, as in every block; or a pair, as for DGL's
                convolutions, whose second tensor must be those first rows.
            edges: Per-edge arguments in the order of :attr:`edge_arguments`.
            named: The same by name.

        Raises:
            ConfigError: an argument is unknown, or the pair has other rows.
        """
        values = {**self.own_edges(block), **self.edges_by_name(edges, named)}
        given = StageInput(block=block, x=self.sources(block, x), edges=values)
        sums = self.sync(replace(given, edges={}) if self.edges_after_sync else given)
        return self.apply_edges(given, sums)

    def sync(self, given: StageInput) -> PartialSums:
        """Return the results of :meth:`gather`, summed over all parts; a strategy sets :attr:`run_parts`."""
        if self.run_parts is not None:
            return self.run_parts(self, given)
        transformed = self.transform(given)
        return self.gather(given, transformed, self.scatter(given, transformed))

    def drop_inputs(self, given: StageInput, probability: float) -> Tensor:
        """Return (L0, F_p): ``given.x`` with entries dropped, while training.

        Raises:
            ConfigError: the layer is split, and ``given`` has no keys for the parts.
        """
        self._check_draws(given, probability)
        return dropped(given.x, probability, self.training, given.draws)

    def drop_edges(self, given: StageInput, attention: Tensor, probability: float) -> Tensor:
        """Return ``attention`` ((E1, K, 1)) with entries dropped, while training.

        Raises:
            ConfigError: as for :meth:`drop_inputs`.
        """
        self._check_draws(given, probability)
        if given.draws is None or not self.training:
            return dropped(attention, probability, self.training, None)
        return drop_attention(given.block, attention, probability, given.draws)

    def _check_draws(self, given: StageInput, probability: float) -> None:
        if probability > 0 and self.training and self.run_parts is not None and given.draws is None:
            raise ConfigError(
                f"{type(self).__name__} drops with probability {probability} before its sum, but the "
                "strategy has no keys for the masks of all parts; set it to 0 in the first layer, or use "
                "strategy='data_parallel'"
            )

    def sources(self, block: DGLBlock, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Return the inputs of the sources from either form that DGL's convolutions take."""
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
        """Return the given per-edge arguments by name."""
        unknown = sorted(named.keys() - set(self.edge_arguments))
        if unknown or len(positional) > len(self.edge_arguments):
            raise ConfigError(
                f"{type(self).__name__} takes {', '.join(self.edge_arguments) or 'nothing'} beside the block "
                f"and its inputs, not {', '.join(unknown) or f'{len(positional)} arguments'}"
            )
        found = dict(zip(self.edge_arguments, positional, strict=False)) | dict(named)
        return {name: values for name, values in found.items() if values is not None}


Sync: TypeAlias = Literal["columns", "inputs"]
"""What is summed over the parts: sums over in-edges, or projected source rows where a layer needs it."""

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
"""Overrides of :data:`_ADAPTERS` under ``sync="inputs"``."""

_REASONS_AGAINST: Mapping[str, str] = MappingProxyType(
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
        sync: "columns": sums over in-edges are summed over the parts. "inputs": also layers that only begin
            with a linear map of each source row; those rows, (L0, width), are summed over the parts.

    Raises:
        ConfigError: it cannot be split; the message has the reason and a remedy.
    """
    if isinstance(module, SplittableConv):
        return module
    kind = type(module)
    known = {**_ADAPTERS, **_BY_ROWS} if sync == "inputs" else _ADAPTERS
    if kind.__module__.startswith("dgl.") and kind.__name__ in known:
        path, name = known[kind.__name__].split(":")
        stages: SplittableConv = getattr(importlib.import_module(path), name)(module)
        return stages
    reason = _REASONS_AGAINST.get(kind.__name__, "its stages are not defined")
    other = "With sync='inputs' its projected rows are sent. " if kind.__name__ in _BY_ROWS else ""
    raise ConfigError(
        f"{kind.__name__} cannot be cut by input columns: {reason}. {other}These can be cut: "
        f"{', '.join(known)}, and subclasses of dglx_dist.layers.base.SplittableConv; any module trains "
        "under strategy='data_parallel'"
    )


def sum_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return (D1, ...) sums of the source rows ((L0, ...)) over in-edges, times ``weight`` ((E1, ...))."""
    return _reduce(block, rows, weight, "sum")


def mean_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """As :func:`sum_in_edges`, divided by the number of in-edges; zeros where there are none."""
    return _reduce(block, rows, weight, "mean")


def max_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """As :func:`sum_in_edges`, but the largest; zeros where there are no in-edges."""
    return _reduce(block, rows, weight, "max")


def narrows_first(block: DGLBlock, columns: int, width: int) -> bool:
    """Whether projecting ``columns`` to ``width`` before the sum over in-edges is cheaper than after it.

    The count covers forward and backward; an element sent over an edge counts as four multiplications.
    Projecting first multiplies every source row, twice, and sums rows back over the edges in the backward
    pass; summing first does neither, as the inputs need no gradient. Parts may decide differently: their sums
    are the same.
    """
    sources, targets, edges = block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()
    first = 2 * sources * columns * width + 2 * 4 * edges * width
    last = 4 * edges * columns + 2 * targets * columns * width
    return first < last


def _reduce(
    block: DGLBlock, rows: Tensor, weight: Tensor | None, how: Literal["sum", "mean", "max"]
) -> Tensor:
    if block.num_edges() == 0 or rows.numel() == 0:
        # DGL's kernels reject rows without columns, and a block without edges keeps no result.
        return rows.new_zeros((block.num_dst_nodes(), *rows.shape[1:])) + 0 * rows.sum()
    with block.local_scope():
        block.srcdata["row"] = rows
        message = fn.copy_u("row", "message")
        if weight is not None:
            block.edata["weight"] = weight
            message = fn.u_mul_e("row", "weight", "message")
        block.update_all(message, getattr(fn, how)("message", "out"))
        return block.dstdata["out"]


def refuse_nodes_without_edges(block: DGLBlock) -> None:
    """Raise DGLError, as DGL's convolutions do, if a destination has no in-edges."""
    if (block.in_degrees() == 0).any():
        raise DGLError(
            "There are 0-in-degree nodes in the graph, whose output would be invalid. Add self-loops with "
            "dgl.add_self_loop(g) before partitioning, or set allow_zero_in_degree=True in the convolution."
        )


def part_of(layer: SplittableConv, runs: Sequence[Columns]) -> SplittableConv:
    """Return a copy of ``layer`` whose cut weights have only the columns ``runs``.

    Its parameters are leaves: training it does not change ``layer``.
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
    """Return the concatenated ``runs`` of a tensor along ``dimension``."""
    return torch.cat([whole.narrow(dimension, run.first, len(run)) for run in runs], dim=dimension)


def join_parts(pieces: Sequence[Tensor], runs: Sequence[Sequence[Columns]], dimension: int) -> Tensor:
    """Undo :func:`cut_out`: join pieces of which piece p has the columns ``runs[p]``."""
    placed = [
        (run.first, piece)
        for part, cuts in zip(pieces, runs, strict=True)
        for run, piece in zip(cuts, torch.split(part, [len(cut) for cut in cuts], dim=dimension), strict=True)
    ]
    return torch.cat([piece for _, piece in sorted(placed, key=lambda pair: pair[0])], dim=dimension)
