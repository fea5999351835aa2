"""A graph convolution written as stages, so that a strategy can cut it where it likes (P3, P-TAGS)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from dgl.heterograph import DGLBlock
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.keyed_dropout import DropDraws, drop_attention, dropped

Sums: TypeAlias = tuple[Tensor, ...]
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


RunParts: TypeAlias = Callable[["Staged", StageInput], Sums]
"""A layer with one part's weights, and what this rank called it with, to the sums of all parts."""


class Staged(nn.Module, ABC):
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

    def scatter(self, given: StageInput, transformed: Any) -> Sums:
        """Return this part's share of what the edges need in full; nothing when not overridden."""
        return ()

    @abstractmethod
    def gather(self, given: StageInput, transformed: Any, scattered: Sums) -> Sums:
        """Return this part's share of the sums at the destinations, each (D1, ...); at the sources (L0, ...).

        Args:
            given: The block, this part's columns, and the edges.
            transformed: What :meth:`transform` returned.
            scattered: What :meth:`scatter` returned, summed over the parts.
        """

    @abstractmethod
    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Return the layer's output from what :meth:`gather` returned, summed over the parts."""

    def apply_edges(self, given: StageInput, gathered: Sums) -> Tensor:
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

    def sync(self, given: StageInput) -> Sums:
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


def add_up(parts: Sequence[Sums]) -> Sums:
    """Return the sums over the parts, added in the order of the parts."""
    return tuple(sum(rest, first) for first, *rest in zip(*parts, strict=True))
