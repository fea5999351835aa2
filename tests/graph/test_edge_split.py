"""``edge_split`` over several edge types, with masks of all kinds and wishes of the partitioner."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.split import edge_split
from tests.dataloading import bonds
from tests.dataloading.bonds import BUYING, BUYS, KNOWING, KNOWS
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def split_in_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        book = g.get_partition_book()
        stars = g.edges["buys"].data["stars"]
        mask = g.new_tensor((BUYING,), torch.bool, "mask", part_policy=stars.part_policy)
        first, last = mask.local_range
        if g.session.topology.local_rank == 0:
            mask[slice(first, last)] = torch.arange(first, last) % 3 != 0
        g.barrier()
        wishes = torch.arange(BUYING) % g.session.topology.world_size
        with pytest.raises(ConfigError, match="_E"):
            edge_split(mask)
        return {
            "tensor": edge_split(mask, book, etype="buys").tolist(),
            "mask": edge_split(np.arange(BUYING) % 3 != 0, book, etype=BUYS).tolist(),
            "own": edge_split(mask, etype=BUYS, force_even=False).tolist(),
            "range": [first, last],
            "knows": edge_split(torch.ones(KNOWING, dtype=torch.bool), book, etype=KNOWS).tolist(),
            "wishes": edge_split(mask, book, etype="buys", edge_trainer_ids=wishes).tolist(),
            "few": edge_split([7], book, etype="knows").tolist(),
        }


@pytest.mark.parametrize(("ranks", "ranks_per_server"), [(3, 1), *wide((2, 2))])
def test_shares_are_disjoint_complete_and_even(tmp_path: Path, ranks: int, ranks_per_server: int) -> None:
    folder = bonds.write(bonds.shop(), tmp_path / "shop", 3)
    results = run_ranks(split_in_rank, ranks, args=(str(folder),), ranks_per_server=ranks_per_server)
    marked = [edge for edge in range(BUYING) if edge % 3]
    wanted = {"tensor": marked, "mask": marked, "own": marked, "wishes": marked, "few": [7]}
    for name, ids in (wanted | {"knows": list(range(KNOWING))}).items():
        shares = [result[name] for result in results]
        assert sorted(edge for share in shares for edge in share) == ids
        if name != "own":
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank, result in enumerate(results):
        assert result["tensor"] == result["mask"]
        first, last = result["range"]
        assert all(first <= edge < last for edge in result["own"])
        if ranks_per_server == ranks:
            # One server: 30 marked edges each, and each rank wishes for exactly half of them.
            assert all(edge % ranks == rank for edge in result["wishes"])
