"""Draws over ranks and servers: the same whoever draws, and the bytes that the formula says."""

import numpy as np
import pytest

from dglx_dist.dataloading.kernels import Workspace, sample_batch
from dglx_dist.dataloading.sampler import RemoteSource, csc_of, keyed_draw
from dglx_dist.graph.structure import CSCShard
from dglx_dist.keyed_random import Rule
from tests.dataloading.graphs import random_csc, request_for
from tests.dataloading.rings import NUM_NODES, draws_in_rank
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

SEEDS = list(range(1, NUM_NODES, 2))


def run(rings, *, ranks, parts, structure="replicated", ranks_per_server=None, shares=None, **options):
    shares = shares or {str(rank): SEEDS[rank::ranks] for rank in range(ranks)}
    args = (str(rings[parts]), structure, shares, options)
    return run_ranks(draws_in_rank, ranks, args=args, ranks_per_server=ranks_per_server)


def merged(results):
    drawn = {}
    for result in results:
        for key, edges in result["drawn"].items():
            assert drawn.setdefault(key, edges) == edges
    return drawn


def targets_by_epoch(results):
    half = results[0]["length"]
    return [
        sorted(seed for result in results for seeds in result["targets"][part] for seed in seeds)
        for part in (slice(0, half), slice(half, None))
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_draws_what_one_draws(rings, ranks: int) -> None:
    one = run(rings, ranks=1, parts=4)
    many = run(rings, ranks=ranks, parts=4, num_threads=2)
    # Other batches mean other frontiers, but whenever a node is drawn for, it gets the same edges.
    offline, together = merged(one), merged(many)
    common = offline.keys() & together.keys()
    assert {key for key in offline if key.split()[1] == "0"} <= common
    assert {key: offline[key] for key in common} == {key: together[key] for key in common}
    assert targets_by_epoch(many) == targets_by_epoch(one) == [SEEDS, SEEDS]


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(4, 2), *wide((2, 1))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fanouts": [-1, -1]},
        {"sampler": {"replace": True}, "exclude": [5, 9, 200]},
        {"sampler": {"prob": "source"}},
    ],
    ids=["uniform", "full", "replace_exclude", "weighted"],
)
def test_a_cut_structure_draws_what_a_replicated_one_draws(rings, ranks, ranks_per_server, options) -> None:
    setting = {"ranks": ranks, "parts": ranks // ranks_per_server, "ranks_per_server": ranks_per_server}
    whole = run(rings, structure="replicated", **setting, **options)
    cut = run(rings, structure="partitioned", **setting, **options)
    for one, other in zip(whole, cut, strict=True):
        assert other["drawn"] == one["drawn"]
        assert other["targets"] == one["targets"]
        assert one["bytes"][0] == 0
        assert other["bytes"][0] == other["bytes"][1] > 0


def test_uneven_and_empty_shares_have_equal_steps(rings) -> None:
    shares = {"0": SEEDS[:9], "1": [], "2": SEEDS[9:12]}
    results = run(rings, ranks=3, parts=1, shares=shares)
    assert [result["length"] for result in results] == [3, 3, 3]
    assert [[len(seeds) for seeds in result["targets"][:3]] for result in results] == [
        [4, 4, 1], [0, 0, 0], [3, 0, 0]
    ]  # fmt: skip
    assert results[1]["shares"][:3] == [[0, 7], [0, 4], [0, 1]]


def same_seeds_on_all(folder: str) -> list[str]:
    import warnings

    from dgl.dataloading import NeighborSampler

    from dglx_dist.comm.session import start_session
    from dglx_dist.dataloading.loader import DataLoader
    from dglx_dist.graph.dist_graph import DistGraph

    with start_session(timeout_s=60), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader(DistGraph(folder), [1, 2, 3], NeighborSampler([2]))
        return [str(warning.message) for warning in caught]


def test_ranks_with_the_same_seeds_are_told(rings) -> None:
    for messages in run_ranks(same_seeds_on_all, 2, args=(str(rings[1]),)):
        assert any("the same 3 indices" in message and "node_split" in message for message in messages)


class TwoPieces:
    """Stands in for a structure: asks two pieces of a graph in turn."""

    def __init__(self, csc, cut: int, draw) -> None:
        edge = int(csc.indptr[cut])
        self._draw, self._cut = draw, cut
        self._pieces = [
            CSCShard(indptr=csc.indptr[: cut + 1], indices=csc.indices[:edge], first_node=0, first_edge=0),
            CSCShard(
                indptr=csc.indptr[cut:] - edge, indices=csc.indices[edge:], first_node=cut, first_edge=edge
            ),
        ]

    def ask(self, op, nodes, parameters, *, exclude, layer):
        from dglx_dist.graph.structure import Piece, join_pieces

        pieces = []
        for piece, places in zip(
            self._pieces, [np.flatnonzero(nodes < self._cut), np.flatnonzero(nodes >= self._cut)], strict=True
        ):
            edges = self._draw(piece, nodes[places], parameters, exclude)
            pieces.append(Piece(edges=edges, starts=np.arange(len(places) + 1), positions=places))
        return join_pieces(len(nodes), pieces)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("direct_limit", [0, 1000])
def test_joined_pieces_make_the_batch_of_the_kernel(dtype: str, direct_limit: int) -> None:
    csc = random_csc(300, 6)
    # Edges 0, 7, ... are left out of every batch, and 0, 5, ... of this one.
    always, once = np.arange(0, len(csc.indices), 7), np.arange(0, len(csc.indices), 5)
    request = request_for(
        [4, 0, 150, 299], [3, 5, -1], dtype=dtype, exclude={*always.tolist(), *once.tolist()}
    )
    request = request._replace(batch_exclude=once)
    pieces = TwoPieces(csc, 120, keyed_draw(Rule(False, always), {}))
    workspace = Workspace(300, direct_limit=direct_limit)
    batch = RemoteSource(pieces, "draw").sample(request, workspace)
    again = RemoteSource(pieces, "draw").sample(request, workspace)
    expected, _ = sample_batch(csc, request, Workspace(300).table)
    for one, two, other in zip(batch, again, expected, strict=True):
        assert one.tolist() == two.tolist() == other.tolist()
    assert batch.sources.dtype == dtype


def test_a_piece_without_weights_has_none() -> None:
    piece = CSCShard(indptr=np.array([0, 1]), indices=np.array([3]), first_node=5, first_edge=7)
    assert len(csc_of(piece).weights) == 0
    assert csc_of(piece, np.array([0.5], np.float32)).first_edge == 7
