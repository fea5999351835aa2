"""What is trained: graph, model and batches of each case, and the one partition that both systems read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dglx_dist.datasets.synthetic import SyntheticConfig, generate
from dglx_dist.partition import PARTITIONERS, PartitionOptions, default_partitioner, measure
from dglx_dist.storage.dgl_format import write_dgl_format
from dglx_dist.storage.writer import write_dataset

NUM_MACHINES = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison; the same for both systems."""

    nodes: int
    degree: int = 25
    features: int = 100
    classes: int = 47
    train_rate: float = 0.1
    hidden: int = 16
    fanouts: tuple[int, ...] = (25, 10)
    batch_size: int = 1000
    embedding: int = 0
    """Width of trainable rows that take the place of the features; 0: none."""
    lr: float = 0.003


CASES = {
    "small-model": Case(nodes=1_000_000),
    "large-model": Case(nodes=200_000, hidden=256, fanouts=(15, 10, 5)),
    "embedding": Case(nodes=200_000, features=4, embedding=64, hidden=64, fanouts=(10, 5)),
}


def quick(case: Case) -> Case:
    """Return a case of the same shape that runs in seconds."""
    return replace(case, nodes=4000, degree=10, batch_size=100)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Where the partition lies, twice."""

    ours: str
    dgl: str
    """DGL's JSON file."""
    edge_cut: float


def prepare(case: Case, folder: Path) -> Written:
    """Write the graph of ``case`` in both formats from one assignment; what is there already is taken."""
    note = folder / "written.json"
    key = json.dumps([case.nodes, case.degree, case.features, case.classes, case.train_rate])
    if note.exists():
        told = json.loads(note.read_text())
        if told.pop("key") == key:
            return Written(**told)
        raise SystemExit(f"{folder} holds the graph of another case; give another --work")
    config = SyntheticConfig(
        nodes=case.nodes,
        degree=case.degree,
        features=case.features,
        classes=case.classes,
        train_rate=case.train_rate,
    )
    graph = generate(config)
    options = PartitionOptions(balance=("train",))
    assignment = PARTITIONERS.get(default_partitioner(options))(options).assign(graph, NUM_MACHINES, 0)
    quality = measure(graph, assignment)
    folder.mkdir(parents=True, exist_ok=True)
    write_dataset(graph, assignment, folder / "ours", quality=quality.to_json())
    written = Written(
        ours=str(folder / "ours"),
        dgl=str(write_dgl_format(graph, assignment, folder / "dgl")),
        edge_cut=quality.edge_cut,
    )
    note.write_text(json.dumps({"key": key, **asdict(written)}))
    return written
