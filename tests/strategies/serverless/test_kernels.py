"""Sums over edges beside dense matrices; what goes back is the transpose of what goes forth."""

import numpy as np
import pytest

from dglx_dist.records import Array
from dglx_dist.strategies.serverless import graph_rows as kernels
from dglx_dist.strategies.serverless.graph_partition import LocalGraph

from . import cases

HEADS, WIDTH = 3, 2


def graph() -> LocalGraph:
    """The second of three graph servers: ghosts, self loops, parallel edges, nodes without edges."""
    return cases.case(30, 90, 4).graphs([0, 8, 21, 30])[1]


def targets_of(one: LocalGraph) -> Array:
    return np.repeat(np.arange(one.num_own), np.diff(one.indptr))


def matrix(one: LocalGraph, values: Array) -> Array:
    """(n, n + m) of which entry (t, s) is the sum of the values of edges from s to t."""
    dense = np.zeros((one.num_own, one.num_local))
    np.add.at(dense, (targets_of(one), one.sources), values)
    return dense


def draw(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def gathered(one: LocalGraph, rows: Array, values: Array | None, first: int, end: int) -> Array:
    out = np.full((end - first, rows.shape[1]), np.nan)
    if values is None:
        kernels.gather_sums(one.indptr, one.sources, rows, first, out)
    else:
        kernels.gather_weighted(one.indptr, one.sources, values, rows, first, out)
    return out


def pulled_back(one: LocalGraph, gradients: Array, values: Array | None, nodes: Array) -> Array:
    out = np.zeros((len(nodes), gradients.shape[1]))
    if values is None:
        kernels.pull_back_sums(one.out_indptr, one.out_targets, gradients, nodes, out)
    else:
        places = (one.out_indptr, one.out_targets, one.out_edges)
        kernels.pull_back_weighted(*places, values, gradients, nodes, out)
    return out


@pytest.mark.parametrize("heads", [0, 1, HEADS])
def test_gather_is_a_matrix_product_and_going_back_its_transpose(heads: int) -> None:
    one = graph()
    assert one.num_ghosts
    assert (np.diff(one.indptr) == 0).any()
    rows, gradients = draw(one.num_local, HEADS * WIDTH), draw(one.num_own, HEADS * WIDTH)
    values = draw(len(one.sources), heads) if heads else None
    wanted, back = np.zeros_like(gradients), np.zeros_like(rows)
    for head in range(heads or 1):
        dense = matrix(one, np.ones(len(one.sources)) if values is None else values[:, head])
        some = slice(head * 6 // (heads or 1), (head + 1) * 6 // (heads or 1))
        wanted[:, some], back[:, some] = dense @ rows[:, some], dense.T @ gradients[:, some]
    found = [gathered(one, rows, values, first, end) for first, end in ((0, 5), (5, 5), (5, one.num_own))]
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-12)
    everybody = np.arange(one.num_local, dtype=np.int32)
    found_back = pulled_back(one, gradients, values, everybody)
    np.testing.assert_allclose(found_back, back, atol=1e-12)
    some_nodes = np.array([one.num_local - 1, 2, 0], dtype=np.int32)
    assert (pulled_back(one, gradients, values, some_nodes) == found_back[some_nodes]).all()
    # <A x, y> == <x, A^T y>
    assert (wanted * gradients).sum() == pytest.approx((rows * found_back).sum(), rel=1e-12)


def test_products_of_edges_are_the_gradient_of_their_values() -> None:
    one = graph()
    rows, gradients = draw(one.num_local, HEADS * WIDTH), draw(one.num_own, HEADS * WIDTH)
    out = np.full((len(one.sources), HEADS), np.nan)
    for first, end in ((0, 4), (4, one.num_own)):
        edges = slice(int(one.indptr[first]), int(one.indptr[end]))
        kernels.edge_products(one.indptr, one.sources, gradients[first:end], rows, first, out[edges])
    both = gradients[targets_of(one)] * rows[one.sources]
    np.testing.assert_allclose(out, both.reshape(-1, HEADS, WIDTH).sum(-1), atol=1e-12)
    values = draw(len(one.sources), HEADS)
    total = (gathered(one, rows, values, 0, one.num_own) * gradients).sum()
    assert total == pytest.approx((values * out).sum(), rel=1e-12)


def test_edges_own_rows_to_and_from_both_ends() -> None:
    one = graph()
    values, rows = draw(len(one.sources), HEADS), draw(one.num_local, HEADS)
    to_targets = np.full((one.num_own, HEADS), np.nan)
    kernels.segment_sums(one.indptr, values, 0, to_targets)
    ones = np.ones(len(one.sources))
    for head in range(HEADS):
        np.testing.assert_allclose(to_targets[:, head], matrix(one, values[:, head]).sum(1), atol=1e-12)
    first = int(one.indptr[6])
    part = np.full((one.num_own - 6, HEADS), np.nan)
    kernels.segment_sums(one.indptr, values[first:], 6, part)
    assert (part == to_targets[6:]).all()
    to_sources = np.zeros((one.num_local, HEADS))
    nodes = np.arange(one.num_local, dtype=np.int32)
    kernels.pull_back_edges(one.out_indptr, one.out_edges, values, nodes, to_sources)
    for head in range(HEADS):
        np.testing.assert_allclose(to_sources[:, head], matrix(one, values[:, head]).sum(0), atol=1e-12)
    taken = np.full((len(one.sources) - 3, HEADS), np.nan)
    kernels.take_sources(one.sources, rows, 3, taken)
    assert (taken == rows[one.sources[3:]]).all()
    assert ones.sum() == matrix(one, ones).sum()


def test_all_kernels_take_float32_and_nothing() -> None:
    one = cases.case().graphs([0, 13, 13, 40])[1]
    rows = np.zeros((0, 4), np.float32)
    out = np.zeros((0, 4), np.float32)
    values = np.zeros((0, 2), np.float32)
    nodes = np.zeros(0, np.int32)
    kernels.gather_sums(one.indptr, one.sources, rows, 0, out)
    kernels.gather_weighted(one.indptr, one.sources, values, rows, 0, out)
    kernels.pull_back_sums(one.out_indptr, one.out_targets, rows, nodes, out)
    kernels.pull_back_weighted(one.out_indptr, one.out_targets, one.out_edges, values, rows, nodes, out)
    kernels.edge_products(one.indptr, one.sources, out, rows, 0, values)
    assert out.dtype == np.float32
