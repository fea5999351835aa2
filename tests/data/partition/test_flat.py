import json

import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.graph_views import (
    balance_weights,
    check_request,
    describe,
    from_assignment,
    to_assignment,
    trivial_parts,
)
from dglx_dist.errors import ConfigError
from dglx_dist.records import Assignment
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, TWO_TRIANGLES


def test_there_and_back() -> None:
    parts = np.array([2, 0, 1, 1, 0, 2])
    assignment = to_assignment(AUTHORS_AND_PAPERS, parts, 3, method="m", seed=1, parameters={})
    assert {t: p.tolist() for t, p in assignment.part_of.items()} == {
        "author": [2, 0],
        "paper": [1, 1, 0],
        "venue": [2],
    }
    assert from_assignment(AUTHORS_AND_PAPERS, assignment).tolist() == parts.tolist()
    empty = Assignment(num_parts=1, part_of={}, method="m", seed=0)
    assert empty.parameters == {}


def test_no_thought_for_one_part_or_a_part_each() -> None:
    one, each = trivial_parts(3, 1), trivial_parts(2, 5)
    assert one is not None
    assert each is not None
    assert (one.tolist(), each.tolist()) == ([0, 0, 0], [0, 1])
    assert trivial_parts(3, 2) is None


def test_what_was_told_survives_json() -> None:
    options = PartitionOptions(
        balance=("degree",), tolerance=0.1, target_weights=(1, 2), fast=True, objective="vol"
    )
    told = describe(options, balance_weights(TWO_TRIANGLES, options, 2, None))
    assert json.loads(json.dumps(told)) == {
        "tolerance": {"degree": 0.1},
        "balance": ["degree"],
        "target_weights": [1.0, 2.0],
        "fast": True,
        "objective": "vol",
    }
    assert describe(PartitionOptions(), None) == {"tolerance": {}}


def test_a_senseless_request() -> None:
    with pytest.raises(ConfigError, match="num_parts is -1"):
        check_request(-1, 0)
