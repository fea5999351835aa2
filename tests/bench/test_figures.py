from dataclasses import replace

import pytest

from dglx_dist.errors import ConfigError
from scripts.bench.figures import Spread, ratio_figures, spread, time_to_accuracy, variant_figures
from scripts.bench.records import Ratio
from tests.bench.measured import measurements, outcome, with_curves


def test_a_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert spread([7.0]) == Spread(median=7.0, low=7.0, high=7.0)


def test_a_variant_is_the_median_of_its_repetitions() -> None:
    random, metis = variant_figures(outcome(slow=(2.0, 2.2, 2.1, 2.4, 1.9)))
    assert (random.variant.name, metis.variant.name) == ("random", "metis")
    assert random.seconds == Spread(median=2.1, low=2.0, high=2.2)
    assert random.phases["wait_s"].median == pytest.approx(1.05)
    assert random.phases["fetch_s"].median == pytest.approx(1.05)
    assert (random.bytes_inside, random.bytes_outside) == (10_000_000, 40_000_000)
    assert random.repetitions == 5
    assert random.peak_bytes == 300_000_004


def test_the_cards_count_all_epochs_and_the_figure_is_of_one() -> None:
    random, metis = variant_figures(outcome())
    assert random.bytes_wire == 42_000_000
    assert random.wire_over_ledger == pytest.approx(1.05)
    assert metis.wire_over_ledger == pytest.approx(1.1)


def test_without_cards_or_bytes_there_is_no_wire_ratio() -> None:
    given = outcome()
    bare = replace(given, measurements=measurements("random", [1.0], wire=None))
    assert [one.wire_over_ledger for one in variant_figures(bare)] == [None]
    alone = replace(given, measurements=measurements("random", [1.0], outside=0, wire=0))
    assert [one.wire_over_ledger for one in variant_figures(alone)] == [None]


def test_a_ratio_is_the_quotient_of_medians_within_the_quartiles_of_pairs() -> None:
    # Pairs: 2, 3, 1, 2, 2; medians 4 and 2.
    (figures,) = ratio_figures(outcome(slow=(4.0, 6.0, 2.0, 4.0, 4.0), fast=(2.0, 2.0, 2.0, 2.0, 2.0)))
    assert figures.value == Spread(median=2.0, low=2.0, high=2.0)
    (wide,) = ratio_figures(outcome(slow=(1.0, 2.0, 3.0, 4.0, 5.0), fast=(1.0,) * 5))
    assert wide.value == Spread(median=3.0, low=2.0, high=4.0)


def test_a_drift_of_the_machine_cancels_in_pairs() -> None:
    drifting = (1.0, 2.0, 4.0, 8.0, 16.0)
    (figures,) = ratio_figures(outcome(slow=[2 * one for one in drifting], fast=drifting))
    assert figures.value == Spread(median=2.0, low=2.0, high=2.0)


@pytest.mark.parametrize(("quantity", "value"), [("bytes_outside", 4.0), ("samples_per_second", 0.5)])
def test_ratios_of_other_quantities(quantity: str, value: float) -> None:
    ratio = Ratio(name="r", over="random", under="metis", quantity=quantity)  # type: ignore[arg-type]
    (figures,) = ratio_figures(outcome(ratio=ratio))
    assert figures.value is not None
    assert figures.value.median == pytest.approx(value)


def test_a_ratio_without_a_measurement_or_over_nothing_has_no_value() -> None:
    given = outcome()
    half = replace(given, measurements=measurements("random", [1.0, 2.0]))
    assert [one.value for one in ratio_figures(half)] == [None]
    ratio = Ratio(name="r", over="random", under="metis", quantity="bytes_outside")
    silent = replace(
        outcome(ratio=ratio),
        measurements=(*measurements("random", [1.0]), *measurements("metis", [1.0], outside=0)),
    )
    assert [one.value for one in ratio_figures(silent)] == [None]


def test_a_target_that_one_repetition_did_not_reach_leaves_no_ratio() -> None:
    def reached(*epochs: int | None) -> list[Spread | None]:
        given = outcome(ratio=Ratio(name="R", over="random", under="metis", quantity="epochs_to_target"))
        told = iter((*epochs, *(10,) * 5))
        measured = tuple(replace(one, extra={"epochs_to_target": next(told)}) for one in given.measurements)
        return [one.value for one in ratio_figures(replace(given, measurements=measured))]

    assert reached(10, 11, 12, 13, 14) == [Spread(median=1.2, low=1.1, high=1.3)]
    # Of those that came there the median would be 1.15, though two of five took longer than was looked at.
    assert reached(10, 11, 12, None, None) == [None]


def test_a_ratio_of_an_unknown_variant_is_refused_by_name() -> None:
    wrong = Ratio(name="speed-up", over="random", under="mettis")
    with pytest.raises(ConfigError, match=r"mettis.*\['random', 'metis'\]"):
        ratio_figures(outcome(ratio=wrong))


def test_what_was_not_measured_has_no_figures() -> None:
    assert variant_figures(replace(outcome(), plan=None)) == ()
    assert ratio_figures(replace(outcome(), plan=None)) == ()
    assert variant_figures(replace(outcome(), measurements=())) == ()


def test_a_curve_without_epochs_is_no_measurement_of_time() -> None:
    given = outcome()
    curve = replace(given.measurements[0], repetition=5, epochs=(), accuracy=((1.0, 0.5),))
    with_curve = replace(given, measurements=(*given.measurements, curve))
    assert variant_figures(with_curve) == variant_figures(given)


def test_time_to_the_best_accuracy_that_all_reach() -> None:
    given = outcome()
    assert time_to_accuracy(given) is None
    slow, fast = (next(m for m in given.measurements if m.variant == name) for name in ("random", "metis"))
    curves = (
        replace(slow, accuracy=((2.0, 0.5), (4.0, 0.75), (6.0, 0.8))),
        replace(fast, accuracy=((1.0, float("nan")), (2.0, 0.7), (3.0, 0.75))),
    )
    times = time_to_accuracy(replace(given, measurements=curves))
    assert times is not None
    assert times.accuracy == 0.75
    assert times.seconds == {"random": 4.0, "metis": 3.0}
    assert time_to_accuracy(with_curves(given)) is not None
