"""Two users and three items in two parts, one of them without an item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import Assignment, RawGraph
from tests.helpers.ranks import run_ranks

RATES, KNOWS = ("user", "rates", "item"), ("user", "knows", "user")


def write(folder: Path) -> None:
    graph = RawGraph(
        name="shop",
        num_nodes={"user": 2, "item": 3},
        edges={
            RATES: (np.array([0, 1, 1]), np.array([0, 1, 2])),
            KNOWS: (np.array([0]), np.array([1])),
        },
        node_data={"user": {"feat": np.eye(2, dtype=np.float32)}, "item": {"price": np.array([5, 6, 7])}},
        user_ids={"user": np.array(["ann", "bob"])},
    )
    parts = {"user": np.array([0, 1], np.int32), "item": np.zeros(3, np.int32)}
    write_dataset(graph, Assignment(num_parts=2, part_of=parts, method="hand", seed=0), folder)


def look(folder: Path, mode: Any) -> dict[str, Any]:
    with start_session():
        g = DistGraph(folder, structure=mode)
        sampled = g.sample_neighbors({"item": [0, 1, 2], "user": [1]}, -1)
        source, destination = g.find_edges([0, 1, 2], "rates")
        with pytest.raises(ConfigError, match="node types"):
            _ = g.ndata
        return {
            "types": (g.ntypes, g.canonical_etypes, g.num_nodes(), g.num_edges("rates")),
            "edges": [sampled.num_edges(etype) for etype in (RATES, KNOWS)],
            "ids": sorted(sampled.edges["rates"].data[dgl.EID].tolist()),
            "rates": sorted(zip(source.tolist(), destination.tolist(), strict=True)),
            "price": g.nodes["item"].data["price"][torch.tensor([2, 0])].tolist(),
            "names": g.user_ids([1, 0], "user").tolist(),
            "only rates": g.sample_neighbors({"item": [0]}, {"rates": 1, "knows": 0}).num_edges("rates"),
            "degrees": g.in_degrees(etype="knows").tolist(),
        }


@pytest.mark.parametrize("mode", ["replicated", "partitioned"])
def test_every_rank_sees_all_types(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "shop")
    for seen in run_ranks(look, 2, args=(tmp_path / "shop", mode), ranks_per_server=1):
        assert seen == {
            "types": (["user", "item"], [RATES, KNOWS], 5, 3),
            "edges": [3, 1],
            "ids": [0, 1, 2],
            "rates": [(0, 0), (1, 1), (1, 2)],
            "price": [7, 5],
            "names": ["bob", "ann"],
            "only rates": 1,
            "degrees": [0, 1],
        }
