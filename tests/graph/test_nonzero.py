from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.split import node_split
from tests.graph.small import NUM_NODES
from tests.helpers import wide
from tests.helpers.ranks import run_ranks


def find_nonzero(folder: Path) -> list[Any]:
    with start_session() as session:
        g = DistGraph(folder)
        mask = g.ndata["train_mask"]
        before = session.ledger.snapshot()
        marked = g.kvstore.nonzero(mask.kvstore_key)
        sent = session.ledger.since(before)
        first, last = mask.local_range
        servers = mask.part_policy.bounds
        formula = sum(-(-(b - a) // 8) for a, b in pairwise(servers.tolist()) if a != first or b != last)
        equal = marked.tolist() == np.flatnonzero(mask.to_local().numpy()).tolist()
        half = g.new_tensor((NUM_NODES,), torch.bfloat16, "half")
        if g.rank() == 0:
            half[[3, 38, 7]] = torch.tensor([1.0, -2.0, -0.0], dtype=torch.bfloat16)
        g.barrier()
        before = session.ledger.snapshot()
        share = node_split(mask)
        phases = {row.phase for row in session.ledger.since(before)}
        return [
            equal,
            sum(row.num_bytes for row in sent) == formula,
            g.kvstore.nonzero(half.kvstore_key).tolist(),
            half.count_nonzero(),
            phases == ({"masks"} if session.topology.num_servers > 1 else set()),
            share.tolist(),
        ]


@pytest.mark.parametrize(("ranks", "per_server"), [(1, None), (3, 2), *wide((2, 1), (3, 1))])
def test_marked_rows_are_found_for_one_bit_a_row(
    small_dataset: Path, ranks: int, per_server: int | None
) -> None:
    outcomes = run_ranks(find_nonzero, ranks, args=(small_dataset,), ranks_per_server=per_server)
    assert all(outcome[:5] == [True, True, [3, 38], 2, True] for outcome in outcomes)
    shares = [node for outcome in outcomes for node in outcome[5]]
    assert len(shares) == len(set(shares)) == 14


def test_only_one_dimension_makes_a_mask(small_dataset: Path) -> None:
    with start_session(topology=Topology(0, 1, (0,))):
        g = DistGraph(small_dataset)
        with pytest.raises(
            ConfigError, match=r"has rows of shape \(5,\); only one of one dimension is a mask"
        ):
            g.kvstore.nonzero(g.ndata["feat"].kvstore_key)
        with pytest.raises(ConfigError, match="no tensor 'x'"):
            g.kvstore.count_nonzero("x")
        empty = DistTensor((0,), torch.bool, "none", part_policy=g.new_policy("none", 0))
        assert g.kvstore.nonzero(empty.kvstore_key).tolist() == []
        assert empty.count_nonzero() == 0
