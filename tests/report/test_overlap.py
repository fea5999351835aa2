import pytest

from dglx_dist.report.pictures import overlap
from tests.report.traces import span, trace_of


def test_what_lies_beside_work_is_counted_once_and_waiting_is_no_work() -> None:
    #          0    1    2    3    4    5    6
    # compute  [forward      ][ wait  ][bwd ]
    # network       [pull         ]
    #                    [push              ]
    spans = [
        span("forward D", "compute", 0, 3),
        span("wait for the push", "compute", 3, 5),
        span("backward D", "compute", 5, 6),
        span("pull", "network", 1, 4),
        span("push gradient", "network", 2, 6),
    ]
    found = overlap(trace_of(spans))
    assert (found.network_s, found.beside_s, found.compute_s) == (5.0, 3.0, 4.0)
    assert found.fraction == pytest.approx(0.6)


def test_a_wait_inside_a_span_of_work_is_taken_out_of_it() -> None:
    spans = [
        span("backward", "compute", 0, 10),
        span("wait for the all-reduce", "compute", 2, 9),
        span("all-reduce D", "network", 1, 9),
    ]
    found = overlap(trace_of(spans))
    assert (found.network_s, found.beside_s, found.compute_s) == (8.0, 1.0, 3.0)


def test_ranks_are_summed_and_do_not_hide_each_other() -> None:
    busy, silent = [span("forward", "compute", 0, 4)], [span("pull", "network", 0, 4)]
    found = overlap(trace_of(busy, silent))
    assert (found.network_s, found.beside_s, found.compute_s) == (4.0, 0.0, 4.0)


def test_without_traffic_there_is_no_fraction() -> None:
    assert overlap(trace_of([span("forward", "compute", 0, 4)])).fraction is None
    assert overlap(trace_of([])).fraction is None
