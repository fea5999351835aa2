import numpy as np
import pytest

from dglx_dist.dataloading.step_loader import Items, read_items
from dglx_dist.errors import ConfigError

NONE = np.empty(0, np.int64)


def two() -> Items[str]:
    return Items(ids={"a": np.array([5, 6, 7]), "b": np.array([5, 9])})


def test_the_list_is_the_types_one_after_another() -> None:
    items = two()
    assert len(items) == 5
    assert items.order(shuffle=False, seed=0, epoch=0).tolist() == [0, 1, 2, 3, 4]
    taken = items.take(np.array([4, 2, 0]))
    assert {key: ids.tolist() for key, ids in taken.items()} == {"a": [7, 5], "b": [9]}
    assert {key: ids.tolist() for key, ids in items.take(np.array([3])).items()} == {"a": [], "b": [5]}


def test_order_is_a_permutation_keyed_by_epoch_and_ids() -> None:
    ids = np.arange(100, 200)

    def order(ids: np.ndarray, epoch: int) -> list[int]:
        items = Items(ids={"a": ids})
        return items.take(items.order(shuffle=True, seed=1, epoch=epoch))["a"].tolist()

    first = order(ids, 0)
    assert sorted(first) == ids.tolist() != first
    assert order(ids, 1) != first
    assert order(ids[::-1], 0) == first
    assert Items(ids={"a": ids}).take(NONE)["a"].tolist() == []


def test_equal_ids_of_two_types_do_not_stand_together() -> None:
    ids = np.arange(200)
    order = Items(ids={"a": ids, "b": ids}).order(shuffle=True, seed=1, epoch=0)
    place = np.argsort(order)
    assert sorted(order.tolist()) == list(range(400))
    assert abs(np.corrcoef(place[:200], place[200:])[0, 1]) < 0.25


def test_a_digest_tells_sets_apart() -> None:
    assert two().digest() == Items(ids={"a": np.array([7, 5, 6]), "b": np.array([9, 5])}).digest()
    assert two().digest() != Items(ids={"a": np.array([5, 9]), "b": np.array([5, 6, 7])}).digest()
    assert Items(ids={"a": NONE}).digest() == 0


COUNTS = {("u", "buys", "i"): 4, ("i", "likes", "u"): 3}


def test_ids_and_masks_by_type_are_read_and_copied() -> None:
    given = np.array([2, 0])
    items = read_items({"buys": given, "likes": np.array([False, True, True])}, COUNTS, "edge")
    given[0] = 3
    assert [ids.tolist() for ids in items.ids.values()] == [[2, 0], [1, 2]]
    assert list(items.ids) == list(COUNTS)
    assert (
        read_items({("i", "likes", "u"): []}, COUNTS, "edge").order(shuffle=True, seed=0, epoch=0).size == 0
    )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"sells": [0]}, ConfigError, "no type 'sells'"),
        ([0, 1], ConfigError, "several edge types"),
        ({"buys": [1, 2, 1]}, ConfigError, "have edge 1 more than once"),
        ({"buys": [4]}, IndexError, "id 4 at position 0"),
        ({"buys": np.array([True])}, IndexError, "the mask has 1"),
    ],
)
def test_wrong_items_are_refused(given, error, message: str) -> None:
    with pytest.raises(error, match=message):
        read_items(given, COUNTS, "edge")
