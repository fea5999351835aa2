"""Sums over edges beside dense matrices; what goes back is the transpose of what goes forth."""

import numpy as np
import pytest

from dglx_dist.strategies.serverless import graph_rows as kernels

from . import cases

WIDTH = 6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_gather_is_a_matrix_product_and_going_back_its_transpose(heads: int, dtype: str) -> None:
    """On the second of three graph servers: ghosts, self loops, parallel edges, nodes without edges."""
    one, draw = cases.case(30, 90, 4).graphs([0, 8, 21, 30])[1], np.random.default_rng(heads)
    targets = np.repeat(np.arange(one.num_own), np.diff(one.indptr))
    assert one.num_ghosts
    assert (np.diff(one.indptr) == 0).any()
    rows = draw.standard_normal((one.num_local, WIDTH)).astype(dtype)
    gradients = draw.standard_normal((one.num_own, WIDTH)).astype(dtype)
    values = draw.standard_normal((len(one.sources), heads)).astype(dtype) if heads else None
    dense = np.zeros((one.num_own, one.num_local, WIDTH))
    spread = np.ones((len(targets), WIDTH)) if values is None else np.repeat(values, WIDTH // heads, 1)
    np.add.at(dense, (targets, one.sources), spread)
    tolerance = {"atol": 1e-12 if dtype == "float64" else 1e-5}

    out = np.full_like(gradients, np.nan)
    for first, end in ((0, 5), (5, 5), (5, one.num_own)):
        kernels.gather(one.indptr, one.sources, values, rows, first, out[first:end])
    np.testing.assert_allclose(out, np.einsum("tsw,sw->tw", dense, rows), **tolerance)
    back = np.zeros_like(rows)
    everybody = np.arange(one.num_local, dtype=np.int32)
    places = (one.out_indptr, one.out_targets, one.out_edges)
    kernels.pull_back(*places, values, gradients, everybody, back)
    np.testing.assert_allclose(back, np.einsum("tsw,tw->sw", dense, gradients), **tolerance)
    if values is None:
        return
    # The gradient of the values of edges, and their sums at both ends.
    products = np.full_like(values, np.nan)
    for first, end in ((0, 4), (4, one.num_own)):
        edges = slice(int(one.indptr[first]), int(one.indptr[end]))
        kernels.edge_products(one.indptr, one.sources, gradients[first:end], rows, first, products[edges])
    both = (gradients[targets] * rows[one.sources]).reshape(len(targets), heads, -1)
    np.testing.assert_allclose(products, both.sum(-1), **tolerance)
    dense = dense.reshape(one.num_own, one.num_local, heads, -1)[..., 0]
    to_targets, to_sources = np.full((one.num_own, heads), np.nan), np.zeros((one.num_local, heads))
    edges_alone = np.arange(len(values), dtype=np.int32)
    kernels.gather(one.indptr, edges_alone, None, values, 0, to_targets)
    np.testing.assert_allclose(to_targets, dense.sum(1), **tolerance)
    kernels.pull_back(one.out_indptr, one.out_edges, one.out_edges, None, values, everybody, to_sources)
    np.testing.assert_allclose(to_sources, dense.sum(0), **tolerance)
