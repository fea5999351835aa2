"""A method is called while its object lives, and does not make it live."""

from __future__ import annotations

from dglx_dist.comm.session import if_alive


class Counter:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def count(self) -> None:
        self._calls.append("called")


def test_only_while_the_object_lives() -> None:
    calls: list[str] = []
    counter = Counter(calls)
    call = if_alive(counter.count)
    call()
    assert calls == ["called"]
    del counter
    call()
    assert calls == ["called"]
