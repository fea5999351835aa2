import numpy as np
import pytest

from dglx_dist.dataloading.kernels import Workspace
from dglx_dist.dataloading.sampler import WholeTypedSource
from dglx_dist.errors import ConfigError
from dglx_dist.keyed_random import stream_key
from tests.dataloading.shop import KNOWS, LIKE, SOLD, shop_draws, typed_shop


def test_an_ask_has_seeds_and_exclusions_type_by_type() -> None:
    schema, _ = typed_shop()
    draws = shop_draws(schema, [1, 2], exclude={LIKE: np.array([5])})
    request = draws.request({"user": np.array([7, 2]), "item": np.array([9])}, 4, {KNOWS: np.array([1, 3])})
    assert schema.ntypes == ("ghost", "item", "user")
    assert request.seeds.tolist() == [9, 7, 2]
    assert request.seed_ends.tolist() == [0, 0, 1, 3]
    assert request.fanouts[:, 0].tolist() == [2, 1]
    assert schema.etypes[0] == KNOWS
    assert schema.etypes[-1] == LIKE
    assert request.exclude.tolist() == [1, 3, 5]
    assert request.exclude_ends.tolist() == [0, 2, 2, 2, 2, 2, 3]


def test_the_first_edge_type_has_the_streams_of_a_graph_with_one() -> None:
    schema, _ = typed_shop()
    streams = shop_draws(schema, [1, 2], seed=11).request({}, 4, {}).streams
    assert streams[:, 0].tolist() == [stream_key(11, 4, hop) for hop in range(2)]
    assert len(set(streams.ravel().tolist())) == streams.size


def test_what_is_excluded_always_and_once_is_left_out_together() -> None:
    schema, _ = typed_shop()
    draws = shop_draws(schema, [1], exclude={SOLD: np.array([2, 8])})
    assert draws.request({}, 0, {SOLD: np.array([3, 8])}).exclude.tolist() == [2, 3, 8]
    assert draws.request({}, 0, {}).exclude.tolist() == [2, 8]


def test_a_repeated_seed_is_named() -> None:
    schema, cscs = typed_shop()
    request = shop_draws(schema, [1]).request({"user": np.array([1, 2]), "item": np.array([4, 4])}, 0, {})
    with pytest.raises(ConfigError, match="node 4 more than once"):
        WholeTypedSource(schema, cscs).sample(request, {}, Workspace(80))
