"""Expansion-aware sampling: which nodes of other servers a server takes in (GraNNDis, algorithms 3.3)."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, final, get_args

import numpy as np
from numba import njit

from dglx_dist.data.partition.base import PARTITIONERS, Partitioner, PartitionOptions
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph.partition_book import submit_to_owners
from dglx_dist.graph.row_kernels import number_distinct
from dglx_dist.graph.structure import InEdges, PendingInEdges, Structure
from dglx_dist.keyed_random import hash_ids, item_key, mix, stream_key
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array, EdgeType, RawGraph
from dglx_dist.strategies.full_graph.halo_plan import RowIndex

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


PRELOAD_STRUCTURE = "preload_structure"
"""Phase under which asked in-edges are counted: 8 bytes per remote row, 24 per in-edge of it."""

CHUNK = 1 << 16
"""Rows whose in-edges are asked for at once."""

_AHEAD = 2
"""Asked chunks that are under way while one is read."""

Selection: TypeAlias = Callable[[Structure, tuple[int, int], Array], Array]
"""(structure, (first, last) ids of the server's own nodes, (K,) ascending int64 seeds of the server) to the
(n,) ascending int64 ids of the nodes that the server may use, its seeds among them (algorithms 3.3). Called
on the first rank of each server; nothing in it may be collective."""


@final
@dataclass(frozen=True, kw_only=True)
class KHopNeighborhood:
    """What one server computes (algorithms 3.1): R^0, R^1, ..., R^L, each within the one before."""

    nodes: Array
    """(n,) int64 global ids of R^0, by the last level that has them, latest first, ascending within."""
    counts: Array
    """(L + 1,) int64; R^l is ``nodes[:counts[l]]``."""
    indptr: Array
    """(counts[1] + 1,) int64; the in-edges of row p of R^1 are at ``indptr[p]:indptr[p + 1]``."""
    sources: Array
    """(E,) int64 global ids, some of them of other servers' rows above level ``hops``."""
    edge_ids: Array
    """(E,) int64 global edge ids."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.counts) - 1

    @property
    def work(self) -> Array:
        """(n,) int64: for each level above 0 that has the row, its in-edges and one for itself."""
        return self.levels * (self.in_degrees + 1)

    @property
    def levels(self) -> Array:
        """(n,) int64; the last level that has the row."""
        ascending = self.counts[:0:-1]
        below = np.searchsorted(ascending, np.arange(len(self.nodes)), side="right")
        return self.num_layers - below

    @property
    def in_degrees(self) -> Array:
        """(n,) int64, 0 for rows that are at level 0 only: their in-edges are of no use."""
        degrees = np.zeros(len(self.nodes), dtype=np.int64)
        degrees[: len(self.indptr) - 1] = np.diff(self.indptr)
        return degrees


@final
class NeighborhoodExpander:
    """Grows a :class:`KHopNeighborhood`; used by one thread, not collective.

    Args:
        structure: Whose in-edges.
        seeds: (K,) ascending int64 ids without repeats: R^L.
        allowed: (n,) ascending int64 ids; edges from other nodes are left out. None: all edges.
    """

    def __init__(self, structure: Structure, seeds: Array, allowed: Array | None = None) -> None:
        self._structure, self._allowed = structure, allowed
        self._levels: list[Array] = [seeds]
        self._known = seeds
        self._edges: list[InEdges] = []

    def sources(self) -> Array:
        """Ask for the in-edges of the rows that were added last; return their sources.

        Returns:
            (n,) ascending int64 ids without repeats; rows that are known may be among them.

        Raises:
            PeerError: an owner is dead or silent.
        """
        found = [np.empty(0, np.int64)]
        for edges in in_edges_of(self._structure, self._levels[-1]):
            kept = edges if self._allowed is None else only_from(edges, self._allowed)
            self._edges.append(kept)
            found.append(number_distinct(kept.sources)[0])
        return np.unique(np.concatenate(found))

    def add(self, rows: Array) -> None:
        """Make those of the (n,) int64 ascending ``rows`` that are not known the rows of one level lower."""
        new = np.setdiff1d(rows, self._known, assume_unique=True)
        self._levels.append(new)
        if len(new):
            self._known = np.union1d(self._known, new)

    def finish(self) -> KHopNeighborhood:
        """Return what has grown: :meth:`sources` and :meth:`add` have been called once for each level."""
        assert len(self._levels) > 1
        sizes = np.array([len(level) for level in self._levels], dtype=np.int64)
        lengths = [np.diff(edges.indptr) for edges in self._edges]
        nothing = np.empty(0, np.int64)
        return KHopNeighborhood(
            nodes=np.concatenate(self._levels),
            counts=np.cumsum(sizes)[::-1].copy(),
            indptr=np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])),
            sources=np.concatenate([nothing, *(edges.sources for edges in self._edges)]),
            edge_ids=np.concatenate([nothing, *(edges.edge_ids for edges in self._edges)]),
        )


def in_edges_of(structure: Structure, nodes: Array) -> Iterator[InEdges]:
    """Yield all in-edges of the (K,) int64 ``nodes``, in their order, some nodes at a time.

    Raises:
        PeerError: an owner is dead or silent.
    """
    under_way: deque[PendingInEdges] = deque()
    for first in range(0, len(nodes), CHUNK):
        under_way.append(structure.submit("in_edges", nodes[first : first + CHUNK], phase=PRELOAD_STRUCTURE))
        if len(under_way) > _AHEAD:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def only_from(edges: InEdges, allowed: Array) -> InEdges:
    """Return those of ``edges`` whose source is among the (n,) ascending int64 ``allowed``."""
    kept = np.zeros(len(edges.sources), dtype=bool)
    if len(allowed):
        places = np.minimum(np.searchsorted(allowed, edges.sources), len(allowed) - 1)
        kept = allowed[places] == edges.sources
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return InEdges(indptr=before[edges.indptr], sources=edges.sources[kept], edge_ids=edges.edge_ids[kept])


Composition: TypeAlias = Literal["random", "ordered", "shuffled"]
"""``random``: any seeds, the same in all epochs; ``ordered``: seeds near each other, the same in all epochs;
``shuffled``: any seeds, others in each epoch."""

_COMPOSITION_STREAM = (1 << 20) + (1 << 10)
"""Hop number of the draws here, far from those of samplers and of the external nodes."""

_NODES_AT_ONCE = 1 << 18


def check_composition(name: str) -> Composition:
    """Return ``name``.

    Raises:
        ConfigError: it is no composition.
    """
    if name not in get_args(Composition):
        known = ", ".join(map(repr, get_args(Composition)))
        raise ConfigError(f"option composition={name!r} must be one of {known}")
    return name  # type: ignore[return-value]  # checked one line up


def draw_of(composition: Composition, epoch: int) -> int:
    """Return a number that is equal for epochs of equal co-batches."""
    return epoch if composition == "shuffled" else 0


def compose(
    seeds: Array,
    num_batches: int,
    composition: Composition,
    *,
    seed: int,
    draw: int = 0,
    clusters: Array | None = None,
) -> tuple[Array, ...]:
    """Return the seeds of each co-batch: every seed in exactly one, sizes that differ by 1 at most.

    The same on every rank of the server: draws are keyed by (seed, draw, node).

    Args:
        seeds: (n,) int64 ascending distinct ids, this server's.
        num_batches: R, at least 1; with more than n, some have none.
        composition: How.
        seed: Of the run.
        draw: :func:`draw_of` of the epoch.
        clusters: (n,) int64, for ``ordered``: seeds of one cluster stand together; None: by id alone, and ids
            of one part of the dataset stand together.

    Returns:
        R arrays (n_r,) int64, each ascending.
    """
    if composition == "ordered":
        order = np.arange(len(seeds)) if clusters is None else np.argsort(clusters, kind="stable")
    else:
        order = np.argsort(hash_ids(seeds, stream_key(seed, draw, _COMPOSITION_STREAM)), kind="stable")
    return tuple(np.sort(piece) for piece in np.array_split(seeds[order], num_batches))


def cluster_seeds(
    structure: Structure, nodes: Array, seeds: Array, num_clusters: int, *, seed: int, method: str = "metis"
) -> Array:
    """Return a cluster for each seed, of nodes that share many neighbours, with about as many seeds in each.

    The graph that the server's nodes span is partitioned; edges to other servers do not count. Sends nothing.

    Args:
        structure: Holds the in-edges of ``nodes`` in this server's memory.
        nodes: (n,) int64 ascending, the server's own.
        seeds: (s,) int64 ascending, some of ``nodes``.
        num_clusters: At least 1.
        seed: Of the partitioner.
        method: Name of a partitioner that balances several weights.

    Returns:
        (s,) int64 in [0, ``num_clusters``).
    """
    if num_clusters == 1 or not len(seeds):
        return np.zeros(len(seeds), np.int64)
    graph = _induced_graph(structure, nodes, seeds)
    options = PartitionOptions(balance=("train",), tolerance={"train": 0.1, "nodes": 1.0})
    assignment = PARTITIONERS.get(method)(options).assign(graph, num_clusters, seed)
    return assignment.part_of[NODE_TYPE][np.searchsorted(nodes, seeds)].astype(np.int64)


def _induced_graph(structure: Structure, nodes: Array, seeds: Array) -> RawGraph:
    """Return the graph that ``nodes`` span, renumbered in their order, with the seeds as training nodes."""
    sources, destinations = [], []
    for first in range(0, len(nodes), _NODES_AT_ONCE):
        some = nodes[first : first + _NODES_AT_ONCE]
        edges = only_from(structure.ask("in_edges", some), nodes)
        sources.append(np.searchsorted(nodes, edges.sources))
        destinations.append(first + np.repeat(np.arange(len(some)), np.diff(edges.indptr)))
    return RawGraph(
        name="the nodes of a server",
        num_nodes={NODE_TYPE: len(nodes)},
        edges={EDGE_TYPE: (np.concatenate(sources), np.concatenate(destinations))},
        node_data={NODE_TYPE: {"train_mask": np.isin(nodes, seeds, assume_unique=True)}},
    )


@njit(cache=True, nogil=True)
def _contains(value: int, ascending: Array) -> bool:
    place = np.searchsorted(ascending, value)
    return bool(place < len(ascending) and ascending[place] == value)


@njit(cache=True, nogil=True)
def _ranks_before(score: int, draw: np.uint64, other_score: int, other_draw: np.uint64) -> bool:
    return score > other_score or (score == other_score and bool(draw < other_draw))


@njit(cache=True, nogil=True)
def choose_external(
    indptr: Array,
    sources: Array,
    nodes: Array,
    taken: Array,
    scores: Array,
    fanout: int,
    stream: np.uint64,
) -> Array:
    """Return the (c,) int64 sources chosen by ``nodes``, each at most ``fanout``; some are there repeatedly.

    A node ranks its candidates by score, then by a number keyed by (stream, node, candidate), and takes the
    first: a larger fan-out takes a superset.

    Args:
        indptr: (K + 1,) int64.
        sources: (E,) int64; those of one node are ascending.
        nodes: (K,) int64 global ids.
        taken: (T,) int64 ascending: no candidates.
        scores: (E,) int64 of each source, higher first; of length 0 where all are alike.
        fanout: -1 for all.
        stream: Key of the draws.
    """
    chosen = np.empty(_max_chosen(indptr, fanout), np.int64)
    width = max(fanout, 0)
    best, best_draw = np.empty(width, np.int64), np.empty(width, np.uint64)
    best_score = np.empty(width, np.int64)
    total = 0
    for i in range(len(nodes)):
        key = item_key(stream, nodes[i])
        count = 0
        for edge in range(indptr[i], indptr[i + 1]):
            source = sources[edge]
            # Parallel edges make a neighbour no likelier.
            if (edge > indptr[i] and sources[edge - 1] == source) or _contains(source, taken):
                continue
            if fanout < 0:
                chosen[total] = source
                total += 1
                continue
            score = scores[edge] if len(scores) > 0 else 0
            draw = mix(key ^ mix(np.uint64(source)))
            if count == fanout:
                if not _ranks_before(score, draw, best_score[count - 1], best_draw[count - 1]):
                    continue
                slot = count - 1
            else:
                slot = count
                count += 1
            while slot > 0 and _ranks_before(score, draw, best_score[slot - 1], best_draw[slot - 1]):
                best[slot], best_draw[slot] = best[slot - 1], best_draw[slot - 1]
                best_score[slot] = best_score[slot - 1]
                slot -= 1
            best[slot], best_draw[slot], best_score[slot] = source, draw, score
        for slot in range(count):
            chosen[total] = best[slot]
            total += 1
    return chosen[:total]


@njit(cache=True, nogil=True)
def _max_chosen(indptr: Array, fanout: int) -> int:
    if fanout < 0:
        return indptr[-1]
    total = 0
    for i in range(len(indptr) - 1):
        total += min(indptr[i + 1] - indptr[i], fanout)
    return total


@njit(cache=True, nogil=True)
def count_external(
    indptr: Array, indices: Array, first_node: int, nodes: Array, low: int, high: int, out: Array
) -> None:
    """Write how many in-edges of each of ``nodes`` come from outside [low, high) to (K,) int64 ``out``."""
    for i in range(len(nodes)):
        row = nodes[i] - first_node
        count = 0
        for edge in range(indptr[row], indptr[row + 1]):
            source = indices[edge]
            if source < low or source >= high:
                count += 1
        out[i] = count


def external_degrees(g: DistGraph, structure: Structure) -> ExternalDegrees:
    """Return the graph's, made at the first call; every rank must call it, with a barrier before its use.

    When the graph closes, this rank answers no more.

    Args:
        g: The graph.
        structure: Its in-edges of one type.
    """
    label = f"{g.kvstore.label}.outside.{':'.join(structure.etype)}"
    known = g.session.attached.get(label)
    if isinstance(known, ExternalDegrees):
        return known
    made = ExternalDegrees(g, structure, label)
    g.session.attached[label] = made

    def leave() -> None:
        made.close()
        del g.session.attached[label]

    g.on_close.append(leave)
    return made


@final
class ExternalDegrees:
    """Answers for the own server's nodes and asks the others; what policy ``degree`` prefers by.

    Made by :func:`external_degrees`.
    """

    def __init__(self, g: DistGraph, structure: Structure, label: str) -> None:
        self._session, self._structure, self._placement = g.session, structure, g.placement
        self._bounds = g.get_node_partition_policy(structure.etype[2]).bounds
        self._label = label
        if not structure.is_whole:
            # One operation per asking server, since a question to owners has no parameters.
            for server in range(len(self._bounds) - 1):
                g.session.rpc.register(self._op(server), partial(self._answer, server))

    def of(self, nodes: Array, *, whole: bool = False) -> Array:
        """Return (K,) int64, how many in-edges of ``nodes`` come from outside this rank's server.

        Sends 8 bytes per distinct node of another server and receives 8.

        Args:
            nodes: (K,) int64 existing ids.
            whole: Count all in-edges.

        Raises:
            PeerError: an owner is dead or silent.
        """
        if whole:
            return self._structure.in_degrees(nodes)
        own = self._placement.topology.server
        if self._structure.is_whole:
            return self._count(own, nodes)
        asked = submit_to_owners(
            self._session,
            self._placement,
            self._op(own),
            nodes,
            self._bounds,
            lambda ids: [self._count(own, ids)],
        )
        return asked()[0]

    def _answer(self, server: int, _parameters: str, arrays: Sequence[Array]) -> list[Array]:
        return [self._count(server, arrays[0])]

    def _count(self, server: int, nodes: Array) -> Array:
        low, high = int(self._bounds[server]), int(self._bounds[server + 1])
        counts = np.zeros(len(nodes), np.int64)
        for shard in self._structure.shards:
            places = np.flatnonzero((nodes >= shard.first_node) & (nodes < shard.last_node))
            found = np.empty(len(places), np.int64)
            count_external(shard.indptr, shard.indices, shard.first_node, nodes[places], low, high, found)
            counts[places] = found
        return counts

    def _op(self, server: int) -> str:
        return f"{self._label}.{server}"

    def close(self) -> None:
        """Answer no more."""
        for server in range(len(self._bounds) - 1):
            self._session.rpc.unregister(self._op(server))


EasPolicy: TypeAlias = Literal["uniform_external", "degree", "shadow"]
Inner: TypeAlias = Literal["server", "batch"]

ALL = -1
"""The fan-out that takes every external in-neighbour."""

_EAS_STREAM = 1 << 20
"""Hop number of the draws here, far from those of samplers; the rounds of ``shadow`` follow it."""


@final
@dataclass(frozen=True, kw_only=True)
class EasOptions:
    """How far and how widely a server reaches into the others.

    Raises:
        ConfigError: a value cannot be honoured.
    """

    hops: int = 1
    """m: rounds of expansion; 0 drops every edge from another server."""
    fanout: int = 15
    """k: external in-neighbours chosen per node and round; -1: all of them."""
    policy: EasPolicy = "uniform_external"
    """``uniform_external``: any k of the external in-neighbours; ``degree``: those with the most in-edges
    from outside the server; ``shadow``: any k of all in-neighbours, of all selected nodes, so that inner ones
    use up the fan-out (the authors' code)."""
    resample_every: int = 0
    """Epochs after which the choice is made anew; 0: once, as in the paper."""
    inner: Inner = "server"
    """What the expansion starts from: all nodes of the server, or the seeds of a co-batch."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.hops < 0:
            raise ConfigError(
                f"external_hops={self.hops}; give 0 (no external nodes) or more, 1 in the paper"
            )
        if self.fanout < ALL or self.fanout == 0:
            raise ConfigError(
                f"external_fanout={self.fanout}; give at least 1 (15 in the paper), -1 for all, or "
                "external_hops=0 for no external nodes"
            )
        for name, value, known in (
            ("external_policy", self.policy, get_args(EasPolicy)),
            ("external_inner", self.inner, get_args(Inner)),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r} must be {' or '.join(map(repr, known))}")
        if self.resample_every < 0:
            raise ConfigError(f"resample_every={self.resample_every}; give 0 (never) or a number of epochs")

    def draw(self, epoch: int) -> int:
        """Return the number of the choice that ``epoch`` trains on: equal numbers, equal choices."""
        return epoch // self.resample_every if self.resample_every else 0


def read_eas_options(
    *,
    external_hops: int | None,
    external_fanout: int | None,
    external_policy: str | None = None,
    resample_every: int = 0,
) -> EasOptions | None:
    """Return what the user asked for; None where nothing was said of external nodes.

    A fan-out or a policy alone means one hop, a policy alone 15 neighbours, as in the paper.

    Raises:
        ConfigError: hops without a fan-out, anything else of it without both, or a value that cannot be
            honoured.
    """
    if external_fanout is None and external_hops:
        raise ConfigError(
            f"external_hops={external_hops} without external_fanout leaves open how many external "
            "neighbours a node may take; give external_fanout=15 (the paper's) or -1 for all"
        )
    if external_fanout is None and external_policy is None and external_hops is None:
        if resample_every:
            raise ConfigError(
                f"resample_every={resample_every} belongs to expansion-aware sampling; give external_hops=1 "
                "and external_fanout=15 with it"
            )
        return None
    return EasOptions(
        hops=1 if external_hops is None else external_hops,
        fanout=15 if external_fanout is None else external_fanout,
        policy=external_policy or "uniform_external",  # type: ignore[arg-type]  # checked by EasOptions
        resample_every=resample_every,
    )


@final
@dataclass(frozen=True, kw_only=True)
class Selected:
    """The nodes that a server keeps, Sel; it trains on the graph that they span."""

    nodes: Array
    """(s,) int64 ascending."""
    inner: Array
    """(n,) int64 ascending, what the expansion started from."""
    rounds: tuple[Array, ...]
    """For each round the (r,) int64 ascending nodes that it added; at most m of them."""


@final
class EasSelector:
    """Chooses external nodes, by one-sided calls to the servers that have them.

    All ranks make one, for each then answers the others, and a barrier belongs between that and the first
    call of :meth:`select`, which is not collective.

    Args:
        g: The graph; when it closes, this rank answers no more.
        etype: The edge type whose sources are taken in; it joins nodes of one type.
    """

    def __init__(self, g: DistGraph, etype: EdgeType | None = None) -> None:
        self._structure = g.structure(etype)
        self._outside = external_degrees(g, self._structure)

    def select(self, inner: Array, options: EasOptions, *, seed: int, draw: int = 0) -> Selected:
        """Return the nodes that ``inner`` expands to (algorithms 3.3).

        The same on every rank that asks for the same ``inner``: choices are keyed by (seed, draw, node), not
        by rank. With one seed, Sel grows with m; it grows with k for m up to 2 (beyond that, a larger k may
        reach a node earlier, when fewer of its neighbours are taken).

        Sends, per round, 8 bytes for each frontier node of another server and receives 24 for each of its
        in-edges; ``degree`` also 8 each way for each external candidate.

        Args:
            inner: (n,) int64 ascending distinct ids: what stays whole.
            options: How far and how widely.
            seed: Of the run.
            draw: :meth:`EasOptions.draw` of the epoch.

        Raises:
            PeerError: a server is dead or silent.
        """
        selected, rounds, frontier = inner, [], inner
        for number in range(options.hops):
            found = self._round(number, selected, frontier, options, seed, draw)
            if not len(found):
                break
            rounds.append(found)
            selected = np.union1d(selected, found)
            frontier = selected if options.policy == "shadow" else found
        return Selected(nodes=selected, inner=inner, rounds=tuple(rounds))

    def rule(self, options: EasOptions, *, seed: int, draw: int = 0) -> Selection:
        """Return what plans are made with: from a server's seeds to the nodes that it may use.

        Where the expansion starts from the server's own nodes, they are chosen once for all seeds.
        """
        server_nodes: list[Array] = []

        def nodes_of(_structure: Structure, own: tuple[int, int], seeds: Array) -> Array:
            if options.inner == "batch":
                return self.select(seeds, options, seed=seed, draw=draw).nodes
            if not server_nodes:
                server_nodes.append(self.select(np.arange(*own), options, seed=seed, draw=draw).nodes)
            return server_nodes[0]

        return nodes_of

    def _round(
        self, number: int, selected: Array, frontier: Array, options: EasOptions, seed: int, draw: int
    ) -> Array:
        """Return the (r,) int64 ascending nodes chosen by ``frontier``, none of them in ``selected``."""
        shadow = options.policy == "shadow"
        # A node is in one frontier only, and may then choose_external alike at whatever round that is: this is what
        # lets selections of several m and k contain each other. Under shadow it chooses in each round.
        stream = stream_key(seed, draw, _EAS_STREAM + (number if shadow else 0))
        scores_of = self._scores_of(options)
        chosen = []
        for first in range(0, len(frontier), _NODES_AT_ONCE):
            nodes = frontier[first : first + _NODES_AT_ONCE]
            edges = self._structure.ask("in_edges", nodes, phase=PRELOAD_STRUCTURE)
            taken = np.empty(0, np.int64) if shadow else selected
            scores = scores_of(edges.sources, taken)
            picked = choose_external(
                edges.indptr, edges.sources, nodes, taken, scores, options.fanout, stream
            )
            chosen.append(np.unique(picked))
        found = np.unique(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)
        return np.setdiff1d(found, selected, assume_unique=True) if shadow else found

    def _scores_of(self, options: EasOptions) -> Callable[[Array, Array], Array]:
        if options.policy != "degree" or options.fanout == ALL:
            return lambda _sources, _taken: np.empty(0, np.int64)

        def scores(sources: Array, taken: Array) -> Array:
            distinct, place_of = np.unique(sources, return_inverse=True)
            asked = ~np.isin(distinct, taken, assume_unique=True)
            values = np.zeros(len(distinct), np.int64)
            values[asked] = self._outside.of(distinct[asked], whole=options.inner == "batch")
            return values[place_of]

        return scores


_HOLDERS = "holders"


@final
@dataclass(frozen=True, kw_only=True)
class HeldNeighborhood:
    """What a server computes, and which of its ranks holds which row."""

    closure: KHopNeighborhood
    holders: Array
    """(n,) int32 ranks."""


def write_held(folder: Path, held: HeldNeighborhood) -> None:
    """Write ``held`` into the new ``folder``.

    Raises:
        StorageError: there is no room; what was written is removed.
    """
    arrays = {field.name: getattr(held.closure, field.name) for field in fields(KHopNeighborhood)}
    arrays[_HOLDERS] = held.holders
    try:
        folder.mkdir()
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
    except OSError as problem:
        remove_held(folder)
        needed = sum(array.nbytes for array in arrays.values())
        raise StorageError(
            f"{folder} cannot be written ({problem}): the ranks of a server share its rows there, which take "
            f"{needed / 1e6:.1f} MB; make room in {folder.parent.parent} (in a container: --shm-size), or "
            "start one rank on each server"
        ) from problem


def read_held(folder: Path) -> HeldNeighborhood:
    """Map what :func:`write_held` wrote; the files may be removed while it is in use."""
    arrays = {field.name: _mapped(folder / f"{field.name}.npy") for field in fields(KHopNeighborhood)}
    return HeldNeighborhood(closure=KHopNeighborhood(**arrays), holders=_mapped(folder / f"{_HOLDERS}.npy"))


def remove_held(folder: Path) -> None:
    """Remove the files; who has mapped them keeps them until it lets go."""
    shutil.rmtree(folder, ignore_errors=True)


def _mapped(path: Path) -> Array:
    # As a plain array, which compiled code knows; it keeps the mapping open.
    return np.load(path, mmap_mode="r").view(np.ndarray)


AUTO = "auto"

MAX_GROUPS = 4
"""Groups of layers whose work is balanced each by itself; METIS finds little with more."""

TOLERANCE = 0.1
"""A rank may have so much more of a group's work than its share."""


def check_split(method: str) -> str:
    """Return the partitioner's name that ``method`` means: METIS for ``auto``.

    Raises:
        UnknownNameError: there is no such partitioner.
    """
    return PARTITIONERS.resolve("metis" if method == AUTO else method)


def split_rows(closure: KHopNeighborhood, num_ranks: int, method: str, seed: int) -> Array:
    """Give every row of a server to one of its ranks; called alone.

    Ranks wait for each other at every layer, so with a partitioner that balances several weights each
    group of layers is balanced by itself; with one that balances one weight, the sum over the layers.

    Args:
        closure: With hops above 0: all sources are rows of it.
        num_ranks: G, at least 1.
        method: A partitioner's name, or ``auto``.
        seed: The same one gives the same answer.

    Returns:
        (n,) int32 in [0, G); a rank may get none.

    Raises:
        ConfigError: the partitioner is not installed, or cannot do it.
    """
    num_rows = len(closure.nodes)
    if num_ranks == 1 or num_rows == 0:
        return np.zeros(num_rows, dtype=np.int32)
    plugin = PARTITIONERS.get(check_split(method))
    weights = _weights_for(plugin, closure)
    options = PartitionOptions(
        balance=tuple(weights) if "balance" in plugin.honours else (),
        tolerance=TOLERANCE if {"balance", "tolerance"} <= plugin.honours else {},
    )
    graph = RawGraph(
        name="closure",
        num_nodes={NODE_TYPE: num_rows},
        edges={EDGE_TYPE: _edges_among_rows(closure)},
        node_data={NODE_TYPE: weights},
    )
    return plugin(options).assign(graph, num_ranks, seed).part_of[NODE_TYPE]


def work_of_groups(closure: KHopNeighborhood) -> dict[str, Array]:
    """Return the (n,) int64 work of the rows in each group of layers, by name; they add up to the work.

    Layers that compute the same rows are one group; so are neighbours where there would be too many.
    """
    different = np.unique(closure.counts[1:])
    groups = np.array_split(different, min(len(different), MAX_GROUPS))
    row, degrees = np.arange(len(closure.nodes)), closure.in_degrees + 1
    weights = {}
    for number, group in enumerate(groups):
        layers = closure.counts[1:][np.isin(closure.counts[1:], group)]
        times = len(layers) - np.searchsorted(np.sort(layers), row, side="right")
        weights[f"layers_{number}"] = times * degrees
    return weights


def _weights_for(plugin: type[Partitioner], closure: KHopNeighborhood) -> dict[str, Array]:
    return work_of_groups(closure) if plugin.max_constraints is None else {"work": closure.work}


def _edges_among_rows(closure: KHopNeighborhood) -> tuple[Array, Array]:
    """Return (sources, destinations) as rows."""
    num_ids = int(max(closure.nodes.max(initial=-1), closure.sources.max(initial=-1))) + 1
    sources = RowIndex(closure.nodes, num_ids).places(closure.sources)
    assert not (sources < 0).any(), "a source is no row: split_rows is for hops above 0"
    return sources, np.repeat(np.arange(len(closure.indptr) - 1), np.diff(closure.indptr))
