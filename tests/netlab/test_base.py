import pytest

from dglx_dist.planner.records import Rate
from scripts.netlab.base import Card, Lab, LabSpec, LoopbackLab, label


class Emulated(Lab):
    """A lab of namespaces on paper."""

    def __init__(self, external: str | None, internal: str | None) -> None:
        self.kind, self.missing, self.servers = "namespaces", None, ()
        self.set_rates(external and Rate.parse(external), internal and Rate.parse(internal))

    def set_rates(self, external: Rate | None, internal: Rate | None) -> None:
        self.spec = LabSpec(servers=2, external=external, internal=internal)

    def cards(self) -> tuple[Card, ...]:
        return ()

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("external", "internal", "says"),
    [
        ("100mbit", None, "namespaces, 100mbit between servers"),
        ("1gbit", "40gbit", "namespaces, 1gbit between servers, 40gbit within"),
        (None, None, "namespaces, links not limited"),
    ],
)
def test_the_rates_that_are_held_are_named(external: str | None, internal: str | None, says: str) -> None:
    assert label(Emulated(external, internal)) == says


def test_plain_loopback_says_that_it_is_and_why() -> None:
    assert label(LoopbackLab(LabSpec(servers=2), "no root")) == "loopback, links not limited: no root"
    assert label(LoopbackLab(LabSpec(servers=2))) == "loopback, links not limited: asked for"
