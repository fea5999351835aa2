"""Neighbours of given nodes: sampled and whole."""

from __future__ import annotations

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sampling import by_type, fanout_by_type

RATES, SEES, HATES = ("user", "rates", "item"), ("user", "sees", "item"), ("item", "sees", "user")


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="several node types; give a dict of ids by type: user, item"):
        by_type([0], {"user": 3, "item": 2}, "node")
    with pytest.raises(ConfigError, match="no type 'book' among the node types user"):
        by_type({"book": [0]}, {"user": 3}, "node")
    with pytest.raises(ConfigError, match="several types are 'sees'"):
        fanout_by_type({"sees": 1}, [SEES, HATES])
    with pytest.raises(ConfigError, match="no entry for the edge type"):
        fanout_by_type({"rates": 1}, [RATES, SEES])
    with pytest.raises(IndexError, match="id 3 at position 0"):
        by_type([3], {"user": 3}, "node")
