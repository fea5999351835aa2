from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from dglx_dist.report.pictures import _draw_learning, draw, draw_parts
from tests.report.records import epoch


def test_a_run_becomes_a_picture_with_something_on_it(tmp_path: Path) -> None:
    draw([epoch(0), epoch(1, val=None)], tmp_path / "run.png", title="two epochs")
    picture = imread(tmp_path / "run.png")
    assert picture.shape[1] > picture.shape[0] > 300
    assert picture[..., :3].std() > 0.05


def test_a_run_without_epochs_or_evaluation_still_draws(tmp_path: Path) -> None:
    draw([], tmp_path / "none.png", title="nothing")
    draw([epoch(0, val=None)], tmp_path / "one.png", title="no evaluation")
    assert imread(tmp_path / "none.png").shape == imread(tmp_path / "one.png").shape


def test_each_column_of_parts_gets_a_panel(tmp_path: Path) -> None:
    draw_parts({"nodes": [1, 2]}, tmp_path / "one.png", title="one")
    draw_parts({"nodes": [1, 2], "edges": [5, 5]}, tmp_path / "two.png", title="two")
    assert imread(tmp_path / "two.png").shape[1] == 2 * imread(tmp_path / "one.png").shape[1]


def test_panels_stand_two_to_a_row(tmp_path: Path) -> None:
    columns = {name: [1.0, 2.0] for name in "abcde"}
    draw_parts(dict(list(columns.items())[:2]), tmp_path / "two.png", title="two")
    draw_parts(columns, tmp_path / "five.png", title="five")
    (height, width, _), two = imread(tmp_path / "five.png").shape, imread(tmp_path / "two.png").shape
    assert width == two[1] <= 1200
    assert height == pytest.approx(3 * two[0], abs=3)


def test_both_axes_of_the_learning_curve_are_named() -> None:
    figure = Figure()
    _draw_learning(figure.subplots(), [epoch(0), epoch(1)])
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
