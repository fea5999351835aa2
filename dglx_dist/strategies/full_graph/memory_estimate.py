"""Memory model of full-graph training: the allocations of a step on a tiny graph, and the sizes of real ones.

In the tiny graph every level, every layer's sources and every layer's edges have their own prime number of
rows. The prime that divides the size of an allocation tells its rows and its bytes per row. With the row
counts of a real plan, the same sequence of allocations gives the peak of a real step.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, final

import dgl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from dglx_dist.comm.collectives import gather_int64, run_on_all_ranks
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import hash_ids, stream_key
from dglx_dist.layers.dropout import install_node_dropouts
from dglx_dist.memory import machine_memory, return_memory
from dglx_dist.progress import progress
from dglx_dist.records import Array, EdgeType
from dglx_dist.strategies.cost import OPTIMIZER_COPIES, MemoryTrace
from dglx_dist.strategies.full_graph.halo_block import HaloBlock, halo_block
from dglx_dist.strategies.full_graph.halo_exchange import CoverExchange
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, RankPlan
from dglx_dist.strategies.full_graph.loader import PlanMaker, PlanSpec, ServerSeeds
from dglx_dist.strategies.full_graph.model import install
from dglx_dist.strategies.full_graph.options import LoaderRequest

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph

PLAN_BYTES = 100
"""Memory of building the plans of all ranks, by edge of the graph: 95 were measured with two layers."""
_MOST_TIMED_EDGES = 3_000_000
"""Of all layers of a timed neighbourhood."""
_FEW_SEEDS = 64
"""Seeds whose neighbourhoods are timed if those of all are too large."""


def most_timed_seeds(num_nodes: int, num_edges: int, num_layers: int) -> int:
    """Return how many seeds' neighbourhoods are timed: all, or few that fit the free memory, at least 1."""
    fitting = machine_memory()[1] // PLAN_BYTES
    if num_edges * num_layers <= _MOST_TIMED_EDGES and num_edges <= fitting:
        return max(num_nodes, 1)
    degree = max(num_edges / max(num_nodes, 1), 1.0)
    return max(1, min(_FEW_SEEDS, int(fitting / degree**num_layers)))


_BACKWARD = "dglx backward of the memory trace"
_FIRST_PRIME = 211
"""Larger than small dimensions such as attention heads, so that a prime divisor is a number of rows."""


@final
@dataclass(frozen=True)
class StepSizes:
    """Rows and edges of a step on one rank."""

    rows: tuple[int, ...]
    """(L + 1,) of the levels, features first."""
    sources: tuple[int, ...]
    """(L,)."""
    edges: tuple[int, ...]
    """(L,)."""
    sent: tuple[int, ...]
    """(L,) rows that other ranks receive."""


def step_sizes(plan: RankPlan) -> StepSizes:
    layers = plan.layers
    return StepSizes(
        rows=(layers[0].own_rows, *(layer.targets for layer in layers)),
        sources=tuple(layer.num_sources for layer in layers),
        edges=tuple(len(layer.indices) for layer in layers),
        sent=tuple(sum(len(rows) for _, rows in layer.send) for layer in layers),
    )


def trace_memory(
    model: nn.Module,
    num_layers: int,
    row: Tensor,
    *,
    with_halo: bool,
    etype: EdgeType,
    out_degrees: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> MemoryTrace:
    """Run one step of a copy of ``model`` on a tiny graph and return its allocations.

    The model is called as ``model(blocks, rows)`` on the CPU, with rows like the (1, *row) ``row`` of the
    features in the compute type. With ``with_halo`` ranks of a server share rows, so layers exchange.
    ``out_degrees`` maps ids in [0, number of rows) to out-degrees. ConfigError: the model fails.
    """
    copied = copy.deepcopy(model).cpu().train()
    install(copied)
    dropouts = install_node_dropouts(copied, seed)
    widths = {size for tensor in (row, *model.parameters(), *model.buffers()) for size in tensor.shape}
    primes = _primes(3 * num_layers + 1, widths)
    # Levels shrink towards the output; with a halo a layer has more sources than own rows.
    counts = np.array([1, *primes[: num_layers + 1][::-1], *primes[num_layers + 1 :]], np.int64)
    if not with_halo:
        counts[num_layers + 2 : 2 * num_layers + 2] = counts[1 : num_layers + 1]
    layers = [_layer(counts, number, num_layers) for number in range(1, num_layers + 1)]
    exchanges = [LocalExchange(len(layer.halo_nodes)) for layer in layers]
    blocks = [
        halo_block(layer, torch.arange(layer.own_rows), exchange, etype=etype, out_degrees=out_degrees)
        for layer, exchange in zip(layers, exchanges, strict=True)
    ]
    rows = row.new_zeros((int(counts[1]), *row.shape[1:]))
    dropouts.begin(0, blocks[0].srcdata[dgl.NID])
    try:
        with torch.random.fork_rng(devices=[]):
            # The first step is not traced: it creates state that is kept (block formats, out-degrees).
            _step(copied, blocks, rows)
            events = _recorded(copied, [block.local_var() for block in blocks], rows)
    except Exception as problem:
        raise ConfigError(
            f"the model failed on a tiny graph ({type(problem).__name__}: {problem}), which option memory "
            "needs; give batches=R instead"
        ) from problem
    return _read(events, counts, exchanges, copied)


@final
class LocalExchange:
    """Replacement of an exchange with the same allocations, which sends nothing."""

    def __init__(self, num_halo: int) -> None:
        self.num_halo = num_halo
        self.cover: CoverExchange | None = None
        self.row_bytes: Array = np.zeros(2, np.int64)
        """Of a row that is sent, and of its gradient that comes back."""

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        one_way = h[:1].numel() * h.element_size()
        self.row_bytes = np.maximum(self.row_bytes, [one_way, one_way if h.requires_grad else 0])
        # Allocates all rows forward, and the own ones backward, as the exchange does.
        return functional.pad(h, [0, 0] * (h.dim() - 1) + [0, self.num_halo]) if self.num_halo else h


def _step(model: nn.Module, blocks: list[HaloBlock], rows: Tensor) -> None:
    leaves = [one for one in tree_leaves(model(blocks, rows)) if torch.is_tensor(one) and one.requires_grad]
    # Keeps as much memory as a cross-entropy.
    losses = [one.log_softmax(-1).sum() if one.dim() > 1 else one.sum() for one in leaves]
    with record_function(_BACKWARD):
        cast("Tensor", sum(losses)).backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    model.zero_grad(set_to_none=True)


def _recorded(model: nn.Module, blocks: list[HaloBlock], rows: Tensor) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes; negative if freed) of each allocation, and (time, 0, 0) at backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, blocks, rows)
    # Private in torch. If the name changes, the error says to use batches=R.
    from torch._C._profiler import _EventType

    results = profiler.profiler.kineto_results
    found, waiting = [], list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.typed[1]
            found.append((event.start_time_ns, int(fields.ptr), int(fields.alloc_size)))
        elif event.name == _BACKWARD:
            found.append((event.start_time_ns, 0, 0))
    return sorted(found, key=lambda one: one[0])


def _read(
    events: list[tuple[int, int, int]], counts: Array, exchanges: list[LocalExchange], model: nn.Module
) -> MemoryTrace:
    changes: list[tuple[int, int]] = []
    backward_at = 0
    held: dict[int, tuple[int, int]] = {}
    for _, address, num_bytes in events:
        if not num_bytes:
            backward_at = len(changes)
        elif num_bytes > 0:
            held[address] = _kind_of(num_bytes, counts)
            changes.append(held[address])
        elif address in held:
            kind, each = held.pop(address)
            changes.append((kind, -each))
    kinds, row_bytes = np.array(changes, np.int64).T
    return MemoryTrace(
        kinds=kinds,
        row_bytes=row_bytes,
        backward_at=backward_at,
        exchanged=np.stack([exchange.row_bytes for exchange in exchanges], axis=1),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _kind_of(num_bytes: int, counts: Array) -> tuple[int, int]:
    """Return the kind of rows of an allocation and its bytes per row; (0, num_bytes) if it has none."""
    places = np.flatnonzero((num_bytes % counts == 0) & (counts > 1))
    if not len(places):
        return 0, num_bytes
    # Two primes divide sizes such as edges times rows only; the larger one explains more.
    place = int(places[np.argmax(counts[places])])
    # Without a halo, sources and own rows have equal counts and are attributed to the level.
    place = int(np.flatnonzero(counts == counts[place])[0])
    return place, num_bytes // int(counts[place])


def _layer(counts: Array, number: int, num_layers: int) -> HaloLayer:
    own, targets = int(counts[number]), int(counts[number + 1])
    sources = int(counts[num_layers + 1 + number])
    num_edges = int(counts[2 * num_layers + 1 + number])
    drawn = hash_ids(np.arange(num_edges), stream_key(number, 0, 0))
    halo = sources - own
    return HaloLayer(
        own_rows=own,
        targets=targets,
        indptr=np.arange(targets + 1) * num_edges // targets,
        indices=(drawn % np.uint64(sources)).astype(np.int64),
        edge_ids=np.arange(num_edges),
        halo_nodes=np.arange(own, sources),
        receive=((1, halo),) if halo else (),
        send=((1, np.arange(1)),) if halo else (),
    )


def _primes(count: int, widths: Collection[int]) -> list[int]:
    """Return ``count`` primes that divide no width, so that parameter sizes match no kind of rows."""
    primes = (
        number
        for number in itertools.count(_FIRST_PRIME)
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
        and all(width % number for width in widths if width)
    )
    return list(itertools.islice(primes, count))


_PROBES = 3
"""Batches that are checked for each candidate number."""
_MOST_CHECKED = 64
"""Batches that are checked for the chosen number."""
_FIRST_TRIED = 32


@final
@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of training on one plan on one rank, in bytes, beyond the process without training."""

    features: int
    """Input rows, of layer 1."""
    activations: tuple[int, ...]
    """(L,) that forward keeps for backward."""
    structure: tuple[int, ...]
    """(L,) of the block with its formats, and of the plan; 0 for a layer that shares the previous one's."""
    halo: tuple[tuple[int, ...], ...]
    """(2, L) buffers of sent rows, and of received gradients; shared by layers, so these do not add up."""
    gradients: int
    """Peak of backward beyond the kept activations: gradients of rows and parameters."""
    optimizer: int
    ahead: int
    """Structure and features of the plans that are loaded ahead."""

    @property
    def held(self) -> int:
        """What is allocated once for all steps: the optimizer's tensors, and the buffers of the exchange."""
        return self.optimizer + sum(max(way) for way in self.halo)

    @property
    def total(self) -> int:
        loaded = self.features + sum(self.structure) + self.ahead
        return self.held + loaded + sum(self.activations) + self.gradients

    def lines(self) -> list[str]:
        features = [self.features, *[0] * (len(self.activations) - 1)]
        both_ways = [sum(ways) for ways in zip(*self.halo, strict=True)]
        layers = zip(features, self.activations, self.structure, both_ways, strict=True)
        return [
            f"{'layer':>8} {'features':>10} {'activations':>12} {'structure':>10} {'halo':>8}   (MB)",
            *(
                f"{number:>8} {_mb(rows):>10} {_mb(kept):>12} {_mb(structure):>10} {_mb(halo):>8}"
                for number, (rows, kept, structure, halo) in enumerate(layers, start=1)
            ),
            f"gradients {_mb(self.gradients)}, optimizer {_mb(self.optimizer)}, next cooperative batch "
            f"{_mb(self.ahead)}, total {_mb(self.total)}",
        ]


def estimate(sizes: StepSizes, trace: MemoryTrace, feature_bytes: int, *, ahead: int) -> MemoryEstimate:
    """Return the memory of a step of ``sizes``, of the model of ``trace``.

    ``feature_bytes`` is the size of an input row in the compute type; ``ahead`` steps, assumed to have the
    same sizes, are loaded in advance.
    """
    counts = np.array([1, *sizes.rows, *sizes.sources, *sizes.edges], np.int64)
    kept, halo = trace.kept(counts).tolist(), trace.exchanged * np.array(sizes.sent)
    layers = [*zip(sizes.edges, sizes.sources, sizes.rows[1:], sizes.sent, strict=True)]
    structure = tuple(
        0 if layers[:number][-1:] == [one] else _structure_bytes(*one) for number, one in enumerate(layers)
    )
    features = sizes.rows[0] * feature_bytes
    return MemoryEstimate(
        features=features,
        activations=tuple(kept),
        structure=structure,
        halo=tuple(tuple(way) for way in halo.tolist()),
        gradients=max(trace.peak(counts) - sum(kept), 0),
        optimizer=OPTIMIZER_COPIES * trace.parameter_bytes,
        ahead=ahead * (features + sum(structure)),
    )


def _structure_bytes(edges: int, sources: int, targets: int, sent: int) -> int:
    """Return the bytes of a layer's plan and block, 8 for each of these numbers.

    Per edge: source and id, position with half as much spare capacity, and in source order, which backward
    reads, target and position. Per source: offset and id. Per target, and per sent row: offset.
    """
    return (8 * 2 + 12 + 8 * 2) * edges + 16 * sources + 8 * (targets + sent)


def choose_batches(
    g: DistGraph,
    maker: PlanMaker,
    spec: PlanSpec,
    request: LoaderRequest,
    memory_bytes: int,
    model: nn.Module,
) -> tuple[int, MemoryEstimate]:
    """Return the fewest cooperative batches with which ``model`` fits, and the largest one's estimate.

    Collective; the number is equal on all ranks. ``memory_bytes`` is the limit of a rank for training, beyond
    its present use. Rank 0 prints the estimate. From now on freed memory is returned to the system, because
    the allocator would otherwise retain half as much again. ConfigError, on all ranks: the model cannot be
    traced, or even the smallest batch does not fit.
    """
    assert isinstance(maker.seeds, ServerSeeds)
    return_memory()
    session, topology, num_nodes = g.session, g.session.topology, g.num_nodes()
    row = run_on_all_ranks(session, lambda: _feature_row(g, request), ConfigError)
    traced = run_on_all_ranks(
        session,
        lambda: trace_memory(
            model,
            request.num_layers,
            row.to(torch.device("cpu")),
            with_halo=len(topology.ranks_of_server(topology.server)) > 1,
            etype=g.canonical_etypes[0],
            out_degrees=lambda ids: g.out_degrees(ids % num_nodes),
            seed=session.seed,
        ),
        ConfigError,
    )
    feature_bytes = row.numel() * row.element_size()
    largest: dict[int, MemoryEstimate] = {}

    def worst(number: int, steps: Array) -> int:
        # A single batch is kept; of several, the next ones are loaded during a step.
        ahead, tried = 0 if number == 1 else request.depth, replace(spec, num_batches=number)
        plans = (maker.make(tried, (0, 0, int(step))) for step in steps)
        estimates = [estimate(step_sizes(plan), traced, feature_bytes, ahead=ahead) for plan in plans]
        largest[number] = max(estimates, key=lambda one: one.total)
        return int(gather_int64([largest[number].total], session).max())

    with progress("choosing the number of cooperative batches", 1, enabled=topology.rank == 0) as advance:
        number = choose_num_batches(worst, memory_bytes, max(maker.seeds.counts))
        advance(1)
        batches = "1 cooperative batch" if number == 1 else f"{number} cooperative batches"
        for line in (f"{batches} per epoch; the largest of rank 0 needs", *largest[number].lines()):
            advance.say(line)
    return number, largest[number]


def _feature_row(g: DistGraph, request: LoaderRequest) -> Tensor:
    inputs = next(iter(request.columns.inputs.values()), {})
    if len(inputs) != 1:
        raise ConfigError(
            "option memory needs one input column of the model, but the sampler prefetches "
            f"{list(inputs)}; give prefetch_node_feats=['feat'], or batches=R instead of memory"
        )
    (key,) = inputs.values()
    rows = g.kvstore.pull(key, np.zeros(1, np.int64), phase="preload")
    return request.columns.memory.converted(rows).clone()


def choose_num_batches(worst: Callable[[int, Array], int], memory_bytes: int, most: int) -> int:
    """Return the smallest number of cooperative batches, to within an eighth, that each fit ``memory_bytes``.

    Starts with many batches and decreases the number, so that at most one too large number is planned, and
    only its structure.

    ``worst`` maps (R, (k,) steps) to the largest total of these steps over all ranks; collective.
    ConfigError: even ``most`` batches do not fit.
    """

    def fits(number: int, checked: int = _PROBES) -> bool:
        needed = worst(number, evenly_spaced(number, checked))
        if needed > memory_bytes and number == most:
            raise ConfigError(
                f"memory={memory_bytes} bytes for each rank do not hold even one of {most} cooperative "
                f"batches, which needs {needed}; raise memory, use more servers or ranks, or bound the "
                "neighbourhood with external_hops=1, external_fanout=15 and external_inner=batch"
            )
        return needed <= memory_bytes

    few, many = 0, min(_FIRST_TRIED, most)
    while not fits(many):
        few, many = many, min(2 * many, most)
    while many - few > max(1, many // 8):
        middle = (few + many) // 2
        few, many = (few, middle) if fits(middle) else (middle, many)
    while not fits(many, _MOST_CHECKED):
        many = min(many + max(1, many // 8), most)
    return many


def evenly_spaced(count: int, chosen: int) -> Array:
    """Return up to ``chosen`` (k,) int64 distinct numbers evenly spaced over [0, count)."""
    return np.unique(np.linspace(0, count - 1, min(chosen, count)).astype(np.int64))


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
