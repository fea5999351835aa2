"""What a model allocates for a step, found by one step on a tiny graph whose numbers tell rows apart.

Every level, every layer's sources and every layer's edges have a prime number of rows of their own. An
allocation whose bytes a prime divides is so many bytes for each of these rows: with the numbers of a real
plan in their place, the same sequence of allocations and frees gives the peak of a real step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast, final

import dgl
import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from dglx_dist.draws.rng import hash_ids, stream_key
from dglx_dist.errors import ConfigError
from dglx_dist.layers.node_dropout import NodeDropout, install_node_dropouts
from dglx_dist.records import Array, EdgeType
from dglx_dist.strategies.granndis.halo_block import HaloBlock, halo_block, needs_repeated_row
from dglx_dist.strategies.granndis.hooks import install
from dglx_dist.strategies.granndis.plan import HaloLayer, RankPlan

_BACKWARD = "dglx backward of the rehearsal"
_FIRST_PRIME = 211
"""Larger than what there are few of, such as heads, so that a divisor is a number of rows."""


@final
@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The allocations of a step, in order; see :meth:`peak`."""

    num_layers: int
    kinds: Array
    """(A,) int64: of which rows, as places in the counts of :func:`counts_of`; 0: of none."""
    row_bytes: Array
    """(A,) int64 bytes for each of these rows; negative where they are freed."""
    backward_at: int
    """How many of them belong to the forward pass."""
    exchanged: Array
    """(L,) int64 bytes of a row that layers exchange; 0 where one exchanges nothing."""
    parameter_bytes: int

    def running(self, counts: Array) -> Array:
        """Return (A + 1,) int64, the bytes held before each allocation and after the last.

        Args:
            counts: (3 L + 2,) int64 of :func:`counts_of`.
        """
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.row_bytes * counts[self.kinds])])

    def kept(self, counts: Array) -> Array:
        """Return (L + 1,) int64 bytes that forward leaves for backward, by layer; [0]: of no layer."""
        forward = slice(0, self.backward_at)
        layer = _layer_of(self.kinds[forward], self.num_layers)
        held = self.row_bytes[forward] * counts[self.kinds[forward]]
        return np.bincount(layer, weights=held, minlength=self.num_layers + 1).astype(np.int64)


def counts_of(plan: RankPlan) -> Array:
    """Return (3 L + 2,) int64: 1, rows of levels 0..L, sources of layers 1..L, edges of layers 1..L."""
    levels = [plan.layers[0].own_rows, *(layer.targets for layer in plan.layers)]
    sources = [layer.num_sources + needs_repeated_row(layer) for layer in plan.layers]
    return np.array([1, *levels, *sources, *(len(layer.indices) for layer in plan.layers)], np.int64)


def rehearse(
    model: nn.Module,
    num_layers: int,
    row: Tensor,
    *,
    with_halo: bool,
    etype: EdgeType,
    out_degrees: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> Rehearsal:
    """Run one step of a copy of ``model`` on a tiny graph, and return what it allocated.

    Args:
        model: Called as ``model(blocks, rows)``; not changed. Its tensors are on the CPU.
        num_layers: L.
        row: (1, *row) of the features, as a block has them; its values count for nothing.
        with_halo: Whether ranks of a server share the rows, so that layers exchange.
        etype: Of the graph.
        out_degrees: What blocks ask for out-degrees; it is given ids in [0, number of rows).
        seed: Of dropouts.

    Raises:
        ConfigError: the model fails on it.
    """
    copied = copy.deepcopy(model).train()
    _with_plain_dropouts(copied)
    install(copied)
    dropouts = install_node_dropouts(copied, seed)
    widths = {size for tensor in (row, *model.parameters(), *model.buffers()) for size in tensor.shape}
    primes = _primes(3 * num_layers + 1, widths)
    # Levels shrink towards the output; a layer has more sources than own rows when there is a halo.
    counts = np.array([1, *primes[: num_layers + 1][::-1], *primes[num_layers + 1 :]], np.int64)
    if not with_halo:
        counts[num_layers + 2 : 2 * num_layers + 2] = counts[1 : num_layers + 1]
    layers = [_layer(counts, number, num_layers) for number in range(1, num_layers + 1)]
    exchanges = [_Echo(len(layer.halo_nodes)) for layer in layers]
    blocks = [
        halo_block(layer, torch.arange(layer.own_rows), exchange, etype=etype, out_degrees=out_degrees)
        for layer, exchange in zip(layers, exchanges, strict=True)
    ]
    rows = row.new_zeros((int(counts[1]), *row.shape[1:]))
    dropouts.begin(0, blocks[0].srcdata[dgl.NID])
    try:
        with torch.random.fork_rng(devices=[]):
            # What a first step makes and keeps (formats of blocks, out-degrees) is not of every step.
            _step(copied, blocks, rows)
            events = _recorded(copied, [block.fresh() for block in blocks], rows)
    except Exception as problem:
        raise ConfigError(
            f"the model could not be tried out on a tiny graph ({type(problem).__name__}: {problem}), which "
            "option memory needs; give batches=R in its place"
        ) from problem
    return _read(events, counts, num_layers, exchanges, copied)


def _with_plain_dropouts(copied: nn.Module) -> None:
    """Take the keyed dropouts out of a copy: they belong to the model that it is a copy of."""
    for name, module in list(copied.named_modules(remove_duplicate=False)):
        if isinstance(module, NodeDropout):
            parent, _, last = name.rpartition(".")
            copied.get_submodule(parent).register_module(last, nn.Dropout(module.p, module.inplace))


@final
class _Echo:
    """Stands in for an exchange: allocates what one does, and sends nothing."""

    def __init__(self, num_halo: int) -> None:
        self.num_halo, self.row_bytes = num_halo, 0

    def exchange(self, h: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return ``h`` and rows of zeros."""
        self.row_bytes = max(self.row_bytes, h[:1].numel() * h.element_size())
        if not self.num_halo:
            return h
        return cast("Tensor", _Appended.apply(h, self.num_halo))  # type: ignore[no-untyped-call]  # torch leaves it bare


@final
class _Appended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, num_halo: int) -> Tensor:
        ctx.own_rows = len(h)
        sources = h.new_zeros((len(h) + num_halo, *h.shape[1:]))
        sources[: len(h)].copy_(h)
        return sources

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][: ctx.own_rows].clone(), None


def _step(model: nn.Module, blocks: list[HaloBlock], rows: Tensor) -> None:
    output = model(blocks, rows)
    loss = sum(_loss(leaf) for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.requires_grad)
    with record_function(_BACKWARD):
        cast("Tensor", loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
    model.zero_grad(set_to_none=True)


def _loss(scores: Tensor) -> Tensor:
    """Return what keeps as much as a cross-entropy does."""
    return scores.log_softmax(-1).sum() if scores.dim() > 1 else scores.sum()


def _recorded(model: nn.Module, blocks: list[HaloBlock], rows: Tensor) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes; negative: freed) of every allocation, and (time, 0, 0) of backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, blocks, rows)
    # Torch has no public name for single events; where it has another one, the user is told of batches=R.
    from torch._C._profiler import _EventType

    results = profiler.profiler.kineto_results
    found = []
    for event in _every(results.experimental_event_tree()):
        if event.tag == _EventType.Allocation:
            fields = event.typed[1]
            found.append((event.start_time_ns, int(fields.ptr), int(fields.alloc_size)))
        elif event.name == _BACKWARD:
            found.append((event.start_time_ns, 0, 0))
    return sorted(found, key=lambda one: one[0])


def _every(roots: Any) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def _read(
    events: list[tuple[int, int, int]],
    counts: Array,
    num_layers: int,
    exchanges: list[_Echo],
    model: nn.Module,
) -> Rehearsal:
    kinds: list[int] = []
    row_bytes: list[int] = []
    backward_at = 0
    held: dict[int, tuple[int, int]] = {}
    for _, address, num_bytes in events:
        if not num_bytes:
            backward_at = len(kinds)
        elif num_bytes > 0:
            held[address] = _kind_of(num_bytes, counts)
            kinds.append(held[address][0])
            row_bytes.append(held[address][1])
        elif address in held:
            kind, each = held.pop(address)
            kinds.append(kind)
            row_bytes.append(-each)
    return Rehearsal(
        num_layers=num_layers,
        kinds=np.array(kinds, np.int64),
        row_bytes=np.array(row_bytes, np.int64),
        backward_at=backward_at,
        exchanged=np.array([exchange.row_bytes for exchange in exchanges], np.int64),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _kind_of(num_bytes: int, counts: Array) -> tuple[int, int]:
    """Return of which rows ``num_bytes`` are, and how many bytes of each; (0, all of them): of none."""
    places = np.flatnonzero((num_bytes % counts == 0) & (counts > 1))
    if not len(places):
        return 0, num_bytes
    # Two primes divide only what both stand in, as edges times rows: the larger one explains more.
    place = int(places[np.argmax(counts[places])])
    # Without a halo, sources and own rows are as many: those are then counted as a level's.
    place = int(np.flatnonzero(counts == counts[place])[0])
    return place, num_bytes // int(counts[place])


def _layer_of(kinds: Array, num_layers: int) -> Array:
    """Return the layer that rows belong to: those of a level, to the layer that computes it; of 0, to 1."""
    place = np.arange(3 * num_layers + 2)
    layer = np.where(place <= num_layers + 1, np.maximum(place - 1, 1), (place - 2) % num_layers + 1)
    layer[0] = 0
    return layer[kinds]


def _layer(counts: Array, number: int, num_layers: int) -> HaloLayer:
    own, targets = int(counts[number]), int(counts[number + 1])
    sources = int(counts[num_layers + 1 + number])
    num_edges = int(counts[2 * num_layers + 1 + number])
    indptr = np.sort(np.arange(targets + 1) * num_edges // targets)
    drawn = hash_ids(np.arange(num_edges), stream_key(number, 0, 0))
    halo = sources - own
    return HaloLayer(
        own_rows=own,
        targets=targets,
        indptr=indptr.astype(np.int64),
        indices=(drawn % np.uint64(sources)).astype(np.int64),
        edge_ids=np.arange(num_edges),
        halo_nodes=np.arange(own, sources),
        receive=((1, halo),) if halo else (),
        send=((1, np.arange(1)),) if halo else (),
    )


def _primes(count: int, widths: Collection[int]) -> list[int]:
    """Return ``count`` primes that divide no width: what is as large as a parameter is not of any rows."""
    found: list[int] = []
    number = _FIRST_PRIME
    while len(found) < count:
        is_prime = all(number % divisor for divisor in range(2, int(number**0.5) + 1))
        if is_prime and all(width % number for width in widths if width):
            found.append(number)
        number += 1
    return found
