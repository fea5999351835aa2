"""Neighbours of given nodes: sampled and whole."""

import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sampling import group_by_type, read_fanouts

RATES, SEES, HATES = ("user", "rates", "item"), ("user", "sees", "item"), ("item", "sees", "user")


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"several node types\. Pass a dict of ids by type: user, item"):
        group_by_type([0], {"user": 3, "item": 2}, "node")
    with pytest.raises(ConfigError, match="no type 'book' among the node types user"):
        group_by_type({"book": [0]}, {"user": 3}, "node")
    with pytest.raises(ConfigError, match="several types are 'sees'"):
        read_fanouts({"sees": 1}, [SEES, HATES])
    with pytest.raises(ConfigError, match="no entry for the edge type"):
        read_fanouts({"rates": 1}, [RATES, SEES])
    with pytest.raises(IndexError, match="id 3 at position 0"):
        group_by_type([3], {"user": 3}, "node")
