import pytest

from dglx_dist.errors import UnknownNameError
from scripts.bench import suites
from tests.bench.outcomes import experiment_of, plan_of

PLAN = plan_of("a", "b")


@pytest.mark.parametrize("name", suites.EXPERIMENTS)
def test_every_experiment_says_what_is_claimed_predicted_and_done(name: str) -> None:
    found = suites.find(name.lower())
    assert found.id == name
    assert found.suites
    for text in (
        found.title,
        found.claim.paper,
        found.claim.says,
        found.claim.setting,
        found.prediction,
        found.how,
    ):
        assert text.strip()


def test_a_suite_has_those_that_name_it() -> None:
    for name in ("quick", "papers", "peers"):
        assert {one.id for one in suites.suite(name)} == {
            one.id for one in suites.everything() if name in one.suites
        }


def test_papers_are_all_that_is_planned_of_the_four_systems_and_the_choice() -> None:
    """P3 is a system here, and no experiment has its number."""
    planned = {"D1", "D2", "P1", "P2", "P4", "P5", *(f"G{i}" for i in range(1, 6)), "A1"}
    planned |= {f"Y{i}" for i in range(1, 6)}
    found = {one.id for one in suites.suite("papers")}
    assert planned <= found
    assert not [one.id for one in suites.suite("papers") if suites.why_absent(one)]


def test_wrong_names_get_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'quick'"):
        suites.suite("quik")
    with pytest.raises(UnknownNameError, match=r"no experiment 'P11'; did you mean 'P1'"):
        suites.find("P11")


def test_an_experiment_is_absent_without_its_strategies_its_modules_or_its_code() -> None:
    assert suites.why_absent(experiment_of(PLAN)) == ""
    assert suites.why_absent(experiment_of(PLAN, needs=("json",))) == ""
    lacking = experiment_of(PLAN, strategies=("data_parallel", "never_written"))
    assert suites.why_absent(lacking) == "this release has no strategy never_written"
    assert "no_such_module" in suites.why_absent(experiment_of(PLAN, needs=("json", "no_such_module")))
    assert "not written" in suites.why_absent(experiment_of(None))
