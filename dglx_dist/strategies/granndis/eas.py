"""Expansion-aware sampling: which nodes of other servers a server takes in (GraNNDis, algorithms 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, final, get_args

import numpy as np

from dglx_dist.draws.rng import stream_key
from dglx_dist.errors import ConfigError
from dglx_dist.graph.structure import Structure
from dglx_dist.records import Array, EdgeType
from dglx_dist.strategies.granndis.closure import PRELOAD_STRUCTURE, Selection
from dglx_dist.strategies.granndis.eas_kernels import choose
from dglx_dist.strategies.granndis.outside_degrees import outside_degrees

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

EasPolicy: TypeAlias = Literal["uniform_external", "degree", "shadow"]
Inner: TypeAlias = Literal["server", "batch"]

ALL = -1
"""The fan-out that takes every external in-neighbour."""

_STREAM = 1 << 20
"""Hop number of the draws here, far from those of samplers; the rounds of ``shadow`` follow it."""

_NODES_AT_ONCE = 1 << 18
"""Nodes whose in-edges are held at a time."""


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
        self._outside = outside_degrees(g, self._structure)

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
        of_server: list[Array] = []

        def nodes_of(_structure: Structure, own: tuple[int, int], seeds: Array) -> Array:
            if options.inner == "batch":
                return self.select(seeds, options, seed=seed, draw=draw).nodes
            if not of_server:
                of_server.append(self.select(np.arange(*own), options, seed=seed, draw=draw).nodes)
            return of_server[0]

        return nodes_of

    def _round(
        self, number: int, selected: Array, frontier: Array, options: EasOptions, seed: int, draw: int
    ) -> Array:
        """Return the (r,) int64 ascending nodes chosen by ``frontier``, none of them in ``selected``."""
        shadow = options.policy == "shadow"
        # A node is in one frontier only, and may then choose alike at whatever round that is: this is what
        # lets selections of several m and k contain each other. Under shadow it chooses in each round.
        stream = stream_key(seed, draw, _STREAM + (number if shadow else 0))
        scores_of = self._scores_of(options)
        chosen = []
        for first in range(0, len(frontier), _NODES_AT_ONCE):
            nodes = frontier[first : first + _NODES_AT_ONCE]
            edges = self._structure.ask("in_edges", nodes, phase=PRELOAD_STRUCTURE)
            taken = np.empty(0, np.int64) if shadow else selected
            scores = scores_of(edges.sources, taken)
            picked = choose(edges.indptr, edges.sources, nodes, taken, scores, options.fanout, stream)
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
