"""``dx.Halo``: the halo exchange for models of plain PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dglx_dist as dx
from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.strategies.full_graph import halo_exchange
from tests.helpers.ranks import run_ranks

NUM_NODES, NUM_TARGETS, WIDTH = 41, 17, 3
Graph = tuple[int, int, Tensor]
"""Numbers of sources and of targets, and the (2, E) edges."""


def draw_edges(num_edges: int, num_targets: int = NUM_NODES, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    sources = torch.randint(NUM_NODES, (num_edges,), generator=draw)
    return torch.stack([sources, torch.randint(num_targets, (num_edges,), generator=draw)])


def undirect(edges: Tensor) -> Tensor:
    return torch.cat([edges, edges.flip(0)], 1)


GRAPHS: dict[str, Graph] = {
    "directed": (NUM_NODES, NUM_NODES, draw_edges(160)),
    "undirected": (NUM_NODES, NUM_NODES, undirect(draw_edges(90))),
    # Repeated edges and self-loops.
    "multigraph": (NUM_NODES, NUM_NODES, draw_edges(60).repeat(1, 2)),
    "bipartite": (NUM_NODES, NUM_TARGETS, draw_edges(120, NUM_TARGETS)),
    "no edges": (NUM_NODES, NUM_NODES, draw_edges(0)),
    # All edges come from the node with the highest id.
    "star": (NUM_NODES, NUM_NODES, torch.stack([torch.full((40,), 40), torch.arange(40)])),
}


def own(num_nodes: int, num_ranks: int, scattered: bool) -> Tensor:
    """Rank of each node. The last of three and more ranks owns nothing."""
    num_owners = max(num_ranks - 1, 1) if num_ranks > 2 else num_ranks
    ranks = torch.arange(num_nodes) * num_owners // max(num_nodes, 1)
    draw = torch.Generator().manual_seed(7)
    return ranks[torch.randperm(num_nodes, generator=draw)] if scattered else ranks


def make_weights(is_bipartite: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = [(2 * WIDTH, WIDTH)] * (1 if is_bipartite else 2)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def pass_messages(
    weights: list[Tensor], edges: Tensor, x: Tensor, num_targets: int, add_halo: Callable[[Tensor], Tensor]
) -> Tensor:
    """Two layers of messages, or one on a bipartite graph, where targets have no rows of their own."""
    sources, targets = edges
    for weight in weights:
        rows = add_halo(x)
        second_end = x[targets] if len(weights) > 1 else rows[sources]
        messages = torch.tanh(torch.cat([rows[sources], second_end], 1) @ weight)
        x = x.new_zeros((num_targets, WIDTH)).index_add(0, targets, messages)
    return x


def train_alone(graph: Graph) -> tuple[Tensor, list[Tensor]]:
    """Gradient of the rows of the sources, and of the weights, in one process."""
    num_sources, num_targets, edges = graph
    weights = make_weights(num_sources != num_targets)
    x = features(num_sources).requires_grad_()
    y = pass_messages(weights, edges, x, num_targets, lambda rows: rows)
    (y.sin() * factors(num_targets)).sum().backward()
    assert x.grad is not None
    return x.grad, [weight.grad for weight in weights]  # type: ignore[misc]  # backward has set them


def features(count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(count, WIDTH)))


def factors(count: int) -> Tensor:
    return torch.arange(1.0, count + 1, dtype=torch.float64)[:, None]


def train_with_halo(name: str, scattered: bool, rebuilds: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradients of this rank's rows, gradients of the weights summed over ranks, and the ids of the rows."""
    session = dx.init(timeout=60)
    num_sources, num_targets, edges = GRAPHS[name]
    rank, num_ranks = session.topology.rank, session.topology.world_size
    source_owners, target_owners = (own(count, num_ranks, scattered) for count in (num_sources, num_targets))
    own_edges = edges[:, target_owners[edges[1]] == rank]
    ids = (source_owners == rank).nonzero()[:, 0]
    target_ids = (target_owners == rank).nonzero()[:, 0]

    owners: list[Any] = [source_owners, target_owners] if scattered else [len(ids), len(target_ids)]
    is_bipartite = num_sources != num_targets
    options = {"target_owners": owners[1]} if is_bipartite else {}
    halo = dx.Halo(owners[0], own_edges[:, :0] if rebuilds else own_edges, **options)
    if rebuilds:
        halo.rebuild(own_edges)
    assert halo.num_owned == len(ids)
    assert torch.equal(torch.cat([ids, halo.halo_nodes])[halo.edge_index[0]], own_edges[0])
    assert torch.equal(target_ids[halo.edge_index[1]], own_edges[1])

    weights = make_weights(is_bipartite)
    x = features(num_sources)[ids].requires_grad_()
    y = pass_messages(weights, halo.edge_index, x, len(target_ids), halo)
    (y.sin() * factors(num_targets)[target_ids]).sum().backward()
    for weight in weights:
        if num_ranks > 1:
            torch.distributed.all_reduce(weight.grad)
    dx.shutdown()
    assert x.grad is not None
    return x.grad, [weight.grad for weight in weights], ids  # type: ignore[misc]  # backward has set them


def train_all(cases: list[tuple[str, bool, bool]]) -> list[Any]:
    return [train_with_halo(*case) for case in cases]


CASES = [
    *((name, scattered, False) for name in GRAPHS for scattered in (False, True)),
    ("directed", True, True),
    ("bipartite", False, True),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(ranks: int) -> None:
    by_rank = run_ranks(train_all, ranks, args=(CASES,))
    for index, (name, *_) in enumerate(CASES):
        expected, expected_weights = train_alone(GRAPHS[name])
        total = torch.zeros_like(expected)
        for results in by_rank:
            gradient, weights, ids = results[index]
            total[ids] = gradient
            for weight, of_one in zip(weights, expected_weights, strict=True):
                assert (weight - of_one).abs().max() < 1e-12, name
        assert (total - expected).abs().max() < 1e-12, name


def train_without_return() -> list[Tensor]:
    """The gradient of halo rows is dropped, as in codes that copy rows by hand."""
    original = halo_exchange.HaloExchange.return_gradients
    halo_exchange.HaloExchange.return_gradients = lambda halo, gradient: gradient[: halo.own_rows]
    try:
        return list(train_with_halo("directed", False, False))
    finally:
        halo_exchange.HaloExchange.return_gradients = original


def test_dropped_gradients_of_the_halo_differ() -> None:
    expected, _ = train_alone(GRAPHS["directed"])
    for gradient, _, ids in run_ranks(train_without_return, 2):
        assert (gradient - expected[ids]).abs().max() > 1e-3


PHASES = ("halo_plan", "halo", "halo_gradients")


def exchange_and_count() -> tuple[list[int], int]:
    """Bytes that this rank sends by phase, and its number of halo rows."""
    session = dx.init(timeout=60)
    owners = own(NUM_NODES, 2, scattered=True)
    edges = GRAPHS["directed"][2]
    halo = dx.Halo(owners, edges[:, owners[edges[1]] == session.topology.rank])
    halo(torch.rand(halo.num_owned, 5, requires_grad=True)).sum().backward()
    sent = [session.ledger.total(phase=phase) for phase in PHASES]
    ids = (owners == session.topology.rank).nonzero()[:, 0]
    assert torch.equal(halo(ids)[halo.num_owned :], halo.halo_nodes)
    dx.shutdown()
    return sent, len(halo.halo_nodes)


def test_bytes_are_those_of_the_halo() -> None:
    results = run_ranks(exchange_and_count, 2)
    num_rows = sum(count for _, count in results)
    sent = np.sum([sent for sent, _ in results], axis=0).tolist()
    assert num_rows > 20
    assert sent == [8 * num_rows, 5 * 4 * num_rows, 5 * 4 * num_rows]


MISTAKES = [
    (lambda: dx.Halo(20, torch.zeros(3, 2, dtype=torch.int64)), r"edge_index is \(3, 2\)"),
    (lambda: dx.Halo(20, torch.zeros(2, 2)), "dtype torch.float32"),
    (lambda: dx.Halo(20, torch.tensor([[40], [25]])), "source 40, but there are 40 nodes"),
    (lambda: dx.Halo(20, torch.tensor([[-1], [25]])), "source -1"),
    (lambda: dx.Halo(20, torch.tensor([[3], [3]])), "node 3, which rank 0 owns and not rank 1"),
    (lambda: dx.Halo(-2, torch.zeros(2, 0, dtype=torch.int64)), "owners=-2"),
    (lambda: dx.Halo(torch.tensor([0, 2]), torch.zeros(2, 0, dtype=torch.int64)), "there are 2"),
    (lambda: dx.Halo(torch.tensor([0.0]), torch.zeros(2, 0, dtype=torch.int64)), "integer tensor"),
]


def make_mistakes() -> None:
    session = dx.init(timeout=60)
    rank = session.topology.rank
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    for mistake, message in MISTAKES:
        # The other rank does not wait for the one that is wrong.
        with pytest.raises(ConfigError, match=message):
            mistake() if rank == 1 else dx.Halo(20, nothing)
    with pytest.raises(ConfigError, match="owners"):
        dx.Halo(torch.tensor([0, 1, rank]), nothing)

    halo = dx.Halo(20, torch.tensor([[25], [3]]) if rank == 0 else nothing)
    with pytest.raises(ConfigError, match="this rank owns 20 nodes"):
        halo(torch.zeros(21, 2))
    kept = halo.edge_index
    with pytest.raises(ConfigError, match="source 99"):
        halo.rebuild(torch.tensor([[99], [20 * rank]]))
    assert halo.edge_index is kept
    assert len(halo(torch.zeros(20, 2))) == 20 + (rank == 0)
    dx.shutdown()


OTHER_ROWS = [
    (torch.ones(20, 4), torch.ones(20, 4, dtype=torch.int32)),
    (torch.ones(20, 4, dtype=torch.float16), torch.ones(20, 4, dtype=torch.bfloat16)),
    (torch.ones(20, 6), torch.ones(20, 2, 3)),
]


def exchange_other_rows(number: int) -> None:
    """The ranks pass rows of as many bytes, but of another dtype or shape."""
    dx.init(timeout=30)
    rank = torch.distributed.get_rank()
    edges = torch.tensor([[20 * (1 - rank)], [20 * rank]])
    halo = dx.Halo(20, edges)
    with pytest.raises(PeerError, match="width and dtype"):
        halo(OTHER_ROWS[number][rank])


@pytest.mark.parametrize("number", range(len(OTHER_ROWS)))
def test_rows_of_another_dtype_or_shape_are_refused(number: int) -> None:
    run_ranks(exchange_other_rows, 2, args=(number,))


def exchange_late() -> list[float]:
    """Rows of three steps in a session whose strategy reuses halo rows of the previous step."""
    session = dx.init("full_graph", timeout=60, staleness=1)
    rank = session.topology.rank
    halo = dx.Halo(1, torch.tensor([[1 - rank], [rank]]))
    received = []
    for step in range(3):
        rows = halo(torch.full((1, 1), 10.0 * rank + step, requires_grad=True))
        rows.sum().backward()
        received.append(rows[1].item() - 10 * (1 - rank))
    dx.shutdown()
    return received


def test_staleness_of_a_strategy_does_not_apply() -> None:
    for received in run_ranks(exchange_late, 2):
        assert received == [0, 1, 2]


def make_different_calls() -> None:
    session = dx.init(timeout=60)
    rank = session.topology.rank
    edges = torch.zeros(2, 0, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"the calls of dx\.Halo"):
        dx.Halo(3, edges, target_owners=3 if rank else None)
    halo = dx.Halo(3, edges)
    with pytest.raises(ConfigError, match=r"the calls of dx\.Halo"):
        halo.rebuild(edges) if rank else dx.Halo(3, edges)
    # The result is a new tensor, also on ranks without peers.
    x = torch.ones(3, 1)
    halo(x).mul_(2)
    assert x.sum() == 3
    dx.shutdown()


def test_different_calls_are_refused_on_all_ranks() -> None:
    run_ranks(make_different_calls, 2)


def test_mistakes_of_one_rank_are_shown_on_all() -> None:
    run_ranks(make_mistakes, 2)
