import pytest
import torch

from dglx_dist.dataloading.row_buffers import Precision, check_float
from dglx_dist.errors import ConfigError

VALUES = torch.tensor([[1.0, -0.5], [65504.0, 0.0], [2.0**-14, 3.0]])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_become_float32_with_the_same_values(half: torch.dtype) -> None:
    stored = VALUES.to(half)
    rows = Precision().converted(stored)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, stored.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_what_is_no_half_stays_the_same_memory(dtype: torch.dtype) -> None:
    rows = VALUES.to(dtype)
    assert Precision().converted(rows) is rows


@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_type_that_was_asked_for(stored: torch.dtype, wanted: torch.dtype) -> None:
    rows = VALUES.to(stored)
    assert torch.equal(Precision(wanted).converted(rows), rows.to(wanted))
    labels = torch.tensor([3, 4])
    assert Precision(wanted).converted(labels) is labels


def test_rows_of_any_shape_none_included() -> None:
    for shape in ((0, 2), (3,), (0,), (2, 3, 4), (3, 0)):
        rows = torch.ones(shape, dtype=torch.float16)
        assert torch.equal(Precision().converted(rows), torch.ones(shape))


def test_memory_is_used_again_only_when_the_batch_is_gone() -> None:
    precision = Precision(num_batches=2)
    first = precision.converted(torch.zeros(8, 4, dtype=torch.bfloat16))
    place = first.data_ptr()
    second = precision.converted(torch.ones(8, 4, dtype=torch.bfloat16))
    assert second.data_ptr() != place
    assert not first.any()
    view = first[2:]
    del first
    assert precision.converted(torch.ones(8, 4, dtype=torch.bfloat16)).data_ptr() != place
    assert not view.any()
    del view
    assert precision.converted(torch.ones(7, 4, dtype=torch.bfloat16)).data_ptr() == place


@pytest.mark.parametrize("wrong", ["float16", torch.int32, torch.complex64, 16])
def test_no_floating_point_type(wrong: object) -> None:
    with pytest.raises(ConfigError, match="feature_dtype="):
        check_float(wrong)
