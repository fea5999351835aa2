"""The columns of a plan: features of its rows, fetched once, labels of its seeds, values of its edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import Tensor

from dglx_dist.graph.dtypes import empty_rows
from dglx_dist.graph.kvstore import KVStore
from dglx_dist.records import Array
from dglx_dist.sampling.attach import LABEL_PHASE, Columns
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.row_files import RowFiles

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

PHASE = "preload"
"""The ledger's name of features and edge values, which are fetched once."""

FetchHalo: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""((own rows, *row), room for the (n_halo, *row) of the others, which it fills and returns); collective."""


@final
@dataclass(frozen=True, kw_only=True)
class PlanColumns:
    """What is attached to the blocks of one plan; tensors that are kept, not copied."""

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """(rows of the features, *row): those that this rank holds, or those of all sources of layer 1."""
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    """(seeds, *row)."""
    edges: Sequence[Mapping[str, Tensor]] = ()
    """(E, *row) of every layer, input-most first, each the first ones of layer 1's; () where nothing is asked
    for."""

    def to(self, device: torch.device) -> PlanColumns:
        """Return them on ``device``; those of edges are moved once for all layers."""

        def moved(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: values.to(device) for name, values in rows.items()}

        first = moved(self.edges[0]) if self.edges else {}
        edges = [{name: first[name][: len(values)] for name, values in rows.items()} for rows in self.edges]
        return PlanColumns(inputs=moved(self.inputs), targets=moved(self.targets), edges=edges)


@final
class ColumnReader:
    """Reads the columns of plans by one-sided calls; any thread.

    Args:
        g: A graph of one node and one edge type.
        columns: What to attach.
        files: Where rows are kept on disk, to be fetched once; None: they are fetched each time.
    """

    def __init__(self, g: DistGraph, columns: Columns, files: RowFiles | None = None) -> None:
        self._store: KVStore = g.kvstore
        self._columns, self._files = columns, files

    def read(self, plan: RankPlan, fetch: FetchHalo | None = None) -> PlanColumns:
        """Return the columns of ``plan``.

        Sends 8 bytes for each row of the features that lies on another server, and receives the row: once
        per server, for its ranks hold different rows (algorithms 3.1); for values of edges likewise, once for
        all layers. Rows that are kept on disk by now are mapped, and nothing is sent for them.

        Args:
            plan: Whose rows.
            fetch: Brings the halo of layer 1, in the stored type, which may be half as wide as the one to
                compute in; this is collective then. None: inputs are the own rows.

        Raises:
            PeerError: an owner of rows is dead or silent.
        """
        return PlanColumns(
            inputs=self._converted(self._inputs(plan, fetch)),
            targets=self._rows(_only(self._columns.targets), plan.rows(len(plan.layers)), LABEL_PHASE),
            edges=self._edges(plan),
        )

    def _inputs(self, plan: RankPlan, fetch: FetchHalo | None) -> dict[str, Tensor]:
        keys = _only(self._columns.inputs)
        if fetch is None:
            return self._rows(keys, plan.nodes, PHASE)
        found = {}
        for name, key in keys.items():
            # Both into their place: features are most of what a rank holds.
            rows = empty_rows(plan.layers[0].num_sources, self._store.column(key).info)
            own = rows[: len(plan.nodes)]
            self._store.pull(key, plan.nodes, out=own, distinct=True, phase=PHASE)
            fetch(own, rows[len(plan.nodes) :])
            found[name] = rows
        return found

    def _edges(self, plan: RankPlan) -> list[dict[str, Tensor]]:
        keys = _only(self._columns.edges)
        if not keys:
            return []
        # The edges of every layer are the first ones of layer 1's, so these values serve all.
        rows = self._converted(self._rows(keys, plan.layers[0].edge_ids, PHASE, 1))
        return [
            {name: values[: len(layer.edge_ids)] for name, values in rows.items()} for layer in plan.layers
        ]

    def _rows(self, keys: Mapping[str, str], ids: Array, phase: str, layer: int = 0) -> dict[str, Tensor]:
        found, pulls = {}, {}
        for name, key in keys.items():
            kept = self._kept(key, ids)
            if kept is None:
                pulls[name] = self._store.submit_pull(key, ids, distinct=True, phase=phase, layer=layer)
            else:
                found[name] = kept
        for name, pull in pulls.items():
            found[name] = pull.result()
            self._keep(keys[name], ids, found[name])
        return found

    def _kept(self, key: str, ids: Array) -> Tensor | None:
        column = self._store.column(key)
        if self._files is None or not self._files.takes(column, ids):
            return None
        return self._files.read(column, ids)

    def _keep(self, key: str, ids: Array, rows: Tensor) -> None:
        column = self._store.column(key)
        if self._files is not None and self._files.takes(column, ids):
            self._files.write(column, ids, rows)

    def _converted(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._columns.precision.converted(values) for name, values in rows.items()}


def _only(by_type: Mapping[Any, Mapping[str, str]]) -> Mapping[str, str]:
    """Return the columns of the only type; none where nothing is asked of it."""
    for names in by_type.values():
        return names
    return {}
