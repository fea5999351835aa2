"""Splits of nodes and edges over ranks."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.partition_book import split_ids
from dglx_dist.graph.split import edge_split, node_split, read_marked_ids
from tests.dataloading import bonds
from tests.dataloading.bonds import BUYING, BUYS, KNOWING, KNOWS
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

SERVERS = [(0,), (0, 0), (0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 0, 0, 1)]


def shares(
    ids: np.ndarray, bounds: list[int], servers: tuple[int, ...], **options: object
) -> list[np.ndarray]:
    return [
        split_ids(ids, np.array(bounds), Topology(rank, len(servers), servers), **options)  # type: ignore[arg-type]
        for rank in range(len(servers))
    ]


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("num_ids", [0, 1, 3, 10, 41])
def test_even_shares_are_disjoint_complete_and_differ_by_one(servers: tuple[int, ...], num_ids: int) -> None:
    ids = np.sort(np.random.default_rng(0).permutation(100)[:num_ids])
    bounds = [0, 100] if max(servers) == 0 else [0, 10, 100]
    result = shares(ids, bounds, servers)
    assert sorted(np.concatenate(result).tolist()) == ids.tolist()
    sizes = [len(share) for share in result]
    assert max(sizes) - min(sizes) <= 1
    assert all(np.all(np.diff(share) > 0) for share in result)


def test_ranks_of_a_server_get_a_random_deal_that_repeats() -> None:
    first, again = (shares(np.arange(40), [0, 40], (0, 0)) for _ in range(2))
    assert [item.tolist() for item in first] == [item.tolist() for item in again]
    assert first[0].tolist() != list(range(20))


PREFERRED, OWN = np.array([1, 0, 1, 0, 3, 2, 3, 2]), {"force_even": False}


@pytest.mark.parametrize(
    ("ids", "bounds", "servers", "options", "expected"),
    [
        # Servers take runs of ids; not even, their own ones.
        (range(8), [0, 1, 8], (0, 1), {}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (range(0, 20, 2), [0, 5, 20], (0, 1), OWN, [[0, 2, 4], [*range(6, 20, 2)]]),
        # Trainers get what they prefer, and all of it where shares need not be even.
        (range(8), [0, 4, 8], (0, 0, 1, 1), {"trainer_of": PREFERRED}, [[1, 3], [0, 2], [5, 7], [4, 6]]),
        (
            range(8),
            [0, 4, 8],
            (0, 0, 1, 1),
            OWN | {"trainer_of": PREFERRED},
            [[1, 3], [0, 2], [5, 7], [4, 6]],
        ),
        (range(6), [0, 6], (0, 0), OWN | {"trainer_of": np.array([1] * 5 + [0])}, [[5], [0, 1, 2, 3, 4]]),
    ],
)
def test_shares_match_hand_computed_ones(
    ids: range, bounds: list[int], servers: tuple[int, ...], options: Any, expected: list[list[int]]
) -> None:
    result = shares(np.array(ids), bounds, servers, **options)
    assert [share.tolist() for share in result] == expected


def test_even_comes_before_preferred() -> None:
    result = shares(np.arange(6), [0, 6], (0, 0), trainer_of=np.zeros(6, np.int64))
    assert [len(share) for share in result] == [3, 3]


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ([True, False, True, False], [0, 2]),
        (np.array([0, 1, 1, 0], dtype=np.uint8), [1, 2]),
        (torch.tensor([0, 0, 0, 0]), []),
        (torch.tensor([3, 1]), [1, 3]),
        (np.array([0, 1]), [0, 1]),
        (np.arange(4), [0, 1, 2, 3]),
        ([], []),
    ],
)
def test_marked_rows_are_read_from_masks_and_ids(marked: object, expected: list[int]) -> None:
    assert read_marked_ids(marked, 4).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("marked", "count", "message"),
    [
        ([1, 0], 2, "could be a mask or ids"),
        ([True, False], 4, "2 elements for 4 rows"),
        ([2, 2, 3], 4, "1 of the 3 ids are repeated"),
        ([0.5, 1.0], 2, "Use a bool mask or integer ids"),
        (np.zeros((2, 2), bool), 2, "one-dimensional"),
        ([1, 9], 4, "id 9 at position 1"),
    ],
)
def test_values_other_than_a_mask_or_ids_are_refused(marked: object, count: int, message: str) -> None:
    with pytest.raises((ConfigError, IndexError), match=message):
        read_marked_ids(marked, count)  # type: ignore[arg-type]


def test_trainer_ids_of_another_length_are_refused(graph: DistGraph) -> None:
    with pytest.raises(ConfigError, match="trainer ids"):
        node_split(graph.ndata["train_mask"], node_trainer_ids=np.zeros(3, np.int64))


@pytest.mark.usefixtures("alone")
def test_without_a_book_the_graph_opened_last_tells(small_dataset: Path) -> None:
    with pytest.raises(ConfigError, match="no graph is open"):
        node_split(torch.tensor([True]))
    g = DistGraph(small_dataset)
    assert node_split(torch.arange(g.num_nodes()) == 2).tolist() == [2]
    assert edge_split(torch.arange(g.num_edges()) == 3).tolist() == [3]


def split_in_rank(folder: str) -> None:
    with start_session(timeout_s=60) as session:
        g, topology = DistGraph(folder), session.topology
        book = g.get_partition_book()
        stars = g.edges["buys"].data["stars"]
        mask = g.new_tensor((BUYING,), torch.bool, "mask", part_policy=stars.part_policy)
        first, last = mask.local_range
        marks = torch.arange(BUYING) % 3 != 0
        if topology.local_rank == 0:
            mask[slice(first, last)] = marks[first:last]
        g.barrier()
        with pytest.raises(ConfigError, match="_E"):
            edge_split(marks)
        assert torch.equal(edge_split(mask), edge_split(marks, book, etype=BUYS)), "a column knows its type"
        own = edge_split(mask, etype=BUYS, force_even=False)
        assert ((own >= first) & (own < last)).all()
        assert torch.equal(edge_split(mask, book, etype="buys"), edge_split(marks, book, etype=BUYS))
        # As scripts of one machine write it, and ids from outside the graph.
        assert torch.equal(mask.nonzero()[:, 0], edge_split(marks, book, etype=BUYS))
        for share in (torch.nonzero(mask, as_tuple=True)[0], torch.nonzero(input=mask)[:, 0]):
            assert torch.equal(share, mask.nonzero()[:, 0])
        assert np.nonzero(mask)[0].tolist() == mask.nonzero()[:, 0].tolist()
        assert np.flatnonzero(mask).tolist() == marks.nonzero()[:, 0].tolist()
        assert np.concatenate([mask, mask]).tolist() == torch.cat([marks, marks]).tolist()
        assert np.sum(a=mask) == marks.sum()
        ids = torch.tensor([4, 0, 11])
        assert torch.equal(g.new_ids(g.orig_ids(ids, "user"), "user"), ids)
        preferred = torch.arange(BUYING) % topology.world_size
        result = edge_split(mask, book, etype="buys", edge_trainer_ids=preferred)
        # On one server: 30 marked edges each, and each rank prefers exactly half of them.
        assert topology.num_servers > 1 or (preferred[result] == topology.rank).all()
        every, marked = torch.ones(KNOWING, dtype=torch.bool), marks.nonzero()[:, 0].tolist()
        for share, expected, is_even in (
            (own, marked, False),
            (edge_split(mask, book, etype="buys"), marked, True),
            (result, marked, True),
            (edge_split(every, book, etype=KNOWS), list(range(KNOWING)), True),
            (edge_split([7], book, etype="knows"), [7], True),
        ):
            shares = gather_json(share.tolist(), session)
            assert sorted(chain(*shares)) == expected
            assert not is_even or max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(3, 1), *wide((2, 2))])
def test_shares_are_disjoint_complete_and_even(tmp_path: Path, ranks: int, ranks_per_server: int) -> None:
    folder = bonds.write(bonds.shop(), tmp_path / "shop", 3)
    run_ranks(split_in_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)
