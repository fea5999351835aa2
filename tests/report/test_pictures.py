"""Pictures of runs and of traces."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from dglx_dist.comm.trace import Span, TraceFile, read_trace, write_trace
from dglx_dist.errors import ConfigError
from dglx_dist.progress import visible
from dglx_dist.report.pictures import describe_overlap, draw, draw_parts, draw_trace, has_intervals, overlap
from dglx_dist.report.tables import COLORS
from tests.report.records import epoch
from tests.report.traces import span, trace_of

#          0    1    2    3    4    5    6
# compute  [forward      ][ wait  ][bwd ]
# network       [pull         ]
#                    [push              ]
STEP = [
    span("forward D", "compute", 0, 3),
    span("wait for the push", "compute", 3, 5),
    span("backward D", "compute", 5, 6),
    span("pull", "network", 1, 4),
    span("push gradient", "network", 2, 6),
]
# A wait inside a span of work is taken out of it.
INSIDE_WORK = [
    span("backward", "compute", 0, 10),
    span("wait for the all-reduce", "compute", 2, 9),
    span("all-reduce D", "network", 1, 8),
]
BUSY, SILENT = [span("forward", "compute", 0, 4)], [span("pull", "network", 0, 4)]


@pytest.mark.parametrize(
    ("ranks", "fraction"), [([STEP], 3 / 5), ([INSIDE_WORK], 1 / 7), ([BUSY, SILENT], 0.0), ([BUSY], None)]
)
def test_counts_what_lies_beside_work_once(ranks: list[list[Span]], fraction: float | None) -> None:
    assert overlap(trace_of(*ranks)) == pytest.approx(fraction)


def test_a_run_becomes_a_picture_without_epochs_or_evaluation_too(tmp_path: Path) -> None:
    path, shapes = tmp_path / "run.png", set()
    for epochs in ([epoch(0), epoch(1, val=None)], [epoch(0, val=None)], []):
        draw(epochs, path, title="epochs")
        picture = imread(path)
        assert picture[..., :3].std() > 0.05
        shapes.add(picture.shape)
    ((height, width, _),) = shapes
    assert width > height > 300


@pytest.mark.wide
def test_panels_stand_two_to_a_row(tmp_path: Path) -> None:
    columns = {name: [1.0, 2.0] for name in "abcde"}
    draw_parts(dict(list(columns.items())[:2]), tmp_path / "two.png", title="two")
    draw_parts(columns, tmp_path / "five.png", title="five")
    draw_parts(columns, tmp_path / "five.svg", title="five")
    assert (tmp_path / "five.svg").read_text().startswith("<?xml")
    (height, width, _), two = imread(tmp_path / "five.png").shape, imread(tmp_path / "two.png").shape
    assert width == two[1] <= 1200
    assert height == pytest.approx(3 * two[0], abs=3)


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


def test_waiting_workers_are_no_work_and_intervals_survive_the_file(tmp_path: Path) -> None:
    # Workers work 2 s of each epoch, the graph server beside them 1 s of it.
    assert describe_overlap(trace()) == "50.0 % of the workers' time beside graph servers"
    write_trace(tmp_path / "t.json", trace())
    back = read_trace(tmp_path / "t.json")
    assert describe_overlap(back) == describe_overlap(trace())
    assert {item.interval for item in back.ranks[0].spans} == {0, 1, None}
    assert has_intervals(back)
    assert not has_intervals(trace_of([span("forward", "compute", 0, 1, 0)]))


def batches(number: int) -> list[Span]:
    """Batch b computes from b to b + 0.9 and pulls from b to b + 0.45."""
    of_each = [
        [span("forward D", "compute", b, b + 0.9, b), span("pull", "network", b, b + 0.45, b)]
        for b in range(number)
    ]
    return [case for both in of_each for case in both]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("trace", "asked", "drawn", "colors"),
    [
        (trace_of(batches(6), batches(6)), (1, 2), (1, 2), {1, 2}),
        (trace_of(batches(6), batches(6)), (4, 99), (4, 5), {4, 5}),
        # Unasked, those in the middle.
        (trace_of(batches(12)), None, (4, 7), {4, 5, 6, 7}),
        (trace_of(batches(2)), None, (0, 1), {0, 1}),
        # Epochs in the colours of their intervals.
        (trace(), None, (2, 3), {0, 1}),
        (trace(), (3, 99), (3, 4), {0, 1}),
    ],
)
def test_the_batches_or_epochs_asked_for_are_drawn_in_their_colours(
    tmp_path: Path,
    trace: TraceFile,
    asked: tuple[int, int] | None,
    drawn: tuple[int, int],
    colors: set[int],
) -> None:
    assert draw_trace(trace, tmp_path / "a.png", title="t", batches=asked) == drawn
    assert colors_of(tmp_path / "a.png") == colors


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (trace_of(batches(6)), "no batch from 7 to 9, only 0 to 5"),
        (trace(), "no epoch from 7 to 9, only 0 to 4"),
        (trace_of([]), "no batch to draw"),
    ],
)
def test_refuses_batches_that_are_not_there(tmp_path: Path, trace: TraceFile, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_trace(trace, tmp_path / "a.png", title="t", batches=(7, 9))
    assert not list(tmp_path.iterdir())


def test_the_overlap_is_told_in_words() -> None:
    assert describe_overlap(trace_of(batches(3))) == "100.0 % of the network's time beside compute"
    assert describe_overlap(trace_of([])) == "nothing on the network"


@pytest.mark.parametrize("title", ["$x^2$ <b>", "a $ b", r"$\frac{$ $", "x\x1b[31m\u202e"])
def test_titles_are_no_formulas(tmp_path: Path, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rcParams, "svg.fonttype", "none")
    draw_parts({title: [1, 2]}, tmp_path / "a.svg", title=title)
    texts = [item.text for item in ElementTree.parse(tmp_path / "a.svg").iter() if item.tag.endswith("text")]
    assert texts.count(visible(title)) == 2
