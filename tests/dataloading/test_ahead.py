import threading

import pytest

from dglx_dist.dataloading.step_loader import run_ahead


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_order_is_kept(num_threads: int) -> None:
    assert list(run_ahead(lambda step: step * step, range(3, 9), depth=2, num_threads=num_threads)) == [
        9, 16, 25, 36, 49, 64
    ]  # fmt: skip


def test_no_more_than_depth_are_begun_ahead() -> None:
    begun, first_three = [], threading.Event()

    def make(step: int) -> int:
        begun.append(step)
        if len(begun) == 3:
            first_three.set()
        return step

    results = run_ahead(make, range(100), depth=2, num_threads=4)
    next(results)
    # One was taken and two may be ahead of it.
    assert first_three.wait(10)
    results.close()
    assert sorted(begun) == [0, 1, 2]


def test_an_error_comes_in_its_turn_with_its_cause() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("bad row 2") from KeyError("feat")
        return step

    results = run_ahead(make, range(9), depth=3, num_threads=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="bad row 2") as caught:
        next(results)
    assert isinstance(caught.value.__cause__, KeyError)
    assert any(frame.name == "make" for frame in caught.traceback)


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    for step in run_ahead(lambda step: step, range(1000), depth=2, num_threads=3):
        if step == 5:
            break
    assert threading.active_count() == before


def test_threads_work_beside_the_consumer() -> None:
    consumer = threading.get_ident()
    assert consumer not in list(run_ahead(lambda _: threading.get_ident(), range(4), depth=1, num_threads=1))
    assert set(run_ahead(lambda _: threading.get_ident(), range(4), depth=1, num_threads=0)) == {consumer}
