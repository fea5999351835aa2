from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from dglx_dist.comm.trace import Span, TraceFile, read_trace, write_trace
from dglx_dist.errors import ConfigError
from dglx_dist.report.pictures import COLORS, draw_pipeline, has_intervals, pipeline_text
from tests.report.traces import span, trace_of


def of(name: str, row: str, begin_s: float, end_s: float, epoch: int, interval: int) -> Span:
    return Span(name=name, row=row, begin_s=begin_s, end_s=end_s, batch=epoch, interval=interval)


def trace(epochs: int = 5) -> TraceFile:
    """In each epoch of 4 s interval 0 is gathered for 1 s, then 2 s at a worker, beside 1 s of interval 1."""
    spans = []
    for e in range(epochs):
        at = 4.0 * e
        spans += [
            of("GA1", "graph server", at, at + 1, e, 0),
            of("wait for rows", "worker", at, at + 1, e, 0),
            of("AV1", "worker", at + 1, at + 3, e, 0),
            of("GA1", "graph server", at + 1, at + 2, e, 1),
            of("gradSC1", "network", at + 3, at + 3.5, e, 1),
            span("WU", "parameter server", at + 3.5, at + 4, e),
        ]
    return trace_of(spans, strategy="lambda")


def colors_of(path: Path) -> set[int]:
    pixels = imread(path)[..., :3]
    return {
        number
        for number, color in enumerate(COLORS)
        if (abs(pixels - to_rgb(color)).max(axis=2) < 0.01).sum() > 50
    }


def test_epochs_are_drawn_in_the_colours_of_their_intervals(tmp_path: Path) -> None:
    assert draw_pipeline(trace(), tmp_path / "a.png", title="t") == (2, 3)
    assert draw_pipeline(trace(), tmp_path / "b.png", title="t", epochs=(3, 99)) == (3, 4)
    assert colors_of(tmp_path / "a.png") == {0, 1}


def test_an_epoch_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no epoch from 7 to 9; it has 0 to 4"):
        draw_pipeline(trace(), tmp_path / "a.png", title="t", epochs=(7, 9))
    with pytest.raises(ConfigError, match="no epoch to draw"):
        draw_pipeline(trace_of([]), tmp_path / "a.png", title="t")


def test_waiting_workers_are_no_work_and_intervals_survive_the_file(tmp_path: Path) -> None:
    # Workers work 2 s of each epoch, the graph server beside them 1 s of it.
    assert pipeline_text(trace()) == "50.0 % of the workers' time beside graph servers"
    write_trace(tmp_path / "t.json", trace())
    back = read_trace(tmp_path / "t.json")
    assert pipeline_text(back) == pipeline_text(trace())
    assert {one.interval for one in back.ranks[0].spans} == {0, 1, None}
    assert has_intervals(back)
    assert not has_intervals(trace_of([span("forward", "compute", 0, 1, 0)]))
