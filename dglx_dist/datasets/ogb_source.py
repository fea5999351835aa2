"""Node datasets of the Open Graph Benchmark, through its own package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np

from dglx_dist.datasets.base import DatasetSource
from dglx_dist.datasets.columns import count_classes, standard_columns
from dglx_dist.datasets.options import refuse_unknown
from dglx_dist.errors import ConfigError, DatasetError
from dglx_dist.records import EDGE_TYPE, FEATURE, LABEL, NODE_TYPE, Array, EdgeType, NodeColumn, RawGraph

_MASK_OF_PART = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


@final
class OgbSource(DatasetSource):
    """``ogb:ogbn-arxiv``; needs the package ogb. Option ``root``: where downloads are kept."""

    def __init__(self, location: str, options: Mapping[str, object]) -> None:
        refuse_unknown(options, ("root",), "ogb")
        if not location.startswith("ogbn-"):
            raise ConfigError(
                f"ogb:{location} is no node dataset; those that can be loaded start with ogbn-, "
                f"e.g. ogb:ogbn-arxiv"
            )
        if importlib.util.find_spec("ogb") is None:
            raise ConfigError(
                f"ogb:{location} needs the package ogb, which is not installed; run "
                f"pip install 'dglx_dist[ogb]' (or pip install ogb)"
            )
        self._name = location
        self._root = Path(str(options.get("root", "dataset"))).expanduser()

    def load(self) -> RawGraph:
        """Read the dataset, downloading it if it is not under ``root`` yet; ogb asks before large ones."""
        datasets = importlib.import_module("ogb.nodeproppred")
        with cache_set_aside(self._root / self._name.replace("-", "_")):
            try:
                dataset = datasets.NodePropPredDataset(name=self._name, root=str(self._root))
            except (OSError, ValueError) as error:
                raise DatasetError(
                    f"ogb:{self._name} could not be read or downloaded below {self._root.absolute()}: {error}"
                ) from error
        graph, labels = dataset[0]
        return raw_graph_from_ogb(self._name, graph, labels, dataset.get_idx_split())


def raw_graph_from_ogb(
    name: str, graph: Mapping[str, Any], labels: Any, split: Mapping[str, Any]
) -> RawGraph:
    """Convert what ``NodePropPredDataset`` yields, one node type or several.

    Args:
        name: What the dataset will be called.
        graph: ``edge_index`` (2, E) and columns named ``node_*`` and ``edge_*``, or for several types
            ``edge_index_dict`` and the like.
        labels: (N, 1) or (N, tasks); for several types a mapping of those.
        split: ``train``, ``valid``, ``test`` -> node ids; for several types a mapping of those.
    """
    if "edge_index_dict" not in graph:
        graph, labels, split = _as_several_types(graph, labels, split)
    num_nodes = {node_type: int(count) for node_type, count in graph["num_nodes_dict"].items()}
    edges: dict[EdgeType, tuple[Array, Array]] = {
        edge_type: (index[0], index[1]) for edge_type, index in graph["edge_index_dict"].items()
    }
    node_data: dict[str, dict[str, NodeColumn]] = {}
    classes: dict[str, int] = {}
    for node_type, count in num_nodes.items():
        columns = dict(_columns_of(graph, "node_", node_type))
        if node_type in labels:
            columns[LABEL] = np.asarray(labels[node_type])
        for part, mask_name in _MASK_OF_PART.items():
            if node_type in split[part]:
                columns[mask_name] = np.zeros(count, dtype=np.bool_)
                columns[mask_name][split[part][node_type]] = True
        node_data[node_type] = standard_columns(columns, f"ogb:{name}, nodes {node_type!r}")
        counted = count_classes(node_data[node_type])
        if counted is not None:
            classes[node_type] = counted
    return RawGraph(
        name=name,
        num_nodes=num_nodes,
        edges=edges,
        node_data=node_data,
        edge_data={edge_type: dict(_columns_of(graph, "edge_", edge_type)) for edge_type in edges},
        num_classes=classes,
    )


def _as_several_types(
    graph: Mapping[str, Any], labels: Any, split: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    by_type: dict[str, Any] = {"num_nodes_dict": {NODE_TYPE: graph["num_nodes"]}}
    for key, value in graph.items():
        if key != "num_nodes" and value is not None:
            owner: object = NODE_TYPE if key.startswith("node_") else EDGE_TYPE
            by_type[key if key != "edge_index" else "edge_index_dict"] = {owner: value}
    return by_type, {NODE_TYPE: labels}, {part: {NODE_TYPE: ids} for part, ids in split.items()}


def _columns_of(graph: Mapping[str, Any], prefix: str, owner: object) -> list[tuple[str, Array]]:
    found = []
    for key, values in graph.items():
        name = key.removesuffix("_dict")
        if name == "edge_index" or not name.startswith(prefix) or values is None:
            continue
        value = values.get(owner)
        if value is not None:
            value = np.asarray(value)
            # Scalars come as (K, 1) columns, e.g. the year of a paper.
            flat = (
                value[:, 0] if name != f"{prefix}feat" and value.ndim == 2 and value.shape[1] == 1 else value
            )
            found.append((FEATURE if name == f"{prefix}feat" else name.removeprefix(prefix), flat))
    return found


@contextmanager
def cache_set_aside(folder: Path) -> Iterator[None]:
    """Hide ogb's cache in ``folder`` while the block runs, and leave no new one.

    ogb writes its cache as a pickle that ``torch.load`` refuses since version 2.6, for good reason;
    without one it reads its raw files, which hold plain numbers.
    """
    cache = folder / "processed" / "data_processed"
    aside = cache.with_name("data_processed.set_aside")
    if cache.is_file():
        cache.replace(aside)
    elif (folder / "raw").is_dir():
        # ogb writes there without looking; before a download nothing may exist, or it asks to update.
        cache.parent.mkdir(exist_ok=True)
    try:
        yield
    finally:
        cache.unlink(missing_ok=True)
        if aside.is_file():
            aside.replace(cache)
