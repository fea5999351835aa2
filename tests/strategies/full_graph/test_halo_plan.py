"""Halo plans: row indices, files beside a dataset."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.arrays import ArrayCache, ArrayWriter
from dglx_dist.graph.column import Column
from dglx_dist.graph.row_kernels import make_column_info
from dglx_dist.strategies.full_graph.halo_plan import HaloLayer, PlanCache, RankPlan, RowPositions


@pytest.mark.parametrize("num_ids", [10, 1 << 40])
def test_ids_without_a_row_have_no_place(num_ids: int) -> None:
    """Nor have those outside of the range, which other ranks might send."""
    requested = np.array([9, 7, 2, 7, 3, -1, num_ids, 1 << 50, -(1 << 50)])
    assert RowPositions(np.array([7, 2, 9]), num_ids).find(requested).tolist() == [2, 0, 1, 0, *[-1] * 5]
    assert RowPositions(np.empty(0, np.int64), num_ids).find(requested).tolist() == [-1] * len(requested)


def a_plan(seeds: int = 1) -> RankPlan:
    """Rank 0 of 3: nodes 5, 2, 9; layer 1 needs one row of rank 2, layer 2 nothing."""
    first = HaloLayer(
        own_rows=3,
        targets=2,
        indptr=np.array([0, 2, 3]),
        indices=np.array([1, 3, 2]),
        edge_ids=np.array([10, 11, 17]),
        halo_nodes=np.array([40]),
        receive=((2, 1),),
        send=((1, np.array([0, 2])), (2, np.array([1]))),
    )
    none = np.empty(0, np.int64)
    second = HaloLayer(
        own_rows=2,
        targets=seeds,
        indptr=np.zeros(seeds + 1, np.int64),
        indices=none,
        edge_ids=none,
        halo_nodes=none,
        receive=(),
        send=(),
    )
    return RankPlan(nodes=np.array([5, 2, 9]), layers=(first, second), external_nodes=1)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other) and one.dtype == other.dtype
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, HaloLayer | RankPlan):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    return bool(one == other)


def cache_at(folder: Path, rank: int = 0, checksum: str = "abc", **facts: Any) -> PlanCache:
    """Each rank is a server."""
    return PlanCache(ArrayCache(folder, checksum), {"batches": 2, **facts}, Topology(rank, 2, (0, 1)))


def test_plans_are_found_by_all_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of deep models on one structure stay one object; what was read may be changed."""
    layer, last = replace(a_plan().layers[0], own_rows=2), a_plan().layers[1]
    deep, cache = replace(a_plan(), layers=(layer, layer, layer, last)), cache_at(tmp_path)
    assert not cache.holds(0)
    assert cache.write(0, deep)
    cache.read(0).nodes[0] = 1
    plan = cache_at(tmp_path).read(0)
    assert same(plan, deep)
    assert plan.layers[0] is plan.layers[1] is plan.layers[2]
    assert not cache.holds(1)
    for changed in ({"rank": 1}, {"seed": 1}, {"checksum": "abd"}):
        assert not cache_at(tmp_path, **changed).holds(0)
    monkeypatch.setattr("dglx_dist.strategies.full_graph.halo_plan.VERSION", 0)
    assert not cache_at(tmp_path).holds(0)


def test_plans_that_were_made_together_take_the_place_of_one_that_was_left(tmp_path: Path) -> None:
    """Rank 0 has kept a plan of an earlier run, rank 1 has lost its own: both keep what they made now."""
    caches = [cache_at(tmp_path, rank) for rank in (0, 1)]
    caches[0].write(0, a_plan(1))
    kept = caches[0].read(0)
    for cache in caches:
        assert cache.write(0, a_plan(2))
    assert [cache.read(0).seeds for cache in caches] == [2, 2]
    # Who has it open already reads on what it was.
    assert same(kept, a_plan(1))
    assert not list(tmp_path.rglob("*.partial"))


IDS = np.array([5, 2, 40])


def column(dtype: torch.dtype = torch.float32, name: str = "feat", writable: bool = False) -> Column:
    """Rows of two numbers; server 0 owns 0..9, server 1 the others."""
    return Column(
        name=name,
        info=make_column_info(dtype, (2,)),
        bounds=np.array([0, 10, 100]),
        shards=(),
        writable=writable,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_rows_come_back_to_those_who_ask_for_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    cache, rows = cache_at(tmp_path), torch.tensor([[0, 1], [1, 0], [3, 4]]).to(dtype)
    assert cache.read_rows(column(dtype), IDS) is None
    assert cache.write_rows(column(dtype), IDS, rows)
    for _ in range(2):
        read_rows = cache_at(tmp_path).read_rows(column(dtype), IDS)
        assert read_rows is not None
        assert read_rows.dtype == dtype
        assert torch.equal(read_rows, rows)
        # The file does not change.
        read_rows.zero_()
    for other_dtype, ids in ((dtype, IDS[[1, 0, 2]]), (dtype, IDS[:2]), (torch.float64, IDS)):
        assert cache.read_rows(column(other_dtype), ids) is None
    assert cache.read_rows(column(dtype, name="other"), IDS) is None


def test_only_what_comes_from_elsewhere_and_stays_is_worth_it(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    assert cache.accepts(column(), IDS)
    assert not cache.accepts(column(), IDS[:2])
    assert not cache.accepts(column(), IDS[:0])
    assert cache_at(tmp_path, 1).accepts(column(), IDS)
    assert not cache.accepts(column(writable=True), IDS)


def test_a_disk_without_room_is_survived_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrayWriter, "put", full)
    cache = cache_at(tmp_path)
    assert not cache.write_rows(column(), IDS, torch.zeros(3, 2))
    assert not cache.write(0, a_plan())
    assert not cache.write(1, a_plan())
    assert caplog.text.count("the fetched rows of 'feat' is not kept") == 1
    assert caplog.text.count("is not kept") == 1
    assert cache.read_rows(column(), IDS) is None
    assert not list(tmp_path.rglob("*.partial"))
