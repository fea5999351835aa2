"""From the seeds of all ranks to what each of them computes and exchanges (GraNNDis; algorithms 3.1, 3.2).

The first rank of every server, its head, finds the rows of the server by one-sided asks, splits them among
the server's ranks and leaves them in shared memory; each rank then makes its own layers. No rank reads
more of the graph than the in-edges of its server's rows.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import final

import numpy as np

from dglx_dist.cluster.collectives import barrier, broadcast_json
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.ids import Ids, as_ids
from dglx_dist.graph.owners import RowOwners
from dglx_dist.progress import progress
from dglx_dist.records import Array
from dglx_dist.strategies.granndis.closure import Selection
from dglx_dist.strategies.granndis.levels import Heads, grow_levels
from dglx_dist.strategies.granndis.mail import Mail
from dglx_dist.strategies.granndis.own_rows import own_rows, read_layers
from dglx_dist.strategies.granndis.plan import RankPlan
from dglx_dist.strategies.granndis.row_index import RowIndex
from dglx_dist.strategies.granndis.shared_closure import HeldClosure, read_held, remove_held, write_held
from dglx_dist.strategies.granndis.split import AUTO, check_split, split_rows
from dglx_dist.strategies.granndis.wishes import finish_layers

WORTH_SHOWING = 1 << 17
"""Nodes of a graph from which on rank 0 shows how far it is."""


@final
@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan; all but the seeds alike on all ranks."""

    seeds: Ids
    """This rank's (K,) ids, or a mask; any server's nodes. What is given twice, also by two ranks, counts
    once."""
    num_layers: int
    """L, at least 1."""
    hops: int
    """k in 0..L: how many layers a server computes without others; 0: full_graph, L: nothing crosses."""
    eas: Selection | None = None
    """Which nodes a server may use (algorithms 3.3); needs hops == L. None: all."""
    split: str = AUTO
    """The partitioner that gives rows to the ranks of a server; ``auto``: METIS. Without effect for hops 0,
    where a rank has the rows that it owns."""
    seeds_stay: bool = False
    """Whether a server computes the seeds that its ranks gave; needs hops == L. False: those it owns."""
    show_progress: bool = True
    """Whether rank 0 shows a bar, where the graph is not small."""


@final
class Planner:
    """Makes plans for one graph. Every rank must make it; it answers until it is let go.

    Args:
        g: Of one node type and one edge type.

    Raises:
        ConfigError: several types, a server without nodes, or more ranks than nodes.
    """

    def __init__(self, g: DistGraph) -> None:
        check_graph(g)
        self._g, self._session = g, g.session
        topology = self._topology = g.session.topology
        policy = g.get_node_partition_policy(g.ntypes[0])
        self._bounds = policy.bounds
        self._heads = Heads(
            ranks=tuple(topology.ranks_of_server(server)[0] for server in range(topology.num_servers)),
            server=topology.server,
            bounds=policy.bounds,
        )
        label = str(broadcast_json(secrets.token_hex(4), self._session))
        self._label = f"granndis.{label}"
        self._mail = Mail(self._session, self._label)
        # Nobody may send before all listen.
        barrier(self._session, "making plans")

    def plan(self, request: PlanRequest) -> RankPlan:
        """Return this rank's plan; all ranks must call it, for the same requests in the same order.

        One call at a time, from any thread: it talks by one-sided messages only. Counted under
        ``preload_structure`` (asked in-edges) and ``plan`` (ids that ranks tell each other).

        Raises:
            ConfigError: the request makes no sense, or ranks ask for different things.
            IndexError: a seed is no node.
            RemoteError: another rank failed.
            PeerError: a rank is dead or silent; it is named.
        """
        with self._mail.job() as job:
            check_request(request)
            seeds = self._seeds_of_server(request)
            held = self._held(request, seeds, job)
            return self._plan_of_rank(request, held)

    def _seeds_of_server(self, request: PlanRequest) -> Array:
        """Send the seeds to the heads that compute them; return those of this rank's server, if it is one."""
        given = as_ids(request.seeds, self._g.num_nodes(), "the nodes")
        seeds = np.unique(given)
        asked = np.array([request.num_layers, request.hops, request.eas is not None, request.seeds_stay])
        header = np.concatenate([asked.astype(np.int64), [len(seeds)]])
        nothing = np.empty(0, np.int64)
        if request.seeds_stay:
            pieces = {self._heads.ranks[self._topology.server]: seeds}
        else:
            pieces = self._heads.split(seeds)
        ranks = range(self._topology.world_size)
        told = self._mail.exchange(
            "seeds", {rank: [header, pieces.get(rank, nothing)] for rank in ranks}, ranks
        )
        _check_headers({rank: message[0] for rank, message in told.items()}, self._topology.rank)
        return np.unique(np.concatenate([message[1] for message in told.values()]))

    def _held(self, request: PlanRequest, seeds: Array, job: int) -> HeldClosure:
        """Return the rows of this server and who holds them: found by its head, mapped by the others."""
        members = self._topology.ranks_of_server(self._topology.server)
        folder = self._session.scratch / f"{self._label}-{job}"
        if self._topology.rank == members[0]:
            held = self._find_rows(request, seeds)
            if len(members) > 1:
                write_held(folder, held)
                self._mail.exchange("rows of the server", {}, members)
                self._mail.exchange("rows read", {}, members)
                remove_held(folder)
            return held
        self._mail.exchange("rows of the server", {}, members)
        held = read_held(folder)
        self._mail.exchange("rows read", {}, members)
        return held

    def _find_rows(self, request: PlanRequest, seeds: Array) -> HeldClosure:
        """On a head: return the rows of its server, and give each to one of its ranks."""
        depth = request.num_layers, request.hops
        worth = self._g.num_nodes() >= WORTH_SHOWING
        shown = request.show_progress and worth and self._topology.rank == 0
        members = self._topology.ranks_of_server(self._topology.server)
        with progress("finding rows", request.num_layers + 1, enabled=shown) as advance:
            closure = grow_levels(
                self._g.structure(),
                seeds,
                depth,
                self._heads,
                self._mail,
                eas=request.eas,
                advance=advance,
            )
            if request.hops == 0:
                holders = self._owners().rank_of(closure.nodes).astype(np.int32)
            else:
                local = split_rows(closure, len(members), request.split, self._session.seed)
                holders = local.astype(np.int32) + np.int32(members[0])
            advance(1)
        return HeldClosure(closure=closure, holders=holders)

    def _plan_of_rank(self, request: PlanRequest, held: HeldClosure) -> RankPlan:
        first, last = self._heads.own
        own = own_rows(held, self._topology.rank)
        layers = read_layers(
            own,
            held,
            request.hops,
            (first, last),
            self._topology.rank,
            lambda ids: self._holders_of(ids, request.hops, held),
        )
        nodes = held.closure.nodes
        return RankPlan(
            nodes=own.nodes,
            layers=tuple(finish_layers(own, layers, self._mail, self._topology.world_size)),
            hops=request.hops,
            server_nodes=len(nodes),
            inner_nodes=last - first,
            external_nodes=int(np.count_nonzero((nodes < first) | (nodes >= last))),
        )

    def _holders_of(self, ids: Array, hops: int, held: HeldClosure) -> Array:
        """Return the ranks that hold the (k,) ascending ``ids`` of other servers; all ranks must call it."""
        if hops == 0:
            return self._owners().rank_of(ids)
        placement, topology = self._g.placement, self._topology
        ranks = range(topology.world_size)
        at = np.searchsorted(ids, self._bounds)
        asked = {
            placement.serving_rank(server): [ids[at[server] : at[server + 1]]]
            for server in range(topology.num_servers)
        }
        nothing = [np.empty(0, np.int64)]
        questions = self._mail.exchange("who holds rows", asked, ranks, nothing)
        answers = _holders(held, {rank: wanted for rank, (wanted,) in questions.items()})
        told = self._mail.exchange("holders of rows", answers, ranks)
        return np.concatenate([np.empty(0, np.int64), *(told[rank][0] for rank in asked)])

    def _owners(self) -> RowOwners:
        return RowOwners(self._bounds, self._topology)


def make_plans(
    g: DistGraph,
    seeds: Ids,
    num_layers: int,
    hops: int,
    *,
    eas: Selection | None = None,
    split: str = AUTO,
    seeds_stay: bool = False,
) -> RankPlan:
    """Return this rank's plan; every rank must call it. See :class:`PlanRequest` and :class:`Planner`.

    Raises:
        ConfigError: arguments or graph make no sense, or ranks ask for different things.
        IndexError: a seed is no node.
        RemoteError: another rank failed.
        PeerError: a rank is dead or silent; it is named.
    """
    return Planner(g).plan(
        PlanRequest(
            seeds=seeds, num_layers=num_layers, hops=hops, eas=eas, split=split, seeds_stay=seeds_stay
        )
    )


def check_one_type(strategy: str, g: DistGraph) -> None:
    """Raise ConfigError unless ``g`` has one node and one edge type."""
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"{strategy} trains on graphs of one node and one edge type, and this one has the nodes "
            f"{', '.join(g.ntypes)} and the edges {', '.join(map(str, g.canonical_etypes))}; use "
            "strategy='data_parallel'"
        )


def check_graph(g: DistGraph) -> None:
    """Raise ConfigError unless full-graph strategies can train on ``g`` with the ranks there are."""
    check_one_type("a full-graph strategy", g)
    topology = g.session.topology
    counts = np.diff(g.get_node_partition_policy(g.ntypes[0]).bounds)
    servers = topology.num_servers
    for server in np.flatnonzero(counts == 0).tolist():
        raise ConfigError(
            f"server {server} of {servers} owns no node of {g.name}; partition it again with "
            f"`dglx partition DATA --parts {servers} --out DIR`, or start fewer servers"
        )
    if topology.world_size > counts.sum():
        raise ConfigError(
            f"{g.name} has {counts.sum()} nodes for {topology.world_size} ranks; start at most as many "
            "ranks as there are nodes"
        )


def check_request(request: PlanRequest) -> None:
    """Raise ConfigError unless number of layers, hops and the rest go together."""
    if request.num_layers < 1:
        raise ConfigError(f"the model has {request.num_layers} layers; it needs at least 1")
    if not 0 <= request.hops <= request.num_layers:
        raise ConfigError(
            f"hops is {request.hops}; with {request.num_layers} layers it is 0 (nothing preloaded) to "
            f"{request.num_layers} (nothing crosses between servers)"
        )
    for name, given in (("eas", request.eas is not None), ("seeds_stay", request.seeds_stay)):
        if given and request.hops != request.num_layers:
            raise ConfigError(
                f"hops is {request.hops} with {name}, for which servers must not depend on each other; "
                f"set hops to the number of layers, {request.num_layers}"
            )
    check_split(request.split)


def _check_headers(headers: dict[int, Array], rank: int) -> None:
    names = ("num_layers", "hops", "eas", "seeds_stay")
    mine = headers[rank]
    for other, header in headers.items():
        for place, name in enumerate(names):
            if header[place] != mine[place]:
                raise ConfigError(
                    f"rank {rank} plans with {name} {mine[place]} and rank {other} with {header[place]}; "
                    "give the same on all ranks"
                )
    if not sum(int(header[-1]) for header in headers.values()):
        raise ConfigError("no rank was given a node to compute; give the loader at least one")


def _holders(held: HeldClosure, questions: dict[int, Array]) -> dict[int, list[Array]]:
    """Return, by who asks, [(k,) int64 ranks of this server that hold the rows asked for]."""
    highest = max(int(ids.max(initial=-1)) for ids in questions.values())
    if highest < 0:
        return {rank: [np.empty(0, np.int64)] for rank in questions}
    # It costs as much as the server's rows: once for all who ask.
    index = RowIndex(held.closure.nodes, max(highest, int(held.closure.nodes.max())) + 1)
    answers = {}
    for rank, ids in questions.items():
        places = index.places(ids)
        assert not (places < 0).any(), "another server wants rows that this one does not compute"
        answers[rank] = [held.holders[places].astype(np.int64)]
    return answers
