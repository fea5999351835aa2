"""Drawing the edges of a degree-corrected stochastic block model in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dglx_dist.progress import progress
from dglx_dist.records import Array

_PAIRS_AT_ONCE = 1 << 21
_STUBS_PER_NODE = 16
_MAX_ROUNDS = 50
_SHOWN_FROM = 5_000_000


@dataclass(frozen=True, kw_only=True)
class BlockModel:
    """Who links with whom: communities of equal size, several to a class, and weighted nodes."""

    communities: Array
    """(N,) int32; community c belongs to class c modulo ``num_classes``."""
    num_classes: int
    num_communities: int
    mean_degree: float
    exponent: float
    """Of the power law of the node weights, above 2."""
    within_community: float
    """Share of links that stay in the community."""
    within_class: float
    """Share of links that stay in the class, including the former."""
    both_directions: bool


@dataclass(frozen=True, kw_only=True)
class _Stubs:
    """Every node as often as it weighs, by community: a uniform draw is a weighted one."""

    nodes: Array
    """(T,) int32."""
    first: Array
    """(communities + 1,) int64: community c is at ``first[c]:first[c + 1]``."""


def draw_edges(model: BlockModel, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw distinct links without self-loops until there are nodes x degree edges.

    Every node gets a link first, so none is isolated; the rest go by weight. Repeated links and
    self-loops are dropped and drawn again.

    Returns:
        Source and destination ids, (E,) int32 (int64 above 2**31 nodes), sorted by (source,
        destination).
    """
    num_nodes = len(model.communities)
    stubs = _make_stubs(model, generator)
    directions = 2 if model.both_directions else 1
    num_links = round(num_nodes * model.mean_degree / directions)
    keys = np.empty(0, dtype=np.int64)
    first_ends: Array = np.arange(num_nodes, dtype=np.int32 if num_nodes < 2**31 else np.int64)
    with progress("drawing edges", num_links, enabled=num_links >= _SHOWN_FROM) as advance:
        for _ in range(_MAX_ROUNDS):
            fresh = _draw_keys(model, stubs, first_ends, num_links - len(keys), generator)
            before = len(keys)
            keys = _distinct(fresh) if not before else _merged(keys, _distinct(fresh))
            del fresh
            advance(len(keys) - before)
            if len(keys) >= num_links:
                break
            first_ends = _isolated(keys, num_nodes)
    return _directed(keys, num_nodes, model.both_directions, generator)


def _make_stubs(model: BlockModel, generator: np.random.Generator) -> _Stubs:
    num_nodes = len(model.communities)
    # Inverse of the power law's distribution function; the smallest weight is 1.
    weights = (1.0 - generator.random(num_nodes)) ** (-1.0 / (model.exponent - 1.0))
    # Half a community is as many distinct neighbours as a hub can hope for.
    size = num_nodes / model.num_communities
    np.minimum(weights, max(2.0, weights.mean() * size / (2 * model.mean_degree)), out=weights)
    weights *= _STUBS_PER_NODE / weights.mean()
    # Rounded up at random as often as the fraction says, so that the expectation stays.
    copies = np.maximum(1, np.floor(weights + generator.random(num_nodes))).astype(np.int64)
    order = np.argsort(model.communities, kind="stable").astype(np.int32 if num_nodes < 2**31 else np.int64)
    per_community = np.bincount(model.communities, copies, model.num_communities).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(per_community)]).astype(np.int64)
    return _Stubs(nodes=np.repeat(order, copies[order]), first=first)


def _draw_keys(
    model: BlockModel, stubs: _Stubs, first_ends: Array, num_links: int, generator: np.random.Generator
) -> Array:
    """Return keys lower x N + higher of at most ``num_links`` links, unsorted; self-loops are left out."""
    num_nodes = len(model.communities)
    keys = np.empty(num_links, dtype=np.int64)
    written = 0
    for first in range(0, num_links, _PAIRS_AT_ONCE):
        count = min(_PAIRS_AT_ONCE, num_links - first)
        forced = first_ends[first : first + count]
        drawn = stubs.nodes[generator.integers(0, len(stubs.nodes), count - len(forced))]
        one_end = np.concatenate([forced, drawn])
        other_end = _neighbours(model, stubs, one_end, generator)
        differ = one_end != other_end
        low = np.minimum(one_end, other_end)[differ].astype(np.int64)
        low *= num_nodes
        low += np.maximum(one_end, other_end)[differ]
        keys[written : written + len(low)] = low
        written += len(low)
    return keys[:written]


def _neighbours(model: BlockModel, stubs: _Stubs, nodes: Array, generator: np.random.Generator) -> Array:
    """Return for each of ``nodes`` one node of a community that it links with, drawn by weight."""
    count = len(nodes)
    classes = model.num_classes
    blocks = model.num_communities // classes
    own = model.communities[nodes]
    class_of, block_of = own % classes, own // classes
    kind = generator.random(count, dtype=np.float32)
    leave_block = kind >= model.within_community
    leave_class = kind >= model.within_class if classes > 1 else np.zeros(count, dtype=np.bool_)
    if blocks > 1:
        # A non-zero step round the ring reaches each other block alike; another class takes any block.
        step = generator.integers(1, blocks, count, dtype=np.int32)
        anywhere = generator.integers(0, blocks, count, dtype=np.int32)
        step = np.where(leave_class, anywhere, step)
        block_of = np.where(leave_block, (block_of + step) % blocks, block_of)
    if classes > 1:
        turn = generator.integers(1, classes, count, dtype=np.int32)
        class_of = np.where(leave_class, (class_of + turn) % classes, class_of)
    target = block_of * classes + class_of
    begin = stubs.first[target]
    position = generator.random(count)
    position *= stubs.first[target + 1] - begin
    return stubs.nodes[begin + position.astype(np.int64)]


def _distinct(keys: Array) -> Array:
    keys.sort()
    keep = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=keep[1:])
    return keys[keep]


def _merged(keys: Array, more: Array) -> Array:
    """Return the sorted union of two sorted arrays of distinct keys; ``more`` is the short one."""
    position = np.searchsorted(keys, more)
    known = keys[np.minimum(position, len(keys) - 1)] == more
    return np.insert(keys, position[~known], more[~known])


def _isolated(keys: Array, num_nodes: int) -> Array:
    linked = np.zeros(num_nodes, dtype=np.bool_)
    for first in range(0, len(keys), _PAIRS_AT_ONCE):
        piece = keys[first : first + _PAIRS_AT_ONCE]
        linked[piece // num_nodes] = True
        linked[piece % num_nodes] = True
    return np.flatnonzero(~linked).astype(np.int32 if num_nodes < 2**31 else np.int64)


def _directed(
    keys: Array, num_nodes: int, both_directions: bool, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Turn links into edges sorted by (source, destination); a single direction is drawn at random."""
    num_links = len(keys)
    turned = np.empty(2 * num_links if both_directions else num_links, dtype=np.int64)
    for first in range(0, num_links, _PAIRS_AT_ONCE):
        piece = keys[first : first + _PAIRS_AT_ONCE]
        reverse = piece % num_nodes * num_nodes + piece // num_nodes
        if both_directions:
            turned[first : first + len(piece)] = piece
            turned[num_links + first : num_links + first + len(piece)] = reverse
        else:
            turn = generator.random(len(piece)) < 0.5
            turned[first : first + len(piece)] = np.where(turn, reverse, piece)
    del keys
    turned.sort()
    id_dtype = np.int32 if num_nodes < 2**31 else np.int64
    source_ids = np.empty(len(turned), dtype=id_dtype)
    destination_ids = np.empty(len(turned), dtype=id_dtype)
    for first in range(0, len(turned), _PAIRS_AT_ONCE):
        piece = turned[first : first + _PAIRS_AT_ONCE]
        source_ids[first : first + len(piece)], destination_ids[first : first + len(piece)] = divmod(
            piece, num_nodes
        )
    return source_ids, destination_ids
