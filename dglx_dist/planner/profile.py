"""Measured or assumed speed of links, of memory, and of training steps of the real model."""

from __future__ import annotations

import copy
import logging
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dgl
import numpy as np
import psutil
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dglx_dist.comm.collectives import barrier, gather_json
from dglx_dist.comm.devices import synchronize
from dglx_dist.comm.exchange import Incoming, Outgoing, row_exchanges
from dglx_dist.comm.session import Session
from dglx_dist.dataloading.loader import DataLoader
from dglx_dist.errors import ConfigError
from dglx_dist.internals.message_passing import place
from dglx_dist.layers.dropout import ids_of_pass, install_node_dropouts
from dglx_dist.layers.tracer import MODEL_ERRORS
from dglx_dist.planner.workload import sizes_of
from dglx_dist.records import FEATURE, Array
from dglx_dist.strategies.base import float_of
from dglx_dist.strategies.cost import Draws, ModelShape, Rates
from dglx_dist.strategies.full_graph.memory_estimate import evenly_spaced, most_timed_seeds

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_FIRST_BYTES, _MOST_BYTES = 32 * 1024, 64 * 2**20
_LONG_ENOUGH_S = 0.1
"""A round of this duration shows the rate; the first is not counted, as it begins with a burst."""
_SMALL_ROUNDS = 10
_EXCHANGE_NAME = "probe of the links"
PROBE_PHASE = "link_probe"
"""Of the ledger."""
_REPETITIONS, _MOST_REPETITIONS = 3, 9
_REPEATED_S = 2.0
"""After this time no disturbed repetition is replaced."""
_UNDISTURBED = 0.05
"""Largest share of an undisturbed repetition that was spent waiting for a core."""


def repeated(run: Callable[[], float]) -> list[float]:
    """Call ``run``, which returns seconds, and return those of the 3 least disturbed calls.

    It is called until 3 were undisturbed, at most 9 times, and within about 2 s if 3 calls take no longer. A
    call is disturbed if more than a twentieth of its duration was stolen by the host of a virtual machine,
    or spent by threads of this process waiting for a core.
    """
    found, first = list[tuple[float, float]](), time.perf_counter()
    while sum(share <= _UNDISTURBED for share, _ in found) < _REPETITIONS:
        begin, waited = time.perf_counter(), _waiting_s()
        if len(found) >= _MOST_REPETITIONS or (len(found) >= _REPETITIONS and begin - first > _REPEATED_S):
            break
        seconds = run()
        share = (_waiting_s() - waited) / max(time.perf_counter() - begin, 1e-9)
        found.append((share, seconds))
    return [seconds for _, seconds in sorted(found)[:_REPETITIONS]]


def _waiting_s() -> float:
    """Return the seconds that were stolen of any core, or spent by any thread in the run queue (Linux)."""
    waited = float(getattr(psutil.cpu_times(), "steal", 0.0))
    for task in Path("/proc/self/task").glob("*/schedstat"):
        # The thread may have ended meanwhile.
        with suppress(OSError):
            waited += 1e-9 * int(task.read_text().split()[1])
    return waited


def half_range(seconds: Sequence[float]) -> float:
    """Return half of the range of ``seconds``, relative to their median."""
    return (max(seconds) - min(seconds)) / (2 * max(statistics.median(seconds), 1e-12))


@dataclass(frozen=True, kw_only=True)
class Links:
    """Payload per second in both directions at once, and latency of a small message."""

    external_bytes_per_s: float
    """Of the slowest server's card."""
    internal_bytes_per_s: float
    """Of all ranks of a server in total."""
    latency_s: float
    """Between servers; between ranks if there is one server."""
    spread: float = 0.0
    """Relative half-range of the repeated rounds."""


def probe(session: Session, *, seconds: float = 2.0) -> Links:
    """Time messages around rings of ranks, first between servers and then within them, for about ``seconds``.

    Collective, and the same on all ranks; without limits for one rank. The session should be idle.
    The ledger counts the messages as :data:`PROBE_PHASE`.
    """
    topology = session.topology
    if topology.world_size == 1:
        return Links(external_bytes_per_s=1e12, internal_bytes_per_s=1e12, latency_s=0.0)
    servers = [topology.ranks_of_server(server) for server in range(topology.num_servers)]
    across = _ring_neighbours([ranks[0] for ranks in servers], topology.rank)
    inside = _ring_neighbours(servers[topology.server], topology.rank)
    external = _bandwidth(session, across, seconds / 2) if len(servers) > 1 else None
    internal = _bandwidth(session, inside, seconds / 2) if max(map(len, servers)) > 1 else None
    neighbors = inside if external is None else across
    took = sum(_time_swap(session, neighbors, 8) for _ in range(_SMALL_ROUNDS)) / _SMALL_ROUNDS
    latency = _longest(session, took)
    if internal is not None:
        # Each rank of the ring within a server moves this much.
        internal = internal[0] * len(servers[topology.server]), internal[1]
    found = external or internal
    assert found is not None
    return Links(
        external_bytes_per_s=found[0],
        internal_bytes_per_s=(internal or found)[0],
        latency_s=latency,
        spread=max(one[1] for one in (external, internal) if one is not None),
    )


def _ring_neighbours(members: Sequence[int], rank: int) -> tuple[int, int] | None:
    if rank not in members or len(members) == 1:
        return None
    place = members.index(rank)
    return members[place - 1], members[(place + 1) % len(members)]


def _bandwidth(session: Session, neighbors: tuple[int, int] | None, seconds: float) -> tuple[float, float]:
    """Return the median rate of rounds, for about ``seconds``, and their half-range, 1 of a single round."""
    num_bytes, spent, rounds = _FIRST_BYTES, 0.0, list[float]()
    while len(rounds) <= _REPETITIONS and (spent < seconds or not rounds):
        took = _longest(session, _time_swap(session, neighbors, num_bytes))
        spent += took
        if rounds or took >= _LONG_ENOUGH_S or spent >= seconds / 2 or num_bytes >= _MOST_BYTES:
            rounds.append(took)
            continue
        # Large enough to last, but at most eight times larger, because bursts look too fast.
        wanted = num_bytes * 1.2 * _LONG_ENOUGH_S / max(took, 1e-9)
        num_bytes = int(min(max(wanted, 2 * num_bytes), 8 * num_bytes, _MOST_BYTES))
    counted = rounds[1:] or rounds
    return num_bytes / max(statistics.median(counted), 1e-9), half_range(counted) if rounds[1:] else 1.0


def _time_swap(session: Session, neighbors: tuple[int, int] | None, num_bytes: int) -> float:
    streams = row_exchanges(session).streams
    barrier(session, _EXCHANGE_NAME)
    begin = time.perf_counter()
    if neighbors is not None:
        before, after = neighbors
        outgoing = [Outgoing(rank=after, rows=torch.zeros(num_bytes, dtype=torch.uint8))]
        incoming = [Incoming(rank=before, rows=torch.empty(num_bytes, dtype=torch.uint8))]
        streams.post(outgoing, incoming, _EXCHANGE_NAME, phase=PROBE_PHASE)()
    return time.perf_counter() - begin


def _longest(session: Session, seconds: float) -> float:
    return max(map(float, gather_json(seconds, session)))


_NUMBERS = 4_000_000
"""Of 4 bytes: more than fits any cache of one core."""


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep ``count`` more cores busy with sums over memory; the caller must time with its thread's clock."""
    stop = threading.Event()

    def keep_busy() -> None:
        rows, out = np.ones(_NUMBERS, np.float32), np.empty(_NUMBERS, np.float32)
        while not stop.is_set():
            # Releases the interpreter lock.
            np.add(rows, 1.0, out=out)

    threads = [threading.Thread(target=keep_busy, daemon=True) for _ in range(count)]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in threads:
            one.join()


_LAYER_S, _USUAL = 2.5e-3, (0.7e-9, 0.025e-9)
"""Of a layer, to sum a column of an edge, and of a multiply-add, on a current core."""
_TRUST = 0.1
"""Weight of the usual proportions of a step, relative to a trial's seconds."""


class Trials(NamedTuple):
    """Timed steps; lists, so that ranks can exchange them as JSON."""

    work: list[tuple[float, ...]]
    """(k, 3) work for :func:`fit_rates`."""
    seconds: list[float]
    """(k,)."""
    fresh_edge_s: float
    """Extra seconds per edge of the first step on a block."""
    spread: float
    """Relative half-range of the repeated steps."""


def time_batches(
    module: nn.Module,
    shape: ModelShape,
    batches: Sequence[Sequence[Any]],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Trials:
    """Time steps of a copy of ``module``, on its device, on blocks of at least two sizes; data is not read.

    The median counts of :func:`repeated` steps on each, after one on the new block. Dropout is keyed by node,
    as the strategies have it.

    Raises:
        ConfigError: there are no batches, or the model fails on them.
    """
    if not batches:
        raise ConfigError("there is no batch to measure the model on; give the graph training nodes")
    if not any(one.requires_grad for one in module.parameters()):
        raise ConfigError(
            f"the {type(module).__name__} has no parameters to train; there is nothing to choose"
        )
    try:
        copied = copy.deepcopy(module).train()
    except MODEL_ERRORS as problem:
        raise ConfigError(
            f"the model could not be copied for timing ({type(problem).__name__}: {problem}); remove what "
            "copy.deepcopy rejects"
        ) from problem
    dropouts = install_node_dropouts(copied, 0)
    optimizer, device = torch.optim.Adam(copied.parameters(), lr=1e-9), float_of(module).device
    rows, seconds, fresh, spreads = [], [], [], []
    for number, batch in enumerate(batches):
        blocks = [place(block, device) for block in batch]
        dropouts.begin(0, ids_of_pass(blocks[0]))
        sizes = sizes_of(blocks)
        rows.append((1.0, *(float(term) for term in shape.work(*sizes))))
        step = partial(_step, copied, optimizer, blocks, shape, clock)
        first, later = step(), repeated(step)
        seconds.append(statistics.median(later))
        spreads.append(half_range(later))
        # The very first step also warms up other things.
        if number:
            fresh.append((first - seconds[-1]) / max(sum(sizes[2]), 1))
    return Trials(rows, seconds, max(statistics.median(fresh or [0.0]), 0.0), statistics.median(spreads))


def _timed(clock: Callable[[], float], device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    begin = clock()
    work()
    synchronize(device)
    return clock() - begin


def _step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: Sequence[Any],
    shape: ModelShape,
    clock: Callable[[], float],
) -> float:
    like = float_of(module)
    rows, device = like.new_ones(blocks[0].num_src_nodes(), shape.features), like.device
    labels = torch.zeros(blocks[-1].num_dst_nodes(), dtype=torch.int64, device=device)

    def train() -> None:
        loss = cross_entropy(module(blocks, rows), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        optimizer.step()

    try:
        return _timed(clock, device, train)
    except MODEL_ERRORS as problem:
        raise ConfigError(
            f"the model could not be timed on a batch ({type(problem).__name__}: {problem}); it "
            f"is called as model(blocks, features) with {len(blocks)} blocks, one for each fan-out, and must "
            "return a row of scores for each target"
        ) from problem


def measured_rates(
    tried: Sequence[Trials],
    byte_seconds: Sequence[float],
    sample_edge_s: float,
    num_layers: int,
) -> Rates:
    """Fit rates to steps that :func:`time_batches` timed on one or several ranks."""
    step, edge, product = fit_rates(
        np.concatenate([np.array(one.work) for one in tried]),
        np.concatenate([np.array(one.seconds) for one in tried]),
        num_layers,
    )
    return Rates(
        step_s=step,
        edge_column_s=edge,
        multiply_add_s=product,
        sample_edge_s=sample_edge_s,
        gather_byte_s=byte_seconds[0],
        fresh_edge_s=max(one.fresh_edge_s for one in tried),
        check_byte_s=byte_seconds[1],
        copy_byte_s=byte_seconds[2],
    )


def fit_rates(work: Array, seconds: Array, num_layers: int = 2) -> tuple[float, float, float]:
    """Fit (k, 3) float64 ``work`` to seconds by least squares of relative errors, with factors of at least 0.

    Terms that trials do not separate, as neighbourhoods of the whole graph, get their usual proportions.

    Returns:
        (step_s, edge_column_s, multiply_add_s).
    """
    # Only the planner needs it, and importing it takes memory of every rank.
    from scipy.optimize import nnls

    usual = np.array([_LAYER_S * num_layers, *_USUAL])
    # Columns differ by many orders of magnitude: a factor of 1 is the usual rate.
    scaled = work * usual / seconds[:, None]
    scale = 1.0 / max(float(np.median(scaled.sum(axis=1))), 1e-300)
    rows = np.concatenate([scaled, np.eye(len(usual)) * _TRUST / scale])
    aim = np.concatenate([np.ones(len(seconds)), np.full(len(usual), _TRUST)])
    best, _ = nnls(rows, aim)
    step, edge, product = (best * usual).tolist()
    return step, edge, product


log = logging.getLogger(__name__)


def time_on_plans(
    module: nn.Module, shape: ModelShape, neighborhoods: Sequence[Sequence[Any]], clock: Callable[[], float]
) -> Trials | None:
    """Return :func:`time_batches` of ``neighborhoods``; None for a model that does not run on them."""
    try:
        return time_batches(module, shape, neighborhoods, clock=clock)
    except ConfigError as problem:
        log.info("the model is timed on mini-batches alone: %s", problem)
        return None


_BATCH_PARTS = (1, 2, 4)
_GATHERED = 20_000


def batch_trials(
    g: DistGraph, seeds: Array, draws: Draws | None, num_layers: int, *, whole: bool
) -> Iterator[list[Any]]:
    """Yield blocks to time; every rank of ``g``'s session must consume all of them.

    Of mini-batches, if there are any; and if ``whole``, of neighbourhoods with all edges, as in full-graph
    training.
    """
    topology = g.session.topology
    if len(seeds) >= topology.world_size:
        # Every rank takes different seeds, as in training, and the same number.
        seeds = seeds[topology.rank :: topology.world_size][: len(seeds) // topology.world_size]
    for part in _BATCH_PARTS if draws is not None else ():
        assert draws is not None
        count = max(min(draws.batch_size, len(seeds)) // part, 1)
        yield _sampled_blocks(g, seeds, count, draws.fanouts)
    if not whole:
        return
    size = min(len(seeds), most_timed_seeds(g.num_nodes(), g.num_edges(), num_layers))
    for count in sorted({max(size // 4, 1), size}):
        yield _sampled_blocks(g, seeds, count, (-1,) * num_layers)


def time_bytes(
    g: DistGraph, nodes: Array, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float]:
    """Return the seconds to read a byte of the features of some of ``nodes``, which this server should own,
    to compute its checksum, as for rows read from disk, and to copy it to ``device``, if that is a GPU.
    """
    ids, column = np.resize(nodes, _GATHERED), g.ndata[FEATURE]
    # The first time maps the file.
    rows = column[ids].contiguous()
    count = max(rows.numel() * rows.element_size(), 1)
    plain = rows.view(torch.uint8).numpy().reshape(-1)

    def timed(work: Callable[[], object]) -> float:
        return statistics.median(repeated(partial(_timed, clock, device, work))) / count

    on_gpu = device.type == "cuda"
    copied = timed(partial(rows.pin_memory().to, device, non_blocking=True)) if on_gpu else 0.0
    return timed(lambda: column[ids]), timed(lambda: zlib.crc32(plain.data)), copied


def _sampled_blocks(g: DistGraph, seeds: Array, count: int, fanouts: tuple[int, ...]) -> list[Any]:
    # From all over the graph, as the seeds of a shuffled batch are.
    seeds = seeds[evenly_spaced(len(seeds), count)]
    sampler = dgl.dataloading.NeighborSampler(list(fanouts))
    loader = DataLoader(g, seeds, sampler, batch_size=len(seeds), num_threads=0, device="cpu")
    ((_, _, blocks),) = list(loader)
    return list(blocks)
