from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from scripts.bench import plots, results
from scripts.bench.figures import variant_figures
from scripts.bench.records import Experiment, Outcome
from tests.bench.helpers import EXPERIMENT, outcome, scaling, with_curves


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_experiment_gets_phases_and_bytes(tmp_path: Path) -> None:
    drawn = plots.draw_experiment(EXPERIMENT, outcome(), tmp_path)
    assert [path.name for path in drawn] == ["D1-phases.png", "D1-bytes.png"]
    assert names(tmp_path) == ["D1-bytes.png", "D1-phases.png"]
    for path in drawn:
        picture = imread(path)
        assert picture.shape[1] > picture.shape[0] > 400
        assert picture[..., :3].std() > 0.05


def test_curves_and_scaling_are_drawn_where_there_are_any(tmp_path: Path) -> None:
    drawn = plots.draw_experiment(EXPERIMENT, with_curves(outcome()), tmp_path)
    assert [path.name for path in drawn][2:] == ["D1-accuracy.png"]
    drawn = plots.draw_experiment(*scaling(), tmp_path)
    assert [path.name for path in drawn][2:] == ["D3-scaling.png"]


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    absent = Outcome(experiment="D1", status="absent", reason="no strategy")
    assert plots.draw_experiment(EXPERIMENT, absent, tmp_path) == ()
    assert plots.draw_experiment(EXPERIMENT, replace(outcome(), measurements=()), tmp_path) == ()
    assert names(tmp_path) == []


def test_a_folder_of_results_gets_all_pictures(tmp_path: Path) -> None:
    results.write(tmp_path, replace(outcome(), experiment="P1"))
    results.write(tmp_path, Outcome(experiment="P2", status="absent", reason="no push_pull"))
    assert [path.name for path in plots.draw(tmp_path)] == ["P1-phases.png", "P1-bytes.png"]
    assert names(tmp_path) == ["P1-bytes.png", "P1-phases.png", "P1.json", "P2.json"]


def titles(experiment: Experiment, given: Outcome) -> tuple[str, str]:
    return plots._titles(experiment, given, variant_figures(given))


def test_titles_say_what_is_simulated_and_how_the_links_were() -> None:
    assert titles(EXPERIMENT, outcome()) == ("D1: random or metis", "links between servers: 96mbit, phi 0.65")
    assert titles(*scaling())[0].endswith("(simulated)")
    assert titles(EXPERIMENT, replace(outcome(), label="quick look"))[0].endswith("[quick look]")
    loopback = titles(EXPERIMENT, outcome(kind="loopback"))[1]
    assert loopback == "links between servers: not limited (plain loopback)"


def test_links_that_differ_are_named_with_their_variants() -> None:
    given = outcome()
    network = {**given.network, "metis": {"kind": "namespaces", "external": "1gbit"}}
    subtitle = titles(EXPERIMENT, replace(given, network=network))[1]
    assert subtitle == "links between servers: 96mbit, phi 0.65 (random); 1gbit (metis)"


def test_bars_are_the_medians_of_the_phases() -> None:
    axes = Figure().subplots()
    figures = variant_figures(outcome())
    plots._draw_phases(axes, figures)
    bars = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers[:5]}
    assert bars["compute"] == pytest.approx([one.phases["compute_s"].median for one in figures])
    assert bars["fetch (threads)"] == pytest.approx([one.phases["fetch_s"].median for one in figures])
    # What stands on top of the others ends where the epoch does: nothing is stacked that runs beside it.
    assert [bar.get_y() + bar.get_height() for bar in axes.containers[2]] == pytest.approx(
        [one.seconds.median for one in figures]
    )
    assert [text.get_text() for text in axes.texts] == ["2.1 s", "1.05 s"]


def test_simulated_bars_are_named_so() -> None:
    axes = Figure().subplots()
    plots._draw_phases(axes, variant_figures(outcome(simulated="compute is slept")))
    assert [text.get_text() for text in axes.texts] == ["2.1 s sim.", "1.05 s sim."]
    assert "simulated" in axes.get_xticklabels()[0].get_text()


def test_bytes_are_stacked_and_the_cards_beside_them() -> None:
    axes = Figure().subplots()
    plots._draw_bytes(axes, variant_figures(outcome()))
    bars = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert bars["payload between servers (ledger)"] == [40, 10]
    assert bars["payload inside a server (ledger)"] == [10, 10]
    assert bars["between servers, by the cards"] == [42, 11]


def test_scaling_is_beside_the_ideal() -> None:
    axes = Figure().subplots()
    plots._draw_scaling(axes, variant_figures(scaling()[1]))
    ideal, measured = (line.get_ydata() for line in axes.get_lines()[:2])
    assert list(ideal) == pytest.approx([1000, 2000, 4000])
    assert list(measured) == pytest.approx([1000, 1900, 3200])
    assert [text.get_text() for text in axes.texts] == ["100%", "95%", "80%"]


def test_two_servers_without_a_throughput_ratio_are_no_scaling() -> None:
    assert not plots.is_scaling(outcome())
    assert plots.is_scaling(scaling()[1])
