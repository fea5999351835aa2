from dataclasses import replace

import pytest

from dglx_dist.planner.records import Rate
from scripts.bench.figures import link_of
from tests.bench.measured import outcome, variant


def test_the_rate_that_was_set_is_told_with_its_phi() -> None:
    link = link_of(outcome(), variant("random"))
    assert (link.rate, link.phi, link.limited) == ("96mbit", 0.65, True)
    assert link.words == "96mbit, phi 0.65"


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ({"kind": "namespaces", "external": None}, "no limit"),
        ({"kind": "namespaces"}, "1gbit"),
        ({"kind": "loopback", "external": None}, "not limited (plain loopback)"),
        ({}, "not noted"),
    ],
)
def test_a_fixed_rate_beside_what_was_noted(noted: dict[str, object], words: str) -> None:
    fixed = replace(variant("random"), rate=Rate.parse("1gbit"))
    assert link_of(replace(outcome(), network={"random": noted}), fixed).words == words
