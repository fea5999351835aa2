"""METIS through DGL, where pymetis is absent."""

import sys

import numpy as np
import pytest

from dglx_dist.data.partition.balance import measure
from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.multilevel import Metis
from dglx_dist.errors import ConfigError
from tests.data.partition.graphs import communities, homogeneous

pytest.importorskip("dgl")


@pytest.fixture(autouse=True)
def no_pymetis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis._internal", None)


def test_dgl_takes_over_and_balances_what_it_is_told() -> None:
    graph = communities(num_nodes=4000)
    options = PartitionOptions(balance=("nodes", "degree", "train"))
    quality = measure(graph, Metis(options).assign(graph, 4, 0))
    assert all(quality.balance[c] <= 1.05 + 1e-9 for c in options.balance)
    assert quality.edge_cut < 0.6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (PartitionOptions(tolerance=0.2), "has no tolerance, but 0.2"),
        (PartitionOptions(balance=("train",), tolerance={"train": 0.2}), "has no tolerance"),
        (PartitionOptions(target_weights=(1, 2)), "makes equal parts"),
        (PartitionOptions(balance=("nodes", "cost")), "cannot balance the weight 'cost'"),
    ],
)
def test_what_dgl_cannot_honour_is_refused(options: PartitionOptions, named: str) -> None:
    columns = {"cost": np.array([1, 2, 3, 4]), "train_mask": np.array([True, False, True, False])}
    graph = homogeneous(4, [(0, 1), (1, 2), (2, 3)], **columns)
    with pytest.raises(ConfigError, match=f"{named}.*pip install pymetis"):
        Metis(options).assign(graph, 2, 0)
