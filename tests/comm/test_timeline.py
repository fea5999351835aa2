from concurrent.futures import ThreadPoolExecutor

import pytest

from dglx_dist.comm.trace import Timeline


def test_nothing_is_kept_while_it_is_off() -> None:
    timeline = Timeline()
    with timeline.span("forward", "compute", 0):
        pass
    timeline.add("pull", "network", 0.0, 1.0)
    assert timeline.spans == []
    assert timeline.dropped == 0


def test_a_span_lies_around_those_inside_it_and_is_kept_when_its_block_raises() -> None:
    timeline = Timeline()
    timeline.start()

    def fail() -> None:
        with timeline.span("outer", "compute", 3):
            with timeline.span("inner", "compute"):
                pass
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    inner, outer = timeline.spans
    assert (inner.name, inner.batch, outer.name, outer.batch) == ("inner", None, "outer", 3)
    assert outer.begin_s <= inner.begin_s <= inner.end_s <= outer.end_s


def test_a_span_that_ends_after_the_end_is_left_out() -> None:
    timeline = Timeline()
    timeline.start()
    with timeline.span("last", "compute"):
        timeline.on = False
    assert timeline.spans == []


def test_threads_fill_it_up_to_its_bound_and_the_rest_is_counted() -> None:
    timeline = Timeline(max_spans=1000)
    timeline.start()

    def note(thread: int) -> None:
        for number in range(300):
            timeline.add(str(thread), "loader", number, number + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, range(4)))
    assert len(timeline.spans) == 1000
    assert timeline.dropped == 200
    timeline.start()
    assert (timeline.spans, timeline.dropped) == ([], 0)
