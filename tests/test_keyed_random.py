import numpy as np
import pytest
import torch

from dglx_dist.keyed_random import (
    draw_below,
    full_word,
    hash_ids,
    item_key,
    relation_keys,
    shift_right,
    splitmix64,
    stream_key,
    words_on_device,
)


def test_splitmix64_is_the_published_one() -> None:
    """Its first outputs from the states 0 (and then its increment) and 1234567."""
    hashes = splitmix64(np.array([0, 0x9E3779B97F4A7C15, 1234567], dtype=np.uint64))
    assert [int(h) for h in hashes] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 6457827717110365317]


def test_keys_differ_in_every_part() -> None:
    keys = {
        int(item_key(stream_key(seed, epoch, hop), node))
        for seed in range(4)
        for epoch in range(4)
        for hop in range(4)
        for node in range(4)
    }
    assert len(keys) == 256


def test_bounded_throws_away_what_would_be_unfair() -> None:
    # With a bound of 3 * 2**30, a quarter of the 32-bit words are rejected, and none is for a power of two.
    ends = {}
    for bound in (3 << 30, 1 << 31):
        number = 0
        for _ in range(4000):
            _, number = draw_below(np.uint64(11), number, bound)
        ends[bound] = number
    assert ends[1 << 31] == 4000
    assert 5100 < ends[3 << 30] < 5600  # 4000 / 0.75 = 5333, standard deviation 42


@pytest.mark.parametrize(("bound", "chi2"), [(1, 1e-9), (2, 10.83), (3, 13.82), (12, 31.26)])
def test_bounded_is_uniform_and_moves_on(bound: int, chi2: float) -> None:
    """The critical values are those of p = 1e-3."""
    draws, number = np.zeros(bound), 0
    for step in range(1000 * bound):
        value, number = draw_below(np.uint64(3), number, bound)
        assert number > step
        draws[value] += 1
    assert ((draws - 1000) ** 2 / 1000).sum() < chi2


def test_hash_of_ids_depends_on_the_id_alone() -> None:
    stream = stream_key(1, 2, 3)
    ids = np.array([5, 9, 2**40], np.int64)
    forward, backward = hash_ids(ids, stream), hash_ids(ids[::-1].copy(), stream)
    assert forward.tolist() == backward[::-1].tolist()
    assert int(forward[0]) == int(item_key(stream, 5))


def test_a_device_has_the_same_words() -> None:
    """The values include some where int64 has a sign and products overflow."""
    ids, numbers = [0, 1, 2**31, 2**40 + 7, 2**63 - 1], [0, 1, 5, 2**32 + 3, 2**62]
    for stream in (stream_key(1, 2, 3), stream_key(7, 0, 1 << 33), np.uint64(2**64 - 1)):
        keys = [np.uint64(item_key(stream, item)) for item in ids]
        words = np.array([[full_word(key, number) for number in numbers] for key in keys], np.uint64)
        result = words_on_device(stream, torch.tensor(ids), torch.tensor(numbers))
        assert result.numpy().view(np.uint64).tolist() == words.tolist()
        assert shift_right(result, 32).tolist() == (words >> np.uint64(32)).tolist()
        assert (result < 0).any()


def test_edge_types_have_keys_of_their_own_and_the_first_has_the_hops() -> None:
    keys = relation_keys(5, 2, 3, 40)
    assert keys[:, 0].tolist() == [stream_key(5, 2, hop) for hop in range(3)]
    assert len(set(keys.ravel().tolist())) == 120
    assert keys.tolist() == relation_keys(5, 2, 3, 41)[:, :40].tolist()
