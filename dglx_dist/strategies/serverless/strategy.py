"""Serverless training as in Dorylus: graph servers, stateless workers, parameter servers, one pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor, nn

from dglx_dist.comm.session import Session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.partition_book import RowOwners
from dglx_dist.graph.shared_memory import warn_of_edges
from dglx_dist.records import Array
from dglx_dist.strategies.base import OpenedStrategy, Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.cost import (
    ID_BYTES,
    Candidate,
    Cost,
    Measured,
    PlanContext,
    PlannedRun,
    Seconds,
    Traffic,
    Work,
    traffic_with_sums,
)
from dglx_dist.strategies.full_graph.cost import FullGraphScheme, full_graph_memory
from dglx_dist.strategies.serverless.options import LambdaOptions, read_lambda_options

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_EDGE_BYTES = 80
"""Memory of a machine for each edge of its servers, measured with two layers; without that of workers."""


_SHORT_ID_BYTES, _LABEL_BYTES, _STATISTICS_BYTES = 4, 4, 2 * 2 * 8
"""Of an id; of a label, sent as a number where the paper sends one-hot rows; of loss and correct predictions:
two float64 for each half of a fused task."""
_GHOSTS = ("ghosts", "ghost_gradients")
_EPOCHS: Mapping[int, float] = MappingProxyType({0: 1.08, 1: 1.4})
"""Staleness to epochs to the same accuracy, relative to the pipeline with barriers (Dorylus has 1.00 to 1.14
and 1.07 to 1.58)."""
_ASYNC = 0.85
"""An epoch without barriers, relative to one with them (Dorylus, section 7.4)."""
_WORKER_OVERHEAD = 1.5
"""Tensor work by workers, which receive and return rows, relative to the rank itself."""
_EXCHANGING = FullGraphScheme(0)


@final
@dataclass(frozen=True)
class GhostPairs(Work):
    """Pairs of a node and another rank that reads it, which intervals exchange."""

    def describe(self, num_layers: int) -> str:
        return "pairs of border nodes"

    def count(self, run: PlannedRun) -> Ghosts | None:
        if run.in_job:
            # Only rows that training needs, mostly in the first layer; intervals compute every node.
            work = run.works[_EXCHANGING]
            return work and Ghosts(outside=work.outside[0], inside=work.inside[0], counted=False)
        shard = run.partition.structure.shards[0]
        return count_ghosts(shard.indptr, shard.indices, run.partition.bounds, run.partition.topology)


@dataclass(frozen=True, kw_only=True)
class Ghosts:
    """Counts of :class:`GhostPairs`."""

    outside: int
    inside: int
    counted: bool = True
    """Whether over all nodes of the graph; False: only of nodes that training needs."""


_EDGES_AT_ONCE = 1 << 18


def count_ghosts(indptr: Array, indices: Array, bounds: Array, topology: Topology) -> Ghosts:
    """Count the pairs over all in-edges ((N + 1,) ``indptr``, (E,) ``indices``), rank by rank."""
    starts = RowOwners(bounds, topology).starts
    outside = inside = 0
    for rank in range(topology.world_size):
        first, last = int(starts[rank]), int(starts[rank + 1])
        server = topology.server_of_rank[rank]
        seen, edges = np.zeros(int(bounds[-1]), np.bool_), indices[int(indptr[first]) : int(indptr[last])]
        for at in range(0, len(edges), _EDGES_AT_ONCE):
            seen[edges[at : at + _EDGES_AT_ONCE]] = True
        sources = np.flatnonzero(seen)
        away = np.count_nonzero((sources < bounds[server]) | (sources >= bounds[server + 1]))
        own = np.count_nonzero((sources >= first) & (sources < last))
        outside += int(away)
        inside += int(len(sources) - away - own)
    return Ghosts(outside=outside, inside=inside)


def serverless_bytes(
    *,
    widths: Sequence[int],
    nodes: int,
    ghosts: int,
    intervals: int,
    fusion: bool = True,
    rematerialise: bool = True,
    own_rows: bool = False,
    itemsize: int = 4,
) -> dict[str, int]:
    """Return the bytes of an epoch by ledger phase, over all ranks, with one parameter server.

    For convolutions that map sums, i = d_{l-1} columns, as GCN's, or with ``own_rows`` a sum beside the own
    row, i = 2 d_{l-1}, as GraphSAGE's. Streaming changes none of them. For each layer l of L, with n nodes,
    |G| pairs of a node and another graph server that reads it, s bytes a number, K intervals::

        ghosts            |G| (4 + s d_l)               l < L, and as much back
        AV l              n i s down                    n d_l s up, twice that without rematerialisation
        fused AV L        n (i s + 4) down              n i s up, not for L = 1; 32 K of loss and count
        gradAV l          n (i + d_l) s down            n i s up, not for l = 1; n d_l s more down
                                                        without rematerialisation
        weights           K |W_l| s for each task down, once back

    ``widths`` are d_0 to d_L: features, hidden widths, classes.
    """
    hidden = sum(widths[1:-1])
    boundary = ghosts * (_SHORT_ID_BYTES * (len(widths) - 2) + itemsize * hidden)
    down = up = weights_down = weights_up = 0
    last = len(widths) - 1
    for layer in range(1, last + 1):
        wide, narrow = (1 + own_rows) * widths[layer - 1], widths[layer]
        weights = intervals * (wide + 1) * narrow * itemsize
        back = 0 if layer == 1 else nodes * wide * itemsize
        weights_up += weights
        if layer == last and fusion:
            down += nodes * (wide * itemsize + _LABEL_BYTES)
            up += back + intervals * _STATISTICS_BYTES
            weights_down += weights
            continue
        saved = 0 if rematerialise else nodes * narrow * itemsize
        rows = nodes * itemsize
        down += rows * wide + rows * (wide + narrow) + saved
        up += rows * narrow + saved + back
        weights_down += 2 * weights
    return {
        "ghost_gradients": boundary,
        "ghosts": boundary,
        "lambda_down": down,
        "lambda_up": up,
        "weights_down": weights_down,
        "weights_up": weights_up,
    }


def _traffic(known: Measured, ghosts: Ghosts, read: int) -> Traffic:
    cluster, shape, total = known.cluster, known.shape, ghosts.outside + ghosts.inside
    # Of an unknown model, two products of a layer's size are of the sum and of the own row.
    products = [(one.per_source + one.per_target) / (one.inputs * one.outputs) for one in shape.layers]
    own_rows = shape.kind == "sage" or (shape.guessed and set(products) == {2.0})
    phases = serverless_bytes(
        widths=(shape.features, *(layer.outputs for layer in shape.layers)),
        nodes=known.graph.nodes,
        ghosts=total,
        intervals=LambdaOptions().intervals * cluster.ranks,
        own_rows=own_rows,
    )
    # By all ranks but the one that has the weights, where the pipeline is emptied.
    phases["weights_read"] = read * (cluster.ranks - 1)
    inside = {name: phases[name] * ghosts.inside // max(total, 1) for name in _GHOSTS}
    inside["weights_read"] = read * (cluster.ranks_per_server - 1)
    outside = {name: count - inside.get(name, 0) for name, count in phases.items()}
    once = ghosts.outside * (2 * ID_BYTES + known.graph.feature_bytes)
    # Norms between the layers have weights that are not counted.
    known_weights = shape.kind in ("gcn", "sage") and shape.tensors == (2 + own_rows) * len(shape.layers)
    counted = ghosts.counted and known_weights and not shape.guessed
    return traffic_with_sums(outside, inside, (0, 0), once=once, exact=counted)


@final
class OpenedLambda(OpenedStrategy):
    """Serverless training on one graph."""

    def make_loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> Any:
        from dglx_dist.strategies.serverless.trainer import IntervalLoader

        warn_of_edges(self.session, self.g.edge_bounds, _EDGE_BYTES)
        return IntervalLoader(self.g, indices, sampler, loader_options)

    def make_model(self, model: nn.Module, reduction: Reduction) -> WrappedModel:
        from dglx_dist.strategies.serverless.trainer import LambdaModel

        if reduction != "mean":
            raise ConfigError(
                f"reduction={reduction!r}: strategy 'lambda' trains the mean loss over all training nodes; "
                "leave it out, and divide the learning rate instead"
            )
        return LambdaModel(model, self.g, self.options)


@final
class Lambda(Strategy):
    """Graph servers on all ranks; an executor runs the tensor work on stateless workers.

    Options: those of ``LambdaOptions``, and the executor's own. See docs/strategies/lambda.md.
    """

    traits = Traits(
        unit="full_graph",
        summary="features of ghosts once; boundary rows and their gradients; rows and weights to workers",
        own_loop=False,
        on_gpus=False,
        complexity=50,
    )

    read_options = staticmethod(read_lambda_options)

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        super().__init__(session, options)
        wanted, ranks = self.options.parameter_servers, session.topology.world_size
        if wanted > ranks:
            raise ConfigError(
                f"option parameter_servers={wanted}, but there are {ranks} ranks; give at most as many, or "
                "start more ranks"
            )

    def open(self, g: DistGraph) -> OpenedLambda:
        return OpenedLambda(self, g)

    @staticmethod
    def inspect(model: nn.Module, features: int) -> int:
        from dglx_dist.serverless.parameter_service import bytes_of_read
        from dglx_dist.strategies.serverless.model_to_program import chain_of

        program = chain_of(model).program
        return bytes_of_read(program.weight_shapes, program.dtype)

    @staticmethod
    def candidates(context: PlanContext) -> Iterator[Candidate]:
        make = partial(Candidate, unit="full_graph", works=(_EXCHANGING, GhostPairs()))
        yield make()
        for staleness, factor in _EPOCHS.items():
            yield make(options={"mode": "async", "staleness": staleness}, exact=False, epochs_factor=factor)

    @staticmethod
    def cost(candidate: Candidate, known: Measured) -> Cost:
        """Return the cost of an epoch with workers that share the cores of their graph server."""
        cluster, work = known.cluster, known.works[_EXCHANGING]
        traffic = _traffic(known, known.works[GhostPairs()], known.shape.inspected.get(candidate.strategy, 0))
        compute = _WORKER_OVERHEAD * (known.plan_rates or known.rates).compute_s(
            known.shape.work(*work.worked), 1
        )
        ghosts = sum(traffic.outside.get(name, 0) for name in _GHOSTS)
        outside = ghosts / cluster.servers / cluster.external_bytes_per_s
        # Only ghosts and weights that are read stay inside: traffic to workers leaves the server.
        inside = sum(traffic.inside.values()) / cluster.servers / cluster.internal_bytes_per_s
        factor = 1.0 if candidate.exact else _ASYNC
        # Every epoch in flight keeps its activations.
        in_flight = 1 + 0.5 * (int(candidate.options.get("staleness", -1)) + 1)
        kept = full_graph_memory(known, work) - known.fixed
        return Cost(
            seconds=Seconds(compute=factor * compute, outside=factor * outside, inside=factor * inside),
            traffic=traffic,
            memory=known.fixed + round(kept * in_flight),
            note="workers on the same servers",
        )
