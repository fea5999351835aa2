"""What ranks must have been told alike, from records made by hand."""

from typing import Any

import pytest

from dglx_dist.comm.session import agreement_facts, check_agreement
from dglx_dist.errors import ConfigError


def told(strategy: str = "push_pull", seed: int = 0, curve: bool = False, **options: Any) -> dict[str, Any]:
    return {"no_trace": "", **agreement_facts(strategy, options, seed, curve)}


def test_order_machines_and_objects_do_not_matter() -> None:
    check_agreement([told(depth=2, order="x", memory="4GB"), told(order="x", depth=2, threads=3)])
    check_agreement([told(make=object()), told(make=object())])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            told(),
            r"rank 0 has options '{\"depth\": 2}' and rank 2 has '{}'; give the strategy the same options",
        ),
        (told("full_graph", depth=2), "give the same --strategy on all ranks"),
        (told(seed=1, depth=2), "rank 0 has seed 0 and rank 2 has 1"),
        (told(curve=True, depth=2), "set DGLX_CURVE alike"),
        ({**told(depth=2), "no_trace": "the folder is full"}, "the folder is full"),
    ],
)
def test_ranks_that_differ_are_named(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_agreement([told(depth=2), told(depth=2), other])
