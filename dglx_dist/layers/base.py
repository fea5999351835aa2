"""Contracts of convolutions: split by input columns (P3, P-TAGS), as a stage of workers; their kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import dgl.function as fn
import torch
from dgl import DGLError
from dgl.heterograph import DGLBlock
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.dropout import ColumnRange, DropDraws, drop_attention, drop_entries

PartialSums: TypeAlias = tuple[Tensor, ...]
"""Tensors whose sums over the parts a layer needs."""


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """The input of one part of a split layer."""

    block: DGLBlock
    x: Tensor
    """(L0, F_p) this part's columns of the source nodes' inputs; F_p may be 0."""
    edges: Mapping[str, Tensor]
    """Per-edge arguments of the convolution, such as weights: name to (E1, ...); the same on every part,
    but for those of ``edges_by_column``."""
    draws: DropDraws | None = None
    """Keys of the dropout before *sync*, so that the parts drop what one process would; None: a single part,
    which draws as torch does."""


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """Columns of a layer's rows."""

    inputs: int
    """Columns of a source's row, which ranks exchange before the layer."""
    outputs: int
    """Columns of its result, of all heads."""
    summed: int
    """Columns that are summed along an edge."""
    sums_sources: bool = False
    """Whether it reads its sources by a sum or mean over in-edges only, of :attr:`summed` columns."""


Around: TypeAlias = Literal["sum", "mean", "left", "both"]
"""Sum over in-neighbours: plain, divided by the node's in-degree, by the sources' out-degrees, or by the
square roots of both, as ``norm`` of ``dgl.nn.GraphConv``. Degrees of 0 count as 1."""


@dataclass(frozen=True, kw_only=True)
class DeclaredStage:
    """A layer as a sum over in-edges, computed by graph servers, and a stage, computed by workers."""

    stage: str
    """Name in the registry of stages: see ``dglx_dist.serverless.stages.base.register_stage``."""
    config: Mapping[str, Any]
    """Configuration of the stage; JSON values."""
    weights: tuple[str, ...]
    """Names of the module's parameters, in the order in which the stage declares its weights."""
    around: Around | None = "sum"
    """The sum that is the stage's first input; None: the layer uses no neighbours."""
    own: bool = False
    """Whether the node's own row is the stage's next input; without ``around`` it is the only one."""
    depends_on_the_graph: bool = False
    """Whether the module reads the distributed graph, so it is not compared with its stage."""
    takes_activation: bool = False
    """Whether an activation after the layer may be put into ``config`` as ``activation``."""
    activation: Callable[[Tensor], Tensor] | None = None
    """What the module applies to the stage's result, if that is not in ``config``."""
    dropout: str = ""
    """Name of a dropout of the module that it applies to its input."""


@runtime_checkable
class Declares(Protocol):
    """A module, called as ``layer(block, h)``, that declares an equivalent stage."""

    def vertex_stage(self) -> DeclaredStage:
        """Return the stage; both must return (num_dst, width), with the same gradients."""
        ...


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
    """Parameters that stages before *sync* use uncut; their gradients are summed over the parts."""
    run_parts: RunParts | None = None
    """Runs the stages up to *sync* on all parts; None: there is only one."""
    edge_arguments: tuple[str, ...] = ("edge_weight",)
    """Names of the per-edge arguments of :meth:`forward`."""
    required_edges: tuple[str, ...] = ()
    """Those of them that every call has, so that their bytes come to those of the sums."""
    edges_by_column: tuple[str, ...] = ()
    """Names of per-edge values as wide as the uncut input, (E1, F): a part gets its own columns of them."""
    edges_after_sync: bool = False
    """Whether only :meth:`apply_edges` uses the per-edge values, which then stay with the owner."""
    sums_sources: bool = False
    """Whether :meth:`forward`, unless the layer is split, reads sources by sums over in-edges only."""
    heads: int = 0
    """Attention heads, each with a logit per edge; 0: no attention."""
    allow_zero_in_degree: bool = True
    """False: :meth:`check_in_edges` raises, as DGL's convolutions do by default."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """Be a view of ``module``, if there is one: with its attributes and its members, which are shared."""
        super().__init__()
        if module is not None:
            # One set of parameters, buffers and submodules: what is loaded, moved or cut is so in both.
            self.__dict__.update(module.__dict__)
            self.__dict__.pop("forward", None)
            self.allow_zero_in_degree = getattr(module, "_allow_zero_in_degree", True)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def width(self) -> int:
        """Input columns of the layer, or of this part of it."""
        name, dimension = next(iter(self.cut.items()))
        return int(self.get_parameter(name).shape[dimension])

    @property
    def sum_width(self) -> int:
        """Columns of all results of :meth:`gather` together; by default those of the first weight's."""
        return self.get_parameter(next(iter(self.cut))).numel() // self.width

    def widths(self) -> LayerWidths:
        """Return the columns of the uncut layer, whose first weight in :attr:`cut` projects the sources."""
        columns = self.width
        outputs = self.get_parameter(next(iter(self.cut))).numel() // columns
        # Logits need projected rows; the logits, the softmax and the weighted sum each process every edge.
        early = self.heads > 0 or columns > outputs
        return LayerWidths(
            inputs=columns,
            outputs=outputs,
            summed=(outputs if early else columns) + 6 * self.heads,
        )

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

        ``scattered`` are the results of :meth:`scatter`, summed over the parts.
        """

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """Return the layer's output from the results of :meth:`gather`, summed over the parts."""
        raise NotImplementedError(f"{type(self).__name__} defines neither apply_nodes nor apply_edges")

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

        ``x`` are the inputs of the sources, the destinations first, as in every block; or a pair, as DGL's
        convolutions take it, whose second tensor must be those first rows. ``edges`` and ``named`` are the
        per-edge arguments in the order of :attr:`edge_arguments`, or by name; others raise ConfigError.
        """
        values = {**self.own_edges(block), **self._edges_by_name(edges, named)}
        given = StageInput(block=block, x=self._sources(block, x), edges=values)
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

        If the layer is split and ``given`` has no keys for the parts, ConfigError is raised.
        """
        return self._dropped(given, given.x, probability, drop_entries)

    def drop_edges(self, given: StageInput, attention: Tensor, probability: float) -> Tensor:
        """Return ``attention`` ((E1, K, 1)) with entries dropped, while training; raises as above."""
        return self._dropped(given, attention, probability, partial(drop_attention, given.block))

    def check_in_edges(self, block: DGLBlock) -> None:
        """Raise DGLError, as DGL's convolutions do, if a destination must have in-edges and has none."""
        if not self.allow_zero_in_degree and (block.in_degrees() == 0).any():
            raise DGLError(
                "There are 0-in-degree nodes in the graph, whose output would be invalid. Add self-loops "
                "with dgl.add_self_loop(g) before partitioning, or set allow_zero_in_degree=True in the "
                "convolution."
            )

    def _dropped(
        self, given: StageInput, values: Tensor, probability: float, by_keys: Callable[..., Tensor]
    ) -> Tensor:
        if probability == 0 or not self.training:
            return values
        if given.draws is not None:
            return by_keys(values, probability, given.draws)
        if self.run_parts is None:
            return functional.dropout(values, probability)
        raise ConfigError(
            f"{type(self).__name__} drops with probability {probability} before its sum, but the strategy "
            "has no keys for the masks of all parts; set it to 0 in the first layer, or use "
            "strategy='data_parallel'"
        )

    def _sources(self, block: DGLBlock, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
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

    def _edges_by_name(
        self, positional: Sequence[Tensor | None], named: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        unknown = sorted(named.keys() - set(self.edge_arguments))
        if unknown or len(positional) > len(self.edge_arguments):
            raise ConfigError(
                f"{type(self).__name__} takes {', '.join(self.edge_arguments) or 'nothing'} beside the block "
                f"and its inputs, not {', '.join(unknown) or f'{len(positional)} arguments'}"
            )
        found = dict(zip(self.edge_arguments, positional, strict=False)) | dict(named)
        return {name: values for name, values in found.items() if values is not None}


def sum_in_edges(
    block: DGLBlock, rows: Tensor, weight: Tensor | None = None, how: Literal["sum", "mean", "max"] = "sum"
) -> Tensor:
    """Return (D1, ...) sums of the source rows ((L0, ...)) over in-edges, times ``weight`` ((E1, ...))."""
    # DGL's kernels reject rows without columns.
    if rows.numel():
        with block.local_scope():
            block.srcdata["row"] = rows
            message = fn.copy_u("row", "message")
            if weight is not None:
                block.edata["weight"] = weight
                message = fn.u_mul_e("row", "weight", "message")
            block.update_all(message, getattr(fn, how)("message", "out"))
            # A block without edges keeps no result, but may have sent rows to other ranks.
            if "out" in block.dstdata:
                return block.dstdata["out"]
    return rows.new_zeros((block.num_dst_nodes(), *rows.shape[1:])) + 0 * rows.sum()


mean_in_edges = partial(sum_in_edges, how="mean")
"""As :func:`sum_in_edges`, divided by the number of in-edges; zeros where there are none."""
max_in_edges = partial(sum_in_edges, how="max")
"""As :func:`sum_in_edges`, but the largest; zeros where there are no in-edges."""


def projects_first(sources: int, targets: int, edges: int, columns: int, width: int) -> bool:
    """Return whether rows of ``columns`` are better projected to ``width`` before the sum over in-edges.

    The count covers forward and backward; an element sent over an edge counts as four multiplications.
    Projecting first multiplies every source row, twice, and sums rows back over the edges in the backward
    pass; summing first does neither, as the inputs need no gradient.
    """
    first = 2 * sources * columns * width + 2 * 4 * edges * width
    last = 4 * edges * columns + 2 * targets * columns * width
    return first < last


def project_rows(given: StageInput, rows: Tensor, weight: Tensor, *, after_sum: bool) -> Tensor:
    """Return ``rows`` times the (F, H) ``weight`` if that is cheaper here than beyond the sum, else ``rows``.

    Called with the source rows before the sum over in-edges, and with its result after it. Parts may decide
    differently: their sums are the same.
    """
    block = given.block
    counts = block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()
    return rows if projects_first(*counts, *weight.shape) is after_sum else rows @ weight


def apply_to_edges(
    block: DGLBlock, message: Callable[[str, str, str], object], sources: Tensor, targets: Tensor
) -> Tensor:
    """Return the (E1, ...) messages of both ends' rows."""
    with block.local_scope():
        block.srcdata["end"], block.dstdata["end"] = sources, targets
        block.apply_edges(message("end", "end", "out"))
        out: Tensor = block.edata["out"]
        return out


def cut_in_place(module: nn.Module, cut: Mapping[str, int], runs: Sequence[ColumnRange]) -> None:
    """Replace the parameters ``cut`` (name to dimension) by leaves with their columns ``runs``."""
    for name, dimension in cut.items():
        uncut = module.get_parameter(name)
        owner, _, last = name.rpartition(".")
        piece = nn.Parameter(cut_out(uncut.detach(), runs, dimension), requires_grad=uncut.requires_grad)
        module.get_submodule(owner).register_parameter(last, piece)


def cut_out(uncut: Tensor, runs: Sequence[ColumnRange], dimension: int) -> Tensor:
    """Return the concatenated ``runs`` of a tensor along ``dimension``."""
    return torch.cat([uncut.narrow(dimension, run.first, len(run)) for run in runs], dim=dimension)


def join_parts(pieces: Sequence[Tensor], runs: Sequence[Sequence[ColumnRange]], dimension: int) -> Tensor:
    """Undo :func:`cut_out`: join pieces of which piece p has the columns ``runs[p]``."""
    placed = [
        (run.first, piece)
        for part, cuts in zip(pieces, runs, strict=True)
        for run, piece in zip(cuts, torch.split(part, [len(cut) for cut in cuts], dim=dimension), strict=True)
    ]
    return torch.cat([piece for _, piece in sorted(placed, key=lambda pair: pair[0])], dim=dimension)
