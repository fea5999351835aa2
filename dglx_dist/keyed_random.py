"""Keyed random numbers, and sampling kernels built on them. Draws depend on ids, not on ranks or order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from dglx_dist.records import Array

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_32 = np.uint64(0xFFFFFFFF)
_MAX_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)
_UNIT_SCALE = 2.0**-53


@njit(cache=True, nogil=True)
def mix(state: np.uint64) -> np.uint64:
    """Return splitmix64's output for ``state``. The function is a bijection of 64-bit words.

    Its sums and products are meant to overflow: they are modulo 2**64.
    """
    word = np.uint64(state) + _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@njit(cache=True, nogil=True)
def splitmix64(values: Array) -> Array:
    """Apply :func:`mix` to each value. Input and result are (N,) uint64."""
    out = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        out[i] = mix(values[i])
    return out


def stream_key(seed: int, epoch: int, hop: int) -> np.uint64:
    """Return the key for all draws in a hop and epoch. Hop 0 is at the seeds."""
    # Compiled code returns 64-bit words as Python integers, but does not accept those as uint64.
    return np.uint64(_stream_key(seed, epoch, hop))


@njit(cache=True, nogil=True)
def _stream_key(seed: int, epoch: int, hop: int) -> np.uint64:
    return mix(mix(mix(np.uint64(seed)) ^ np.uint64(epoch)) ^ np.uint64(hop))


@njit(cache=True, nogil=True)
def relation_keys(seed: int, epoch: int, num_hops: int, num_relations: int) -> Array:
    """Return (L, R) uint64 keys for draws, by hop and edge type. Type 0 has the hop's key."""
    keys = np.empty((num_hops, num_relations), np.uint64)
    for hop in range(num_hops):
        stream = _stream_key(seed, epoch, hop)
        for relation in range(num_relations):
            keys[hop, relation] = stream if relation == 0 else mix(mix(stream) ^ np.uint64(relation))
    return keys


@njit(cache=True, nogil=True)
def item_key(stream: np.uint64, global_id: int) -> np.uint64:
    """Return the key for all draws at one node or edge within ``stream``."""
    return mix(stream ^ mix(np.uint64(global_id)))


@njit(cache=True, nogil=True)
def full_word(key: np.uint64, number: int) -> np.uint64:
    """Return the key's ``number``-th word, 64 random bits."""
    return mix(key + np.uint64(number) * _GOLDEN)


@njit(cache=True, nogil=True)
def half_word(key: np.uint64, number: int) -> np.uint64:
    """Return the key's ``number``-th half word, 32 random bits. Two consecutive half words share a hash."""
    word = full_word(key, number >> 1)
    is_upper_half = number & 1
    return word >> np.uint64(32) if is_upper_half else word & _LOW_32


@njit(cache=True, nogil=True)
def draw_below(key: np.uint64, number: int, bound: int) -> tuple[np.int64, int]:
    """Return a uniform draw in [0, bound) and the next draw's number; ``bound`` is in [1, 2**32).

    This is Lemire's multiply and shift. Draws that would make some values more likely are rejected.
    """
    product = half_word(key, number) * np.uint64(bound)
    number += 1

    # Computing num_rejected is slow. It is below the bound, so most draws do not need it.
    if (product & _LOW_32) < np.uint64(bound):
        num_rejected = (np.uint64(1 << 32) - np.uint64(bound)) % np.uint64(bound)
        while (product & _LOW_32) < num_rejected:
            product = half_word(key, number) * np.uint64(bound)
            number += 1
    return np.int64(product >> np.uint64(32)), number


@njit(cache=True, nogil=True)
def draw_unit(key: np.uint64, number: int) -> float:
    """Return the key's ``number``-th draw, uniform in the open interval (0, 1)."""
    # A float64 has 53 bits. The half keeps the draw above 0.
    upper_bits = full_word(key, number) >> np.uint64(11)
    return (np.float64(upper_bits) + 0.5) * _UNIT_SCALE


@njit(cache=True, nogil=True)
def hash_ids(ids: Array, stream: np.uint64) -> Array:
    """Hash the (K,) int64 ``ids`` to (K,) uint64 keys. Sorting by the keys is a reproducible shuffle."""
    out = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        out[i] = item_key(stream, ids[i])
    return out


def words_on_device(stream: np.uint64, ids: Tensor, numbers: Tensor) -> Tensor:
    """Return random words for n ids on their device, with the same bits as on the host.

    Args:
        stream: Key for the draws, see :func:`stream_key`.
        ids: (n,) int64 node or edge ids.
        numbers: (k,) int64 word numbers to return for each id, or (n, k) if they differ by id.

    Returns:
        (n, k) int64. The bits are those of ``full_word(item_key(stream, id), number)``.
    """
    # torch has no uint64 arithmetic. int64 products overflow to the same bits.
    keys = _mix_on_device(_mix_on_device(ids.long()) ^ _as_int64(stream))
    return _mix_on_device(keys.unsqueeze(1) + numbers * _as_int64(_GOLDEN))


def _mix_on_device(words: Tensor) -> Tensor:
    """Apply :func:`mix` to each word. Overflow is intended: int64 wraps to the same bits as uint64."""
    words = words + _as_int64(_GOLDEN)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        words = (words ^ shift_right(words, shift)) * _as_int64(factor)
    return words ^ shift_right(words, 31)


def shift_right(words: Tensor, count: int) -> Tensor:
    """Shift int64 ``words`` right by ``count`` bits and fill in zeros. Torch's own shift repeats the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _as_int64(word: np.uint64) -> int:
    return int(np.uint64(word).astype(np.int64))


class Csc(NamedTuple):
    """In-edges of n nodes from ``first_node`` on. A named tuple, because compiled code accepts those."""

    indptr: Array
    """(n + 1,) int64, starting at 0."""
    indices: Array
    """(E,) int32 or int64 global source ids."""
    weights: Array
    """(E,) float32 non-negative weights. Their length is 0 if all are equal."""
    first_node: int
    """First destination's global id."""
    first_edge: int
    """First edge's global id."""


class Rule(NamedTuple):
    """Sampling rule for one hop."""

    replace: bool
    """Whether an edge may be drawn more than once."""
    exclude: Array
    """(X,) int64 ascending global edge ids to exclude; usually empty."""
    by_source: bool = False
    """Whether :func:`draw_by_source` draws. It ignores weights and ``replace``."""


def merge_ids(a: Array, b: Array) -> Array:
    """Return the union of two (X,) int64 arrays with ascending distinct ids."""
    if len(a) == 0:
        return b
    if len(b) == 0:
        return a
    return np.union1d(a, b)


@njit(cache=True, nogil=True)
def _is_plain(csc: Csc, exclude: Array, start: int, end: int) -> bool:
    """Return whether all edges at the positions [start, end) are drawn, with equal probability."""
    if len(csc.weights) > 0:
        return False
    if len(exclude) == 0:
        return True
    # The edges are plain if the next excluded edge is behind them.
    next_excluded = np.searchsorted(exclude, start + csc.first_edge)
    return next_excluded == len(exclude) or exclude[next_excluded] >= end + csc.first_edge


@njit(cache=True, nogil=True)
def _list_candidates(csc: Csc, exclude: Array, start: int, end: int, out: Array) -> int:
    """Write the positions in [start, end) that may be drawn to ``out``, and return how many there are.

    Excluded edges and edges with weight 0 are left out. If ``out`` is too short, it gets the first positions,
    but all are counted. So an empty ``out`` only counts.
    """
    has_weights = len(csc.weights) > 0
    next_excluded = np.searchsorted(exclude, start + csc.first_edge)
    num_candidates = 0
    for position in range(start, end):
        edge = position + csc.first_edge
        while next_excluded < len(exclude) and exclude[next_excluded] < edge:
            next_excluded += 1
        if next_excluded < len(exclude) and exclude[next_excluded] == edge:
            continue
        if has_weights and not csc.weights[position] > 0:
            continue

        if num_candidates < len(out):
            out[num_candidates] = position
        num_candidates += 1
    return num_candidates


@njit(cache=True, nogil=True)
def count_hop(csc: Csc, nodes: Array, fanout: int, rule: Rule, indptr: Array, starts: Array) -> int:
    """Count the edges to sample. Write their row starts, and the start of each destination's in-edges.

    Args:
        csc: Structure that contains all ``nodes``.
        nodes: (K,) int64 global ids.
        fanout: Edges per destination, or -1 for all.
        indptr: (K + 1,) output.
        starts: (K,) int64 output.

    Returns:
        The largest in-degree among ``nodes``.
    """
    # Take the arrays out of their tuple before the loops. Each access would count a reference.
    ends = csc.indptr
    no_output = np.empty(0, np.int64)
    largest = 0
    total = 0
    indptr[0] = 0

    # The usual case without weights and excluded edges has its own loop, which is faster.
    if len(csc.weights) == 0 and len(rule.exclude) == 0:
        at_least = fanout if rule.replace else 0
        at_most = fanout if fanout >= 0 else ends[-1]
        for i in range(len(nodes)):
            # An unsigned index needs no check for a negative one.
            row = np.uint64(nodes[i] - csc.first_node)
            starts[i] = ends[row]
            degree = ends[row + np.uint64(1)] - starts[i]
            largest = max(largest, degree)
            if degree > 0:
                total += min(max(degree, at_least), at_most)
            indptr[i + 1] = total
        return largest

    for i in range(len(nodes)):
        row = nodes[i] - csc.first_node
        start, end = csc.indptr[row], csc.indptr[row + 1]
        degree = end - start
        starts[i] = start
        largest = max(largest, degree)
        if not _is_plain(csc, rule.exclude, start, end):
            degree = _list_candidates(csc, rule.exclude, start, end, no_output)

        if fanout >= 0 and rule.replace:
            degree = fanout if degree > 0 else 0
        elif fanout >= 0:
            degree = min(degree, fanout)
        total += degree
        indptr[i + 1] = total
    return largest


@njit(cache=True, nogil=True)
def _draw_distinct_small(key: np.uint64, degree: int, out: Array) -> None:
    """Draw len(out) distinct numbers in [0, degree) by Floyd's algorithm. The degree is at most 64."""
    # Bit v says that v has been drawn.
    bits = np.uint64(0)
    number = 0
    count = len(out)
    for i in range(count):
        last = degree - count + i
        value, number = draw_below(key, number, last + 1)
        # No earlier step could draw ``last``.
        if (bits >> np.uint64(value)) & np.uint64(1):
            value = last
        bits |= np.uint64(1) << np.uint64(value)
        out[i] = value


@njit(cache=True, nogil=True)
def _draw_distinct_large(key: np.uint64, degree: int, out: Array, bits: Array) -> None:
    """Draw like :func:`_draw_distinct_small` for any degree. ``bits`` is zero before and after the call."""
    number = 0
    count = len(out)
    for i in range(count):
        last = degree - count + i
        value, number = draw_below(key, number, last + 1)
        # Word v >> 6 has bits for 64 numbers, and v & 63 is the place of v among them.
        if (bits[value >> 6] >> np.uint64(value & 63)) & np.uint64(1):
            value = last
        bits[value >> 6] |= np.uint64(1) << np.uint64(value & 63)
        out[i] = value

    for i in range(count):
        bits[out[i] >> 6] = np.uint64(0)


@njit(cache=True, nogil=True)
def _draw_weighted(csc: Csc, stream: np.uint64, candidates: Array, out: Array, scores: Array) -> None:
    """Draw by weight without replacement (Efraimidis and Spirakis), with one keyed random number per edge.

    Args:
        candidates: Positions of the edges to draw from.
        out: Output. It receives the len(out) candidates with the smallest scores -log(u) / weight.
        scores: Workspace with the same length, which an insertion sort keeps in order.
    """
    num_kept = 0
    for position in candidates:
        draw = draw_unit(item_key(stream, position + csc.first_edge), 0)
        score = -math.log(draw) / csc.weights[position]
        if num_kept < len(out):
            slot = num_kept
            num_kept += 1
        elif score < scores[num_kept - 1]:
            # The candidate takes the place of the one with the largest score.
            slot = num_kept - 1
        else:
            continue

        while slot > 0 and scores[slot - 1] > score:
            scores[slot] = scores[slot - 1]
            out[slot] = out[slot - 1]
            slot -= 1
        scores[slot] = score
        out[slot] = position


@njit(cache=True, nogil=True)
def _draw_weighted_with_replacement(
    csc: Csc, key: np.uint64, choices: Array, out: Array, sums: Array
) -> None:
    """Draw len(out) entries from ``choices`` by weight. ``sums`` is a workspace for running weight sums."""
    total = 0.0
    for i in range(len(choices)):
        total += csc.weights[choices[i]]
        sums[i] = total

    for i in range(len(out)):
        slot = np.searchsorted(sums[: len(choices)], draw_unit(key, i) * total, side="right")
        # The product may be rounded up to the total.
        out[i] = choices[min(slot, len(choices) - 1)]


@njit(cache=True, nogil=True)
def _draw_unequal(
    csc: Csc, stream: np.uint64, key: np.uint64, rule: Rule, choices: Array, out: Array, scratch: Array
) -> None:
    """Draw len(out) entries from ``choices``, by weight if the edges have weights.

    Args:
        stream: Stream with the edges' keys, for draws by weight without replacement.
        key: The node's key, for other draws.
        choices: Positions of the node's candidate edges.
        out: Output.
        scratch: Workspace for draws by weight.
    """
    if len(out) == 0:
        return
    if len(out) == len(choices) and not rule.replace:
        for i in range(len(choices)):  # assigning a slice would compile for 2 s longer
            out[i] = choices[i]
    elif len(csc.weights) > 0 and rule.replace:
        _draw_weighted_with_replacement(csc, key, choices, out, scratch)
    elif len(csc.weights) > 0:
        _draw_weighted(csc, stream, choices, out, scratch)
    else:
        bits = np.zeros((len(choices) >> 6) + 1, np.uint64)
        draw_uniform(key, len(choices), rule.replace, out, bits)
        for i in range(len(out)):
            out[i] = choices[out[i]]


@njit(cache=True, nogil=True)
def draw_uniform(key: np.uint64, degree: int, replace: bool, out: Array, bits: Array) -> None:
    """Fill ``out`` with uniform draws in [0, degree). They are distinct unless ``replace``.

    ``bits`` is a workspace with at least degree / 64 words. It is zero before and after the call.
    """
    if replace:
        number = 0
        for i in range(len(out)):
            out[i], number = draw_below(key, number, degree)
    elif degree <= 64:
        _draw_distinct_small(key, degree, out)
    else:
        _draw_distinct_large(key, degree, out, bits)


@njit(cache=True, nogil=True)
def draw_hop(
    csc: Csc, nodes: Array, stream: np.uint64, take_all: bool, rule: Rule, space: tuple[Array, Array, int],
    edges: Array,
) -> None:  # fmt: skip
    """Draw in-edges of ``nodes``. Write their global ids to ``edges``, by destination.

    Args:
        csc: Structure that contains all ``nodes``.
        nodes: (K,) int64 global ids.
        take_all: Whether the fan-out is -1.
        space: The ``indptr``, ``starts`` and largest in-degree from :func:`count_hop`.
        edges: (indptr[-1],) output.
    """
    indptr, starts, largest = space
    ends = csc.indptr
    all_plain = len(csc.weights) == 0 and len(rule.exclude) == 0

    # Workspaces that all nodes share.
    bits = np.zeros((largest >> 6) + 1, np.uint64)
    candidates = np.empty(0 if all_plain else largest, np.int64)
    scratch = np.empty(0 if all_plain else largest, np.float64)
    for i in range(len(nodes)):
        if indptr[i] == indptr[i + 1]:
            continue
        out = edges[indptr[i] : indptr[i + 1]]
        start, end = starts[i], ends[np.uint64(nodes[i] - csc.first_node) + np.uint64(1)]
        degree = end - start

        # Plain draws count from the node's first edge. Candidates are positions in ``csc``.
        if all_plain or _is_plain(csc, rule.exclude, start, end):
            if len(out) == degree and (take_all or not rule.replace):
                for j in range(degree):
                    out[j] = j
            else:
                draw_uniform(item_key(stream, nodes[i]), degree, rule.replace, out, bits)
            first_edge = start + csc.first_edge
        else:
            num_candidates = _list_candidates(csc, rule.exclude, start, end, candidates)
            choices = candidates[:num_candidates]
            node_rule = Rule(rule.replace and not take_all, rule.exclude, False)
            _draw_unequal(csc, stream, item_key(stream, nodes[i]), node_rule, choices, out, scratch)
            first_edge = np.int64(csc.first_edge)
        for j in range(len(out)):
            out[j] += first_edge


@njit(cache=True, nogil=True)
def draw_by_source(
    csc: Csc,
    nodes: Array,
    fanout: int,
    stream: np.uint64,
    exclude: Array,
    indptr: Array,
    edges: Array,
    used: int,
) -> Array:
    """Draw sources, and keep the in-edges of ``nodes`` from drawn sources. Append their global ids.

    This is LABOR-0 (Balin and Catalyurek, "Layer-Neighbor Sampling", NeurIPS 2023). Every source has one
    draw, and an edge is kept if the draw is below fan-out / in-degree at its destination. Destinations with
    common sources therefore keep the same ones. The fan-out is the mean number of edges per destination.

    Args:
        csc: Structure that contains all ``nodes``.
        nodes: (K,) int64 global ids.
        fanout: Mean number of edges per destination; -1 for all.
        exclude: (X,) int64 ascending global edge ids to exclude. The in-degree does not count them.
        indptr: (K + 1,) output.
        edges: int64 ids. The first ``used`` ids are kept.

    Returns:
        ``edges``, or a longer copy. Its first ``used + indptr[-1]`` entries are set.
    """
    ends, indices, first_edge = csc.indptr, csc.indices, csc.first_edge
    total = used
    indptr[0] = 0
    for i in range(len(nodes)):
        row = np.uint64(nodes[i] - csc.first_node)
        start, end = ends[row], ends[row + np.uint64(1)]
        if total + end - start > len(edges):
            longer_edges = np.empty(2 * (total + end - start), np.int64)
            longer_edges[:total] = edges[:total]
            edges = longer_edges

        excluded = np.searchsorted(exclude, start + first_edge)
        last_excluded = np.searchsorted(exclude, end + first_edge)
        degree = end - start - (last_excluded - excluded)
        keep_all = fanout < 0 or fanout >= degree
        # The limit is a share of 2**64. Its rounding error is below degree / 2**64.
        limit = _MAX_WORD if keep_all else _MAX_WORD // np.uint64(degree) * np.uint64(fanout)

        # A separate loop uses vector instructions. The keys lie where the edges will be, so an edge
        # overwrites its source's key or an earlier key.
        sources, keys = indices[start:end], edges[total : total + end - start].view(np.uint64)
        for j in range(len(sources)):
            keys[j] = item_key(stream, sources[j])
        for j in range(len(sources)):
            edge = start + j + first_edge
            if excluded < last_excluded and exclude[excluded] == edge:
                excluded += 1
                continue
            # The key is read first, because the store may overwrite it. An unconditional store costs less
            # than an unpredictable branch.
            is_kept = keep_all or keys[j] < limit
            edges[np.uint64(total)] = edge
            total += int(is_kept)
        indptr[i + 1] = total - used
    return edges


@njit(cache=True, nogil=True)
def draw_edges(
    csc: Csc, nodes: Array, fanout: int, stream: np.uint64, rule: Rule
) -> tuple[Array, Array, Array]:
    """Sample in-edges of ``nodes``. Return the (K + 1,) indptr, sources and global edge ids, all int64.

    Args:
        csc: Structure that contains all ``nodes``.
        nodes: (K,) int64 global ids.
        fanout: Edges per destination; -1 for all.
    """
    indptr = np.empty(len(nodes) + 1, np.int64)
    if rule.by_source:
        no_edges = np.empty(0, np.int64)
        buffer = draw_by_source(csc, nodes, fanout, stream, rule.exclude, indptr, no_edges, 0)
        edges = buffer[: indptr[-1]]
    else:
        starts = np.empty(len(nodes), np.int64)
        largest = count_hop(csc, nodes, fanout, rule, indptr, starts)
        edges = np.empty(indptr[-1], np.int64)
        draw_hop(csc, nodes, stream, fanout < 0, rule, (indptr, starts, largest), edges)

    sources = np.empty(len(edges), np.int64)
    for i in range(len(edges)):
        sources[i] = csc.indices[edges[i] - csc.first_edge]
    return indptr, sources, edges


@njit(cache=True, nogil=True)
def draw_among(csc: Csc, nodes: Array, fanout: int, stream: np.uint64, replace: bool) -> tuple[Array, Array]:
    """Sample edges by weight. Return the (K + 1,) indptr and the edges' positions in ``csc``, both int64.

    A node's draws depend only on its id and its edges, not on other nodes in the call.

    Args:
        csc: Candidate edges. Row i has those at ``nodes[i]``. ``first_node`` and ``first_edge`` are 0.
        nodes: (K,) int64 global ids.
        fanout: Edges per node, or -1 for all with a weight above 0.
        replace: Whether an edge may be drawn more than once.
    """
    rule = Rule(replace and fanout >= 0, np.empty(0, np.int64), False)
    indptr = np.empty(len(nodes) + 1, np.int64)
    starts = np.empty(len(nodes), np.int64)
    largest = count_hop(csc, np.arange(len(nodes)), fanout, rule, indptr, starts)
    positions = np.empty(indptr[-1], np.int64)
    candidates, scratch = np.empty(largest, np.int64), np.empty(largest, np.float64)
    for i in range(len(nodes)):
        start, end = csc.indptr[i], csc.indptr[i + 1]
        num_candidates = _list_candidates(csc, rule.exclude, start, end, candidates)
        choices = candidates[:num_candidates]
        out = positions[indptr[i] : indptr[i + 1]]

        # An edge's key is its place among the node's edges, so that other nodes do not matter.
        node_csc = Csc(csc.indptr, csc.indices, csc.weights, 0, -start)
        key = item_key(stream, nodes[i])
        _draw_unequal(node_csc, key, key, rule, choices, out, scratch)
    return indptr, positions
