"""Trained rows for all nodes, by column: each part trains its columns of them, and no row ever moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.columns import Columns
from dglx_dist.layers.parts import cut_out
from dglx_dist.strategies.push_pull.origins import InputModule, Origin, Origins
from dglx_dist.strategies.push_pull.visit import OwnersInput


@final
class ColumnEmbedding(InputModule):
    """Stands for ``nn.Embedding`` of all nodes as the input: (V, D_p), the part's columns.

    Any torch optimizer trains it; of an embedding with ``sparse=True`` the gradient is sparse too.

    Args:
        embedding: What it stands for; its rows are copied.
        runs: The part's columns.

    Raises:
        ConfigError: it does something that needs whole rows.
    """

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, runs: Sequence[Columns]) -> None:
        super().__init__()
        self.cut, self.by_rows = {"weight": 1}, ("weight",)
        self.runs, self.origins = tuple(runs), Origins()
        for option, value in (
            ("max_norm", embedding.max_norm),
            ("scale_grad_by_freq", embedding.scale_grad_by_freq),
        ):
            if value:
                raise ConfigError(
                    f"nn.Embedding({option}={value}) needs whole rows, or counts of one owner's batch alone, "
                    f"and push_pull cuts it by columns; leave {option} out, or use strategy='data_parallel'"
                )
        own = cut_out(embedding.weight.detach(), self.runs, 1)
        self.weight = nn.Parameter(own, embedding.weight.requires_grad)
        self.sparse, self.padding_idx = embedding.sparse, embedding.padding_idx
        self.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the own columns of the rows of the batch's sources, (L0, D_p).

        Raises:
            ConfigError: ``ids`` are not exactly those.
        """
        own = self.origins.own
        if own is None or ids.shape != own.nodes.shape or not torch.equal(ids.long(), own.nodes):
            raise ConfigError(
                f"nn.Embedding of {self.weight.shape[0]} nodes was cut by columns, so it can only be asked "
                f"for the rows of a batch's input nodes; it was given ids of shape {tuple(ids.shape)} that "
                "are not these. Call it with input_nodes, or with blocks[0].srcdata[dgl.NID]"
            )
        # What the first layer sees is made by the origin, so that a batch keeps the rows it began with.
        rows = self.weight.detach()[own.nodes]
        self.origins.add(rows, Embedded(embedding=self))
        return rows

    def extra_repr(self) -> str:
        """Like that of ``nn.Embedding``."""
        return f"{self.weight.shape[0]}, {self.runs[0].width}, sparse={self.sparse}"

    def add_gradients(self, nodes: Tensor, gradients: Tensor) -> None:
        """Add to ``weight.grad``: at ``nodes`` ((K,) int64, repeats allowed) the ``gradients`` ((K, D_p))."""
        if self.padding_idx is not None:
            wanted = nodes != self.padding_idx
            nodes, gradients = nodes[wanted], gradients[wanted]
        if self.sparse:
            found = torch.sparse_coo_tensor(
                nodes.unsqueeze(0), gradients, self.weight.shape, check_invariants=True
            ).coalesce()
        else:
            found = torch.zeros_like(self.weight).index_add_(0, nodes, gradients)
        self.weight.grad = found if self.weight.grad is None else self.weight.grad + found


@final
@dataclass(frozen=True, kw_only=True)
class Embedded(Origin):
    """Rows of a trained embedding."""

    embedding: ColumnEmbedding

    @property
    def runs(self) -> tuple[Columns, ...]:
        """See :attr:`Origin.runs`."""
        return self.embedding.runs

    def rows(self, owners: OwnersInput) -> Tensor:
        """Return a copy of the rows as they are now; a leaf."""
        weight = self.embedding.weight
        return weight.detach()[owners.nodes].requires_grad_(weight.requires_grad)

    def learn(self, gradients: Sequence[tuple[OwnersInput, Tensor | None]]) -> None:
        """See :meth:`Origin.learn`."""
        found = [(owners.nodes, gradient) for owners, gradient in gradients if gradient is not None]
        if not found:
            return
        nodes = torch.cat([nodes for nodes, _ in found])
        values = torch.cat([gradient for _, gradient in found]).to(self.embedding.weight)
        self.embedding.add_gradients(nodes, values.detach())
