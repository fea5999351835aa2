"""Generate graphs from a degree-corrected stochastic block model, with features, labels and splits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numba import njit

from dglx_dist.data.external_memory import Spill
from dglx_dist.data.sources import DatasetSource
from dglx_dist.data.storage.columns import (
    IDS,
    FileInfo,
    data_path,
    edge_folder,
    id_dtype,
    make_column_info,
    node_folder,
    write_column,
)
from dglx_dist.data.storage.files import name_write_failures, partial_folder
from dglx_dist.data.storage.manifest import Manifest, check_target, put_in_place, write_manifest
from dglx_dist.data.storage.reader import load_raw_graph, open_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import full_word, mix
from dglx_dist.options import (
    Check,
    at_least,
    between,
    check_ranges,
    option,
    parse_literal,
    read_options,
    types_in,
)
from dglx_dist.progress import progress
from dglx_dist.records import EDGE_TYPE, FEATURE, LABEL, NODE_TYPE, SPLITS, Array, ColumnInfo, RawGraph

_PAIRS_AT_ONCE = 1 << 21
_STUBS_PER_NODE = 16
_MAX_ROUNDS = 50
_SHOWN_FROM = 5_000_000


@dataclass(frozen=True, kw_only=True)
class _Stubs:
    """Nodes repeated in proportion to their weights, so that a uniform draw is a weighted draw."""

    nodes: Array
    """(T,) int32 nodes, ordered by community."""
    first: Array
    """(communities + 1,) int64. Community c is at ``first[c]:first[c + 1]``."""


def draw_edges(
    config: SyntheticConfig, communities: Array, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Draw distinct links without self-loops until there are nodes x degree edges.

    Every node gets a link first, so that none is isolated. The other links are drawn by weight. Repeated
    links and self-loops are dropped and drawn again. ``communities`` come from :func:`assign_communities`.
    Return the (E,) source and destination ids, sorted by (source, destination), int32 or int64 above 2**31
    nodes.
    """
    num_nodes = config.nodes
    stubs = _make_stubs(config, communities, generator)
    num_links = round(num_nodes * config.degree / 2)
    keys = np.empty(0, dtype=np.int64)
    first_ends: Array = np.arange(num_nodes, dtype=id_dtype(num_nodes))
    with progress("drawing edges", num_links, enabled=num_links >= _SHOWN_FROM) as advance:
        for _ in range(_MAX_ROUNDS):
            count = num_links - len(keys)
            new_keys = _sort_distinct(_draw_keys(config, communities, stubs, first_ends, count, generator))
            num_before = len(keys)
            keys = _merge_keys(keys, new_keys) if num_before else new_keys
            del new_keys
            advance(len(keys) - num_before)
            if len(keys) >= num_links:
                break
            first_ends = _find_isolated(keys, num_nodes)

    return _add_directions(keys, num_nodes)


def _make_stubs(config: SyntheticConfig, communities: Array, generator: np.random.Generator) -> _Stubs:
    num_nodes = config.nodes
    weights = _draw_weights(config, generator, _STUBS_PER_NODE)
    # Weights are rounded up with a probability equal to their fraction, which keeps the expectation.
    copies = np.maximum(1, np.floor(weights + generator.random(num_nodes))).astype(np.int64)
    order = np.argsort(communities, kind="stable").astype(id_dtype(num_nodes))
    num_stubs = np.bincount(communities, copies, config.num_communities).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(num_stubs)]).astype(np.int64)
    return _Stubs(nodes=np.repeat(order, copies[order]), first=starts)


def _draw_weights(config: SyntheticConfig, generator: np.random.Generator, mean: float) -> Array:
    # This inverts the power law's distribution function. The smallest weight is 1.
    weights = (1.0 - generator.random(config.nodes)) ** (-1.0 / (config.exponent - 1.0))
    # A hub has at most about half a community as distinct neighbours.
    size = config.nodes / config.num_communities
    np.minimum(weights, max(2.0, weights.mean() * size / (2 * config.degree)), out=weights)
    weights *= mean / weights.mean()
    return weights


def _draw_keys(
    config: SyntheticConfig,
    communities: Array,
    stubs: _Stubs,
    first_ends: Array,
    num_links: int,
    generator: np.random.Generator,
) -> Array:
    """Draw at most ``num_links`` links without self-loops, as unsorted keys ``lower id x N + higher id``."""
    keys = np.empty(num_links, dtype=np.int64)
    num_written = 0
    for first in range(0, num_links, _PAIRS_AT_ONCE):
        count = min(_PAIRS_AT_ONCE, num_links - first)
        given_ends = first_ends[first : first + count]
        drawn_ends = stubs.nodes[generator.integers(0, len(stubs.nodes), count - len(given_ends))]
        first_end = np.concatenate([given_ends, drawn_ends])
        second_end = _draw_neighbours(config, communities[first_end], stubs, generator)
        is_link = first_end != second_end
        low = np.minimum(first_end, second_end)[is_link].astype(np.int64)
        low *= config.nodes
        low += np.maximum(first_end, second_end)[is_link]
        keys[num_written : num_written + len(low)] = low
        num_written += len(low)

    return keys[:num_written]


def _draw_neighbours(
    config: SyntheticConfig, communities: Array, stubs: _Stubs, generator: np.random.Generator
) -> Array:
    """Draw one neighbour for each node, with a probability in proportion to the neighbour's weight.

    ``communities`` are by node. A community is a block within a class. With probability ``homophily *
    locality`` a neighbour is in the same community, and with ``homophily`` in the same class.
    """
    count = len(communities)
    num_classes = config.classes
    num_blocks = config.num_communities // num_classes
    classes = communities % num_classes
    blocks = communities // num_classes
    uniform = generator.random(count, dtype=np.float32)
    leaves_block = uniform >= config.homophily * config.locality
    leaves_class = uniform >= config.homophily if num_classes > 1 else np.zeros(count, dtype=np.bool_)
    if num_blocks > 1:
        # Within the class, a step of at least 1 leads to another block. In another class, all blocks are
        # possible, so the step may be 0.
        step = generator.integers(1, num_blocks, count, dtype=np.int32)
        step_in_other_class = generator.integers(0, num_blocks, count, dtype=np.int32)
        step = np.where(leaves_class, step_in_other_class, step)
        blocks = np.where(leaves_block, (blocks + step) % num_blocks, blocks)

    if num_classes > 1:
        class_step = generator.integers(1, num_classes, count, dtype=np.int32)
        classes = np.where(leaves_class, (classes + class_step) % num_classes, classes)
    target = blocks * num_classes + classes
    begin = stubs.first[target]
    position = generator.random(count)
    position *= stubs.first[target + 1] - begin
    return stubs.nodes[begin + position.astype(np.int64)]


def _sort_distinct(keys: Array) -> Array:
    keys.sort()
    is_first = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    return keys[is_first]


def _merge_keys(keys: Array, new_keys: Array) -> Array:
    position = np.searchsorted(keys, new_keys)
    is_known = keys[np.minimum(position, len(keys) - 1)] == new_keys
    return np.insert(keys, position[~is_known], new_keys[~is_known])


def _find_isolated(keys: Array, num_nodes: int) -> Array:
    has_link = np.zeros(num_nodes, dtype=np.bool_)
    for first in range(0, len(keys), _PAIRS_AT_ONCE):
        piece = keys[first : first + _PAIRS_AT_ONCE]
        has_link[piece // num_nodes] = True
        has_link[piece % num_nodes] = True
    return np.flatnonzero(~has_link).astype(id_dtype(num_nodes))


def _add_directions(keys: Array, num_nodes: int) -> tuple[Array, Array]:
    num_links = len(keys)
    directed_keys = np.empty(2 * num_links, dtype=np.int64)
    for first in range(0, num_links, _PAIRS_AT_ONCE):
        piece = keys[first : first + _PAIRS_AT_ONCE]
        directed_keys[first : first + len(piece)] = piece
        reverse = piece % num_nodes * num_nodes + piece // num_nodes
        directed_keys[num_links + first : num_links + first + len(piece)] = reverse

    del keys
    directed_keys.sort()
    ends = np.empty((2, len(directed_keys)), dtype=id_dtype(num_nodes))
    for first in range(0, len(directed_keys), _PAIRS_AT_ONCE):
        piece = directed_keys[first : first + _PAIRS_AT_ONCE]
        ends[:, first : first + len(piece)] = divmod(piece, num_nodes)
    return ends[0], ends[1]


_FEATURE_VALUES_AT_ONCE = 1 << 22


_share = partial(option, check=between(0, 1))


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Settings of a synthetic graph."""

    nodes: int = option(20_000, "Number of nodes.", check=at_least(2))
    degree: float = 25.0
    """Mean in-degree. There are nodes x degree stored edges, counting both directions."""
    classes: int = option(10, "Number of classes.", check=at_least(1))
    features: int = option(100, "Number of columns of ``feat``, or 0 for none.", check=at_least(0))
    homophily: float = _share(0.8, "Share of edges between nodes of the same class, before ``label_noise``.")
    locality: float = _share(0.9, "Share of those same-class edges that stay within one community.")
    exponent: float = option(
        2.5,
        "Exponent of the power law of the degrees. Smaller values give larger hubs.",
        check=Check(lambda value: value > 2, "above 2, so that the mean degree exists"),
    )
    communities: int = 0
    """Number of communities, a multiple of ``classes``. 0 means that it grows with sqrt(nodes)."""
    signal: float = option(
        0.15,
        "Distance of a class's mean feature from zero per column. Noise has standard deviation 1.",
        check=at_least(0),
    )
    label_noise: float = _share(0.05, "Share of nodes with a random label, so that no model is perfect.")
    train_rate: float = _share(0.1, "Share of nodes that are training nodes (label rate).")
    val_rate: float = _share(0.1, "Share of nodes that are validation nodes.")
    test_rate: float = _share(0.2, "Share of nodes that are test nodes.")
    skew: float = _share(0.0, "Share of training nodes in one tenth of the communities. 0 spreads evenly.")
    seed: int = option(0, "Random seed.", check=at_least(0))

    def __post_init__(self) -> None:
        check_ranges(self, "{name}={value!r} of the synthetic graph")
        if self.train_rate + self.val_rate + self.test_rate > 1 + 1e-9:
            raise ConfigError(
                f"train_rate={self.train_rate}, val_rate={self.val_rate} and "
                f"test_rate={self.test_rate} sum to more than 1; lower one of them"
            )

        count = self.num_communities
        self._require(
            count % self.classes == 0 and 0 < count <= self.nodes,
            "communities",
            f"a multiple of classes={self.classes} and at most nodes={self.nodes}",
        )

        # Links are drawn until all are distinct, which takes too long in a nearly complete community.
        limit = self.nodes / count / 2
        self._require(
            2 <= self.degree <= limit,
            "degree",
            f"between 2 and {limit:g}, half of a community of nodes / communities = "
            f"{self.nodes} / {count}; use more nodes or fewer communities",
        )

    @property
    def num_communities(self) -> int:
        """``communities``, or by default communities of about 3.5 sqrt(nodes) nodes."""
        if self.communities:
            return self.communities
        size = max(20 * self.degree, 3.5 * self.nodes**0.5)
        return self.classes * max(1, int(self.nodes / (self.classes * size)))

    def _require(self, is_valid: bool, name: str, expected: str) -> None:
        if not is_valid:
            raise ConfigError(f"{name}={getattr(self, name)!r} of the synthetic graph must be {expected}")


def parse_config(text: str, options: Mapping[str, object]) -> SyntheticConfig:
    """Parse settings such as ``nodes=20000,degree=25``. ``options`` override them."""
    settings: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"{item!r} in synthetic:{text} is not of the form name=value")
        settings[name.strip()] = parse_literal(value.strip())

    types = types_in(SyntheticConfig)
    settings = settings | {**options}
    for name, setting in settings.items():
        if isinstance(setting, float) and setting.is_integer() and types.get(name) is int:
            settings[name] = int(setting)  # It may be written as 2e4.
    return read_options("the synthetic graph", SyntheticConfig, settings)


def generate(config: SyntheticConfig) -> RawGraph:
    """Generate the graph that ``config`` describes. The result is deterministic. Not collective.

    Every node has an in-edge, see :func:`draw_edges`. The columns are feat, (N, F) float32, label, (N,)
    int64, and the splits with a rate above zero. Memory stays below three times the result.
    """
    communities = assign_communities(config)
    source_ids, destination_ids = draw_edges(config, communities, _make_generator(config, stage=1))
    true_classes = communities % config.classes
    columns: dict[str, Array] = {}
    if config.features:
        columns[FEATURE] = np.empty((config.nodes, config.features), dtype=np.float32)
        offset = 0
        for rows in _draw_features(config, true_classes):
            columns[FEATURE][offset : offset + len(rows)] = rows
            offset += len(rows)

    columns[LABEL] = _labels(config, true_classes)
    columns.update(_draw_splits(config, communities))
    return RawGraph(
        name="synthetic",
        num_nodes={NODE_TYPE: config.nodes},
        edges={EDGE_TYPE: (source_ids, destination_ids)},
        node_data={NODE_TYPE: columns},
        num_classes={NODE_TYPE: config.classes},
    )


def assign_communities(config: SyntheticConfig) -> Array:
    """Return the (N,) int32 communities. A node's class is its community modulo ``classes``."""
    communities = np.arange(config.nodes, dtype=np.int32) % config.num_communities
    return _make_generator(config, stage=0).permutation(communities)


_ROWS_AT_ONCE = 1 << 20
_ROUNDS = 4
"""Rounds in the permutation's Feistel network."""


def write_streamed(config: SyntheticConfig, folder: Path, *, feature_dtype: str = "float32") -> Manifest:
    """Write a graph like :func:`generate` does, as a dataset with one part, without its edges in memory.

    It takes about 80 bytes of memory per node, and 4 bytes of temporary file per edge. The mean degree is
    slightly below ``config.degree``, because repeated links are dropped, and a few nodes may have no link.
    Not collective.

    Args:
        config: What to generate.
        folder: Where to write.
        feature_dtype: float16, float32 or float64.

    Raises:
        StorageError: If ``folder`` is not empty.
    """
    folder = Path(folder).absolute()
    check_target(folder, None)
    edges = edge_folder(0, EDGE_TYPE)
    nodes = node_folder(0, NODE_TYPE)
    files = dict[str, FileInfo]()
    ids = ColumnInfo(dtype=id_dtype(config.nodes).__name__, row_shape=())
    communities = assign_communities(config)
    true_classes = communities % config.classes
    columns: dict[str, ColumnInfo] = {}
    with name_write_failures(folder), partial_folder(folder) as partial:

        def write(path: str, info: ColumnInfo, num_rows: int, chunks: Iterable[Array]) -> None:
            files[path] = write_column(partial / path, info, num_rows, chunks)

        def write_data(name: str, info: ColumnInfo, chunks: Iterable[Array]) -> None:
            columns[name] = info
            write(data_path(nodes, name), info, config.nodes, chunks)

        sources = Spill(partial / "sources", ids.dtype)
        indptr = _stream_edges(config, communities, sources)
        num_edges = sources.num_rows
        write(f"{edges}/indptr.arrow", IDS, config.nodes + 1, [indptr])
        write(f"{edges}/indices.arrow", ids, num_edges, sources.chunks(_ROWS_AT_ONCE))
        sources.path.unlink()

        for owner, count in ((edges, num_edges), (nodes, config.nodes)):
            starts = range(0, count, _ROWS_AT_ONCE)
            numbers = (np.arange(first, min(first + _ROWS_AT_ONCE, count)) for first in starts)
            write(f"{owner}/original_ids.arrow", IDS, count, numbers)

        if config.features:
            rows = (piece.astype(feature_dtype) for piece in _draw_features(config, true_classes))
            write_data(FEATURE, ColumnInfo(dtype=feature_dtype, row_shape=(config.features,)), rows)
        labels_and_masks = {LABEL: _labels(config, true_classes), **_draw_splits(config, communities)}
        for name, values in labels_and_masks.items():
            write_data(name, make_column_info(values, name), [values])
        manifest = Manifest(
            name="synthetic",
            num_parts=1,
            node_offsets={NODE_TYPE: np.array([0, config.nodes], np.int64)},
            edge_offsets={EDGE_TYPE: np.array([0, num_edges], np.int64)},
            node_columns={NODE_TYPE: columns},
            edge_columns={EDGE_TYPE: {}},
            num_classes={NODE_TYPE: config.classes},
            user_ids={},
            method="synthetic",
            seed=config.seed,
            parameters=dataclasses.asdict(config),
            files=files,
        )
        manifest = write_manifest(manifest, partial)
        put_in_place(partial, folder, None)
    return manifest


class _HalfLinks(NamedTuple):
    """The nodes' half-links on three levels: within a community, within a class, and in the whole graph.

    A keyed permutation per community, class or graph joins half-links in pairs. So either end of a link can
    compute the other end without a table.
    """

    order: Array
    """(N,) nodes ordered by class and community."""
    position: Array
    """(N,) position in ``order`` by node."""
    community: Array
    """(N,) community by node, numbered by class."""
    starts: Array
    """(communities + 1,) int64 position where each community starts."""
    ends: Array
    """(3, N + 1) int64. On level l, node i in ``order`` has the half-links ``ends[l, i]:ends[l, i + 1]``."""
    spans: Array
    """(3,) int64: how many communities a permutation spans on each level."""
    keys: Array
    """(3,) uint64 key by level."""


def _make_half_links(config: SyntheticConfig, communities: Array) -> _HalfLinks:
    generator = _make_generator(config, stage=1)
    count = config.num_communities
    classes = config.classes
    blocks = count // classes
    community = (communities % classes) * blocks + communities // classes
    order = np.argsort(community, kind="stable").astype(id_dtype(config.nodes))
    position = np.empty_like(order)
    position[order] = np.arange(config.nodes, dtype=order.dtype)
    starts = np.searchsorted(community[order], np.arange(count + 1))

    # Links on the last level may also reach the own class.
    far_share = min(1.0, (1 - config.homophily) * classes / (classes - 1)) if classes > 1 else 0.0
    near_share = min(config.homophily * config.locality, 1 - far_share)
    spans = np.array([1, blocks, count])
    weights = _draw_weights(config, generator, config.degree)
    ends = np.zeros((3, config.nodes + 1), np.int64)
    for level, share in enumerate((near_share, 1 - far_share - near_share, far_share)):
        counts = ends[level, 1:]
        counts[:] = weights * share + generator.random(config.nodes)
        if level == 0:
            np.maximum(counts, 1, out=counts)
        np.cumsum(counts, out=counts)

        # Half-links are joined in pairs, so if their number is odd, the last node gets one more.
        last = starts[:: spans[level]][1:]
        is_odd = np.diff(ends[level, last], prepend=0) & 1
        extra = np.zeros(config.nodes + 1, np.int8)
        np.add.at(extra, last, is_odd)
        ends[level] += np.cumsum(extra, dtype=np.int32)

    keys = generator.integers(0, 1 << 63, 3, dtype=np.uint64)
    return _HalfLinks(
        order=order, position=position, community=community, starts=starts, ends=ends, spans=spans, keys=keys
    )


def _stream_edges(config: SyntheticConfig, communities: Array, sources: Spill) -> Array:
    """Append all edges' sources by (destination, source), and return the (N + 1,) row pointers."""
    links = _make_half_links(config, communities)
    indptr = np.zeros(config.nodes + 1, np.int64)
    step = max(1, int(_ROWS_AT_ONCE / config.degree))
    total = int(links.ends[:, -1].sum())
    with progress("drawing edges", total, enabled=total >= _SHOWN_FROM) as advance:
        for first in range(0, config.nodes, step):
            positions = links.position[first : first + step]
            num_half_links = int((links.ends[:, positions + 1] - links.ends[:, positions]).sum())
            buffer = np.empty(num_half_links, links.order.dtype)
            count = _draw_sources(links, first, buffer, indptr[first + 1 : first + 1 + len(positions)])
            sources.append(buffer[:count])
            advance(num_half_links)

    return np.cumsum(indptr, out=indptr)


@njit(cache=True, nogil=True)
def _draw_sources(links: _HalfLinks, node: int, out: Array, counts: Array) -> int:
    """Write the ascending distinct sources for ``node`` and the following nodes, and count them."""
    order, position, community, starts, ends, spans, keys = links
    total = 0
    for i in range(len(counts)):
        start, home = total, position[node + i]
        for level in range(len(spans)):
            segment = community[node + i] // spans[level]
            low, high = starts[segment * spans[level]], starts[(segment + 1) * spans[level]]
            offsets = ends[level, low : high + 1]
            size, key = offsets[-1] - offsets[0], mix(keys[level] ^ np.uint64(segment))
            for half_link in range(ends[level, home], ends[level, home + 1]):
                mate = _permute(half_link - offsets[0], size, key, False) ^ 1  # Pairs are (0, 1), (2, 3) ...
                partner = offsets[0] + _permute(mate, size, key, True)
                neighbor = low + np.searchsorted(offsets, partner, side="right") - 1
                if neighbor != home:
                    out[total] = order[neighbor]
                    total += 1

        out[start:total].sort()
        # Repeated sources are dropped in place.
        end, total = total, start
        for index in range(start, end):
            if total == start or out[index] != out[total - 1]:
                out[total] = out[index]
                total += 1

        counts[i] = total - start
    return total


@njit(cache=True, nogil=True)
def _permute(index: int, size: int, key: np.uint64, inverse: bool) -> int:
    """Return where a keyed permutation of [0, size) puts ``index``, or with ``inverse`` the reverse.

    The permutation is a Feistel network over a square's rows and columns (Black and Rogaway 2002). It is
    repeated until the result is below ``size``.
    """
    width = int(math.sqrt(size)) + 1
    height = (size + width - 1) // width
    while True:
        row, column = index // width, index % width
        for step in range(_ROUNDS):
            round_index = _ROUNDS - 1 - step if inverse else step
            fixed_part, bound = (row, width) if round_index & 1 else (column, height)
            word = np.int64(full_word(key, _ROUNDS * fixed_part + round_index) >> np.uint64(32))
            shift = int((word * bound) >> 32)
            if inverse:
                shift = bound - shift
            if round_index & 1:
                column += shift if column + shift < width else shift - width
            else:
                row += shift if row + shift < height else shift - height
        index = row * width + column
        if index < size:
            return index


_NODE_BYTES = 80
"""Memory bytes per node while a graph is streamed."""


@final
class SyntheticSource(DatasetSource):
    """A synthetic graph, such as ``synthetic:nodes=20000,degree=25``. Options are those of SyntheticConfig.

    If memory is limited and :func:`generate` exceeds it, :func:`write_streamed` makes the graph.
    """

    external = True

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        self._config = parse_config(location, options)

    def load(self) -> RawGraph:
        config, workspace = self._config, self.workspace
        num_bytes = 3 * config.nodes * (math.ceil(8 * config.degree) + 4 * config.features + 12)
        if workspace is None:
            return generate(config)

        # The two functions make different graphs, so a resumed run must use the same one.
        is_small = workspace.array("generator", lambda: np.array([workspace.fits(num_bytes)]))
        if is_small[0]:
            return generate(config)
        workspace.remaining(_NODE_BYTES * config.nodes, 0, f"making {config.nodes} nodes")
        folder = workspace.stage("synthetic", lambda partial: write_streamed(config, partial / "dataset"))
        return load_raw_graph(open_dataset(folder / "dataset"), workspace)


def _make_generator(config: SyntheticConfig, stage: int) -> np.random.Generator:
    # Each stage has its own random stream. So the edges do not depend on the feature count.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([config.seed, stage])))


def _draw_features(config: SyntheticConfig, true_classes: Array) -> Iterator[Array]:
    generator = _make_generator(config, stage=2)
    centres = generator.standard_normal((config.classes, config.features), dtype=np.float32)
    centres *= np.float32(config.signal)
    rows_at_once = max(1, _FEATURE_VALUES_AT_ONCE // config.features)
    for first in range(0, config.nodes, rows_at_once):
        classes = true_classes[first : first + rows_at_once]
        yield generator.standard_normal((len(classes), config.features), dtype=np.float32) + centres[classes]


def _labels(config: SyntheticConfig, true_classes: Array) -> Array:
    generator = _make_generator(config, stage=3)
    labels = true_classes.astype(np.int64)
    is_random = generator.random(config.nodes) < config.label_noise
    labels[is_random] = generator.integers(0, config.classes, int(is_random.sum()))
    return labels


def _draw_splits(config: SyntheticConfig, communities: Array) -> dict[str, Array]:
    generator = _make_generator(config, stage=4)
    order = generator.permutation(config.nodes)
    rates = (config.train_rate, config.val_rate, config.test_rate)
    num_train, num_val, num_test = (round(rate * config.nodes) for rate in rates)
    is_hot = communities[order] < max(1, config.num_communities // 10)
    hot, cold = order[is_hot], order[~is_hot]
    even_share = round(num_train * len(hot) / config.nodes)
    num_hot = min(even_share + round(config.skew * (num_train - even_share)), len(hot))
    num_others = min(num_train - num_hot, len(cold))
    train = np.concatenate([hot[:num_hot], cold[:num_others]])
    remaining = generator.permutation(np.concatenate([hot[num_hot:], cold[num_others:]]))
    ids_of_splits = (train, remaining[:num_val], remaining[num_val : num_val + num_test])
    masks = {}
    for name, ids in zip(SPLITS, ids_of_splits, strict=True):
        if len(ids):
            masks[name] = np.zeros(config.nodes, np.bool_)
            masks[name][ids] = True
    return masks
