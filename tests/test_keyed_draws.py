import numpy as np
import pytest

from dglx_dist.keyed_random import Csc, Rule, draw_among, draw_edges, stream_key
from tests.dataloading.graphs import csc_from

NO_EDGES = np.empty(0, np.int64)

CHI2_P_1E3 = {4: 18.47, 9: 27.88, 99: 148.2}
"""Critical values of chi^2 at p = 1e-3 by degrees of freedom."""


def draw(
    csc: Csc, node: int, fanout: int, *, seed: int = 0, replace: bool = False, exclude=NO_EDGES
) -> list[int]:
    rule = Rule(replace, np.asarray(exclude, np.int64))
    *_, edges = draw_edges(csc, np.array([node], np.int64), fanout, stream_key(seed, 0, 0), rule)
    return edges.tolist()


def star(degree: int, weights=()) -> Csc:
    return csc_from([list(range(1, degree + 1))] + [[]] * degree, weights)


def counts(csc: Csc, fanout: int, num_draws: int, **options) -> np.ndarray:
    total = np.zeros(len(csc.indices))
    for seed in range(num_draws):
        np.add.at(total, draw(csc, 0, fanout, seed=seed, **options), 1)
    return total


@pytest.mark.parametrize("degree", [1, 3, 10, 64, 65, 100, 1000])
@pytest.mark.parametrize("fanout", [0, 1, 5, 10, 70])
def test_without_replacement_min_of_fanout_and_degree_distinct_edges(degree: int, fanout: int) -> None:
    for seed in range(20):
        edges = draw(star(degree), 0, fanout, seed=seed)
        assert len(edges) == len(set(edges)) == min(fanout, degree)
        assert all(0 <= edge < degree for edge in edges)


@pytest.mark.parametrize("degree", [10, 100])  # one machine word, and more
def test_every_edge_is_equally_likely(degree: int) -> None:
    fanout, num_draws = degree // 2, 10000
    expected = num_draws * fanout / degree
    # Without replacement the counts vary less than independent ones: by the factor (1 - k / d) d / (d - 1).
    spread = (1 - fanout / degree) * degree / (degree - 1)
    chi2 = ((counts(star(degree), fanout, num_draws) - expected) ** 2 / expected).sum() / spread
    assert chi2 < CHI2_P_1E3[degree - 1]


def test_every_pair_is_equally_likely() -> None:
    pairs = np.zeros((5, 5))
    for seed in range(10000):
        a, b = sorted(draw(star(5), 0, 2, seed=seed))
        pairs[a, b] += 1
    seen = pairs[np.triu_indices(5, 1)]
    assert ((seen - 1000) ** 2 / 1000).sum() < CHI2_P_1E3[9]


@pytest.mark.parametrize("replace", [False, True])
def test_all_in_edges_in_order_and_none_of_a_node_without(replace: bool) -> None:
    assert draw(star(7), 0, -1, replace=replace) == list(range(7))
    assert draw(star(3), 2, 5, replace=replace) == []


@pytest.mark.parametrize(
    ("weights", "fanout", "replace"),
    [((), 10, True), ((1, 2, 3, 4, 0, 10), 1, False), ((1, 2, 3, 4, 0, 10), 10, True)],
)
def test_draws_are_proportional_to_the_weight(weights: tuple, fanout: int, replace: bool) -> None:
    """With replacement always as many as the fan-out; without, the first draw."""
    seen = counts(star(len(weights) or 5, weights), fanout, 10000 // fanout, replace=replace)
    expected = 10000 * np.array(weights or [1] * 5) / (sum(weights) or 5)
    assert seen.sum() == 10000
    assert seen[expected == 0].sum() == 0
    live = expected > 0
    assert ((seen - expected)[live] ** 2 / expected[live]).sum() < CHI2_P_1E3[4]


def test_weighted_without_replacement_is_successive_drawing() -> None:
    # P(edge 0 among two of three with weights 1, 1, 2) = 1/4 + 1/4 * 1/3 + 1/2 * 1/2 = 7/12.
    seen = counts(star(3, [1, 1, 2]), 2, 10000)
    assert abs(seen[0] / 10000 - 7 / 12) < 4 * np.sqrt(7 / 12 * 5 / 12 / 10000)
    assert seen.sum() == 20000


def test_weight_zero_is_never_drawn_even_when_too_few_are_left() -> None:
    csc = star(5, [0, 1, 0, 1, 0])
    assert sorted(draw(csc, 0, 4)) == [1, 3]
    assert draw(csc, 0, -1) == [1, 3]
    assert set(draw(csc, 0, 20, replace=True)) == {1, 3}
    assert draw(star(2, [0, 0]), 0, 3, replace=True) == []


@pytest.mark.parametrize("weights", [(), [1.0] * 8])
@pytest.mark.parametrize("replace", [False, True])
def test_excluded_edges_are_never_drawn(weights, replace: bool) -> None:
    seen = counts(star(8, weights), 3, 2000, replace=replace, exclude=[0, 3, 7, 50])
    assert seen[[0, 3, 7]].tolist() == [0, 0, 0]
    assert seen.sum() == 6000
    assert seen[[1, 2, 4, 5, 6]].min() > 1000  # 1200 expected, standard deviation below 35


def test_exclusion_leaves_other_nodes_as_they_were() -> None:
    csc = csc_from([list(range(10)), list(range(10))])
    assert draw(csc, 0, 4) == draw(csc, 0, 4, exclude=[15])


def test_a_piece_of_the_graph_draws_what_the_whole_draws() -> None:
    full = csc_from([list(range(30)), list(range(90)), list(range(40))])
    piece = Csc(full.indptr[1:] - 30, full.indices[30:], full.weights, 1, 30)
    weighted = full._replace(weights=np.arange(160, dtype=np.float32))
    cut = piece._replace(weights=weighted.weights[30:])
    for node in (1, 2):
        for seed in range(5):
            assert draw(piece, node, 7, seed=seed) == draw(full, node, 7, seed=seed)
            assert draw(cut, node, 7, seed=seed) == draw(weighted, node, 7, seed=seed)
            assert draw(piece, node, 7, seed=seed, exclude=[31, 130]) == draw(
                full, node, 7, seed=seed, exclude=[31, 130]
            )


def test_edges_come_with_their_sources() -> None:
    csc = csc_from([[2, 3], [], [0], [1, 0, 2]])._replace(first_edge=10)
    indptr, sources, edges = draw_edges(
        csc, np.array([3, 1, 0]), -1, stream_key(0, 0, 0), Rule(False, np.array([14]))
    )
    assert (indptr.tolist(), sources.tolist(), edges.tolist()) == (
        [0, 2, 2, 4],
        [1, 2, 2, 3],
        [13, 15, 10, 11],
    )


@pytest.mark.parametrize("replace", [False, True])
def test_a_node_draws_the_same_among_its_edges_whatever_else_is_asked(replace: bool) -> None:
    weights = [1.0, 2.0, 3.0, 0.5]
    alone = csc_from([[5, 6, 7, 8]], weights)
    second = csc_from([[4, 4], [5, 6, 7, 8]], [1.0, 0.0, *weights])
    for seed in range(50):
        stream = stream_key(seed, 0, 0)
        _, item = draw_among(alone, np.array([9]), 2, stream, replace)
        indptr, both = draw_among(second, np.array([3, 9]), 2, stream, replace)
        assert both[indptr[1] :].tolist() == (item + 2).tolist()


def test_all_with_a_weight_are_taken_once_even_with_replacement() -> None:
    csc = csc_from([[5, 6, 7], [8]], [1.0, 0.0, 2.0, 0.0])
    indptr, chosen = draw_among(csc, np.array([4, 2]), -1, stream_key(0, 0, 0), True)
    assert (indptr.tolist(), chosen.tolist()) == ([0, 2, 2], [0, 2])
