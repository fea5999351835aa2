import numpy as np

from dglx_dist.sampling.items import Items
from dglx_dist.sampling.schedule import epoch_order

NONE = np.empty(0, np.int64)


def two() -> Items[str]:
    return Items(ids={"a": np.array([5, 6, 7]), "b": np.array([5, 9])})


def test_the_list_is_the_types_one_after_another() -> None:
    items = two()
    assert len(items) == 5
    assert items.order(shuffle=False, seed=0, epoch=0).tolist() == [0, 1, 2, 3, 4]
    taken = items.take(np.array([4, 2, 0]))
    assert {key: ids.tolist() for key, ids in taken.items()} == {"a": [7, 5], "b": [9]}
    assert items.take(np.array([3]))["b"].tolist() == [5]
    assert items.take(NONE) == {}


def test_one_type_has_the_order_it_always_had() -> None:
    ids = np.arange(50) * 3
    items = Items(ids={"a": ids})
    order = items.order(shuffle=True, seed=4, epoch=2)
    expected = epoch_order(ids, shuffle=True, seed=4, epoch=2)
    assert items.take(order)["a"].tolist() == expected.tolist()
    assert items.take(NONE) == {}


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
