"""Row buffers of a batch: columns, precision, memory that is reused."""

import pytest
import torch

from dglx_dist.dataloading.feature_fetch import RowMemory, check_float
from dglx_dist.dataloading.sampler_spec import SamplePlan, find_columns
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.records import ColumnInfo

ROW = ColumnInfo(dtype="float32", row_shape=(3,))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_held_by_a_view_or_by_autograd_is_not_lent(device: str, dtype: str) -> None:
    # On a machine without a GPU its memory is not page-locked, but held in the same way.
    lent, ROW = RowMemory(2, device=torch.device(device)), ColumnInfo(dtype=dtype, row_shape=(3,))
    at = (rows := lent.rows("a", 5, ROW)).data_ptr()
    tensor = rows[:2].view(-1)[:1]
    del rows
    assert lent.rows("a", 5, ROW).data_ptr() != at
    del tensor
    product = lent.rows("a", 5, ROW) * torch.ones(3, requires_grad=True)
    held = {lent.rows("a", 5, ROW).data_ptr() for _ in range(3)}
    product.sum().backward()
    del product
    assert {lent.rows("a", 5, ROW).data_ptr()} | held >= {at}


def test_no_more_are_kept_than_allowed_and_longer_ones_replace_shorter() -> None:
    lent = RowMemory(1)
    small = lent.rows("a", 8, ROW).data_ptr()
    assert lent.rows("a", 9, ROW).data_ptr() == small, "one row in eight is spare"
    large = lent.rows("a", 800, ROW).data_ptr()
    assert lent.rows("a", 8, ROW).data_ptr() == large
    held = lent.rows("a", 800, ROW)
    # Beyond what is kept, memory is fresh and forgotten.
    assert lent.rows("a", 5, ROW).data_ptr() != held.data_ptr()


def find(g: DistGraph, **names):
    return find_columns(g, SamplePlan(fanouts=(1,), **names), RowMemory())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"node_feats": ("feat",)}, r"prefetch_node_feats is the list \['feat'\].*ghost, item, user.*\{type"),
        ({"edge_feats": ("weight",)}, r"prefetch_edge_feats.*\('user', 'knows', 'user'\).*\{type"),
        ({"labels": {"buyer": ("label",)}}, r"no node type 'buyer' \(known: ghost, item, user\)"),
        ({"labels": {"user": ("age",)}}, r"prefetch_labels names 'age'.*nodes\['user'\].*'feat', 'label'"),
        ({"edge_feats": {"sells": ("weight",)}}, "'sells'"),
        ({"edge_feats": {"buys": ("price",)}}, "prefetch_edge_feats names 'price'.*'weight'"),
    ],
)
def test_errors_name_missing_and_existing_columns(shop_graph: DistGraph, names, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(shop_graph, **names)


VALUES = torch.tensor([[1.0, -0.5], [65504.0, 0.0], [2.0**-14, 3.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_rows_of_other_types_keep_their_memory(dtype: torch.dtype) -> None:
    rows = VALUES.to(dtype)
    assert RowMemory().convert(rows) is rows


@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_become_the_requested_dtype(stored: torch.dtype, wanted: torch.dtype) -> None:
    for rows in (VALUES, *map(torch.ones, ((0, 2), 3, (2, 3, 4), (3, 0)))):
        assert torch.equal(RowMemory(dtype=wanted).convert(rows.to(stored)), rows.to(stored).to(wanted))
    labels = torch.tensor([3, 4])
    assert RowMemory(dtype=wanted).convert(labels) is labels


@pytest.mark.parametrize("wrong", ["float16", torch.int32, torch.complex64, 16])
def test_unsupported_feature_dtype_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="feature_dtype="):
        check_float(wrong)


PAIR = ColumnInfo(dtype="float32", row_shape=(2, 3))


def test_rows_have_the_shape_of_the_column() -> None:
    memory = RowMemory()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        info = ColumnInfo(dtype=str(dtype).removeprefix("torch."), row_shape=())
        assert memory.rows(str(dtype), 5, info).shape == (5,)
        assert memory.rows(str(dtype), 5, info).dtype == dtype
    assert memory.rows("pair", 7, PAIR).shape == (7, 2, 3)
    assert memory.rows("pair", 7, PAIR).is_contiguous()
    assert memory.rows("pair", 0, PAIR).shape == (0, 2, 3)
    assert memory.rows("none", 4, ColumnInfo(dtype="int64", row_shape=(0,))).shape == (4, 0)


def test_a_column_in_two_dtypes_has_two_pools() -> None:
    memory = RowMemory()
    for _ in range(2):
        narrow = memory.rows("feat", 4, ColumnInfo(dtype="float16", row_shape=(3,)))
        wide = memory.rows("feat", 4, ColumnInfo(dtype="float32", row_shape=(3,)))
        assert (narrow.dtype, wide.dtype) == (torch.float16, torch.float32)
        assert narrow.data_ptr() != wide.data_ptr()
