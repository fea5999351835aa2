"""Edges of a block model with settings at which the answer is known."""

import numpy as np
import pytest

from dglx_dist.data.synthetic import BlockModel, draw_edges


def model_of(num_nodes: int, within_community: float, within_class: float, degree: float = 8) -> BlockModel:
    """Two classes of two communities: node n is in community n % 4, of class n % 2."""
    return BlockModel(
        communities=np.arange(num_nodes, dtype=np.int32) % 4,
        num_classes=2,
        num_communities=4,
        mean_degree=degree,
        exponent=3.0,
        within_community=within_community,
        within_class=within_class,
        both_directions=True,
    )


def test_links_that_never_leave_stay_in_their_community() -> None:
    source_ids, destination_ids = draw_edges(model_of(200, 1.0, 1.0), np.random.default_rng(0))
    assert len(source_ids) == 1600
    assert (source_ids % 4 == destination_ids % 4).all()


def test_links_to_the_class_only_join_its_two_communities() -> None:
    source_ids, destination_ids = draw_edges(model_of(200, 0.0, 1.0), np.random.default_rng(0))
    assert (abs(source_ids % 4 - destination_ids % 4) == 2).all()


def test_links_that_always_leave_the_class_reach_both_communities_of_the_other() -> None:
    source_ids, destination_ids = draw_edges(model_of(200, 0.0, 0.0), np.random.default_rng(0))
    assert (source_ids % 2 != destination_ids % 2).all()
    from_first = np.bincount(destination_ids[source_ids % 4 == 0] % 4, minlength=4)
    assert from_first[0] == from_first[2] == 0
    assert min(from_first[1], from_first[3]) > 100


@pytest.mark.parametrize("seed", range(5))
def test_a_crowded_community_is_filled_until_the_number_of_edges_is_reached(seed: int) -> None:
    # Communities of 10 nodes, each wanting 5 of its 9 possible neighbours: most draws repeat.
    source_ids, destination_ids = draw_edges(model_of(40, 1.0, 1.0, degree=5), np.random.default_rng(seed))
    assert len(np.unique(source_ids.astype(np.int64) * 40 + destination_ids)) == 200
    assert len(np.unique(source_ids)) == 40
