from dataclasses import replace

from scripts.bench.pages import accuracy_in_words, not_reproduced, overview_row, section
from tests.bench.measured import EXPERIMENT, outcome, scaling, with_curves


def test_an_experiment_without_result_still_has_its_row_and_section() -> None:
    assert overview_row(EXPERIMENT, None) == (
        "D1", "metis is 2.14x faster", "A paper: 4 machines", "1.5 to 2.5x", "-", "absent",
    )  # fmt: skip
    text = section(replace(EXPERIMENT, note="beware"), None)
    assert text.startswith("## D1: random or metis\n\n- Claim: metis is 2.14x faster (A paper).\n")
    assert text.endswith("- Note: beware")


def test_what_holds_in_simulation_only_is_not_called_reproduced_alone() -> None:
    assert not_reproduced([(EXPERIMENT, outcome())]) == []
    (sentence,) = not_reproduced([scaling()])
    assert sentence.startswith("**D3**, weak scaling on 1, 2 and 4 servers: reproduced (simulated);")


def test_seconds_to_an_accuracy_are_marked_where_simulated() -> None:
    assert accuracy_in_words(outcome()) == ""
    assert accuracy_in_words(with_curves(outcome(simulated="slept"))).endswith(
        "random 3 s simulated, metis 3 s simulated."
    )
