import numpy as np
import torch

from dglx_dist.dataloading.row_buffers import BufferPool


def pool_with(*lengths: int) -> BufferPool:
    pool = BufferPool(3, np.dtype(np.uint32), 2)
    arrays = [np.empty((length, 3), np.uint32) for length in lengths]
    for array in arrays:
        pool.keep(array)
    return pool


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_empty_pool_lends_no_rows() -> None:
    assert pool_with().borrow().shape == (0, 3)


def test_the_longest_idle_one_is_lent() -> None:
    assert len(pool_with(5, 9).borrow()) == 9


def test_memory_held_by_a_tensor_is_not_lent() -> None:
    pool = pool_with(5)
    tensor = torch.from_numpy(pool.borrow()[:2].view(np.float32)).view(torch.float32)[:1]
    assert len(pool.borrow()) == 0
    del tensor
    assert len(pool.borrow()) == 5


def test_memory_held_by_autograd_is_not_lent() -> None:
    pool = pool_with(5)
    weight = torch.ones(3, requires_grad=True)
    product = torch.from_numpy(pool.borrow().view(np.float32)) * weight
    assert len(pool.borrow()) == 0
    product.sum().backward()
    del product
    assert len(pool.borrow()) == 5


def test_two_lent_at_a_time_are_two() -> None:
    pool = pool_with(5, 5)
    one, other = pool.borrow(), pool.borrow()
    assert address(one) != address(other)
    assert len(pool.borrow()) == 0


def test_no_more_are_kept_than_allowed_and_longer_ones_replace_shorter() -> None:
    pool = pool_with(5, 6)
    held = [pool.borrow(), pool.borrow()]
    pool.keep(np.empty((50, 3), np.uint32))
    assert len(pool.borrow()) == 0
    held.clear()
    pool.keep(np.empty((50, 3), np.uint32))
    held = [pool.borrow(), pool.borrow()]
    assert sorted(len(array) for array in held) == [6, 50]
