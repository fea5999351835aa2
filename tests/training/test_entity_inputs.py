"""Rows that go into the first layer, of a graph whose authors have no features."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl
import numpy as np
import pytest
import torch

import dglx_dist as dx
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.records import Assignment
from dglx_dist.training.relational import EntityInputs
from tests.training import hetero


@pytest.fixture
def g(tmp_path: Path) -> Iterator[dx.DistGraph]:
    raw = hetero.raw_graph()
    paper, venue = raw.node_data["paper"], raw.node_data["venue"]
    data = {
        "paper": {**paper, "feat": np.asarray(paper["feat"]).astype(np.float16), "flat": paper["label"]},
        "venue": {**venue, "flat": np.zeros(hetero.NUM_NODES["venue"])},
    }
    part_of = {ntype: np.zeros(count, np.int32) for ntype, count in hetero.NUM_NODES.items()}
    parts = Assignment(num_parts=1, part_of=part_of, method="test", seed=0)
    write_dataset(replace(raw, node_data=data), parts, tmp_path / "parts")
    with dx.init(seed=0):
        yield dx.DistGraph(tmp_path / "parts")


def authors_of(g: dx.DistGraph, count: int = hetero.NUM_NODES["author"]) -> dx.DistEmbedding:
    policy = g.get_node_partition_policy("author") if count == hetero.NUM_NODES["author"] else None
    return dx.DistEmbedding(count, 4, f"rows-{count}", part_policy=policy, graph=g)


def block_of(g: dx.DistGraph, prefetched: Any) -> Any:
    sampler = dgl.dataloading.NeighborSampler([2], prefetch_node_feats=prefetched)
    ((_, _, blocks),) = dx.DataLoader(g, {"paper": torch.arange(9)}, sampler, batch_size=9)
    return blocks[0]


def test_rows_are_the_same_whether_the_loader_attached_them_or_not(g: dx.DistGraph) -> None:
    inputs = EntityInputs(g, embeddings={"author": authors_of(g)})
    assert inputs.feature_widths == hetero.WIDTHS
    attached, fetched = (
        inputs(block_of(g, prefetched)) for prefetched in ({"paper": ["feat"], "venue": ["feat"]}, {})
    )
    for ntype, rows in attached.items():
        # float16 on disk, but few models compute in it.
        assert rows.dtype == fetched[ntype].dtype == (torch.float64 if ntype == "venue" else torch.float32)
        assert torch.equal(rows, fetched[ntype])


def test_what_has_no_rows_is_told_with_the_remedy(g: dx.DistGraph) -> None:
    with pytest.raises(dx.ConfigError, match=r"type 'author' have no tensor 'feat'; give them a DistEmb"):
        EntityInputs(g)
    with pytest.raises(dx.ConfigError, match="has 60 rows for 40 nodes"):
        EntityInputs(g, embeddings={"author": SimpleNamespace(weight=g.nodes["paper"].data["feat"])})  # type: ignore[dict-item]
    with pytest.raises(dx.ConfigError, match=r"'flat' of nodes of type 'paper' has shape \(60,\)"):
        EntityInputs(g, feature="flat", embeddings={"author": authors_of(g)})
