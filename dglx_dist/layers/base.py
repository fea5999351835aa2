"""Interfaces for convolutions: stages that split by input columns (P3, P-TAGS), and their kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import dgl.function as fn
import torch
from dgl import DGLError
from dgl.heterograph import DGLBlock
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.dropout import DropDraws, drop_attention, drop_entries
from dglx_dist.layers.masks import ColumnRange
from dglx_dist.records import EdgeType

PartialSums: TypeAlias = tuple[Tensor, ...]
"""Tensors that are summed over the parts."""


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """Input that one part of a split layer gets."""

    block: DGLBlock
    x: Tensor
    """(L0, F_p) this part's columns of the source inputs. F_p may be 0."""
    edges: Mapping[str, Tensor]
    """Per-edge arguments for the convolution, such as weights: name to (E1, ...). All parts have the same
    values, except for ``edges_by_column``.
    """
    draws: DropDraws | None = None
    """Keys for dropout before *sync*, so that the parts drop the same as one process. A single part has None
    and draws as torch does.
    """
    targets: StageInput | None = None
    """Input at the destinations, if they have another node type than the sources. None: first sources."""
    by_type: Mapping[str, StageInput] = field(default_factory=dict)
    """Inputs by node type, if the layer reads several types. Then :attr:`x` has no meaning."""
    is_own: bool = True
    """Whether the block is this rank's own. Only a block's owner has rows that are not cut. Other parts have
    (L0, 0) rows instead.
    """


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """Column counts of a layer's rows."""

    inputs: int
    """Columns in a source row. Ranks exchange such rows before the layer."""
    outputs: int
    """Columns in the result, for all heads together."""
    summed: int
    """Columns to sum along an edge."""
    sums_sources: bool = False
    """Whether the layer reads sources only by a sum or mean over in-edges, with :attr:`summed` columns."""


RunParts: TypeAlias = Callable[["SplittableConv", StageInput], PartialSums]
"""Function that runs a layer on all parts and returns the sums over them. It takes the layer with one part's
weights, and this rank's input.
"""


class SplittableConv(nn.Module, ABC):
    """A graph convolution as stages, as in P3's P-TAGS interface (section 3.4).

    Stages before *sync* are linear in the input columns. Each part computes them with its own columns and its
    own rows of the weights, and the parts' results are summed:

    * *partition*: :attr:`cut` names the weights that have one row (or column) per input column;
    * *transform*: computation per source node, before edges;
    * *scatter*: values that an edge needs in full, such as attention logits, summed over the parts;
    * *gather*: aggregation per destination node;
    * *sync*: the sum over parts, which a strategy computes;
    * *apply*: bias, norm and activation per destination node, from full sums. The method is called
      :meth:`apply_nodes`, because ``nn.Module`` already has an ``apply``.

    Subclasses define :attr:`cut`, :meth:`gather` and :meth:`apply_nodes`, and are used like any module:
    ``layer(block, x)``. Bias, norm, activation and dropout on the result belong in :meth:`apply_nodes`. An
    earlier stage would add them once per part.
    """

    cut: Mapping[str, int]
    """Parameter name to the dimension that runs over the input columns."""
    shared: tuple[str, ...] = ()
    """Parameters that stages before *sync* use uncut. Their gradients are summed over the parts."""
    run_parts: RunParts | None = None
    """Function that runs the stages up to *sync* on all parts. None means that there is one part."""
    edge_arguments: tuple[str, ...] = ("edge_weight",)
    """Names of the per-edge arguments to :meth:`forward`."""
    required_edges: tuple[str, ...] = ()
    """Names of per-edge arguments that are part of every call. Their bytes always count."""
    edges_by_column: tuple[str, ...] = ()
    """Names of (E1, F) per-edge values as wide as the uncut input. Each part gets its own columns."""
    sums_sources: bool = False
    """Whether the unsplit layer's :meth:`forward` reads sources only by sums over in-edges."""
    heads: int = 0
    """Number of attention heads, each with a logit per edge. 0 means no attention."""
    ends: Literal["one type", "sources", "apart", "together"] = "one type"
    """How the stages read the two ends of an edge. "one type": both ends have one node type. "sources": only
    sources are read. "apart": the result has a term for each end. "together": both ends are read together,
    and have two node types.
    """
    target_cut: tuple[str, ...] = ()
    """Names in :attr:`cut` for parameters over the destinations' columns, if these have another type."""
    cut_types: Mapping[str, str] = MappingProxyType({})
    """Parameter name in :attr:`cut` to the node type of its columns, if there are several types."""
    own_types: tuple[str, ...] = ()
    """Node types with rows that are not cut, which stages before *sync* read on the block's owner."""
    replaced: str = "forward"
    """Method in the user's module that :meth:`forward` replaces."""
    allow_zero_in_degree: bool = True
    """Whether destinations without in-edges are allowed. DGL's convolutions reject them by default."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """Take over all attributes and members from ``module``. They are shared and not copied."""
        super().__init__()
        if module is not None:
            # Both share parameters, buffers and submodules, so loading, moving or cutting one changes both.
            self.__dict__.update(module.__dict__)
            self.__dict__.pop("forward", None)
            self.allow_zero_in_degree = getattr(module, "_allow_zero_in_degree", True)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def width(self) -> int:
        """Number of input columns in the layer, or in this part of the layer."""
        name, dimension = next(iter(self.cut.items()))
        return int(self.get_parameter(name).shape[dimension])

    @property
    def sum_width(self) -> int:
        """Number of columns in all results from :meth:`gather` together.

        The default is the column count of the first weight.
        """
        return self.get_parameter(next(iter(self.cut))).numel() // self.width

    def widths(self) -> LayerWidths:
        """Return the uncut layer's column counts. Its first weight in :attr:`cut` projects the sources."""
        columns = self.width
        outputs = self.get_parameter(next(iter(self.cut))).numel() // columns
        # Rows are projected before the sum if that makes them narrower, or if logits need projected rows.
        summed = min(columns, outputs)
        if self.heads > 0:
            summed = outputs
        # The logits, the softmax and the weighted sum each process every edge once.
        summed += 6 * self.heads
        return LayerWidths(inputs=columns, outputs=outputs, summed=summed)

    @property
    def sum_widths(self) -> Mapping[str, int]:
        """Columns in all sums by destination type, if the layer reads several node types."""
        return {}

    @property
    def logit_widths(self) -> Mapping[EdgeType, int]:
        """Logits per source and destination by edge type, if the layer reads several types."""
        return {}

    @property
    def is_affine(self) -> bool:
        """Whether :meth:`apply_nodes` is only :meth:`scale` and :meth:`shift`, so that results add up."""
        return False

    def scale(self, block: DGLBlock, rows: Tensor) -> Tensor:
        """Return ``rows`` ((D1, ...), the only sum from :meth:`gather`) times a factor per destination."""
        return rows

    def shift(self, rows: Tensor) -> Tensor:
        """Return scaled ``rows`` plus the bias, if there is one."""
        return rows

    def split_modules(self) -> set[nn.Module]:
        """Return the modules that the stages replace."""
        return set(self.modules())

    def make_input(
        self, block: DGLBlock, by_type: Mapping[str, StageInput], edges: Mapping[str, Tensor]
    ) -> StageInput:
        """Return the input for the stages, from the inputs by node type."""
        (inputs,) = by_type.values()
        return replace(inputs, edges=edges)

    def own_edges(self, block: DGLBlock) -> dict[str, Tensor]:
        """Return (E1, ...) per-edge values that depend on the complete block. There are none by default.

        A block's owner computes them and passes them to the parts in ``StageInput.edges``.
        """
        return {}

    def transform(self, inputs: StageInput) -> Any:
        """Return the input for :meth:`scatter` and :meth:`gather`. By default these are the columns."""
        return inputs.x

    def scatter(self, inputs: StageInput, transformed: Any) -> PartialSums:
        """Return this part's share of the values that edges need in full. There are none by default."""
        return ()

    @abstractmethod
    def gather(self, inputs: StageInput, transformed: Any, scattered: PartialSums) -> PartialSums:
        """Return this part's shares of the sums, each (D1, ...) at destinations or (L0, ...) at sources.

        ``scattered`` are the results from :meth:`scatter`, summed over the parts.
        """

    @abstractmethod
    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        """Return the layer's output. ``gathered`` are the results from :meth:`gather`, summed over parts."""

    def forward(
        self,
        block: DGLBlock,
        x: Tensor | tuple[Tensor, Tensor],
        *edges: Tensor | None,
        **named: Any,
    ) -> Tensor:
        """Run all stages: (L0, F) to the layer's (D1, ...).

        Args:
            x: Source inputs, with the destinations first, as in every block. Or a pair, as DGL's convolutions
                take it, where the second tensor holds those first rows. Others raise ConfigError.
            edges, named: Per-edge arguments, ordered as in :attr:`edge_arguments`, or by name. Others raise
                ConfigError.
        """
        values = {**self.own_edges(block), **self._name_edges(edges, named)}
        inputs = StageInput(block=block, x=self._read_sources(block, x), edges=values)
        return self.apply_nodes(block, self.sync(inputs))

    def sync(self, inputs: StageInput) -> PartialSums:
        """Run the stages up to :meth:`gather`, and return the results summed over all parts."""
        if self.run_parts is not None:
            return self.run_parts(self, inputs)
        transformed = self.transform(inputs)
        return self.gather(inputs, transformed, self.scatter(inputs, transformed))

    def drop_inputs(self, inputs: StageInput, probability: float) -> Tensor:
        """Return (L0, F_p): ``inputs.x`` with entries dropped while training.

        Raises ConfigError if the layer is split and ``inputs`` has no keys for the parts.
        """
        return self._drop(inputs, inputs.x, probability, drop_entries)

    def drop_ends(self, inputs: StageInput, probability: float) -> tuple[Tensor, Tensor]:
        """Return (L0, F_p) and (D1, F_p): sources and destinations with entries dropped while training.

        Raises as :meth:`drop_inputs`.
        """
        x = self.drop_inputs(inputs, probability)
        if inputs.targets is None:
            return x, x[: inputs.block.num_dst_nodes()]
        return x, self.drop_inputs(inputs.targets, probability)

    def drop_edges(self, inputs: StageInput, attention: Tensor, probability: float) -> Tensor:
        """Return ``attention`` ((E1, K, 1)) with entries dropped while training.

        Raises as :meth:`drop_inputs`.
        """
        target_inputs = inputs
        if inputs.targets is not None:
            target_inputs = inputs.targets
        return self._drop(target_inputs, attention, probability, partial(drop_attention, inputs.block))

    def check_in_edges(self, block: DGLBlock) -> None:
        """Raise DGLError, as DGL's convolutions do, if a destination has no in-edges but needs some."""
        if not self.allow_zero_in_degree and (block.in_degrees() == 0).any():
            raise DGLError(
                "There are 0-in-degree nodes in the graph, whose output would be invalid. Add self-loops "
                "with dgl.add_self_loop(g) before partitioning, or set allow_zero_in_degree=True in the "
                "convolution."
            )

    def _drop(self, inputs: StageInput, values: Tensor, p: float, drop: Callable[..., Tensor]) -> Tensor:
        """Return ``values`` with entries dropped by ``drop``, which needs the keys in ``inputs``."""
        if p == 0 or not self.training:
            return values
        if inputs.draws is not None:
            return drop(values, p, inputs.draws)
        if self.run_parts is None:
            return functional.dropout(values, p)
        raise ConfigError(
            f"{type(self).__name__} drops with probability {p} before its sum, but the strategy "
            "has no keys for the masks of all parts. Set it to 0 in the first layer, or use "
            "strategy='data_parallel'."
        )

    def _read_sources(self, block: DGLBlock, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(x, Tensor):
            return x
        sources, targets = x
        check_targets(sources, targets, block.num_dst_nodes())
        return sources

    def _name_edges(
        self, positional: Sequence[Tensor | None], named: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """Return a call's per-edge arguments by name. Arguments that are None are left out."""
        unknown_names = sorted(named.keys() - set(self.edge_arguments))
        if unknown_names or len(positional) > len(self.edge_arguments):
            expected = ", ".join(self.edge_arguments) or "nothing"
            actual = ", ".join(unknown_names) or f"{len(positional)} arguments"
            raise ConfigError(
                f"{type(self).__name__} takes {expected} beside the block and its inputs, not {actual}"
            )
        edges = {**dict(zip(self.edge_arguments, positional, strict=False)), **named}
        return {name: values for name, values in edges.items() if values is not None}


class SplitsTypes(ABC):
    """A module for several node types. Its first layer splits by input columns."""

    @abstractmethod
    def make_first_stages(self, widths: Mapping[str, int]) -> SplittableConv:
        """Return the first layer's stages, which share this module's parameters.

        ``widths`` has the column count for each node type that is cut. Raises ConfigError if they do not fit.
        """


def is_same_view(tensor: Tensor, rows: Tensor) -> bool:
    """Return whether both tensors view the same memory in the same way."""
    return (
        tensor.shape == rows.shape
        and tensor.dtype == rows.dtype
        and tensor.stride() == rows.stride()
        and tensor.storage_offset() == rows.storage_offset()
        and tensor.untyped_storage()._cdata == rows.untyped_storage()._cdata
    )


def check_targets(sources: Tensor, targets: Tensor | None, num_targets: int, ntype: str = "") -> None:
    """Check that ``targets`` are the first ``num_targets`` rows of ``sources``. Raise ConfigError if not."""
    rows = sources[:num_targets]
    actual = "no rows"
    if targets is not None:
        # Views are recognised without reading them, so the host does not wait for the device.
        if is_same_view(rows, targets) or torch.equal(rows, targets):
            return
        actual = f"rows of shape {tuple(targets.shape)}"

    of_type = f" of {ntype!r}" if ntype else ""
    raise ConfigError(
        f"the destinations{of_type} were given {actual}, which are not the "
        f"first {num_targets} of the source rows of shape {tuple(sources.shape)}. Pass only the rows of "
        "the sources. A block's destinations are its first sources."
    )


def sum_in_edges(block: DGLBlock, rows: Tensor, weight: Tensor | None = None, *, how: str = "sum") -> Tensor:
    """Sum the source rows over each destination's in-edges, times ``weight`` if given.

    Args:
        block: Block with L0 sources, D1 destinations and E1 edges.
        rows: (L0, ...) source rows. They may have no columns.
        weight: (E1, ...) factors per edge.
        how: Name of DGL's reduction, "sum" or "mean".

    Returns:
        (D1, ...) rows, which are zeros for destinations without in-edges.
    """
    # DGL's kernels reject rows without columns.
    if rows.numel():
        with block.local_scope():
            block.srcdata["row"] = rows
            message = fn.copy_u("row", "message")
            if weight is not None:
                block.edata["weight"] = weight
                message = fn.u_mul_e("row", "weight", "message")
            reduction = getattr(fn, how)("message", "out")
            block.update_all(message, reduction)

            # DGL writes no result for a block without edges.
            if "out" in block.dstdata:
                return block.dstdata["out"]

    # These zeros must depend on ``rows``, so that backward reaches them. Other ranks may have used the rows,
    # and then backward is a collective that this rank must not miss.
    return rows.new_zeros((block.num_dst_nodes(), *rows.shape[1:])) + 0 * rows.sum()


mean_in_edges = partial(sum_in_edges, how="mean")
"""Function like :func:`sum_in_edges` that returns the mean, or zeros where there are no in-edges."""


def lacks_columns(rows: Tensor, weight: Tensor) -> bool:
    """Return whether another part has the (n, F) ``rows`` for an (F, H) ``weight``, and this part has none.

    Rows that are not cut lie on a block's owner. Other parts have rows without columns, but the uncut
    weight. If rows are cut, a part without columns has a weight without rows instead.
    """
    return rows.shape[1] == 0 and weight.shape[0] > 0


def projects_first(sources: int, targets: int, edges: int, columns: int, width: int) -> bool:
    """Return whether it is cheaper to project rows before the sum over in-edges than after it.

    The count covers forward and backward. An element that is sent over an edge counts as four
    multiplications. Projecting first multiplies every source row twice, and sums rows back over the edges in
    the backward pass. Summing first does neither, because the inputs need no gradient.

    Args:
        sources, targets, edges: Counts in the block.
        columns, width: Columns before and after the projection.
    """
    cost_before_sum = 2 * sources * columns * width + 2 * 4 * edges * width
    cost_after_sum = 4 * edges * columns + 2 * targets * columns * width
    return cost_before_sum < cost_after_sum


def project_rows(inputs: StageInput, rows: Tensor, weight: Tensor, *, after_sum: bool) -> Tensor:
    """Project ``rows`` by the (F, H) ``weight``, unless it is cheaper on the other side of the sum.

    Call this with the source rows before the sum over in-edges, and with its result afterwards. Only one of
    the calls multiplies. The other returns its rows. Parts may decide differently, because their sums are the
    same.
    """
    block = inputs.block
    columns, width = weight.shape
    is_cheaper_before = projects_first(
        block.num_src_nodes(), block.num_dst_nodes(), block.num_edges(), columns, width
    )
    if is_cheaper_before == after_sum:
        return rows
    return rows @ weight


def apply_to_edges(
    block: DGLBlock, message: Callable[[str, str, str], object], sources: Tensor, targets: Tensor
) -> Tensor:
    """Apply DGL's ``message`` function to the rows at both ends of each edge. Return (E1, ...)."""
    with block.local_scope():
        block.srcdata["end"] = sources
        block.dstdata["end"] = targets
        block.apply_edges(message("end", "end", "out"))
        out: Tensor = block.edata["out"]
        return out


def cut_in_place(module: nn.Module, cut: Mapping[str, int], runs: Sequence[ColumnRange]) -> None:
    """Replace parameters by leaves that hold only the columns ``runs``. ``cut`` maps name to dimension."""
    for name, dimension in cut.items():
        uncut = module.get_parameter(name)
        columns = cut_out(uncut.detach(), runs, dimension)
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(columns, requires_grad=uncut.requires_grad)
        module.get_submodule(owner).register_parameter(attribute, parameter)


def cut_out(uncut: Tensor, runs: Sequence[ColumnRange], dimension: int) -> Tensor:
    """Cut the ranges ``runs`` out of a tensor along ``dimension``, and concatenate them."""
    return torch.cat([uncut.narrow(dimension, run.first, len(run)) for run in runs], dim=dimension)


def join_parts(pieces: Sequence[Tensor], runs: Sequence[Sequence[ColumnRange]], dimension: int) -> Tensor:
    """Undo :func:`cut_out`. Piece p has the columns ``runs[p]``."""
    columns_by_start: dict[int, list[Tensor]] = {}
    for piece, piece_runs in zip(pieces, runs, strict=True):
        lengths = [len(run) for run in piece_runs]
        for run, columns in zip(piece_runs, torch.split(piece, lengths, dim=dimension), strict=True):
            # An empty run begins at the same column as the run after it.
            columns_by_start.setdefault(run.first, []).append(columns)

    ordered: list[Tensor] = []
    for start in sorted(columns_by_start):
        ordered += columns_by_start[start]
    return torch.cat(ordered, dim=dimension)
