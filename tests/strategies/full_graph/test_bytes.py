"""Full-graph training moves the bytes that docs/strategies say, inside a server and between servers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, Array
from tests.helpers import wide
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.full_graph import runs
from tests.strategies.test_equality import TOLERANCE, difference

EPOCHS, SIZE = 3, 8
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "full_graph": ("full_graph", {}),
    "full_graph, features anew": ("full_graph", {"use_pp": False}),
    "hops 0": ("shared_preload", {"hops": 0}),
    "hops 1": ("shared_preload", {"hops": 1}),
    "hops 1, features anew": ("shared_preload", {"hops": 1, "use_pp": False}),
    "hops 2": ("shared_preload", {"hops": 2}),
    "all hops": ("shared_preload", {}),
    "all hops, features anew": ("shared_preload", {"use_pp": False}),
}
WIDTHS = {1: equality.WIDTH, 2: equality.HIDDEN}
"""Columns of what goes into each layer."""


@dataclass
class Notes:
    weights: list[Any]
    making: Counter[tuple[str, bool]]
    """Bytes by phase and whether they left the server, until the first epoch."""
    moved: list[Counter[tuple[str, bool]]]
    """The same for each epoch."""
    rows: list[Array]
    """Global ids of this rank's rows of every level."""
    external_nodes: int


def train(g: DistGraph, name: str, options: dict[str, Any]) -> Notes:
    module, before = runs.first_model("sage"), g.session.ledger.snapshot()
    strategy, loader = runs.open_loader(g, name, options)
    model = strategy.wrap(module)
    moved = [runs.moved_since(g.session, before)]
    for _ in range(EPOCHS):
        before = g.session.ledger.snapshot()
        weights = runs.train(module, model, runs.batches_of(loader), epochs=1)
        moved.append(runs.moved_since(g.session, before))
    plan = loader._kept.plan
    return Notes(weights, moved[0], moved[1:], [*map(plan.rows, range(3))], plan.external_nodes)


def on_rank(folder: str) -> tuple[dict[str, Notes], dict[str, Any]]:
    with start_session(timeout_s=60) as session:
        g = DistGraph(folder)
        results = {name: train(g, *run) for name, run in RUNS.items()}
        facts = {
            "original": g.orig_ids(np.arange(equality.NUM_NODES), NODE_TYPE).numpy(),
            "inner": g.local_nodes().numpy(),
            "servers": session.topology.server_of_rank,
        }
        g.barrier()
        return results, facts


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(1, 1), (4, 2), *wide((2, 2), (2, 1), (3, 1))])
def test_bytes_are_those_of_the_formula(folder: Path, ranks: int, ranks_per_server: int) -> None:
    results = run_ranks(on_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)
    servers = results[0][1]["servers"]
    outside, expected = {}, runs.one_process(runs.first_model("sage"), epochs=EPOCHS)
    for name, (_, options) in RUNS.items():
        notes = [result[name] for result, _ in results]
        pairs = halo_pairs(notes, results[0][1]["original"], servers)
        check(notes, pairs, use_pp=options.get("use_pp", True))
        outside[name] = halo_bytes(notes, True)
        for note in notes:
            assert difference(note.weights, expected) <= TOLERANCE, name
        check_preload(notes, [facts["inner"] for _, facts in results], servers, pairs, name)
    for name in ("hops 2", "all hops", "all hops, features anew"):
        assert outside[name] == 0
    if len(set(servers)) > 1:
        assert outside["full_graph, features anew"] > outside["hops 1, features anew"] > 0
        # What is sent once has no share in the epochs: the first hop costs them nothing either way.
        assert outside["full_graph"] == outside["hops 0"] > 0
        assert outside["hops 1"] == outside["hops 1, features anew"]


def halo_bytes(notes: Sequence[Notes], outside: bool) -> int:
    return sum(
        moved[phase, outside]
        for note in notes
        for moved in note.moved
        for phase in ("halo", "halo_gradients")
    )


def halo_pairs(notes: Sequence[Notes], original: Array, servers: Sequence[int]) -> Counter[tuple[int, bool]]:
    """(layer, whether between servers) to the number of (source, rank that needs it) pairs.

    By the whole graph and who holds which rows alone.
    """
    raw = equality.raw_graph()
    new_of = np.empty(len(original), np.int64)
    new_of[original] = np.arange(len(original))
    sources, targets = (new_of[ends] for ends in raw.edges[EDGE_TYPE])
    pairs: Counter[tuple[int, bool]] = Counter()
    for layer in WIDTHS:
        for rank, note in enumerate(notes):
            needed = np.unique(sources[np.isin(targets, note.rows[layer])])
            for node in np.setdiff1d(needed, note.rows[layer - 1]):
                holders = [r for r, note_of_rank in enumerate(notes) if node in note_of_rank.rows[layer - 1]]
                same = any(servers[r] == servers[rank] for r in holders)
                assert holders
                pairs[layer, not same] += 1
    return pairs


def check(notes: Sequence[Notes], pairs: Counter[tuple[int, bool]], *, use_pp: bool) -> None:
    for outside in (False, True):
        first, second = (pairs[layer, outside] * WIDTHS[layer] * SIZE for layer in WIDTHS)
        for epoch in range(EPOCHS):
            moved = sum((note.moved[epoch] for note in notes), Counter())
            assert moved["halo", outside] == second + (0 if use_pp else first)
            assert moved["halo_gradients", outside] == second
            assert moved["preload", outside] == moved["features", outside] == moved["labels", outside] == 0


def check_preload(
    notes: Sequence[Notes],
    inner: Sequence[Array],
    servers: Sequence[int],
    pairs: Counter[tuple[int, bool]],
    name: str,
) -> None:
    """A row of another server comes once per server, for F x s and 8 bytes of its id; the halo besides."""
    moved = sum((note.making for note in notes), Counter())
    external = 0
    for server in set(servers):
        members = [rank for rank, of in enumerate(servers) if of == server]
        rows = np.concatenate([notes[rank].rows[0] for rank in members])
        # Nobody holds what another rank of the server holds.
        assert len(np.unique(rows)) == len(rows)
        outside = np.setdiff1d(rows, inner[members[0]])
        assert len(outside) == notes[members[0]].external_nodes
        external += len(outside)
    if name.startswith(("full_graph", "hops 0")):
        assert external == 0
    row_bytes = equality.WIDTH * SIZE
    for outside in (False, True):
        halo = pairs[1, outside] * row_bytes if RUNS[name][1].get("use_pp", True) else 0
        assert moved["preload", outside] == halo + (external * (row_bytes + 8) if outside else 0), name
