from dataclasses import replace

import pytest

from scripts.bench.figures import ratio_figures
from scripts.bench.pages import Verdict, bounds_in_words, judge, judge_experiment
from scripts.bench.records import ExperimentPlan, Outcome, Ratio
from tests.bench.measured import EXPERIMENT, measurements, outcome, scaling


def ratio(low: float | None, high: float | None = None) -> Ratio:
    return Ratio(name="speed-up", over="random", under="metis", low=low, high=high)


def verdict_of(given: Outcome) -> Verdict:
    (figures,) = ratio_figures(given)
    return judge(figures)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.5, None, "reproduced"),
        (2.0, 2.0, "reproduced"),
        (2.01, None, "not reproduced"),
        (1.5, 1.99, "not reproduced"),
        (None, 2.5, "reproduced"),
        (None, None, "no bound"),
    ],
)
def test_twice_as_fast_against_bounds(low: float | None, high: float | None, word: str) -> None:
    assert verdict_of(outcome(ratio=ratio(low, high))).word == word


def test_a_range_that_holds_one_shows_no_difference() -> None:
    # Medians 1.2 and 1.0; the quartiles of the pairs are 0.9 and 1.3.
    noisy = outcome(slow=(0.8, 0.9, 1.2, 1.3, 1.4), fast=(1.0,) * 5, ratio=ratio(1.1))
    found = verdict_of(noisy)
    assert found.word == "not reproduced"
    assert "0.90 to 1.30" in found.why


def test_bounds_on_both_sides_of_one_claim_no_difference_and_may_hold_it() -> None:
    even = outcome(slow=(0.9, 0.95, 1.0, 1.05, 1.1), fast=(1.0,) * 5, ratio=ratio(0.9, 1.1))
    assert verdict_of(even).word == "reproduced"
    # From 1.00 on, as few epochs as the other are within the claim.
    assert verdict_of(outcome(slow=(1.0,) * 5, fast=(1.0,) * 5, ratio=ratio(1.0, 1.15))).word == "reproduced"
    assert verdict_of(outcome(slow=(1.0,) * 5, fast=(1.0,) * 5, ratio=ratio(1.0))).word == "not reproduced"


def test_a_loss_is_claimed_by_bounds_below_one() -> None:
    slower = outcome(slow=(0.7, 0.8, 0.9, 1.1, 1.2), fast=(1.0,) * 5, ratio=ratio(None, 0.95))
    assert verdict_of(slower).word == "not reproduced"
    clearly = outcome(slow=(0.7, 0.8, 0.9, 0.9, 0.9), fast=(1.0,) * 5, ratio=ratio(None, 0.95))
    assert verdict_of(clearly).word == "reproduced"


@pytest.mark.parametrize("low", [0.1, 1.5, 5.0, None])
def test_plain_loopback_never_reproduces(low: float | None) -> None:
    assert verdict_of(outcome(kind="loopback", ratio=ratio(low))).word == "links not limited"


def test_an_outcome_that_notes_no_network_is_not_judged() -> None:
    assert judge_experiment(EXPERIMENT, replace(outcome(), network={})).word == "links not limited"


def test_a_claim_at_a_phi_that_was_not_reached_is_not_judged() -> None:
    given = outcome(ratio=ratio(1.5))
    calibration = {"wanted": 0.65, "within_tolerance": False}
    network = {
        name: {**values, "phi": 0.8, "calibration": calibration} for name, values in given.network.items()
    }
    found = judge_experiment(EXPERIMENT, replace(given, network=network))
    assert found.word == "phi not matched"
    assert "phi is 0.80, not 0.65" in found.why
    reached = {
        name: {**one, "calibration": {"within_tolerance": True}} for name, one in given.network.items()
    }
    assert judge_experiment(EXPERIMENT, replace(given, network=reached)).word == "reproduced"


def test_one_server_has_no_link_to_limit() -> None:
    given = outcome()
    assert given.plan is not None
    alone = tuple(replace(one, shape=replace(one.shape, servers=1)) for one in given.plan.variants)
    assert (
        verdict_of(replace(given, plan=replace(given.plan, variants=alone), network={})).word == "reproduced"
    )


def test_what_is_simulated_says_so() -> None:
    found = verdict_of(outcome(simulated="compute is slept"))
    assert (found.word, found.simulated) == ("reproduced", True)
    assert str(found) == "reproduced (simulated)"
    experiment, result = scaling()
    assert str(judge_experiment(experiment, result)) == "reproduced (simulated)"


def test_a_ratio_that_could_not_be_formed_is_not_reproduced() -> None:
    half = replace(outcome(), measurements=measurements("random", [1.0]))
    found = judge_experiment(EXPERIMENT, half)
    assert found.word == "not reproduced"
    assert "no measurement" in found.why


def test_several_ratios_are_judged_together() -> None:
    given = outcome()
    assert isinstance(given.plan, ExperimentPlan)
    free, met, missed = ratio(None), ratio(1.5), replace(ratio(3.0), name="more")
    words = {
        (free,): "no bound",
        (free, met): "reproduced",
        (met, missed): "partly reproduced",
        (missed, missed): "not reproduced",
    }
    for ratios, word in words.items():
        found = judge_experiment(EXPERIMENT, replace(given, plan=replace(given.plan, ratios=ratios)))
        assert found.word == word, ratios
    both = judge_experiment(EXPERIMENT, replace(given, plan=replace(given.plan, ratios=(met, missed))))
    assert "more: 2.00 is below" in both.why


def test_absent_failed_and_not_measured_yet_give_the_reason() -> None:
    absent = Outcome(experiment="D1", status="absent", reason="not installed here: torch_geometric")
    assert judge_experiment(EXPERIMENT, absent) == Verdict(word="absent", why=absent.reason)
    failed = replace(outcome(), status="failed", reason="rank 1 died")
    assert judge_experiment(EXPERIMENT, failed) == Verdict(word="failed", why="rank 1 died")
    assert judge_experiment(EXPERIMENT, None).word == "absent"
    lacking = replace(EXPERIMENT, strategies=("teleport",), build=lambda _: ExperimentPlan(variants=()))
    found = judge_experiment(lacking, None)
    assert found.word == "absent"
    assert "teleport" in found.why
    ready = replace(lacking, strategies=("data_parallel",))
    assert judge_experiment(ready, None).word == "not measured yet"


def test_what_is_installed_here_does_not_decide_about_a_page() -> None:
    needy = replace(EXPERIMENT, needs=("no_such_module",), build=lambda _: ExperimentPlan(variants=()))
    assert judge_experiment(needy, None).word == "not measured yet"


def test_bounds_are_written_as_people_say_them() -> None:
    assert bounds_in_words(1.5, None) == "at least 1.5"
    assert bounds_in_words(None, 1.1) == "at most 1.1"
    assert bounds_in_words(0.9, 1.1) == "between 0.9 and 1.1"
    assert bounds_in_words(None, None) == "without bounds"
