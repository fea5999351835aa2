"""Stages for layers that read several node types: ``HeteroGraphConv`` over convolutions that split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from dgl.heterograph import DGLBlock
from dgl.nn import pytorch as dglnn
from torch import Tensor, nn

from dglx_dist.errors import ConfigError
from dglx_dist.layers.base import PartialSums, SplitsTypes, SplittableConv, StageInput, check_targets
from dglx_dist.layers.convolutions import make_stages
from dglx_dist.records import EdgeType


class RelationInput(NamedTuple):
    """Input that a relation passes to :meth:`SplittableConv.gather`."""

    inputs: StageInput
    transformed: Any
    """Result of :meth:`SplittableConv.transform`."""
    shares: PartialSums
    """This part's shares of the values that edges need in full."""


def make_typed_stages(
    module: nn.Module, etypes: Sequence[EdgeType], widths: Mapping[str, int]
) -> SplittableConv | None:
    """Return stages for a layer that reads several node types, or None if ``module`` is no such layer.

    ``widths`` has the column count for each node type that is cut. Raises ConfigError, with the reason and a
    remedy, if the layer cannot be split.
    """
    if type(module) is dglnn.HGTConv:
        raise ConfigError("the attention of HGTConv is a product of complete rows of both ends")
    if type(module) is dglnn.HeteroGraphConv:
        return HeteroStages(module, etypes, widths)
    if isinstance(module, SplitsTypes):
        return module.make_first_stages(widths)
    return None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SplitRelation:
    """An edge type in a ``HeteroGraphConv`` that reads cut rows."""

    etype: EdgeType
    number: int
    prefix: str
    """Prefix of its parameters' names."""
    stages: SplittableConv
    is_added: bool
    """Whether the relation's share is added to other shares before the sum over the parts."""

    @property
    def read_types(self) -> tuple[str, ...]:
        """Node types whose rows the stages read."""
        source, _, target = self.etype
        if self.stages.ends == "sources":
            return (source,)
        return (source, target)

    def find_type(self, name: str) -> str:
        """Return the node type that a parameter's columns belong to. The parameter is in ``stages.cut``."""
        source, _, target = self.etype
        if source != target and name in self.stages.target_cut:
            return target
        return source

    def read_input(self, inputs: StageInput) -> StageInput:
        """Return the relation's input for the stages, from the inputs by node type."""
        source, _, target = self.etype
        block = inputs.block[self.etype]
        sources = self._read_end(inputs, source, block.num_src_nodes())
        if source == target or target not in self.read_types:
            return sources
        return replace(sources, targets=self._read_end(inputs, target, block.num_dst_nodes()))

    def _read_end(self, inputs: StageInput, ntype: str, num_rows: int) -> StageInput:
        """Return the input at one end of the relation: the first ``num_rows`` nodes of ``ntype``."""
        end = inputs.by_type[ntype]
        draws = end.draws
        if draws is not None:
            draws = replace(draws, nodes=draws.nodes[:num_rows], relation=self.number)
        return replace(end, block=inputs.block[self.etype], x=end.x[:num_rows], draws=draws)


@final
class HeteroStages(SplittableConv):
    """Stages for ``HeteroGraphConv``.

    A part adds its shares for all relations that end in the same node type, so that one exchange carries
    them. This works with the aggregates "sum" and "mean" and with convolutions that have no activation. Other
    relations have separate sums. A block's owner adds biases and aggregates. It also calls the modules for
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
        """Number of sums per relation, for relations that are sent apart."""
        added_types = [relation.etype[2] for relation in relations if relation.is_added]
        self._sum_types = tuple(dict.fromkeys(added_types))

        # Parameters for types with features are cut. The others are used uncut on a block's owner.
        self.cut = {}
        self.cut_types = {}
        shared = []
        own_types = []
        for relation in relations:
            shared += [relation.prefix + name for name in relation.stages.shared]
            for name, dimension in relation.stages.cut.items():
                ntype = relation.find_type(name)
                full_name = relation.prefix + name
                if ntype not in widths:
                    shared.append(full_name)
                    own_types.append(ntype)
                    continue
                num_columns = self.get_parameter(full_name).shape[dimension]
                check_width(full_name, num_columns, ntype, widths)
                self.cut[full_name] = dimension
                self.cut_types[full_name] = ntype

        self.shared = tuple(shared)
        self.own_types = tuple(dict.fromkeys(own_types))
        self._read_types = tuple(dict.fromkeys((*self.cut_types.values(), *own_types)))

    def _find_relations(
        self, etypes: Sequence[EdgeType], widths: Mapping[str, int]
    ) -> Iterator[SplitRelation]:
        """Yield the relations that read cut rows. Raise ConfigError if a relation cannot be split."""
        prefixes = {module: f"mods.{name}." for name, module in self.mods.items()}
        # DGL, too, looks for the edge type before its name.
        modules = [self.mod_dict.get(etype) or self.mod_dict.get(etype[1]) for etype in etypes]
        for number, (etype, module) in enumerate(zip(etypes, modules, strict=True)):
            source, _, target = etype
            if module is None or (source not in widths and target not in widths):
                continue
            stages = make_stages(module, bipartite=source != target)
            relation = SplitRelation(
                etype=etype,
                number=number,
                prefix=prefixes[module],
                stages=stages,
                is_added=bool(self._aggregate) and stages.is_affine,
            )
            is_cut = [ntype in widths for ntype in relation.read_types]
            if not any(is_cut):
                continue

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
        """Columns in the sums over the parts, by destination type. Added relations share one sum."""
        widths: dict[str, int] = {}
        for relation in self._relations.values():
            if relation.is_added:
                widths[relation.etype[2]] = relation.stages.sum_width
        for relation in self._relations.values():
            if not relation.is_added:
                target = relation.etype[2]
                widths[target] = widths.get(target, 0) + relation.stages.sum_width
        return widths

    @property
    def logit_widths(self) -> dict[EdgeType, int]:
        widths = {}
        for etype, relation in self._relations.items():
            if relation.stages.heads:
                widths[etype] = relation.stages.heads
        return widths

    def split_modules(self) -> set[nn.Module]:
        modules: set[nn.Module] = set()
        for relation in self._relations.values():
            modules.update(relation.stages.modules())
        return modules

    def make_input(
        self, block: DGLBlock, by_type: Mapping[str, StageInput], edges: Mapping[str, Tensor]
    ) -> StageInput:
        return make_typed_input(block, by_type)

    def transform(self, inputs: StageInput) -> list[RelationInput]:
        return [self._transform_relation(relation, inputs) for relation in self._relations.values()]

    def _transform_relation(self, relation: SplitRelation, inputs: StageInput) -> RelationInput:
        stages = relation.stages
        # The strategy sets the mode for this layer alone.
        stages.training = self.training
        relation_inputs = relation.read_input(inputs)
        transformed = stages.transform(relation_inputs)
        return RelationInput(relation_inputs, transformed, stages.scatter(relation_inputs, transformed))

    def scatter(self, inputs: StageInput, transformed: list[RelationInput]) -> PartialSums:
        shares: list[Tensor] = []
        for relation_input in transformed:
            shares += relation_input.shares
        return tuple(shares)

    def gather(
        self, inputs: StageInput, transformed: list[RelationInput], scattered: PartialSums
    ) -> PartialSums:
        """Return a (D1, ...) share per destination type, then the shares that relations send apart."""
        sums: dict[str, Tensor] = {}
        sums_apart: list[Tensor] = []
        edge_values = iter(scattered)
        for relation, relation_input in zip(self._relations.values(), transformed, strict=True):
            stages = relation.stages
            # The sums over the parts are ordered like the shares.
            values = tuple(islice(edge_values, len(relation_input.shares)))
            gathered = stages.gather(relation_input.inputs, relation_input.transformed, values)
            if not relation.is_added:
                self._num_sums[relation.etype] = len(gathered)
                sums_apart += gathered
                continue

            target = relation.etype[2]
            share = stages.scale(relation_input.inputs.block, *gathered)
            sums[target] = sums[target] + share if target in sums else share
        return (*sums.values(), *sums_apart)

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        raise NotImplementedError("forward aggregates the relations")

    def forward(  # type: ignore[override]  # its arguments are those of HeteroGraphConv
        self, block: DGLBlock, inputs: Any, mod_args: Any = None, mod_kwargs: Any = None
    ) -> dict[str, Tensor]:
        """Map source rows by node type to destination rows, as ``HeteroGraphConv`` does.

        Raises ConfigError if a cut node type has no rows, or if arguments for edges are passed.
        """
        if mod_args or mod_kwargs:
            raise ConfigError(
                "HeteroGraphConv was called with mod_args or mod_kwargs, but push_pull does not send values "
                "of edges of several types. Leave them out, or use strategy='data_parallel'."
            )
        rows = self._read_rows(block, inputs)
        by_type = {}
        for ntype in self._read_types:
            by_type[ntype] = StageInput(block=block, x=rows[ntype], edges={})
        gathered = self.sync(make_typed_input(block, by_type))
        return self._aggregate_relations(block, rows, gathered)

    def _read_rows(self, block: DGLBlock, inputs: Any) -> dict[str, Tensor]:
        """Return the source rows by node type. ``inputs`` may be a pair with destination rows."""
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
        """Return the output by node type. ``gathered`` comes from :meth:`gather`, summed over the parts."""
        sums = dict(zip(self._sum_types, gathered, strict=False))
        values_apart = iter(gathered[len(sums) :])
        sums_apart = {}
        for etype, split_relation in self._relations.items():
            if not split_relation.is_added:
                sums_apart[etype] = tuple(islice(values_apart, self._num_sums[etype]))

        num_relations = Counter[str]()
        added_types = set()
        results: dict[str, list[Tensor]] = {ntype: [] for ntype in block.dsttypes}
        for etype in block.canonical_etypes:
            source, _, target = etype
            if source not in rows or target not in rows:
                continue
            num_relations[target] += 1
            relation = self._relations.get(etype)
            if relation is None:
                # Without cut rows, the user's module computes the relation.
                ends = rows[source], rows[target][: block.num_dst_nodes(target)]
                module = self.mod_dict.get(etype) or self.mod_dict[etype[1]]
                results[target].append(module(block[etype], ends))
            elif not relation.is_added:
                results[target].append(relation.stages.apply_nodes(block[etype], sums_apart[etype]))
            else:
                # The sum has the shares of all added relations, so each adds only its bias.
                sums[target] = relation.stages.shift(sums[target])
                added_types.add(target)

        for ntype in added_types:
            results[ntype].append(sums[ntype])
        return self._aggregate_results(results, num_relations)

    def _aggregate_results(
        self, results: Mapping[str, list[Tensor]], num_relations: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Return the output by node type, without types that have no ``results``.

        A result may be a sum over several relations. ``num_relations`` counts all of them.
        """
        outputs = {}
        for ntype, relation_rows in results.items():
            if not relation_rows:
                continue
            if not self._aggregate:
                outputs[ntype] = self.agg_fn(relation_rows, ntype)
                continue
            outputs[ntype] = torch.stack(relation_rows).sum(0)
            if self._aggregate == "mean":
                outputs[ntype] = outputs[ntype] / num_relations[ntype]
        return outputs


def make_typed_input(block: DGLBlock, by_type: Mapping[str, StageInput]) -> StageInput:
    """Return the input for a layer that reads several node types."""
    return replace(next(iter(by_type.values())), block=block, by_type=by_type)


def _find_aggregate(function: Any) -> str:
    """Return "sum" or "mean" if ``function`` is DGL's aggregate with this name, and "" otherwise."""
    if not isinstance(function, partial) or function.func.__module__ != dglnn.HeteroGraphConv.__module__:
        return ""
    # All DGL aggregates differ on these two values.
    result = float(function([torch.tensor(1.0), torch.tensor(3.0)], ""))
    return {4.0: "sum", 2.0: "mean"}.get(result, "")


def check_width(name: str, columns: int, ntype: str, widths: Mapping[str, int]) -> None:
    """Raise ConfigError if a parameter does not have as many ``columns`` as a type's features."""
    if columns != widths[ntype]:
        raise ConfigError(
            f"{name!r} has {columns} columns, but the features of {ntype!r} have {widths[ntype]}"
        )


def _check_relation(relation: SplitRelation, name: str, *, all_cut: bool) -> None:
    """Raise ConfigError if the relation's convolution needs rows that a part does not have.

    ``all_cut`` tells whether the features at both ends are cut by columns.
    """
    stages = relation.stages
    etype = relation.etype
    if not all_cut and stages.ends != "apart":
        raise ConfigError(
            f"{name} of {etype} combines the rows of sources and destinations, but only one of these node "
            "types has features. Use GraphConv, or SAGEConv with the aggregator mean, for this edge type, or "
            "strategy='data_parallel'."
        )

    overrides_edges = type(stages).own_edges is not SplittableConv.own_edges
    if stages.required_edges or overrides_edges:
        raise ConfigError(
            f"{name} of {etype} needs edge values, which push_pull does not send for several edge types. "
            "Use another convolution, or strategy='data_parallel'."
        )
