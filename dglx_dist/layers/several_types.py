"""Stages of layers that read several node types: ``HeteroGraphConv`` of convolutions that split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from dgl.heterograph import DGLBlock
from dgl.nn import pytorch as dglnn
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import PartialSums, SplitsTypes, SplittableConv, StageInput, check_targets
from dglx_dist.layers.convolutions import make_stages
from dglx_dist.records import EdgeType

RelationInput: TypeAlias = tuple[StageInput, Any, PartialSums]
"""Input of a relation's stages, its transformed rows, and its shares of values that edges need in full."""


def make_typed_stages(
    module: nn.Module, etypes: Sequence[EdgeType], widths: Mapping[str, int]
) -> SplittableConv | None:
    """Return the stages of a layer that reads several node types, or None if ``module`` is no such layer.

    ``widths`` are the numbers of columns of the node types that are cut. Raises ConfigError, with the reason
    and a remedy, if the layer cannot be split.
    """
    if type(module) is dglnn.HGTConv:
        raise ConfigError("the attention of HGTConv is a product of complete rows of both ends")
    if type(module) is dglnn.HeteroGraphConv:
        return HeteroStages(module, etypes, widths)
    return module.make_first_stages(widths) if isinstance(module, SplitsTypes) else None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SplitRelation:
    """An edge type of a ``HeteroGraphConv`` that reads rows which are cut."""

    etype: EdgeType
    number: int
    prefix: str
    """Prefix of the names of its parameters."""
    stages: SplittableConv
    is_added: bool
    """Whether its share is added to those of other relations before the sum over the parts."""

    @property
    def read_types(self) -> tuple[str, ...]:
        """Node types of the rows that the stages read."""
        return self.etype[:1] if self.stages.ends == "sources" else (self.etype[0], self.etype[2])

    def find_type(self, name: str) -> str:
        """Return the node type of the columns of a parameter in ``stages.cut``."""
        is_of_targets = self.etype[0] != self.etype[2] and name in self.stages.target_cut
        return self.etype[2] if is_of_targets else self.etype[0]

    def read_input(self, inputs: StageInput) -> StageInput:
        """Return the input of the stages from the inputs by node type."""
        source, _, target = self.etype
        block = inputs.block[self.etype]

        def read_end(ntype: str, num_rows: int) -> StageInput:
            end = inputs.by_type[ntype]
            draws = end.draws
            if draws is not None:
                draws = replace(draws, nodes=draws.nodes[:num_rows], relation=self.number)
            return replace(end, block=block, x=end.x[:num_rows], draws=draws)

        sources = read_end(source, block.num_src_nodes())
        if target in self.read_types[1:] and source != target:
            return replace(sources, targets=read_end(target, block.num_dst_nodes()))
        return sources


@final
class HeteroStages(SplittableConv):
    """Stages of ``HeteroGraphConv``.

    A part adds its shares of all relations that end in a node type, so that one exchange carries them. This
    holds for the aggregates "sum" and "mean" and for convolutions without an activation. Other relations have
    sums of their own. The owner of a block adds biases and aggregates. It also calls the modules of
    relations in which no row is cut.
    """

    edge_arguments = ()

    def __init__(
        self, conv: dglnn.HeteroGraphConv, etypes: Sequence[EdgeType], widths: Mapping[str, int]
    ) -> None:
        super().__init__(conv)
        self._aggregate = _find_aggregate(conv.agg_fn)
        relations = list(self._find_relations(etypes, widths))
        if not relations:
            raise ConfigError("no edge type of HeteroGraphConv reads nodes that have features")
        self._relations = {relation.etype: relation for relation in relations}
        self._num_sums: dict[EdgeType, int] = {}
        """Number of sums of each relation that is sent apart."""
        self._sum_types = tuple(dict.fromkeys(r.etype[2] for r in relations if r.is_added))
        self.cut = {}
        self.cut_types = {}
        shared = []
        own_types = []
        for relation in relations:
            shared += [relation.prefix + name for name in relation.stages.shared]
            for name, dimension in relation.stages.cut.items():
                ntype = relation.find_type(name)
                full_name = relation.prefix + name
                if ntype in widths:
                    check_width(full_name, self.get_parameter(full_name).shape[dimension], ntype, widths)
                    self.cut[full_name] = dimension
                    self.cut_types[full_name] = ntype
                else:
                    shared.append(full_name)
                    own_types.append(ntype)

        self.shared = tuple(shared)
        self.own_types = tuple(dict.fromkeys(own_types))
        self._read_types = tuple(dict.fromkeys((*self.cut_types.values(), *own_types)))

    def _find_relations(
        self, etypes: Sequence[EdgeType], widths: Mapping[str, int]
    ) -> Iterator[SplitRelation]:
        names = {module: f"mods.{name}." for name, module in self.mods.items()}
        # DGL, too, looks for the edge type before its name.
        modules = [self.mod_dict.get(etype) or self.mod_dict.get(etype[1]) for etype in etypes]
        for number, (etype, module) in enumerate(zip(etypes, modules, strict=True)):
            if module is None or widths.keys().isdisjoint((etype[0], etype[2])):
                continue
            stages = make_stages(module, bipartite=etype[0] != etype[2])
            relation = SplitRelation(
                etype=etype,
                number=number,
                prefix=names[module],
                stages=stages,
                is_added=bool(self._aggregate) and stages.is_affine,
            )
            is_cut = [ntype in widths for ntype in relation.read_types]
            if any(is_cut):
                _check_relation(relation, type(module).__name__, all_cut=all(is_cut))
                if modules.count(module) > 1:
                    raise ConfigError(
                        f"HeteroGraphConv has one module for {etype} and another edge type, but push_pull "
                        "cuts a module by the columns of one. Use a module for each edge type, or "
                        "strategy='data_parallel'."
                    )
                yield relation

    @property
    def sum_widths(self) -> dict[str, int]:
        """Columns of the sums over the parts by destination type. Relations that are added have them once."""
        relations = self._relations.values()
        widths = {r.etype[2]: r.stages.sum_width for r in relations if r.is_added}
        for relation in relations:
            if not relation.is_added:
                target = relation.etype[2]
                widths[target] = widths.get(target, 0) + relation.stages.sum_width
        return widths

    @property
    def logit_widths(self) -> dict[EdgeType, int]:
        return {etype: r.stages.heads for etype, r in self._relations.items() if r.stages.heads}

    def split_modules(self) -> set[nn.Module]:
        return {module for relation in self._relations.values() for module in relation.stages.modules()}

    def make_input(
        self, block: DGLBlock, by_type: Mapping[str, StageInput], edges: Mapping[str, Tensor]
    ) -> StageInput:
        return make_typed_input(block, by_type)

    def transform(self, inputs: StageInput) -> list[RelationInput]:
        return [self._transform_relation(relation, inputs) for relation in self._relations.values()]

    def _transform_relation(self, relation: SplitRelation, inputs: StageInput) -> RelationInput:
        stages = relation.stages
        # The strategy sets the mode of this layer alone.
        stages.training = self.training
        relation_input = relation.read_input(inputs)
        rows = stages.transform(relation_input)
        return relation_input, rows, stages.scatter(relation_input, rows)

    def scatter(self, inputs: StageInput, transformed: list[RelationInput]) -> PartialSums:
        return tuple(share for _, _, shares in transformed for share in shares)

    def gather(
        self, inputs: StageInput, transformed: list[RelationInput], scattered: PartialSums
    ) -> PartialSums:
        """Return a (D1, ...) share for each destination type, then those of relations that are sent apart."""
        sums: dict[str, Tensor] = {}
        sums_apart: list[Tensor] = []
        values = iter(scattered)
        for relation, (relation_input, rows, shares) in zip(
            self._relations.values(), transformed, strict=True
        ):
            stages, target = relation.stages, relation.etype[2]
            gathered = stages.gather(relation_input, rows, tuple(islice(values, len(shares))))
            if relation.is_added:
                share = stages.scale(relation_input.block, *gathered)
                sums[target] = sums[target] + share if target in sums else share
            else:
                self._num_sums[relation.etype] = len(gathered)
                sums_apart += gathered

        return (*sums.values(), *sums_apart)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        raise NotImplementedError("forward aggregates the relations")

    def forward(  # type: ignore[override]  # its arguments are those of HeteroGraphConv
        self, block: DGLBlock, inputs: Any, mod_args: Any = None, mod_kwargs: Any = None
    ) -> dict[str, Tensor]:
        """Map the rows of the sources by node type to those of the destinations, as ``HeteroGraphConv`` does.

        Raises ConfigError if a node type that is cut has no rows, or there are arguments of edges.
        """
        if mod_args or mod_kwargs:
            raise ConfigError(
                "HeteroGraphConv was called with mod_args or mod_kwargs, but push_pull does not send values "
                "of edges of several types. Leave them out, or use strategy='data_parallel'."
            )
        rows = self._read_rows(block, inputs)
        by_type = {t: StageInput(block=block, x=rows[t], edges={}) for t in self._read_types}
        return self._aggregate_relations(block, rows, self.sync(make_typed_input(block, by_type)))

    def _read_rows(self, block: DGLBlock, inputs: Any) -> dict[str, Tensor]:
        rows, targets = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        for ntype in self._read_types:
            if ntype not in rows:
                raise ConfigError(
                    f"the first layer was not given the rows of node type {ntype!r}, which push_pull cuts "
                    "or reads beside cut rows. Pass them, or leave its edge types out of the HeteroGraphConv."
                )

        if targets is not rows:
            for ntype, sources in rows.items():
                check_targets(sources, targets.get(ntype), block.num_dst_nodes(ntype), ntype)
        return dict(rows)

    def _aggregate_relations(
        self, block: DGLBlock, rows: Mapping[str, Tensor], gathered: PartialSums
    ) -> dict[str, Tensor]:
        sums = dict(zip(self._sum_types, gathered, strict=False))
        values = iter(gathered[len(sums) :])
        sums_apart = {
            etype: tuple(islice(values, self._num_sums[etype]))
            for etype, relation in self._relations.items()
            if not relation.is_added
        }
        counts = Counter[str]()
        added_types = set()
        results: dict[str, list[Tensor]] = {ntype: [] for ntype in block.dsttypes}
        for etype in block.canonical_etypes:
            source, _, target = etype
            if source not in rows or target not in rows:
                continue
            counts[target] += 1
            relation = self._relations.get(etype)
            if relation is None:
                ends = rows[source], rows[target][: block.num_dst_nodes(target)]
                module = self.mod_dict.get(etype) or self.mod_dict[etype[1]]
                results[target].append(module(block[etype], ends))
            elif not relation.is_added:
                results[target].append(relation.stages.apply_nodes(block[etype], sums_apart[etype]))
            else:
                sums[target] = relation.stages.shift(sums[target])
                added_types.add(target)

        for ntype in added_types:
            results[ntype].append(sums[ntype])
        results = {ntype: relation_rows for ntype, relation_rows in results.items() if relation_rows}
        if not self._aggregate:
            return {ntype: self.agg_fn(relation_rows, ntype) for ntype, relation_rows in results.items()}
        totals = {ntype: torch.stack(relation_rows).sum(0) for ntype, relation_rows in results.items()}
        if self._aggregate == "sum":
            return totals
        return {ntype: total / counts[ntype] for ntype, total in totals.items()}


def make_typed_input(block: DGLBlock, by_type: Mapping[str, StageInput]) -> StageInput:
    """Return the input of a layer that reads several node types."""
    return replace(next(iter(by_type.values())), block=block, by_type=by_type)


def _find_aggregate(function: Any) -> str:
    """Return "sum" or "mean" if ``function`` is DGL's for that, and "" for any other function."""
    if not isinstance(function, partial) or function.func.__module__ != dglnn.HeteroGraphConv.__module__:
        return ""
    result = float(function([torch.tensor(1.0), torch.tensor(3.0)], ""))
    return {4.0: "sum", 2.0: "mean"}.get(result, "")


def check_width(name: str, columns: int, ntype: str, widths: Mapping[str, int]) -> None:
    """Raise ConfigError unless the parameter ``name`` has the ``columns`` of the features of a node type."""
    if columns != widths[ntype]:
        raise ConfigError(
            f"{name!r} has {columns} columns, but the features of {ntype!r} have {widths[ntype]}"
        )


def _check_relation(relation: SplitRelation, name: str, *, all_cut: bool) -> None:
    """Raise ConfigError if the stages need something that other parts do not have."""
    stages, etype = relation.stages, relation.etype
    if not all_cut and stages.ends != "apart":
        raise ConfigError(
            f"{name} of {etype} reads both ends together, but only one has features, so parts would need the "
            "rows of the other. Use SAGEConv with aggregator mean or GraphConv for it, or "
            "strategy='data_parallel'."
        )
    if stages.required_edges or type(stages).own_edges is not SplittableConv.own_edges:
        raise ConfigError(
            f"{name} of {etype} needs values of edges, which push_pull does not send for several edge types. "
            "Use another convolution, or strategy='data_parallel'."
        )
