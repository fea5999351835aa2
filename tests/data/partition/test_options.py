import numpy as np
import pytest

from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.errors import ConfigError


@pytest.mark.parametrize(
    ("balance", "constraints"),
    [
        ((), ("nodes",)),
        (("nodes",), ("nodes",)),
        (("degree",), ("degree",)),
        (("train", "val"), ("nodes", "train", "val")),
        (("train", "degree"), ("train", "degree")),
        (("ntype",), ("ntype",)),
    ],
)
def test_nodes_are_balanced_when_nothing_else_covers_them(
    balance: tuple[str, ...], constraints: tuple[str, ...]
) -> None:
    assert PartitionOptions(balance=balance).constraints == constraints


def test_a_tolerance_is_one_for_all_or_by_name() -> None:
    assert PartitionOptions(tolerance=0.1).tolerance_of("train") == 0.1
    by_name = PartitionOptions(balance=("train",), tolerance={"train": 0.2})
    assert (by_name.tolerance_of("train"), by_name.tolerance_of("nodes")) == (0.2, 0.05)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"balance": "train"}, "must be a tuple"),
        ({"balance": ("train", "train")}, "'train' twice"),
        ({"tolerance": 0.0}, "tolerance of every constraint is 0.0"),
        ({"tolerance": float("nan")}, "nan"),
        ({"tolerance": {"trian": 0.1}}, "'trian', which is not balanced"),
        ({"objective": "volume"}, "'volume'; it is 'cut' or 'vol'"),
        ({"target_weights": (1.0, 0.0)}, r"target_weights\[1\] is 0.0"),
        ({"servers": 0}, "servers is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PartitionOptions(**fields)


def test_options_with_vectors_can_be_compared() -> None:
    one, other = (PartitionOptions(vector=np.arange(3)) for _ in range(2))
    assert one == other


def test_balance_may_come_as_a_list() -> None:
    options = PartitionOptions(balance=["nodes"])  # type: ignore[arg-type]
    assert options.balance == ("nodes",)
    assert options.constraints == PartitionOptions().constraints
