"""The loader of edges: this rank's edges, negatives, and blocks around them, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
from dgl.dataloading import EdgePredictionSampler
from dgl.heterograph import DGLBlock

from dglx_dist.errors import ConfigError
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.opening import together
from dglx_dist.records import Array, EdgeType, StepShare
from dglx_dist.sampling.edge_exclude import ExcludeRule, check_reverse, check_rule, open_exclude
from dglx_dist.sampling.edge_maker import EdgeBatch, EdgeMaker, EdgePlan
from dglx_dist.sampling.edge_negatives import open_negative, read_negative
from dglx_dist.sampling.items import Items, read_items
from dglx_dist.sampling.loader import moved
from dglx_dist.sampling.maker import NodeIds
from dglx_dist.sampling.negative import NegativeSampler
from dglx_dist.sampling.neighbor import read_sampler
from dglx_dist.sampling.opening import check_alike, open_maker
from dglx_dist.sampling.options import LoaderOptions, read_options
from dglx_dist.sampling.stepping import Pace, StepLoader, seed_of

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

EdgesBatch: TypeAlias = (
    tuple[NodeIds, dgl.DGLGraph, list[DGLBlock]] | tuple[NodeIds, dgl.DGLGraph, dgl.DGLGraph, list[DGLBlock]]
)
"""(input node ids, pair graph, blocks), or with negatives (input node ids, pair graph, negative pair graph,
blocks)."""


@final
class DistEdgeDataLoader(StepLoader[EdgeType, EdgeBatch, EdgesBatch]):
    """Iterates over batches of edges, like DGL's loader of that name.

    Yields ``(input_nodes, pair_graph, blocks)``, with negatives ``(input_nodes, pair_graph,
    negative_pair_graph, blocks)``. The pair graphs have all types and lie over the same nodes, which are the
    destinations of ``blocks[-1]`` in the same order; ``pair_graph.edata[dgl.EID]`` are the batch's edges.

    Every rank must make it and iterate over it alike. All ranks have the same number of steps, and one
    that has run out of edges gets pair graphs without edges. A step's share counts positive edges, so that a
    mean over positive and negative pairs weighs right where each has equally many negatives: those of
    ``InBatch`` are fewer in a batch of k edges or less. What is drawn does not depend on the number of
    ranks, again but for ``InBatch``. Iterating calls no collective.

    Args:
        g: The distributed graph.
        eids: This rank's edges: (K,) ids, a mask over all edges, or {edge type: either}; K may be 0. Ids are
            those of ``g``, as :func:`edge_split` gives them.
        sampler: A node sampler of ``dgl.dataloading``, for the blocks around the edges' ends; or
            ``dgl.dataloading.as_edge_prediction_sampler(...)``, with the options below inside it.
        exclude: Which edges no block of a batch has: ``self``, the batch's own; ``reverse_id``, these and
            their reverse edges by ``reverse_eids``; ``reverse_types``, these and those at the same place of
            the source's list of the type in ``reverse_etypes``; a function of the batch's ids to ids; or
            fixed ids. They are left out before drawing, so destinations keep their fan-out.
        reverse_eids: (E,) by edge id, in ids of ``g``, -1 for none, or a dict of it by edge type: what
            :func:`reverse_edge_ids` returns.
        reverse_etypes: Edge type to the type of its reverse edges.
        negative_sampler: One of ``dglx_dist.negative``, DGL's ``Uniform`` or ``PerSourceUniform``, or a
            function of (g, the batch's ids) to (sources, destinations), called on the loader's threads.
        batch_size: Edges per rank and step, all types together.
        shuffle: Whether each epoch has an order of its own, keyed by seed, epoch, type and id.
        drop_last: Whether a rank leaves out its last batch when it is not full.
        options: As for :class:`DataLoader`.

    Raises:
        ConfigError: on all ranks when something cannot be honoured on one: an unknown type, an edge twice,
            a mode of ``exclude`` without what it needs, reverse edges that are none, or when the ranks were
            given another ``batch_size`` or ``drop_last``.
        IndexError: an id is no edge; ConfigError on the other ranks.
        PeerError: a rank did not take part.
    """

    def __init__(  # noqa: PLR0913 - DGL's signature
        self,
        g: DistGraph,
        eids: Ids | Mapping[Any, Ids],
        sampler: Any,
        *,
        exclude: Any = None,
        reverse_eids: Any = None,
        reverse_etypes: Any = None,
        negative_sampler: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        asked = _Asked(
            sampler=sampler,
            rule=ExcludeRule(exclude=exclude, reverse_eids=reverse_eids, reverse_etypes=reverse_etypes),
            negative=negative_sampler,
        )
        pace, read = together(
            g.session,
            lambda: (
                Pace(batch_size=batch_size, shuffle=bool(shuffle), drop_last=bool(drop_last)),
                _read(g, eids, asked, options),
            ),
            ConfigError,
        )
        check_alike(g.session, "exclude", _told(read.asked.rule))
        seed = seed_of(read.options, g.session)
        blocks = open_maker(g, read.asked.sampler, read_sampler(read.asked.sampler), read.options, seed)
        plan = EdgePlan(
            seed=seed,
            exclude=open_exclude(g, read.asked.rule),
            negative=together(
                g.session,
                lambda: open_negative(g, read.asked.negative, _drawn_for(g, read.items)),
                ConfigError,
            ),
            columns=read.columns,
            unkeyed=_unkeyed(read.asked),
            told=f"exclude {_told(read.asked.rule)}, negative_sampler={read.asked.negative!r}",
        )
        self._maker = EdgeMaker(g, blocks, plan)
        super().__init__(g.session, read.items, pace, read.options)

    def alone(self) -> Callable[[Mapping[EdgeType, Array], int], EdgeBatch]:
        """See :meth:`StepLoader.alone`."""
        return self._maker.alone().make

    def drawn_by(self) -> str:
        """See :meth:`StepLoader.drawn_by`."""
        return f"{super().drawn_by()}, {self._maker.drawn_by()}"

    def _make(self, items: Mapping[EdgeType, Array], epoch: int) -> EdgeBatch:
        return self._maker.make(items, epoch)

    def _hand_over(self, batch: EdgeBatch, share: StepShare) -> EdgesBatch:
        blocks, nodes = batch.blocks, batch.input_nodes
        graphs = [graph for graph in (batch.positive, batch.negative) if graph is not None]
        if self._device.type != "cpu":
            blocks = [block.to(self._device) for block in blocks]
            graphs = [graph.to(self._device) for graph in graphs]
            nodes = moved(nodes, self._device)
        # On each of them, since a model may be given the blocks, a pair graph, or both.
        for stamped in (blocks[-1], *graphs):
            stamped.step_share = share
        if len(graphs) == 1:
            return nodes, graphs[0], blocks
        return nodes, graphs[0], graphs[1], blocks


def samples_edges(sampler: object) -> bool:
    """Whether ``sampler`` is DGL's ``as_edge_prediction_sampler(...)``."""
    return isinstance(sampler, EdgePredictionSampler)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the user gave, with DGL's wrapper taken off the node sampler."""

    sampler: Any
    rule: ExcludeRule
    negative: Any
    labels: Any = ()


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The same, checked as far as one rank can."""

    asked: _Asked
    items: Items[EdgeType]
    options: LoaderOptions
    columns: Mapping[EdgeType, Mapping[str, str]]


def _read(g: DistGraph, eids: Ids | Mapping[Any, Ids], given: _Asked, options: Mapping[str, Any]) -> _Read:
    asked = _unwrapped(given)
    read_sampler(asked.sampler)
    read = read_options(options)
    fixed = asked.rule.exclude
    if fixed is not None and not isinstance(fixed, str) and not callable(fixed):
        read = replace(read, exclude=fixed)
        asked = replace(asked, rule=replace(asked.rule, exclude=None))
    items = read_items(eids, {etype: g.num_edges(etype) for etype in g.canonical_etypes}, "edge")
    check_rule(g, asked.rule, _with_items(items))
    check_reverse(g, asked.rule, items.ids)
    return _Read(
        asked=replace(asked, negative=read_negative(asked.negative)),
        items=items,
        options=read,
        columns=_columns(g, asked.labels),
    )


def _unwrapped(asked: _Asked) -> _Asked:
    """Take the options out of DGL's ``as_edge_prediction_sampler``.

    Raises:
        ConfigError: options are given twice, or the wrapper is of the user's own making.
    """
    wrapper = asked.sampler
    if not isinstance(wrapper, EdgePredictionSampler):
        return asked
    rule = asked.rule
    given = (rule.exclude, rule.reverse_eids, rule.reverse_etypes, asked.negative)
    if any(option is not None for option in given):
        raise ConfigError(
            "exclude, reverse_eids, reverse_etypes and negative_sampler belong either to the loader or to "
            "as_edge_prediction_sampler(...), not to both"
        )
    if type(wrapper).sample is not EdgePredictionSampler.sample:
        raise ConfigError(
            f"{type(wrapper).__qualname__} samples edges with code of its own; pass its node sampler, and "
            "its negative_sampler= and exclude= as functions"
        )
    rule = ExcludeRule(
        exclude=wrapper.exclude, reverse_eids=wrapper.reverse_eids, reverse_etypes=wrapper.reverse_etypes
    )
    return _Asked(
        sampler=wrapper.sampler,
        rule=rule,
        negative=wrapper.negative_sampler,
        labels=wrapper.prefetch_labels,
    )


def _columns(g: DistGraph, labels: Any) -> dict[EdgeType, dict[str, str]]:
    """Find the columns for the positive pair graph, a list for the only edge type or a dict of lists."""
    if not isinstance(labels, Mapping):
        if labels and len(g.canonical_etypes) != 1:
            raise ConfigError(
                f"prefetch_labels is {labels!r}, and the graph has the edge types {', '.join(g.etypes)}; "
                "give {edge type: list of names}"
            )
        labels = {g.canonical_etypes[0]: labels} if labels else {}
    found: dict[EdgeType, dict[str, str]] = {}
    for key, names in labels.items():
        etype = g.to_canonical_etype(key)
        data = g.edges[etype].data
        for name in [names] if isinstance(names, str) else names:
            if name not in data:
                raise ConfigError(f"prefetch_labels names {name!r}, and edges of {etype} have {sorted(data)}")
            found.setdefault(etype, {})[name] = data[name].kvstore_key
    return found


def _told(rule: ExcludeRule) -> str:
    """Return what of ``rule`` must be the same on all ranks, for :func:`check_alike`."""
    mode = "a function" if callable(rule.exclude) else repr(rule.exclude)
    return mode if rule.reverse_etypes is None else f"{mode}, reverse_etypes={dict(rule.reverse_etypes)}"


def _unkeyed(asked: _Asked) -> str:
    """Return which option draws by code of the user's own, "" when none does."""
    if callable(asked.rule.exclude):
        return f"exclude={asked.rule.exclude!r}"
    if asked.negative is not None and not isinstance(asked.negative, NegativeSampler):
        return f"negative_sampler={asked.negative!r}"
    return ""


def _drawn_for(g: DistGraph, items: Items[EdgeType]) -> list[EdgeType]:
    """Return for which edge types negatives are drawn here: where there is one, other ranks' edges may be."""
    return list(g.canonical_etypes) if len(g.canonical_etypes) == 1 else _with_items(items)


def _with_items(items: Items[EdgeType]) -> list[EdgeType]:
    return [etype for etype, ids in items.ids.items() if len(ids)]
