"""``distribute_dataset``: what a script asks of a dataset of DGL, where all ranks share its graph."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

import numpy as np
from torch import Tensor

from dglx_dist.cluster.collectives import broadcast_json
from dglx_dist.errors import ConfigError
from dglx_dist.graph import DistGraph, node_split
from dglx_dist.run.graphs import distribute

if TYPE_CHECKING:
    import dgl


@final
class DistDataset:
    """The one graph of a dataset of DGL, distributed, and this rank's share of each of its splits.

    Args:
        g: The graph; a split is the mask of that name in the data of its nodes.
        num_classes: As the dataset tells; None: it does not.
    """

    def __init__(self, g: DistGraph, num_classes: int | None) -> None:
        self._g = g
        self._num_classes = num_classes

    def __getitem__(self, index: int) -> DistGraph:
        """Return the graph.

        Raises:
            IndexError: ``index`` is not 0.
        """
        if index not in (0, -1):
            raise IndexError(f"the dataset has one graph, and {index} is asked for")
        return self._g

    def __len__(self) -> int:
        """1: it has one graph."""
        return 1

    @property
    def num_classes(self) -> int:
        """Classes of the labels.

        Raises:
            ConfigError: neither the dataset nor its labels tell.
        """
        return self._g.num_classes() if self._num_classes is None else self._num_classes

    @property
    def train_idx(self) -> Tensor:
        """(n,) int64 ids of the nodes of ``train_mask`` that this rank works on, see :func:`node_split`."""
        return self._share("train_mask")

    @property
    def val_idx(self) -> Tensor:
        """(n,) int64, of ``val_mask``, as :attr:`train_idx`."""
        return self._share("val_mask")

    @property
    def test_idx(self) -> Tensor:
        """(n,) int64, of ``test_mask``, as :attr:`train_idx`."""
        return self._share("test_mask")

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what is not carried over.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            f"a distributed dataset has no {name!r}, only [0], num_classes, train_idx, val_idx and test_idx: "
            "nodes have new ids; ask the dataset that you distributed, and g.orig_ids(ids) for its ids"
        )

    def _share(self, mask: str) -> Tensor:
        having = [ntype for ntype in self._g.ntypes if mask in self._g.nodes[ntype].data]
        if len(having) != 1:
            raise ConfigError(
                f"the node types with {mask!r} are {', '.join(having) or 'none'}, where one is needed; use "
                "dx.node_split(g.nodes[ntype].data[mask], ntype=ntype)"
            )
        return node_split(self._g.nodes[having[0]].data[mask], ntype=having[0])


def distribute_dataset(dataset: dgl.data.DGLDataset, **how: Any) -> DistDataset:
    """Return a dataset of DGL, its graph distributed as :func:`distribute` does; every rank must call it.

    Args:
        dataset: Of one graph, like ``AsNodePredDataset(...)`` or ``CoraGraphDataset()``; rank 0's counts.
        how: As for :func:`distribute`: ``strategy``, ``parts``, ``cache`` and others.

    Raises:
        ConfigError: ``dataset`` is none, or has several graphs, or an argument cannot be honoured.
        DatasetError: the graph is not sound.
        StorageError: the cache cannot be written.
    """
    count = len(dataset) if isinstance(dataset, Sized) else None
    if count is None:
        raise ConfigError(
            f"distribute_dataset takes a dataset of DGL, not a {type(dataset).__name__}; give a graph to "
            "dx.distribute"
        )
    if count != 1:
        raise ConfigError(
            f"{type(dataset).__name__} has {count} graphs, and one is distributed; choose it: "
            "dx.distribute(dataset[i])"
        )
    graph = dataset[0]
    if isinstance(graph, tuple):
        raise ConfigError(
            f"{type(dataset).__name__}[0] is a graph and something beside it; make that columns of the "
            "graph, as dgl.data.AsNodePredDataset(dataset) does"
        )
    told = getattr(dataset, "num_classes", None)
    g = distribute(graph, **how)
    classes = broadcast_json(int(told) if isinstance(told, (int, np.integer)) else None, g.session)
    return DistDataset(g, cast("int | None", classes))
