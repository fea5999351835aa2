"""Circumstances, verdicts, sections and the page of a folder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.errors import DglxError, StorageError
from scripts.bench import results
from scripts.bench.figures import ratio_figures, variant_figures
from scripts.bench.pages import (
    Verdict,
    accuracy_in_words,
    bounds_in_words,
    circumstances,
    facts_in_lines,
    flat,
    judge,
    judge_experiment,
    not_reproduced,
    overview_row,
    render,
    section,
    write_page,
)
from scripts.bench.records import ExperimentPlan, Outcome, Ratio
from scripts.bench.suites import find
from tests.bench.helpers import EXPERIMENT, measurements, outcome, scaling, with_curves


def test_values_stand_in_one_line() -> None:
    values = {
        "memory_bytes": 25_300_000_000,
        "cores": 2,
        "share": 0.12345,
        "missed": {},
        "versions": {"a": "1"},
    }
    assert flat(values) == "memory 25.3 GB; cores 2; share 0.1235; missed none; versions (a 1)"
    assert flat({"held": [True, None]}) == "held [true, none]"


def test_facts_are_a_list_of_at_most_two_levels() -> None:
    facts = {"cut": {"random": 0.75}, "parts": {"metis": {"halo": [1, 2]}}, "edges": 5}
    assert facts_in_lines(facts).splitlines() == [
        "- cut: random 0.75",
        "- parts:",
        "  - metis: halo [1, 2]",
        "- edges: 5",
    ]


def test_servers_that_are_alike_are_described_once() -> None:
    lines, command = circumstances(outcome())
    assert [line for line in lines.splitlines() if "Servers" in line] == [
        "- Servers (random, metis): kind namespaces."
    ]
    assert command.startswith("    python scripts/bench")


def test_a_calibration_is_told_once_and_says_what_it_missed() -> None:
    note = {
        "rate": "38mbit", "baseline": "random", "phi": 0.64, "wanted": 0.65, "within_tolerance": True,
        "seconds_at_rate": 0.209, "seconds_free": 0.0762,
    }  # fmt: skip
    given = outcome()
    network = {name: {**values, "calibration": note} for name, values in given.network.items()}
    text = circumstances(replace(given, network=network))[0]
    assert text.count("Matched phi") == 1
    assert (
        "at 38mbit the network costs random 0.64 of its time (0.209 s per epoch, 0.0762 s with free" in text
    )
    assert "not reached" not in text
    # Medians of random: 2.1 s. The machine was slower by then, and the share of the network with it another.
    assert "by the median of the repetitions 0.96" in text


def test_nothing_known_is_nothing_said() -> None:
    bare = replace(outcome(), machine={}, network={}, date="", command="")
    assert circumstances(bare) == []


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


def tables(page: str) -> list[list[list[str]]]:
    """Cells of all tables of a page, heads included, the lines under heads left out."""
    found: list[list[list[str]]] = []
    inside = False
    for line in page.splitlines():
        if line.startswith("| "):
            found = found if inside else [*found, []]
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        inside = line.startswith("|")
    return found


def test_numbers_in_the_table_are_the_medians() -> None:
    given = outcome()
    _, variants, ratios = tables(render([(EXPERIMENT, given)]))
    head, random, metis = variants
    cells = dict(zip(head, random, strict=True))
    figures = variant_figures(given)[0]
    assert cells["variant"] == "random"
    assert cells["link between servers"] == "2 servers of 1 rank, 96mbit, phi 0.65"
    assert cells["s per epoch (IQR)"] == "2.100 (2.000 to 2.200)"
    for column, phase in {"wait": "wait_s", "compute": "compute_s", "fetch (threads)": "fetch_s"}.items():
        assert float(cells[column]) == pytest.approx(figures.phases[phase].median, abs=5e-4)
    assert (cells["MB inside"], cells["MB outside"]) == ("10.0", "40.0")
    assert cells["wire MB (x ledger)"] == "42.0 (1.05)"
    assert cells["peak of a rank"] == "300 MB"
    assert dict(zip(head, metis, strict=True))["wire MB (x ledger)"] == "11.0 (1.10)"
    assert ratios[1] == [
        "speed-up",
        "seconds per epoch: random / metis",
        "1.90",
        "2.00 (2.00 to 2.00)",
        "at least 1.5",
        "reproduced: 2.00 is at least 1.5",
    ]


def test_the_first_table_has_a_row_for_every_experiment() -> None:
    absent = Outcome(experiment="P1", status="absent", reason="this release has no strategy push_pull")
    page = render([(EXPERIMENT, outcome()), (find("P1"), absent), scaling()])
    overview = tables(page)[0]
    assert [row[0] for row in overview] == ["id", "D1", "P1", "D3"]
    assert overview[1][4:] == ["speed-up: 2.00 (2.00 to 2.00)", "reproduced"]
    assert overview[2][4:] == ["-", "absent"]
    assert overview[3][5] == "reproduced (simulated)"


def test_what_is_not_reproduced_is_said_in_words() -> None:
    absent = Outcome(experiment="P1", status="absent", reason="this release has no strategy push_pull")
    slow = replace(EXPERIMENT, id="D2")
    page = render([(EXPERIMENT, outcome()), (slow, outcome(fast=(1.9,) * 5)), (find("P1"), absent)])
    said = re.search(r"## What is not reproduced.*?\n\n(.*?)\n\n", page, flags=re.DOTALL)
    assert said is not None
    lines = said[1].splitlines()
    assert lines[0] == (
        "- **D2**, random or metis: not reproduced; 1.11 is below the least that counts as reproduced, 1.5."
    )
    assert lines[1].startswith("- **P1**")
    assert "push_pull" in lines[1]
    assert len(lines) == 2


def test_loopback_is_said_and_nothing_is_called_reproduced() -> None:
    page = render([(EXPERIMENT, outcome(kind="loopback"))])
    assert tables(page)[0][1][5] == "links not limited"
    assert "not limited (plain loopback)" in tables(page)[1][1][1]
    assert "needs root; start it with sudo" in page
    assert "reproduced:" not in page


def test_every_time_of_a_simulated_variant_is_marked() -> None:
    experiment, given = scaling()
    page = render([(experiment, given)])
    _, variants, ratios = tables(page)
    for row in variants[1:]:
        assert row[0].endswith("(simulated)")
        assert all(cell.endswith("simulated") for cell in row[2:8]), row
    assert all(row[3].endswith("simulated") and "(simulated)" in row[5] for row in ratios[1:])
    assert "Simulated in 4 servers: compute is slept." in page


def test_nothing_is_marked_simulated_that_is_not() -> None:
    assert [
        row for table in tables(render([(EXPERIMENT, outcome())])) for row in table if "simulated" in row
    ] == []


def test_a_failed_experiment_shows_what_was_measured_before() -> None:
    page = render([(EXPERIMENT, replace(outcome(), status="failed", reason="rank 1 did not answer"))])
    assert "**failed**: rank 1 did not answer" in page
    assert "2.100 (2.000 to 2.200)" in page


def test_a_quick_look_is_labelled() -> None:
    page = render([(EXPERIMENT, replace(outcome(), label="quick look, fewer than 5 repetitions"))])
    assert tables(page)[0][1][5] == "reproduced; quick look, fewer than 5 repetitions"
    assert "- Quick look, fewer than 5 repetitions." in page
    assert "supports its claim, D1 by a quick look only: repeat it before you rely on it." in page
    assert "supports its claim." in render([(EXPERIMENT, outcome())])


def test_circumstances_command_facts_and_curves_are_there() -> None:
    given = with_curves(outcome())
    note = {
        "rate": "96mbit", "baseline": "random", "phi": 0.58, "wanted": 0.65, "within_tolerance": False,
        "seconds_at_rate": 2.5, "seconds_free": 1.05,
    }  # fmt: skip
    network = {name: {**values, "calibration": note} for name, values in given.network.items()}
    page = render([(EXPERIMENT, replace(given, network=network))], {"D1": ["D1-phases.png"]})
    assert "    python scripts/bench --suite papers --only D1 --out results" in page
    assert "cpu A processor; cores 2; versions (torch 2.13.0)" in page
    assert "- edge cut: random 0.75, metis 0.125\n" in page
    assert "at 96mbit the network costs random 0.58 of its time" in page
    assert "0.65 was wanted and not reached" in page
    assert "Time to a validation accuracy of 87.5 %, which all reach: random 3 s, metis 3 s." in page
    assert "![D1](D1-phases.png)" in page
    assert "2026-11-21" in page


def test_a_folder_of_results_becomes_its_readme(tmp_path: Path) -> None:
    results.write(tmp_path, Outcome(experiment="Y1", status="absent", reason="no lambda"))
    results.write(tmp_path, Outcome(experiment="P1", status="absent", reason="no push_pull"))
    (tmp_path / "P1-phases.png").write_bytes(b"")
    page = write_page(tmp_path)
    assert page == tmp_path / "README.md"
    text = page.read_text()
    assert text.index("## P1:") < text.index("## Y1:")
    assert "![P1](P1-phases.png)" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "P1-phases.png", "P1.json", "README.md", "Y1.json",
    ]  # fmt: skip


def test_bad_folders_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        write_page(tmp_path / "nowhere")
    results.write(tmp_path, replace(outcome(), experiment="Z9"))
    with pytest.raises(DglxError, match="Z9"):
        write_page(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_page_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()
    (tmp_path / "README.md" / "in the way").write_text("")
    results.write(tmp_path, Outcome(experiment="P1", status="absent", reason="no push_pull"))
    with pytest.raises(StorageError, match=r"README\.md"):
        write_page(tmp_path)
