from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from dglx_dist.comm.trace import Span
from dglx_dist.errors import ConfigError
from dglx_dist.report.pictures import BATCH_COLORS, draw_schedule, overlap_text
from tests.report.traces import span, trace_of


def batches(number: int) -> list[Span]:
    """Batch b computes from b to b + 0.9 and pulls from b to b + 0.45."""
    of_each = [
        [span("forward D", "compute", b, b + 0.9, b), span("pull", "network", b, b + 0.45, b)]
        for b in range(number)
    ]
    return [one for both in of_each for one in both]


def colors_of(path: Path) -> set[int]:
    """Which of the colours of batches the picture has."""
    pixels = imread(path)[..., :3]
    return {
        number
        for number, color in enumerate(BATCH_COLORS)
        if (abs(pixels - to_rgb(color)).max(axis=2) < 0.01).sum() > 50
    }


def test_the_batches_asked_for_are_drawn_in_their_colours(tmp_path: Path) -> None:
    trace = trace_of(batches(6), batches(6))
    assert draw_schedule(trace, tmp_path / "a.png", title="t", batches=(1, 2)) == (1, 2)
    assert colors_of(tmp_path / "a.png") == {1, 2}
    assert draw_schedule(trace, tmp_path / "b.png", title="t", batches=(4, 99)) == (4, 5)
    assert colors_of(tmp_path / "b.png") == {4, 5}


def test_without_a_wish_the_middle_is_drawn(tmp_path: Path) -> None:
    assert draw_schedule(trace_of(batches(12)), tmp_path / "a.png", title="t") == (4, 7)
    assert draw_schedule(trace_of(batches(2)), tmp_path / "a.png", title="t") == (0, 1)


def test_batches_that_are_not_there_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no batch from 7 to 9; it has 0 to 5"):
        draw_schedule(trace_of(batches(6)), tmp_path / "a.png", title="t", batches=(7, 9))
    with pytest.raises(ConfigError, match="no batch to draw"):
        draw_schedule(trace_of([]), tmp_path / "a.png", title="t")
    assert not list(tmp_path.iterdir())


def test_the_overlap_is_told_in_words() -> None:
    assert overlap_text(trace_of(batches(3))) == "100.0 % of the network's time beside compute"
    assert overlap_text(trace_of([])) == "nothing on the network"
