from dataclasses import replace

import numpy as np

from dglx_dist.cli.report import overview, part_bytes, part_columns
from dglx_dist.data.storage.columns import FileInfo
from dglx_dist.data.storage.manifest import Manifest
from dglx_dist.records import EDGE_TYPE, NODE_TYPE, ColumnInfo

TWO_PARTS = Manifest(
    name="drawn",
    num_parts=2,
    node_offsets={NODE_TYPE: np.array([0, 3, 6])},
    edge_offsets={EDGE_TYPE: np.array([0, 4, 7])},
    node_columns={
        NODE_TYPE: {
            "feat": ColumnInfo(dtype="float32", row_shape=(5,)),
            "label": ColumnInfo(dtype="int64", row_shape=()),
        }
    },
    edge_columns={EDGE_TYPE: {"weight": ColumnInfo(dtype="float32", row_shape=())}},
    num_classes={},
    user_ids={},
    method="metis",
    seed=0,
    quality={"edge_cut": 0.25, "balance": {"nodes": 1.0, "train": 1.5}, "num_nodes": [3, 3]},
    files={
        "part0/a.arrow": FileInfo(num_bytes=10, checksum="00000000"),
        "part1/a.arrow": FileInfo(num_bytes=1, checksum="00000000"),
        "part1/b.arrow": FileInfo(num_bytes=2, checksum="00000000"),
    },
)


def test_bytes_are_summed_by_part() -> None:
    assert part_bytes(TWO_PARTS) == [10, 3]


def test_overview_has_counts_and_figures() -> None:
    shown = overview(TWO_PARTS)
    assert shown["nodes"] == "6: feat float32[5], label int64"
    assert shown["edges"] == "7: weight float32"
    assert shown["edge cut"] == "0.2500"
    assert shown["balance train (max/mean)"] == "1.5000"
    assert shown["bytes on disk"] == 13


def test_types_of_several_are_named() -> None:
    rates = ("user", "rates", "film")
    offsets = np.array([0, 1, 2])
    shown = overview(
        replace(
            TWO_PARTS,
            node_offsets={"user": offsets, "film": offsets},
            node_columns={"user": {}, "film": {}},
            edge_offsets={rates: offsets},
            edge_columns={rates: {}},
        )
    )
    assert {"nodes user", "nodes film", "edges user.rates.film"} < shown.keys()


def test_the_cut_for_trainers_has_figures_of_its_own() -> None:
    trainers = {"num_parts": 4, "edge_cut": 0.5, "balance": {"train": 1.25}}
    shown = overview(replace(TWO_PARTS, quality={**TWO_PARTS.quality, "trainers": trainers}))
    assert shown["trainers"] == "4, edge cut 0.5000"
    assert shown["balance train of trainers"] == "1.2500"
    assert "trainers" not in overview(TWO_PARTS)


def test_figures_that_the_dataset_lacks_are_left_out() -> None:
    assert part_columns(dict(TWO_PARTS.quality)) == {"nodes": [3, 3]}
    assert part_columns({}) == {}
