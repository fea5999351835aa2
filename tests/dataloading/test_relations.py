import numpy as np
import pytest

from dglx_dist.dataloading.kernels import Schema, csc_at, read_sources, relations_of
from dglx_dist.keyed_random import Csc
from tests.dataloading.shop import BUYS, KNOWS, LIKE, typed_shop


def test_types_are_numbers_and_nodes_have_keys_of_their_own() -> None:
    schema = Schema(ntypes=("a", "b"), num_nodes=(3, 4), etypes=(("a", "x", "b"), ("b", "y", "b")))
    assert schema.offsets.tolist() == [0, 3, 7]
    assert schema.source_types.tolist() == [0, 1]
    assert schema.destination_types.tolist() == [1, 1]


def test_what_is_read_by_address_is_what_is_there() -> None:
    schema, cscs = typed_shop(wide=[BUYS])
    relations = relations_of(schema, cscs)
    assert relations.wide.tolist() == [etype == BUYS for etype in schema.etypes]
    for number, (etype, csc) in enumerate(zip(schema.etypes, cscs, strict=True)):
        assert csc_at(relations, number).indptr.tolist() == csc.indptr.tolist()
        out = np.empty(len(csc.indices), np.int64)
        read_sources(relations, number, np.arange(len(csc.indices)), out)
        first = schema.offsets[schema.ntypes.index(etype[0])]
        assert out.tolist() == (csc.indices + first).tolist()


def test_weights_are_there_for_those_that_have_them() -> None:
    schema, cscs = typed_shop()
    half = np.full(len(cscs[-1].indices), 0.5, np.float32)
    cscs[-1] = cscs[-1]._replace(weights=half)
    relations = relations_of(schema, cscs)
    assert csc_at(relations, schema.etypes.index(LIKE)).weights.tolist() == half.tolist()
    assert len(csc_at(relations, schema.etypes.index(KNOWS)).weights) == 0


def test_memory_of_another_layout_is_our_own_mistake() -> None:
    schema = Schema(ntypes=("a",), num_nodes=(2,), etypes=(("a", "x", "a"),))
    nothing = np.empty(0, np.float32)
    with pytest.raises(AssertionError):
        relations_of(schema, [Csc(np.array([0, 1, 2]), np.array([0, 9, 1, 9])[::2], nothing, 0, 0)])
